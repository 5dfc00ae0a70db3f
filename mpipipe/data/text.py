"""Bytes as tokens: vocabulary 256, no tokenizer, memory-mapped.

    |<------------ train ------------>|<-- val -->|
    random windows of context + 1      fixed windows, spread evenly

A window's first `context` bytes are the tokens, its last `context` the labels.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.data.base import Split, draws
from mpipipe.errors import DataError
from mpipipe.values import TensorSpec

VOCAB = 256
_CHUNK_BYTES = 1 << 24


class Text:
    """`val_batch` samples x `val_batches` steps are the validation windows; further steps repeat
    them. Raises DataError when the file is missing or too short."""

    def __init__(
        self, path: Path, context: int, val_fraction: float, val_batch: int, val_batches: int, seed: int
    ) -> None:
        self._bytes = _map(path)
        self._context, self._seed = context, seed
        self._val_batch, self._val_windows = val_batch, val_batch * val_batches
        n_val = int(len(self._bytes) * val_fraction)
        self._n_train = len(self._bytes) - n_val
        for name, n in (("training", self._n_train), ("validation", n_val)):
            if n < context + 1:
                raise DataError(
                    f"{path}: {n} of its {len(self._bytes)} bytes are for {name} (data.val_fraction = "
                    f"{val_fraction}), but model.context = {context} needs {context + 1}; give more text or "
                    "a smaller context"
                )

    @property
    def vocab(self) -> int | None:
        return VOCAB

    @property
    def tokens_per_sample(self) -> int:
        return self._context

    @cached_property
    def unigram_entropy(self) -> float | None:
        """Over the whole corpus; reads all of it once."""
        counts = np.zeros(VOCAB, dtype=np.int64)
        for start in range(0, len(self._bytes), _CHUNK_BYTES):
            counts += np.bincount(self._bytes[start : start + _CHUNK_BYTES], minlength=VOCAB)
        p = counts[counts > 0] / len(self._bytes)
        return float(-(p * np.log(p)).sum())

    def specs(self, rows: int) -> dict[str, TensorSpec]:
        shape = (rows, self._context)
        return {"tokens": TensorSpec(shape, "int64"), "labels": TensorSpec(shape, "int64")}

    def batch(
        self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        starts = self._train_starts if split == "train" else self._val_starts
        first = starts(step, start, stop)
        offsets = {"tokens": 0, "labels": 1}
        return {key: self._windows(first + offsets[key]) for key in offsets if key in keys}

    def encode(self, text: str) -> list[int] | None:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str | None:
        return bytes(ids).decode(errors="replace")

    def _train_starts(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        # Modulo favours low starts by n / 2**64: nothing.
        places = np.uint64(self._n_train - self._context)
        return (draws(self._seed, "train", step, start, stop) % places).astype(np.int64)

    def _val_starts(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        window = (step * self._val_batch + np.arange(start, stop, dtype=np.int64)) % self._val_windows
        places = len(self._bytes) - self._n_train - self._context
        return self._n_train + window * places // self._val_windows

    def _windows(self, first: NDArray[np.int64]) -> torch.Tensor:
        index = first[:, None] + np.arange(self._context)  # (rows, T)
        return torch.from_numpy(self._bytes[index].astype(np.int64))


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except ValueError as error:  # numpy cannot map an empty file
        raise DataError(f"{path}: is empty; set data.path to a file or folder with text") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); set data.path to a readable file and run.dir to "
            "a folder that every node sees"
        ) from error
