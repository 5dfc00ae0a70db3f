"""Signals that ask a supervised run to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from mpipipe.cluster.death import signal_name
from mpipipe.cluster.job import Job


class Asking:
    """A context in which signals are kept, and handed on to the job that there is: the first one asks its
    ranks to stop after their step, as launchers hand USR1 on and end their ranks at TERM; a later one is
    TERM."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.wake = threading.Event()
        self.job: Job | None = None

    def __enter__(self) -> Asking:
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.asked.append(signal_name(number))
        self.wake.set()
        if self.job is not None:
            self.job.signal(signal.SIGUSR1 if len(self.asked) == 1 else signal.SIGTERM)
