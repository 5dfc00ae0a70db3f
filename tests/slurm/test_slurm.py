"""A real Slurm of two nodes: slurm/train.sh trains to the same bits as mpirun, and a launch that
would train two copies is refused. Needs the test bed (MPIPIPE_TESTBED) and root."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY, command, sha_of

from mpipipe.values import Plan, Report, from_json

pytestmark = pytest.mark.slurm
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_job_trains_to_the_bits_of_mpirun_with_either_launcher(
    slurm: None, folder: Path, whole_sha: str
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
        assert "ranks: 2, 1(x2) by node, the tasks of the job" in output
        assert f"launcher: {launcher or f'{sys.prefix}/bin/mpirun'} --" in output
        assert sha_of(folder / run) == whole_sha


def test_replicas_on_two_nodes_train_as_one_rank_does(slurm: None, folder: Path, launch: Launch) -> None:
    """Two on each to the same bits; two and one node by node, in another order of the same sums."""

    def ran(run: str) -> Report:
        return from_json(Report, (folder / run / "summary.json").read_text())

    alone = launch(1, "-m", "mpipipe.train", "config.yaml", "run.dir=alone", "pipeline.blocks=4", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    for run, how, ranks, nodes in (
        ("exact", "pipeline.blocks=4", (0, 1, 2, 3), ()),
        ("fast", "pipeline.reduce=fast", (0, 1, 2), (0, 0, 1)),
    ):
        job = command(
            "srun", "--mpi=pmix", "-N", "2", "-n", str(len(ranks)), "--distribution=block",
            sys.executable, "-m", "mpipipe.train", "config.yaml", f"run.dir={run}", how,
            f"pipeline.replicas={len(ranks)}",
            cwd=folder, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        )  # fmt: skip
        assert job.returncode == 0, job.stdout + job.stderr
        layout = from_json(Plan, (folder / run / "plan.json").read_text()).layout
        assert (layout.ranks, layout.nodes) == ((ranks,), nodes)
    assert sha_of(folder / "exact") == sha_of(folder / "alone")
    assert ran("fast").final_loss == pytest.approx(ran("alone").final_loss, rel=1e-4)


def test_ranks_with_more_threads_than_a_node_has_cores_share_them(slurm: None, folder: Path) -> None:
    """Slurm refuses a step whose tasks are to have more cores than there are."""
    job = command(
        "sbatch", "--wait", "--parsable", "-N", "2", "--ntasks-per-node=1", "-o", "shared.out",
        REPOSITORY / "slurm" / "train.sh", "config.yaml", "run.dir=shared", "pipeline.threads=5",
        cwd=folder, MPIPIPE_VENV=sys.prefix, MPIPIPE_LAUNCHER="srun --mpi=pmix",
    )  # fmt: skip
    output = (folder / "shared.out").read_text()
    assert job.returncode == 0, f"{job.stderr}\n{output}"
    assert "binding: none, as 1 x 5 threads are more than the cores of a node" in output
    assert "2 ranks x 5 threads" in output


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
