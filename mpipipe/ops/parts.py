"""Equal parts of a tensor, such as q, k and v of one product.

backward of torch    gradients of the parts -> copied into one tensor
here                 where they lie in one as the parts did, which is what `flash_attention` makes of
                     parts that it reads, they are that tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpipipe.ops.library import Function, traced, wants_gradient

Tensor = torch.Tensor


def parts(x: Tensor, dim: int, size: int | None = None) -> tuple[Tensor, ...]:
    """Views of x along a dimension: of `size` each, which divides it, as torch.split gives them; None:
    without that dimension, as torch.unbind does. The same bits, forward and backward."""
    if traced(x) or not wants_gradient(x):
        return _parts(x, dim, size)
    result: tuple[Tensor, ...] = _Parts.apply(x, dim, size)
    return result


def _parts(x: Tensor, dim: int, size: int | None) -> tuple[Tensor, ...]:
    return x.unbind(dim) if size is None else x.split(size, dim)


class _Parts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int | None) -> tuple[Tensor, ...]:
        ctx.dim, ctx.size = dim % x.dim(), size
        return _parts(x, dim, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        step = distance(grads)
        shape, strides = list(grads[0].shape), list(grads[0].stride())
        if ctx.size is None:
            shape.insert(ctx.dim, len(grads))
            strides.insert(ctx.dim, step)
        elif step == ctx.size * strides[ctx.dim]:
            shape[ctx.dim] *= len(grads)
        else:
            step = 0
        if not step:
            return (torch.stack if ctx.size is None else torch.cat)(grads, ctx.dim), None, None
        return grads[0].as_strided(shape, strides), None, None


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
