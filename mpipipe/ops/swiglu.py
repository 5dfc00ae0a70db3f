"""The gate of SwiGLU (Shazeer 2020), silu(gate) * up, in one pass.

Kept for backward are gate and up, as they are; the sigmoid is computed again. Both may be halves of one
tensor: rows of any stride are taken without a copy. float32 and bfloat16 go to the compiled `swiglu` of their
device, which computes in float32 and gives the same bits for any number of threads; all else is computed by
torch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from mpipipe.ops.library import Function, define, differentiate, once_differentiable, traced, wants_gradient
from mpipipe.ops.native import by_device, device_type
from mpipipe.ops.pointers import check, pointer, row_sizes

Tensor = torch.Tensor

_KERNELS = by_device(
    {
        torch.float32: ("swiglu_f32", "swiglu_backward_f32"),
        torch.bfloat16: ("swiglu_bf16", "swiglu_backward_bf16"),
    }
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up, of tensors of one shape (..., d); contiguous, with the dtype of both.

    Raises ValueError for different shapes or devices, or integers."""
    dtype = gate.dtype
    if (device_type(gate), dtype) not in _KERNELS or up.dtype is not dtype:
        return _by_torch(gate, up)
    if traced(gate):
        return torch.ops.mpipipe.swiglu(gate, up)
    if wants_gradient(gate, up):
        return _SwiGLU.apply(gate, up)
    return _operator(gate, up)


def _by_torch(gate: Tensor, up: Tensor) -> Tensor:
    """The meaning of the kernels, and the way of all that they do not serve."""
    if not gate.is_floating_point() or gate.dim() == 0:
        raise ValueError(
            f"swiglu of {gate.dtype} with shape {tuple(gate.shape)}: gate must be (..., d), floating point"
        )
    check("up", up, gate.shape, gate, any_dtype=True)
    return F.silu(gate) * up


class _SwiGLU(Function):
    """The kernels in eager code."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = _with_rows(gate), _with_rows(up)
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(dy.contiguous(), *ctx.saved_tensors)


def _stride(x: Tensor) -> int | None:
    """Elements from a row of x (..., d) to the next one; None where that is not one number."""
    if x.is_contiguous():
        return x.shape[-1] if x.dim() else None
    *dims, (width, step) = zip(x.shape, x.stride(), strict=True)
    dims = [(n, stride) for n, stride in dims if n > 1]  # the stride of one element means nothing
    if (step != 1 and width > 1) or any(s != t * n for (_, s), (n, t) in pairwise(dims)):
        return None
    return dims[-1][1] if dims else width


def _with_rows(x: Tensor) -> Tensor:
    """x, or a copy of it, with a stride of rows."""
    return x if _stride(x) is not None else x.contiguous()


def _row_pointer(name: str, x: Tensor, like: Tensor) -> tuple[int, int]:
    """Address and row stride, after `check`; raises ValueError where there is no row stride."""
    check(name, x, like.shape, like)
    if not x.dim():
        raise ValueError(f"swiglu: {name} has shape (); it must be (..., d)")
    stride = _stride(x)
    if stride is None:
        raise ValueError(
            f"{name} has strides {x.stride()} for shape {tuple(x.shape)}: it must be rows (..., d) at one "
            "distance; call contiguous() first"
        )
    return x.data_ptr(), stride


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    """Raises ValueError for tensors without a stride of rows, or that do not fit each other."""
    given = *_row_pointer("gate", gate, gate), *_row_pointer("up", up, gate)
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _KERNELS[device_type(gate), gate.dtype][0](*given, y.data_ptr(), *row_sizes(gate))
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, contiguous; ValueError as `_forward`."""
    given = *_row_pointer("gate", gate, gate), *_row_pointer("up", up, gate)
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = torch.empty_like(dgate)
    from_dy = pointer("dy", dy, gate.shape, gate)
    _KERNELS[device_type(gate), gate.dtype][1](
        from_dy, *given, dgate.data_ptr(), dup.data_ptr(), *row_sizes(gate)
    )
    return dgate, dup


# -- for torch.export and torch.compile ------------------------------------------------------------------


def _operator(gate: Tensor, up: Tensor) -> Tensor:
    return _forward(_with_rows(gate), _with_rows(up))


def _operator_fake(gate: Tensor, up: Tensor) -> Tensor:
    check("up", up, gate.shape, gate)
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _operator_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(dy.contiguous(), _with_rows(gate), _with_rows(up))


def _operator_backward_fake(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return dgate, torch.empty_like(dgate)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _derivative(ctx: Any, dy: Tensor) -> Any:
    return torch.ops.mpipipe.swiglu_backward(dy, *ctx.saved_tensors)


define("swiglu(Tensor gate, Tensor up) -> Tensor", _operator, _operator_fake)
define(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    _operator_backward,
    _operator_backward_fake,
)
differentiate("swiglu", _derivative, _setup)
