"""BatchNorm in training (Ioffe, Szegedy 2015), with the addition and the ReLU that follow it in one pass.

    x --> norm --(+)--> t --> ReLU --> y
                  |
              residual

Invariants
  1. No side effect: the statistics of the batch are results, and who owns the running ones applies them.
  2. With `residual` and `relu` the bits are those of the norm, then torch's addition and ReLU, in both
     directions: a cut may fall between them. What is kept for backward is x, two numbers a channel, and with
     a residual y, which what follows keeps anyway.
  3. The bits do not depend on the number of threads; on a GPU the same call gives the same ones.
  4. float32 and bfloat16 with float32 weights go to the compiled `batch_norm`, which sums in float64. All
     else is computed by torch: other dtypes, devices and strides, a package without kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from mpipipe.ops.library import Function, define, differentiate, once_differentiable, traced, wants_gradient
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.pointers import address, check, contiguous, pointer, refuse_dtypes

Tensor = torch.Tensor

_KERNELS = by_device(
    {
        torch.float32: ("batch_norm_f32", "batch_norm_backward_f32"),
        torch.bfloat16: ("batch_norm_bf16", "batch_norm_backward_bf16"),
    }
)


def batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    relu: bool = False,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean (C,), unbiased variance (C,)) of a batch x (B, C, ...), floating point.

    y is the normalised x * weight + bias, plus `residual`, of the shape of x; below 0 set to 0 with `relu`.
    weight and bias: (C,). The statistics have no gradient. Raises ValueError for other shapes, one value a
    channel, dtypes that torch does not mix, or tensors on several devices."""
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"batch_norm of {x.dtype} {tuple(x.shape)}: x must be (B, C, ...), floating point")
    if x.numel() == x.shape[1]:  # F.batch_norm refuses it, too
        raise ValueError(
            f"batch_norm of {tuple(x.shape)}: one value a channel has no variance; take more rows"
        )
    if not _served(x, weight, bias, residual):
        return _by_torch(x, weight, bias, eps, relu, residual)
    if traced(x):
        y, mean, variance, _ = torch.ops.mpipipe.batch_norm(x, residual, weight, bias, eps, relu)
    elif wants_gradient(x, residual, weight, bias):
        y, mean, variance = _BatchNorm.apply(x, residual, weight, bias, eps, relu)
    else:
        y, mean, variance, _ = _forward(x, residual, weight, bias, eps, relu)
    return y, mean, variance


def batch_norm_with_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised x, mean (C,), unbiased variance (C,)) of one micro-batch by torch; no side effect.

    Momentum 1 makes torch write the plain statistics into the scratch buffers.
    """
    channels, wide = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    dtype = wide if weight is None else weight.dtype
    mean, var = (torch.zeros(channels, dtype=dtype, device=x.device) for _ in range(2))
    y = torch.batch_norm(x, weight, bias, mean, var, True, 1.0, eps, False)
    return y, mean, var


def _served(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> bool:
    if (device_type(x), x.dtype) not in _KERNELS or not x.is_contiguous():
        return False
    if residual is not None and (residual.dtype is not x.dtype or not residual.is_contiguous()):
        return False
    return (weight is None or weight.dtype is torch.float32) and (bias is None or bias.dtype is torch.float32)


def _by_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, relu: bool, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The meaning of the kernels, and the way of all that they do not serve."""
    _check(x, weight, bias, residual)
    try:
        y, mean, variance = batch_norm_with_statistics(x, weight, bias, eps)
    except RuntimeError as error:
        refuse_dtypes("batch_norm", x, error, weight=weight, bias=bias)
        raise
    y = y if residual is None else y + residual
    return torch.relu(y) if relu else y, mean, variance


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    channels = x.shape[1:2]
    for name, t, shape in (
        ("residual", residual, x.shape),
        ("weight", weight, channels),
        ("bias", bias, channels),
    ):
        if t is not None:
            check(name, t, shape, x, any_dtype=True)


class _BatchNorm(Function):
    """The kernels in eager code: (y, mean, variance)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        y, mean, variance, rstd = _forward(*inputs)
        _save(ctx, inputs, y, mean, rstd)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)  # no zeros for the statistics
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        if dy is None:
            return (None,) * 6
        given = dy.contiguous(), *ctx.saved_tensors, ctx.relu, _keeps(ctx)
        return _gradients(ctx, dy, _backward(*given))


def _sizes(x: Tensor) -> tuple[int, ...]:
    """Batch, channels, places of a channel in a sample, and who computes."""
    batch, channels, *_ = x.shape
    return batch, channels, x.numel() // (batch * channels) if batch and channels else 0, *workers(x)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, mean, variance, and 1 / deviation of each channel, in float32.

    Raises ValueError for tensors that are not contiguous, or that do not fit each other."""
    shape = x.shape
    _, channels, *_ = sizes = _sizes(x)
    y, mean = torch.empty_like(x), x.new_empty(channels, dtype=torch.float32)
    variance, rstd = torch.empty_like(mean), torch.empty_like(mean)  # sooner than by shape and dtype
    _KERNELS[device_type(x), x.dtype][0](
        pointer("x", x, shape, x), pointer("residual", residual, shape, x),
        pointer("weight", weight, (channels,), mean), pointer("bias", bias, (channels,), mean), eps, relu,
        y.data_ptr(), mean.data_ptr(), variance.data_ptr(), rstd.data_ptr(), *sizes,
    )  # fmt: skip
    return y, mean, variance, rstd


def _backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, relu: bool, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of what the ReLU reads where `keep` asks for it, of weight and of bias; ValueError as
    `_forward`. y: the result, where there was a residual."""
    shape = x.shape
    _, channels, *_ = sizes = _sizes(x)
    of_channels = (channels,)
    dx, passed = torch.empty_like(x), torch.empty_like(x) if keep else None
    dweight, dbias = torch.empty_like(mean), torch.empty_like(mean)
    _KERNELS[device_type(x), x.dtype][1](
        pointer("dy", dy, shape, x), pointer("x", x, shape, x), pointer("y", y, shape, x),
        pointer("weight", weight, of_channels, mean), pointer("bias", bias, of_channels, mean),
        pointer("mean", mean, of_channels, mean), pointer("rstd", rstd, of_channels, mean), relu,
        dx.data_ptr(), address(passed), dweight.data_ptr(), dbias.data_ptr(), *sizes,
    )  # fmt: skip
    return dx, passed, dweight, dbias


# -- autograd, of both doors -----------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, mean, _, rstd = output
    ctx.mark_non_differentiable(*output[1:])
    _save(ctx, inputs, y, mean, rstd)


def _save(ctx: Any, inputs: tuple[Any, ...], y: Tensor, mean: Tensor, rstd: Tensor) -> None:
    x, residual, weight, bias, _, ctx.relu = inputs
    ctx.save_for_backward(x, y if ctx.relu and residual is not None else None, weight, bias, mean, rstd)


def _keeps(ctx: Any) -> bool:
    """Whether the gradient behind the ReLU is wanted: without one it is that of y."""
    return bool(ctx.relu and ctx.needs_input_grad[1])


def _gradients(ctx: Any, dy: Tensor, found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    dx, passed, dweight, dbias = found
    grads = dx, passed if ctx.relu else dy, dweight, dbias
    wanted = ctx.needs_input_grad
    return *(g if w else None for g, w in zip(grads, wanted, strict=False)), None, None


# -- for torch.export and torch.compile: a result that is not there has no elements ----------------------


def _operator(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, ...]:
    return _forward(x.contiguous(), contiguous(residual), weight, bias, eps, relu)


def _operator_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    _check(x, weight, bias, residual)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, *(x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(3))


def _operator_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, relu: bool, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    like = x.new_empty(0, dtype=torch.float32)
    for name, t in (("mean", mean), ("rstd", rstd)):  # with which `_backward` compares the others
        check(name, t, x.shape[1:2], like)
    given = dy.contiguous(), x.contiguous(), contiguous(y), weight, bias, mean, rstd
    dx, passed, dweight, dbias = _backward(*given, relu, keep)
    return dx, x.new_empty(0) if passed is None else passed, dweight, dbias


def _operator_backward_fake(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, relu: bool, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    passed = torch.empty_like(dx) if keep else x.new_empty(0)
    return dx, passed, torch.empty_like(mean), torch.empty_like(mean)


def _derivative(ctx: Any, dy: Tensor, *_: Any) -> Any:
    operator = torch.ops.mpipipe.batch_norm_backward
    return _gradients(ctx, dy, operator(dy, *ctx.saved_tensors, ctx.relu, _keeps(ctx)))


define(
    "batch_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool relu)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _operator,
    _operator_fake,
)
define(
    "batch_norm_backward(Tensor dy, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, Tensor mean,"
    " Tensor rstd, bool relu, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
    _operator_backward,
    _operator_backward_fake,
)
differentiate("batch_norm", _derivative, _setup)
