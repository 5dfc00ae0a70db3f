"""Made-up pairs of texts for an encoder-decoder: the second is the first one backwards."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipipe.data.base import IGNORED, PAD, Batch, Split
from mpipipe.data.synthetic import Drawn
from mpipipe.errors import DataError
from mpipipe.values import TensorSpec

BEGIN = 1  # before the first word
_WORDS = 2  # the first id that is one; below are PAD and BEGIN


class Pairs(Drawn):
    """ "source" int64 (B, T): words, then padding; "target" (B, T): BEGIN and all but the last of the words
    backwards; "labels" (B, T): the words backwards, -100 where padded.

    T is `context`; with `varying`, the least multiple of `bucket` (at most `context`) that holds the
    longest text of the samples asked for together, so ask for whole micro-batches.
    Raises DataError when the vocabulary has no room for words.
    """

    def __init__(
        self, vocab: int, context: int, samples: int, batch: int, val_batch: int, seed: int,
        varying: bool = False, bucket: int = 16,
    ) -> None:  # fmt: skip
        if vocab <= _WORDS:
            raise DataError(
                f"pairs: model.vocab = {vocab} has no id for a word; set it to {_WORDS + 1} or more"
            )
        super().__init__(samples, batch, val_batch, seed)
        self.vocab, self.tokens_per_sample, self.varying = vocab, context, varying
        self.sample = {key: TensorSpec((context,), "int64") for key in ("source", "target", "labels")}
        self._words, self._context, self._bucket = vocab - _WORDS, context, bucket

    def draw(self, split: Split, index: int) -> dict[str, NDArray[Any]]:
        u = self.uniforms(split, index, 1 + self._context)
        length = 1 + int(u[0] * self._context)
        words = _WORDS + np.floor(u[1 : 1 + length] * self._words).astype(np.int64)
        shifted = np.concatenate([[BEGIN], words[:0:-1]])
        return {
            "source": self._padded(words, PAD),
            "target": self._padded(shifted, PAD),
            "labels": self._padded(words[::-1], IGNORED),
        }

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        found = super().batch(split, step, start, stop, keys | {"labels"})
        longest = int((found["labels"] != IGNORED).sum(1).max())
        width = min(self._context, -(-longest // self._bucket) * self._bucket)
        return {
            key: t[:, :width].contiguous() if self.varying else t for key, t in found.items() if key in keys
        }

    def _padded(self, ids: NDArray[np.int64], value: int) -> NDArray[np.int64]:
        return np.pad(ids, (0, self._context - len(ids)), constant_values=value)
