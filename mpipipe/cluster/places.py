"""Where the ranks of a job are: nodes, NUMA domains and cores, as far as the binding tells, and which pairs
of ranks have what between them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations

from mpipipe.cluster.comm import Communicator, number_nodes
from mpipipe.cluster.doctor.facts import Binding
from mpipipe.values import LEVELS, Cluster, Device

_ANY = Device("", 1.0, 0, 1)


def places(comm: Communicator, bound: Binding) -> Cluster:
    """The ranks of this job with their units, and neither devices nor links. bound: of this rank. Collective.

    A rank that may run in several domains is in none that could be told; then no rank is.
    """
    found = comm.allgather_object((_inside(bound, bound.numa), _inside(bound, bound.siblings)))
    node = comm.node_of_rank
    numa = _units(node, [numa for numa, _ in found])
    core = _units(node, [core for _, core in found])
    same_as_node = len(set(numa)) == len(set(node))
    alone = len(set(core)) == comm.size
    return Cluster((_ANY,) * comm.size, node, {}, () if same_as_node else numa, () if alone else core)


def _inside(bound: Binding, units: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The one of these sets of cores that holds all on which the rank may run."""
    return next((cores for cores in units if set(bound.usable) <= set(cores)), None)


def _units(node_of_rank: Sequence[int], found: Sequence[Hashable]) -> tuple[int, ...]:
    if None in found:
        return ()
    return number_nodes(list(zip(node_of_rank, found, strict=True)))


@dataclass(frozen=True)
class Pairs:
    """Of one level, each as rank -> its peer. alone: at most one rank of each node has a peer, or two have
    each other; together: as many as there can be."""

    alone: dict[int, int]
    together: dict[int, int]


def pairs_by_level(where: Cluster) -> dict[str, Pairs]:
    """Of the levels that the job spans, the finest first."""
    everyone = list(combinations(range(len(where.devices)), 2))
    found = {}
    for level in LEVELS:
        of_level = [(a, b) for a, b in everyone if where.level(a, b) == level]
        if of_level:
            nodes = where.node_of_rank
            alone = _disjoint(of_level, [(nodes[a], nodes[b]) for a, b in of_level])
            found[level] = Pairs(_both_ways(alone), _both_ways(_disjoint(of_level, of_level)))
    return found


def _disjoint(pairs: Sequence[tuple[int, int]], ends: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first pairs of which no end was there before."""
    used: set[int] = set()
    chosen = []
    for pair, end in zip(pairs, ends, strict=True):
        if used.isdisjoint(end):
            used |= set(end)
            chosen.append(pair)
    return chosen


def _both_ways(pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
    return dict(pairs) | {b: a for a, b in pairs}
