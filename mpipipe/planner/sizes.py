"""Sizes and counts in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def size_text(nbytes: int) -> str:
    """For people: 731 bytes, 12.5 MiB, 1.25 GiB. Bytes are said as long as one can read them."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= max(size, 10_000):
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"
    return counted(nbytes, "byte")


def counted(count: int, thing: str) -> str:
    """1 node, 2 nodes."""
    return f"{count} {thing}{'s' * (count != 1)}"


def joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def numbered(thing: str, numbers: Sequence[int], said: Callable[[Sequence[int]], str] = joined) -> str:
    """One thing or several by their numbers. said: how the numbers are.

    >>> numbered("rank", [3]), numbered("rank", [1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    return f"{thing}{'s' * (len(numbers) != 1)} {said(numbers)}"


def multiples_beside(number: int, of: int) -> str:
    """The nearest ones, below and above, of a number that is none itself.

    >>> multiples_beside(8, 3), multiples_beside(2, 4)
    ('6 or 9', '4')
    """
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if n)


def per_second(per_s: float, unit: str) -> str:
    """
    >>> per_second(9.81e9, "B/s")
    '9.8 GB/s'
    """
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_s >= factor:
            return f"{per_s / factor:.{1 if per_s < 10 * factor else 0}f} {prefix}{unit}"
    return f"{per_s:.0f} {unit}"
