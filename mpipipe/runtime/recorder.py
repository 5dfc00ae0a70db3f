"""What the steps of a run took: times and memory of the newest ones, the highest memory of each."""

from __future__ import annotations

from collections import deque

import numpy as np

from mpipipe.cluster.comm import Communicator
from mpipipe.runtime.interpreter import Outcome
from mpipipe.values import Float64, Int64, Program, Timeline

KEPT_STEPS = 50  # of which the times are remembered


class Recorder:
    """Of one rank."""

    def __init__(self, comm: Communicator, program: Program) -> None:
        self._comm, self._program = comm, program
        self._kept: deque[tuple[Float64, Int64]] = deque(maxlen=KEPT_STEPS)
        self.highest_bytes: list[int] = []  # per step, of this rank at the end of an instruction

    def add(self, outcome: Outcome) -> None:
        """One step, in order."""
        self._kept.append((outcome.times, outcome.memory_bytes))
        self.highest_bytes.append(int(outcome.memory_bytes.max(initial=0)))

    @property
    def counted(self) -> int:
        """Steps that are kept, the first one left out."""
        return max(0, len(self._kept) - 1)

    @property
    def step_s(self) -> float:
        """Of those, the median on this rank."""
        return float(np.median([times[-1, 1] - times[0, 0] for times, _ in list(self._kept)[1:]]))

    def median(self) -> Timeline:
        """The step whose makespan is the median of those kept, the first one left out. Collective."""
        kept, ends = self._from_start()
        makespan_s = self._comm.allgather_array(ends).max(axis=0)
        chosen = int(np.argsort(makespan_s, kind="stable")[len(makespan_s) // 2])
        return self._everywhere([kept[chosen][0]], kept[chosen][1])[0]

    def typical(self) -> list[Timeline]:
        """Of all steps kept but the first, of every other one of them, and of those between: each instruction
        with the median of its starts and of its seconds. Of two steps at least. Collective."""
        kept, _ = self._from_start()
        times = np.stack([step for step, _ in kept])  # (steps, instructions, 2)
        found = []
        for part in (times, times[::2], times[1::2]):
            start_s, seconds = (np.median(x, axis=0) for x in (part[..., 0], part[..., 1] - part[..., 0]))
            found.append(np.stack([start_s, start_s + seconds], axis=1))
        return self._everywhere(found, kept[-1][1])

    def _from_start(self) -> tuple[list[tuple[Float64, Int64]], Float64]:
        """Those kept but the first, with times from when the first rank began; and when each ended here."""
        kept = list(self._kept)[1:] or list(self._kept)
        first_s = np.array([times[0, 0] for times, _ in kept]) - self._comm.clock_offset_s
        start_s = self._comm.allgather_array(first_s).min(axis=0) + self._comm.clock_offset_s
        kept = [(times - s, memory) for (times, memory), s in zip(kept, start_s, strict=True)]
        return kept, np.array([times[-1, 1] for times, _ in kept])

    def _everywhere(self, mine: list[Float64], memory_bytes: Int64) -> list[Timeline]:
        """Timelines of all ranks, of which this one has given its own. Collective."""
        found = self._comm.allgather_object((mine, memory_bytes))
        memory = tuple(held for _, held in found)
        by_timeline = zip(*(times for times, _ in found), strict=True)
        return [Timeline(self._program, times, memory) for times in by_timeline]
