"""What a run says of its time and memory, from real ranks: one type, one source."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpipipe.commands.draw import main as draw
from mpipipe.report.account import account
from mpipipe.report.trace import read_trace
from mpipipe.values import SENDS, Report, from_json

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

CONFIG = """\
model: {name: mlp, inputs: 32, hidden: [64, 64], classes: 4}
data: {name: synthetic, samples: 64}
train: {steps: 9, batch: 16, warmup: 1, save_every: 4}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 4, schedule: 1f1b}
run: {dir: run}
"""


def test_a_run_leaves_its_timeline_and_a_table_by_rank(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.image import imread  # here: it takes a while, and few tests draw

    (tmp_path / "config.yaml").write_text(CONFIG)
    run = tmp_path / "run"
    job = launch(2, "-m", "mpipipe.train", "config.yaml", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    report, trace = from_json(Report, (run / "summary.json").read_text()), read_trace(run / "timeline.json")
    measured = trace.timelines["measured"]

    assert list(trace.timelines) == ["predicted", "measured"]
    assert trace.timelines["predicted"].program.hash == measured.program.hash
    peaks = trace.timelines["predicted"].peak_bytes  # without the copy for a save
    assert all(a >= b for a, b in zip(report.predicted_peak_bytes, peaks, strict=True))
    assert trace.steps == tuple(range(1, 10))
    assert [len(row) for row in trace.resident_bytes] == [9, 9]
    for peak, steps, held in zip(report.peak_bytes, trace.resident_bytes, measured.memory_bytes, strict=True):
        assert min(steps) > 0
        assert 0 < held.min() <= held.max() <= max(steps)
        assert max(steps) <= 1.1 * peak + (1 << 20)  # two counters of the system

    parameters = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4
    assert sum(rank.parameters for rank in report.ranks) == parameters
    assert [rank.stages for rank in report.ranks] == [(0,), (1,)]
    events = json.loads((run / "timeline.perfetto.json").read_text())["traceEvents"]
    for rank, of_rank in enumerate(report.ranks):
        found = account(measured)[rank]
        assert of_rank.compute_s == pytest.approx(found.compute_s, abs=1e-6)
        assert of_rank.exposed_s == pytest.approx(found.exposed_s, abs=1e-6)
        assert sum(vars(found).values()) == pytest.approx(measured.makespan_s)
        sends = np.isin(measured.program.codes[rank][:, 0], sorted(SENDS))
        sent = [
            e["args"]["bytes"]
            for e in events
            if (e["ph"], e["pid"], e["tid"]) == ("X", 2, rank + 1) and "SEND" in e["name"]
        ]
        assert len(sent) == sends.sum() > 0
        assert of_rank.sent_bytes == sum(sent) > 0
    assert np.mean([rank.bubble for rank in report.ranks]) == pytest.approx(report.bubble)

    assert imread(run / "timeline.png").ndim == 3
    for source in (run, run / "plan.json"):
        assert draw([str(source)]) == 0
    assert "measured: " in job.stdout
    assert capsys.readouterr().out.count("predicted: ") == 2
