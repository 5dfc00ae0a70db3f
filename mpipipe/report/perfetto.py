"""timeline.perfetto.json: timelines for a trace viewer (ui.perfetto.dev, chrome://tracing), in the Trace
Event Format of Chrome.

One process per timeline, one thread per rank. Each instruction is a complete event ("X", microseconds),
each message an arrow (flow events "s" to "f") from its SEND to the end of its RECV, the memory of a rank a
counter ("C") where it changes. Process and thread 0 mean something of their own in the viewer: both count
from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from mpipipe.planner.walk import match
from mpipipe.report.account import exposed_s, meetings_s
from mpipipe.report.progress import MIB
from mpipipe.values import COMPUTE, RECVS, SENDS, Int64, Op, Span, Timeline

PERFETTO = "timeline.perfetto.json"
Event = dict[str, Any]


def write_perfetto(
    path: str | Path, timelines: Mapping[str, Timeline], sizes: Sequence[Int64] | None = None
) -> None:
    """sizes: bytes of each message instruction, per rank (n,), where they are known. Raises OSError,
    DeadlockError if a message of a program has one end only."""
    ids = count(1)
    events = (
        event
        for process, (name, timeline) in enumerate(timelines.items(), start=1)
        for event in _of_timeline(process, name, timeline, sizes, ids)
    )
    with Path(path).open("w", encoding="utf-8") as file:  # one by one: a large step has millions
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for index, event in enumerate(events):
            file.write(("," if index else "") + json.dumps(event, separators=(",", ":")))
        file.write("]}\n")


def _of_timeline(
    process: int, name: str, timeline: Timeline, sizes: Sequence[Int64] | None, ids: Iterator[int]
) -> Iterator[Event]:
    yield _name("process_name", process, 1, name)
    arrows, met_s = _arrows(timeline, ids), float(meetings_s(timeline).max(initial=0.0))
    for rank, exposed in enumerate(exposed_s(timeline)):
        yield _name("thread_name", process, rank + 1, f"rank {rank}")
        held = timeline.memory_bytes[rank].tolist()
        nbytes = [0] * len(held) if sizes is None else sizes[rank].tolist()
        for index, span in enumerate(timeline.spans(rank)):
            at = {"pid": process, "tid": rank + 1}
            yield _instruction(span, nbytes[index], met_s, exposed[index]) | at
            yield from (arrow | at for arrow in arrows.get((rank, index), ()))
            if index == 0 or held[index] != held[index - 1]:
                value = {"MiB": round(held[index] / MIB, 3)}
                yield {"ph": "C", "name": f"memory, rank {rank}", "ts": _us(span.end_s), "args": value} | at


def _instruction(span: Span, nbytes: int, met_s: float, exposed_s: float) -> Event:
    """met_s: when the last rank has come to NORM; exposed_s: of a RECV, its message was on its way."""
    instr = span.instr
    about: dict[str, float] = {
        "stage": instr.stage, "micro": instr.micro, "peer": instr.peer, "bytes": nbytes or -1,
    }  # fmt: skip
    if instr.op == Op.NORM:
        about["waiting_us"] = _us(max(0.0, min(met_s, span.end_s) - span.start_s))
    if instr.op in RECVS:
        about["exposed_us"] = _us(exposed_s)
    start = _us(span.start_s)
    return {
        "ph": "X",
        "name": str(instr),
        "cat": "compute" if instr.op in COMPUTE else "norm" if instr.op == Op.NORM else "message",
        "ts": start,
        "dur": round(_us(span.end_s) - start, 3),
        "args": {key: value for key, value in about.items() if value >= 0},
    }


def _arrows(timeline: Timeline, ids: Iterator[int]) -> dict[tuple[int, int], list[Event]]:
    """The two ends of each message, by rank and instruction."""
    ends, arrows = match(timeline.program), {}
    for rank, ops in enumerate(ends.ops):
        for index, op in enumerate(ops):
            if op in SENDS:
                peer, other = ends.peers[rank][index], ends.partner[rank][index]
                arrow = {"cat": "message", "name": "message", "id": next(ids)}
                left = timeline.times[rank][index, 0]
                # not before it has left, as the clocks of two nodes may say
                arrived = max(left, timeline.times[peer][other, 1])
                arrows[rank, index] = [{"ph": "s", "ts": _us(left)} | arrow]
                arrows[peer, other] = [{"ph": "f", "bp": "e", "ts": _us(arrived)} | arrow]
    return arrows


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)
