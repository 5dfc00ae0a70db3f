"""The memory that a computation takes beside its arguments, each side in a process of its own: what one side
frees the next one would find (Linux)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernels.harness import Call

OURS = "ours"


@dataclass(frozen=True)
class Memory:
    """`code` % a side is Python that prints the extra bytes of that side, `OURS` or one of `theirs`. bar: the
    smallest of theirs over ours that is aimed at, None for a case of interest only."""

    kernel: str
    case: str
    code: str
    theirs: Sequence[str]
    bar: float | None


@dataclass(frozen=True)
class Taken:
    """Bytes by side; `best` is the side of torch that takes least, `ratio` its bytes over ours."""

    ours_bytes: int
    theirs_bytes: dict[str, int]
    best: str
    ratio: float


def taken(case: Memory) -> Taken:
    """Raises subprocess.CalledProcessError where a side does not run."""
    ours, *theirs = (_printed(case.code % side) for side in (OURS, *case.theirs))
    by_side = dict(zip(case.theirs, theirs, strict=True))
    best = min(by_side, key=lambda side: by_side[side])
    return Taken(ours, by_side, best, by_side[best] / ours)


def extra_bytes(small: Call, call: Call) -> int:
    """Growth of this process's resident memory during `call`, at most. `small`, the same on next to nothing,
    comes first, so that libraries are not counted."""
    small()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest size so far
    before = _resident_bytes("VmRSS")
    call()
    return _resident_bytes("VmHWM") - before


def _printed(code: str) -> int:
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(run.stdout)


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
