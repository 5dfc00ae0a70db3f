"""Sizes and counts in words."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """For people: 731 bytes, 12.5 MiB, 1.25 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"
    return counted(nbytes, "byte")


def counted(count: int, thing: str) -> str:
    """1 node, 2 nodes."""
    return f"{count} {thing}{'s' * (count != 1)}"
