"""What starts the ranks of a Slurm job: which launcher, why, and what it is asked for."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpipipe.cluster.doctor.launcher import family, first_in
from mpipipe.cluster.launch import AS_ROOT
from mpipipe.cluster.partition import ask
from mpipipe.cluster.slurm import Assignment, compressed
from mpipipe.errors import LaunchError

LAUNCHER, CONTAINER = "MPIPIPE_LAUNCHER", "MPIPIPE_CONTAINER"


@dataclass(frozen=True)
class Start:
    """environ: NAME=value, of the launcher; launcher: with its options, but for the number of ranks."""

    environ: tuple[str, ...]
    launcher: tuple[str, ...]
    why: str  # this one


def start(assigned: Assignment, mpi: str, environ: Mapping[str, str]) -> Start:
    """mpi: such as "Open MPI 5.0.11". Raises LaunchError where there is no launcher that fits.

    SLURM_TASKS_PER_NODE is where mpirun reads how many ranks each node takes.
    """
    words, why = _launcher(mpi, environ)
    if Path(words[0]).name == "srun":
        asked = _srun(assigned)
    elif family(mpi) == "Open MPI":
        asked = _open_mpi(assigned)
    else:
        asked = _hydra(assigned)
    slots = f"SLURM_TASKS_PER_NODE={compressed(assigned.per_node)}"
    unbound = () if assigned.bound else ("PRTE_MCA_hwloc_default_binding_policy=none",)
    return Start((slots, *unbound), (*words, *asked), why)


def _launcher(mpi: str, environ: Mapping[str, str]) -> tuple[list[str], str]:
    plugin = "pmix" if family(mpi) == "Open MPI" else "pmi2"
    path = environ.get("PATH", "")
    if given := environ.get(LAUNCHER):
        return shlex.split(given), f"{LAUNCHER} says so"
    if environ.get(CONTAINER):
        return ["srun", f"--mpi={plugin}"], f"the launcher of {CONTAINER} is the site's"
    if own := first_in(str(Path(sys.prefix) / "bin")):
        return [own], "the environment brings its own launcher"
    if plugin in _plugins(path):
        return ["srun", f"--mpi={plugin}"], "this Slurm starts the site's MPI itself"
    if site := first_in(path):
        return [site], f"this srun has no {plugin}"
    raise LaunchError(
        f"no launcher for {mpi}: there is no mpirun on the PATH, and srun has no {plugin}; load the module "
        f"of the MPI (MPIPIPE_MODULES=...), or set {LAUNCHER}"
    )


def _plugins(path: str) -> list[str]:
    """The languages of MPI libraries that srun speaks."""
    if (srun := shutil.which("srun", path=path)) is None:
        return []
    asked = ask([srun, "--mpi=list"], f"start again when Slurm answers, or set {LAUNCHER}")
    return (asked.stdout + asked.stderr).split()


def _srun(assigned: Assignment) -> list[str]:
    most = max(assigned.per_node)
    even = [f"--ntasks-per-node={most}"] if len(set(assigned.per_node)) == 1 else []
    if assigned.bound:
        cores = [f"--cpus-per-task={assigned.threads}", "--cpu-bind=cores", "--threads-per-core=1"]
    else:  # more cores for each task than there are would be refused; so each may use all of its node
        cores = ["--overcommit", "--cpu-bind=none"]
    return [f"--nodes={len(assigned.per_node)}", *even, *cores, "--kill-on-bad-exit=1"]


def _open_mpi(assigned: Assignment) -> list[str]:
    root = [AS_ROOT] if os.geteuid() == 0 else []
    if assigned.bound:
        return [*root, "--map-by", f"slot:PE={assigned.threads}", "--bind-to", "core"]
    return [*root, "--map-by", "slot", "--bind-to", "none"]


def _hydra(assigned: Assignment) -> list[str]:
    bound = ["-bind-to", f"core:{assigned.threads}"] if assigned.bound else ["-bind-to", "none"]
    return ["-ppn", str(max(assigned.per_node)), *bound]
