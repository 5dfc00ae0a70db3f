"""GELU (Hendrycks, Gimpel 2016) with the bias of the linear layer before it, in one pass.

    linear without its bias --> x --> gelu(x + bias) --> y

Kept for backward are x and bias, as they are; x + bias and GELU are computed again. float32 and bfloat16
go to the compiled `bias_gelu` of their device, which computes in float32 and gives the same bits for any
number of threads; all else is computed by torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mpipipe.ops.library import Function, define, differentiate, once_differentiable, traced, wants_gradient
from mpipipe.ops.native import by_device, device_type
from mpipipe.ops.pointers import address, check, contiguous, pointer, row_sizes

Tensor = torch.Tensor

# device, dtypes of x and bias -> forward and backward
_KERNELS = by_device(
    {
        (torch.float32, torch.float32): ("bias_gelu_f32", "bias_gelu_backward_f32"),
        (torch.bfloat16, torch.bfloat16): ("bias_gelu_bf16", "bias_gelu_backward_bf16"),
        (torch.bfloat16, torch.float32): ("bias_gelu_bf16_f32", "bias_gelu_backward_bf16_f32"),
    }
)


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """gelu(x + bias); with `approximate="tanh"` by the hyperbolic tangent.

    x: (..., d), floating point; bias: (d,), of any dtype, whose gradient has it too. Returns x's shape and
    dtype. Raises ValueError for other shapes or devices, integers, or another name of an approximation.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"bias_gelu: approximate={approximate!r}; it must be 'none' or 'tanh'")
    if (device_type(x), (x.dtype, x.dtype if bias is None else bias.dtype)) not in _KERNELS:
        return _by_torch(x, bias, approximate)
    if traced(x):
        return torch.ops.mpipipe.bias_gelu(x, bias, approximate == "tanh")
    if wants_gradient(x, bias):
        return _BiasGelu.apply(x, bias, approximate == "tanh")
    return _operator(x, bias, approximate == "tanh")


def _by_torch(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """The meaning of the kernels, and the way of all that they do not serve."""
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"gelu of {x.dtype} with shape {tuple(x.shape)}: x must be (..., d), floating point")
    if bias is None:
        return F.gelu(x, approximate=approximate)
    check("bias", bias, x.shape[-1:], x, any_dtype=True)
    return F.gelu(x + bias.to(x.dtype), approximate=approximate)


class _BiasGelu(Function):
    """The kernels in eager code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        x, bias = x.contiguous(), contiguous(bias)
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return _forward(x, bias, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        return *_backward(dy.contiguous(), x, bias, ctx.tanh, ctx.needs_input_grad[1]), None


def _bias_like(x: Tensor, bias: Tensor | None) -> Tensor:
    """What bias is compared with, of its own dtype; raises ValueError for one on another device than x."""
    if bias is not None and bias.device != x.device:
        check("bias", bias, bias.shape, x, any_dtype=True)
    return x if bias is None or bias.dtype is x.dtype else bias


def _sizes(x: Tensor) -> tuple[int, ...]:
    """Rows, d and who computes; raises ValueError for a single number."""
    if x.dim() == 0:
        raise ValueError("gelu of shape (): x must be (..., d)")
    return row_sizes(x)


def _forward(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """Raises ValueError for tensors that are not contiguous, or that do not fit each other."""
    sizes, like = _sizes(x), _bias_like(x, bias)
    y = torch.empty_like(x)
    given = pointer("x", x, x.shape, x), pointer("bias", bias, x.shape[-1:], like)
    _KERNELS[device_type(x), (x.dtype, like.dtype)][0](*given, tanh, y.data_ptr(), *sizes)
    return y


def _backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, wants_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and bias; ValueError as `_forward`."""
    sizes, like = _sizes(x), _bias_like(x, bias)
    dx = torch.empty_like(x)
    dbias = like.new_empty(x.shape[-1]) if wants_bias else None
    given = (
        pointer("dy", dy, x.shape, x), pointer("x", x, x.shape, x), pointer("bias", bias, x.shape[-1:], like)
    )  # fmt: skip
    _KERNELS[device_type(x), (x.dtype, like.dtype)][1](*given, tanh, dx.data_ptr(), address(dbias), *sizes)
    return dx, dbias


# -- for torch.export and torch.compile: a result that is not there has no elements ----------------------


def _operator(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return _forward(x.contiguous(), contiguous(bias), tanh)


def _operator_fake(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    if bias is not None:
        check("bias", bias, x.shape[-1:], x, any_dtype=True)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _operator_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, wants_bias: bool
) -> tuple[Tensor, Tensor]:
    dx, dbias = _backward(dy.contiguous(), x.contiguous(), contiguous(bias), tanh, wants_bias)
    return dx, x.new_empty(0) if dbias is None else dbias


def _operator_backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, wants_bias: bool
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, _bias_like(x, bias).new_empty(x.shape[-1]) if wants_bias else x.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor | None, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.tanh = inputs[2]


def _derivative(ctx: Any, dy: Tensor) -> Any:
    wants_bias = ctx.needs_input_grad[1]
    dx, dbias = torch.ops.mpipipe.bias_gelu_backward(dy, *ctx.saved_tensors, ctx.tanh, wants_bias)
    return dx, dbias if wants_bias else None, None


define("bias_gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor", _operator, _operator_fake)
define(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool tanh, bool wants_bias) -> (Tensor, Tensor)",
    _operator_backward,
    _operator_backward_fake,
)
differentiate("bias_gelu", _derivative, _setup)
