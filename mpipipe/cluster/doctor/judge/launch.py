"""The MPI library, its launcher, and whether they fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from mpipipe.cluster.doctor.facts import Finding, Level, Mpi, RankFacts, Ranks
from mpipipe.cluster.doctor.judge.words import listed
from mpipipe.cluster.doctor.launcher import family
from mpipipe.planner.sizes import counted

SECTION = "MPI"
REBUILD = "make clean setup MPI=site"


def judge_launch(ranks: Ranks, threads: int) -> Iterator[Finding]:
    first = ranks[0]
    if first.launch.error:
        text, _, fix = first.launch.error.partition("\n  fix: ")
        yield Finding(SECTION, "PROBLEM", text, fix)
    if first.mpi is None:
        return
    level, ulfm = first.mpi.thread_level, ", ULFM" if first.mpi.fault_tolerance else ""
    by = f"started by {first.launch.launcher}" if first.launch.launcher else "started without a launcher"
    if not first.launch.error:
        yield Finding(SECTION, "ok", f"{first.mpi.library}, {by}: one world of {counted(len(ranks), 'rank')}")
    yield Finding(SECTION, "ok", f"MPI_THREAD_{level.upper()}, tags up to {first.mpi.tag_ub}{ulfm}")
    if first.launch.settings:
        yield Finding(SECTION, "ok", f"as set: {listed(first.launch.settings)}")
    yield from _compiled(first.mpi)
    yield from _thread_level(ranks, first.mpi)
    yield from _mpirun(first, first.mpi, len(ranks))


def _compiled(mpi: Mpi) -> Iterator[Finding]:
    if family(mpi.compiled_for) != family(mpi.library):
        text = f"mpi4py was compiled for {mpi.compiled_for}, but {mpi.library} runs: anything may happen"
        yield Finding(SECTION, "PROBLEM", text, REBUILD)
    elif (
        _major(mpi.compiled_for) != _major(mpi.library)
        and mpi.compiled_for.split()[0] == mpi.library.split()[0]
    ):
        text = f"mpi4py was compiled for {mpi.compiled_for}, and {mpi.library} runs"
        yield Finding(SECTION, "note", text, REBUILD)


def _major(name: str) -> str:
    return name.rpartition(" ")[2].partition(".")[0]


def _thread_level(ranks: Ranks, mpi: Mpi) -> Iterator[Finding]:
    lower = sorted({r.mpi.thread_level for r in ranks if r.mpi and r.mpi.thread_level != "multiple"})
    if not lower:
        return
    text = f"MPI_THREAD_{lower[0].upper()}: large messages move only while a rank sends, receives or waits"
    if mpi.wanted_level != "multiple":
        yield Finding(SECTION, "note", text, "unset MPIPIPE_THREAD_LEVEL")
    else:
        yield Finding(
            SECTION, "note", f"{text}; an MPI built with thread support moves them meanwhile", REBUILD
        )


def _mpirun(first: RankFacts, mpi: Mpi, size: int) -> Iterator[Finding]:
    """The one that the user gets by typing its name: it matters for the next start, if not for this one."""
    launch = first.launch
    folder = launch.own_mpirun.rpartition("/")[0]
    mpirun = f"{launch.mpirun} is of {launch.mpirun_of}, and mpi4py uses {mpi.library}"
    to_path = f'export PATH="{folder}:$PATH"' if folder else ""
    if not launch.mpirun:
        if size == 1 and launch.launcher != "srun":
            text = "there is no mpirun and no mpiexec on the PATH: only one rank can be started"
            yield Finding(
                SECTION, "note", text, to_path or "module load openmpi  # or what your site calls its MPI"
            )
    elif launch.mpirun_of and family(launch.mpirun_of) != family(mpi.library):
        text = f"{mpirun}: each of its ranks would be alone"
        level: Level = "note" if launch.launcher else "PROBLEM"
        named = f"unset MPI4PY_LIBMPI, if that names it, or start with the mpiexec of {mpi.library}"
        fix = named if launch.mpirun == launch.own_mpirun else to_path or REBUILD
        yield Finding(SECTION, level, text, fix)
    elif launch.mpirun_of and _major(launch.mpirun_of) != _major(mpi.library) and not launch.launcher:
        yield Finding(SECTION, "note", mpirun, to_path or REBUILD)
