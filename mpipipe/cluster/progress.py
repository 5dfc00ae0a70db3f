"""Keeping messages moving, in the foreground while a rank waits and in the background while it computes.

No MPI moves a large message without the program's help: after the handshake somebody has to call
into the library. While this rank waits, `spin_until` does; while it computes, `Progress` does.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

POKE_S = 0.0005  # between two pokes: 4 MB take about 1 ms, so a transfer loses half a period at most
POKE_MAX_S, POKE_GROWTH = 0.005, 1.3  # what was not moved soon after its post waits for a busy peer
SPIN_S = 0.05  # a free core is not slept on before: no wake-up delay on the way of a step
YIELDS = 20  # a shared core is slept on after as many turns
LATE = 0.01  # a sleep is at most this share of the time already waited
SLEEP_MIN_S, SLEEP_MAX_S = 5e-5, 2e-3


def spin_until(done: Callable[[], bool], share_core: bool) -> None:
    """Call `done` until it is True. With `share_core` other ranks need this core: sleep early.

    Every turn yields: free where nobody else wants the core, and where somebody does, the other
    end of the message may be the one that waits for it (a time slice later otherwise).
    """
    start, turns = time.perf_counter(), 0
    while not done():
        turns += 1
        waited = time.perf_counter() - start
        if waited > SPIN_S or (share_core and turns > YIELDS):
            time.sleep(min(max(LATE * waited, SLEEP_MIN_S), SLEEP_MAX_S))
        else:
            os.sched_yield()


class Progress:
    """A daemon thread that calls `poke` while `busy()`: every `POKE_S` after a post, then ever more
    seldom, since each poke takes the core from the computing thread; asleep otherwise.

    `poke` must not touch the requests of the main thread: two threads may not test one request.
    """

    def __init__(self, poke: Callable[[], object], busy: Callable[[], bool]) -> None:
        self._poke, self._busy = poke, busy
        self._wake, self._ended, self._period_s = threading.Event(), False, POKE_S
        self._thread = threading.Thread(target=self._run, name="mpipipe-progress", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before MPI_Finalize, which must not meet a poke

    def wake(self) -> None:
        """There is something to move now. Cheap when awake."""
        self._period_s = POKE_S
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._ended:
            if self._busy():
                self._poke()
                time.sleep(self._period_s)
                self._period_s = min(self._period_s * POKE_GROWTH, POKE_MAX_S)
            else:
                self._wake.clear()
                # a post between the question and clear() must not be slept through: ask again
                if not self._busy() and not self._ended:
                    self._wake.wait()
