"""What messages between the ranks take, and whether a large one moves while its ranks do something else."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from mpipipe.cluster.calibrate import TAG, measure_pair, pairs_of
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.doctor.facts import LinkLevel, LinkTimes
from mpipipe.cluster.doctor.network import devices

LENGTHS = (8, 1 << 16, 1 << 20, 1 << 24)  # bytes
AWAY = 4.0  # how long the ranks look away, in times of the message
AWAY_MIN_S = 0.02
LEVELS: tuple[LinkLevel, ...] = ("node", "switch")


def measure(comm: Communicator) -> tuple[LinkTimes, ...]:
    """The links of this rank to its partners; empty where another rank measures. Collective."""
    found = []
    for level in LEVELS:
        pairs = pairs_of(comm).get(level)
        if pairs is None:
            continue
        comm.barrier()
        seconds = measure_pair(comm, pairs, LENGTHS)
        comm.barrier()
        slowest = max(comm.allgather_object(seconds[-1] if seconds else 0.0))
        hidden = _hidden(comm, pairs, slowest)
        if seconds is not None:
            found.append(LinkTimes(level, pairs[comm.rank], LENGTHS, seconds, hidden, devices()))
    return tuple(found)


def _hidden(comm: Communicator, peers: Mapping[int, int], message_s: float) -> float:
    """Share of the time of the longest message that passed while its ranks slept."""
    buf, peer = np.zeros(LENGTHS[-1], np.uint8), peers.get(comm.rank)
    comm.barrier()
    if peer is None:
        return 0.0
    request = (comm.isend if comm.rank < peer else comm.irecv)(buf, peer, TAG)
    time.sleep(max(AWAY * message_s, AWAY_MIN_S))
    start = time.perf_counter()
    comm.wait(request)
    return 1.0 - min(1.0, (time.perf_counter() - start) / max(message_s, 1e-9))
