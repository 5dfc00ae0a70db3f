"""What every micro-batch of a user's data must look like: named tensors, like those of the first ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpipipe.data.base import Batch, Specs
from mpipipe.errors import DataError
from mpipipe.graph.program import spec
from mpipipe.values import DTYPE_BYTES, TensorSpec

_SAME = "give every batch the same keys, dtypes and shapes"


def as_batch(raw: Any, names: Sequence[str], where: str = "the batch") -> Batch:
    """A dict of tensors. What has no keys is named in the order of `names`, its last element by the last
    name: that of the labels, whether or not `forward` was given all it can take. Arrays become tensors.
    Raises DataError."""
    if isinstance(raw, Mapping):
        return {str(key): _tensor(value, f"{where}: '{key}'") for key, value in raw.items()}
    values = list(raw) if isinstance(raw, tuple | list) else [raw]
    if len(values) > len(names):
        raise DataError(
            f"{where}: a batch of {len(values)} elements, names for {len(names)} ({', '.join(names)}); "
            "return a dict, with the parameter names of forward as keys"
        )
    known = [names[0]] if len(values) == 1 else [*names[: len(values) - 1], names[-1]]
    return {key: _tensor(value, f"{where}: '{key}'") for key, value in zip(known, values, strict=True)}


def _tensor(value: Any, where: str) -> torch.Tensor:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.array(value))  # a copy: what is read-only or strided stays the user's
    if not isinstance(value, torch.Tensor) or spec(value).dtype not in DTYPE_BYTES:
        kind = f"tensor of {spec(value).dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise DataError(
            f"{where} is a {kind}; expected a tensor or array of {', '.join(DTYPE_BYTES)}: convert it in the "
            "data set or in collate"
        )
    return value


@dataclass(frozen=True)
class Structure:
    """Of a micro-batch of `rows` samples. A tensor whose first dimension is `rows` grows with it."""

    specs: Specs
    rows: int
    varying: bool  # the other dimensions may change

    @staticmethod
    def of(examples: Sequence[Batch], rows: Sequence[int], varying: bool | None, where: str) -> Structure:
        """Like the largest example. varying: None = whether the examples' shapes differ."""
        for example, n in zip(examples, rows, strict=True):
            if not any(t.shape[:1] == (n,) for t in example.values()):
                shapes = {key: tuple(t.shape) for key, t in example.items()}
                raise DataError(f"{where}: expected {n} samples as the first dimension, found {shapes}")
        sizes = [sum(t.nbytes for t in example.values()) for example in examples]
        most = sizes.index(max(sizes))
        specs = {key: spec(t) for key, t in examples[most].items()}
        loose = Structure(specs, rows[most], True)
        strict = Structure(specs, rows[most], False)
        pairs = list(zip(examples, rows, strict=True))
        for example, n in pairs:
            loose.check(example, n, where)
        differ = any(strict.problem(example, n) for example, n in pairs)
        return loose if varying or (varying is None and differ) else strict

    def of_rows(self, rows: int) -> Specs:
        return {
            key: TensorSpec((rows, *s.shape[1:]), s.dtype) if s.shape[:1] == (self.rows,) else s
            for key, s in self.specs.items()
        }

    def check(self, batch: Batch, rows: int, where: str) -> None:
        """Raises DataError that names the place, the key and both."""
        if problem := self.problem(batch, rows):
            raise DataError(f"{where}: {problem}")

    def problem(self, batch: Batch, rows: int) -> str | None:
        if batch.keys() != self.specs.keys():
            return f"the batch has the keys {sorted(batch)}, the first one {sorted(self.specs)}; {_SAME}"
        for key, wanted in self.of_rows(rows).items():
            found = spec(batch[key])
            fits = _frame(found) == _frame(wanted) if self.varying else found == wanted
            if not fits:
                return (
                    f"'{key}' is {found.dtype} {found.shape}, by the first batches it should be "
                    f"{wanted.dtype} {wanted.shape}; {_SAME}"
                )
        return None


def _frame(s: TensorSpec) -> tuple[object, ...]:
    """What stays even where lengths vary."""
    return s.dtype, len(s.shape), s.shape[:1]
