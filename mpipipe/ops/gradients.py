"""Where a weight's gradient goes: straight into `.grad` where that is as good as handing it to autograd.

    backward of an op  -- adds into leaf.grad, returns None -->  AccumulateGrad has nothing left to add
                       -- returns a dense gradient          -->  AccumulateGrad adds it, or makes .grad of it
    later, without autograd                                 -->  `add_to` does as AccumulateGrad

The first way needs no dense gradient. The sum in `.grad` is the same up to the order of its terms, also where
a tied weight has other uses that take the second way. It is closed wherever somebody could notice: a weight
that is no leaf, `.grad` not there, of another dtype or strided, hooks that want to see the gradient,
`create_graph=True`, `torch.autograd.grad`, `backward(inputs=...)` without the weight.

Two threads that run backward through one leaf at the same time must lock it themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpipipe.ops.library import traced


def has_data(gradient: Tensor) -> bool:
    """Whether a backward runs on it now, rather than being traced into a graph."""
    return type(gradient) is Tensor and not traced(gradient)


def wanted(ctx: Any, position: int) -> bool:
    """Whether this backward needs the gradient of the op's tensor argument `position` (counting tensors)."""
    node = ctx.next_functions[position][0]
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True


def leaf_of(ctx: Any, position: int) -> Any:
    """The leaf that is argument `position`, if nobody could notice that the running backward keeps its
    gradient to itself; or None."""
    node = ctx.next_functions[position][0]
    leaf = getattr(node, "variable", None)
    if leaf is None or torch.is_grad_enabled():
        return None
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return None
    try:
        return leaf if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:
        return None


def add_to(leaf: Tensor, gradient: Tensor) -> None:
    """As torch accumulates a gradient in a leaf: in its dtype, with its strides. Under torch.no_grad()."""
    if leaf.grad is None:
        alike = gradient.stride() == leaf.stride()
        leaf.grad = gradient.to(leaf.dtype) if alike else torch.empty_like(leaf).copy_(gradient)
        return
    if torch.promote_types(gradient.dtype, leaf.dtype) != leaf.dtype:
        gradient = gradient.to(leaf.dtype)  # as torch does first; `add_` alone would round the sum, once
    leaf.grad.add_(gradient)


def destination(ctx: Any, position: int) -> Tensor | None:
    """The contiguous `.grad` to which the running backward may add the gradient of argument `position`; or
    None: then it returns the gradient.

    Whoever writes to it by address calls `torch.autograd.graph.increment_version`."""
    leaf = leaf_of(ctx, position)
    grad: Tensor | None = None if leaf is None else leaf.grad
    if grad is None or grad.layout != torch.strided or not grad.is_contiguous() or grad.dtype != leaf.dtype:
        return None
    return grad
