"""A ResNet: convolutions with a short cut around every two or three of them (He et al. 2016).

    x -> stem -> [ ReLU(shortcut(x) + convs(x)) * n ] * levels -> mean over pixels -> head

ResNet-18: blocks (2, 2, 2, 2), widths (64, 128, 256, 512), stem "imagenet"; ResNet-50: the same widths,
blocks (3, 4, 6, 3), bottleneck. In a bottleneck the 3x3 convolution has the stride, as in all
published weights of today.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from mpipipe.errors import ConfigError


class Block(nn.Module):
    """ReLU(shortcut(x) + convs(x)); the short cut is a 1x1 convolution where shapes change."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.out_channels = 4 * width if bottleneck else width
        if bottleneck:  # channels, kernel and stride of each convolution
            plan = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
        else:
            plan = [(width, 3, stride), (width, 3, 1)]
        self.convs = nn.Sequential(*_convs(channels, plan))
        changes = stride > 1 or channels != self.out_channels
        self.shortcut = nn.Sequential(*_convs(channels, [(self.out_channels, 1, stride)] if changes else []))

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W) -> (B, out_channels, H/stride, W/stride)
        return functional.relu(self.convs(x) + self.shortcut(x))


class ResNet(nn.Module):
    """`forward(x)`: float32 (B, channels, H, W) -> logits (B, classes).

    Level i has `blocks[i]` blocks of `widths[i]` channels; each level after the first halves the side.
    The stem is a 3x3 convolution ("small") or a 7x7 one and a pooling, stride 2 each ("imagenet").
    Convolutions start as He et al. 2015 (fan out), the head as torch's `nn.Linear`.
    Raises ConfigError when blocks and widths differ in length.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        blocks: Sequence[int],
        widths: Sequence[int],
        bottleneck: bool = False,
        stem: Literal["small", "imagenet"] = "small",
    ) -> None:
        super().__init__()
        if len(blocks) != len(widths):
            raise ConfigError(
                f"blocks = {tuple(blocks)}, widths = {tuple(widths)}: give one width for each level"
            )
        first = [(widths[0], 7, 2)] if stem == "imagenet" else [(widths[0], 3, 1)]
        pool = [nn.MaxPool2d(3, 2, padding=1)] if stem == "imagenet" else []
        self.stem = nn.Sequential(*_convs(channels, first), nn.ReLU(), *pool)
        channels, made = widths[0], []
        for level, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for i in range(count):
                made.append(Block(channels, width, 2 if level and i == 0 else 1, bottleneck))
                channels = made[-1].out_channels
        self.blocks = nn.Sequential(*made)
        self.head = nn.Linear(channels, classes)
        self.apply(init_he)

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W) -> (B, classes)
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def _convs(channels: int, plan: Sequence[tuple[int, int, int]]) -> Iterator[nn.Module]:
    """Convolution and norm for each (out channels, kernel, stride), with ReLU between."""
    for i, (width, kernel, stride) in enumerate(plan):
        if i:
            yield nn.ReLU()
        yield nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
        yield nn.BatchNorm2d(width)
        channels = width


def init_he(module: nn.Module) -> None:
    """Convolutions from N(0, 2 / fan out), the fan out being width * kernel area (He et al. 2015)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
