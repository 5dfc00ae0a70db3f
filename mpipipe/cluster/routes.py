"""By which library fp32 matrices are multiplied: what was measured of each, and the choice.

Invariant: a route is taken only where it is as exact as fp32 on every rank, and clearly faster over all of
them together; else it is MKL's, torch's own default. So noise does not turn the choice from one start to the
next, and the bits with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpipipe.planner.sizes import per_second
from mpipipe.values import Gemm, Value

GAIN = 1.05  # times as fast as MKL: less is noise, or not worth other bits
PRODUCTS = "fp32 products: "  # before a reason of `why`
LIBRARIES: dict[Gemm, str] = {"mkl": "MKL", "onednn": "oneDNN"}
NAMES = {"mkl": "fp32 by MKL", "onednn": "fp32 by oneDNN", "bf16": "bf16 autocast"}


@dataclass(frozen=True)
class Route(Value):
    name: str  # "mkl", "onednn" or "bf16"
    flops_per_s: float  # all products that were measured together
    error: float  # relative, of the worst product, against float64
    fp32: bool  # as exact as MKL's


def together(by_rank: Sequence[Sequence[Route]]) -> tuple[Route, ...]:
    """One figure per route: the rate at which all ranks do equal work in turn, the largest error."""
    by_name = [[r for routes in by_rank for r in routes if r.name == first.name] for first in by_rank[0]]
    return tuple(
        Route(
            of[0].name,
            len(of) / sum(1 / r.flops_per_s for r in of),
            max(r.error for r in of),
            all(r.fp32 for r in of),
        )
        for of in by_name
    )


def fastest(routes: Sequence[Route]) -> Gemm:
    """The route to take, of those of `together`."""
    mkl, onednn = (_named(routes, name) for name in ("mkl", "onednn"))
    return "onednn" if onednn.fp32 and onednn.flops_per_s > GAIN * mkl.flops_per_s else "mkl"


def gain(routes: Sequence[Route], name: str) -> float:
    """How many times as fast as MKL."""
    return _named(routes, name).flops_per_s / _named(routes, "mkl").flops_per_s


def why(routes: Sequence[Route]) -> str:
    """The choice of `fastest` in words, with rates and errors."""
    both = [_named(routes, name) for name in ("onednn", "mkl")]
    rates = " and ".join(per_second(r.flops_per_s, "flop/s") for r in both)
    figures = f"({rates}, errors {both[0].error:.0e} and {both[1].error:.0e})"
    if fastest(routes) == "onednn":
        return f"oneDNN, {gain(routes, 'onednn'):.2f} times as fast as MKL {figures}"
    if not both[0].fp32:
        return f"MKL, as oneDNN rounds to less than fp32 here {figures}"
    return f"MKL, as oneDNN is not clearly faster {figures}"


def _named(routes: Sequence[Route], name: str) -> Route:
    return next(r for r in routes if r.name == name)
