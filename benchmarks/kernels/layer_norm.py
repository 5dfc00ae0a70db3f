"""Layer norm and RMS norm with the residual addition, against torch's norms and an addition.

Backward is that of the graph that forward has left, run again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Case
from mpipipe.ops.layer_norm import layer_norm, rms_norm

Tensor = torch.Tensor
SHAPES = [(2048, 768), (4096, 1024)]
# of x and the residual: under autocast a branch in bfloat16 is added to a stream in float32
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]
EPS = 1e-5
# kernel -> ours, torch's, bar of backward
KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], float]] = {
    "layer_norm": (
        lambda x, r, w, b: layer_norm(x, w, b, EPS, r),
        lambda x, r, w, b: _after_addition(lambda s: F.layer_norm(s, w.shape, w, b, EPS), x, r),
        3.0,
    ),
    "rms_norm": (
        lambda x, r, w: rms_norm(x, w, EPS, r),
        lambda x, r, w: _after_addition(lambda s: F.rms_norm(s, w.shape, w, EPS), x, r),
        2.0,
    ),
}
FORWARD_BAR = 1.5


def cases() -> list[Case]:
    return [
        case
        for kernel in KERNELS
        for shape in SHAPES
        for dtypes in DTYPES
        for case in _of(kernel, shape, *dtypes)
    ]


def _after_addition(norm: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return norm(s), s


def _of(kernel: str, shape: tuple[int, int], dtype: torch.dtype, of_residual: torch.dtype) -> list[Case]:
    ours, torchs, bar = KERNELS[kernel]
    x, dy, ds = (torch.randn(shape, dtype=dtype) for _ in range(3))
    residual = torch.randn(shape, dtype=of_residual)
    inputs = [x, residual, *(torch.randn(shape[1], dtype=dtype) for _ in range(2 - (kernel == "rms_norm")))]
    apart = dtype != of_residual
    dtypes = " + ".join(str(d).removeprefix("torch.") for d in (dtype, of_residual)[: 1 + apart])
    name = f"{shape[0]} x {shape[1]}, {dtypes}"
    leaves = [t.detach().requires_grad_() for t in inputs]

    def backward(function: Callable[..., Any]) -> Callable[[], Any]:
        results = function(*leaves)
        return partial(torch.autograd.grad, results, leaves, (dy, ds), retain_graph=True)

    return [
        Case(
            kernel, f"{name}, forward", partial(ours, *inputs), {"add, norm": partial(torchs, *inputs)},
            FORWARD_BAR, 3 * x.nbytes + residual.nbytes, 0.0,
        ),
        Case(
            kernel, f"{name}, backward", backward(ours), {"norm, add": backward(torchs)}, bar,
            4 * x.nbytes + apart * residual.nbytes, 0.0
        ),
    ]  # fmt: skip
