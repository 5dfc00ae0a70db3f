"""The end of the data, on a pipeline whose steps are made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpipipe.cluster.ending import TimeLimit
from mpipipe.cluster.watchdog import Watchdog
from mpipipe.config import parse
from mpipipe.errors import EndOfData
from mpipipe.pipeline import Step
from mpipipe.running import Run
from mpipipe.values import Cluster, Device


class Ends:
    """Two steps; every evaluation is noted."""

    rank = 0

    def __init__(self) -> None:
        self.evaluated: list[int] = []
        self.step = 0

    def timed_step(self, stop: bool) -> tuple[Step, None]:
        if self.step == 2:
            raise EndOfData("the data ended after 2 steps")
        self.step += 1
        return Step(self.step, 2.0, None, None, 0.1, stop), None

    def evaluate(self, batches: int) -> dict[str, float]:
        self.evaluated.append(self.step)
        return {"loss": 1.5}


def with_made_up_steps(every: int) -> Any:
    """A run whose steps are those of `Ends`. every: steps between evaluations."""
    run: Any = Run.__new__(Run)
    run.config = SimpleNamespace(
        train=SimpleNamespace(steps=9, save_every=0, batch=4),
        eval=SimpleNamespace(every=every, batches=1),
    )
    run.pipe, run.data = Ends(), SimpleNamespace(val_samples=8, tokens_per_sample=1)
    run.recorder, run.step_s, run.values, run.unit = SimpleNamespace(add=lambda _: None), [], {}, "samples"
    run.slowness = SimpleNamespace(add=lambda _: None)
    run.watchdog, run.limit = Watchdog(0, 1, Path(), "off"), TimeLimit(None, {})
    run.last, run.turn_s, run.save_s, run.all_steps_s, run.save = None, 0.0, 0.0, 0.0, lambda background: None
    run.log = SimpleNamespace(step=lambda step, values: None)
    return run


@pytest.mark.parametrize(
    ("every", "rows"), [(0, [(1, False), (2, False), (2, True)]), (2, [(1, False), (2, True)])]
)
def test_the_last_evaluation_is_written_also_where_the_data_ends(
    every: int, rows: list[tuple[int, bool]]
) -> None:
    run = with_made_up_steps(every)
    written: list[tuple[int, bool]] = []
    shown: list[tuple[int, bool]] = []
    run.log = SimpleNamespace(step=lambda step, values: shown.append((step, "val_loss" in values)))
    metrics: Any = SimpleNamespace(write=lambda step, **values: written.append((step, "val_loss" in values)))
    asked: list[str] = []
    assert run.loop(metrics, asked).stop
    assert asked == ["the end of the data"]
    assert run.pipe.evaluated == [2]
    assert written == shown == rows
    assert run.all_steps_s == pytest.approx(0.2), "the time of both"


def test_a_run_ends_after_the_step_that_its_time_limit_leaves() -> None:
    run, asked = with_made_up_steps(0), list[str]()
    run.limit = TimeLimit(1.0, {}, lambda: 1000.0 + 60.0 * run.pipe.step)
    last = run.loop(None, asked)
    assert (last.step, last.stop, asked) == (2, True, ["the time limit"])


@pytest.mark.parametrize(
    ("config", "metrics", "val_samples", "says"),
    [
        ("", {}, 0, None),
        ("", {"top5": None}, 8, None),
        ("", {"top5": None}, None, None),
        ("", {"top5": None}, 0, "no validation part, so there is no validation loss and no top5"),
        ("eval: {every: 5}", {}, 0, "no validation part, so there is no validation loss"),
    ],
)
def test_what_is_asked_for_and_cannot_be_evaluated_is_said(
    config: str, metrics: dict[str, None], val_samples: int | None, says: str | None
) -> None:
    run: Any = Run.__new__(Run)
    run.config, run.built = parse(config), SimpleNamespace(metrics=metrics)
    run.data = SimpleNamespace(val_samples=val_samples)
    found = run._missing()
    assert found is None if says is None else found.endswith(says)


def test_training_waits_for_saves_where_a_copy_does_not_fit() -> None:
    run: Any = Run.__new__(Run)
    run.config = parse("train: {save_every: 5}")
    devices = tuple(Device("cpu", 1.0, memory_bytes, 1) for memory_bytes in (200, 155))
    run.pipe = SimpleNamespace(
        plan=SimpleNamespace(prediction=SimpleNamespace(peak_bytes=(100, 100))),
        costs=SimpleNamespace(cluster=Cluster(devices, (0, 0), {})),
    )
    assert run._copies((100, 55)) == ((100, 55), None)
    copies, note = run._copies((100, 60))
    assert copies == ()
    assert note.endswith("rank 1 has no room for a copy of its state, 60 bytes; 5 bytes are missing")
    run.config = parse("")
    assert run._copies((100, 60)) == ((), None), "there is one save only, at the end"
