"""y = x W^T + b, whose backward adds W's gradient straight into `weight.grad`.

    backward of torch    gradient of this micro-batch -> memory -> added to the sum
    here                 one product that starts from the sum (addmm with beta = 1)

The sum has other bits than torch's, by rounding: the product is not rounded before it is added.

Under autocast the product takes a copy of W in its dtype. Who knows when W changes lets all products share
one (`share_casts`); without that each makes its own, and keeps it for its backward: a copy of an operator's
own could be stale, as a compiled update writes W and no version of torch's counts it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from mpipipe.ops.accumulate import accumulate
from mpipipe.ops.deferred import Later
from mpipipe.ops.gemm import add_gemm, gemm
from mpipipe.ops.gradients import add_to, destination, has_data, wanted
from mpipipe.ops.library import Function

Tensor = torch.Tensor
_CASTS = "_mpipipe_casts"  # attribute of a leaf


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False, own: bool = False
) -> Tensor:
    """x (..., I), weight (O, I), or (I, O) if `transposed`, bias (O,) -> (..., O); under autocast in its
    dtype. own: the products are made by the kernel `gemm` where it serves them, with other bits.

    Where the weight has a gradient already, backward adds to that in place (mpipipe.ops.gradients); else the
    gradient is returned as torch does it. Raises what torch raises for shapes that do not fit.
    """
    device = "cpu" if x.is_meta else x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        casts = getattr(weight, _CASTS, None) if torch.is_grad_enabled() else None
        bias = None if bias is None else bias.to(dtype)
        return _Linear.apply(x, weight, bias, transposed, dtype, casts, own)
    return _Linear.apply(x, weight, bias, transposed, x.dtype, None, own)


def serves_linear(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_later` and its twins serve these: torch copies an x with gaps first, and conjugates
    complex numbers."""
    return x.is_contiguous() and weight.dim() == 2 and not weight.is_complex()


def linear_later(
    grad: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None = None, transposed: bool = False,
    own: bool = False,
) -> None:  # fmt: skip
    """Adds to the gradients of weight and bias what a backward of `linear` towards x alone leaves out.

    grad (..., O), x (..., I), in the dtype of the product, None where the weight has no gradient; the rest as
    there. Under torch.no_grad().
    """
    rows = _rows(grad)
    if x is not None:
        a, b = (_rows(x).t(), rows) if transposed else (rows.t(), _rows(x))
        if weight.grad is not None and weight.grad.is_contiguous():
            _add(weight.grad, a, b, own)
        else:
            add_to(weight, _product(a, b, own))
    _later_bias(rows, bias)  # (O,): `linear` has no other


def torch_linear_later(grad: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None = None) -> None:
    """As `linear_later`, of torch's linear, with its bits: the product is made before it is added."""
    rows = _rows(grad)
    if x is not None:
        add_to(weight, torch.mm(rows.t(), _rows(x)))
    _later_bias(grad, bias)  # as it lies, or additions had another order


LINEAR_LATER = Later(serves_linear, linear_later)
TORCH_LINEAR_LATER = Later(serves_linear, torch_linear_later)


def _later_bias(grad: Tensor, bias: Tensor | None) -> None:
    if bias is not None and bias.requires_grad:
        summed = grad.sum_to_size(bias.shape)  # it may be repeated, along any dimension
        add_to(bias, summed.clone() if summed is grad else summed)  # that one is only lent


class Casts:
    """Copies of a weight since it changed last, one for each dtype of products."""

    def __init__(self) -> None:
        self._made: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight itself where it has that dtype."""
        if dtype == weight.dtype:
            return weight
        if dtype not in self._made:
            self._made[dtype] = weight.to(dtype)
        return self._made[dtype]

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._made.values())

    def forget(self) -> None:
        """Before the weight changes."""
        self._made.clear()


def share_casts(weight: Tensor) -> Casts:
    """From now on all products of a leaf with gradients share its copies. Whoever asks for that calls
    `Casts.forget` before each change of the weight, by whatever it is written."""
    casts = Casts()
    setattr(weight, _CASTS, casts)
    return casts


def casts_of(weight: Tensor) -> list[Tensor]:
    """The copies that are shared and there now."""
    casts: Casts | None = getattr(weight, _CASTS, None)
    return [] if casts is None else casts.tensors


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, dtype: torch.dtype,
        casts: Casts | None, own: bool,
    ) -> Tensor:  # fmt: skip
        ctx.x_dtype, ctx.transposed, ctx.own = x.dtype, transposed, own
        x, used = x.to(dtype), weight.to(dtype) if casts is None else casts.of(weight, dtype)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, used)
        if own:
            y = gemm(_rows(x), used if transposed else used.t(), bias)
            return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
        return functional.linear(x, used.t() if transposed else used, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, used = ctx.saved_tensors
        to_x, to_weight, to_bias = (ctx.needs_input_grad[i] and wanted(ctx, i) for i in range(3))
        rows = _rows(grad)
        of_x = of_weight = None
        if to_x:
            of_x = _product(rows, used.t() if ctx.transposed else used, ctx.own).to(ctx.x_dtype)
            of_x = of_x.view(*grad.shape[:-1], of_x.shape[-1])
        if to_weight:
            x = _rows(x)
            of_weight = _added(ctx, *((x.t(), rows) if ctx.transposed else (rows.t(), x)))
        return of_x, of_weight, rows.sum(0) if to_bias else None, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """(..., I) as (rows, I)."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _added(ctx: Any, a: Tensor, b: Tensor) -> Tensor | None:
    """Adds the weight's gradient a b to the one that is there; returns it where there is none."""
    sum = destination(ctx, 1)
    if sum is None:
        return _product(a, b, ctx.own).to(ctx.weight_dtype)
    _add(sum, a, b, ctx.own)
    return None


def _product(a: Tensor, b: Tensor, own: bool) -> Tensor:
    return (gemm if own else torch.mm)(a, b)


def _add(sum: Tensor, a: Tensor, b: Tensor, own: bool) -> None:
    """sum += a b, in place."""
    if sum.dtype == a.dtype:
        add_gemm(sum, a, b) if own else sum.addmm_(a, b)
    elif sum.dtype == torch.float32 and a.dtype == torch.bfloat16 and has_data(sum):
        accumulate(sum, torch.mm(a, b))
    else:
        sum.add_(torch.mm(a, b))
