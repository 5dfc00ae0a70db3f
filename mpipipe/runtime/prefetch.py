"""Batches loaded while others are computed, by one thread: nothing forks beside MPI."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakSet

R = TypeVar("R", bound=Hashable)  # what names a batch, such as (split, step, start, stop, keys)
B = TypeVar("B")
THREAD = "mpipipe-prefetch"  # name of the thread
LEAVE_S = 5.0  # that a program waits at its end for a batch that is being loaded


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Prefetch(Generic[R, B]):
    """`expect` says what will be asked for; up to `depth` batches of it are loaded ahead, in that order.
    `get` gives any batch, expected or not. Every call of `load` is made by the one thread, so it need
    not be thread-safe. At most depth + 1 batches are held, and those that are expected `all_at_once`."""

    def __init__(self, load: Callable[[R], B], depth: int) -> None:
        self._load, self._depth = load, depth
        self._order: list[R] = []  # expected and not yet given
        self._together: list[R] = []  # likewise; loaded when none of those is due, however many they are
        self._wanted: list[R] = []  # what `get` waits for: none or one
        self._ready: dict[R, B | _Failed] = {}
        self._closed = False
        self._before: Prefetch[Any, Any] | None = None  # whose thread may still be reading
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
        self._thread.start()
        _LIVE.add(self)

    def after(self, other: Prefetch[Any, Any]) -> None:
        """To be called first: nothing is loaded before the thread of `other` has ended, which it stops. Two
        threads must not be in one data set."""
        other.stop()
        with self._changed:
            self._before = other

    def expect(self, requests: Iterable[R], all_at_once: Iterable[R] = ()) -> None:
        """What comes next, in order, in place of what was expected before; and what will be asked for at one
        moment after that. Loaded batches that still are expected stay."""
        with self._changed:
            self._order, self._together = list(requests), list(all_at_once)
            self._ready = {r: batch for r, batch in self._ready.items() if r in self._expected()}
            self._changed.notify_all()

    def get(self, request: R) -> B:
        """The batch; waits for it. Raises what `load` raised, with the request as a note."""
        with self._changed:
            self._wanted = [request]
            self._changed.notify_all()
            self._changed.wait_for(lambda: request in self._ready or self._closed)
            self._wanted = []
            if request not in self._ready:
                raise RuntimeError(f"{request} is asked of a Prefetch that is closed")
            batch = self._ready.pop(request)
            for expected in (self._order, self._together):
                if request in expected:
                    expected.remove(request)
            self._changed.notify_all()
        if isinstance(batch, _Failed):
            raise batch.error
        return batch

    def stop(self) -> None:
        """Lets the thread end after the batch that it is loading. Does not wait for it: the batch may never
        come, or need a lock that the caller holds, which may be the garbage collector."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, after the batch that it is loading."""
        self.stop()
        self._thread.join()

    def __enter__(self) -> Prefetch[R, B]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def _due(self) -> list[R]:
        """What to load now, the most urgent first."""
        urgent = self._wanted + self._order[: self._depth] + self._together
        return [r for r in urgent if r not in self._ready]

    def _expected(self) -> list[R]:
        return self._order + self._together

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due())
                if self._closed:
                    return
                request = self._due()[0]
            if self._before is not None:
                self._before._thread.join()
                self._before = None
                continue  # this one may have been closed meanwhile
            batch: B | _Failed
            try:
                batch = self._load(request)
            except BaseException as error:
                error.add_note(f"while loading {request}")
                batch = _Failed(error)
            with self._changed:
                if request in self._wanted + self._expected():  # it may have been called off meanwhile
                    self._ready[request] = batch
                    self._changed.notify_all()
            del batch  # held by who asked for it, and not until the next one


_LIVE: WeakSet[Prefetch[Any, Any]] = WeakSet()  # those with a thread that runs, and perhaps some without


@atexit.register
def _leave() -> None:
    """A thread that comes back from torch into a Python that has ended would abort the process."""
    there, until_s = list(_LIVE), time.monotonic() + LEAVE_S
    for prefetch in there:
        prefetch.stop()
    for prefetch in there:
        prefetch._thread.join(max(0.0, until_s - time.monotonic()))
