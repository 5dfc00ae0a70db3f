"""Where the micro-batches of a user's data come from, before they are named and checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from mpipipe.data.base import Order, Split, draws
from mpipipe.errors import DataError
from mpipipe.ops.generators import PROCESS_GENERATORS

Collate = Callable[[list[Any]], Any]


class Source(Protocol):
    @property
    def samples(self) -> int | None:
        """How many there are; None when that is not known."""
        ...

    def __call__(self, step: int, start: int, stop: int) -> Any:
        """Samples [start, stop) of the batch of `step`, as the user makes them."""
        ...


class Indexed:
    """Samples by index, put together here. What a sample draws from the generators of torch, numpy or
    Python depends on (seed, split, step, place) alone: stages on different ranks that load different
    keys of it see the same, and so does a resumed run."""

    def __init__(self, data: Any, order: Order, collate: Collate | None, seed: int, split: Split) -> None:
        self.samples = order.n
        self._data, self._order, self._collate = data, order, collate or _stack
        self._seed, self._stream = seed, f"{split} randomness"

    def __call__(self, step: int, start: int, stop: int) -> Any:
        index = self._order.indices(step, start, stop).tolist()
        seeds = draws(self._seed, self._stream, step, start, stop).tolist()
        with _borrowed_generators():
            return self._collate([self._item(i, s) for i, s in zip(index, seeds, strict=True)])

    def index(self, step: int, sample: int) -> int:
        """In the user's data, of a sample of the batch of `step`."""
        return int(self._order.indices(step, sample, sample + 1)[0])

    def __iter__(self) -> Iterator[Any]:
        """Whole batches in order, each sample once."""
        size = self._order.batch
        for step in range(-(-self.samples // size)):
            yield self(step, 0, min(size, self.samples - step * size))

    def _item(self, index: int, seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self._data[index]


class ByMicroBatch:
    """`data.batch(step, micro)`; `micro_of` numbers the part that a slice is."""

    samples = None

    def __init__(self, data: Any, micro_of: Callable[[int, int], int]) -> None:
        self._data, self._micro_of = data, micro_of

    def __call__(self, step: int, start: int, stop: int) -> Any:
        return self._data.batch(step, self._micro_of(start, stop))


def _stack(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"samples cannot be put together: {error}; give them one form and shape, or a collate that pads"
        ) from error


@contextmanager
def _borrowed_generators() -> Iterator[None]:
    """The global generators stand afterwards as before."""
    with PROCESS_GENERATORS, torch.random.fork_rng(devices=[]):
        numpy, python = np.random.get_state(), random.getstate()
        try:
            yield
        finally:
            np.random.set_state(numpy)
            random.setstate(python)
