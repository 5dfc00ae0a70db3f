"""What a call costs on next to nothing, 32 numbers: forward alone, and with a graph for the gradient.

The bar is the most microseconds of forward; `ratio` is torch's own operators over ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Case
from mpipipe.ops import accumulate, adamw, dropout, embedding, flash_attention, linear_cross_entropy, norms
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.gemm import gemm
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.max_pool2d import max_pool2d
from mpipipe.ops.swiglu import swiglu

Tensor = torch.Tensor
MOST_US = 10.0
ROWS, WIDTH = 4, 8


class Op(NamedTuple):
    """Ours and torch's of the same tensors; differentiable: of leaves, that may want a gradient."""

    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    differentiable: bool = True


def cases() -> Iterator[Case]:
    for name, op in ops().items():
        yield _case(f"{name}, forward", op, op.inputs, MOST_US)
        if op.differentiable:
            yield _case(f"{name}, with a graph", op, [t.detach().requires_grad_() for t in op.inputs], None)


def _case(name: str, op: Op, inputs: Any, bar: float | None) -> Case:
    ours, theirs = partial(op.ours, *inputs), {"torch": partial(op.torchs, *inputs)}
    return Case("calls", name, ours, theirs, bar, call=True)


def ops() -> dict[str, Op]:
    x, other = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    weight, bias = torch.randn(WIDTH), torch.randn(WIDTH)
    labels, image = torch.arange(ROWS), torch.randn(ROWS, 2, 2, 2)
    ones, flat, half = torch.ones(2), torch.randn(ROWS * WIDTH), torch.randn(ROWS * WIDTH).bfloat16()
    heads = tuple(torch.randn(1, 1, ROWS, WIDTH) for _ in range(3))
    return {
        "accumulate": Op(accumulate, torch.Tensor.add_, (flat.clone(), half), False),
        "adamw": Op(_adamw, _adamw_of_torch, tuple(flat.abs() for _ in range(4)), False),
        "batch_norm": Op(
            batch_norm, lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (image, ones, ones)
        ),
        "bias_gelu": Op(bias_gelu, lambda x, b: F.gelu(x + b), (x, bias)),
        "dropout": Op(partial(dropout, p=0.1, key=1, step=2, micro=3), partial(F.dropout, p=0.1), (x,)),
        "embedding": Op(partial(embedding, labels), partial(F.embedding, labels), (x,)),
        "flash_attention": Op(flash_attention, F.scaled_dot_product_attention, heads),
        "gemm": Op(gemm, torch.mm, (x, other.t()), False),
        "layer_norm": Op(layer_norm, lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), (x, weight, bias)),
        "linear_cross_entropy": Op(
            lambda x, w: linear_cross_entropy(x, w, labels),
            lambda x, w: F.cross_entropy(F.linear(x, w), labels, reduction="sum"),
            (x, other),
        ),
        "max_pool2d": Op(partial(max_pool2d, kernel_size=2), partial(F.max_pool2d, kernel_size=2), (image,)),
        "norms": Op(
            partial(norms, offsets=torch.tensor([0, 8]), counts=torch.tensor([8, 24])),
            lambda x: torch._foreach_norm(x.split([8, 24])),
            (flat,),
            False,
        ),
        "rms_norm": Op(rms_norm, lambda x, w: F.rms_norm(x, (WIDTH,), w), (x, weight)),
        "swiglu": Op(swiglu, lambda gate, up: F.silu(gate) * up, (x, other)),
    }


def _adamw(*buffers: Tensor) -> None:
    adamw(*buffers, step=5, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def _adamw_of_torch(*buffers: Tensor) -> None:
    torch._fused_adamw_(
        *([b] for b in buffers), [], [torch.tensor(5.0)], beta1=0.9, beta2=0.95, amsgrad=False,
        maximize=False, lr=3e-4, eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
