"""What the steps of a run took: times and memory of the newest ones, the highest memory of each."""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np

from mpipipe.cluster.comm import Communicator
from mpipipe.runtime.interpreter import Outcome
from mpipipe.values import Float64, Int64, Program, Timeline

KEPT_STEPS = 50  # of which the times are remembered


def computing_s(took_s: Float64, data_s: Float64, planned_s: Float64 | float) -> Float64:
    """Seconds of instructions without their wait for samples, which stays on the rank that reads them
    whatever it computes. Not less than was planned: where no core is left to load, that is part of it."""
    return np.maximum(took_s - data_s, np.minimum(took_s, planned_s))


class Recorder:
    """Of one rank."""

    def __init__(self, comm: Communicator, program: Program) -> None:
        self._comm, self._program = comm, program
        self._kept: deque[tuple[Float64, Int64, Float64]] = deque(maxlen=KEPT_STEPS)
        # per step, of this rank at the end of an instruction; 8 bytes each, as there may be a million
        self.highest_bytes = array("q")

    def add(self, outcome: Outcome) -> None:
        """One step, in order."""
        self._kept.append((outcome.times, outcome.memory_bytes, outcome.data_s))
        self.highest_bytes.append(int(outcome.memory_bytes.max(initial=0)))

    @property
    def counted(self) -> int:
        """Steps that are kept, the first one left out."""
        return max(0, len(self._kept) - 1)

    @property
    def step_s(self) -> float:
        """Of those, the median on this rank."""
        return float(np.median([times[-1, 1] - times[0, 0] for times, *_ in list(self._kept)[1:]]))

    def median(self) -> Timeline:
        """The step whose makespan is the median of those kept, the first one left out. Collective."""
        kept = list(self._kept)[1:] or list(self._kept)
        offset_s = self._comm.clock_offset_s
        ends = np.array([(times[0, 0], times[-1, 1]) for times, *_ in kept]) - offset_s  # (steps, 2)
        by_rank = self._comm.allgather_array(ends)
        start_s = by_rank[:, :, 0].min(axis=0)
        order = np.argsort(by_rank[:, :, 1].max(axis=0) - start_s, kind="stable")
        chosen = int(order[len(order) // 2])
        times, memory_bytes, _ = kept[chosen]
        found = self._comm.allgather_object((times - offset_s - start_s[chosen], memory_bytes))
        return Timeline(self._program, tuple(t for t, _ in found), tuple(m for _, m in found))

    def typical(self, planned: Timeline) -> list[Timeline]:
        """Of all steps kept but the first, of every other one of them, and of those between: what each
        instruction took, in the median, as `computing_s` counts it; all begin at 0. Of two steps at least.
        planned: a step of the plan. Collective."""
        kept = list(self._kept)[1:]
        planned_s = planned.times[self._comm.rank] @ [-1.0, 1.0]
        seconds = np.array([computing_s(times @ [-1.0, 1.0], wait_s, planned_s) for times, _, wait_s in kept])
        parts = [np.median(part, axis=0) for part in (seconds, seconds[::2], seconds[1::2])]
        mine = [np.stack([np.zeros_like(took), took], axis=1) for took in parts]
        found = self._comm.allgather_object((mine, kept[-1][1]))
        memory = tuple(held for _, held in found)
        by_part = zip(*(times for times, _ in found), strict=True)
        return [Timeline(self._program, times, memory) for times in by_part]
