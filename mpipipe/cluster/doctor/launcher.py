"""Which launcher started this process, and which one a user would take."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mpipipe.cluster.doctor.facts import Launch
from mpipipe.cluster.launch import launched_by, launcher_rank
from mpipipe.cluster.node import OPENMP_BINDS

ASK_S = 10.0
SETTINGS = (
    *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_smsc", "UCX_TLS", "UCX_NET_DEVICES"),
    "OMPI_MCA_mpi_ft_enable",
    *("MPIR_CVAR_", "MPICH_", "I_MPI_FABRICS", "I_MPI_ASYNC_PROGRESS", "FI_PROVIDER"),
    *OPENMP_BINDS,
)
# what libraries and launchers write of themselves -> the name of the MPI
FAMILIES = {
    "Open MPI": r"Open ?MPI\W*v?([\d.]+\d)",
    "Intel MPI": r"Intel\(R\) MPI Library\D*([\d.]+\d)",
    "MVAPICH": r"MVAPICH\S* Version\W*([\d.]+\d)",
    "Cray MPICH": r"CRAY MPICH version\W*([\d.]+\d)",
    "MPICH": r"(?:MPICH|HYDRA).*?Version:\s*([\d.]+\d)",
}


def mpi_name(said: str) -> str:
    """ "Open MPI 5.0.11" of the many lines that a library or a launcher says; else its first words.

    >>> mpi_name("mpirun (Open MPI) 5.0.11")
    'Open MPI 5.0.11'
    """
    for name, pattern in FAMILIES.items():
        if found := re.search(pattern, said, re.IGNORECASE | re.DOTALL):
            return f"{name} {found[1]}"
    return " ".join(said.split()[:3])


def family(name: str) -> str:
    """Launchers fit each other's programs within a family: MPICH's start all that descend from it.

    >>> family("Intel MPI 2021.18"), family("Open MPI 5.0.11")
    ('MPICH', 'Open MPI')
    """
    descends = ("Intel MPI", "MVAPICH", "Cray MPICH", "MPICH")
    return "MPICH" if name.startswith(descends) else name.rstrip("0123456789. ")


def launch(environ: Mapping[str, str]) -> Launch:
    """Before MPI starts, since it starts a process of its own (a fork beside MPI may hang)."""
    started = launched_by(environ)
    mpirun = first_in(environ.get("PATH", ""))
    ask = bool(mpirun) and launcher_rank(environ) == 0
    return Launch(
        launcher=started[0].name if started else "",
        command=shlex.join(sys.orig_argv),
        by_root=os.geteuid() == 0,
        mpirun=mpirun,
        mpirun_of=mpi_name(version_of(mpirun, environ)) if ask else "",
        own_mpirun=first_in(str(Path(sys.prefix) / "bin")),
        settings=settings(environ),
        error="",
    )


def settings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that choose transports or bind threads."""
    return tuple(f"{x}={environ[x]}" for x in sorted(environ) if x.startswith(SETTINGS))


def first_in(path: str) -> str:
    return shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path) or ""


def version_of(mpirun: str, environ: Mapping[str, str]) -> str:
    """What it says of itself, without the marks of the launcher that started us."""
    mine = tuple(name for name in environ if name.startswith(("OMPI_MCA", "PMI", "PRTE_")))
    bare = {name: value for name, value in environ.items() if name not in mine}
    try:
        done = subprocess.run(
            [mpirun, "--version"], env=bare, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=ASK_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr
