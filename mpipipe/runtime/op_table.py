"""Which operators become our own in a run with bits = fast: those that are faster so here. Collective.

    forms of the model -> each rank times both ways -> the total decides, for all -> `Numerics.op_table`

Decided once, at the first start: the table decides bits. It is kept like the costs, for this model on these
kinds of machine, so that the next start has the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpipipe.cluster.agree import code_version
from mpipipe.cluster.comm import Communicator
from mpipipe.graph.contest import Contest, Seconds, in_question
from mpipipe.graph.variants import Variants
from mpipipe.ops import KERNELS_VERSION
from mpipipe.runtime.costing import clock_of
from mpipipe.runtime.setting import kernel_set
from mpipipe.values import Numerics, digest

GAIN = 1.01  # times faster than torch: less is noise; most of some forms is a product that both ways make
Table = dict[str, str]  # form -> "torch", or the instruction set of the kernels


@dataclass(frozen=True)
class Decision:
    """gains: times faster than torch, by kind of the operators that are ours; none where it was known.
    without: a rank that has no compiled kernels, for which all do without."""

    table: Table
    gains: Mapping[str, float]
    without: int | None = None


def table_name(kinds: Sequence[str], variants: Variants, numerics: Numerics) -> str:
    """Under which a later start finds the table. kinds: of the devices of all ranks."""
    n = numerics
    facts = (
        variants.graph.hash, sorted(set(kinds)), n.torch, n.threads, n.gemm, n.precision, variants.rows,
    )  # fmt: skip
    return digest(*map(repr, facts), code_version(KERNELS_VERSION))


def decide(comm: Communicator, variants: Variants, numerics: Numerics, known: Table | None) -> Decision:
    """The table of this run. known: on rank 0, that of an earlier start."""
    known = comm.bcast_object(known)
    if known is not None:
        return Decision(known, {})
    forms = sorted({m.question for m in in_question(variants.primary)})
    sets = comm.allgather_object(kernel_set())
    if "none" in sets:
        return Decision(dict.fromkeys(forms, "torch"), {}, sets.index("none"))
    contest = Contest(variants.primary, numerics.precision, clock_of(comm, numerics.threads)[0], comm.size)
    comm.barrier()
    by_rank = comm.allgather_object(contest.times())
    times = {form: [found[form] for found in by_rank if form in found] for form in forms}
    table = {form: winner(times[form]) for form in forms}
    return Decision(table, gains(table, times))


def winner(times: Sequence[Seconds]) -> str:
    """Of one form on all ranks that have it; ours where none has."""
    torch_s, ours_s = _totals(times) if times else (1.0, 0.0)
    return kernel_set() if ours_s * GAIN < torch_s else "torch"


def gains(table: Table, times: Mapping[str, Sequence[Seconds]]) -> dict[str, float]:
    """Seconds of torch / seconds of ours, of all forms of a kind that are ours."""
    by_kind: dict[str, list[Seconds]] = {}
    for form, seconds in times.items():
        if table[form] != "torch":
            by_kind.setdefault(_kind(form), []).extend(seconds)
    totals = {kind: _totals(seconds) for kind, seconds in by_kind.items() if seconds}
    return {kind: torch_s / max(ours_s, 1e-9) for kind, (torch_s, ours_s) in totals.items()}


def in_words(decision: Decision) -> str:
    """What runs on kernels, for people: `kernels: flash_attention 2.10, layer_norm 1.40 times ...`."""
    if decision.without is not None:
        return f"kernels: none, as rank {decision.without} has no compiled ones; torch computes all"
    if not decision.table:
        return "kernels: wherever there is one"
    forms = Counter(map(_kind, decision.table))
    taken = Counter(_kind(form) for form, by in decision.table.items() if by != "torch")
    ours, theirs = sorted(taken), sorted(set(forms) - set(taken))
    faster = {kind: f" {gain:.2f}" for kind, gain in decision.gains.items()}
    part = {kind: f" ({n} of {forms[kind]} forms)" for kind, n in taken.items() if n < forms[kind]}
    known = [f"{kind}{part.get(kind, '')}{faster.get(kind, '')}" for kind in ours]
    how = " times as fast as torch" if decision.gains else ", as before"
    rest = f"; left to torch: {', '.join(theirs)}" if theirs else ""
    return f"kernels: {', '.join(known) + how if ours else 'none'}{rest}"


def _kind(form: str) -> str:
    return form.partition(" ")[0]


def _totals(times: Sequence[Seconds]) -> Seconds:
    torch_s, ours_s = (sum(column) for column in zip(*times, strict=True))
    return torch_s, ours_s
