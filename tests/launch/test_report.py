"""What `report` and TensorBoard show of a real run, and of one that was resumed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpipipe.__main__ import main
from mpipipe.report.trace import read_trace

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4}
data: {name: synthetic, samples: 64}
train: {steps: 6, batch: 8, warmup: 2, lr: 0.01, save_every: 2}
eval: {every: 3, batches: 2}
pipeline: {micro_batches: 4}
run: {dir: made, tensorboard: true}
"""


def test_report_and_tensorboard_of_a_resumed_run(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    (tmp_path / "config.yaml").write_text(CONFIG)
    run = tmp_path / "made"
    for args in ((), ("--resume", "train.steps=8")):
        if args:  # as a kill after step 5 would have left it: the newest checkpoint is that of step 4
            for path in (run / "checkpoints" / "step-00000006").iterdir():
                path.unlink()
        job = launch(2, "-m", "mpipipe.train", "config.yaml", *args, cwd=tmp_path)
        assert job.returncode == 0, job.stderr
    assert "after 4 steps" in job.stdout
    assert read_trace(run / "timeline.json").steps == (5, 6, 7, 8), "a resumed run counts its steps on"

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = [(e.step, e.value) for e in events.Scalars("loss")]
    assert [step for step, _ in shown] == list(range(1, 9))
    assert [value for _, value in shown] == pytest.approx([line["loss"] for line in lines], rel=1e-6)
    assert {"val_loss", "lr", "grad_norm", "step_s", "samples_per_s"} <= set(events.Tags()["scalars"])

    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert "note:" not in text
    assert "where the time went:" in text
    assert main(["report", str(run), "--html"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["weights_sha256"] in (run / "report.html").read_text()
