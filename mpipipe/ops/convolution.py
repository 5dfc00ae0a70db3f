"""What a backward of torch's convolutions towards their input alone leaves out, with torch's bits.

x (batch, channels, ...), weight (channels, channels of a group, ...), one size for each dimension of the
kernel. The call is the one that torch's own backward makes, asked for the gradients of weight and bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpipipe.ops.gradients import add_to


def of_a_batch(x: Tensor, weight: Tensor) -> bool:
    """Whether `conv_later` and its twin can make the weight gradient of a convolution of these: torch gives
    a single sample a batch before, and makes of complex numbers several convolutions."""
    return weight.requires_grad and x.dim() == weight.dim() and not weight.is_complex()


def conv_later(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), groups: int = 1,
) -> None:  # fmt: skip
    """Adds to the gradients of weight and bias those of aten::conv1d, conv2d or conv3d.

    grad: of the result; x in the dtype of the product; the rest as the operator has it. Under
    torch.no_grad()."""
    _later(grad, x, weight, bias, stride, padding, dilation, None, groups)


def conv_transpose_later(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,), output_padding: Sequence[int] = (0,), groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> None:  # fmt: skip
    """As `conv_later`, of aten::conv_transpose1d, conv_transpose2d or conv_transpose3d."""
    _later(grad, x, weight, bias, stride, padding, dilation, output_padding, groups)


def _later(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], output_padding: Sequence[int] | None, groups: int,
) -> None:  # fmt: skip
    """output_padding: of a transposed one, else None."""
    count = weight.dim() - 2
    biased = bias is not None and bias.requires_grad
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        grad, x, weight.to(grad.dtype), None if bias is None else list(bias.shape), _each(stride, count),
        _each(padding, count), _each(dilation, count), output_padding is not None,
        _each(output_padding or (0,), count), groups, [False, True, biased],
    )  # fmt: skip
    add_to(weight, of_weight)
    if bias is not None and biased:
        add_to(bias, of_bias)


def _each(sizes: Sequence[int], count: int) -> list[int]:
    """Of each dimension: a list may have one number for all."""
    return list(sizes) if len(sizes) == count else [*sizes] * count
