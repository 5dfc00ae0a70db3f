"""Runs that live side by side and take turns step by step: what disturbs a machine for minutes meets all of
them alike.

    python -m benchmarks.turns config.yaml [key=value ...]        one rank of ours, which waits for its turns

A process whose environment names a gate (a Unix socket) knocks there before each step, and waits, without a
core, until it is let through. A turn is over when all processes of the side are at the gate again, or the
side has ended.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

GATE = "BENCHMARK_GATE"  # variable that the processes of a side read
POLL_S = 0.1  # between two looks whether a side has ended
T = TypeVar("T")

# -- a process of a side ---------------------------------------------------------------------------


@cache
def _gate() -> socket.socket | None:
    if not (path := os.environ.get(GATE)):
        return None
    gate = socket.socket(socket.AF_UNIX)
    gate.connect(path)
    return gate


def wait_for_turn() -> None:
    """Before a step; at once where nobody gives turns. Raises SystemExit where there will be no more."""
    if (gate := _gate()) is not None:
        gate.sendall(b".")
        if not gate.recv(1):
            sys.exit("there are no more turns")


def rank_main(arguments: Sequence[str]) -> int:
    """`mpipipe.train`, step by step."""
    import mpipipe.train
    from mpipipe.pipeline import Pipeline

    step = Pipeline.timed_step

    def in_turn(pipe: Pipeline, *given: Any) -> Any:
        wait_for_turn()
        return step(pipe, *given)

    Pipeline.timed_step = in_turn  # type: ignore[method-assign]
    return mpipipe.train.main(arguments)


# -- who gives the turns ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Side(Generic[T]):
    """processes: that come to the gate; run: so many steps with the gate's address, to the end of the last
    one; ahead: the first steps, right after the start, which are no turns."""

    processes: int
    run: Callable[[str, int], T]
    ahead: int = 0


def in_both_orders(sides: Sequence[Side[T]], turns: int) -> list[tuple[T, T]]:
    """Half of the turns with the sides started in one order, half in the other: what is started first finds
    the pages that others have left lying about, and takes up to 8 % longer for the same work."""
    there = take_turns(sides, turns - turns // 2)
    back = take_turns(sides[::-1], turns // 2)[::-1]
    return list(zip(there, back, strict=True))


def take_turns(sides: Sequence[Side[T]], turns: int) -> list[T]:
    """What each run comes to. They start one after the other, as each takes the machine for itself until its
    first turn; the order of the sides is turned round with every turn."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(sides)))
        every = [
            stack.enter_context(_started(side, turns, str(Path(folder) / str(i)), pool))
            for i, side in enumerate(sides)
        ]
        for i in range(turns):
            for started in every[:: -1 if i % 2 else 1]:
                started.take()
        return [started.future.result() for started in every]


def apart(ranks: int, run: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """So many runs of one rank, that know nothing of each other, at the same time. In steps_s of the first is
    then what a step of all takes on the average, divided by their number: what a pipeline without any bubble,
    message or imbalance would take."""
    with ThreadPoolExecutor(ranks) as pool:
        runs = [future.result() for future in [pool.submit(run) for _ in range(ranks)]]
    each = zip(*(found["steps_s"] for found in runs), strict=True)
    return [runs[0] | {"steps_s": [statistics.mean(step) / ranks for step in each]}, *runs[1:]]


class _Turns(Generic[T]):
    """Of one side."""

    def __init__(self, side: Side[T], listener: socket.socket, future: Future[T]) -> None:
        self.side, self.listener, self.future = side, listener, future
        self.doors: list[socket.socket] = []

    def take(self) -> None:
        """A step of the side; nothing where it has ended."""
        for door in self.doors:
            with suppress(OSError):  # of a process that has died at the gate; `wait` sees that
                door.sendall(b".")
        self.wait()

    def wait(self) -> None:
        """Until all of its processes are at the gate, or it has ended."""
        away = {*self.doors}
        while not self.future.done() and (away or len(self.doors) < self.side.processes):
            for door in select.select([self.listener, *away], [], [], POLL_S)[0]:
                if door is self.listener:
                    self.doors.append(door.accept()[0])
                    away.add(self.doors[-1])
                    continue
                away.discard(door)
                if not door.recv(1):  # a process that has ended
                    self.doors.remove(door)


@contextmanager
def _started(side: Side[T], turns: int, path: str, pool: ThreadPoolExecutor) -> Iterator[_Turns[T]]:
    """Before its first turn. Whoever still waits for one at the end is let go without it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        started = _Turns(side, listener, pool.submit(side.run, path, side.ahead + turns))
        try:
            started.wait()
            for _ in range(side.ahead):
                started.take()
            yield started
        finally:
            for door in started.doors:
                door.close()


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1:]))
