"""A plan on one screen: what each rank gets, what it should take, and what other plans would."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpipipe.planner.alternatives import Alternative
from mpipipe.planner.copies import (
    block_sums_bytes,
    legal_copies,
    replicas_text,
    shape_of,
    shape_text,
    stages_in,
)
from mpipipe.planner.joint import Joint, Tried, least_s
from mpipipe.planner.noise import WORTH, Noise
from mpipipe.planner.prediction import FOR_MEMORY, LIKE
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.sizes import counted, joined, size_text
from mpipipe.report.progress import MIB, number
from mpipipe.report.table import text_table
from mpipipe.values import Costs, Plan, Timeline

if TYPE_CHECKING:  # it imports scipy, which no run needs
    from mpipipe.planner.whole import Order

_WIDTH = 120  # of a table
_MOST_LISTED = 8  # numbers
_MOST_CUTS = 3  # in a line
_MOST_ROWS = 24  # of stages; more do not fit on a screen
_HEADERS = ("stage", "from", "groups", "parameters", "F+B ms", "step ms", "send MiB")
_NAMES = (0, 1)  # columns of text: stages, and the group that is their first
_GIB_FROM = 10 << 30  # bytes, from where on memory is said in GiB
_LIKE = 0.005  # relative: stages whose numbers differ by less are shown as one row


def headline(plan: Plan) -> str:
    """One line: what was decided, and what it should take."""
    cuts, p = plan.layout.cuts, plan.prediction
    unit, more = _unit(max(p.peak_bytes)), len(cuts) - _MOST_CUTS
    before = ", ".join([*cuts[:_MOST_CUTS], *([f"{more} more"] if more > 0 else [])])
    stages = f"{plan.layout.n_stages} stages, cut before {before}" if cuts else "one stage"
    return (
        f"plan: {decided(plan)}, {stages}; predicted step {_seconds(p.step_s)}, memory "
        f"{_memory(max(p.peak_bytes), unit)} {unit} per rank at most"
    )


def describe(
    plan: Plan, costs: Costs, seconds: float | None = None, width: int = 100,
    timed: tuple[int, int] | None = None,
) -> str:  # fmt: skip
    """`seconds`: what measuring and planning took; None = the costs are those of steps. timed: how many
    distinct groups were timed now, the others in earlier runs, and how many there are. width: of the table,
    in which names are shortened."""
    cuts = cut_indices(plan.layout, costs.names)
    starts = [0, *cuts]
    rows, unit = [], _unit(max(plan.prediction.peak_bytes))
    for s, cost in enumerate(stages_in(costs, plan.layout, cuts)[: plan.layout.n_stages]):
        end = [*cuts, len(costs.groups)][s]
        ms = cost.seconds * 1e3
        send = (cost.act_bytes + cost.grad_bytes) / MIB
        memory = _memory(max(plan.prediction.peak_bytes[rank] for rank in plan.layout.ranks[s]), unit)
        row = (f"{ms:.2f}", f"{send:.2f}", memory)
        rows.append((f"{s}", costs.names[starts[s]], f"{end - starts[s]}", *row))
    headers = ("stage", "from", "groups", "F+B ms", "send MiB", f"memory {unit}")
    p = plan.prediction
    source: str = costs.source
    took = "by steps" if seconds is None else f"in {seconds:.1f} s"
    if timed is not None and timed[0] < timed[1]:
        source = f"cached, {timed[1] - timed[0]} of {timed[1]} hold,"
    return (
        f"plan ({decided(plan)}, costs {source} {took}, spread {costs.spread:.0%}):\n"
        f"{text_table(headers, rows, width, _NAMES)}\n{_on_ranks(plan)}{_recomputed(plan, costs)}"
        f"predicted step {_seconds(p.step_s)}, bubble {p.bubble:.1%}; no cut is faster than "
        f"{_seconds(p.lower_bound_s)} (gap {p.gap:.1%})"
    )


def _on_ranks(plan: Plan) -> str:
    """A line, where stages are not on the ranks of their numbers, and one for each copy of the pipeline; of
    unlike numbers of copies one for all of them."""
    copies = plan.layout.copies
    if not plan.layout.is_even:
        of_stages = (f"{stage}: {joined(on)}" for stage, on in enumerate(plan.layout.ranks))
        return f"on ranks, by stage: {'; '.join(of_stages)}\n"
    if len(copies) == 1 and copies[0] == tuple(range(len(copies[0]))):
        return ""
    shown = copies if len(copies) <= _MOST_LISTED else copies[: _MOST_LISTED - 1]
    names = [f"replica {i} " if len(copies) > 1 else "" for i in range(len(shown))]
    lines = [
        f"{name}on ranks, in the order of the stages: {joined(order)}\n"
        for name, order in zip(names, shown, strict=True)
    ]
    more = [f"({len(copies) - len(shown)} replicas more)\n"] if len(shown) < len(copies) else []
    return "".join([*lines, *more])


def decided(plan: Plan) -> str:
    """Schedule, micro-batches, and replicas where there are some."""
    layout = plan.layout
    replicas = f", {replicas_text(shape_of(layout))}" if layout.n_copies > 1 else ""
    return f"{layout.schedule}, {plan.numerics.split}{replicas}"


def _recomputed(plan: Plan, costs: Costs) -> str:
    """A line, where stages make something again: which, and what of F+B that is."""
    layout, cuts = plan.layout, cut_indices(plan.layout, costs.names)
    without, found = stages_in(costs, replace(layout, recompute=()), cuts), stages_in(costs, layout, cuts)
    price_s = [b.seconds - a.seconds for a, b in zip(without, found, strict=True)]
    told = []
    for mode, run in itertools.groupby(range(layout.n_stages), layout.modes.__getitem__):
        stages = list(run)
        if mode != "none":
            prices = [price_s[s] for s in stages]
            ms = _range([number(x * 1e3) for x in (min(prices), max(prices))])
            told.append(f"{_range([str(s) for s in stages])} {mode} ({ms} ms)")
    return f"recomputed in backward, part of F+B: stages {', '.join(told)}\n" if told else ""


@dataclass(frozen=True)
class Row:
    """One stage in the table of `outlook`."""

    stage: int
    start: str  # its first group
    groups: int
    parameters: int
    compute_s: float  # forward and backward of a micro-batch
    step_s: float  # its update
    sent_bytes: int  # per micro-batch
    memory_bytes: int
    idle: float

    def like(self, other: Row) -> bool:
        """Nobody would look at both."""
        mine, others = ((r.groups, r.parameters, r.compute_s, r.step_s, r.sent_bytes) for r in (self, other))
        return all(abs(a - b) <= _LIKE * max(abs(a), abs(b)) for a, b in zip(mine, others, strict=True))


def stage_rows(plan: Plan, costs: Costs, timeline: Timeline, parameters: Sequence[int]) -> list[Row]:
    """parameters: elements, by stage."""
    cuts = cut_indices(plan.layout, costs.names)
    edges, span = (0, *cuts, len(costs.groups)), timeline.makespan_s
    stages = stages_in(costs, plan.layout, cuts)[: plan.layout.n_stages]
    return [
        Row(
            stage=s,
            start=costs.names[edges[s]],
            groups=edges[s + 1] - edges[s],
            parameters=parameters[s],
            compute_s=cost.seconds,
            step_s=cost.step_s,
            sent_bytes=cost.act_bytes + cost.grad_bytes,
            memory_bytes=max(plan.prediction.peak_bytes[rank] for rank in on),
            idle=1.0 - sum(map(timeline.busy_s, on)) / len(on) / span if span else 0.0,
        )
        for s, (cost, on) in enumerate(zip(stages, plan.layout.ranks, strict=True))
    ]


def outlook(plan: Plan, rows: Sequence[Row], per_step: float, unit: str, width: int = _WIDTH) -> str:
    """The cut, and what a step should take. per_step: tokens or samples (`unit`) of a step."""
    folded, left_out = _folded(rows)
    p = plan.prediction
    memory = _unit(max(p.peak_bytes))
    table = text_table((*_HEADERS, f"memory {memory}", "idle"), _with_gaps(folded, memory), width, _NAMES)
    fullest = max(range(len(p.peak_bytes)), key=p.peak_bytes.__getitem__)
    recomputed = "" if plan.costs is None else _recomputed(plan, plan.costs)
    more = f"({left_out} stages more, between those shown; -o writes all)\n" if left_out else ""
    return (
        f"{table}\n{more}{_on_ranks(plan)}{recomputed}\n"
        f"step {_seconds(p.step_s)}: {number(per_step / p.step_s)} {unit}/s; {decided(plan)}, "
        f"bubble {p.bubble:.1%}\n"
        f"no cut has a shorter step than {_seconds(p.lower_bound_s)} with these costs (gap {p.gap:.1%})\n"
        f"most memory: rank {fullest}, {_memory(p.peak_bytes[fullest], memory)} {memory}"
    )


def beside_any_order(found: Order | None) -> list[str]:
    """What cuts in the order of the model lose; no line where that is not known."""
    if found is None:
        return []
    planned, least = _seconds(found.planned_s), _seconds(found.bound_s)
    return [
        f"most loaded stage, its messages over the fastest link: {planned} per micro-batch; with the groups "
        f"in any order that the graph allows, at least {least} (gap {found.gap:.1%})"
    ]


def chosen(joint: Joint, sizes: Sequence[int] = (), seconds: float = 0.0) -> str:
    """One line: what the search has tried, what it took, and what the next best loses. sizes: samples of the
    micro-batches whose costs were taken for it, in so many seconds; none where their number was given."""
    best = joint.best
    others = [t for t in joint.tried if t.bound_s is not None and t is not best and not t.skipped]
    tried = ", ".join(dict.fromkeys(t.schedule for t in joint.tried if not t.skipped))
    skipped = ", ".join(dict.fromkeys(t.schedule for t in joint.tried if t.skipped))
    copies = list(dict.fromkeys(shape_text(t.copies) for t in joint.tried))
    if len(copies) > 1:
        tried += f" in {', '.join(copies)} replicas"
    if sizes:
        others = [t for t in others if t.micro_batches != best.micro_batches]
        counts = sorted({t.micro_batches for t in joint.tried})
        some = joined(counts) if len(counts) < _MOST_LISTED else f"{len(counts)} numbers of"
        tried += f" with {some} micro-batches (costs of {joined(sizes)} samples in {seconds:.1f} s)"
    line, end = f"tried {tried}; took {_called(best)}", f"; not tried: {skipped}" if skipped else ""
    if joint.late:
        end += f"; the time was used: a step of {_seconds(joint.bound_s)} is not ruled out"
    if not others:
        return f"{line}; nothing else fits{end}"
    second = min(others, key=least_s)
    loss = least_s(second) / best.step_s - 1.0
    if second.made and loss < 0:  # see `mpipipe.planner.joint`
        within = LIKE if best.step_s <= LIKE * second.step_s else FOR_MEMORY
        end = f", as good within {within - 1.0:.0%}: the simpler one or that with less memory is taken{end}"
    return f"{line}; next best {_called(second)}: {'' if second.made else 'at least '}{loss:+.1%}{end}"


def blocks_text(why: str, plan: Plan, costs: Costs) -> str:
    """One line: how many blocks `pipeline.blocks: auto` has taken, `why`, and what they take; none where that
    was not asked."""
    if not why:
        return ""
    n, cuts = plan.numerics, cut_indices(plan.layout, costs.names)
    replicas = counted(legal_copies(n)[-1], "exact replica")
    taken = size_text(block_sums_bytes(costs, plan.layout, cuts))
    return f"blocks: {n.blocks}, {why}; {replicas} at most; sums of blocks take {taken} on the fullest rank"


def _called(t: Tried) -> str:
    replicas = f" in {replicas_text(t.copies)}" if t.copies != 1 else ""
    return f"{t.schedule} with {t.in_words}{replicas}"


def steadiness(found: Noise | None) -> list[str]:
    """How the step and the cut move where the costs are a little wrong; no line where that is not known."""
    if found is None:
        return []
    low, high = map(_seconds, found.step_s)
    each, most = f"{found.spread:.0%}", f"{found.widest:.0%}"
    off = each if each == most else f"about {each} in the middle, {most} at most"
    why = "assumed" if found.assumed else "as their timings spread"
    lines = [f"costs that are each off by up to {off}, {why}: step {low} to {high} in {found.draws} draws"]
    if found.cuts:
        gain = f"; the best of them would gain {found.gain:.1%} at most" if found.gain > WORTH else ""
        lines.append(
            f"the cut holds in {found.held} of {found.draws} draws, against {found.cuts} others{gain}"
        )
    return lines


def against(found: Sequence[Alternative]) -> str:
    """Why not another plan: a row each. time: per sample, beside that of the plan."""
    rows = []
    for a in found:
        step = "-" if a.step_s is None else _seconds(a.step_s)
        loss = "-" if a.loss is None else f"{a.loss:+.1%}" if abs(a.loss) >= 0.0005 else "0.0%"
        rows.append((a.name, step, loss, a.why))
    return text_table(("instead", "step", "time", "why"), rows, _WIDTH, (0, 3), wrapped=(3,))


def _folded(rows: Sequence[Row]) -> tuple[list[list[Row]], int]:
    """Runs of like stages; of too many, the first, the last, the slowest and the fullest; how many are
    left out."""
    runs: list[list[Row]] = []
    for row in rows:
        if runs and runs[-1][0].like(row):
            runs[-1].append(row)
        else:
            runs.append([row])
    if len(runs) <= _MOST_ROWS:
        return runs, 0
    half = _MOST_ROWS // 2 - 1
    slowest = max(range(len(runs)), key=lambda i: runs[i][0].compute_s)
    fullest = max(range(len(runs)), key=lambda i: runs[i][0].memory_bytes)
    kept = sorted({*range(half), slowest, fullest, *range(len(runs) - half, len(runs))})
    return [runs[i] for i in kept], len(rows) - sum(len(runs[i]) for i in kept)


def _with_gaps(runs: Sequence[Sequence[Row]], memory: str) -> list[tuple[str, ...]]:
    """The cells of each, and a row of dots where stages are left out. memory: its unit."""
    cells, expected = [], 0
    for run in runs:
        if run[0].stage != expected:
            cells.append(("...",) * (len(_HEADERS) + 2))
        cells.append(_cells(run, memory))
        expected = run[-1].stage + 1
    return cells


def _unit(most_bytes: int) -> str:
    """In which all memory of a table is said."""
    return "GiB" if most_bytes >= _GIB_FROM else "MiB"


def _memory(nbytes: int, unit: str) -> str:
    return f"{nbytes / 1024 / MIB:.1f}" if unit == "GiB" else f"{nbytes / MIB:.0f}"


def _cells(run: Sequence[Row], memory: str) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    stages = f"{first.stage}" if first is last else f"{first.stage}..{last.stage}"
    return (
        stages, first.start, f"{first.groups}", _count(first.parameters), number(first.compute_s * 1e3),
        number(first.step_s * 1e3), number(first.sent_bytes / MIB),
        _range([_memory(row.memory_bytes, memory) for row in run]),
        _range([f"{row.idle:.1%}" for row in run]),
    )  # fmt: skip


def _range(texts: Sequence[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}..{texts[-1]}"


def _count(n: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)


def _seconds(s: float) -> str:
    return f"{s:.4g} s" if s >= 1.0 else f"{s * 1e3:.4g} ms"
