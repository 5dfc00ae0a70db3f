"""Scalars for TensorBoard, read back by its own reader."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mpipipe.cluster.local import run_local
from mpipipe.config import parse
from mpipipe.errors import ConfigError
from mpipipe.report import Metrics
from mpipipe.report.scalars import Scalars, need_tensorboard
from mpipipe.train import train

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
)


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events: Any = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_metric_is_a_scalar_of_its_step(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl", Scalars(tmp_path / "tb", 1)) as metrics:
        metrics.write(step=1, loss=2.5, lr=0.25)
        metrics.write(step=2, loss=math.nan, lr=0.5, val_loss=3.0)
    found = read(tmp_path / "tb")
    assert found.keys() == {"loss", "lr", "val_loss"}
    assert found["lr"] == [(1, 0.25), (2, 0.5)]
    assert found["val_loss"] == [(2, 3.0)]
    assert found["loss"][0] == (1, 2.5)
    assert math.isnan(found["loss"][1][1])
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1, "loss": 2.5')


def test_what_is_no_number_is_in_the_file_alone(tmp_path: Path) -> None:
    """As the line of a recovery has it."""
    with Metrics(tmp_path / "metrics.jsonl", Scalars(tmp_path / "tb", 1)) as metrics:
        metrics.write(step=4, lost_ranks=[1], replayed=2, recovery_s=0.5, whole=True)
    assert read(tmp_path / "tb") == {"replayed": [(4, 2.0)], "recovery_s": [(4, 0.5)]}
    assert '"lost_ranks": [1]' in (tmp_path / "metrics.jsonl").read_text()


def test_steps_beyond_the_checkpoint_of_a_resume_are_shown_once(tmp_path: Path, monkeypatch: Any) -> None:
    for first, last, value in ((1, 5, 1.0), (4, 6, 2.0)):
        monkeypatch.setattr("time.time", lambda now=1e9 + first: now)  # files are read in order of seconds
        scalars = Scalars(tmp_path, first)
        for step in range(first, last + 1):
            scalars.write(step, {"loss": value})
        scalars.close()
    assert read(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]


@pytest.mark.slow
def test_without_the_package_the_message_names_the_line_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_tensorboard()
    monkeypatch.setattr("mpipipe.report.scalars.find_spec", lambda name: None)
    config = parse(f"run: {{tensorboard: true, dir: {tmp_path / 'run'}}}")
    with pytest.raises(ConfigError, match=r"run\.tensorboard = true .* pip install 'mpipipe\[tensorboard\]'"):
        run_local(1, lambda comm: train(comm, config))
    assert not (tmp_path / "run").exists()


def test_it_is_off_unless_asked_for() -> None:
    assert not parse("").run.tensorboard
    assert parse("run: {tensorboard: true}").run.tensorboard
