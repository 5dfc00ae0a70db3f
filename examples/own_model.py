"""A model, a loss and data of your own, named by a config as `examples.own_model:Net` and so on.

The model takes the noise off short waves. The config is examples/own_model.yaml.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 64  # points of a wave


class Net(nn.Module):
    """Residual convolutions; `forward` takes the batch by the names of its parameters."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, channels, 9, padding=4)
        self.layers = nn.ModuleList(nn.Conv1d(channels, channels, 9, padding=4) for _ in range(layers))
        self.last = nn.Conv1d(channels, 1, 9, padding=4)

    def forward(self, noisy: Tensor) -> Tensor:  # (B, 1, LENGTH) -> (B, 1, LENGTH)
        x = self.first(noisy)
        for layer in self.layers:
            x = x + layer(torch.relu(x))
        return noisy - self.last(x)


def squared_error(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """(sum, weight): the loss of a step is the sum over all micro-batches over the whole weight."""
    return (outputs - batch["labels"]).square().sum(), outputs.numel()


class Waves(Dataset[dict[str, Tensor]]):
    """Waves of any length and phase under noise of variance 0.25; a sample follows from its number."""

    def __init__(self, first: int, samples: int) -> None:
        self.first, self.samples = first, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(self.first + i)
        turns, phase = torch.rand(2, generator=draw)
        wave = torch.sin(2 * math.pi * (4 * turns * torch.linspace(0, 1, LENGTH) + phase))[None]
        return {"noisy": wave + 0.5 * torch.randn(wave.shape, generator=draw), "labels": wave}


def waves(samples: int) -> tuple[Waves, Waves]:
    """Training and validation data."""
    return Waves(0, samples), Waves(samples, samples // 8)
