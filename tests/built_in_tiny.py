"""The built-in models, tiny, as cases of `tiny`; with data of varying lengths, and with layers that no
tracer takes.

Shared by the tests of the models and by those that compare bits between layouts.
"""

from __future__ import annotations

from functools import cache

import tiny
import torch
from torch import Tensor, nn

from mpipipe.config import parse
from mpipipe.data import open_dataset
from mpipipe.data.base import Dataset
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import Built, build, cross_entropy

TINY = {
    "llama": "vocab: 32, layers: 2, d_model: 16, heads: 4, kv_heads: 2, d_ff: 24, context: 8, tied: true",
    "lstm": "vocab: 32, layers: 2, width: 8, hidden: 12, context: 6, dropout: 0.1",
    "encoder_decoder": "vocab: 16, layers: 1, d_model: 16, heads: 2, context: 8, dropout: 0.1",
    "vgg": "size: 8, blocks: [1, 1], widths: [8, 16], hidden: 32, dropout: 0.1",
    "resnet": "size: 16, blocks: [1, 1], widths: [4, 6], stem: imagenet",
    "unet": "size: 4, width: 4, depth: 1",
    "dlrm": "dense: 4, tables: [9, 7], bag: 2, width: 4, bottom: [6], top: [6]",
}


@cache
def made(name: str, settings: str, data: str = "{name: synthetic}") -> tuple[Built, Dataset]:
    config = parse(f"model: {{name: {name}, {settings}}}\ndata: {data}\ntrain: {{batch: 8}}")
    opened = open_dataset(config, ".")
    return build(config, opened), opened


def variants(built: Built, data: Dataset, rows: int, precision: str, bits: str = "torch") -> Variants:
    source, how = ModelSource(built.model, tiny.SEED), Lowering(bits)
    return Variants(source, built.loss, data.specs, rows, precision, built.metrics, lowering=how)


@cache
def captured(name: str, rows: int, precision: str, bits: str = "torch") -> Variants:
    return variants(*made(name, TINY[name]), rows, precision, bits)


class BuiltInCase(tiny.Case):
    """A `tiny.Case` whose model is a key of `TINY`, on the made-up data that fit it."""

    @property
    def dataset(self) -> Dataset:
        return made(self.model, TINY[self.model])[1]

    @property
    def variants(self) -> Variants:
        return captured(self.model, self.rows, self.precision, self.bits)


# -- lengths that vary --------------------------------------------------------------------------------

_PAIRS = "encoder_decoder", TINY["encoder_decoder"], "{name: synthetic, varying: true, bucket: 4}"


@cache
def _captured_pairs(rows: int, precision: str) -> Variants:
    return variants(*made(*_PAIRS), rows, precision)


class VaryingCase(tiny.Case):
    """Texts of 4 or 8 tokens, padded; rank 0 tells the others the shapes of each step."""

    @property
    def dataset(self) -> Dataset:
        return made(*_PAIRS)[1]

    @property
    def variants(self) -> Variants:
        return _captured_pairs(self.rows, self.precision)


def tiny_varying(**how: object) -> VaryingCase:
    return VaryingCase("varying lengths", **how)  # type: ignore[arg-type]


# -- layers that decide on values ---------------------------------------------------------------------


class Decides(nn.Module):
    """Dropout, a norm, and a number of rounds that depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.lin = nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:  # (B, 16) -> (B, 16)
        x = self.norm(x)
        for _ in range(1 + int(x.abs().sum()) % 3):
            x = self.drop(torch.tanh(self.lin(x)))
        return x


def layers() -> list[nn.Module]:
    side, classes = tiny.SIDE**2, tiny.CLASSES
    return [nn.Linear(side, 16), Decides(), nn.Linear(16, 16), Decides(), nn.Tanh(), nn.Linear(16, classes)]


@cache
def _captured_layers(rows: int, precision: str) -> Variants:
    return Variants(ModelSource(layers, tiny.SEED), cross_entropy, tiny.VECTORS.specs, rows, precision)


class LayeredCase(tiny.Case):
    """A list of layers that torch.export refuses: each runs as it is written."""

    @property
    def dataset(self) -> Dataset:
        return tiny.VECTORS

    @property
    def variants(self) -> Variants:
        return _captured_layers(self.rows, self.precision)


def tiny_layers(**how: object) -> LayeredCase:
    return LayeredCase("layer by layer", **how)  # type: ignore[arg-type]
