"""Pooling, forward and backward, against torch's. Backward is that of the graph that forward has left."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Case
from mpipipe.ops.max_pool2d import max_pool2d

# shape, window and stride: those of vgg, and that of a ResNet for ImageNet, whose windows overlap
SHAPES = [((8, 64, 64, 64), 2, 2, 0), ((8, 256, 16, 16), 2, 2, 0), ((32, 64, 112, 112), 3, 2, 1)]


def cases() -> list[Case]:
    return [
        case for shape in SHAPES for dtype in (torch.float32, torch.bfloat16) for case in _of(*shape, dtype)
    ]


def _of(shape: tuple[int, ...], window: int, stride: int, padding: int, dtype: torch.dtype) -> list[Case]:
    x = torch.randn(shape, dtype=dtype)
    pools: Any = [partial(pool, stride=stride, padding=padding) for pool in (max_pool2d, F.max_pool2d)]
    leaf = x.detach().requires_grad_()
    dy = torch.randn_like(pools[1](x, window))
    name = f"{' x '.join(map(str, shape))} by {window}, {str(dtype).removeprefix('torch.')}"
    ours, torchs = (partial(pool, leaf, window) for pool in pools)
    back = [partial(torch.autograd.grad, pool(), [leaf], dy, retain_graph=True) for pool in (ours, torchs)]
    moved = x.nbytes + dy.nbytes + dy.numel()
    return [
        Case("max_pool2d", f"{name}, forward", ours, {"torch": torchs}, None, moved, 0.0),
        Case("max_pool2d", f"{name}, backward", back[0], {"torch": back[1]}, None, moved, 0.0),
    ]
