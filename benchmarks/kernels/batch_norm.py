"""BatchNorm with ReLU in training, with and without a residual, against torch's operators one by one.

Backward is that of the graph that forward has left, run again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.harness import Case
from mpipipe.ops.batch_norm import batch_norm, batch_norm_with_statistics

Tensor = torch.Tensor
SHAPES = [(32, 64, 56, 56), (8, 64, 64, 64), (8, 256, 16, 16)]
EPS = 1e-5
FORWARD_BAR, BACKWARD_BAR = 3.0, 1.2


def cases() -> list[Case]:
    return [
        case
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for add in (False, True)
        for case in _of(shape, dtype, add)
    ]


def _ours(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    return batch_norm(x, weight, bias, EPS, True, residual)[0]


def _torchs(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    y, _, _ = batch_norm_with_statistics(x, weight, bias, EPS)
    return torch.relu(y if residual is None else y + residual)


def _of(shape: tuple[int, ...], dtype: torch.dtype, add: bool) -> list[Case]:
    x, dy, residual = (torch.randn(shape, dtype=dtype) for _ in range(3))
    inputs = [x, *(torch.randn(shape[1]) for _ in range(2)), *([residual] if add else [])]
    leaves = [t.detach().requires_grad_() for t in inputs]
    name = f"{' x '.join(map(str, shape))}, {str(dtype).removeprefix('torch.')}{', residual' * add}"

    def backward(function: Callable[..., Any]) -> Callable[[], Any]:
        return partial(torch.autograd.grad, function(*leaves), leaves, dy, retain_graph=True)

    forward = {"one by one": partial(_torchs, *inputs)}
    behind = {"one by one": backward(_torchs)}
    moved = (2 + add) * x.nbytes, (3 + 2 * add) * x.nbytes
    bars = (FORWARD_BAR, BACKWARD_BAR) if dtype == torch.float32 and not add else (None, None)
    return [
        Case("batch_norm", f"{name}, forward", partial(_ours, *inputs), forward, bars[0], moved[0], 0.0),
        Case("batch_norm", f"{name}, backward", backward(_ours), behind, bars[1], moved[1], 0.0),
    ]
