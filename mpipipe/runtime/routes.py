"""How fast this rank multiplies matrices, by each route that a config can choose, and how exact that is; and
how fast its memory is.

Routes take turns, product by product, so that what else runs on the machine meets them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import linear

from mpipipe.cluster.routes import Route
from mpipipe.runtime.setting import is_fp32, use_gemm_route

SHAPES = ((512, 768, 3072), (512, 3072, 768))  # tokens, inputs, outputs: the two products of a GPT's MLP
BUDGET_S, MIN_ROUNDS = 0.1, 2
TRIAD_ELEMENTS = 1 << 23  # of each array: beyond the caches that a rank has to itself
RouteName = Literal["mkl", "onednn", "bf16"]
ROUTES: tuple[RouteName, ...] = ("mkl", "onednn", "bf16")


@dataclass(frozen=True)
class Trial:
    """One product of fp32 operands. times: how often it counts; flops: of one."""

    call: Callable[..., Any]
    operands: tuple[Any, ...]
    flops: float
    times: float = 1.0


def measure_routes() -> tuple[Route, ...]:
    """With the threads that are set, on a usual shape. The route of the process is MKL's afterwards."""
    draw = torch.Generator().manual_seed(0)
    trials = []
    for tokens, inputs, outputs in SHAPES:
        operands = (
            torch.randn(tokens, inputs, generator=draw),
            torch.randn(outputs, inputs, generator=draw),
        )
        trials.append(Trial(linear, operands, 2.0 * tokens * inputs * outputs))
    return measure(trials, ROUTES)


def measure(
    trials: Sequence[Trial],
    names: Sequence[RouteName],
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Route, ...]:
    """names: "mkl" is one of them; "bf16" is fp32 under autocast, casts included, as in training. budget_s:
    of each trial and route (default: `BUDGET_S`). The route of the process is MKL's afterwards."""
    budget_s = BUDGET_S if budget_s is None else budget_s
    seconds, errors, flops = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), 0.0
    try:
        with torch.no_grad():
            for trial in trials:
                for name, error in _errors(trial, names).items():  # it also chooses and compiles the kernels
                    errors[name] = max(errors[name], error)
                for name, taken in _seconds(trial, names, budget_s, clock).items():
                    seconds[name] += trial.times * taken
                flops += trial.times * trial.flops
    finally:
        use_gemm_route("mkl")
    own = errors["mkl"]
    return tuple(
        Route(name, flops / max(seconds[name], 1e-9), errors[name], is_fp32(errors[name], own))
        for name in names
    )


def _errors(trial: Trial, names: Sequence[RouteName]) -> dict[RouteName, float]:
    exact = trial.call(*(x.double() if isinstance(x, torch.Tensor) else x for x in trial.operands))
    scale = max(float(exact.norm()), 1e-300)
    return {name: float((_run(trial, name).double() - exact).norm()) / scale for name in names}


def _seconds(
    trial: Trial, names: Sequence[RouteName], budget_s: float, clock: Callable[[], float]
) -> dict[RouteName, float]:
    """The shortest of each: what else runs on a machine only adds, and the choice of a route is kept."""
    times: dict[RouteName, list[float]] = {name: [] for name in names}

    def due(taken: list[float]) -> bool:
        return sum(taken) < budget_s or len(taken) < MIN_ROUNDS

    while any(map(due, times.values())):
        for name, taken in times.items():
            if not due(taken):
                continue
            start = clock()
            _run(trial, name)
            taken.append(clock() - start)
    return {name: min(taken) for name, taken in times.items()}


def _run(trial: Trial, name: RouteName) -> Any:
    use_gemm_route("onednn" if name == "onednn" else "mkl")
    with _autocast(name):
        return trial.call(*trial.operands)


def _autocast(name: RouteName) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if name == "bf16" else nullcontext()


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
