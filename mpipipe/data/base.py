"""What every data set offers, and the random draws they share.

A batch is a pure function of (seed, split, step, sample index): any rank computes any slice of any
step without a message, a sampler's state or a worker process, and a resumed run reads the same.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.graph.program import Batch as Batch
from mpipipe.graph.program import Specs as Specs
from mpipipe.values import Split as Split
from mpipipe.values import TensorSpec

IGNORED = -100  # a label that counts for nothing, as in torch
PAD = 0  # the token id that fills short texts up
SAME_DATA = (  # the next move where ranks read different samples
    "put the data where every node sees it; call torch.manual_seed before random numbers make it"
)
_ABSENT = object()


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

    @property
    def train_samples(self) -> int | None:
        """Those of an epoch; None where they have no end, or are not counted."""
        ...

    @property
    def val_samples(self) -> int | None:
        """Size of the validation set, 0 where there is none; None when it has no natural end, or where only
        reading it to its end can tell (`exact` is False)."""
        ...

    @property
    def varying(self) -> bool:
        """The shapes of micro-batches may differ from `specs`, but for the number of samples."""
        ...

    @property
    def whole(self) -> bool:
        """Loading some keys of a batch takes as long as loading all."""
        ...

    @property
    def exact(self) -> bool:
        """False: a plain iterable, which a resumed run reads from its start again."""
        ...

    def specs(self, rows: int) -> Specs:
        """Keys, shapes and dtypes of a batch of `rows` samples."""
        ...

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        """Samples [start, stop) of the batch of `step`, only the asked `keys`; keys that the data
        does not have are left out."""
        ...

    def encode(self, text: str) -> list[int] | None:
        """Token ids of a text; None when the data is not text."""
        ...

    def decode(self, ids: list[int]) -> str | None:
        """Inverse of `encode`; None when the data is not text."""
        ...


class DatasetBase:
    """What most data sets have in common: one states only what differs, `sample` and `batch`."""

    vocab: int | None = None
    tokens_per_sample: int = 1
    train_samples: int | None = None
    val_samples: int | None = None
    varying: bool = False
    exact: bool = True
    whole: bool = False
    sample: Specs  # of one sample, without the dimension of the batch

    @property
    def unigram_entropy(self) -> float | None:
        return None

    def specs(self, rows: int) -> Specs:
        return {key: TensorSpec((rows, *s.shape), s.dtype) for key, s in self.sample.items()}

    def encode(self, text: str) -> list[int] | None:
        return None

    def decode(self, ids: list[int]) -> str | None:
        return None


def lacking(data: object) -> list[str]:
    """What of `Dataset` is not there, by name."""
    offered = sorted(name for name in vars(Dataset) if not name.startswith("_"))
    return [name for name in offered if inspect.getattr_static(data, name, _ABSENT) is _ABSENT]


def fingerprint(data: Dataset, rows: int) -> str:
    """sha256 (hex) of the first `rows` samples of the first training batch, all keys of them."""
    found = data.batch("train", 0, 0, rows, frozenset(data.specs(rows)))
    h = hashlib.sha256()
    for key, t in sorted(found.items()):
        h.update(f"{key} {t.dtype} {tuple(t.shape)}\n".encode())
        h.update(t.contiguous().view(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def pick(arrays: Mapping[str, NDArray[Any]], keys: frozenset[str]) -> Batch:
    return {key: torch.from_numpy(array) for key, array in arrays.items() if key in keys}


# -- order -------------------------------------------------------------------------------------


class Order:
    """Which of `n` samples stand in which batch: sample i of step s is number s * batch + i of an
    endless list of epochs, each of which visits every sample once, shuffled in its own way or as
    they stand."""

    def __init__(self, n: int, batch: int, seed: int = 0, shuffle: bool = False) -> None:
        self.n, self.batch, self._shuffle = n, batch, shuffle
        # Two: a batch may end one epoch and begin the next.
        self._permutation = lru_cache(maxsize=2)(partial(_permutation, n, seed))

    def indices(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        first = step * self.batch
        epoch, place = np.divmod(np.arange(first + start, first + stop, dtype=np.int64), self.n)
        if self._shuffle:
            for e in np.unique(epoch).tolist():
                place[epoch == e] = self._permutation(e)[place[epoch == e]]
        return place


def _permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Sorted draws and not numpy's shuffle, whose order numpy may change."""
    return np.argsort(draws(seed, "order", epoch, 0, n), kind="stable")


# -- draws -------------------------------------------------------------------------------------


def _philox(seed: int, stream: str, step: int) -> np.random.Philox:
    """Philox4x64-10 (Salmon et al. 2011) keyed by a hash of seed and stream, `step` in the high
    half of its 256-bit counter: 2**128 numbers per step, no two steps overlap."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=16).digest(), "little")
    return np.random.Philox(key=key, counter=step << 128)


def generator(seed: int, stream: str) -> np.random.Generator:
    return np.random.Generator(_philox(seed, stream, 0))


def draws(seed: int, stream: str, step: int, start: int, stop: int) -> NDArray[np.uint64]:
    """Numbers [start, stop) of the stream: the same whatever slice they are asked in."""
    skip = start % 4  # the generator makes four numbers at a time and advances by fours
    bits = _philox(seed, stream, step).advance(start // 4)
    return bits.random_raw(stop - start + skip)[skip:]


def uniforms(seed: int, stream: str, step: int, start: int, stop: int) -> NDArray[np.float64]:
    """As `draws`, in [0, 1) with 53 bits."""
    bits = draws(seed, stream, step, start, stop) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
