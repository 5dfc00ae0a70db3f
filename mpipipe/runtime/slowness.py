"""A rank that is slow for long: what it computes against the prediction, compared with the other ranks."""

from __future__ import annotations

import statistics
from collections import Counter

import numpy as np

from mpipipe.cluster.comm import Communicator
from mpipipe.runtime.interpreter import Outcome
from mpipipe.values import COMPUTE, Timeline

WINDOW = 50  # steps of which the median counts
WINDOWS = 2  # in a row that make it last
FACTOR = 1.3


class Slowness:
    """Of one rank; all of them add each step. predicted: of a step."""

    def __init__(self, comm: Communicator, predicted: Timeline, host: str) -> None:
        self._comm, self._host = comm, host
        self._predicted_s = predicted.busy_s(comm.rank)
        self._computes = np.isin(predicted.program.codes[comm.rank][:, 0], sorted(COMPUTE))
        self._steps_s: list[float] = []
        self._in_a_row: Counter[int] = Counter()
        self._told = False

    def add(self, outcome: Outcome) -> str | None:
        """One step; what is to be said of a slow rank, once in a run, on every rank. Collective every
        `WINDOW` steps."""
        start_s, end_s = outcome.times[self._computes].sum(axis=0).tolist()
        self._steps_s.append(end_s - start_s)
        if self._told or len(self._steps_s) < WINDOW:
            return None
        factor = statistics.median(self._steps_s) / self._predicted_s if self._predicted_s else 1.0
        self._steps_s.clear()
        factors = self._comm.allgather_array(np.array([factor]))[:, 0].tolist()
        slow = {rank: against for rank, against in enumerate(compared(factors)) if against > FACTOR}
        self._in_a_row = Counter({rank: self._in_a_row[rank] + 1 for rank in slow})
        lasting = [rank for rank, times in self._in_a_row.items() if times >= WINDOWS]
        if not lasting:
            return None
        self._told = True
        rank = max(lasting, key=lambda rank: slow[rank])
        host = self._comm.bcast_object(self._host, rank)
        return (
            f"rank {rank} ({host}) has computed {slow[rank]:.1f} times as long as the other ranks for "
            f"{WINDOW * WINDOWS} steps, against the prediction; look at its node, or plan anew: plan --refine"
        )


def compared(factors: list[float]) -> list[float]:
    """Each over the median of the others; 1 for a rank alone.

    >>> compared([1.0, 2.0, 6.0])
    [0.25, 0.5714285714285714, 4.0]
    """
    if len(factors) == 1:
        return [1.0]
    return [f / statistics.median(factors[:i] + factors[i + 1 :]) for i, f in enumerate(factors)]
