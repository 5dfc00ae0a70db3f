"""The two ways of keeping messages moving: politely waiting, and poking in the background."""

from __future__ import annotations

import threading
import time

from mpipipe.cluster.progress import Progress, spin_until


def test_spin_asks_until_it_is_done_and_not_once_more() -> None:
    for share_core in (False, True):
        answers = iter([False] * 30 + [True])
        spin_until(lambda answers=answers: next(answers), share_core)
        assert next(answers, "used up") == "used up"


def test_a_long_wait_costs_little_processor_time() -> None:
    ready = threading.Event()
    timer = threading.Timer(0.3, ready.set)
    timer.start()
    before = time.process_time()
    spin_until(ready.is_set, share_core=True)
    assert time.process_time() - before < 0.15
    timer.join()


def test_it_pokes_only_while_there_is_something_to_move() -> None:
    busy, poked = threading.Event(), threading.Event()
    progress = Progress(poked.set, busy.is_set)
    assert not poked.wait(0.02)
    for _ in range(3):  # asleep, woken, asleep again
        busy.set()
        progress.wake()
        assert poked.wait(5)
        busy.clear()
        time.sleep(0.01)
        poked.clear()
        assert not poked.wait(0.02)
    progress.stop()
    assert not [t for t in threading.enumerate() if t.name == "mpipipe-progress"]


def test_it_stops_while_busy() -> None:
    progress = Progress(lambda: None, lambda: True)
    progress.stop()
