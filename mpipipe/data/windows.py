"""Windows of a long line of token ids, memory-mapped.

    |<------------ train ------------>|<-- val -->|
    random windows of context + 1      fixed windows, spread evenly

A window's first `context` ids are the tokens, its last `context` the labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.data.base import Batch, DatasetBase, Split, draws
from mpipipe.errors import DataError
from mpipipe.values import TensorSpec

_CHUNK = 1 << 18
_COUNTED = 256  # chunks of which the frequencies are taken: 67 million tokens tell them to three digits


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive ids of a file, from number `first` on."""

    path: Path
    ids: NDArray[Any]  # (n,), memory-mapped
    first: int = 0

    def split(self, val_fraction: float) -> tuple[Part, Part]:
        """The beginning for training, the last `val_fraction` for validation."""
        n_train = len(self.ids) - int(len(self.ids) * val_fraction)
        after = self.first + n_train
        return Part(self.path, self.ids[:n_train], self.first), Part(self.path, self.ids[n_train:], after)


def least(context: int, val_fraction: float) -> int:
    """Ids of the shortest line of which both parts of `Part.split` have a window and one id more."""
    n = int(context / min(val_fraction, 1.0 - val_fraction))  # too few, and not by much
    while min(int(n * val_fraction), n - int(n * val_fraction)) < context + 1:
        n += 1
    return n


class Windows(DatasetBase):
    """`val_batch` samples x `val_batches` steps are the validation windows; further steps repeat
    them. unit: what messages call an id. Raises DataError when a part is too short, and on loading
    an id that is not in the vocabulary."""

    def __init__(
        self, train: Part, val: Part, vocab: int, context: int, val_batch: int, val_batches: int, seed: int,
        unit: str = "tokens", val_fraction: float | None = None,
    ) -> None:  # fmt: skip
        self.vocab = self._vocab = vocab
        self.tokens_per_sample = context
        self.sample = {key: TensorSpec((context,), "int64") for key in ("tokens", "labels")}
        self._parts: dict[Split, Part] = {"train": train, "val": val}
        self._context, self._seed = context, seed
        self._val_batch, self._val_windows = val_batch, val_batch * val_batches
        for name, part in (("training", train), ("validation", val)):
            if (n := len(part.ids)) < context + 1:
                one = val_fraction is not None
                whole = len(train.ids) + len(val.ids) if one else n
                enough = f" (a file of {least(context, val_fraction)} has them)" if val_fraction else ""
                raise DataError(
                    f"{part.path}: {n} of its {whole} {unit} are for {name}, but model.context = {context} "
                    f"needs {context + 1}{enough}; give more text, another data.val_fraction or a smaller "
                    "context"
                )

    @cached_property
    def unigram_entropy(self) -> float | None:
        """Of all ids, read once; of some, evenly spread over both parts, where there are too many."""
        counts = np.zeros(self._vocab, dtype=np.int64)
        n = sum(len(part.ids) for part in self._parts.values())
        every = _CHUNK * -(-n // (_CHUNK * _COUNTED))
        for part in self._parts.values():
            for start in range(0, len(part.ids), every):
                ids = part.ids[start : start + _CHUNK]
                known = ids[(ids >= 0) & (ids < self._vocab)]  # a wrong one must not cost memory
                counts += np.bincount(known, minlength=self._vocab)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        starts = self._train_starts if split == "train" else self._val_starts
        first = starts(step, start, stop)
        offsets = {"tokens": 0, "labels": 1}
        return {key: self._load(split, first + offsets[key]) for key in offsets if key in keys}

    def _train_starts(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        # Modulo favours low starts by n / 2**64: nothing.
        places = np.uint64(len(self._parts["train"].ids) - self._context)
        return (draws(self._seed, "train", step, start, stop) % places).astype(np.int64)

    def _val_starts(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        window = (step * self._val_batch + np.arange(start, stop, dtype=np.int64)) % self._val_windows
        return window * (len(self._parts["val"].ids) - self._context) // self._val_windows

    def _load(self, split: Split, first: NDArray[np.int64]) -> torch.Tensor:  # (rows,) -> (rows, T)
        part = self._parts[split]
        index = first[:, None] + np.arange(self._context)
        ids = part.ids[index].astype(np.int64)
        if len(wrong := np.argwhere((ids < 0) | (ids >= self._vocab))):
            row, column = wrong[0]
            raise DataError(
                f"{part.path}: token {part.first + index[row, column]} is {ids[row, column]}, but the "
                f"vocabulary has {self._vocab} ids; check data.dtype, or set data.vocab to that of the "
                "tokenizer that wrote the file"
            )
        return torch.from_numpy(ids)
