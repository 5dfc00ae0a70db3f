"""Where in a schedule something is wrong: its actions rank by rank, with a mark.

rank 0    0F0  0F1 [0B1] 0B0  <-- here
rank 1    1F0  1B0  1F1  1B1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from mpipipe.values import Action, Int32, Op

_RANKS = 8  # shown at most
_BEFORE, _AFTER = 9, 5  # actions around the mark, where a rank has more than fit
_FIT = 24


def grid(codes: Sequence[Int32], marks: Mapping[int, int], lacking: Action | None = None) -> str:
    """marks: rank -> index of the action that is marked, its number of actions for what comes after the last
    one; lacking: what is not there, to be shown at the marks."""
    shown = _shown(len(codes), list(marks))
    first = min(marks.values())
    wide = max(len(each) for each in codes) > _FIT
    low = (lambda at: max(0, at - _BEFORE)) if wide else (lambda _: 0)
    high = (lambda at: at + _AFTER) if wide else (lambda _: _FIT)
    digits = len(str(shown[-1]))
    lines = [
        f"  rank {rank:{digits}}  {_row(codes[rank], marks.get(rank), first, low, high, lacking)}"
        for rank in shown
    ]
    if len(shown) < len(codes):
        lines.append(f"  ... and {len(codes) - len(shown)} more ranks")
    return "\n".join(lines)


def _shown(n_ranks: int, marked: list[int]) -> list[int]:
    """The marked ranks, and those nearest to the first of them."""
    near = sorted(range(n_ranks), key=lambda rank: (rank not in marked, abs(rank - marked[0])))
    return sorted(near[:_RANKS])


def _row(
    codes: Int32, mark: int | None, first: int, low: Callable[[int], int], high: Callable[[int], int],
    lacking: Action | None,
) -> str:  # fmt: skip
    at = first if mark is None else mark
    start, end = low(at), high(at)
    words = list(_words(codes[start:end], None if mark is None else mark - start))
    if mark is not None and mark >= len(codes):
        words.append(f"[no {lacking}]" if lacking else "[end]")
    before, after = "... " if start else "", " ..." if end < len(codes) else ""
    return f"{before}{' '.join(words)}{after}{'  <-- here' if mark is not None else ''}"


def _words(codes: np.ndarray, mark: int | None) -> Iterator[str]:
    for index, (kind, stage, micro) in enumerate(codes.tolist()):
        word = f"{stage}{Op(kind).name}{micro}" if kind in range(len(Op)) else f"({kind}, {stage}, {micro})"
        yield f"[{word}]" if index == mark else f" {word} "
