"""Made-up data with something to learn, for tests and benchmarks; nothing is read or stored.

Everything is a pure function of (seed, split, step, index), drawn from numpy's Philox generator.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.data.base import Batch, DatasetBase, Order, Split, draws, generator, pick, uniforms
from mpipipe.values import TensorSpec


class SyntheticTokens(DatasetBase):
    """Tokens with log-uniform frequencies, P(k) = log((k+2)/(k+1)) / log(V+1), close to Zipf's law;
    the label of a token is a fixed permutation of it, so the loss falls from ln V to 0."""

    def __init__(self, vocab: int, context: int, seed: int) -> None:
        self.vocab, self.tokens_per_sample = vocab, context
        self.sample = {key: TensorSpec((context,), "int64") for key in ("tokens", "labels")}
        self._vocab, self._context, self._seed = vocab, context, seed
        # Any factor coprime to the vocabulary permutes it; near the golden section it scatters.
        first = max(1, int(vocab * 0.618))
        self._factor = next(f for f in range(first, 2 * vocab + 2) if math.gcd(f, vocab) == 1)

    @cached_property
    def unigram_entropy(self) -> float | None:
        edges = np.log(np.arange(1, self._vocab + 2, dtype=np.float64)) / math.log(self._vocab + 1)
        p = np.diff(edges)
        return float(-(p * np.log(p)).sum())

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        u = uniforms(self._seed, split, step, start * self._context, stop * self._context)
        tokens = np.floor((self._vocab + 1) ** u).astype(np.int64) - 1
        tokens = np.clip(tokens, 0, self._vocab - 1).reshape(-1, self._context)
        return pick({"tokens": tokens, "labels": (tokens * self._factor + 1) % self._vocab}, keys)


class SyntheticVectors(DatasetBase):
    """`samples` normal vectors per split; the label is the largest of `classes` fixed random
    linear functions, so an MLP can learn it."""

    def __init__(self, inputs: int, classes: int, samples: int, seed: int) -> None:
        self.sample = {"x": TensorSpec((inputs,), "float32"), "y": TensorSpec((), "int64")}
        self._inputs, self._samples, self._seed = inputs, samples, seed
        self.train_samples = samples
        self._teacher = generator(seed, "teacher").standard_normal((inputs, classes))
        self._sets: dict[Split, tuple[NDArray[np.float32], NDArray[np.int64]]] = {}

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        x, y = self._set(split)
        index = draws(self._seed, split, step, start, stop) % np.uint64(self._samples)
        made: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {"x": x, "y": y}
        return {key: torch.from_numpy(made[key][index]) for key in made if key in keys}

    def _set(self, split: Split) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if split not in self._sets:
            x = generator(self._seed, f"{split} set").standard_normal((self._samples, self._inputs))
            self._sets[split] = (x.astype(np.float32), (x @ self._teacher).argmax(axis=1))
        return self._sets[split]


class Drawn(DatasetBase, ABC):
    """`samples` for training, an eighth of that for validation, each drawn from its own stream when it
    is asked for."""

    whole = True

    def __init__(self, samples: int, batch: int, val_batch: int, seed: int) -> None:
        self.train_samples, self.val_samples = samples, -(-samples // 8)
        self._seed = seed
        self._orders: dict[Split, Order] = {
            "train": Order(samples, batch, seed, shuffle=True),
            "val": Order(self.val_samples, val_batch),
        }

    @abstractmethod
    def draw(self, split: Split, index: int) -> dict[str, NDArray[Any]]:
        """One sample, by key."""

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        made = [self.draw(split, i) for i in self._orders[split].indices(step, start, stop).tolist()]
        return pick({key: np.stack([sample[key] for sample in made]) for key in self.sample}, keys)

    def uniforms(self, split: Split, index: int, n: int) -> NDArray[np.float64]:
        """`n` numbers of [0, 1) that belong to this sample alone."""
        return uniforms(self._seed, f"{split} sample", index, 0, n)


class Clicks(Drawn):
    """Whether a user clicks, from numbers and categories, as for a recommender (Naumov et al. 2019).

    "dense" float32 (B, dense) with mean 0 and variance 1; "categories" int64 (B, tables, bag), those
    of table t below tables[t], small ones more frequent; "labels" float32 (B,): 1 where a hidden
    linear function of both is positive.
    """

    def __init__(
        self,
        dense: int,
        tables: tuple[int, ...],
        bag: int,
        samples: int,
        batch: int,
        val_batch: int,
        seed: int,
    ) -> None:
        super().__init__(samples, batch, val_batch, seed)
        self.sample = {
            "dense": TensorSpec((dense,), "float32"),
            "categories": TensorSpec((len(tables), bag), "int64"),
            "labels": TensorSpec((), "float32"),
        }
        self._dense, self._rows, self._bag = dense, np.array(tables, dtype=np.int64)[:, None], bag
        self._weights = centred(uniforms(seed, "teacher", 0, 0, dense)) / math.sqrt(dense)

    def draw(self, split: Split, index: int) -> dict[str, NDArray[Any]]:
        u = self.uniforms(split, index, self._dense + len(self._rows) * self._bag)
        dense = centred(u[: self._dense])
        categories = np.floor(self._rows * u[self._dense :].reshape(-1, self._bag) ** 2).astype(np.int64)
        # The teacher's weight of a row is a hash of it (Knuth's golden section): no table to keep.
        table = np.arange(len(self._rows), dtype=np.uint64)[:, None] << np.uint64(40)
        hashed = (categories.astype(np.uint64) + table + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        worth = centred((hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53)
        score = dense @ self._weights + worth.sum() / math.sqrt(worth.size)
        return {
            "dense": dense.astype(np.float32),
            "categories": categories,
            "labels": np.array(score > 0, dtype=np.float32),
        }


def centred(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """From [0, 1) to mean 0 and variance 1."""
    return (u - 0.5) * math.sqrt(12)
