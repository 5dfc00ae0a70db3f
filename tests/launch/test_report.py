"""What a run says of its time and memory, from real ranks: one type, one source; and what `report` and
TensorBoard show of one that was resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mpipipe.__main__ import main
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
eval: {every: 3, batches: 2}
pipeline: {micro_batches: 4, schedule: 1f1b}
run: {dir: run}
"""


@pytest.fixture(scope="module")
def made(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run, not to be changed, and what it has said; with TensorBoard where that is installed."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "config.yaml").write_text(CONFIG)
    tensorboard = f"run.tensorboard={str(find_spec('tensorboard') is not None).lower()}"
    job = launch(2, "-m", "mpipipe.train", "config.yaml", tensorboard, cwd=folder)
    assert job.returncode == 0, job.stderr
    return folder / "run", job.stdout


def test_a_run_leaves_its_timeline_and_a_table_by_rank(
    made: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.image import imread  # here: it takes a while, and few tests draw

    run, said = made
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
    assert "measured: " in said
    assert capsys.readouterr().out.count("predicted: ") == 2


def test_report_and_tensorboard_of_a_resumed_run(
    launch: Launch, made: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    run = Path(shutil.copytree(made[0], made[0].parent / "resumed", symlinks=True))
    for path in (run / "checkpoints" / "step-00000009").iterdir():
        path.unlink()  # as a kill before its end would have left it: the newest checkpoint is that of step 8
    words = ("config.yaml", "run.dir=resumed", "run.tensorboard=true", "--resume", "train.steps=11")
    job = launch(2, "-m", "mpipipe.train", *words, cwd=run.parent)
    assert job.returncode == 0, job.stderr
    assert "after 8 steps" in job.stdout
    assert read_trace(run / "timeline.json").steps == (9, 10, 11), "a resumed run counts its steps on"

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = [(e.step, e.value) for e in events.Scalars("loss")]
    assert [step for step, _ in shown] == list(range(1, 12))
    assert [value for _, value in shown] == pytest.approx([line["loss"] for line in lines], rel=1e-6)
    assert {"val_loss", "lr", "grad_norm", "step_s", "samples_per_s"} <= set(events.Tags()["scalars"])

    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert "note:" not in text
    assert "where the time went:" in text
    assert main(["report", str(run), "--html"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["weights_sha256"] in (run / "report.html").read_text()
