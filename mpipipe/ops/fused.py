"""What a captured graph's operators become where the kernels are used: thin forms around these that take the
arguments as torch's operators have them, with the dtypes that torch gives under autocast.

mpipipe/graph/patterns.py finds where, mpipipe/graph/match.py puts them into a stage's code; nothing else
calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.deferred import Later
from mpipipe.ops.flash_attention import flash_attention
from mpipipe.ops.linear import linear, linear_later, serves_linear
from mpipipe.ops.linear_cross_entropy import linear_cross_entropy

Tensor = torch.Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor], causal: bool, scale: float | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """masks: boolean, (B or 1, 1 or H, 1 or T, S) each, of which the first head and query count for all; what
    all of them let see is seen."""
    keys = None
    for mask in masks:
        seen = mask[:, 0, 0, :].expand(q.shape[0], -1)
        keys = seen if keys is None else keys & seen
    return flash_attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=causal, key_mask=keys, scale=scale)


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, approximate: str, transposed: bool, shape: Sequence[int],
    own: bool = False,
) -> Tensor:  # fmt: skip
    """gelu(x W^T + b) in a shape, the bias added by the activation's kernel. own: as `linear` has it."""
    return gelu_of(product_of(x, weight, transposed, shape, own), bias, approximate)


def product_of(
    x: Tensor, weight: Tensor, transposed: bool, shape: Sequence[int], own: bool = False
) -> Tensor:
    """x W^T in a shape: the first half of `linear_gelu`."""
    return linear(x, weight, None, transposed, own).view(shape)


def product_of_later(
    grad: Tensor, x: Tensor | None, weight: Tensor, transposed: bool, shape: Sequence[int], own: bool = False
) -> None:
    """As `linear_later`, of `product_of`."""
    linear_later(grad.reshape(-1, weight.shape[1 if transposed else 0]), x, weight, None, transposed, own)


PRODUCT_LATER = Later(serves_linear, product_of_later)


def gelu_of(y: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """gelu(y + b): the second half."""
    return bias_gelu(y, bias.to(y.dtype), approximate)


def head_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, smoothing: float,
    mean: bool, dtype: torch.dtype = torch.float32, late: bool = False, then: Sequence[Sequence[Any]] = (),
    own: bool = False,
) -> Tensor:  # fmt: skip
    """Cross entropy of the logits x W^T + b, computed in float32: the sum, or the mean over the labels that
    count. late and own: as linear_cross_entropy has them, late for float32. then: what multiplies the
    result, operators and their other arguments."""
    scale = torch.ones((), device=x.device) if mean or then else None
    if mean:
        scale = 1.0 / (labels != ignore_index).sum()
    for operator, *others in then:
        scale = operator(scale, *others)
    loss = linear_cross_entropy(
        x.reshape(-1, x.shape[-1]), weight, labels, bias=bias, ignore_index=ignore_index,
        label_smoothing=smoothing, late=late, scale=scale, own=own,
    )  # fmt: skip
    return loss.to(dtype)
