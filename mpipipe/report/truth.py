"""What was predicted of each stage and kind of instruction, and what happened.

Seconds of a whole step; of several copies of a stage their mean. update: norms of the gradients, the
collective once all ranks are there (`account`), and the step, as costs have them in one figure; messages:
waits for a message that is on its way. Waiting for work of other ranks belongs to no kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpipipe.planner.refine import stage_seconds
from mpipipe.report.account import account
from mpipipe.report.progress import number
from mpipipe.report.table import text_table
from mpipipe.values import Float64, Op, Timeline, Value

_SHOWN = (Op.F, Op.B, Op.I, Op.W)
_MOST_ROWS = 12


@dataclass(frozen=True)
class Truth(Value):
    """Of a step: a kind of instruction on a stage (messages: on its rank)."""

    stage: int
    kind: str
    predicted_s: float
    measured_s: float

    @property
    def miss_s(self) -> float:
        return self.measured_s - self.predicted_s


def truths(timelines: dict[str, Timeline]) -> tuple[Truth, ...]:
    """By stage, then by kind; empty where not both steps are there, or they are not of one program."""
    if not timelines.keys() >= {"predicted", "measured"}:
        return ()
    predicted, measured = timelines["predicted"], timelines["measured"]
    if predicted.program.hash != measured.program.hash:
        return ()
    planned, took = _kinds(predicted), _kinds(measured)
    return tuple(
        Truth(stage, kind, float(planned[kind][stage]), float(took[kind][stage]))
        for stage in range(measured.program.n_stages)
        for kind in took
    )


def _kinds(timeline: Timeline) -> dict[str, Float64]:
    """(stages,) of each kind, in the order in which they are shown."""
    found, of_rank, program = stage_seconds(timeline), account(timeline), timeline.program
    copies = np.array(program.copies)  # (copies, stages), of ranks
    ranks = np.array([len(program.holders(stage)) for stage in range(program.n_stages)])
    beside = np.array([np.sum(copies[0] == rank) for rank in copies[0]])  # stages that share a rank's norm
    norm_s = np.array([each.norm_s for each in of_rank])[copies].mean(axis=0) / beside
    return {
        **{op.name: found[op] / ranks for op in _SHOWN if op in found},
        "update": found[Op.STEP] / ranks + norm_s,
        "messages": np.array([each.exposed_s for each in of_rank])[copies].mean(axis=0),
    }


def truth_table(found: Sequence[Truth], width: int = 110) -> str:
    """A row for each stage: of each kind predicted | measured in ms, and their ratio. Of many stages those
    that are farthest off. found: not empty."""
    stages = dict[int, list[Truth]]()
    for t in found:
        stages.setdefault(t.stage, []).append(t)
    off = sorted(stages, key=lambda s: -max(abs(t.miss_s) for t in stages[s]))
    shown = sorted(off[:_MOST_ROWS])
    kinds = [t.kind for t in stages[shown[0]]]
    columns = [list(_cells([stages[s][i] for s in shown])) for i in range(len(kinds))]
    rows = [(str(s), *cells) for s, *cells in zip(shown, *columns, strict=True)]
    table = text_table(("stage", *kinds), rows, width, gap=2)
    hidden = len(stages) - len(shown)
    more = f"\n({hidden} stages more, which are less far off)" if hidden else ""
    return f"predicted | measured in a step, ms, and their ratio:\n{table}{more}"


def largest_miss(found: Sequence[Truth]) -> str:
    worst = max(found, key=lambda t: abs(t.miss_s))
    ratio = f", {worst.measured_s / worst.predicted_s:.2f} of it" if worst.predicted_s else ""
    return (
        f"largest miss: {worst.kind} of stage {worst.stage}, {number(worst.predicted_s * 1e3)} ms predicted "
        f"and {number(worst.measured_s * 1e3)} ms measured ({worst.miss_s * 1e3:+.1f} ms{ratio})"
    )


def _cells(column: Sequence[Truth]) -> Iterator[str]:
    """ "predicted | measured ratio", with the bars below each other."""
    took = [number(t.measured_s * 1e3) for t in column]
    for t, measured in zip(column, took, strict=True):
        ratio = t.measured_s / t.predicted_s if t.predicted_s else 0.0
        text = "-" if not ratio else f"{ratio:.2f}" if ratio < 100 else ">99"
        yield f"{number(t.predicted_s * 1e3)} | {measured:>{max(map(len, took))}} {text:>5}"
