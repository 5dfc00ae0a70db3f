"""bias_gelu and swiglu, forward and backward, against torch's operators.

The bias has two ways in torch: an addition of its own, or for nothing inside the matrix product before. Its
gradient is a sum of its own in both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Case
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.swiglu import swiglu

Tensor = torch.Tensor
SHAPES = [(2048, 768), (4096, 1024), (2048, 3072)]
BAR = 1.2
KERNELS = ("bias_gelu", "swiglu")


def cases() -> list[Case]:
    return [
        case
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for case in (_gelu(shape, dtype, "none"), _gelu(shape, dtype, "tanh"), _swiglu(shape, dtype))
    ]


def _both(function: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> Any:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, dy)


def _gelu(shape: tuple[int, int], dtype: torch.dtype, approximate: str) -> Case:
    x, dy, bias = (torch.randn(s, dtype=dtype) for s in (shape, shape, shape[1:]))

    def biased_before() -> Any:
        (dx,) = _both(partial(F.gelu, approximate=approximate), [x], dy)
        return dx, dx.sum(0)

    added = partial(_both, lambda x, b: F.gelu(x + b, approximate=approximate), [x, bias], dy)
    ours = partial(_both, partial(bias_gelu, approximate=approximate), [x, bias], dy)
    theirs = {"add, gelu": added, "bias in the product, gelu": biased_before}
    return Case("bias_gelu", f"{_name(shape, dtype)}, {approximate}", ours, theirs, BAR, 5 * x.nbytes, 0.0)


def _swiglu(shape: tuple[int, int], dtype: torch.dtype) -> Case:
    gate, up, dy = (torch.randn(shape, dtype=dtype) for _ in range(3))
    theirs = {"silu, mul": partial(_both, lambda g, u: F.silu(g) * u, [gate, up], dy)}
    ours = partial(_both, swiglu, [gate, up], dy)
    return Case("swiglu", _name(shape, dtype), ours, theirs, BAR, 8 * gate.nbytes, 0.0)


def _name(shape: tuple[int, int], dtype: torch.dtype) -> str:
    return f"{shape[0]} x {shape[1]}, {str(dtype).removeprefix('torch.')}"
