"""Resident memory of this process, above what the imports took (Linux, proc(5))."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _kib(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


class PeakMemory:
    """Resident memory above what it was when this was made: after all imports."""

    def __init__(self) -> None:
        _CLEAR.write_text("5")  # resets the high-water mark to what is resident now
        self._baseline = _kib("VmRSS:")

    @property
    def nbytes(self) -> int:
        """The highest since."""
        return max(0, _kib("VmHWM:") - self._baseline) * 1024

    @property
    def now_bytes(self) -> int:
        """After giving freed memory back to the system."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return max(0, _kib("VmRSS:") - self._baseline) * 1024
