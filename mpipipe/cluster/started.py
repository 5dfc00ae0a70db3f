"""How this job was started, in words that can be typed again: a launcher, its options, how many ranks.

They are those of the launcher's own command line, where it runs on this node; else those of `starter.py`, by
what launchers write into the environment.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mpipipe.cluster.doctor.launcher import first_in
from mpipipe.cluster.launch import AS_ROOT, HYDRA, PRTE, SRUN, launched_by
from mpipipe.cluster.node import command_line
from mpipipe.cluster.starter import Starter
from mpipipe.cluster.survivors import tolerant

NAMES = ("mpirun", "mpiexec", "orterun", "prterun")  # srun is no parent of its ranks


def as_root(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What a command line for `mpirun` needs beside, where this user is root and nothing else allows it."""
    return [AS_ROOT] if os.geteuid() == 0 and environ.get("OMPI_ALLOW_RUN_AS_ROOT") != "1" else []


def started(
    ranks: int,
    environ: Mapping[str, str],
    program: Sequence[str] = tuple(sys.orig_argv),
    proc: Path = Path("/proc"),
) -> list[str]:
    """What stood before the program, and starts it again; nothing where it was started without a launcher.

    ranks: how many there are, for launchers that nobody knows. program: the command line of this rank.
    """
    words = _as_typed(program, environ, proc) or _as_known(ranks, environ)
    if words and PRTE.size in environ and os.geteuid() == 0 and AS_ROOT not in words:
        words.insert(1, AS_ROOT)
    return words


def launcher_pid(proc: Path = Path("/proc")) -> int | None:
    """That of the mpirun above this process, which hands signals on; None: none is on this node."""
    with suppress(OSError):  # a process that has ended, or is not ours
        for pid in _above(os.getpid(), proc):
            if Path(*command_line(proc / str(pid))[:1]).name.startswith(NAMES):
                return pid
    return None


def _as_typed(program: Sequence[str], environ: Mapping[str, str], proc: Path) -> list[str]:
    """Empty where no launcher is above this process, or where it starts several programs."""
    given = list(program[1:])  # the interpreter's own name may be another one here
    try:
        for pid in _above(os.getpid(), proc):
            words = command_line(proc / str(pid))
            before = len(words) - len(given) - 1
            if before < 1 or words[before + 1 :] != given or ":" in words[:before]:
                continue
            if Path(words[0]).name.startswith(NAMES):
                return [_launcher(words[0], proc / str(pid) / "exe", environ), *words[1:before]]
    except OSError:  # a process that has ended, or is not ours
        pass
    return []


def _above(pid: int, proc: Path) -> Iterator[int]:
    """Its parent, the parent of that, ..."""
    while pid > 1:
        pid = int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        if pid:
            yield pid


def _launcher(name: str, exe: Path, environ: Mapping[str, str]) -> str:
    """mpirun of Open MPI 5 becomes a prterun, which does not start programs of MPI when it is typed."""
    if Path(name).name != "prterun":
        return name
    beside = first_in(str(Path(os.readlink(exe)).parent))
    return _shortest(beside, environ) if beside else "mpirun"


def _shortest(launcher: str, environ: Mapping[str, str]) -> str:
    """Its name alone, where that finds it."""
    name = Path(launcher).name
    return name if shutil.which(name, path=environ.get("PATH", "")) == launcher else launcher


def _as_known(ranks: int, environ: Mapping[str, str]) -> list[str]:
    launcher, n = launched_by(environ) or (None, ranks)
    if n == 1:
        return []
    if launcher == SRUN:
        speaks = environ.get("SLURM_MPI_TYPE") or ("pmi2" if HYDRA.size in environ else "pmix")
        asked = {"--nodes": "SLURM_STEP_NUM_NODES", "--cpus-per-task": "SLURM_CPUS_PER_TASK"}
        options = [f"{option}={environ[name]}" for option, name in asked.items() if environ.get(name)]
        return ["srun", f"--mpi={speaks}", *options, "-n", str(n)]
    own = first_in(str(Path(sys.prefix) / "bin"))
    name = _shortest(own, environ) if own else "mpirun"
    family = "Open MPI" if launcher == PRTE else "MPICH"
    return Starter((name,), family, given=False).line(n, None, (), outlive=tolerant(environ))
