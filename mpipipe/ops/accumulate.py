"""Gradients in bfloat16 added to a sum in float32, in one pass."""

from __future__ import annotations

import torch

from mpipipe.ops.library import define, traced, written
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.pointers import overlap

Tensor = torch.Tensor
_KERNELS = by_device({torch.bfloat16: ("accumulate_bf16",)})


def accumulate(sum: Tensor, x: Tensor, *, zero: bool = False) -> None:
    """sum += x, and x = 0 where `zero`; the bits of torch's `sum.add_(x)`.

    sum: float32; x: bfloat16 of the same shape, both contiguous and apart. Raises ValueError for
    anything else.
    """
    if traced(sum):
        torch.ops.mpipipe.accumulate(sum, x, zero)
    else:
        _eager(sum, x, zero)


def _eager(sum: Tensor, x: Tensor, zero: bool) -> None:
    _check(sum, x)
    if overlap(sum, x):
        raise ValueError("accumulate: x and the sum share memory; give a copy of one of them")
    found = _KERNELS.get((device_type(sum), x.dtype))
    if found is None:
        sum.add_(x)
        if zero:
            x.zero_()
    else:
        found[0](sum.data_ptr(), x.data_ptr(), x.numel(), zero, *workers(x))
        written(sum, x if zero else None)


def _check(sum: Tensor, x: Tensor) -> None:
    """What can be told of tensors without addresses, too."""
    if sum.dtype != torch.float32 or x.dtype != torch.bfloat16:
        raise ValueError(f"accumulate: {x.dtype} is added to {sum.dtype}; it must be bfloat16 to float32")
    if sum.shape != x.shape or sum.device != x.device:
        raise ValueError(
            f"accumulate: x is {tuple(x.shape)} on {x.device}, the sum {tuple(sum.shape)} on {sum.device}; "
            "they must be alike"
        )
    if not (sum.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"accumulate: strides {x.stride()} and {sum.stride()}; both must be contiguous")


# -- for torch.export and torch.compile ------------------------------------------------------------------


def _operator_fake(sum: Tensor, x: Tensor, zero: bool) -> None:
    _check(sum, x)


define("accumulate(Tensor(a!) sum, Tensor(b!) x, bool zero) -> ()", _eager, _operator_fake)
