"""Torch forms of the fused operators, with their signatures."""

from __future__ import annotations

import torch
from torch.nn import functional

Tensor = torch.Tensor


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    return functional.gelu(x + bias, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up
