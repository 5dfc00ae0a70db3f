"""The line that starts ranks: a launcher, how many ranks, and on which hosts, in that launcher's words."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipipe.cluster.doctor.launcher import family, first_in, mpi_name, version_of
from mpipipe.cluster.survivors import FLAGS
from mpipipe.errors import LaunchError

SRUN = "srun"


@dataclass(frozen=True)
class Host:
    name: str
    slots: int  # ranks that it takes


@dataclass(frozen=True)
class Starter:
    argv: tuple[str, ...]  # the launcher and its options
    family: str  # "Open MPI", "MPICH" or "srun"
    given: bool  # by the user, with whatever options

    def line(
        self, ranks: int | None, hosts: Sequence[Host] | None, program: Sequence[str], outlive: bool = False
    ) -> list[str]:
        """ranks: None = as the launcher's own options say. hosts: None = likewise. outlive: ranks are to
        outlive one another, where the launcher knows how."""
        own: tuple[str, ...] = ()
        if not self.given and self.family == "Open MPI":
            own = ("--bind-to", "none")  # ranks have threads
            own += (
                ("--oversubscribe",) if hosts is None else ()
            )  # and may outnumber the cores of this machine
        if outlive and self.family == "Open MPI" and "--with-ft" not in self.argv:
            own += tuple(FLAGS.split())
        count = () if ranks is None else ("-n", str(ranks))
        return [*self.argv, *own, *count, *self._on(hosts), *program]

    def alone(self, host: Host, program: Sequence[str]) -> list[str]:
        """One process on one host."""
        overlap = ("--overlap",) if self.family == SRUN else ()
        return [*self.argv, *overlap, "-n", "1", *self._on([Host(host.name, 1)]), *program]

    def _on(self, hosts: Sequence[Host] | None) -> tuple[str, ...]:
        if hosts is None:
            return ()
        names = ",".join(host.name for host in hosts)
        if self.family == SRUN:
            return "-N", str(len(hosts)), "-w", names
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        return ("--host", listed) if self.family == "Open MPI" else ("-hosts", listed)


def starter(given: Sequence[str], environ: Mapping[str, str]) -> Starter:
    """Of a launcher that was named, or the one that belongs to this Python, or the site's. Raises
    LaunchError where there is none."""
    argv = tuple(given)
    if not argv:
        found = first_in(str(Path(sys.prefix) / "bin")) or first_in(environ.get("PATH", ""))
        if not found:
            raise LaunchError(
                "there is no mpirun or mpiexec, neither beside this Python nor on the PATH; load the site's "
                "MPI, or name the launcher: python -m mpipipe run config.yaml -- srun --mpi=pmix -n 8"
            )
        argv = (found,)
    if Path(argv[0]).name == SRUN:
        return Starter(argv, SRUN, bool(given))
    return Starter(argv, family(mpi_name(version_of(argv[0], environ))), bool(given))


def surroundings_for(starter: Starter, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launcher: Open MPI refuses the user root, who is the usual one in containers."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**environ, **(root if starter.family == "Open MPI" and os.geteuid() == 0 else {})}
