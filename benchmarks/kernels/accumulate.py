"""A bfloat16 gradient added to a float32 sum, and zeroed, against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.kernels.harness import Case
from mpipipe.ops import accumulate

N = 25_000_000
PIECE = 1 << 16  # elements


def cases() -> list[Case]:
    total, x, own = torch.randn(N), torch.randn(N).bfloat16(), torch.empty(N)
    return [case for zero in (False, True) for case in _of(total, x, own, zero)]


def _of(total: torch.Tensor, x: torch.Tensor, own: torch.Tensor, zero: bool) -> list[Case]:
    def of(add: Callable[[], object]) -> None:
        add()
        if zero:
            x.zero_()

    def by_pieces() -> None:
        for a, b in pieces:
            a.add_(b.float())
            if zero:
                b.zero_()

    pieces = list(zip(total.split(PIECE), x.split(PIECE), strict=True))
    ours = partial(accumulate, total, x, zero=zero)
    flat = {
        "add_": partial(of, lambda: total.add_(x)),
        "float, add_": partial(of, lambda: total.add_(x.float())),
        "copy_, add_": partial(of, lambda: total.add_(own.copy_(x))),
    }
    moved = 2 * total.nbytes + (1 + zero) * x.nbytes
    name = "and zero" if zero else "alone"
    return [
        Case("accumulate", f"{name}, flat", ours, flat, 8.0, moved, 0.0),
        Case("accumulate", f"{name}, by pieces", ours, {"float, add_": by_pieces}, None, moved, 0.0),
    ]
