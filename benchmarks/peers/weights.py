"""First values for every peer: the bits with which mpipipe starts, in one file, so that all losses can be
compared step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from mpipipe.graph.source import ModelSource


class Slot(NamedTuple):
    """Where a parameter or buffer belongs."""

    whole_name: str  # in the whole model
    module: nn.Module
    name: str


def slots(module: nn.Module, prefix: str = "") -> Iterator[Slot]:
    """Of all that a module holds; prefix: before its names in the whole model."""
    for path, part in module.named_modules():
        for name in [*part._parameters, *part._buffers]:
            if getattr(part, name) is not None:
                yield Slot(prefix + f"{path}.{name}".removeprefix("."), part, name)


def write_weights(make: Callable[[], nn.Module], seed: int, path: Path) -> None:
    """All parameters and buffers of the model; its other names of a tied one stand in the metadata."""
    source = ModelSource(make, seed)
    save_file(source.materialise([*source.params, *source.buffers]), path, metadata=source.alias)


@torch.no_grad()
def load_weights(path: Path, wanted: Iterable[Slot]) -> None:
    """Fills slots on the meta device; those of one tied parameter get one tensor."""
    made: dict[str, torch.Tensor] = {}
    with safe_open(path, "pt") as file:
        alias = file.metadata()
        for slot in wanted:
            own = alias[slot.whole_name]
            if own not in made:
                value = file.get_tensor(own).clone()  # not a view of the file's pages
                trained = isinstance(getattr(slot.module, slot.name), nn.Parameter)
                made[own] = nn.Parameter(value) if trained else value
            setattr(slot.module, slot.name, made[own])
