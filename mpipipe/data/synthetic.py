"""Made-up data with something to learn, for tests and benchmarks; nothing is read or stored.

Everything is a pure function of (seed, split, step, index), drawn from numpy's Philox generator.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.data.base import Split, draws, generator, uniforms
from mpipipe.values import TensorSpec


class SyntheticTokens:
    """Tokens with log-uniform frequencies, P(k) = log((k+2)/(k+1)) / log(V+1), close to Zipf's law;
    the label of a token is a fixed permutation of it, so the loss falls from ln V to 0."""

    def __init__(self, vocab: int, context: int, seed: int) -> None:
        self._vocab, self._context, self._seed = vocab, context, seed
        # Any factor coprime to the vocabulary permutes it; near the golden section it scatters.
        first = max(1, int(vocab * 0.618))
        self._factor = next(f for f in range(first, 2 * vocab + 2) if math.gcd(f, vocab) == 1)

    @property
    def vocab(self) -> int | None:
        return self._vocab

    @property
    def tokens_per_sample(self) -> int:
        return self._context

    @cached_property
    def unigram_entropy(self) -> float | None:
        edges = np.log(np.arange(1, self._vocab + 2, dtype=np.float64)) / math.log(self._vocab + 1)
        p = np.diff(edges)
        return float(-(p * np.log(p)).sum())

    def specs(self, rows: int) -> dict[str, TensorSpec]:
        shape = (rows, self._context)
        return {"tokens": TensorSpec(shape, "int64"), "labels": TensorSpec(shape, "int64")}

    def batch(
        self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        u = uniforms(self._seed, split, step, start * self._context, stop * self._context)
        tokens = np.floor((self._vocab + 1) ** u).astype(np.int64) - 1
        tokens = np.clip(tokens, 0, self._vocab - 1).reshape(-1, self._context)
        made = {"tokens": tokens, "labels": (tokens * self._factor + 1) % self._vocab}
        return {key: torch.from_numpy(made[key]) for key in made if key in keys}

    def encode(self, text: str) -> list[int] | None:
        return None

    def decode(self, ids: list[int]) -> str | None:
        return None


class SyntheticVectors:
    """`samples` normal vectors per split; the label is the largest of `classes` fixed random
    linear functions, so an MLP can learn it."""

    def __init__(self, inputs: int, classes: int, samples: int, seed: int) -> None:
        self._inputs, self._classes, self._samples, self._seed = inputs, classes, samples, seed
        self._teacher = generator(seed, "teacher", 0).standard_normal((inputs, classes))
        self._sets: dict[Split, tuple[NDArray[np.float32], NDArray[np.int64]]] = {}

    @property
    def vocab(self) -> int | None:
        return None

    @property
    def tokens_per_sample(self) -> int:
        return 1

    @property
    def unigram_entropy(self) -> float | None:
        return None

    def specs(self, rows: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((rows, self._inputs), "float32"), "y": TensorSpec((rows,), "int64")}

    def batch(
        self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        x, y = self._set(split)
        index = draws(self._seed, split, step, start, stop) % np.uint64(self._samples)
        made: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {"x": x, "y": y}
        return {key: torch.from_numpy(made[key][index]) for key in made if key in keys}

    def encode(self, text: str) -> list[int] | None:
        return None

    def decode(self, ids: list[int]) -> str | None:
        return None

    def _set(self, split: Split) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if split not in self._sets:
            x = generator(self._seed, f"{split} set", 0).standard_normal((self._samples, self._inputs))
            self._sets[split] = (x.astype(np.float32), (x @ self._teacher).argmax(axis=1))
        return self._sets[split]
