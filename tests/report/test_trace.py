"""timeline.json: what is read is what was written; what is wrong with a file is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipipe.errors import ReportError
from mpipipe.planner import SCHEDULES, lower, simulate
from mpipipe.report.trace import Trace, read_trace, thin, write_trace
from mpipipe.values import Cluster, Device, Instr, Link, StageCost, Timeline


def two_ranks(n_micro: int) -> Timeline:
    program = lower(SCHEDULES["1f1b"](2, n_micro), (), "eager", 4)
    cluster = Cluster((Device("cpu", 1.0, 1 << 40, 1),) * 2, (0, 0), {"node": Link(1e-6, 1e9)})
    return simulate(program, (StageCost(0.1, 0.1, 0.1, 0.1, 1 << 30, 1 << 20, 0, 7, 7),) * 2, cluster)


@pytest.fixture
def trace() -> Trace:
    timeline = two_ranks(2)
    times = tuple(t + np.pi * 1e-3 for t in timeline.times)
    measured = Timeline(timeline.program, times, tuple(2 * m for m in timeline.memory_bytes))
    return Trace({"predicted": timeline, "measured": measured}, ((5, 6), (7, 8)), (1, 2))


def assert_same(a: Trace, b: Trace) -> None:
    assert (a.resident_bytes, a.steps) == (b.resident_bytes, b.steps)
    assert list(a.timelines) == list(b.timelines)
    for mine, other in zip(a.timelines.values(), b.timelines.values(), strict=True):
        assert (mine.program.hash, mine.program.eager) == (other.program.hash, other.program.eager)
        for rank in range(len(mine.times)):
            np.testing.assert_allclose(mine.times[rank], other.times[rank], rtol=0, atol=0.5e-9)
            assert mine.memory_bytes[rank].tolist() == other.memory_bytes[rank].tolist()
            assert mine.program.codes[rank].dtype == other.program.codes[rank].dtype


def test_what_is_read_is_what_was_written(trace: Trace, tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", trace)
    read = read_trace(tmp_path / "a.json")
    assert_same(read, trace)
    assert read.timelines["predicted"].program is read.timelines["measured"].program
    write_trace(tmp_path / "b.json", read)
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()
    write_trace(tmp_path / "empty.json", Trace({}, ()))
    assert_same(read_trace(tmp_path / "empty.json"), Trace({}, ()))


def test_a_small_run_has_a_small_file(tmp_path: Path) -> None:
    timeline = two_ranks(8)
    write_trace(tmp_path / "a.json", Trace({"predicted": timeline, "measured": timeline}, ((1,), (2,))))
    assert (tmp_path / "a.json").stat().st_size < 6000


def code(file: dict[str, Any], rank: int, index: int, field: str, value: int) -> None:
    row = file["programs"][0]["codes"][rank]
    row[index * 6 % len(row) + Instr._fields.index(field)] = value


def empty(file: dict[str, Any], rank: int) -> None:
    timelines = file["timelines"].values()
    for rows in (
        file["programs"][0]["codes"],
        *(t[k] for t in timelines for k in ("times_ns", "memory_bytes")),
    ):
        rows[rank] = []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(version=99), "version 99 of the format, this mpipipe reads version 1"),
        (lambda v: v.pop("version"), "version None"),
        (lambda v: v.pop("steps"), "damaged at steps: Field required"),
        (lambda v: v["programs"][0]["codes"][0].__setitem__(3, "x"), r"damaged at programs\.0\.codes\.0\.3:"),
        (lambda v: v["programs"][0]["codes"][1].pop(), r"10, 10\] times .* for \[10, 9\] instructions"),
        (lambda v: v["timelines"]["measured"]["times_ns"].pop(), r"\[10\] times and \[10, 10\] sizes"),
        (lambda v: v["timelines"]["measured"].update(program=1), "measured is of program 1 of 1"),
        (lambda v: code(v, 0, 0, "op", 77), "damaged: rank 0 has op 77, which is not in 0 to 17; run again"),
        (lambda v: code(v, 1, 1, "stage", 5), "damaged: rank 1 has stage 5, which is not in -1 to 1"),
        (lambda v: code(v, 0, 1, "other", -2), "damaged: rank 0 has other -2"),
        (lambda v: code(v, 0, 1, "peer", 2), "damaged: rank 0 has peer 2, which is not in -1 to 1"),
        (lambda v: code(v, 0, 1, "tag", 99), "damaged: rank 0 at 0SEND_ACT0->r1 .* has no RECV for it"),
        (lambda v: code(v, 0, 1, "tag", 1 << 40), "damaged: "),
        (lambda v: code(v, 1, -2, "op", 13), r"damaged: its ranks have \[1, 0\] gradient norms"),
        (lambda v: empty(v, 1), "damaged: rank 1 has no instructions"),
        (
            lambda v: v["programs"][0].update(other_copies=[[2, 3]]),
            r"damaged: its 2 stages are on ranks \[2, 3\]",
        ),
    ],
)
def test_a_file_that_is_wrong(trace: Trace, tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "timeline.json"
    write_trace(path, trace)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(ReportError, match=rf"timeline\.json: .*{message}"):
        read_trace(path)


def test_a_file_that_is_cut_short_or_missing(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with pytest.raises(ReportError, match="cannot be read"):
        read_trace(path)
    write_trace(path, trace)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ReportError, match="is cut short or no JSON"):
        read_trace(path)
    path.write_text("[1]")
    with pytest.raises(ReportError, match="version None"):
        read_trace(path)


@pytest.mark.parametrize("n", [0, 1, 999, 1000, 1001, 54321])
def test_long_runs_are_thinned_and_keep_their_maxima(n: int) -> None:
    values = np.random.default_rng(n).integers(0, 1 << 40, n).tolist()
    points, steps = thin(values, range(1, n + 1))
    assert len(points) == len(steps) == (n if n <= 1000 else len(points))
    assert len(points) <= 1000
    assert max(points, default=0) == max(values, default=0)
    assert steps[-1:] == tuple([n] if n else [])
    assert set(points) <= set(values)
    assert n <= 1000 or len(points) > 500
