"""Where the micro-batches of a user's data come from, before they are named and checked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from mpipipe.data.base import Order, Split, draws
from mpipipe.errors import DataError
from mpipipe.graph.program import spec
from mpipipe.ops.generators import PROCESS_GENERATORS

Collate = Callable[[list[Any]], Any]
_MANY = 4  # parts of a sample that are said one by one


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
        self._data, self._order, self._collate = data, order, collate
        self._called = "data" if split == "train" else "val"
        self._seed, self._stream = seed, f"{split} randomness"

    def __call__(self, step: int, start: int, stop: int) -> Any:
        with _borrowed_generators():
            items = self._items(step, start, stop)
            if self._collate:
                return self._collate(items)
            return _stack(items, lambda i: self.name(step, start + i))

    def unlike(self, step: int, start: int, stop: int) -> str:
        """Of samples that make no right batch: the first that differs from most. They are loaded again."""
        with _borrowed_generators():
            items = self._items(step, start, stop)
        alike = f"each of its samples is {_form(items[0])}; the first is {self.name(step, start)}"
        return _unlike(items, lambda i: self.name(step, start + i)) or alike

    def name(self, step: int, sample: int) -> str:
        """What the user calls a sample of the batch of `step`, such as "data[17]"."""
        return self._name(int(self._order.indices(step, sample, sample + 1)[0]))

    def _name(self, index: int) -> str:
        return f"{self._called}[{index}]"

    def __iter__(self) -> Iterator[Any]:
        """Whole batches in order, each sample once."""
        size = self._order.batch
        for step in range(-(-self.samples // size)):
            yield self(step, 0, min(size, self.samples - step * size))

    def _items(self, step: int, start: int, stop: int) -> list[Any]:
        index = self._order.indices(step, start, stop).tolist()
        seeds = draws(self._seed, self._stream, step, start, stop).tolist()
        return [self._item(i, s) for i, s in zip(index, seeds, strict=True)]

    def _item(self, index: int, seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            return self._data[index]
        except Exception as error:
            error.add_note(f"raised by {self._name(index)}")
            raise


class ByMicroBatch:
    """`data.batch(step, micro)`; `micro_of` numbers the part that a slice is."""

    samples = None

    def __init__(self, data: Any, micro_of: Callable[[int, int], int]) -> None:
        self._data, self._micro_of = data, micro_of

    def __call__(self, step: int, start: int, stop: int) -> Any:
        return self._data.batch(step, self._micro_of(start, stop))


def _stack(samples: list[Any], name_of: Callable[[int], str]) -> Any:
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise DataError(
            f"samples cannot be put together: {_unlike(samples, name_of) or error}; give them one form and "
            "shape, or a collate that pads"
        ) from error


def _unlike(samples: list[Any], name_of: Callable[[int], str]) -> str:
    """Says the first sample that has another form than most; "" where all have one."""
    forms = [*map(_form, samples)]
    usual = Counter(forms).most_common(1)[0][0]
    other = next((i for i, form in enumerate(forms) if form != usual), None)
    if other is None:
        return ""
    return f"{name_of(other)} is {forms[other]}, but {name_of(forms.index(usual))} {usual}"


def _form(sample: Any) -> str:
    """For people: {ids: int64[7], labels: int64[]}."""
    if isinstance(sample, Mapping):
        return "{" + ", ".join(sorted(f"{key}: {_form(value)}" for key, value in sample.items())) + "}"
    if isinstance(sample, tuple | list):
        forms = [*map(_form, sample)]
        if len(forms) > _MANY and len(set(forms)) == 1:
            return f"{len(forms)} times {forms[0]}"
        return "(" + ", ".join(forms) + ")"
    if isinstance(sample, torch.Tensor | np.ndarray):
        return spec(sample).text
    return type(sample).__name__


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
