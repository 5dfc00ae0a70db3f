"""The launcher's side: do its processes form one MPI world, and how many cores has each?

A launcher that does not speak the language of the MPI library (another MPI's mpirun, srun with
the wrong --mpi) starts N processes that each believe to be alone: N full trainings, exit code 0.
`check_world` finds that out from what launchers write into the environment.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpipipe.cluster.node import OPENMP_BINDS
from mpipipe.cluster.spares import first_working
from mpipipe.errors import LaunchError
from mpipipe.planner.sizes import counted

if TYPE_CHECKING:
    from mpipipe.cluster.comm import Communicator


@dataclass(frozen=True)
class Launcher:
    name: str
    size: str  # environment variable: number of processes it started
    rank: str  # environment variable: which of them this one is


_MUCH = 1.5  # of the cores


PRTE = Launcher("the mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
HYDRA = Launcher("the mpiexec of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK")
MVAPICH = Launcher("the mpiexec of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK")
SRUN = Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
# Innermost first: mpirun inside a Slurm job leaves SLURM_* in the environment, with SLURM_PROCID
# 0 in every rank and SLURM_STEP_NUM_TASKS the number of its own daemons.
LAUNCHERS = (PRTE, HYDRA, MVAPICH, SRUN)
AS_ROOT = "--allow-run-as-root"  # Open MPI wants it, or two variables that may have been those of a script


def launched_by(environ: Mapping[str, str]) -> tuple[Launcher, int] | None:
    """What started this process, and how many; None: no launcher that is known."""
    started = [(x, int(environ[x.size])) for x in LAUNCHERS if environ.get(x.size, "").isdigit()]
    if not started:
        return None
    (first, n), last = started[0], started[-1]
    return last if first == HYDRA and last == (SRUN, n) else started[0]  # srun --mpi=pmi2 speaks for Hydra


def check_world(comm_size: int, environ: Mapping[str, str], library: str = "") -> None:
    """Raise LaunchError when this process is alone in its world but its launcher started several.

    `comm_size` is the size of MPI_COMM_WORLD, `library` the text of MPI_Get_library_version. The innermost
    launcher decides: `mpirun -n 1` inside a job of four tasks is legal, `mpirun -n 4` within `srun --pty
    bash`, a step of one task, is not.
    """
    if comm_size != 1:
        return
    found = launched_by(environ)
    if found is None or found[1] <= 1:
        return
    launcher, n = found
    mpi = " ".join(library.split()[:3]).strip(" ,") or "unknown"
    raise LaunchError(
        f"{launcher.name} started {n} processes ({launcher.size}={n}), but each is alone in an MPI world of "
        f"size 1: it does not fit the MPI of {sys.executable} ({mpi}).\n"
        f"  fix: {_fix(launcher, n, 'Open MPI' in library or not library)}"
    )


def _fix(launcher: Launcher, n: int, open_mpi: bool) -> str:
    """The line that starts the same program as one world."""
    command = shlex.join(sys.orig_argv)
    own = Path(sys.prefix) / "bin" / ("mpirun" if open_mpi else "mpiexec")
    mpirun = f"{own if own.exists() else own.name} -n {n} {command}"
    if launcher != SRUN:
        return mpirun
    return f"srun --mpi={'pmix' if open_mpi else 'pmi2'} -n {n} {command}\n  or, inside the job: {mpirun}"


def launcher_rank(environ: Mapping[str, str]) -> int:
    """Which process of the launcher this is, known even when MPI is not: only 0 should print."""
    ranks = (environ.get(x.rank, "") for x in LAUNCHERS if environ.get(x.size, "").isdigit())
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


def needs_sharing(cores: Sequence[frozenset[int]]) -> bool:
    """Whether the ranks of one node, given the cores each may use, outnumber the cores."""
    return len(cores) > len(frozenset().union(*cores))


def ranks_per_node(comm: Communicator) -> tuple[int, ...]:
    """By node."""
    counts = Counter(comm.node_of_rank)
    return tuple(counts[node] for node in range(len(counts)))


def default_threads(comm: Communicator, cores: frozenset[int], spares: int = 0) -> int:
    """Threads per rank that fill the fullest node without sharing; the same on all ranks, because
    the number of threads decides the bits. `cores`: this rank's `node.cores_available()`; spares: ranks that
    wait, and compute nothing. Collective."""
    by_node: dict[int, set[int]] = {}
    for node, own in zip(comm.node_of_rank, comm.allgather_object(cores), strict=True):
        by_node.setdefault(node, set()).update(own)
    ranks = Counter(comm.node_of_rank[rank] for rank in first_working(comm.node_of_rank, spares))
    return max(1, min((len(by_node[node]) // count for node, count in ranks.items()), default=1))


def binding_advice(cores: int, ranks_on_node: int, threads: int, bound: int) -> str | None:
    """What is amiss with threads and cores, with the next move; None when nothing is.

    cores: of the node's ranks together; bound: that this rank may use.
    """
    if threads > bound:
        return (
            f"{threads} threads per rank share {bound} cores: the launcher bound this rank; start with "
            f"`mpirun --bind-to none` or `--map-by slot:PE={threads}`, or set pipeline.threads={bound}"
        )
    idle = cores - ranks_on_node * threads
    if idle < 0:
        fit = cores // ranks_on_node
        most = f"set pipeline.threads={fit}" if fit else f"start {cores} ranks per node at most"
        return (
            f"{ranks_on_node} ranks x {counted(threads, 'thread')} share {counted(cores, 'core')} of a node, "
            f"and wait for each other; {most}"
        )
    if idle > 0:
        used = f"{counted(ranks_on_node, 'rank')} x {counted(threads, 'thread')}"
        return (
            f"{used} leave {idle} of {cores} cores idle; start more ranks, or set pipeline.threads (changes "
            f"the bits of the run); `python -m mpipipe plan CONFIG --cores {cores}` weighs both"
        )
    return None


def local_rank(comm: Communicator) -> int:
    """Among the ranks of its node."""
    return comm.node_of_rank[: comm.rank].count(comm.node_of_rank[comm.rank])


def threads_advice(comm: Communicator, threads: int, left: frozenset[int]) -> str | None:
    """What is amiss on the first node where something is, an idle core least. left: to this rank by its
    launcher, as `node.cores_available`. Collective."""
    mine = (left, frozenset(os.sched_getaffinity(0)))
    seen = comm.allgather_object(mine)
    advices = []
    for node in range(len(ranks_per_node(comm))):
        here = [both for both, other in zip(seen, comm.node_of_rank, strict=True) if other == node]
        granted = [cores for cores, _ in here]
        if needs_sharing([bound for _, bound in here]) and not needs_sharing(granted):
            return (
                f"OpenMP binds the first threads of {len(here)} ranks to the same cores, as each may use "
                f"all of them: unset {' '.join(OPENMP_BINDS)}, or let the launcher bind the ranks, "
                f"`mpirun --map-by slot:PE={threads} --bind-to core`"
            )
        everywhere = frozenset().union(*granted)
        advices.append(binding_advice(len(everywhere), len(here), threads, min(map(len, granted))))
    return next((a for a in advices if a and "idle" not in a), advices[0])


def load_advice(load: float, cores: int) -> str | None:
    """What the load of a node before the ranks compute says; None when they have its cores to themselves, or
    when it may be what is left in the mean of a run that has just ended."""
    if load <= _MUCH * cores:
        return None
    return (
        f"others use this machine too: load {load:.1f} on {cores} cores; what is measured here means little"
    )


def advice_here() -> str | None:
    """`load_advice` for this node, now."""
    return load_advice(os.getloadavg()[0], os.cpu_count() or 1)


def busy_advice(comm: Communicator, load: float) -> str | None:
    """`load_advice` for this node; None where ranks share cores, as the load is then their own."""
    return None if comm.oversubscribed else load_advice(load, os.cpu_count() or 1)


def others_here(comm: Communicator, load: float) -> str | None:
    """`busy_advice` for the first node whose cores others use too. Collective."""
    return next(filter(None, comm.allgather_object(busy_advice(comm, load))), None)


def launcher_on_terminal() -> bool:
    """Whether what started this process writes to a terminal. mpirun gives its ranks a terminal of
    their own and copies it to wherever it writes itself, so their own `isatty` says nothing."""
    return _is_terminal(f"/proc/{os.getppid()}/fd/1")


def say_past_launcher(text: str) -> bool:
    """Lines straight onto the terminal where what started this process writes its errors, as mpirun copies
    nothing any more after a Ctrl-C. Whether there is one; fit for the handler of a signal."""
    path = f"/proc/{os.getppid()}/fd/2"
    if launched_by(os.environ) is None or not _is_terminal(path):  # else it is a shell
        return False
    try:
        terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        try:
            os.write(terminal, f"\n{text}\n".encode())  # it stands behind ^C, or within a bar
        finally:
            os.close(terminal)
    except OSError:  # it is not ours, or has gone
        return False
    return True


def _is_terminal(path: str) -> bool:
    try:
        return os.readlink(path).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False
