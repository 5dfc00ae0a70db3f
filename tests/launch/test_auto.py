"""A number of micro-batches that was searched by real ranks, and kept by the run (make test-mpi)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from alone import train_alone

from mpipipe.state.resume import newest, read_state
from mpipipe.values import Plan, from_json

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4, dropout: 0.1}
data: {name: synthetic, samples: 64}
train: {batch: 8, warmup: 1, min_lr_ratio: 1}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: auto, schedule: auto}
"""


def test_ranks_search_together_and_a_resumed_run_keeps_what_they_found(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    job = launch(2, "-m", "mpipipe.train", "config.yaml", "run.dir=searched", "train.steps=2", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert "; took " in job.stdout
    saved = newest(tmp_path / "searched")
    assert saved is not None
    kept = read_state(saved).numerics
    plan = from_json(Plan, (tmp_path / "searched" / "plan.json").read_text())
    assert plan.numerics == kept
    assert kept.batch == 8
    train_alone(tmp_path, "run.dir=searched", "train.steps=4", "--resume")
    assert "tried " not in capsys.readouterr().out
    again = newest(tmp_path / "searched")
    assert again is not None
    assert read_state(again).numerics == kept
    given = train_alone(
        tmp_path, "run.dir=given", "train.steps=4", f"pipeline.micro_batches={kept.micro_batches}"
    )
    searched = json.loads((tmp_path / "searched" / "summary.json").read_text())
    assert searched["weights_sha256"] == given.weights_sha256
