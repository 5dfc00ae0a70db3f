"""The doctor in real worlds: by mpirun, by a launcher that does not fit, and with a rank that hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs
REPOSITORY = Path(__file__).resolve().parents[2]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

HANGS = """
import sys, time
from mpipipe.cluster.doctor import transport
from mpipipe.commands import doctor, examine

measure = transport.measure

def hangs(comm):
    if comm.rank == 1:
        time.sleep(1000)
    return measure(comm)

transport.measure = hangs
examine.LIMIT_S = float(sys.argv[1])
sys.exit(doctor.main([]))
"""


def doctor(*argv: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "mpipipe", "doctor", *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "8", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_two_ranks_are_examined_together(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, "-m", "mpipipe", "doctor", "--json", cwd=tmp_path, timeout_s=100)
    value = json.loads(job.stdout.strip("\0\r\n "))
    problems = [f for f in value["findings"] if f["level"] == "PROBLEM"]
    assert (job.returncode, problems) == (0, []), job.stderr
    assert [r["rank"] for r in value["ranks"]] == [0, 1]
    mpi = value["ranks"][0]["mpi"]
    assert (mpi["thread_level"], mpi["wanted_level"]) == ("multiple", "multiple")
    assert mpi["tag_ub"] >= 32767
    (link,) = value["ranks"][0]["links"]
    assert (link["level"], link["peer"]) == ("node", 1)
    assert all(s > 0 for s in link["seconds"])
    assert all(r["failed"] == [] and r["compute"] and r["files"]["seen"] for r in value["ranks"])
    assert value["ranks"][0]["start"]["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


def test_one_process_is_told_how_to_start_several(tmp_path: Path) -> None:
    alone = doctor(cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert "one world of 1 rank" in alone.stdout
    assert " -n 2 python -m mpipipe doctor" in alone.stdout
    assert list(tmp_path.iterdir()) == []


def test_of_processes_that_are_alone_one_says_so(tmp_path: Path) -> None:
    """As when the mpiexec of MPICH starts two with another MPI."""
    first, second = (doctor(cwd=tmp_path, PMI_SIZE="2", PMI_RANK=str(rank)) for rank in range(2))
    assert (first.returncode, second.returncode) == (1, 0)
    assert first.stdout.count("PROBLEM") == 1
    assert "started 2 processes (PMI_SIZE=2)" in " ".join(first.stdout.split())
    assert " -n 2 " in first.stdout.partition("fix: ")[2].splitlines()[0]
    assert "matrix products" in first.stdout
    assert second.stdout == ""


def test_a_rank_that_hangs_ends_the_job_with_what_was_found(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HANGS)
    job = launch(2, "script.py", "8", cwd=tmp_path, timeout_s=100)
    assert job.returncode != 0
    assert job.stdout.count("a rank is stuck in messages") == 1, job.stdout + job.stderr
    assert "2 ranks on 1 node" in job.stdout
    assert "matrix products" not in job.stdout
