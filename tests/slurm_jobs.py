"""Jobs on the Slurm of the test bed: submitted, watched, hurried, and what they leave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TESTBED = Path(os.environ.get("MPIPIPE_TESTBED", "/nonexistent"))
JOB_S = 240.0  # importing torch on every rank of a busy machine takes most of it
CONFIG = """\
model: {{name: mlp, inputs: 8, hidden: [16, 16], classes: 4, dropout: 0.1}}
data: {{name: "slow:data", args: {{marker: {folder}/slow}}}}
train: {{steps: 100, batch: 8, warmup: 1, save_every: 2}}
eval: {{every: 0, batches: 1}}
pipeline: {{micro_batches: 4}}
"""
SLOW = """\
import time
from pathlib import Path
from mpipipe.data.synthetic import SyntheticVectors

class Slow(SyntheticVectors):
    marker = ""
    def batch(self, split, step, *rest):
        if Path(self.marker).exists():
            time.sleep(0.2)
        return super().batch(split, step, *rest)

def data(marker):
    made = Slow(8, 4, 64, 0)
    made.marker = marker
    return made
"""


def command(*args: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    env = {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(
        [str(arg) for arg in args],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )


class Job:
    """`sbatch options slurm/train.sh config.yaml run.dir=NAME arguments`, in a folder."""

    def __init__(self, folder: Path, name: str, *options: str, site: str = "") -> None:
        """Submitted when no other job is left on any node. site: of slurm/sites."""
        self.folder, self.run_dir, self.out = folder, folder / name, folder / f"{name}.out"
        self._wait(lambda: set(self._slurm("sinfo", "-h", "-o", "%T").split()) == {"idle"})
        script = REPOSITORY / "slurm" / "train.sh"
        settings = ["bash", "-c", f'. {REPOSITORY}/slurm/sites/{site}.sh; exec "$@"', "site"] if site else []
        self.id = self._slurm(
            *settings, "sbatch", "--parsable", "-o", self.out, *options, script, "config.yaml",
            f"run.dir={name}", MPIPIPE_VENV=sys.prefix,
        )  # fmt: skip

    def _slurm(self, *words: str | Path, **environ: str) -> str:
        done = command(*words, cwd=self.folder, **environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def field(self, name: str) -> str:
        shown = self._slurm("scontrol", "show", "job", "-o", self.id)
        found = re.search(rf"\b{name}=(\S*)", shown)
        assert found, shown
        return found[1]

    @property
    def output(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else "nothing was written"

    @property
    def steps(self) -> int:
        """That are done."""
        try:
            return len((self.run_dir / "metrics.jsonl").read_text().splitlines())
        except OSError:
            return 0

    def until(self, true: Callable[[], object]) -> None:
        def checked() -> object:
            state = self.field("JobState")
            assert state not in ("FAILED", "CANCELLED", "TIMEOUT"), f"{state}\n{self.output}"
            return true()

        self._wait(checked)

    def _wait(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + JOB_S
        while not true():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.3)

    def trains(self) -> None:
        """Returns when a few steps are done."""
        done = self.steps
        self.until(lambda: self.steps > done + 2)

    def requeued(self, **change: str) -> None:
        """Returns when it waits for another start, which Slurm would delay by two minutes."""
        self.until(lambda: self.field("JobState") == "PENDING" and self.field("Restarts") != "0")
        time.sleep(5.0)  # the end of the first start is still on its way to Slurm
        self.update(StartTime="now", **change)

    def update(self, **change: str) -> None:
        changes = [f"{key}={value}" for key, value in change.items()]
        self._slurm("scontrol", "update", f"JobId={self.id}", *changes)

    def signal(self, name: str) -> None:
        self._slurm("scancel", f"--signal={name}", "--batch", self.id)

    def completed(self) -> str:
        """The hash of the weights that it ends with."""
        self.until(lambda: self.field("JobState") == "COMPLETED")
        assert self.field("ExitCode") == "0:0"
        return sha_of(self.run_dir)


def sha_of(run: Path) -> str:
    sha = json.loads((run / "summary.json").read_text())["weights_sha256"]
    assert len(sha) == 64
    return str(sha)
