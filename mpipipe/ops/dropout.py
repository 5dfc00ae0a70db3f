"""Dropout (Srivastava et al. 2014) whose mask is a slice of the random stream, drawn again in backward.

    forward   y = x  * scale where word >= round(p * 2**32), else 0        scale = 1 / (1 - p)
    backward  dx = dy * scale at the same places, else 0

Invariants
  1. Nothing is kept between forward and backward: the stream's name is the mask.
  2. Element i of the contiguous order takes element i of the stream, whatever the strides of x; the result
     lies in memory as torch's would.
  3. Kernel and torch path give the same bits: float32 and shorter types multiply in float32 (then
     round to nearest, ties to even), float64 in float64. A NaN stays one, of no promised payload.
  4. A dropped element is +0, also where x is not finite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mpipipe.ops.library import Function, define, differentiate, traced, wants_gradient
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.philox import check_stream, threshold, words

_KERNELS = by_device(
    {torch.float32: ("dropout_f32",), torch.float64: ("dropout_f64",), torch.bfloat16: ("dropout_bf16",)}
)


class Stream(NamedTuple):
    key: int
    step: int
    micro: int


def shape_only(x: torch.Tensor) -> bool:
    """Whether x has no data: a fake tensor of planning, or one on the meta device."""
    return isinstance(x, FakeTensor) or x.device.type == "meta"


def dropout(x: torch.Tensor, p: float, key: int, step: int, micro: int) -> torch.Tensor:
    """x with each element zeroed with probability p and the others scaled by 1 / (1 - p).

    x: floating point, any shape; the result has its shape, dtype and order of strides (x itself for
    p = 0). `key` is `stream_key(seed, node name)`, `step` the training step, `micro` the global index
    of the micro-batch. Raises ValueError for a p outside [0, 1], a stream outside its width, or integers.
    """
    check_stream(key, step, micro)
    drop = threshold(p)
    if not x.is_floating_point():
        raise ValueError(f"dropout of {x.dtype}: only floating point values can be scaled; cast x first")
    if p == 0.0 or x.numel() == 0:
        return x
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    result: torch.Tensor
    if traced(x):
        result = torch.ops.mpipipe.dropout(x, drop, scale, _signed(key), step, micro)
    else:
        result = _eager(x, drop, scale, Stream(key, step, micro))
    return result


def _eager(x: torch.Tensor, drop: int, scale: float, stream: Stream) -> torch.Tensor:
    if wants_gradient(x):
        result: torch.Tensor = _Dropout.apply(x, drop, scale, stream)
        return result
    return _masked(x, drop, scale, stream)  # some microseconds sooner


class _Dropout(Function):
    """Linear in x, so its backward is itself; gradients of any order follow."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, drop: int, scale: float, stream: Stream) -> torch.Tensor:
        ctx.how = (drop, scale, stream)
        return _masked(x, drop, scale, stream)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _eager(grads[0], *ctx.how), None, None, None


def _masked(x: torch.Tensor, drop: int, scale: float, stream: Stream) -> torch.Tensor:
    found = _KERNELS.get((device_type(x), x.dtype))
    if found is None:
        return _masked_by_torch(x, drop, scale, stream)
    given = x.contiguous()
    y = torch.empty_like(given, memory_format=torch.contiguous_format)
    found[0](*stream, drop, scale, given.data_ptr(), y.data_ptr(), x.numel(), *workers(x))
    return _as_lies(x, y)


def _as_lies(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y, with the strides of a result of x."""
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)


def _masked_by_torch(x: torch.Tensor, drop: int, scale: float, stream: Stream) -> torch.Tensor:
    """The meaning of the kernels; and the way of any other dtype or device."""
    keep = torch.from_numpy(words(*stream, x.numel()) >= drop).view(x.shape).to(x.device)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    kept = (x.contiguous().to(wide) * torch.tensor(scale, dtype=wide)).to(x.dtype)
    return _as_lies(x, torch.where(keep, kept, torch.zeros((), dtype=x.dtype, device=x.device)))


# -- the registered operator: an int of torch has a sign, so the key's highest bit is one there -----------


def _signed(key: int) -> int:
    return key - (key >> 63 << 64)


def _operator(x: torch.Tensor, drop: int, scale: float, key: int, step: int, micro: int) -> torch.Tensor:
    return _masked(x, drop, scale, Stream(key % (1 << 64), step, micro))


def _fake(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.how = inputs[1:]


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.mpipipe.dropout(dy, *ctx.how), None, None, None, None, None


define("dropout(Tensor x, int drop, float scale, int key, int step, int micro) -> Tensor", _operator, _fake)
differentiate("dropout", _backward, _setup)
