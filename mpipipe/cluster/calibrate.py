"""What the machine gives this job: the speed of its links and the memory of each rank.

Measured with the calls and between the ranks that training uses, so the cost of our own Python
around a message is included (as it is in a step).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.launch import ranks_per_node
from mpipipe.cluster.node import memory_available_bytes
from mpipipe.values import Link

SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
BUDGET_S = 0.08  # per pair and message length: two levels, two lengths, 0.32 s in total
WARM_UP, MIN_ROUNDS, MAX_ROUNDS = 1, 3, 200
TRIALS = 3  # of each way, where there are two
TAG = 0
MORE, LAST = 1, 0  # first byte of a ping: whether another one follows


def measure_links(comm: Communicator) -> dict[str, Link]:
    """The median link of each level that this job has: "node" between two ranks of one node,
    "switch" between two nodes. Collective; the same result on all ranks.

    Disjoint pairs play ping-pong at the same time, as neighbouring stages do in training, so a
    network that they share is measured shared. latency_s is half a round trip of 8 bytes,
    bytes_per_s follows from what 1 MiB takes longer (Hockney 1994).
    """
    links = {}
    for level, pairs in pairs_of(comm).items():
        comm.barrier()
        found = measure_pair(comm, pairs, (SMALL_BYTES, LARGE_BYTES))
        seconds = [x for x in comm.allgather_object(found) if x]
        small, large = (float(np.median(column)) for column in zip(*seconds, strict=True))
        extra = max(large - small, 1e-9)  # noise may turn them round; a link is never infinite
        links[level] = Link(small, (LARGE_BYTES - SMALL_BYTES) / extra)
    return links


def pairs_of(comm: Communicator) -> dict[str, dict[int, int]]:
    """Per level the peer of each rank that takes part: the first two ranks of each node; the
    first ranks of the nodes 0 and 1, 2 and 3, ..."""
    firsts = [comm.node_of_rank.index(node) for node in range(len(ranks_per_node(comm)))]
    seconds = [_next_on_node(comm, first) for first in firsts]
    levels = {
        "node": [(a, b) for a, b in zip(firsts, seconds, strict=True) if b is not None],
        "switch": list(zip(firsts[::2], firsts[1::2], strict=False)),
    }
    return {level: dict(pairs) | {b: a for a, b in pairs} for level, pairs in levels.items() if pairs}


def _next_on_node(comm: Communicator, first: int) -> int | None:
    later = range(first + 1, comm.size)
    return next((r for r in later if comm.node_of_rank[r] == comm.node_of_rank[first]), None)


def measure_pair(
    comm: Communicator, peers: Mapping[int, int], lengths: Sequence[int], quantile: float = 0.5
) -> tuple[float, ...] | None:
    """One-way seconds of a message of each length (bytes), the median or another quantile; None where
    another rank measures. Called by every rank; peers as from `pairs_of`."""
    peer = peers.get(comm.rank)
    if peer is None:
        return None
    found = []
    for nbytes in lengths:
        if comm.rank < peer:
            found.append(float(np.quantile(list(_ping(comm, peer, nbytes)), quantile)))
        else:
            _pong(comm, peer, nbytes)
    return tuple(found) or None


def _ping(comm: Communicator, peer: int, nbytes: int) -> Iterator[float]:
    """One-way seconds of each round but the first, until the budget is used."""
    buf = np.zeros(nbytes, np.uint8)
    begin = time.perf_counter()
    for i in range(MAX_ROUNDS):
        start = time.perf_counter()
        used_up = start - begin > BUDGET_S and i + 1 >= WARM_UP + MIN_ROUNDS
        buf[0] = LAST if used_up or i == MAX_ROUNDS - 1 else MORE
        more = bool(buf[0])
        comm.wait(comm.isend(buf, peer, TAG))
        comm.wait(comm.irecv(buf, peer, TAG))
        if i >= WARM_UP:
            yield (time.perf_counter() - start) / 2
        if not more:
            return


def _pong(comm: Communicator, peer: int, nbytes: int) -> None:
    buf = np.full(nbytes, MORE, np.uint8)
    while buf[0] == MORE:
        comm.wait(comm.irecv(buf, peer, TAG))
        comm.wait(comm.isend(buf, peer, TAG))


def meet(comm: Communicator, peer: int) -> None:
    """Both ranks are here when it returns."""
    sent, received = np.zeros((2, 1), np.uint8)
    for request in [comm.irecv(received, peer, TAG), comm.isend(sent, peer, TAG)]:
        comm.wait(request)


def both_ways(
    comm: Communicator, peers: Mapping[int, int], trial: Callable[[int, bool], float]
) -> dict[int, NDArray[np.float64]]:
    """Of each rank in `peers`, medians over rounds of what `trial` gives it, of its peer and a switch that is
    on, then off: (2,). Collective; peers as from `pairs_of`."""
    comm.barrier()
    peer = peers.get(comm.rank)
    mine = None if peer is None else [[trial(peer, on) for on in (True, False)] for _ in range(TRIALS)]
    return {rank: np.median(x, axis=0) for rank, x in enumerate(comm.allgather_object(mine)) if x}


def memory_share(comm: Communicator) -> int:
    """Bytes this rank may still take of its node's main memory. Collective."""
    return share_of(comm, comm.node_of_rank[comm.rank], memory_available_bytes(os.environ))


def share_of(comm: Communicator, place: Hashable, available: int) -> int:
    """Bytes available in the place that this rank computes in, divided among the ranks that do so too (the
    least that any of them sees, so they all get one answer). Collective."""
    here = [b for other, b in comm.allgather_object((place, available)) if other == place]
    return min(here) // len(here)
