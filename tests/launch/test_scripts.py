"""Scripts in which a rank does not make a call that the others make, or stands still: real launches."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpipipe.cluster.watchdog import STOOD_STILL

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
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
data = [(x, x.argmax()) for x in torch.randn(64, 16)]
pipe = Pipeline(model, loss, data, batch=32, val=data, schedule="1f1b")
"""


def run(launch: Launch, folder: Path, text: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT + text)
    return launch(ranks, "script.py", cwd=folder, timeout_s=120, env={"TMPDIR": str(folder / "tmp")})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "zero", "one", "ranks"),
    [
        (
            "pipe.fit(2)\nif pipe.rank == 0:\n    pipe.save('saved')\n",
            "Pipeline.save", "rank 1: the end of the ", 2,
        ),
        (
            "if pipe.rank == 0:\n    pipe.evaluate()\npipe.fit(2)\n",
            "Pipeline.evaluate", "ranks 1, 2: Pipeline.fit", 3,
        ),
        (
            "def call(pipe, step, values):\n    if pipe.rank == 0:\n        pipe.state_dict()\n"
            "pipe.fit(4, callbacks=[call])\n",
            "Pipeline.state_dict", "rank 1: Pipeline.step", 2,
        ),
    ],
    ids=["save, then the end", "evaluate, then fit, of three", "state_dict in a callback"],
)  # fmt: skip
def test_a_call_of_one_rank_alone_is_told_with_its_line_and_ends_all(
    launch: Launch, folder: Path, text: str, zero: str, one: str, ranks: int
) -> None:
    job = run(launch, folder, text, ranks)
    assert job.returncode == 1, job.stderr
    assert job.stderr.count("mpipipe: error: the ranks of this script make different calls") == 1, job.stderr
    assert f"rank 0: {zero}, " in job.stderr
    assert "script.py:" in job.stderr
    assert one in job.stderr
    assert list((folder / "tmp").glob("mpipipe-*")) == []


def test_a_script_that_fails_leaves_nothing_for_its_watchdog(launch: Launch, folder: Path) -> None:
    job = run(launch, folder, "pipe.fit(2)\nif pipe.rank == 1:\n    1 / 0\npipe.evaluate()\n")
    assert job.returncode == 1, job.stderr
    assert "ZeroDivisionError" in job.stderr
    assert "different calls" not in job.stderr
    assert list((folder / "tmp").glob("mpipipe-*")) == []


STUCK = """\
class Slow(list):
    slow_s = 0.0

    def __getitem__(self, i):
        wait_s, self.slow_s = self.slow_s, 0.0
        time.sleep(wait_s)
        return super().__getitem__(i)


class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        if pipe.rank == 1 and pipe.steps_done == 3:
            time.sleep(600)
        super().step(closure)


slow = Slow(data)
pipe = Pipeline(model, loss, slow, lambda named: Stuck([p for _, p in named], lr=0.1), batch=32,
                schedule="1f1b", watchdog=2)
pipe.fit(1)
slow.slow_s = 5.0
pipe.fit(3)
pipe.say("the data has come")
pipe.fit(4)
"""


def test_a_script_that_stands_still_within_a_call_is_explained_and_one_that_waits_for_data_is_not(
    launch: Launch, folder: Path
) -> None:
    sound = SCRIPT[SCRIPT.index("pipe = ") :]
    (folder / "script.py").write_text(SCRIPT.replace(sound, STUCK))
    job = launch(2, "script.py", cwd=folder, timeout_s=120, env={"TMPDIR": str(folder / "tmp")})
    assert job.returncode == STOOD_STILL, job.stderr
    assert "the data has come" in job.stdout
    assert job.stderr.count("mpipipe: watchdog: ") == 1, job.stderr
    assert "the limit is 2 s (Pipeline(watchdog=...))" in job.stderr
    assert "is in STEP of stage 1, since " in job.stderr
    assert "script.py:" in job.stderr
    assert len(list((folder / "tmp").glob("mpipipe-*/flight/diagnosis.txt"))) == 1, "with the records"


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
