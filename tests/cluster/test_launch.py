"""Processes that are alone though several were started are found out, legal launches are not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpipipe.cluster import launch
from mpipipe.cluster.comm import Communicator, number_nodes
from mpipipe.cluster.launch import (
    binding_advice,
    check_world,
    default_threads,
    launcher_rank,
    load_advice,
    needs_sharing,
    ranks_per_node,
    threads_advice,
)
from mpipipe.cluster.local import run_local
from mpipipe.errors import LaunchError

OPEN_MPI, MPICH = "Open MPI v5.0.11, package: ...", "MPICH Version: 5.0.1"

ALONE = {
    "srun, wrong --mpi": (
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"},
        OPEN_MPI,
        "srun --mpi=pmix -n 4",
    ),
    "srun, MPICH": ({"SLURM_STEP_NUM_TASKS": "4"}, MPICH, "srun --mpi=pmi2 -n 4"),
    "srun --mpi=pmi2": (
        {"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4", "PMI_RANK": "0"},
        OPEN_MPI,
        "--mpi=pmix -n 4",
    ),
    "mpirun of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}, MPICH, "mpiexec -n 3"),
    "mpirun in srun --pty bash": (
        {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        MPICH,
        "mpiexec -n 4",
    ),
    "mpiexec of MPICH": ({"PMI_SIZE": "2", "PMI_RANK": "1"}, OPEN_MPI, "mpirun -n 2"),
}
LEGAL = {
    "no launcher": (1, {}),
    "mpirun -n 1 in a job of four tasks": (1, {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "4"}),
    "mpirun -n 1 whose daemon came from srun": (
        1,
        {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ),
    "the batch script itself": (1, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}),
    "srun -n 1": (1, {"SLURM_STEP_NUM_TASKS": "1"}),
    "srun --mpi=pmix": (4, {"SLURM_STEP_NUM_TASKS": "4"}),
    "mpirun -n 4 on two nodes": (4, {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}),
}


@pytest.mark.parametrize("name", ALONE)
def test_n_processes_of_size_1_are_refused_with_the_line_that_fixes_it(name: str) -> None:
    environ, library, fix = ALONE[name]
    with pytest.raises(LaunchError) as caught:
        check_world(1, environ, library)
    text = str(caught.value)
    assert "fix: " in text
    assert fix in text
    assert library.split()[0] in text
    assert "size 1" in text


@pytest.mark.parametrize("name", LEGAL)
def test_legal_launches_pass(name: str) -> None:
    check_world(*LEGAL[name], OPEN_MPI)


def test_the_rank_of_the_launcher_is_that_of_the_innermost() -> None:
    assert launcher_rank({}) == 0
    assert launcher_rank({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}) == 3
    assert (
        launcher_rank({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "PMI_SIZE": "4", "PMI_RANK": "3"})
        == 3
    )
    assert launcher_rank({"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}) == 0  # not started by srun
    under_mpirun = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
    assert launcher_rank({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **under_mpirun}) == 2


def test_cores_are_shared_when_ranks_outnumber_them() -> None:
    both = frozenset({0, 1})
    assert not needs_sharing([both, both])
    assert needs_sharing([both, both, both])
    assert not needs_sharing([frozenset({0}), frozenset({1})])  # bound to one core each


def test_threads_fill_the_fullest_node_and_are_the_same_everywhere() -> None:
    def threads(comm: Communicator) -> int:
        return default_threads(comm, frozenset(range(8)))

    assert run_local(3, threads, node_of_rank=(0, 0, 1)) == [4, 4, 4]
    assert run_local(1, threads) == [8]
    assert run_local(9, threads) == [1] * 9
    assert run_local(3, lambda comm: default_threads(comm, frozenset(range(8)), 1)) == [4] * 3  # one waits
    bound = run_local(2, lambda comm: default_threads(comm, frozenset({2 * comm.rank, 2 * comm.rank + 1})))
    assert bound == [2, 2]


def test_a_machine_that_others_use_is_noted() -> None:
    assert load_advice(2.9, 2) is None
    assert str(load_advice(4.84, 2)).startswith("others use this machine too: load 4.8 on 2 cores")


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    assert number_nodes([7, 7, 3, 7, 3]) == (0, 0, 1, 0, 1)
    assert run_local(3, ranks_per_node, node_of_rank=(0, 1, 0)) == [(2, 1)] * 3


def test_threads_that_share_a_core_and_idle_cores_are_named_with_the_next_move() -> None:
    assert binding_advice(cores=8, ranks_on_node=2, threads=4, bound=4) is None
    assert "--map-by slot:PE=4" in str(binding_advice(cores=8, ranks_on_node=2, threads=4, bound=1))
    assert "leave 4 of 8 cores idle" in str(binding_advice(cores=8, ranks_on_node=4, threads=1, bound=2))
    crowded = str(binding_advice(cores=8, ranks_on_node=3, threads=4, bound=8))
    assert crowded.startswith("3 ranks x 4 threads share 8 cores of a node")
    assert crowded.endswith("set pipeline.threads=2")
    assert str(binding_advice(2, 3, 1, 2)).endswith("start 2 ranks per node at most")


def test_the_node_on_which_cores_are_shared_is_told_before_one_that_idles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def advice(comm: Communicator) -> str | None:
        return threads_advice(comm, 1, frozenset({0, 1, 2}))

    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: frozenset({0, 1, 2}))
    crowded = run_local(5, advice, node_of_rank=(0, 1, 1, 1, 1))
    assert len(set(crowded)) == 1
    assert str(crowded[0]).startswith("4 ranks x 1 thread share 3 cores")
    assert run_local(3, advice) == [None] * 3
    assert "leave 1 of 3 cores idle" in str(run_local(2, advice)[0])
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: frozenset({0}))  # OMP_PROC_BIND=true
    assert str(run_local(3, advice)[0]).startswith("OpenMP binds the first threads of 3 ranks to the same")


@pytest.mark.slow
@pytest.mark.parametrize(("terminal", "launched"), [(True, True), (False, True), (True, False)])
def test_a_line_reaches_the_terminal_of_the_launcher_though_it_copies_nothing(
    terminal: bool, launched: bool
) -> None:
    """As mpirun after a Ctrl-C. A shell is no launcher: its terminal may not be where this process writes."""
    says = "import sys; from mpipipe.cluster.launch import say_past_launcher as say; sys.exit(say('stopped'))"
    launcher = (
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {says!r}], stderr=-3))"
    )
    bare = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM"))
    }
    environ = bare | ({"OMPI_COMM_WORLD_SIZE": "2"} if launched else {})
    master, slave = os.openpty()
    with open(slave, "wb") as stream:
        err = stream if terminal else subprocess.DEVNULL
        job = subprocess.run([sys.executable, "-c", launcher], stderr=err, env=environ, check=False)
        assert job.returncode == (terminal and launched)
        if terminal and launched:
            assert os.read(master, 100).decode() == "\r\nstopped\r\n"
    os.close(master)
