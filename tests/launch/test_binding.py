"""Ranks that a real launcher left the same cores: on which ones their threads are while they train."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is not to be divided"),
]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [16, 16], classes: 4}
data: {name: synthetic, samples: 64}
train: {steps: 3, batch: 8, warmup: 1}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 4}
run: {dir: run}
"""
TELLS = """
import json, os, pathlib, sys
from mpipipe import train
from mpipipe.runtime.trainer import Trainer

step = Trainer.step

def tells(self, number, **how):
    done = step(self, number, **how)
    if number == 2:
        threads = pathlib.Path("/proc/self/task").iterdir()
        masks = [sorted(os.sched_getaffinity(int(thread.name))) for thread in threads]
        pathlib.Path(f"masks-{self.comm.rank}.json").write_text(json.dumps(masks))
    return done

Trainer.step = tells
sys.exit(train.main(sys.argv[1:]))
"""


def masks(launch: Launch, folder: Path, ranks: int, *words: str, **environ: str) -> list[set[int]]:
    """Of each rank, where all its threads may run; `launch` binds none."""
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "script.py").write_text(TELLS)
    job = launch(ranks, "script.py", "config.yaml", *words, cwd=folder, env=environ)
    assert job.returncode == 0, job.stderr
    found = [json.loads((folder / f"masks-{rank}.json").read_text()) for rank in range(ranks)]
    assert all(len(threads) > 1 for threads in found)  # the helper that moves messages on
    assert all(threads.count(threads[0]) == len(threads) for threads in found), found
    said = "binding: each rank to " in job.stdout
    assert said == (set(found[0][0]) != os.sched_getaffinity(0))
    return [set(threads[0]) for threads in found]


def test_ranks_share_out_the_cores_that_they_were_left(launch: Launch, tmp_path: Path) -> None:
    first, second = masks(launch, tmp_path, 2)
    assert first.isdisjoint(second)
    assert first | second == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["pipeline.bind=none"], {}),
        ([f"pipeline.threads={len(os.sched_getaffinity(0))}"], {}),  # there are too few cores
        ([], {"OMP_PROC_BIND": "false", "SLURM_CPUS_ON_NODE": "1"}),  # of which one only was granted
    ],
)
def test_ranks_stay_where_they_are(
    launch: Launch, tmp_path: Path, words: list[str], environ: dict[str, str]
) -> None:
    assert masks(launch, tmp_path, 2, *words, **environ) == [os.sched_getaffinity(0)] * 2


def test_doctor_shows_who_was_bound_to_what(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, "-m", "mpipipe", "doctor", cwd=tmp_path)
    text = " ".join(job.stdout.split())
    assert (
        len(re.findall(r"rank [01]: 1 thread on cores? [\d, -]+(, NUMA [\d, -]+)?, bound by mpipipe", text))
        == 2
    )
    job = launch(2, "-m", "mpipipe", "doctor", "--bind", "none", cwd=tmp_path)
    assert "ranks 0-1: 1 thread each on cores " in job.stdout
    assert "bound by mpipipe" not in job.stdout
