"""Whether messages between nodes go in parts, on lines whose times are known. Over MPI: test_comm.py."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from mpipipe.cluster.comm import Bytes, Communicator
from mpipipe.cluster.crossing import GAIN, LATER, Crossed, measure
from mpipipe.cluster.local import LocalCommunicator, run_local

MESSAGE_S, NBYTES = 0.12, 1 << 18


@dataclass
class Line:
    """Between two ranks; one_at_a_time: a whole message waits until the one before it is through."""

    one_at_a_time: bool
    free: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ends: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by sender

    def send(self, rank: int, nbytes: int, parts: bool) -> float:
        """When the message is there."""
        with self.lock:
            begins = time.perf_counter()
            if self.one_at_a_time and not parts:
                begins = max(begins, self.free)
            end = begins + MESSAGE_S * nbytes / NBYTES
            self.free = max(self.free, end)
            self.ends[rank].append(end)
            return end


class OnLine:
    """A rank's communicator, whose messages have nothing but times."""

    def __init__(self, comm: Communicator, line: Line) -> None:
        assert isinstance(comm, LocalCommunicator)
        self.rank, self.oversubscribed, self._line, self._parts = comm.rank, True, line, False
        self.barrier, self.allgather_object, self._received = comm.barrier, comm.allgather_object, 0

    def use_parts(self, on: bool) -> None:
        self._parts = on

    def isend(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Due:
        end = self._line.send(self.rank, buf.nbytes, self._parts)
        return Due([end], 0)

    def irecv(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Due:
        self._received += 1
        return Due(self._line.ends[peer], self._received - 1)

    def wait(self, *requests: Due) -> None:
        while not any(request.done() for request in requests):
            time.sleep(1e-4)


@dataclass
class Due:
    ends: list[float]
    index: int

    def done(self) -> bool:
        return self.index < len(self.ends) and time.perf_counter() >= self.ends[self.index]


@pytest.mark.slow
@pytest.mark.parametrize(("one_at_a_time", "times"), [(True, 2.0), (False, 1 + LATER)])
def test_two_that_cross_take_what_the_line_makes_of_them(one_at_a_time: bool, times: float) -> None:
    line = Line(one_at_a_time)

    def body(comm: Communicator) -> Crossed:
        return measure(OnLine(comm, line), {0: 1, 1: 0}, NBYTES, MESSAGE_S)  # type: ignore[arg-type]

    found, other = run_local(2, body)
    assert found == other
    assert found.whole_s >= 0.9 * times * MESSAGE_S  # the two do not begin in the same instant
    assert found.parts_s < found.whole_s + 0.1 * MESSAGE_S
    assert found.parts is one_at_a_time


def test_parts_are_used_where_they_are_faster_than_noise() -> None:
    assert not Crossed(1, 1.0, 1.0).parts
    assert not Crossed(1, GAIN, 1.0).parts
    assert Crossed(1, 1.01 * GAIN, 1.0).parts
