"""A real Slurm of two nodes: slurm/train.sh trains to the same bits as mpirun, and a launch that
would train two copies is refused. Needs the test bed (MPIPIPE_TESTBED) and root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm
REPOSITORY = Path(__file__).resolve().parents[2]
TESTBED = Path(os.environ.get("MPIPIPE_TESTBED", "/nonexistent"))
JOB_S = 240.0  # importing torch on every rank of a busy machine takes most of it
CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4, dropout: 0.1}
data: {name: synthetic, samples: 64}
train: {steps: 4, batch: 8, warmup: 1}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 4}
"""

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


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


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    up = subprocess.run([TESTBED / "slurm-up", "-n", "2"], capture_output=True, text=True, timeout=600)
    try:
        assert up.returncode == 0, f"slurm-up failed\n{up.stdout}\n{up.stderr}"
        yield
    finally:
        subprocess.run([TESTBED / "slurm-down"], check=True, capture_output=True, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user works: not the repository, so that relative paths are put to the test."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def weights_sha256(folder: Path, launch: Launch) -> str:
    """Of the same training under plain mpirun."""
    plain = launch(2, "-m", "mpipipe.train", "config.yaml", "run.dir=plain", cwd=folder, timeout_s=JOB_S)
    assert plain.returncode == 0, plain.stderr
    return sha_of(folder / "plain")


def sha_of(run: Path) -> str:
    sha = json.loads((run / "summary.json").read_text())["weights_sha256"]
    assert len(sha) == 64
    return str(sha)


def test_a_job_trains_to_the_bits_of_mpirun_with_either_launcher(
    slurm: None, folder: Path, weights_sha256: str
) -> None:
    for run, launcher in (("by_mpirun", ""), ("by_srun", "srun --mpi=pmix")):
        job = command(
            "sbatch", "--wait", "--parsable", "-N", "2", "--ntasks-per-node=1", "-o", f"{run}.out",
            REPOSITORY / "slurm" / "train.sh", "config.yaml", f"run.dir={run}",
            cwd=folder, MPIPIPE_VENV=sys.prefix, MPIPIPE_LAUNCHER=launcher,
        )  # fmt: skip
        output = (folder / f"{run}.out").read_text()
        assert job.returncode == 0, f"{job.stderr}\n{output}"
        state = command("scontrol", "show", "job", "-o", job.stdout.strip(), cwd=folder).stdout
        assert "JobState=COMPLETED" in state
        assert "ExitCode=0:0" in state
        assert "2 ranks on 2 nodes start with" in output
        assert (launcher or f"{sys.prefix}/bin/mpirun") in output
        assert sha_of(folder / run) == weights_sha256


def test_a_failing_job_is_a_failed_job(slurm: None, folder: Path) -> None:
    job = command(
        "sbatch", "--wait", "--parsable", "-N", "2", "--ntasks-per-node=1", "-o", "wrong.out",
        REPOSITORY / "slurm" / "train.sh", "config.yaml", "train.stepz=3",
        cwd=folder, MPIPIPE_VENV=sys.prefix,
    )  # fmt: skip
    assert job.returncode != 0
    state = command("scontrol", "show", "job", "-o", job.stdout.strip(), cwd=folder).stdout
    assert "JobState=FAILED" in state
    assert "stepz" in (folder / "wrong.out").read_text()


def test_srun_that_would_start_copies_is_refused_with_the_line_that_fixes_it(
    slurm: None, folder: Path
) -> None:
    copies = command(
        "srun", "--mpi=none", "-N", "2", "-n", "2",
        sys.executable, "-m", "mpipipe.train", "config.yaml", "run.dir=copies",
        cwd=folder, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )  # fmt: skip
    said = copies.stdout + copies.stderr
    assert copies.returncode != 0, said
    assert said.count("fix: srun --mpi=pmix -n 2 ") == 1, said  # by one process, once
    assert "Traceback" not in said
    assert not (folder / "copies" / "summary.json").exists()


def test_the_doctor_tells_a_launch_that_fits_from_one_that_does_not(slurm: None, folder: Path) -> None:
    def doctor(mpi: str) -> subprocess.CompletedProcess[str]:
        return command(
            "srun", f"--mpi={mpi}", "-N", "2", "-n", "2", sys.executable, "-m", "mpipipe", "doctor", "--json",
            cwd=folder, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        )  # fmt: skip

    fits = doctor("pmix")
    value = json.loads(fits.stdout)
    assert [f for f in value["findings"] if f["level"] == "PROBLEM"] == [], fits.stdout
    assert fits.returncode == 0
    assert [r["node"] for r in value["ranks"]] == [0, 1]
    assert value["ranks"][0]["launch"]["launcher"] == "srun"
    assert [link["level"] for link in value["ranks"][0]["links"]] == ["switch"]

    alone = doctor("none")
    (problem,) = [
        f for f in json.loads(alone.stdout)["findings"] if f["level"] == "PROBLEM"
    ]  # of one process
    assert alone.returncode != 0
    assert "srun started 2 processes" in problem["text"]
    assert problem["fix"].startswith("srun --mpi=pmix -n 2 ")
