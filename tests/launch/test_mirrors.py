"""Ranks of real jobs that are killed, or frozen, where it hurts most: the others go on, with the same bits.

The many kills at random instants are those of `make bench-survive`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alone import train_alone

from mpipipe.cluster.survivors import FLAGS

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

EVERY = 4
CONFIG = f"""\
model: {{name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4, dropout: 0.1}}
data: {{name: synthetic, samples: 64}}
train: {{steps: 18, batch: 8, warmup: 1, save_every: 6}}
eval: {{every: 0, batches: 1}}
pipeline: {{micro_batches: 4, schedule: 1f1b}}  # whose backward, where ranks are killed, is one instruction
run: {{dir: run, recover: mpi, mirror_every: {EVERY}}}
"""

KILLED = """
import json, os, sys
from mpipipe import train
from mpipipe.cluster.mpi import MpiCommunicator
from mpipipe.pipeline import Pipeline
from mpipipe.runtime.interpreter import Interpreter
from mpipipe.state.mirrors import Mirrors
from mpipipe.survival import Survival

kills, me = json.loads(sys.argv[1]), int(os.environ["OMPI_COMM_WORLD_RANK"])

def arm(owner, name, where, step_of, after=False):
    call = getattr(owner, name)

    def deadly(self, *args, **how):
        step, result = step_of(self, *args), call(self, *args, **how) if after else None
        for kill in [kill for kill in kills if kill[:3] == [me, where, step]]:
            kills.remove(kill)
            os.kill(os.getpid(), kill[3])
        return result if after else call(self, *args, **how)

    setattr(owner, name, deadly)

arm(Interpreter, "_backward", "backward", lambda self, i: self.job.step + 1)
arm(Interpreter, "_step", "update", lambda self, i: self.job.step + 1, after=True)
arm(Mirrors, "take", "transfer", lambda self, step, *_: step, after=True)
arm(Mirrors, "commit", "sent", lambda self: self._pending[1] if self._pending else 0)
arm(Survival, "fetch", "recovery", lambda self, comm, found, *_: found.key.step)
arm(Pipeline, "begin_save", "save", lambda self, *_: self.steps_done, after=True)
arm(MpiCommunicator, "recv_object", "wait", lambda self, *_: 0)
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "killed.py").write_text(KILLED)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the weights are in the end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "config.yaml").write_text(CONFIG)
    return train_alone(folder, "run.recover=restart").weights_sha256


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


@pytest.mark.parametrize(
    ("ranks", "kills", "from_mirrors"),
    [
        pytest.param(
            4, [(1, "update", 10, 9), (3, "update", 10, 9), (0, "sent", 12, 9)], True, marks=pytest.mark.full
        ),
        (4, [(0, "save", 6, 9), (3, "backward", 10, 9), (1, "recovery", 8, 9)], True),
        (3, [(1, "backward", 10, 9), (2, "recovery", 8, 9)], False),
        pytest.param(4, [(2, "transfer", 8, 9), (1, "sent", 12, 9)], True, marks=pytest.mark.full),
    ],
    ids=[
        "two at once, then rank 0 while mirrors are sent",
        "within a save, within a recovery",
        "with its partner",
        "within mirrors",
    ],
)
def test_killed_ranks_change_no_bits(
    launch: Launch, folder: Path, undisturbed: str, ranks: int, kills: list[Any], from_mirrors: bool
) -> None:
    job = launch(
        ranks, "killed.py", json.dumps(kills), "config.yaml", cwd=folder, timeout_s=300,
        env={"MPIRUN_FLAGS": "--with-ft ulfm"},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    found = summary(folder)
    assert found["weights_sha256"] == undisturbed
    assert sorted(found["lost_ranks"]) == sorted(rank for rank, *_ in kills)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 19))
    again = [line["replayed"] for line in lines if "lost_ranks" in line]
    assert max(again) <= EVERY or not from_mirrors
    assert ("from mirrors" in job.stdout) == from_mirrors


@pytest.mark.parametrize(
    ("kills", "again", "says"),
    [
        pytest.param(
            [(1, "update", 10, 9)], 2,
            "lost rank 1; rank 2 in its place; 2 ranks and no spare left, on from step 8",
            id="a working rank", marks=pytest.mark.full,
        ),
        pytest.param(
            [(0, "backward", 10, 9), (2, "update", 14, 9)], 2,
            "lost rank 0; rank 2 in its place; 2 ranks and no", id="rank 0, then the one in its place",
        ),
        pytest.param(
            [(2, "wait", 0, 9)], 0, "lost rank 2, which was a spare; no spare left",
            id="the spare", marks=pytest.mark.full,
        ),
        pytest.param(
            [], 0, "2 ranks and 1 spare (rank 2) x 1 thread", id="none", marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_spare_takes_over_changes_no_bits_and_is_not_missed(
    launch: Launch, folder: Path, undisturbed: str, kills: list[Any], again: int, says: str
) -> None:
    job = launch(
        3, "killed.py", json.dumps(kills), "config.yaml", "run.spares=1", cwd=folder, timeout_s=300,
        env={"MPIRUN_FLAGS": "--with-ft ulfm"},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    found = summary(folder)
    assert found["weights_sha256"] == undisturbed
    assert found["lost_ranks"] == sorted(rank for rank, *_ in kills)
    assert found["spares"] == ([] if kills else [2])
    assert len(found["ranks"]) == (1 if len(kills) == 2 else 2)
    assert f"mpipipe: {says}" in job.stdout
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 19))
    assert max([line["replayed"] for line in lines if "lost_ranks" in line], default=0) == again
    assert "from mirrors" in job.stdout or not again
    assert not (folder / "run" / "flight" / "diagnosis.txt").exists()


@pytest.mark.parametrize(
    ("kill", "spares", "lost"),
    [
        pytest.param((1, "backward", 10, 19), 0, [[1]], id="a working rank"),
        pytest.param(  # it may be noticed after the last step
            (2, "wait", 0, 19), 1, [[], [2]], id="a spare", marks=pytest.mark.full
        ),
    ],
)
def test_a_frozen_rank_is_ended_and_done_without(
    launch: Launch, folder: Path, undisturbed: str, kill: Any, spares: int, lost: list[list[int]]
) -> None:
    # a busy machine is slow
    slower = FLAGS.replace("period 0.5", "period 2").replace("timeout 2", "timeout 8")
    words = (json.dumps([kill]), "config.yaml", f"run.spares={spares}")
    job = launch(3, "killed.py", *words, cwd=folder, timeout_s=300, env={"MPIRUN_FLAGS": slower})
    assert job.returncode == 0, job.stderr
    assert summary(folder)["weights_sha256"] == undisturbed
    assert summary(folder)["lost_ranks"] in lost


def test_without_ulfm_there_is_an_error_before_anything_begins(launch: Launch, folder: Path) -> None:
    job = launch(2, "-m", "mpipipe.train", "config.yaml", cwd=folder)
    assert job.returncode != 0
    assert job.stderr.count("mpipipe: error: run.recover = mpi: this MPI was not started") == 1, job.stderr
    assert "--with-ft ulfm" in job.stderr
    assert not (folder / "run").exists()


LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void (*release_t)(int, void *);
typedef int (*fence_t)(const void *, size_t, const void *, size_t, release_t, void *);
static struct { release_t call; void *data; } waiting;

static void late(int status, void *unused)
{
    struct timespec pause = {0, 50000000};
    nanosleep(&pause, NULL);
    waiting.call(status, waiting.data);
}

int PMIx_Fence_nb(const void *who, size_t n, const void *info, size_t m, release_t call, void *data)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    fence_t fence = (fence_t)dlsym(dlopen("libpmix.so.2", RTLD_LAZY | RTLD_NOLOAD), "PMIx_Fence_nb");
    if (rank == NULL || strcmp(rank, "1"))
        return fence(who, n, info, m, call, data);
    waiting.call = call, waiting.data = data;
    return fence(who, n, info, m, late, NULL);
}
"""


@pytest.mark.full
def test_a_rank_that_starts_late_is_not_lost(launch: Launch, folder: Path, undisturbed: str) -> None:
    """Rank 1 leaves each fence of MPI_Init 50 ms after the others, whose heartbeats come meanwhile. The job
    ends, too, with every rank there, which MPI's own end does not see to beside the detector."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler, by which a rank is made late")
    (folder / "late.c").write_text(LATE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "late.so", "late.c", "-ldl"], cwd=folder, check=True)
    environ = {"MPIRUN_FLAGS": f"{FLAGS} -x LD_PRELOAD={folder / 'late.so'}"}
    job = launch(3, "-m", "mpipipe.train", "config.yaml", cwd=folder, timeout_s=300, env=environ)
    assert job.returncode == 0, job.stderr
    assert summary(folder)["weights_sha256"] == undisturbed
    assert summary(folder)["lost_ranks"] == []


@pytest.mark.full
def test_a_rank_that_is_lost_while_all_start_ends_the_job(launch: Launch, folder: Path) -> None:
    """Nobody could go on yet, and the launcher would not end the others: the supervisor starts anew."""
    (folder / "lost.py").write_text(
        "import os, signal, sys\n"
        "from mpi4py import MPI\n"
        "from mpipipe import train\n"
        "if MPI.COMM_WORLD.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    environ = {"MPIRUN_FLAGS": FLAGS}
    job = launch(3, "lost.py", "config.yaml", cwd=folder, timeout_s=120, env=environ)
    assert "mpipipe: a rank was lost while all started" in job.stderr  # the exit code may be that of the lost
    assert not (folder / "run").exists()
