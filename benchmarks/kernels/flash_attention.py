"""Causal attention, forward and backward, against torch's own: the shapes of GPT-85M, and longer ones.

The bars are for float32 and against torch as it comes, whose products MKL makes ("stock"). Its attention
takes the route of its other products, and by oneDNN it is up to twice as fast: a bar of 2.3 there would ask
for more flops than the processor has at 4096 tokens, so those cases have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Case
from benchmarks.kernels.limits import by_route
from mpipipe.ops import flash_attention

Tensor = torch.Tensor
SHAPES = (4, 12, 256, 64), (1, 12, 1024, 64), (1, 4, 4096, 64), (1, 8, 1024, 128)  # (B, H, T, E)
FORWARD_BAR, BACKWARD_BAR = 1.8, 2.3


def cases() -> list[Case]:
    return [
        case for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES for case in _pair(shape, dtype)
    ]


def _pair(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Case]:
    b, h, t, e = shape
    q, k, v = (torch.randn(b, t, h, e, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    ours, theirs = (
        partial(flash_attention, causal=True),
        partial(F.scaled_dot_product_attention, is_causal=True),
    )
    name, flops = f"{b}x{h}x{t}x{e} {str(dtype).removeprefix('torch.')}", 2.0 * b * h * t * t * e
    forward, backward = ([make(f, q, k, v) for f in (ours, theirs)] for make in (_forward, _backward))
    of_forward, of_backward = (4 * q.nbytes, flops), (8 * q.nbytes, 2.5 * flops)
    half = dtype == torch.bfloat16
    if not half:
        bars = (FORWARD_BAR, BACKWARD_BAR) if e == 64 else (None, None)
        stock = [{"sdpa": by_route("mkl", call)} for _, call in (forward, backward)]
        yield Case("flash_attention", f"forward {name}, stock", forward[0], stock[0], bars[0], *of_forward)
        yield Case("flash_attention", f"backward {name}, stock", backward[0], stock[1], bars[1], *of_backward)
    for way, (ours, torchs), of in (("forward", forward, of_forward), ("backward", backward, of_backward)):
        yield Case("flash_attention", f"{way} {name}", ours, {"sdpa": torchs}, None, *of, bf16=half)


def _forward(attend: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    detached = [x.detach() for x in inputs]
    return lambda: attend(*detached)


def _backward(attend: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    o = attend(*inputs)
    d_o = torch.randn_like(o)
    return lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True)
