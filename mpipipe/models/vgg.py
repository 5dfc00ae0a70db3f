"""A VGG: blocks of 3x3 convolutions, each block at half the side of the one before
(Simonyan & Zisserman 2015), with BatchNorm (Ioffe & Szegedy 2015) after each convolution.

    x -> [ (conv 3x3 -> norm -> ReLU) * n -> max 2x2 ] * blocks -> linear -> linear -> head

VGG-11 of the paper: blocks (1, 1, 2, 2, 2), widths (64, 128, 256, 512, 512), hidden 4096, size 224.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from mpipipe.errors import ConfigError
from mpipipe.models.resnet import init_he


class VGG(nn.Module):
    """`forward(x)`: float32 (B, channels, size, size) -> logits (B, classes).

    Block i has `blocks[i]` convolutions of `widths[i]` channels; two linear layers of `hidden` with
    ReLU and dropout come before the head. Convolutions start as He et al. 2015 (fan out), the rest as
    torch's layers do: the paper's N(0, 0.01) all but stops a narrow model. Raises ConfigError for more
    blocks than `size` has halves, and for images of another shape.
    """

    def __init__(
        self,
        channels: int,
        size: int,
        classes: int,
        blocks: Sequence[int],
        widths: Sequence[int],
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        side = size >> len(blocks)
        if side == 0 or len(blocks) != len(widths):
            raise ConfigError(
                f"size = {size}, blocks = {tuple(blocks)}, widths = {tuple(widths)}: give a width per block; "
                f"each halves the side, so {size} pixels allow at most {size.bit_length() - 1} blocks"
            )
        self.image = (channels, size, size)
        self.features = nn.Sequential(*_blocks(channels, blocks, widths))
        self.classifier = nn.Sequential(
            *(nn.Flatten(), nn.Linear(widths[-1] * side * side, hidden), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(hidden, classes),
        )
        self.apply(init_he)

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, size, size) -> (B, classes)
        if x.shape[1:] != self.image:
            raise ConfigError(
                f"images of {tuple(x.shape[1:])} (channels, height, width), but the model is made for "
                f"{self.image}; set channels and size to those of the images"
            )
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _blocks(channels: int, blocks: Sequence[int], widths: Sequence[int]) -> Iterator[nn.Module]:
    for convolutions, width in zip(blocks, widths, strict=True):
        for _ in range(convolutions):
            yield from (nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            channels = width
        yield nn.MaxPool2d(2)
