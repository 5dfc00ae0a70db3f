"""timeline.json: what is read is what was written; what is wrong with a file is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpipipe.errors import ReportError
from mpipipe.planner import SCHEDULES, lower, simulate
from mpipipe.report.trace import Trace, read_trace, thin, write_trace
from mpipipe.values import Cluster, Device, Link, StageCost, Timeline


@pytest.fixture
def trace(timeline: Timeline) -> Trace:
    times = tuple(t - 10 + np.pi * 1e-3 for t in timeline.times)
    measured = Timeline(timeline.program, times, tuple(2 * m for m in timeline.memory_bytes))
    return Trace({"predicted": timeline, "measured": measured}, ((5, 6), (7, 8)), (1, 2))


def assert_same(a: Trace, b: Trace) -> None:
    assert (a.resident_bytes, a.steps) == (b.resident_bytes, b.steps)
    assert list(a.timelines) == list(b.timelines)
    for mine, other in zip(a.timelines.values(), b.timelines.values(), strict=True):
        assert mine.program.hash == other.program.hash
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
    program = lower(SCHEDULES["1f1b"](2, 8), (), "per_use", 4)
    cluster = Cluster((Device("cpu", 1.0, 1 << 40, 1),) * 2, (0, 0), {"node": Link(1e-6, 1e9)})
    timeline = simulate(program, (StageCost(0.1, 0.1, 0.1, 0.1, 1 << 30, 1 << 20, 0, 7, 7),) * 2, cluster)
    write_trace(tmp_path / "a.json", Trace({"predicted": timeline, "measured": timeline}, ((1,), (2,))))
    assert (tmp_path / "a.json").stat().st_size < 6000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(version=99), "version 99 of the format, this mpipipe reads version 1"),
        (lambda v: v.pop("version"), "version None"),
        (lambda v: v.pop("steps"), "damaged at steps: Field required"),
        (lambda v: v["programs"][0]["codes"][0].__setitem__(3, "x"), r"damaged at programs\.0\.codes\.0\.3:"),
        (lambda v: v["programs"][0]["codes"][1].pop(), r"10, 9\] times .* for \[10, 8\] instructions"),
        (lambda v: v["timelines"]["measured"]["times_ns"].pop(), r"\[10\] times and \[10, 9\] sizes"),
        (lambda v: v["timelines"]["measured"].update(program=1), "measured is of program 1 of 1"),
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
