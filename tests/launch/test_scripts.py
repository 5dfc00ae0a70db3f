"""Scripts in which a rank does not make a call that the others make: real launches of two ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

SCRIPT = """\
import time
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from mpipipe import Pipeline


def loss(outputs, batch):
    return cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
data = [(x, x.argmax()) for x in torch.randn(64, 16)]
pipe = Pipeline(model, loss, data, batch=32, val=data, schedule="1f1b")
"""


def run(launch: Launch, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT + text)
    return launch(2, "script.py", cwd=folder, timeout_s=120, env={"TMPDIR": str(folder / "tmp")})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "zero", "one"),
    [
        ("pipe.fit(2)\nif pipe.rank == 0:\n    pipe.save('saved')\n", "Pipeline.save", "the end of the "),
        ("if pipe.rank == 0:\n    pipe.evaluate()\npipe.fit(2)\n", "Pipeline.evaluate", "Pipeline.fit"),
        (
            "def call(pipe, step, values):\n    if pipe.rank == 0:\n        pipe.state_dict()\n"
            "pipe.fit(4, callbacks=[call])\n",
            "Pipeline.state_dict", "Pipeline.step",
        ),
    ],
    ids=["save, then the end", "evaluate, then fit", "state_dict in a callback"],
)  # fmt: skip
def test_a_call_of_one_rank_alone_is_told_with_its_line_and_ends_all(
    launch: Launch, folder: Path, text: str, zero: str, one: str
) -> None:
    job = run(launch, folder, text)
    assert job.returncode != 0
    assert job.stderr.count("mpipipe: error: the ranks of this script make different calls") == 1, job.stderr
    assert f"rank 0: {zero}, " in job.stderr
    assert "script.py:" in job.stderr
    assert f"rank 1: {one}" in job.stderr
    assert list((folder / "tmp").glob("mpipipe-*")) == []


def test_a_script_that_fails_leaves_nothing_for_its_watchdog(launch: Launch, folder: Path) -> None:
    job = run(launch, folder, "pipe.fit(2)\nif pipe.rank == 1:\n    1 / 0\npipe.evaluate()\n")
    assert job.returncode != 0
    assert "ZeroDivisionError" in job.stderr
    assert "different calls" not in job.stderr
    assert list((folder / "tmp").glob("mpipipe-*")) == []


def test_a_sound_script_is_not_disturbed_and_leaves_nothing(launch: Launch, folder: Path) -> None:
    """Its ranks end at different times, and one works alone in between."""
    job = run(
        launch, folder,
        "pipe.fit(3)\npipe.evaluate()\nif pipe.rank == 1:\n    time.sleep(3)\n"
        "pipe.save('saved')\npipe.say(f'done {pipe.steps_done}')\nif pipe.rank == 0:\n    time.sleep(3)\n",
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert "done 3" in job.stdout
    assert "mpipipe: " not in job.stderr
    assert [path.name for path in (folder / "tmp").glob("mpipipe-*")] == []
