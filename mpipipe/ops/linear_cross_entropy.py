"""Linear layer and cross entropy in one: the head of a language model without its logits.

Computed by mpipipe/ops/cross_entropy.py; here are the arguments and the way of the gradients. That of the
weight is added to `.grad` tile by tile where it exists (mpipipe/ops/gradients.py says when), so that no other
tensor of the weight's size is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpipipe.ops.cross_entropy import KERNELS, backward, check_labels, forward, forward_and_backward
from mpipipe.ops.gradients import destination, has_data, wanted
from mpipipe.ops.library import Function, define, differentiate, once_differentiable, traced, wants_gradient
from mpipipe.ops.native import device_type
from mpipipe.ops.pointers import check


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    late: bool = False,
    scale: Tensor | None = None,
    own: bool = False,
) -> Tensor:
    """Sum over the tokens of cross_entropy(x @ weight.T + bias, labels), times `scale` if it is given: a
    scalar in float32 or float64.

    x (N, d), weight (V, d), bias (V,) floating point of one dtype; labels (N,) int64, each in [0, V) or
    ignore_index. Under autocast the products are made in its dtype. label_smoothing as
    torch.nn.functional.cross_entropy has it. late: for who reads the loss after backward only; where a
    gradient is wanted, it may be NaN until backward puts its value there, with nearly a product less. scale:
    (), such as one over the number of labels; it gets no gradient. own: the products are made by the kernel
    `gemm` where it serves them, with other bits; those of a graph are torch's. Raises ValueError for other
    shapes, dtypes and devices and for a label out of range."""
    given, device = (x, weight, labels, bias), device_type(x)
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))  # of weight only tiles are converted
        _check(*given, label_smoothing, weight.dtype)
    else:
        _check(*given, label_smoothing, x.dtype)
    _check_scale(scale)
    if (device, x.dtype) not in KERNELS or (device, weight.dtype) not in KERNELS:
        return _scaled(_by_torch(*given, ignore_index, label_smoothing), scale)
    if traced(x, weight, labels, bias):
        op = torch.ops.mpipipe.linear_cross_entropy
        return _scaled(op(*given, ignore_index, label_smoothing, late)[0], scale)
    if not wants_gradient(x, weight, bias):
        return _scaled(forward(*given, ignore_index, label_smoothing, keep=False, own=own)[0], scale)
    return _LinearCrossEntropy.apply(*given, ignore_index, label_smoothing, late, scale, own)


def _scaled(total: Tensor, scale: Tensor | None) -> Tensor:
    return total if scale is None else total * scale.to(total.dtype)


def _check(
    x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, label_smoothing: float, dtype: torch.dtype
) -> None:
    """dtype: that of weight and bias."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or weight.dtype != dtype:
        raise ValueError(
            f"linear_cross_entropy of x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} "
            f"{weight.dtype}: they must be (N, d) and (V, d) of one dtype; flatten the tokens first"
        )
    if not x.is_floating_point() or x.device != weight.device or x.device != labels.device:
        raise ValueError(
            f"linear_cross_entropy of {x.dtype} on {x.device}, weight on {weight.device}, labels on "
            f"{labels.device}: x must be floating point and all on one device"
        )
    if labels.dtype != torch.int64 or labels.shape != x.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: labels are {tuple(labels.shape)} {labels.dtype}, x {tuple(x.shape)}: "
            f"they must be ({x.shape[0]},) torch.int64, one for each row of x"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != dtype):
        raise ValueError(
            f"linear_cross_entropy: bias is {tuple(bias.shape)} {bias.dtype}, weight {tuple(weight.shape)} "
            f"{weight.dtype}: bias must be ({weight.shape[0]},) of the same dtype"
        )
    if bias is not None and bias.device != x.device:
        raise ValueError(
            f"linear_cross_entropy: bias is on {bias.device}, x on {x.device}: all must be on one device; "
            "move one of them"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"linear_cross_entropy: label_smoothing={label_smoothing} must be between 0 and 1")


def _check_scale(scale: Tensor | None) -> None:
    if scale is not None and not isinstance(scale, Tensor):
        raise ValueError(f"linear_cross_entropy: scale is {scale!r}: give torch.tensor({scale!r})")
    if scale is not None and (scale.shape or not scale.is_floating_point() or scale.requires_grad):
        raise ValueError(
            f"linear_cross_entropy: scale is {tuple(scale.shape)} {scale.dtype}, requires_grad="
            f"{scale.requires_grad}: it must be one floating-point number, (), that needs no gradient"
        )


def _by_torch(
    x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The same by torch alone, with all logits at once: float64, float16, other devices, no kernels."""
    if not traced(labels):
        check_labels(labels, weight.shape[0], ignore_index)
    logits = functional.linear(x, weight, bias)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(
        wide, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )


# -- autograd ----------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    *tensors, ctx.ignore_index, ctx.smoothing, ctx.late = inputs
    ctx.first, ctx.loss, ctx.scale, ctx.own = True, None, None, False
    ctx.save_for_backward(*tensors, *(() if ctx.late else output[1:]))


@once_differentiable
def _gradients(ctx: Any, grad: Tensor, into: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, labels, bias, *of_forward = ctx.saved_tensors
    given, settings = (grad, x, weight, labels, bias), (ctx.ignore_index, ctx.smoothing)
    want = (wanted(ctx, 0), wanted(ctx, 1), bias is not None and wanted(ctx, 3))
    if ctx.late:
        loss, dx, dw, db = forward_and_backward(*given, *settings, want, into, ctx.own)
        if ctx.loss is not None:
            ctx.loss.copy_(_scaled(loss, ctx.scale))
    else:
        log_sum, kept = (*of_forward, None)[:2]
        # a second backward through this graph finds the tile used up; `.data`: writing counts as no change
        tile, ctx.first = kept.data if ctx.first and kept is not None else None, False
        dx, dw, db = backward(*given, log_sum, tile, *settings, want, into, ctx.own)
    return dx, dw if into is None else None, None, db, None, None, None


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    grad = _scaled(grad, ctx.scale)
    if has_data(grad):
        return _gradients(ctx, grad, destination(ctx, 1))
    want = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    op = torch.ops.mpipipe.linear_cross_entropy_backward
    grads = op(grad, *(*ctx.saved_tensors, None)[:5], ctx.ignore_index, ctx.smoothing, want)
    dx, dw, db = (g if w else None for g, w in zip(grads, want, strict=True))
    return dx, dw, None, db, None, None, None


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, late, scale, own = inputs[0], *inputs[6:]
        if late:
            check_labels(inputs[2], inputs[1].shape[0], inputs[4])
            output: tuple[Any, ...] = (x.new_full((), torch.nan, dtype=torch.float32),)
        else:
            output = forward(*(*inputs[:6], True, own))
        _setup(ctx, inputs[:7], output)
        loss: Tensor = output[0] if late else _scaled(output[0], scale)
        ctx.loss = loss.detach() if late else None  # not the result itself, which has this graph
        ctx.scale, ctx.own = scale, own
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, grad), None, None


def _check_served(x: Tensor, weight: Tensor) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if (t.device.type, t.dtype) not in KERNELS:
            raise ValueError(
                f"linear_cross_entropy: {name} is {t.dtype} on {t.device}; the compiled kernels take float32 "
                "and bfloat16 of the CPU or of a GPU"
            )


def _check_backward(
    grad: Tensor, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, log_sum: Tensor | None,
    label_smoothing: float,
) -> None:  # fmt: skip
    _check(x, weight, labels, bias, label_smoothing, weight.dtype)
    check("grad", grad, (), x, any_dtype=True)
    if log_sum is not None:
        check("log_sum", log_sum, x.shape[:1], x.new_empty(0, dtype=torch.float32))


def _without_tile(*inputs: Any) -> tuple[Tensor | None, ...]:
    """Loss and log-sum-exp; a graph's results are values, neither a buffer that backward uses up nor late."""
    x, weight, labels, bias, _, smoothing, *_ = inputs
    _check(x, weight, labels, bias, smoothing, weight.dtype)  # who calls the operator by its name has not
    _check_served(x, weight)
    return forward(*(*inputs[:6], True))[:2]


def _fake(
    x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, smoothing: float,
    late: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(x, weight, labels, bias, smoothing, weight.dtype)
    wide = torch.float32
    return x.new_empty((), dtype=wide), x.new_empty(x.shape[0], dtype=wide)


def _dense(
    grad: Tensor, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, log_sum: Tensor | None,
    ignore_index: int, smoothing: float, want: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of a graph: gradients of x, weight and bias, empty ones where not wanted. log_sum: none where late."""
    _check_backward(grad, x, weight, labels, bias, log_sum, smoothing)
    _check_served(x, weight)
    given, settings = (grad, x, weight, labels, bias), (ignore_index, smoothing)
    wanted_ = want[0], want[1], want[2]
    if log_sum is None:
        grads = forward_and_backward(*given, *settings, wanted_, None)[1:]
    else:
        grads = backward(*given, log_sum.contiguous(), None, *settings, wanted_, None)
    return tuple(x.new_empty(0) if g is None else g for g in grads)


def _fake_dense(
    grad: Tensor, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, log_sum: Tensor | None,
    ignore_index: int, smoothing: float, want: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_backward(grad, x, weight, labels, bias, log_sum, smoothing)
    like = (x, weight, bias)
    grads = (
        (None if t is None else t.new_empty(t.shape)) if w else None for t, w in zip(like, want, strict=True)
    )
    return tuple(x.new_empty(0) if g is None else g for g in grads)


define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor labels, Tensor? bias, int ignore_index, "
    "float label_smoothing, bool late=False) -> (Tensor, Tensor)",
    _without_tile,
    _fake,
)
define(
    "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor labels, Tensor? bias, "
    "Tensor? log_sum, int ignore_index, float label_smoothing, bool[3] want) -> (Tensor, Tensor, Tensor)",
    _dense,
    _fake_dense,
)
differentiate("linear_cross_entropy", _backward, _setup)
