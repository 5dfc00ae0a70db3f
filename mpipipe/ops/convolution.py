"""What a backward of torch's convolutions towards their input alone leaves out, with torch's bits.

The call is the one that torch's own backward makes, asked for the gradients of weight and bias alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpipipe.ops.deferred import Later
from mpipipe.ops.gradients import add_to


def serves_convolution(x: Tensor, weight: Tensor) -> bool:
    """Whether `convolution_later` and its twin serve these: of a single sample torch makes a batch before, of
    complex numbers several convolutions; and where the bias alone learns there would be no input."""
    return weight.requires_grad and x.dim() == weight.dim() and not weight.is_complex()


def convolution_later(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), groups: int = 1,
    output_padding: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Adds to the gradients of weight and bias those of aten::conv1d, conv2d or conv3d.

    grad: of the result; x (batch, channels, ...) in the dtype of the product; output_padding: of a transposed
    one; the rest as the operator has it, a size for each dimension or one for all. Under torch.no_grad()."""
    learns = bias is not None and bias.requires_grad
    # of the weight no value matters here, but its dtype and how it lies
    like = weight if weight.dtype == grad.dtype else torch.empty_like(weight, dtype=grad.dtype)
    _, of_weight, of_bias = torch.ops.aten.convolution_backward.default(
        grad, x, like, None if bias is None else bias.shape, stride, padding, dilation,
        output_padding is not None, output_padding or (0,), groups, (False, True, learns),
    )  # fmt: skip
    add_to(weight, of_weight)
    if bias is not None and learns:
        add_to(bias, of_bias)


def transposed_later(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,), output_padding: Sequence[int] = (0,), groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> None:  # fmt: skip
    """As `convolution_later`, of aten::conv_transpose1d, conv_transpose2d or conv_transpose3d."""
    convolution_later(grad, x, weight, bias, stride, padding, dilation, groups, output_padding)


CONVOLUTION_LATER = Later(serves_convolution, convolution_later)
TRANSPOSED_LATER = Later(serves_convolution, transposed_later)
