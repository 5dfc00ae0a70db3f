"""What every data set offers, and the random draws they share.

A batch is a pure function of (seed, split, step, sample index): any rank computes any slice of any
step without a message, a sampler's state or a worker process, and a resumed run reads the same.
"""

from __future__ import annotations

import hashlib
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.values import TensorSpec

Split = Literal["train", "val"]


class Dataset(Protocol):
    @property
    def vocab(self) -> int | None:
        """Number of token ids; None when the samples are not tokens."""
        ...

    @property
    def tokens_per_sample(self) -> int:
        """What one sample counts for in tokens/s; 1 where a sample is not a text."""
        ...

    @property
    def unigram_entropy(self) -> float | None:
        """Nats per token of the token frequencies alone: the loss of a model that ignores its
        context. None when it means nothing."""
        ...

    def specs(self, rows: int) -> dict[str, TensorSpec]:
        """Keys, shapes and dtypes of a batch of `rows` samples."""
        ...

    def batch(
        self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """Samples [start, stop) of the batch of `step`, only the asked `keys`; keys that the data
        does not have are left out."""
        ...

    def encode(self, text: str) -> list[int] | None:
        """Token ids of a text; None when the data is not text."""
        ...

    def decode(self, ids: list[int]) -> str | None:
        """Inverse of `encode`; None when the data is not text."""
        ...


def _philox(seed: int, stream: str, step: int) -> np.random.Philox:
    """Philox4x64-10 (Salmon et al. 2011) keyed by a hash of seed and stream, `step` in the high
    half of its 256-bit counter: 2**128 numbers per step, no two steps overlap."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=16).digest(), "little")
    return np.random.Philox(key=key, counter=step << 128)


def generator(seed: int, stream: str, step: int) -> np.random.Generator:
    return np.random.Generator(_philox(seed, stream, step))


def draws(seed: int, stream: str, step: int, start: int, stop: int) -> NDArray[np.uint64]:
    """Numbers [start, stop) of the stream: the same whatever slice they are asked in."""
    skip = start % 4  # the generator makes four numbers at a time and advances by fours
    bits = _philox(seed, stream, step).advance(start // 4)
    return bits.random_raw(stop - start + skip)[skip:]


def uniforms(seed: int, stream: str, step: int, start: int, stop: int) -> NDArray[np.float64]:
    """As `draws`, in [0, 1) with 53 bits."""
    bits = draws(seed, stream, step, start, stop) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
