"""The largest number of each window of an image, of which backward keeps a byte: where in the window it is.

Torch keeps x, of which it reads the shape alone, and eight bytes of each result. The bits are torch's on a
processor, in both directions: of equal numbers the first one counts, of NaN the last one, and gradients of
windows that overlap are added in torch's order. So the kernel serves whatever the bits are to be.

float32 and bfloat16, contiguous, on a processor go to the compiled `max_pool2d`; torch computes all else:
other dtypes, devices and strides, dilation, windows of more than 256 places. What is contiguous and
channels_last at once is torch's, too, whose result then has the strides of the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
import torch.nn.functional as F

from mpipipe.ops.library import Function, define, differentiate, once_differentiable, traced, wants_gradient
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.pointers import address, check, pointer

Tensor = torch.Tensor
Pair = int | list[int] | tuple[int, ...]
Sizes = tuple[int, ...]  # height and width: of x, of y, of the window, of the stride, of the padding

_KERNELS = by_device(
    {
        torch.float32: ("max_pool2d_f32", "max_pool2d_backward_f32"),
        torch.bfloat16: ("max_pool2d_bf16", "max_pool2d_backward_bf16"),
    },
    ("cpu", "meta"),
)
_MOST = 256  # places of a window: one is a byte


def max_pool2d(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """As torch.nn.functional.max_pool2d, which refuses what does not fit: x (B, C, H, W) or (C, H, W) -> the
    same with fewer places."""
    by = kernel_size if stride is None or (isinstance(stride, list | tuple) and not stride) else stride
    sizes = _sizes(x.shape[-2:], kernel_size, by, padding, dilation, ceil_mode) if _served(x) else None
    if sizes is None:
        return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    if traced(x):
        return torch.ops.mpipipe.max_pool2d(x, *map(_pair, (kernel_size, by, padding)), ceil_mode)[0]
    if wants_gradient(x):
        return _MaxPool2d.apply(x, sizes)
    return _forward(x, sizes, False)[0]


def _served(x: Tensor) -> bool:
    """Whatever the window is."""
    if (device_type(x), x.dtype) not in _KERNELS or not x.is_contiguous() or not x.numel():
        return False
    return x.dim() == 3 or (x.dim() == 4 and not x.is_contiguous(memory_format=torch.channels_last))


def _sizes(
    size: Sequence[int], kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil: bool
) -> Sizes | None:
    """None for what torch computes, or refuses."""
    h, w = size
    kh, kw = _pair(kernel_size)
    sh, sw = _pair(stride)
    ph, pw = _pair(padding)
    whole = h > 0 < kh <= h + 2 * ph and w > 0 < kw <= w + 2 * pw and sh > 0 and sw > 0
    inside = 0 <= 2 * ph <= kh and 0 <= 2 * pw <= kw
    if not whole or not inside or kh * kw > _MOST or _pair(dilation) != (1, 1):
        return None
    return h, w, _places(h, kh, sh, ph, ceil), _places(w, kw, sw, pw, ceil), kh, kw, sh, sw, ph, pw


def _pair(given: Pair) -> tuple[int, int]:
    """One number stands for both; more than two, or none, are torch's to refuse, as is one below zero."""
    if not isinstance(given, list | tuple):
        return index(given), index(given)
    return (index(given[0]), index(given[-1])) if len(given) in (1, 2) else (-1, -1)


def _places(size: int, kernel: int, stride: int, padding: int, ceil: bool) -> int:
    """Windows that fit; with `ceil` also one that goes beyond the end, but does not begin there."""
    found = (size + 2 * padding - kernel + (stride - 1 if ceil else 0)) // stride + 1
    return found - (1 if ceil and (found - 1) * stride >= size + padding else 0)


class _MaxPool2d(Function):
    """The kernels in eager code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes) -> Tensor:
        y, which = _forward(x, sizes, True)
        ctx.save_for_backward(which)
        ctx.sizes = sizes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (which,) = ctx.saved_tensors
        return _backward(dy.contiguous(), which, ctx.sizes), None


def _forward(x: Tensor, sizes: Sizes, keep: bool) -> tuple[Tensor, Tensor | None]:
    """y, and where `keep` asks for it the place of each in its window (uint8)."""
    y = x.new_empty(*x.shape[:-2], *sizes[2:4])
    which = torch.empty_like(y, dtype=torch.uint8) if keep else None
    _KERNELS[device_type(x), x.dtype][0](
        pointer("x", x, x.shape, x), y.data_ptr(), address(which), _planes(x), sizes, *workers(x)
    )
    return y, which


def _backward(dy: Tensor, which: Tensor, sizes: Sizes) -> Tensor:
    """The gradient of x; ValueError where the two are not contiguous, or of unlike shapes."""
    dx = dy.new_empty(*dy.shape[:-2], *sizes[:2])
    _KERNELS[device_type(dy), dy.dtype][1](
        pointer("dy", dy, dy.shape, dy), pointer("which", which, dy.shape, which), dx.data_ptr(), _planes(dy),
        sizes, *workers(dy),
    )  # fmt: skip
    return dx


def _planes(x: Tensor) -> int:
    return x.shape[:-2].numel()


# -- for torch.export and torch.compile ------------------------------------------------------------------


def _sizes_of(shape: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, ceil: bool) -> Sizes:
    """Raises ValueError where no kernel may be given them."""
    sizes = _sizes(shape[-2:], kernel, stride, padding, 1, ceil) if len(shape) in (3, 4) else None
    if sizes is None:
        raise ValueError(
            f"max_pool2d of {tuple(shape)} by {kernel}, stride {stride}, padding {padding}: the kernel "
            f"takes (B, C, H, W) or (C, H, W), and windows of at most {_MOST} places that fit"
        )
    return sizes


def _operator(x: Tensor, *window: Any) -> tuple[Tensor, Tensor | None]:
    return _forward(x.contiguous(), _sizes_of(x.shape, *window), True)


def _operator_fake(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    y = x.new_empty(*x.shape[:-2], *_sizes_of(x.shape, *window)[2:4])
    return y, torch.empty_like(y, dtype=torch.uint8)


def _operator_backward(dy: Tensor, which: Tensor, h: int, w: int, *window: Any) -> Tensor:
    return _backward(dy.contiguous(), which.contiguous(), _sizes_behind(dy, which, h, w, *window))


def _operator_backward_fake(dy: Tensor, which: Tensor, h: int, w: int, *window: Any) -> Tensor:
    return dy.new_empty(*dy.shape[:-2], *_sizes_behind(dy, which, h, w, *window)[:2])


def _sizes_behind(dy: Tensor, which: Tensor, h: int, w: int, *window: Any) -> Sizes:
    """Of images (h, w), after checks."""
    sizes = _sizes_of((*dy.shape[:-2], h, w), *window)
    check("dy", dy, (*dy.shape[:-2], *sizes[2:4]), dy)
    check("which", which, dy.shape, dy, any_dtype=True)
    if which.dtype != torch.uint8:
        raise ValueError(
            f"max_pool2d_backward: which is {which.dtype}; it must be torch.uint8, as of forward"
        )
    return sizes


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *window = inputs
    ctx.window = *x.shape[-2:], *window
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _derivative(ctx: Any, dy: Tensor, _: Any) -> Any:
    (which,) = ctx.saved_tensors
    return torch.ops.mpipipe.max_pool2d_backward(dy, which, *ctx.window), None, None, None, None


define(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil) -> (Tensor, Tensor)",
    _operator,
    _operator_fake,
)
define(
    "max_pool2d_backward(Tensor dy, Tensor which, SymInt h, SymInt w, int[] kernel, int[] stride,"
    " int[] padding, bool ceil) -> Tensor",
    _operator_backward,
    _operator_backward_fake,
)
differentiate("max_pool2d", _derivative, _setup)
