"""The plan: cuts, schedule, program and what they are predicted to cost, by one path.

    Costs -> partition -> Layout -> program_for (schedule, check, lower, prove) -> predict -> Plan

The search starts from the exact minimum of the bottleneck and goes on by simulated step time; that
the result is the shortest step is not claimed, `gap` bounds what is missing.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from mpipipe.errors import PlanError
from mpipipe.planner.bounds import step_bound_s
from mpipipe.planner.lower import lower
from mpipipe.planner.partition import partition
from mpipipe.planner.prove import prove
from mpipipe.planner.schedules import SCHEDULES, check, forward_only
from mpipipe.planner.simulate import message_bytes, simulate
from mpipipe.planner.sizes import size_text
from mpipipe.planner.stages import bounds, stage_costs, stage_ties
from mpipipe.values import Cluster, Costs, Int64, Layout, Numerics, Plan, Prediction, Program, Tie, Timeline

REFINE_WORK = 512  # stages x micro-batches up to which neighbouring cuts are simulated
Cuts = tuple[int, ...]


def make_plan(
    costs: Costs,
    numerics: Numerics,
    schedule: str,
    receive_window: int,
    group_names: Sequence[str],
    n_ranks: int,
) -> tuple[Plan, Program]:
    """Plan `n_ranks` stages, one per rank. Raises PlanError if no cut fits (see `partition`)."""
    program: Program | None = None
    starts = [
        partition(c, numerics.micro_batches, schedule, n_ranks, receive_window, numerics.tied).cuts
        for c in (costs, _with_updates(costs, numerics.micro_batches))
    ]
    bound_s = step_bound_s(
        costs, numerics.micro_batches, n_ranks, norm_seconds(costs.cluster, n_ranks)
    )  # of all cuts

    def plan(cuts: Cuts) -> Plan:
        nonlocal program
        layout = Layout(
            cuts=tuple(group_names[cut] for cut in cuts),
            ranks=tuple((rank,) for rank in range(n_ranks)),
            schedule=schedule,
            receive_window=receive_window,
        )
        if program is None or costs.ties:  # the order depends on the cuts through tied parameters alone
            program = program_for(layout, numerics, costs.ties, group_names)
        return Plan(numerics, layout, predict(costs, layout, program, group_names, bound_s)[0], costs)

    best = _refine(plan, starts, len(group_names), n_ranks * numerics.micro_batches)
    if program is None or costs.ties:
        program = program_for(best.layout, numerics, costs.ties, group_names)
    return best, program


def plan_of(costs: Costs, numerics: Numerics, layout: Layout, group_names: Sequence[str]) -> Plan:
    """The plan with a layout that is given. Raises PlanError and DeadlockError as `program_for` and
    `predict` do."""
    program = program_for(layout, numerics, costs.ties, group_names)
    return Plan(numerics, layout, predict(costs, layout, program, group_names)[0], costs)


def _with_updates(costs: Costs, n_micro: int) -> Costs:
    """Costs whose backward carries its share of the step's one update: the bottleneck of these
    balances m * (F + B) + STEP."""
    rate = costs.step_s_per_byte
    updates = [(g, (rate * g.param_bytes + g.update_s) / n_micro) for g in costs.groups]
    groups = [replace(g, bwd_weight_s=g.bwd_weight_s + share_s) for g, share_s in updates]
    return replace(costs, groups=tuple(groups))


def _refine(plan: Callable[[Cuts], Plan], starts: Sequence[Cuts], n_groups: int, work: int) -> Plan:
    """The best of some cuts by simulated step, then better ones one group away while there are any.

    The bottleneck leaves out how a pipeline fills and the update; a simulation does not. `work`:
    stages x micro-batches; a large program keeps the best start.
    """
    tried = {cuts: plan(cuts) for cuts in dict.fromkeys(starts)}

    def attempt(cuts: Cuts) -> Plan | None:
        inside = all(a < b for a, b in itertools.pairwise((0, *cuts, n_groups)))
        if inside and cuts not in tried:
            try:
                tried[cuts] = plan(cuts)
            except PlanError:  # it does not fit into memory
                return None
        return tried.get(cuts)

    best = min(tried, key=lambda cuts: tried[cuts].prediction.step_s)
    chosen = tried[best]
    while work <= REFINE_WORK:
        near = [(*best[:i], best[i] + d, *best[i + 1 :]) for i in range(len(best)) for d in (-1, 1)]
        found = [(p.prediction.step_s, cuts) for cuts in near if (p := attempt(cuts)) is not None]
        if not found or min(found)[0] >= chosen.prediction.step_s * (1 - 1e-9):
            break
        best = min(found)[1]
        chosen = tried[best]
    return chosen


def program_for(
    layout: Layout,
    numerics: Numerics,
    ties: Sequence[Tie],
    group_names: Sequence[str],
    train: bool = True,
    n_micro: int | None = None,
) -> Program:
    """The checked and proved program of a layout; `train=False`: forward only, for evaluation.

    n_micro: micro-batches, by default those of `numerics`. Raises PlanError if the layout does not
    fit the groups, DeadlockError if the program cannot run without buffering.
    """
    cuts = cut_indices(layout, group_names)
    if layout.schedule not in SCHEDULES:
        raise PlanError(f"schedule {layout.schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
    build = SCHEDULES[layout.schedule] if train else forward_only
    schedule = build(layout.n_stages, n_micro or numerics.micro_batches)
    check(schedule)
    program = lower(schedule, stage_ties(ties, cuts), numerics.tied, layout.receive_window, train)
    prove(program)
    return program


def predict(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str], bound_s: float | None = None
) -> tuple[Prediction, Timeline]:
    """What `program` will take. bound_s: `step_bound_s`, where it is known already, as it is the same for
    every cut. Raises PlanError if a rank's memory is too small for it."""
    prediction, timeline = expect(costs, layout, program, group_names, bound_s)
    _check_memory(prediction.peak_bytes, costs.cluster)
    return prediction, timeline


def expect(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str], bound_s: float | None = None
) -> tuple[Prediction, Timeline]:
    """As `predict`, whether the memory is there or not."""
    cuts = cut_indices(layout, group_names)
    norm_s = norm_seconds(costs.cluster, layout.n_stages)
    ties = stage_ties(costs.ties, cuts)
    timeline = simulate(program, stage_costs(costs, cuts), costs.cluster, norm_s, ties)
    bound = step_bound_s(costs, program.n_micro, layout.n_stages, norm_s) if bound_s is None else bound_s
    step = timeline.makespan_s
    bases = [device.base_bytes for device in costs.cluster.devices]
    memory = tuple(held + base for held, base in zip(timeline.memory_bytes, bases, strict=False))
    timeline = replace(timeline, memory_bytes=memory)
    prediction = Prediction(
        step_s=step,
        bubble=timeline.bubble,
        bubble_rank=timeline.bubble_rank,
        peak_bytes=timeline.peak_bytes,
        lower_bound_s=bound,
        gap=step / bound - 1.0 if bound else 0.0,
    )
    return prediction, timeline


def sizes_of_messages(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str]
) -> tuple[Int64, ...]:
    """Bytes of each message instruction, 0 for the others: per rank an array (n,)."""
    cuts = cut_indices(layout, group_names)
    return message_bytes(program, stage_costs(costs, cuts), stage_ties(costs.ties, cuts))


def cut_indices(layout: Layout, group_names: Sequence[str]) -> tuple[int, ...]:
    """Index of the first group of stages 1 .. S-1. Raises PlanError for a name that is no group,
    cuts out of order, or stages that are not on ranks 0 .. S-1 in order."""
    n_stages = len(layout.cuts) + 1
    if layout.n_stages != n_stages:
        raise PlanError(
            f"{n_stages} stages by layout.cuts, but layout.ranks has {layout.n_stages}; "
            "make them fit each other"
        )
    if layout.ranks != tuple((rank,) for rank in range(n_stages)):
        raise PlanError(
            f"layout.ranks is {[list(on) for on in layout.ranks]}; "
            "stage s must be on rank s alone: [[0], [1], ...]"
        )
    place = {name: index for index, name in enumerate(group_names)}
    for name in layout.cuts:
        if name not in place:
            near = difflib.get_close_matches(name, group_names, n=1) or list(group_names[:1])
            raise PlanError(
                f"layout.cuts names {name!r}, which is no group of this model; did you mean {near[0]!r}?"
            )
    cuts = tuple(place[name] for name in layout.cuts)
    bounds(len(group_names), cuts)
    return cuts


def norm_seconds(cluster: Cluster, n_ranks: int) -> float:
    """Of the norm's collective, a few bytes per parameter: one slow latency per doubling."""
    links = [cluster.link(rank, rank + 1) for rank in range(n_ranks - 1)]
    return math.ceil(math.log2(n_ranks)) * max((link.latency_s for link in links), default=0.0)


def too_full(peaks: Sequence[int], cluster: Cluster) -> tuple[int, int] | None:
    """(rank, bytes) where most is missing; None where all fits."""
    short = [(peak - device.memory_bytes, rank) for rank, (peak, device) in
             enumerate(zip(peaks, cluster.devices, strict=False))]  # fmt: skip
    most, rank = max(short)
    return (rank, most) if most > 0 else None


def _check_memory(peaks: Sequence[int], cluster: Cluster) -> None:
    full = too_full(peaks, cluster)
    if full is not None:
        rank, short = full
        raise PlanError(
            f"rank {rank} needs {size_text(peaks[rank])} and has "
            f"{size_text(cluster.devices[rank].memory_bytes)}, {size_text(short)} short; "
            "let the planner choose the cuts, use smaller micro-batches, or more ranks"
        )
