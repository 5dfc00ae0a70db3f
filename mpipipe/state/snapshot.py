"""A copy of named tensors in one buffer, which is used again: what is kept or written while training goes on.

buffer   |-- wte.weight --|-- wte.weight/exp_avg --|...   bytes, in the order of the names
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mpipipe.graph.program import spec
from mpipipe.state.shards import nbytes_of
from mpipipe.values import TensorSpec

_ALIGN_BYTES = 64


class Snapshot:
    """buffer: 1-D uint8 in main memory, as long as the largest copy so far; views: name -> the copy of it."""

    def __init__(self, nbytes: int = 0) -> None:
        """nbytes: taken now, so that the first copy need not wait for the system's pages."""
        self.buffer = torch.empty(nbytes, dtype=torch.uint8).zero_()
        self.views: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors, on whatever device they are; the copies from before are lost."""
        specs = {name: spec(t) for name, t in tensors.items()}
        if (nbytes := needed_bytes(specs)) > self.buffer.numel():
            self.views = {}  # else the old buffer would stay beside the new one
            self.buffer = torch.empty(0, dtype=torch.uint8)
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.views = views(self.buffer, specs)
        for name, t in tensors.items():
            self.views[name].copy_(t.detach())


def views(buffer: Tensor, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """The tensors `specs` within `buffer` (1-D uint8, `needed_bytes` or more), wherever it was filled."""
    found, start = dict[str, Tensor](), 0
    for name, s in specs.items():
        nbytes = nbytes_of(s)
        found[name] = buffer[start : start + nbytes].view(getattr(torch, s.dtype)).view(s.shape)
        start += _aligned(nbytes)
    return found


def needed_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Of the buffer for these tensors."""
    return sum(_aligned(nbytes_of(s)) for s in specs.values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
