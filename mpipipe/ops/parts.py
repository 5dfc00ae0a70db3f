"""Equal parts of a tensor, such as q, k and v of one product.

    backward of torch    gradients of the parts -> copied into one tensor
    here                 where they lie in one as the parts did, which is what `flash_attention` makes of
                         parts that it reads, they are that tensor

A captured graph has it where attention alone reads the parts (mpipipe/graph/patterns.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpipipe.ops.library import Function, traced, wants_gradient

Tensor = torch.Tensor


def parts(x: Tensor, dim: int, size: int | None = None) -> tuple[Tensor, ...]:
    """Views of x along a dimension: of `size` each, which divides it, as torch.split gives them; None:
    without that dimension, as torch.unbind does. The bits are torch's, forward and backward; the gradient
    has x's strides, where x has no gaps."""
    if torch.compiler.is_compiling() or not wants_gradient(x):
        return _parts(x, dim, size)
    result: tuple[Tensor, ...] = _Parts.apply(x, dim, size)
    return result


def _parts(x: Tensor, dim: int, size: int | None) -> tuple[Tensor, ...]:
    return x.unbind(dim) if size is None else x.split(size, dim)


class _Parts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int | None) -> tuple[Tensor, ...]:
        ctx.how, ctx.shape = (dim, size), x.shape
        ctx.strides = torch.empty_like(x, device="meta").stride()
        return _parts(x, dim, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # a view of the first one would have no way back to the others
            dim, size = ctx.how
            return (torch.stack if size is None else torch.cat)(grads, dim), None, None
        first = grads[0]
        if not traced(*grads) and distance(grads):
            whole = first.as_strided(ctx.shape, ctx.strides)
            if all(_same(a, b) for a, b in zip(_parts(whole, *ctx.how), grads, strict=True)):
                return whole, None, None
        whole = first.new_empty_strided(ctx.shape, ctx.strides)
        for part, grad in zip(_parts(whole, *ctx.how), grads, strict=True):
            part.copy_(grad)
        return whole, None, None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


def distance(tensors: Sequence[Tensor]) -> int:
    """By how many elements each lies behind the one before, where they are alike and fill a piece of one
    memory without gaps; else 0."""
    first = tensors[0]
    shape, strides, start = first.shape, first.stride(), first.storage_offset()
    step = tensors[-1].storage_offset() - start
    if len(tensors) < 2 or step <= 0 or step % (len(tensors) - 1) or not first.numel():
        return 0
    step //= len(tensors) - 1
    memory = first.untyped_storage().data_ptr()
    for i, t in enumerate(tensors):
        if (
            t.shape != shape or t.stride() != strides or t.dtype != first.dtype
            or t.storage_offset() != start + i * step or t.untyped_storage().data_ptr() != memory
        ):  # fmt: skip
            return 0
    filled = 1
    for stride, n in sorted([(step, len(tensors)), *zip(strides, shape, strict=True)]):
        if n != 1:
            if stride != filled:
                return 0
            filled *= n
    return step
