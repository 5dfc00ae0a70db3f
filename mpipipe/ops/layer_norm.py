"""Layer norm (Ba, Kiros, Hinton 2016) and RMS norm (Zhang, Sennrich 2019), with the addition before them.

    x --(+)--> s ------------> the residual stream goes on
         |     '--> norm --> y
    residual

Invariants
  1. With `residual` the bits are those of the addition, then the norm without it, in both directions: a cut
     may fall between them. What is kept for backward is s, and two numbers a row.
  2. The bits do not depend on the number of threads.
  3. float32 and bfloat16 go to the compiled `layer_norm` of their device, which computes in float32, and so
     does a float32 x with a bfloat16 residual: stream and branch under autocast. All else is computed by
     torch: other dtypes and devices, a weight of another dtype than x, a package without kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mpipipe.ops.library import Function, define, differentiate, once_differentiable, traced, wants_gradient
from mpipipe.ops.native import Table, by_device, device_type
from mpipipe.ops.pointers import address, check, contiguous, pointer, refuse_dtypes, row_sizes, rows_of

Tensor = torch.Tensor

_DTYPES = {
    (torch.float32, torch.float32): "f32",
    (torch.bfloat16, torch.bfloat16): "bf16",
    (torch.float32, torch.bfloat16): "f32_bf16",
}
# centred -> device, dtypes of x and residual -> forward and backward
_KERNELS: dict[bool, Table[tuple[torch.dtype, torch.dtype]]] = {
    centred: by_device({key: (f"{name}_{of}", f"{name}_backward_{of}") for key, of in _DTYPES.items()})
    for centred, name in ((True, "layer_norm"), (False, "rms_norm"))
}


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Any:
    """(s - mean) / sqrt(variance + eps) * weight + bias over the last dimension of s.

    x and residual: (..., d), floating point; weight and bias: (d,). s is x, and the result y alone; with
    `residual`, s = x + residual, and the result (y, s). Both have the shape and dtype of s. A gradient has
    the dtype of what it is of.
    Raises ValueError for other shapes, integers, dtypes that torch does not mix, or tensors on several
    devices.
    """
    return _public(True, x, weight, bias, eps, residual)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, residual: Tensor | None = None
) -> Any:
    """s / sqrt(mean(s**2) + eps) * weight over the last dimension of s; all else as `layer_norm`."""
    return _public(False, x, weight, None, eps, residual)


def _public(
    centred: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None
) -> Any:
    dtype = x.dtype
    if (
        (device_type(x), (dtype, dtype if residual is None else residual.dtype)) not in _KERNELS[centred]
        or (weight is not None and weight.dtype is not dtype)
        or (bias is not None and bias.dtype is not dtype)
    ):
        return _by_torch(centred, x, weight, bias, eps, residual)
    if traced(x):
        y, s, _ = torch.ops.mpipipe.norm(x, residual, weight, bias, eps, centred)
    elif wants_gradient(x, residual, weight, bias):
        y, s = _Norm.apply(x, residual, weight, bias, eps, centred)
    else:
        given = x.contiguous(), contiguous(residual), contiguous(weight), contiguous(bias)
        y, s, _ = _forward(*given, eps, centred)
    return y if residual is None else (y, s)


def _by_torch(
    centred: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None
) -> Any:
    """The meaning of the kernels, and the way of all that they do not serve."""
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"norm of {x.dtype} with shape {tuple(x.shape)}: x must be (..., d), floating point")
    for name, t, shape in _shapes(x, residual, weight, bias):
        if t is not None:
            check(name, t, shape, x, any_dtype=True)
    if residual is not None:
        s = x + residual
        return _public(centred, s, weight, bias, eps, None), s
    d = x.shape[-1:]
    try:
        return F.layer_norm(x, d, weight, bias, eps) if centred else F.rms_norm(x, d, weight, eps)
    except RuntimeError as error:
        refuse_dtypes("norm", x, error, weight=weight, bias=bias)
        raise


def _shapes(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> list[tuple[str, Tensor | None, torch.Size]]:
    d = x.shape[-1:]
    return [("residual", residual, x.shape), ("weight", weight, d), ("bias", bias, d)]


def _residual_like(x: Tensor, residual: Tensor | None) -> Tensor:
    """What residual is compared with: itself where its dtype may differ from that of x.
    Raises ValueError for one of another shape or device."""
    if residual is None or residual.dtype is x.dtype:
        return x
    check("residual", residual, x.shape, x, any_dtype=True)
    return residual if (x.dtype, residual.dtype) in _DTYPES else x


class _Norm(Function):
    """The kernels in eager code: (y, s), s None without a residual."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        x = x.contiguous()
        y, s, stats = _forward(x, contiguous(residual), contiguous(weight), contiguous(bias), eps, centred)
        ctx.save_for_backward(x if s is None else s, weight, stats)
        ctx.set_materialize_grads(False)
        ctx.centred, ctx.narrow = centred, residual is not None and residual.dtype is not x.dtype
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> Any:
        _, wants_residual, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        narrow = wants_residual and ctx.narrow
        if dy is None:
            dresidual = ds.bfloat16() if narrow and ds is not None else ds
            return ds, dresidual if wants_residual else None, None, None, None, None
        s, weight, stats = ctx.saved_tensors
        dx, dresidual, dweight, dbias = _backward(
            dy.contiguous(),
            contiguous(ds),
            s,
            contiguous(weight),
            stats,
            ctx.centred,
            wants_weight,
            wants_bias,
            narrow,
        )
        return dx, dresidual if narrow else dx if wants_residual else None, dweight, dbias, None, None


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, s, and the mean (layer norm alone) and 1 / deviation of each row, (2 or 1, rows) in float32.

    Raises ValueError for tensors that are not contiguous, or that do not fit each other."""
    shape = x.shape
    if not shape:
        raise ValueError("norm of shape (): x must be (..., d)")
    rows, d, *_ = sizes = row_sizes(x)
    like = _residual_like(x, residual)
    y = torch.empty_like(x)
    s = None if residual is None else torch.empty_like(x)
    stats = x.new_empty(1 + centred, rows, dtype=torch.float32)
    at = stats.data_ptr()
    inputs = (
        pointer("x", x, shape, x), pointer("residual", residual, shape, like),
        pointer("weight", weight, (d,), x),
    )  # fmt: skip
    kernel = _KERNELS[centred][device_type(x), (x.dtype, like.dtype)][0]
    if centred:
        of_bias, means, rstds = pointer("bias", bias, (d,), x), at, at + 4 * rows
        kernel(*inputs, of_bias, eps, address(s), y.data_ptr(), means, rstds, *sizes)
    else:
        kernel(*inputs, eps, address(s), y.data_ptr(), at, *sizes)
    return y, s, stats


def _backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, stats: Tensor, centred: bool,
    wants_weight: bool, wants_bias: bool, narrow: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x (and a residual of its dtype), of a bfloat16 residual to a float32 x (where `narrow` is
    set), weight and bias; ValueError as `_forward`."""
    shape = s.shape
    rows, d, *_ = sizes = row_sizes(s)
    dx = torch.empty_like(s)
    dresidual = torch.empty_like(s, dtype=torch.bfloat16) if narrow else None
    dweight = s.new_empty(d) if wants_weight else None
    dbias = s.new_empty(d) if wants_bias else None
    at = pointer("stats", stats, (1 + centred, rows), stats)
    inputs = (
        pointer("dy", dy, shape, s), pointer("ds", ds, shape, s), pointer("s", s, shape, s),
        pointer("weight", weight, (d,), s),
    )  # fmt: skip
    kernel = _KERNELS[centred][device_type(s), (s.dtype, torch.bfloat16 if narrow else s.dtype)][1]
    to = dx.data_ptr(), address(dresidual), address(dweight)
    if centred:
        kernel(*inputs, at, at + 4 * rows, *to, address(dbias), *sizes)
    else:
        kernel(*inputs, at, *to, *sizes)
    return dx, dresidual, dweight, dbias


# -- for torch.export and torch.compile: a result that is not there has no elements ----------------------


def _or_empty(like: Tensor, *results: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if t is None else t for t in results)


def _operator(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, ...]:
    given = x.contiguous(), contiguous(residual), contiguous(weight), contiguous(bias)
    return _or_empty(x, *_forward(*given, eps, centred))


def _operator_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, ...]:
    like = _residual_like(x, residual)
    for name, t, shape in _shapes(x, residual, weight, bias):
        if t is not None:
            check(name, t, shape, like if t is residual else x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    stats = x.new_empty((1 + centred, rows_of(x)), dtype=torch.float32)
    return *_or_empty(x, y, None if residual is None else torch.empty_like(y)), stats


def _check_stats(stats: Tensor, s: Tensor, centred: bool) -> None:
    check("stats", stats, (1 + centred, rows_of(s)), s.new_empty(0, dtype=torch.float32))


def _operator_backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, stats: Tensor, centred: bool,
    wants_weight: bool, wants_bias: bool, narrow: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_stats(stats, s, centred)
    given = dy.contiguous(), contiguous(ds), s.contiguous(), contiguous(weight), stats.contiguous()
    return _or_empty(s, *_backward(*given, centred, wants_weight, wants_bias, narrow))


def _operator_backward_fake(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, stats: Tensor, centred: bool,
    wants_weight: bool, wants_bias: bool, narrow: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_stats(stats, s, centred)
    dx = torch.empty_like(s, memory_format=torch.contiguous_format)
    dresidual = torch.empty_like(dx, dtype=torch.bfloat16) if narrow else s.new_empty(0)
    sizes = (s.shape[-1] if wanted else 0 for wanted in (wants_weight, wants_bias))
    return dx, dresidual, *(s.new_empty(size) for size in sizes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _, _, ctx.centred = inputs
    ctx.residual = residual is not None
    ctx.narrow = residual is not None and residual.dtype is not x.dtype
    ctx.save_for_backward(output[1] if ctx.residual else x, weight, output[2])


def _derivative(ctx: Any, dy: Tensor, ds: Tensor | None, _: Any) -> Any:
    s, weight, stats = ctx.saved_tensors
    _, wants_residual, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    narrow = wants_residual and ctx.narrow
    dx, dresidual, dweight, dbias = torch.ops.mpipipe.norm_backward(
        dy, ds if ctx.residual else None, s, weight, stats, ctx.centred, wants_weight, wants_bias, narrow
    )
    return (
        dx, dresidual if narrow else dx if wants_residual else None, dweight if wants_weight else None,
        dbias if wants_bias else None, None, None,
    )  # fmt: skip


define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centred)"
    " -> (Tensor, Tensor, Tensor)",
    _operator,
    _operator_fake,
)
define(
    "norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor stats, bool centred,"
    " bool wants_weight, bool wants_bias, bool narrow) -> (Tensor, Tensor, Tensor, Tensor)",
    _operator_backward,
    _operator_backward_fake,
)
differentiate("norm", _derivative, _setup)
