"""Cores of its own for each rank, where the launcher left all ranks of a node the same ones.

    cores of each rank -> gathered -> slices(...) -> sched_setaffinity, once, at the start

Invariants
  1. No rank may run anywhere that its launcher had not left it, and where the ranks of a node differ in that,
     nothing is changed: then the launcher has bound them.
  2. All ranks of a node do it or none does, as it is decided by what was gathered.
  3. Ranks share out all cores of the domains that they lie in, not as many as they have threads: helper
     threads find room, and so does another job that binds its ranks to the same cores, while these are enough
     for both.

Memory needs no binding: Linux takes a page from the domain of the core that writes it first (first touch).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.doctor.facts import Binding, Cores
from mpipipe.cluster.doctor.machine import binding
from mpipipe.cluster.node import are_alike, cores_available, cores_of_openmp
from mpipipe.cluster.spares import first_working
from mpipipe.planner.sizes import counted

THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class Bound:
    """What `bind_ranks` came to."""

    left: frozenset[int]  # to this rank by its launcher, as `node.cores_available`
    by_rank: tuple[Cores, ...]  # what each is bound to now; empty: as its launcher has it

    def __str__(self) -> str:
        """A line for people; empty where no rank was bound."""
        lengths = sorted({len(cores) for cores in self.by_rank if cores})
        if not lengths:
            return ""
        bound = sum(map(bool, self.by_rank))
        who = "each rank" if bound == len(self.by_rank) else f"{bound} of {len(self.by_rank)} ranks"
        least, most = lengths[0], lengths[-1]
        own = counted(most, "core") if least == most else f"{least}-{most} cores"
        return f"binding: {who} to {own} of its own, of those that the launcher left to all (pipeline.bind)"


def bind_ranks(
    comm: Communicator, threads: int, spares: int = 0, wanted: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Bound:  # fmt: skip
    """Binds this rank, if all ranks of its node may run on the very same cores, and these are enough for
    `threads` of each. spares: ranks that wait, and keep the cores of all. Collective."""
    left = cores_available()
    seen = comm.allgather_object(_to_share(comm, environ) if wanted else None)
    own = decided(seen, comm.node_of_rank, threads, spares)[comm.rank]
    return Bound(left, tuple(comm.allgather_object(_bind_process(own) if own else ())))


def _to_share(comm: Communicator, environ: Mapping[str, str]) -> Binding | None:
    """What this rank was left, where it is a process of its own, and its cores are its job's alone, as far as
    can be told."""
    if not comm.transport:  # ranks are threads of one process
        return None
    if cores_of_openmp():  # puts each thread on a core itself, of those that it found when it was loaded
        return None
    left, claimed = binding(), environ.get("SLURM_CPUS_ON_NODE", "")
    # Slurm counts hyperthreads, or cores where it hands out nothing smaller; if fewer, others have the rest
    if claimed.isdigit() and int(claimed) < len(left.usable) and int(claimed) != len(left.siblings):
        return None
    # else these cores work for others, too, or a rank would be given the slow ones for good
    return left if left.quota == len(left.usable) and are_alike(left.usable) else None


def decided(
    seen: Sequence[Binding | None], node_of_rank: Sequence[int], threads: int, spares: int = 0
) -> list[Cores]:
    """The cores to bind each rank to; empty: it stays as it is. seen: by rank, None where it has to stay."""
    found: list[Cores] = [()] * len(seen)
    working = first_working(node_of_rank, spares)
    for node in set(node_of_rank):
        there = [left for left, other in zip(seen, node_of_rank, strict=True) if other == node]
        ranks = [rank for rank in working if node_of_rank[rank] == node]
        first = there[0]
        if len(ranks) < 2 or first is None or any(x is None or x.usable != first.usable for x in there):
            continue
        for rank, cores in zip(ranks, slices(first, len(ranks), threads), strict=False):
            found[rank] = cores
    return found


def slices(left: Binding, ranks: int, threads: int) -> tuple[Cores, ...]:
    """Of the cores that are left to all ranks of a node, those of each, `threads` or more; nothing where they
    are too few.

    Cores are whole: hyperthreads stay together, and count as one. As many slices as can lie in one NUMA
    domain do; ranks that follow each other, and so talk to each other, are near each other.
    """
    domains = _domains(left)
    lengths = [len(cores) for cores in domains]

    def inside(size: int) -> int:
        """How many slices of this size lie in one domain."""
        return sum(length // size for length in lengths)

    if ranks * threads > sum(lengths):
        return ()
    if ranks <= inside(threads):
        pairs = zip(domains, _spread(lengths, ranks), strict=True)
        found = [part for cores, n in pairs for part in _even(cores, n)]
    else:
        sizes = range(threads, sum(lengths) // ranks + 1)
        size = max(x for x in sizes if inside(x) == inside(threads))
        whole = [part for cores in domains for part in _blocks(cores, size) if len(part) == size]
        rest = [core for cores in domains for core in cores[len(cores) // size * size :]]
        order = {core: i for i, core in enumerate(chain(*domains))}
        across = _blocks(rest, size)[: ranks - len(whole)]
        found = sorted([*whole, *across], key=lambda part: order[part[0]])
    return tuple(tuple(sorted(chain(*part))) for part in found)


def _domains(left: Binding) -> list[list[Cores]]:
    """The cores of each NUMA domain, each as those of its hyperthreads that are left; all in one where the
    kernel does not tell."""
    usable, found = set(left.usable), dict[int, list[Cores]]()
    for group in left.siblings:
        core = tuple(x for x in group if x in usable)
        domain = next((i for i, cores in enumerate(left.numa) if core[0] in cores), -1)
        found.setdefault(domain, []).append(core)
    return [found[domain] for domain in sorted(found)]


def _spread(lengths: Sequence[int], ranks: int) -> list[int]:
    """Ranks of each domain, such that the fewest cores that one gets are as many as can be: each goes where
    it leaves most to all that are there (d'Hondt 1878)."""
    shares = [(-length / n, i) for i, length in enumerate(lengths) for n in range(1, ranks + 1)]
    taken = Counter(i for _, i in sorted(shares)[:ranks])
    return [taken[i] for i in range(len(lengths))]


def _even(cores: Sequence[Cores], parts: int) -> list[Sequence[Cores]]:
    return [cores[len(cores) * i // parts : len(cores) * (i + 1) // parts] for i in range(parts)]


def _blocks(cores: Sequence[Cores], size: int) -> list[Sequence[Cores]]:
    return [cores[i : i + size] for i in range(0, len(cores), size)]


def _bind_process(cores: Cores) -> Cores:
    """Binds all threads of this process; the cores, or none where the system refuses.

    A mask belongs to a thread, not to a process, and some run by now: those of the MPI library, the helper
    that moves messages on, NumPy's, the watchdog's. Those that come later, OpenMP's and the reader of data,
    inherit the mask of the thread that makes them.
    """
    with suppress(OSError):  # no /proc
        for thread in THREADS.iterdir():
            with suppress(OSError):  # it has ended since
                os.sched_setaffinity(int(thread.name), cores)
    return cores if os.sched_getaffinity(0) == set(cores) else ()
