"""What the machine gives at most, measured in the same run: a kernel is far from it or it is not.

gb_s    the better of the triad a = b + s * c (McCalpin: "Memory bandwidth and machine balance", 1995) and
        b = b + s * c, which spares the reading of what is overwritten, on arrays that no cache holds. A case
        whose tensors lie in the caches may exceed it.
gf_s    a matrix product of fp32 by the route that is set
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mpipipe.runtime.setting import FP32_ERROR, relative_error, use_gemm_route

CPU_INFO = Path("/proc/cpuinfo")
TRIAD = 1 << 24  # elements of an array
SIZE = 1024  # of the matrices
TRIES = 7  # the fastest one counts: a limit


@dataclass(frozen=True)
class Limits:
    gb_s: float
    gf_s: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in asdict(self).items()}


def limits() -> Limits:
    """With the threads and the route that torch has now."""
    a, b, c = (torch.ones(TRIAD) for _ in range(3))
    triad_s = min(_fastest_s(lambda out=out: torch.add(b, c, alpha=0.5, out=out)) for out in (a, b))
    return Limits(3 * a.nbytes / triad_s / 1e9, _product_gf_s())


def set_fastest_route() -> str:
    """Of matrix products that are truly fp32: MKL's or oneDNN's; oneDNN rounds to bf16 on some processors."""
    speeds = {}
    for route in ("mkl", "onednn"):
        use_gemm_route(route)
        if route == "mkl" or relative_error() <= FP32_ERROR:
            speeds[route] = _product_gf_s()
    best = max(speeds, key=lambda route: speeds[route])
    use_gemm_route(best)
    return best


def route() -> str:
    """That is set."""
    return "onednn" if torch.backends.mkldnn.matmul.fp32_precision == "bf16" else "mkl"


def has_bars(cpu_info: str) -> bool:
    """Whether the bars were set for such a processor: an AMD one with AVX-512."""
    return "AuthenticAMD" in cpu_info and "avx512f" in cpu_info


def _product_gf_s() -> float:
    a, b, out = (torch.randn(SIZE, SIZE) for _ in range(3))
    return 2 * SIZE**3 / _fastest_s(lambda: torch.mm(a, b, out=out)) / 1e9


def _fastest_s(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
