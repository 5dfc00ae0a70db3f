"""A built-in model as an expert cuts it: a list of layers, of which each rank builds its own.

Only what a rank holds gets memory. Names are those of the whole model, under which `weights.py` has the
first values.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.peers.splits import Split
from benchmarks.peers.weights import Slot, slots
from mpipipe.models import GPT, VGG


class Layer(NamedTuple):
    prefix: str  # before its names in the whole model
    module: nn.Module


class Embedding(nn.Module):
    """Tokens (B, T) -> (B, T, C)."""

    def __init__(self, whole: GPT) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = whole.wte, whole.wpe, whole.drop

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))
        return x


class Head(nn.Module):
    """(B, T, C) -> logits (B, T, V)."""

    def __init__(self, whole: GPT) -> None:
        super().__init__()
        self.ln_f, self.head = whole.ln_f, whole.head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def layers(whole: nn.Module) -> list[Layer]:
    """Of a GPT its embedding, blocks and head; of a VGG its convolutions (with norm and ReLU), pools and
    linear layers. Raises TypeError for other models."""
    if isinstance(whole, GPT):
        blocks = (Layer(f"blocks.{i}.", block) for i, block in enumerate(whole.blocks))
        return [Layer("", Embedding(whole)), *blocks, Layer("", Head(whole))]
    if isinstance(whole, VGG):
        return [*_units("features.", whole.features), *_units("classifier.", whole.classifier)]
    raise TypeError(f"no layers are known of a {type(whole).__name__}; known are GPT and VGG")


def _units(prefix: str, part: nn.Sequential) -> Iterator[Layer]:
    """A unit begins with a convolution, a pool, or a linear layer and the flattening before it."""
    unit: OrderedDict[str, nn.Module] = OrderedDict()
    for name, module in part.named_children():
        begins = isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.Flatten | nn.Linear)
        if unit and begins and not isinstance(next(reversed(unit.values())), nn.Flatten):
            yield Layer(prefix, nn.Sequential(unit))
            unit = OrderedDict()
        unit[name] = module
    yield Layer(prefix, nn.Sequential(unit))


class Stage(nn.Module):
    """Some layers after each other."""

    def __init__(self, part: Sequence[Layer]) -> None:
        super().__init__()
        self.prefixes = [layer.prefix for layer in part]
        self.layers = nn.ModuleList(layer.module for layer in part)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def slots(self) -> Iterator[Slot]:
        """Of its parameters and buffers, under the names of the whole model."""
        for prefix, layer in zip(self.prefixes, self.layers, strict=True):
            yield from slots(layer, prefix)


def meta_stages(make: Callable[[], nn.Module], split: Split) -> list[Stage]:
    """All stages, without memory. Raises ValueError for a split of another number of layers."""
    with torch.device("meta"):
        found = layers(make())
    if sum(split) != len(found):
        raise ValueError(f"the split {split} has {sum(split)} layers, the model {len(found)}")
    ends = itertools.accumulate(split, initial=0)
    return [Stage(found[a:b]) for a, b in itertools.pairwise(ends)]


@torch.no_grad()
def between(stages: Sequence[Stage], inputs: Tensor) -> list[Tensor]:
    """Of inputs and stages on the meta device: what enters the first stage, what leaves it, and so on."""
    found = [inputs]
    for stage in stages:
        found.append(stage(found[-1]))
    return [found[0], *(t.requires_grad_() for t in found[1:])]
