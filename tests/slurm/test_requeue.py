"""A job whose time is over, or that loses a node, goes on in another start, to the bits of one that was left
alone. On a real Slurm; needs the test bed (MPIPIPE_TESTBED) and root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_jobs import Job

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]
ONE_EACH = ("--ntasks-per-node=1",)


@pytest.fixture
def slow(folder: Path) -> Path:
    """The file that makes steps slow."""
    (folder / "slow").touch()
    return folder / "slow"


def test_usr1_saves_and_queues_again_with_the_same_final_bits(
    folder: Path, slow: Path, whole_sha: str
) -> None:
    job = Job(folder, "asked", "-N", "2", *ONE_EACH, site="ethernet")
    job.trains()
    job.signal("USR1")
    slow.unlink()
    job.requeued()
    assert job.completed() == whole_sha
    assert job.field("Restarts") == "1"
    assert job.output.count("the time of the job is over before the run: it is queued again") == 1
    assert f"mpipipe: resuming {job.run_dir} after" in job.output


@pytest.mark.full  # a limit is whole minutes; the signal is the one above
def test_the_time_limit_of_the_job_saves_and_queues_again(folder: Path, slow: Path, whole_sha: str) -> None:
    job = Job(folder, "limited", "-N", "2", *ONE_EACH, "-t", "10", "--signal=B:USR1@60")
    job.trains()
    job.update(TimeLimit="2")
    job.requeued(TimeLimit="10")
    slow.unlink()
    assert job.completed() == whole_sha
    assert job.field("Restarts") == "1"


def test_a_job_that_loses_a_node_goes_on_with_those_that_are_left(
    folder: Path, slow: Path, whole_sha: str, kill: Callable[[str], None]
) -> None:
    job = Job(folder, "range", "-N", "2-3")
    job.trains()
    assert "nodes: 3, with " in job.output
    assert "by node, the shortest predicted step: 1 per node " in job.output
    kill("node3")
    job.requeued()
    slow.unlink()
    assert job.completed() == whole_sha
    assert job.field("NumNodes") == "2"
    assert "nodes: 2, with " in job.output


def test_with_no_kill_a_job_that_loses_a_node_goes_on_without_another_start(
    folder: Path, slow: Path, whole_sha: str, kill: Callable[[str], None]
) -> None:
    job = Job(folder, "alone", "-N", "3", *ONE_EACH, "--no-kill")
    job.trains()
    kill("node3")
    job.until(lambda: "node3: no answer; goes on with 2 ranks" in job.output)
    slow.unlink()
    assert job.completed() == whole_sha
    assert job.field("Restarts") == "0"
