"""Dropout from the counter-based stream, against torch's, which draws and keeps a mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Case
from mpipipe.ops import dropout

P = 0.1
SHAPES = {"2048 x 768": (2048, 768), "2048 x 3072": (2048, 3072)}


def cases() -> list[Case]:
    return [
        case
        for name, shape in SHAPES.items()
        for dtype in (torch.float32, torch.bfloat16)
        for case in _of(f"{name}, {str(dtype).removeprefix('torch.')}", shape, dtype)
    ]


def _of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Case]:
    x, dy = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return dropout(x, P, key=1, step=2, micro=3)

    def by_uniform(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand_like(x) >= P) / (1 - P)

    theirs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "F.dropout": lambda x: F.dropout(x, P),
        "rand": by_uniform,
    }
    forward = {way: partial(f, x) for way, f in theirs.items()}
    both = {way: partial(_both, f, x, dy) for way, f in theirs.items()}
    return [
        Case("dropout", f"{name}, forward", partial(ours, x), forward, None, 2 * x.nbytes, 0.0),
        Case(
            "dropout",
            f"{name}, forward and backward",
            partial(_both, ours, x, dy),
            both,
            3.0,
            4 * x.nbytes,
            0.0,
        ),
    ]


def _both(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    f(leaf).backward(dy)
    assert leaf.grad is not None
    return leaf.grad
