"""Torch forms of the fused operators, with their signatures."""

from __future__ import annotations

import torch
from torch.nn import functional

Tensor = torch.Tensor


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    logits = functional.linear(x, weight, bias).float()
    return functional.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    s = x if residual is None else x + residual
    y = functional.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return y if residual is None else (y, s)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    s = x if residual is None else x + residual
    y = functional.rms_norm(s, s.shape[-1:], weight, eps)
    return y if residual is None else (y, s)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    return functional.gelu(x + bias, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def embedding(indices: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    return functional.embedding(indices, weight, padding_idx)
