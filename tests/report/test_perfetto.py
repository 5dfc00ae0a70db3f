"""The rules of the trace event format, and that what it shows is the timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipipe.planner import SCHEDULES, StageTie, lower, simulate
from mpipipe.planner.simulate import message_bytes
from mpipipe.report.account import exposed_s
from mpipipe.report.perfetto import write_perfetto
from mpipipe.values import RECVS, SENDS, Cluster, Device, Link, StageCost, Timeline

STAGES = (StageCost(0.01, 0.01, 0.01, 0.005, 1 << 20, 1 << 19, 0, 40, 30),) * 3
TIES = (StageTie(0, (2,), 50),)


@pytest.fixture
def timelines() -> dict[str, Timeline]:
    program = lower(SCHEDULES["1f1b"](3, 4), TIES, "per_use", 4)
    cluster = Cluster((Device("cpu", 1.0, 1 << 40, 1),) * 3, (0, 0, 0), {"node": Link(1e-3, 1e4)})
    predicted = simulate(program, STAGES, cluster, 1e-4, TIES)
    return {
        "predicted": predicted,
        "measured": replace(predicted, times=tuple(2 * t for t in predicted.times)),
    }


def events(path: Path, timelines: dict[str, Timeline], sized: bool = True) -> list[dict[str, Any]]:
    program = timelines["predicted"].program
    write_perfetto(path, timelines, message_bytes(program, STAGES, TIES) if sized else None)
    return list(json.loads(path.read_text())["traceEvents"])


def test_every_event_has_what_its_phase_needs(timelines: dict[str, Timeline], tmp_path: Path) -> None:
    needs = {
        "X": {"name", "cat", "ts", "dur", "args"}, "M": {"name", "args"}, "C": {"name", "ts", "args"},
        "s": {"name", "cat", "ts", "id"}, "f": {"name", "cat", "ts", "id", "bp"},
    }  # fmt: skip
    found = events(tmp_path / "t.json", timelines)
    assert {e["ph"] for e in found} == set(needs)
    for event in found:
        assert set(event) == needs[event["ph"]] | {"ph", "pid", "tid"}
        assert min(event["pid"], event["tid"]) > 0
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    names = {(e["name"], e["pid"], e["args"]["name"]) for e in found if e["ph"] == "M"}
    assert {("process_name", 1, "predicted"), ("process_name", 2, "measured")} <= names
    assert ("thread_name", 2, "rank 2") in names


def test_the_boxes_are_the_instructions(timelines: dict[str, Timeline], tmp_path: Path) -> None:
    boxes = defaultdict(list)
    for event in events(tmp_path / "t.json", timelines):
        if event["ph"] == "X":
            boxes[event["pid"], event["tid"]].append(event)
    for process, timeline in enumerate(timelines.values(), start=1):
        for rank in range(3):
            spans, mine = timeline.spans(rank), boxes[process, rank + 1]
            assert [e["name"] for e in mine] == [str(span.instr) for span in spans]
            assert [e["ts"] for e in mine] == pytest.approx([span.start_s * 1e6 for span in spans], abs=1e-3)
            took = [(span.end_s - span.start_s) * 1e6 for span in spans]
            assert [e["dur"] for e in mine] == pytest.approx(took, abs=2e-3)
            for before, after in pairwise(mine):  # boxes of a thread may not overlap
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    first, sent = boxes[1, 1][:2]
    assert (first["name"], first["cat"], first["args"]) == ("0F0", "compute", {"stage": 0, "micro": 0})
    assert (sent["name"], sent["cat"]) == ("0SEND_ACT0->r1", "message")
    assert sent["args"] == {"stage": 0, "micro": 0, "peer": 1, "bytes": 40}
    norms = [next(e for e in boxes[1, rank] if e["name"] == "NORM") for rank in (1, 2, 3)]
    assert {norm["cat"] for norm in norms} == {"norm"}
    waits = [norm["args"].pop("waiting_us") for norm in norms]
    assert {tuple(norm["args"]) for norm in norms} == {()}
    assert min(waits) == 0.0, "the last rank waits for nobody"
    own = [norm["dur"] - waited for norm, waited in zip(norms, waits, strict=True)]
    assert own == pytest.approx([100] * 3)


def test_a_receive_says_how_long_its_message_was_exposed(
    timelines: dict[str, Timeline], tmp_path: Path
) -> None:
    found = [e for e in events(tmp_path / "t.json", timelines) if e["ph"] == "X" and e["pid"] == 2]
    told = {e["name"]: e["args"].get("exposed_us") for e in found if e["tid"] == 2}
    for span, exposed in zip(
        timelines["measured"].spans(1), exposed_s(timelines["measured"])[1], strict=True
    ):
        if span.instr.op in RECVS:
            assert told[str(span.instr)] == pytest.approx(exposed * 1e6, abs=1e-3)
        else:
            assert told[str(span.instr)] is None


def test_each_message_is_one_arrow_from_its_send_to_its_receive(
    timelines: dict[str, Timeline], tmp_path: Path
) -> None:
    found = events(tmp_path / "t.json", timelines)
    starts, stops = ({e["id"]: e for e in found if e["ph"] == phase} for phase in "sf")
    program = timelines["predicted"].program
    n_messages = sum(int(np.isin(codes[:, 0], sorted(SENDS)).sum()) for codes in program.codes)
    assert len(starts) == len([e for e in found if e["ph"] == "s"]) == 2 * n_messages
    assert set(starts) == set(stops)
    boxes = {(e["pid"], e["tid"], e["name"].split("->")[0]): e for e in found if e["ph"] == "X"}
    for key, start in starts.items():
        stop = stops[key]
        assert (start["name"], start["cat"], start["pid"]) == (stop["name"], stop["cat"], stop["pid"])
        assert start["ts"] <= stop["ts"]
        inside = [
            name
            for (pid, tid, name), e in boxes.items()
            if pid == stop["pid"] and tid == stop["tid"] and abs(e["ts"] + e["dur"] - stop["ts"]) < 1e-2
        ]
        assert any(op.name in name for name in inside for op in RECVS)


def test_an_arrow_never_points_back_in_time(timelines: dict[str, Timeline], tmp_path: Path) -> None:
    """As the clock of another node may have it."""
    measured = timelines["measured"]
    ahead = replace(measured, times=(measured.times[0] + 1.0, *measured.times[1:]))
    found = events(tmp_path / "t.json", timelines | {"measured": ahead})
    starts = {e["id"]: e["ts"] for e in found if e["ph"] == "s"}
    assert all(e["ts"] >= starts[e["id"]] for e in found if e["ph"] == "f")


def test_memory_is_a_counter_and_sizes_may_be_unknown(timelines: dict[str, Timeline], tmp_path: Path) -> None:
    found = events(tmp_path / "t.json", timelines, sized=False)
    counters = [e for e in found if e["ph"] == "C" and e["pid"] == 2 and e["tid"] == 3]
    assert {e["name"] for e in counters} == {"memory, rank 2"}
    held, ends = timelines["measured"].memory_bytes[2], timelines["measured"].times[2][:, 1]
    changed = np.flatnonzero(np.diff(held, prepend=-1))
    assert 1 < len(changed) < len(held)
    assert [e["args"]["MiB"] for e in counters] == pytest.approx((held[changed] / 2**20).tolist(), abs=1e-3)
    assert [e["ts"] for e in counters] == pytest.approx((ends[changed] * 1e6).tolist(), abs=1e-3)
    assert all("bytes" not in e.get("args", {}) for e in found)
