"""The bandwidth of the memory: what one rank of a node has alone, and what is left when all copy."""

from __future__ import annotations

import time

import numpy as np

from mpipipe.cluster.comm import Bytes, Communicator

COPY_BYTES = 1 << 25  # beyond the caches of one core
BUDGET_S, MIN_ROUNDS = 0.15, 3


def measure(comm: Communicator) -> tuple[float, float | None]:
    """Bytes per second, read and written: of this rank while all copy; of the first rank of a node while the
    others wait, else None. By one thread. Collective."""
    source, target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))
    comm.barrier()
    together = _copy(source, target)
    comm.barrier()
    first = comm.node_of_rank.index(comm.node_of_rank[comm.rank]) == comm.rank
    alone = _copy(source, target) if first else None
    comm.barrier()
    return together, alone


def _copy(source: Bytes, target: Bytes) -> float:
    seconds: list[float] = []
    while sum(seconds) < BUDGET_S or len(seconds) < MIN_ROUNDS:
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / float(np.median(seconds))
