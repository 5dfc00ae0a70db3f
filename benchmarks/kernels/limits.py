"""What the machine gives at most, measured in the same run: a kernel is far from it or it is not.

gb_s    the best of the triad a = b + s * c (McCalpin: "Memory bandwidth and machine balance", 1995), of
        b = b + s * c, which spares the reading of what is overwritten, and of a sum, which only reads, on
        arrays that no cache holds. A case whose tensors lie in the caches may exceed it.
gf_s    a matrix product of fp32 by the faster of the routes that are truly fp32; of a case in bf16, a product
        of bf16 where the processor has units for it

Other work on the machine only ever lowers them, so they are measured again and again, and the most counts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from mpipipe.cluster.node import bf16_units
from mpipipe.runtime.setting import FP32_ERROR, relative_error, use_gemm_route

CPU_INFO = Path("/proc/cpuinfo")
TRIAD = 1 << 24  # elements of an array
UNCACHED = 4 * TRIAD  # bytes that a case moves, from which on no cache holds its tensors
SIZE = 1024  # of the matrices
TRIES = 15  # the fastest one counts: a limit
Clock = Callable[[], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """bf16_gf_s: 0 where there are no units for it."""

    gb_s: float
    gf_s: float
    bf16_gf_s: float = 0.0

    def of(self, bf16: bool) -> dict[str, float]:
        """Of a case, by the type of its products."""
        gf_s = max(self.gf_s, self.bf16_gf_s) if bf16 else self.gf_s
        return {"gb_s": round(self.gb_s, 1), "gf_s": round(gf_s, 1)}

    def or_more(self, other: Limits) -> Limits:
        return Limits(
            max(self.gb_s, other.gb_s),
            max(self.gf_s, other.gf_s),
            max(self.bf16_gf_s, other.bf16_gf_s),
        )


class Seen:
    """The most that was seen so far, by number of threads."""

    def __init__(self, measure: Callable[[], Limits] | None = None) -> None:
        self._measure = measure or limits
        self._most: dict[int, Limits] = {}

    def again(self, threads: int) -> Limits:
        """After one more look, with that many threads of torch."""
        torch.set_num_threads(threads)
        found = self._measure()
        self._most[threads] = found.or_more(self._most.get(threads, found))
        return self._most[threads]

    def at_least(self, threads: int, achieved: Limits, bf16: bool, looks: int = 3) -> Limits:
        """Another look where a kernel seems to have achieved more than the machine gives. achieved: gb_s 0
        where its tensors may lie in the caches."""
        most = self._most[threads]
        while looks and (achieved.gb_s > most.gb_s or achieved.gf_s > most.of(bf16)["gf_s"]):
            most, looks = self.again(threads), looks - 1
        return most


def limits(
    clock: Clock = time.perf_counter, elements: int = TRIAD, size: int = SIZE, units: bool | None = None
) -> Limits:
    """With the threads and on the device that torch has now. units: whether bf16 has any; None: look."""
    units = bool(bf16_units()) if units is None else units
    speeds = (by_route(name, lambda: _product_gf_s(torch.float32, clock, size))() for name in true_routes())
    bf16 = _product_gf_s(torch.bfloat16, clock, size) if units else 0.0
    return Limits(_gb_s(clock, elements), max(speeds), bf16)


def _gb_s(clock: Clock, elements: int) -> float:
    a, b, c = (torch.ones(elements) for _ in range(3))
    triad_s = min(_fastest_s(lambda out=out: torch.add(b, c, alpha=0.5, out=out), clock) for out in (a, b))
    sum_s = _fastest_s(lambda: c.sum(), clock)
    return max(3 * a.nbytes / triad_s, c.nbytes / sum_s) / 1e9


def true_routes() -> list[str]:
    """Of products that are truly fp32: MKL's and oneDNN's; oneDNN rounds to bf16 on some processors."""
    return [name for name in ("mkl", "onednn") if name == "mkl" or by_route(name, _is_fp32)()]


def _is_fp32() -> bool:
    return relative_error() <= FP32_ERROR


def set_fastest_route() -> str:
    """Of the true ones."""

    def speed(name: str) -> float:
        return by_route(name, lambda: _product_gf_s(torch.float32, time.perf_counter, SIZE))()

    best = max(true_routes(), key=speed)
    use_gemm_route(best)
    return best


def route() -> str:
    """That is set."""
    return "onednn" if torch.backends.mkldnn.matmul.fp32_precision == "bf16" else "mkl"


def by_route(name: str, call: Callable[[], T]) -> Callable[[], T]:
    """The call with torch's fp32 products by that route, whatever is set for the others."""

    def run() -> T:
        before = route()
        use_gemm_route(name)
        try:
            return call()
        finally:
            use_gemm_route(before)

    return run


def has_bars(cpu_info: str) -> bool:
    """Whether the bars were set for such a processor: a Zen 5 (AMD, family 1Ah). It makes twice the
    multiply-adds of a Zen 4, with vectors of 64 bytes, while MKL's products for AMD are those of AVX2."""
    is_zen_5 = re.search(r"^cpu family\s*: 26$", cpu_info, re.MULTILINE) is not None
    return is_zen_5 and "AuthenticAMD" in cpu_info


def _product_gf_s(dtype: torch.dtype, clock: Clock, size: int) -> float:
    a, b, out = (torch.randn(size, size).to(dtype) for _ in range(3))
    return 2 * size**3 / _fastest_s(lambda: torch.mm(a, b, out=out), clock) / 1e9


def _fastest_s(call: Callable[[], object], clock: Clock) -> float:
    seconds = []
    for _ in range(TRIES):
        start = clock()
        call()
        seconds.append(clock() - start)
    return min(seconds)
