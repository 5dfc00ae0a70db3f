"""A U-Net: a label for each pixel (Ronneberger et al. 2015).

    x -- convs ------------------------------- skip -- convs -- head      full size
           '-- max 2x2 -- convs -- skip -- convs -- up --'                half
                            '-- max -- convs -- up --'                    a quarter

What a level made on the way down is seen again on the way up, so a cut between the two carries it.
Unlike the paper's, convolutions are padded (same size in and out) and followed by BatchNorm.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpipipe.errors import ConfigError


class UNet(nn.Module):
    """`forward(x)`: float32 (B, channels, H, W) -> logits (B, classes, H, W).

    `width` channels at full size, twice as many on each of the `depth` levels below. Weights start as
    torch's convolutions do. Raises ConfigError when a side is not a multiple of 2**depth.
    """

    def __init__(self, channels: int, classes: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.depth = depth
        *down, bottom = (_convs(a, b) for a, b in pairwise([channels, *widths]))
        self.down, self.bottom = nn.ModuleList(down), bottom
        rising = list(pairwise(reversed(widths)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in rising)
        self.join = nn.ModuleList(_convs(2 * b, b) for _, b in rising)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W) -> (B, classes, H, W)
        height, breadth = x.shape[2:]
        if height % 2**self.depth or breadth % 2**self.depth:
            raise ConfigError(
                f"images of {height}x{breadth} pixels, but depth = {self.depth} halves each side "
                f"{self.depth} times; pad or resize them to multiples of {2**self.depth}, or lower depth"
            )
        skips = []
        for level in self.down:
            skips.append(level(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        logits: Tensor = self.head(x)
        return logits


def _convs(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
    )
