"""Memory of this process: how the allocator treats it, and what is resident above the imports
(Linux, proc(5), mallopt(3))."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
BUFFER_BYTES = 2 << 20  # through which a checkpoint is written, when what a step has freed is kept
RUN_BYTES = 2 << 20  # metrics, spans, the graph of evaluation: about that in the examples
KEPT_BYTES = 32 << 20  # the most that glibc allows
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_STATM, _PAGE_BYTES = "/proc/self/statm", os.sysconf("SC_PAGE_SIZE")


def _kib(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def _own_kib(field: str) -> int:
    return _kib(field) - _kib("RssFile:") - _kib("RssShmem:")


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks up to `KEPT_BYTES` instead of giving them back and faulting them in again
    at every micro-batch; larger ones still go back at once. Elsewhere: nothing.

    A step of a GPT with 10 M parameters took 10,000 page faults, 3 to 5 % of its time, and takes 10.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """What a phase that is over has left behind; for between phases, not within a step."""
    gc.collect()
    trim_heap()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The collector of garbage rests meanwhile: it would look through many new objects that stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def trim_heap() -> None:
    """Gives back what is freed, without a search for what is garbage."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def growth_bytes(work: Callable[[], object]) -> int:
    """The most that this process holds more than before while it does some work; 0 where the system does not
    say. What other threads take meanwhile counts too."""
    trim_heap()  # else the work would find room in what was freed before
    restarted = _restart_peak()
    before = _kib("VmRSS:")
    work()
    return max(0, _kib("VmHWM:") - before) * 1024 if restarted else 0


def _restart_peak() -> bool:
    """Whether the system can forget the highest so far."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
        return True
    return False


class Memory(Protocol):
    """Of what this process computes in: `PeakMemory`, or that of an accelerator."""

    def restart(self) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def sample(self) -> int: ...
    def base_bytes(self, saved_bytes: int) -> int: ...


class PeakMemory:
    """Resident memory of this process's own above what it was when this was made: after all imports. Mapped
    files do not count: pages of a data set or of a library are the system's, which drops them at need."""

    def __init__(self) -> None:
        trim_heap()  # else what the imports have freed would count as held, until somebody gives it back
        self.restart()
        self._baseline = _own_kib("VmRSS:")
        self._statm = -1  # elsewhere than on Linux
        with contextlib.suppress(OSError):
            self._statm = os.open(_STATM, os.O_RDONLY)

    def restart(self) -> None:
        """Forgets the highest so far; where the system cannot, the peak is an upper bound."""
        _restart_peak()

    @property
    def nbytes(self) -> int:
        """The highest since, and what files were mapped for a while only."""
        return max(0, _own_kib("VmHWM:") - self._baseline) * 1024

    def sample(self) -> int:
        """Resident bytes now, as they are, in about a microsecond; 0 where the system does not say."""
        if self._statm < 0:
            return 0
        resident, mapped = os.pread(self._statm, 128, 0).split()[1:3]
        pages = int(resident) - int(mapped)
        return max(0, pages * _PAGE_BYTES - self._baseline * 1024)

    @property
    def now_bytes(self) -> int:
        """After giving freed memory back to the system."""
        give_back_freed_memory()
        return max(0, _own_kib("VmRSS:") - self._baseline) * 1024

    def base_bytes(self, saved_bytes: int) -> int:
        """What a rank that builds its weights now holds beside them: what it has, and what running adds.
        saved_bytes: the most that it may write to a checkpoint."""
        return self.now_bytes + RUN_BYTES + min(BUFFER_BYTES, saved_bytes)
