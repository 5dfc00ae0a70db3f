"""A multi-layer perceptron: the smallest model worth cutting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """`forward(x)`: float32 (B, inputs) -> logits (B, classes); ReLU and dropout between layers.
    Weights start as torch's `nn.Linear` does."""

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int, dropout: float) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout)) for a, b in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, inputs) -> (B, classes)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits
