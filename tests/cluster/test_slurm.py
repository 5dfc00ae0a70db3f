"""Ranks, threads, binding and the launcher's line for made-up allocations."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from unseen import shows

from mpipipe.cluster import starting
from mpipipe.cluster.doctor.facts import Binding
from mpipipe.cluster.local import run_local
from mpipipe.cluster.partition import parsed
from mpipipe.cluster.shared import check_seen, look_anew
from mpipipe.cluster.slurm import (
    Allocation,
    Assignment,
    allocation,
    assign,
    compressed,
    cores_per_node,
    expanded,
    most_threads,
    spread,
    told,
)
from mpipipe.cluster.starting import start
from mpipipe.errors import LaunchError

OPEN_MPI, MPICH = "Open MPI 5.0.11", "MPICH 5.0.1"
JOB = {"SLURM_JOB_CPUS_PER_NODE": "4(x2),2", "SLURM_TASKS_PER_NODE": "2(x2),1"}


def node(cores: int, hyperthreads: int = 1, quota: int | None = None) -> Binding:
    usable = tuple(range(cores * hyperthreads))
    siblings = tuple(tuple(range(c, len(usable), cores)) for c in range(cores))
    return Binding(usable, len(usable) if quota is None else quota, usable, siblings, (usable,))


def test_an_allocation_is_what_slurm_says_and_tasks_count_only_where_they_were_asked_for() -> None:
    assert allocation(JOB) == Allocation((4, 4, 2))
    asked = {**JOB, "SLURM_NTASKS": "5", "SLURM_CPUS_PER_TASK": "2"}
    assert allocation(asked) == Allocation((4, 4, 2), (2, 2, 1), 2)
    with pytest.raises(LaunchError, match="not a Slurm job"):
        allocation({})
    for by_node in ((1,), (4, 4, 4), (2, 1, 1, 2)):
        assert expanded(compressed(by_node)) == by_node
    assert spread(7, 3) == (3, 2, 2)


@pytest.mark.parametrize(
    ("claimed", "here", "cores"),
    [
        ((4, 4), node(8), 4),  # a part of the node
        ((4, 4), node(2), 2),  # Slurm counts cores that are not there
        ((16, 8), node(8, hyperthreads=2), 4),  # Slurm counts hyperthreads
        ((8, 8), node(8, hyperthreads=2), 8),  # it counts cores, though each has two hyperthreads
        ((8,), node(8, quota=3), 3),  # a container
    ],
)
def test_cores_are_those_that_are_there(claimed: tuple[int, ...], here: Binding, cores: int) -> None:
    assert cores_per_node(Allocation(claimed), here) == cores


def test_the_threads_of_a_task_are_cores_also_where_slurm_counts_hyperthreads_for_it() -> None:
    here = node(16, hyperthreads=2)
    for per_task, threads in ((8, 4), (3, 3), (None, 4)):
        given = Allocation((32, 32), (4, 4), per_task)
        cores = cores_per_node(given, here)
        assert most_threads(given, cores) == threads
        assert assign(given, given.tasks, threads, cores).bound


def test_too_many_threads_for_the_cores_are_not_bound_and_said() -> None:
    given = Allocation((4, 4), (3, 3))
    found = assign(given, given.tasks, 2, cores=4)
    assert found == Assignment((3, 3), 2, bound=False)
    lines = list(told(given, found, 4, "the tasks of the job", "as pipeline.threads says"))
    assert lines[-2] == "binding: none, as 3 x 2 threads are more than the cores of a node"
    assert "share 4 cores of a node, and wait for each other; set pipeline.threads=1" in lines[-1]
    assert "Slurm counts 8, hyperthreads or cores that are not there" in next(
        told(Allocation((8, 8)), found, 4, "", "")
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without an MPI of its own, and the programs of a cluster in bin/."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    srun = tmp_path / "bin" / "srun"
    (tmp_path / "env" / "bin").mkdir(parents=True)
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\necho none pmi2 >&2\n")
    srun.chmod(0o755)
    return tmp_path


def program(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_launcher_is_the_one_that_fits_the_mpi(site: Path) -> None:
    environ = {"PATH": str(site / "bin")}
    two = Assignment((2, 2), 3, bound=True)

    def line(mpi: str, **more: str) -> tuple[str, str]:
        found = start(two, mpi, {**environ, **more})
        assert found.environ == ("SLURM_TASKS_PER_NODE=2(x2)",)
        return " ".join(found.launcher), found.why

    srun = "--nodes=2 --ntasks-per-node=2 --cpus-per-task=3 --cpu-bind=cores --threads-per-core=1"
    by_srun = f"{srun} --kill-on-bad-exit=1"
    assert line(MPICH) == (
        f"srun --mpi=pmi2 {by_srun}",
        "this Slurm starts the site's MPI itself",
    )
    with pytest.raises(LaunchError, match=r"no launcher for Open MPI 5\.0\.11: .* srun has no pmix; load"):
        line(OPEN_MPI)
    mpirun = program(site / "bin" / "mpirun")
    by_mpirun = "--map-by slot:PE=3 --bind-to core"
    assert line(OPEN_MPI) == (f"{mpirun} {by_mpirun}", "this srun has no pmix")
    own = program(site / "env" / "bin" / "mpirun")
    assert line(OPEN_MPI) == (f"{own} {by_mpirun}", "the environment brings its own launcher")
    assert line(MPICH)[0] == f"{own} -ppn 2 -bind-to core:3"
    assert line(OPEN_MPI, MPIPIPE_CONTAINER="a.sif")[0] == f"srun --mpi=pmix {by_srun}"
    named = line(OPEN_MPI, MPIPIPE_LAUNCHER="srun --mpi=pmix_v4 --exact")
    assert named == (f"srun --mpi=pmix_v4 --exact {by_srun}", "MPIPIPE_LAUNCHER says so")


def test_a_slurm_that_does_not_answer_is_said(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpipipe.cluster.partition.ASK_S", 0.2)
    (site / "bin" / "srun").write_text("#!/bin/sh\nexec sleep 5\n")
    with pytest.raises(LaunchError, match=r"srun --mpi=list: no answer within 0\.2 s; start again when"):
        start(Assignment((1,), 1, bound=True), OPEN_MPI, {"PATH": f"{site}/bin:/usr/bin:/bin"})


def test_unbound_ranks_are_unbound_by_every_means(site: Path) -> None:
    own = program(site / "env" / "bin" / "mpirun")
    found = start(Assignment((2, 1), 4, bound=False), OPEN_MPI, {"PATH": ""})
    assert found.environ == ("SLURM_TASKS_PER_NODE=2,1", "PRTE_MCA_hwloc_default_binding_policy=none")
    assert found.launcher == (own, "--map-by", "slot", "--bind-to", "none")
    shared = ["--overcommit", "--cpu-bind=none", "--kill-on-bad-exit=1"]
    assert starting._srun(Assignment((2, 1), 4, bound=False)) == ["--nodes=2", *shared]
    assert starting._srun(Assignment((2, 2), 4, bound=False)) == ["--nodes=2", "--ntasks-per-node=2", *shared]
    assert not any("ntasks-per-node" in word for word in starting._srun(Assignment((2, 1), 4, True)))


def test_to_look_anew_is_to_open_the_folder_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which a client of NFS asks for the names that there are now; nothing is left behind."""
    opened, real = list[Path](), os.open

    def seen(path: Path, flags: int) -> int:
        opened.append(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", seen)
    look_anew(tmp_path)
    look_anew(tmp_path / "none")
    assert opened == [tmp_path, tmp_path / "none"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_node_does_not_see_is_refused_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "a" / "config.yaml", tmp_path / "b" / "config.yaml"
    here.parent.mkdir()
    here.touch()
    run_local(2, lambda comm: check_seen(comm, here, 0.0))
    (tmp_path / "a" / "late.unseen").touch()
    with monkeypatch.context() as during:
        during.setattr("mpipipe.cluster.shared.look_anew", shows)
        run_local(2, lambda comm: check_seen(comm, here.with_name("late"), 0.0))

    def one_blind(comm: object) -> str:
        with pytest.raises(LaunchError) as told:
            check_seen(comm, elsewhere if comm.rank else here, 0.0)  # type: ignore[attr-defined, arg-type]
        return str(told.value)

    said = run_local(2, one_blind)
    assert all("is not seen by" in text and "set run.dir=/path/to/a/folder that all" in text for text in said)


def test_a_partition_is_the_default_one_or_the_one_that_is_named() -> None:
    lines = (
        "main*|4|64|2|16|256000+|2-00:00:00\nmain*|2|32|2|8|128000|2-00:00:00\nshort|1|8|2|4|4000|10:00\n"
        "counts-cores|1|32|2|16|4000|10:00\n"
    )
    main, short = parsed(lines, None), parsed(lines, "short")
    assert parsed(lines, "counts-cores").cores == 32
    assert (main.name, main.nodes, main.cores, main.limit_s) == ("main", 4, 32, 172800.0)
    assert (short.nodes, short.cores, short.node_bytes, short.limit_s) == (1, 8, 4000 << 20, 600.0)
    assert parsed(lines, "short,main").name == "main", "the largest: Slurm takes the one that begins first"
    with pytest.raises(LaunchError, match="--partition lng: this Slurm has main, short, counts-cores; name"):
        parsed(lines, "lng")
