"""Who meets whom of the copies of a stage: for sums of gradients, and for the weights after the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from mpipipe.values import Cluster, Numerics

BUCKET_BYTES = 4 << 20  # of sums that travel between copies: one message, added while the next one comes
BUCKETS_AHEAD = 4  # of these that are expected at one time


def halving(n_copies: int) -> int:
    """How many of them, beside each other, halve their sums: the largest power of two that divides them."""
    return n_copies & -n_copies


def partners(copy: int, n_copies: int) -> Iterator[int]:
    """The copies with which one exchanges sums of gradients, in this order; updated weights in the reverse.

    Recursive halving (Thakur, Rabenseifner and Gropp 2005), the nearest copy first: in round k copies that
    differ in bit k alone send each other the sums that the other one's half of all owners will have, so each
    message is half of the one before, and most bytes go to ranks that are near: a power of two of them on
    each node adds up before anything leaves it. What is added then is beside each other in the tree of the
    blocks. What is left, an odd number of copies with the same low bits, meets in pairs, each for the
    shard of one owner."""
    low = halving(n_copies)
    yield from (copy ^ (1 << bit) for bit in range(low.bit_length() - 1))
    odd, own = n_copies // low, copy // low
    for turn in range(1, 1 << (odd - 1).bit_length()):
        if own ^ turn < odd:
            yield (own ^ turn) * low + copy % low


def owners_for(partner: int, copy: int, n_copies: int) -> range:
    """Whose shards a copy sends to its partner before the update, and is sent by it after the update."""
    differ = copy ^ partner
    if differ >= halving(n_copies):
        return range(partner, partner + 1)
    return range(partner % (2 * differ), n_copies, 2 * differ)


def sums_held(n_copies: int) -> int:
    """How many messages with sums of other copies one copy holds at most until it can add them up, beside the
    buckets that come in: none, or of an odd number that meets in pairs one for each level of the tree and one
    for each smaller tree, less the one that comes in."""
    odd = n_copies // halving(n_copies)
    return max(0, odd.bit_count() + odd.bit_length() - 3)


class Exchange:
    """Who meets whom, of the copies of a stage, and what for: all as of `partners`; or, where that would not
    add up each node before anything leaves it, those of each node, and then nodes in pairs.

    nodes: of each copy. On its node a copy stands for each owner elsewhere whose place there is its own,
    modulo the copies here: it collects the node's sums for it, sends it these, and hands on its new weights.

        node 0   0 1 2      0 collects here for itself and 3, 1 for itself and 4, 2 for itself alone;
        node 1   3 4        3 there for itself, 0 and 2, 4 for itself and 1
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self.n = len(nodes)
        teams = dict[int, list[int]]()
        for copy, node in enumerate((0,) * self.n if _halving_is_by_node(nodes) else nodes):
            teams.setdefault(node, []).append(copy)
        self._teams = list(teams.values())
        self._place = {copy: (i, j) for i, team in enumerate(self._teams) for j, copy in enumerate(team)}

    @property
    def by_node(self) -> bool:
        """Then sums are added where they are, as they come."""
        return len(self._teams) > 1

    @property
    def sums_held(self) -> int:
        """As `sums_held`."""
        return 0 if self.by_node else sums_held(self.n)

    def partners(self, copy: int) -> Iterator[int]:
        """As `partners`; for some pairs of nodes with unlike many copies one of them has nothing to give."""
        here, place = self._place[copy]
        mates, n_teams = self._teams[here], len(self._teams)
        yield from (mates[other] for other in partners(place, len(mates)))
        for there in (here ^ turn for turn in range(1, 1 << (n_teams - 1).bit_length())):
            if there < n_teams:
                team = self._teams[there]
                for owner in range(place, max(len(mates), len(team)), len(mates)):
                    yield team[owner % len(team)]

    def owners_for(self, partner: int, copy: int) -> Sequence[int]:
        """As `owners_for`."""
        (there, other), (here, place) = self._place[partner], self._place[copy]
        size = len(self._teams[here])
        if here != there:
            return [partner] if other % size == place else []
        places = owners_for(other, place, size)
        return [c for c in range(self.n) if self._place[c][1] % size in places] if self.by_node else places

    def parts(self, copy: int, partner: int) -> Sequence[int]:
        """The copies whose sums are in those that a copy sends to a partner."""
        (here, place), (there, other) = self._place[copy], self._place[partner]
        mates = self._teams[here]
        if here != there:
            return mates
        width = min(place ^ other, halving(len(mates)))
        return mates[place - place % width :][:width]


exchange_of = lru_cache(maxsize=64)(Exchange)


def _halving_is_by_node(nodes: Sequence[int]) -> bool:
    """Where all are on one, or a power of two of them, beside each other, on each."""
    n_nodes = len({*nodes})
    each = len(nodes) // n_nodes
    runs = [{*nodes[i : i + each]} for i in range(0, len(nodes), each)]
    return n_nodes == 1 or (each & (each - 1) == 0 and len(runs) == n_nodes and max(map(len, runs)) == 1)


def nodes_for(cluster: Cluster, ranks: Sequence[Sequence[int]], numerics: Numerics) -> tuple[int, ...]:
    """As `Layout.nodes`, of stages that are on these ranks; () where they make no difference."""
    nodes = cluster.node_of_rank
    differ = (exchange_of(tuple(nodes[rank] for rank in on)).by_node for on in ranks)
    if numerics.reduce == "exact" or not any(differ):
        return ()
    return nodes[: 1 + max(rank for on in ranks for rank in on)]
