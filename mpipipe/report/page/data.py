"""What the drawings of the page read: one JSON value.

    {"words": [..]          by operation: the sentence of an instruction, with {micro} {stage} {other} {peer}
     "programs": [[{"op", "stage", "micro", "other", "peer"}, ..by rank], ..]
     "timelines": [{"name", "program", "span_ns",
                    "ranks": [{"gap_ns", "took_ns", "exposed_ns", "held_bytes"}, ..]}, ..]
     "bytes": {"op,stage,other": ..}                     of messages, where the plan holds the costs
     "resident": {"steps": [..], "ranks": [[..], ..]}    bytes
     "curves": [{"title", "per_point", "series": [{"name", "x", "y"}, ..]}, ..]}

Columns of integers, one entry per instruction. gap_ns: since the end of the instruction before;
held_bytes: more than at the instruction before. Both stay short where the numbers themselves are long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import PlanError
from mpipipe.planner.prediction import sizes_of_messages
from mpipipe.report.account import exposed_s
from mpipipe.report.draw import start_s
from mpipipe.report.run import RunData
from mpipipe.values import Float64, Op, Plan, Program, Timeline

MOST_POINTS = 1500  # of a curve: more than a screen has columns

WORDS = {
    Op.F: "forward of micro-batch {micro} on stage {stage}",
    Op.B: "backward of micro-batch {micro} on stage {stage}",
    Op.I: "input gradient of micro-batch {micro} on stage {stage}",
    Op.W: "weight gradient of micro-batch {micro} on stage {stage}",
    Op.SEND_ACT: "sending the activation of micro-batch {micro} to stage {other} (rank {peer})",
    Op.RECV_ACT: "waiting for the activation of micro-batch {micro} from stage {other} (rank {peer})",
    Op.SEND_GRAD: "sending the gradient of micro-batch {micro} to stage {other} (rank {peer})",
    Op.RECV_GRAD: "waiting for the gradient of micro-batch {micro} from stage {other} (rank {peer})",
    Op.SEND_TIED: "sending a tied gradient to stage {other} (rank {peer})",
    Op.RECV_TIED: "waiting for a tied gradient from stage {other} (rank {peer})",
    Op.SEND_COPY: "sending a tied weight to stage {other} (rank {peer})",
    Op.RECV_COPY: "waiting for a tied weight from stage {other} (rank {peer})",
    Op.SEND_SHARD: "sending gradients to the replica on rank {peer}, which updates their weights",
    Op.RECV_SHARD: "waiting for gradients from the replica on rank {peer}",
    Op.SEND_UPDATE: "sending updated weights to the replica on rank {peer}",
    Op.RECV_UPDATE: "waiting for updated weights from the replica on rank {peer}",
    Op.NORM: "gradient norm, with all ranks",
    Op.STEP: "update of stage {stage}",
}


def page_data(run: RunData) -> dict[str, Any]:
    programs = {t.program.hash: t.program for t in run.timelines.values()}
    place = {key: index for index, key in enumerate(programs)}
    trace = run.trace
    return {
        "words": [WORDS[op] for op in Op],
        "programs": [_program(program) for program in programs.values()],
        "timelines": [_timeline(name, t, place[t.program.hash]) for name, t in run.timelines.items()],
        "bytes": _message_sizes(run.plan, list(programs.values())) if run.plan else {},
        "resident": {"steps": trace.steps, "ranks": trace.resident_bytes} if trace else None,
        "curves": curves(run.metrics),
    }


def in_script(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _program(program: Program) -> list[dict[str, list[int]]]:
    names = ("op", "stage", "micro", "other", "peer")
    return [{name: codes[:, i].tolist() for i, name in enumerate(names)} for codes in program.codes]


def _timeline(name: str, timeline: Timeline, program: int) -> dict[str, Any]:
    start = start_s(timeline)
    per_rank = zip(timeline.times, exposed_s(timeline), timeline.memory_bytes, strict=True)
    ranks = []
    for times, exposed, held in per_rank:
        ns = _ns(times - start)
        # in order, by which the page looks for them: a SEND that was begun early has its place, not its time
        ends = np.maximum.accumulate(ns[:, 1])
        before = np.concatenate([[0], ends[:-1]]) if len(ns) else np.zeros(0, np.int64)
        starts = np.maximum(ns[:, 0], before)
        columns = (starts - before, ends - starts, _ns(exposed), np.diff(held, prepend=0))
        keys = ("gap_ns", "took_ns", "exposed_ns", "held_bytes")
        ranks.append({key: column.tolist() for key, column in zip(keys, columns, strict=True)})
    return {"name": name, "program": program, "span_ns": round(timeline.makespan_s * 1e9), "ranks": ranks}


def _ns(seconds: Float64) -> NDArray[np.int64]:
    return np.rint(seconds * 1e9).astype(np.int64)


def _message_sizes(plan: Plan, programs: Sequence[Program]) -> dict[str, int]:
    """Of each kind of message, by "op,stage,other"."""
    if plan.costs is None or not programs:
        return {}
    try:
        per_rank = sizes_of_messages(plan.costs, plan.layout, programs[0])
    except PlanError:  # a plan that was edited by hand
        return {}
    sizes = {}
    for codes, nbytes in zip(programs[0].codes, per_rank, strict=True):
        for (op, stage, other), n in zip(codes[:, [0, 1, 3]].tolist(), nbytes.tolist(), strict=True):
            if n:
                sizes[f"{op},{stage},{other}"] = n
    return sizes


def curves(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The loss and its validation in one drawing, every other number in one of its own."""
    names = dict.fromkeys(key for line in metrics for key in line if key != "step")
    found = {name: points for name in names if (points := _points(metrics, name))}
    losses = [name for name in ("loss", "val_loss") if name in found]
    groups = ([losses] if losses else []) + [[name] for name in found if name not in losses]
    return [_curve(group, found) for group in groups]


_TITLES = {
    "loss": "loss", "val_loss": "loss", "lr": "learning rate", "grad_norm": "gradient norm",
    "step_s": "seconds per step",
}  # fmt: skip
_SERIES = {"loss": "training", "val_loss": "validation"}


def _curve(names: Sequence[str], found: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    title = _TITLES.get(names[0], names[0].replace("val_", "validation ").replace("_per_s", " per second"))
    per_point = max(-(-len(found[name]) // MOST_POINTS) for name in names)
    series = []
    for name in names:
        thinned = list(_thin(found[name], per_point if len(found[name]) > MOST_POINTS else 1))
        label = _SERIES.get(name, title)
        series.append({"name": label, "x": [x for x, _ in thinned], "y": [y for _, y in thinned]})
    return {"title": title, "per_point": per_point, "series": series}


def _points(metrics: Sequence[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    """(step, value) of each line that has both."""
    return [
        (line["step"], line[name])
        for line in metrics
        if isinstance(line.get("step"), int) and isinstance(line.get(name), int | float)
    ]


def _thin(points: list[tuple[int, Any]], every: int) -> Iterable[tuple[int, float | None]]:
    """The mean of each run of `every` points, at its last step; None where it is no number."""
    for start in range(0, len(points), every):
        part = points[start : start + every]
        mean = sum(value for _, value in part) / len(part)
        yield part[-1][0], float(f"{mean:.7g}") if math.isfinite(mean) else None
