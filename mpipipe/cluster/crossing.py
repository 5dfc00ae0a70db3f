"""Two messages between nodes that cross: each whole, or in parts that wait for no answer.

A message beyond the eager limit begins with a question, and goes on when the receiver has answered. Open MPI
has one TCP connection for all that one process sends to another: an answer stands behind what its sender is
sending just then. So of two messages that cross the second waits until the first is through, and a link that
could carry both at once carries one at a time:

    whole   rank 0  ==========              in parts   rank 0  = = = = =
            rank 1    ?........=========               rank 1     = = = = =

Parts below the limit leave at once. Each of them takes a call on both sides, and what comes before its
receive is posted lies in the library's memory: so two ranks try both, and the faster one is used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mpipipe.cluster.calibrate import TAG, both_ways, meet
from mpipipe.cluster.comm import Communicator, Request
from mpipipe.cluster.progress import spin_until
from mpipipe.values import Value

LATER = 0.5  # of a message's time: how long after the first one the second is sent
GAIN = 1.1  # times as long must two whole ones take: independent ones take 1.5 of one, others 2


@dataclass(frozen=True)
class Crossed(Value):
    """Seconds until two messages that cross are there, means over the pairs of nodes."""

    nbytes: int  # of each
    whole_s: float
    parts_s: float

    @property
    def parts(self) -> bool:
        return self.whole_s > GAIN * self.parts_s


def measure(comm: Communicator, peers: Mapping[int, int], nbytes: int, bare_s: float) -> Crossed:
    """peers: as from `pairs_of`; bare_s: seconds of one such message alone. Collective; the same on all
    ranks."""
    sent, received = np.zeros((2, nbytes), np.uint8)

    def took(peer: int, parts: bool) -> float:
        """Seconds of this rank until both are there."""
        comm.use_parts(parts)
        meet(comm, peer)
        start = time.perf_counter()
        receive = comm.irecv(received, peer, TAG, crossing=True)
        _until(start + (LATER * bare_s if comm.rank > peer else 0.0), receive, comm)
        send = comm.isend(sent, peer, TAG, crossing=True)
        comm.wait(receive)
        comm.wait(send)
        return time.perf_counter() - start

    of_rank = both_ways(comm, peers, took)
    of_pair = [np.maximum(of_rank[a], of_rank[b]) for a, b in peers.items() if a < b]
    parts_s, whole_s = np.mean(of_pair, axis=0).tolist()
    return Crossed(nbytes, whole_s, parts_s)


def _until(end: float, receive: Request, comm: Communicator) -> None:
    """That time, or that the message is there; it moves on meanwhile."""
    spin_until(lambda: receive.done() or time.perf_counter() >= end, comm.oversubscribed)
