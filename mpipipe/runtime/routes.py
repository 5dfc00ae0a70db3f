"""How fast this rank multiplies matrices, by each route that a config can choose, and how exact that is; and
how fast its memory is."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch.nn.functional import linear

from mpipipe.cluster.doctor.facts import Route
from mpipipe.runtime.setting import FP32_ERROR, relative_error, use_gemm_route

SHAPES = ((512, 768, 3072), (512, 3072, 768))  # tokens, inputs, outputs: the two products of a GPT's MLP
BUDGET_S, MIN_ROUNDS = 0.1, 2
TRIAD_ELEMENTS = 1 << 23  # of each array: beyond the caches that a rank has to itself
RouteName = Literal["mkl", "onednn", "bf16"]
ROUTES: tuple[RouteName, ...] = ("mkl", "onednn", "bf16")


def measure_routes() -> tuple[Route, ...]:
    """With the threads that are set. "bf16" is fp32 under autocast, casts included, as in training. The route
    of the process is MKL's afterwards."""
    routes = []
    for name in ROUTES:
        use_gemm_route("onednn" if name == "onednn" else "mkl")
        with _autocast(name), torch.no_grad():
            error = relative_error()
            routes.append(Route(name, _flops_per_s(), error, error <= FP32_ERROR))
    use_gemm_route("mkl")
    return tuple(routes)


def _autocast(name: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if name == "bf16" else nullcontext()


def _flops_per_s() -> float:
    """Of all shapes together, each by its median time."""
    flops = seconds = 0.0
    for tokens, inputs, outputs in SHAPES:
        x, weight = torch.ones(tokens, inputs), torch.ones(outputs, inputs)
        flops += 2.0 * tokens * inputs * outputs
        seconds += _median_s(x, weight)
    return flops / seconds


def _median_s(x: torch.Tensor, weight: torch.Tensor) -> float:
    linear(x, weight)  # chooses and compiles the kernel
    times: list[float] = []
    while sum(times) < BUDGET_S or len(times) < MIN_ROUNDS:
        start = time.perf_counter()
        linear(x, weight)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def triad_bytes_per_s() -> float:
    """a = b + 3 c over arrays in memory, with the threads that are set: two reads and one write for each
    element (STREAM, McCalpin 1995). The median."""
    a, b, c = (torch.full((TRIAD_ELEMENTS,), float(i)) for i in range(3))
    times: list[float] = []
    while sum(times) < BUDGET_S or len(times) < MIN_ROUNDS:
        start = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        times.append(time.perf_counter() - start)
    return 3 * a.nbytes / sorted(times)[len(times) // 2]
