"""Made-up facts for the doctor's judges: a machine on which nothing is wrong, and ways to change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpipipe.cluster.doctor.facts import (
    Binding,
    Compute,
    Files,
    Launch,
    LinkTimes,
    Machine,
    Mpi,
    RankFacts,
    Route,
    Software,
    Start,
)

GIB = 1 << 30
LENGTHS = (8, 1 << 16, 1 << 20, 1 << 24)
BY_MPIRUN, BY_SRUN = "the mpirun of Open MPI", "srun"
SOFTWARE = Software("3.12.3", "2.4.6", "2.13.0+cpu", "4.1.2", "0.1.0", "c0de" * 16, "AVX512", "1", "v4")
MPI = Mpi("Open MPI 5.0.11", "Open MPI 5.0.11", "multiple", "multiple", 2**31 - 1, True)
LAUNCH = Launch(
    BY_MPIRUN, "python -m mpipipe doctor", False, "/v/bin/mpirun", "Open MPI 5.0.11", "/v/bin/mpirun", (), ""
)
MACHINE = Machine(
    "n0", "AMD EPYC 9654", ("avx512_bf16",), 0.1, 64 * GIB, 0, 32 * GIB, 32 * GIB, None, 65536, "madvise",
    "performance acpi-cpufreq", (), "",
)  # fmt: skip
ROUTES = (
    Route("mkl", 200e9, 3e-7, True),
    Route("onednn", 200e9, 3e-7, True),
    Route("bf16", 210e9, 3e-3, False),
)
COMPUTE = Compute(1, ROUTES, 10e9, 12e9)
FILES = Files("/home/me/runs", "nfs4", 500 * GIB, "/tmp", (), True, True)


def cores(*numbers: int, job: int = 2, per_core: int = 1, domains: int = 1) -> Binding:
    """On a node of `job` cores: a range, or those given, `per_core` hyperthreads each (i and i + job/2)."""
    usable = numbers or tuple(range(job))
    physical = job // per_core
    siblings = {tuple(range(core % physical, job, physical)) for core in usable}
    width = job // domains
    numa = tuple(tuple(range(i * width, (i + 1) * width)) for i in range(domains))
    return Binding(usable, len(usable), tuple(range(job)), tuple(sorted(siblings)), numa)


def link(
    level: Any, peer: int, latency_s: float = 2e-6, bytes_per_s: float = 8e9, **changes: Any
) -> LinkTimes:
    seconds = tuple(latency_s + n / bytes_per_s for n in LENGTHS)
    return replace(LinkTimes(level, peer, LENGTHS, seconds, 0.95, ()), **changes)


def healthy(nodes: tuple[int, ...] = (0, 0), job: int = 0) -> list[RankFacts]:
    """Nothing to note: as many cores on each node as ranks (or `job`)."""
    ranks = []
    for rank, node in enumerate(nodes):
        on_node = [r for r, other in enumerate(nodes) if other == node]
        links = (link("node", on_node[1]),) if len(on_node) > 1 and rank == on_node[0] else ()
        if node % 2 == 0 and rank == on_node[0] and node + 1 in nodes:
            links += (link("switch", nodes.index(node + 1), 10e-6, 3e9),)
        ranks.append(
            RankFacts(
                rank=rank,
                node=node,
                software=SOFTWARE,
                mpi=MPI,
                launch=LAUNCH,
                binding=cores(job=job or len(on_node)),
                machine=replace(MACHINE, host=f"n{node}"),
                start=Start(3.0, "/v/bin/python", "/v", "ext4"),
                links=links,
                compute=COMPUTE,
                files=FILES,
            )
        )
    return ranks


def change(
    ranks: list[RankFacts], part: str, only: Callable[[int], bool] = bool, **changes: Any
) -> list[RankFacts]:
    """The same ranks, with some fields of a part changed on the ranks for which `only` holds."""
    return [replace(r, **{part: replace(getattr(r, part), **changes)}) if only(r.rank) else r for r in ranks]


def everywhere(_: int) -> bool:
    return True
