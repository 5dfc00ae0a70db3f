"""A rank that is slow for long: what it computes against the prediction, compared with the other ranks."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

import numpy as np

from mpipipe.cluster.comm import Communicator
from mpipipe.planner.speeds import FACTOR, can_tell, compared
from mpipipe.runtime.interpreter import Outcome
from mpipipe.runtime.recorder import computing_s
from mpipipe.values import COMPUTE, Costs, Timeline

WINDOW = 50  # steps of which the median counts
WINDOWS = 2  # in a row that make it last


@dataclass(frozen=True)
class Slow:
    rank: int
    host: str
    factor: float  # of its computing, against the prediction and the other ranks

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) has computed {self.factor:.1f} times as long as the other ranks "
            f"for {WINDOW * WINDOWS} steps, against the prediction"
        )


class Slowness:
    """Of one rank; all of them add each step. predicted: of a step, with `costs`."""

    def __init__(self, comm: Communicator, predicted: Timeline, costs: Costs, host: str) -> None:
        self._comm, self._costs, self._host = comm, costs, host
        self._predicted_s = predicted.busy_s(comm.rank)
        self._computes = np.isin(predicted.program.codes[comm.rank][:, 0], sorted(COMPUTE))
        self._steps_s: list[float] = []
        self._in_a_row: Counter[int] = Counter()
        self._told: set[int] = set()

    def add(self, outcome: Outcome) -> Slow | None:
        """One step; a rank that is slow for long, each once, everywhere. Collective every `WINDOW` steps."""
        start_s, end_s = outcome.times[self._computes].sum(axis=0).tolist()
        self._steps_s.append(float(computing_s(end_s - start_s, outcome.data_s.sum(), self._predicted_s)))
        if len(self._steps_s) < WINDOW:
            return None
        own = np.array([statistics.median(self._steps_s), self._predicted_s])
        self._steps_s.clear()
        took_s, planned_s = self._comm.allgather_array(own).T.tolist()
        slow = dict[int, float]()
        if can_tell(self._costs, took_s, planned_s):
            beside = compared([took / planned for took, planned in zip(took_s, planned_s, strict=True)])
            slow = {rank: by for rank, by in enumerate(beside) if by > FACTOR}
        self._in_a_row = Counter({rank: self._in_a_row[rank] + 1 for rank in slow})
        lasting = [
            rank for rank, times in self._in_a_row.items() if times >= WINDOWS and rank not in self._told
        ]
        if not lasting:
            return None
        rank = max(lasting, key=lambda rank: slow[rank])
        self._told.add(rank)
        return Slow(rank, self._comm.bcast_object(self._host, rank), slow[rank])
