"""Ranks by what they compute on: those that differ by noise alone are on one device."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpipipe.config.cluster import CountedConfig, FlopsConfig

SAME_SPEED = 0.15  # relative: ranks of one processor differ by that much from the next fastest by chance
SAME_MEMORY = 0.05
DIGITS = 4  # of a rate that are worth writing


@dataclass(frozen=True)
class Rates:
    """What one rank reaches with all its threads while the others compute too."""

    kind: str
    threads: int
    memory_bytes: int
    fp32_flops_per_s: float
    bf16_flops_per_s: float
    bytes_per_s: float  # as STREAM counts


def devices_of(ranks: Sequence[Rates]) -> tuple[CountedConfig, ...]:
    """In the order of the ranks. Of one device: the medians, and the least memory."""
    speeds = _steps([r.fp32_flops_per_s for r in ranks], SAME_SPEED)
    memories = _steps([float(r.memory_bytes) for r in ranks], SAME_MEMORY)
    sorts = list(zip([(r.kind, r.threads) for r in ranks], speeds, memories, strict=True))
    of_sort = {sort: [r for r, s in zip(ranks, sorts, strict=True) if s == sort] for sort in sorts}
    return tuple(_device(of_sort[sort], len(list(run))) for sort, run in itertools.groupby(sorts))


def _steps(values: Sequence[float], apart: float) -> list[int]:
    """Which of the values are near to each other: equal numbers where no gap is between them."""
    ordered = sorted(values)
    number = {ordered[0]: 0}
    for before, value in itertools.pairwise(ordered):
        number[value] = number[before] + (value > before * (1 + apart))
    return [number[value] for value in values]


def _device(alike: Sequence[Rates], count: int) -> CountedConfig:
    def median(of: Callable[[Rates], float]) -> float:
        return rounded(statistics.median(map(of, alike)))

    flops = FlopsConfig(fp32=median(lambda r: r.fp32_flops_per_s), bf16=median(lambda r: r.bf16_flops_per_s))
    return CountedConfig(
        kind=alike[0].kind,
        threads=alike[0].threads,
        memory=min(r.memory_bytes for r in alike) >> 20 << 20,
        flops_per_s=flops,
        bytes_per_s=median(lambda r: r.bytes_per_s),
        count=count,
    )


def rounded(x: float) -> float:
    return float(f"{x:.{DIGITS - 1}e}")
