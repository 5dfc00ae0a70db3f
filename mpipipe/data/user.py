"""Data sets as users have them, made into ours.

one of ours         specs, batch(split, ...)    as it is
map-style           len(data), data[i]          shuffled once per epoch, collated here; exact
by micro-batch      data.batch(step, micro)     exact, if it is a function of its arguments
plain iterable      of whole batches            read on one rank, not exact: see `Stream`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from mpipipe.cluster.comm import Communicator
from mpipipe.data.base import Batch, Dataset, DatasetBase, Order, Specs, Split, lacking
from mpipipe.data.sources import ByMicroBatch, Collate, Indexed, Source
from mpipipe.data.structure import Structure, as_batch
from mpipipe.errors import DataError
from mpipipe.runtime.feed import rows_of, split_evenly

__all__ = ["Stream", "UserData", "as_batch", "from_user", "length"]

_EXAMPLES = 4  # micro-batches that are compared to learn whether shapes vary
_ABSENT = object()


def from_user(
    data: Any, val: Any = None, *, batch: int, micro_batches: int | None, names: Sequence[str],
    collate: Collate | None = None, shuffle: bool = True, seed: int = 0, varying: bool | None = None,
    val_batch: int | None = None, comm: Communicator | None = None,
) -> Dataset:  # fmt: skip
    """A data set as the trainer wants it; its kind is the first of those above that fits.

    val: validation data, of any kind that goes with `data`. batch: samples per step, in `micro_batches`
    parts; None where that is searched; val_batch: per batch of validation, None = the same. names: of the
    elements of a batch that is a tuple, that of the labels last. collate: list of samples -> batch; None =
    torch's default_collate. varying: the shapes of micro-batches differ in more than the number of samples;
    None = whether those of the first ones do. comm: spares the others a look at a plain iterable; collective
    then. Raises DataError.
    """
    if hasattr(data, "specs") and hasattr(data, "batch"):
        return _one_of_ours(data, val)
    micro_rows = math.ceil(batch / (micro_batches or 1))
    parts = split_evenly(batch, micro_batches or min(batch, _EXAMPLES))
    number = {part: micro for micro, part in enumerate(parts)}
    held_out = _source(val, "val", (val_batch or batch, seed, False), collate, lambda a, b: a // micro_rows)
    source = _source(data, "train", (batch, seed, shuffle), collate, lambda *part: number[part])
    if source is None and isinstance(data, Iterable):
        known_val = held_out if isinstance(held_out, Indexed) else val
        return Stream(data, known_val, batch, names, bool(varying), comm)
    if source is None or (held_out is None and val is not None):
        what, found = ("data", data) if source is None else ("val", val)
        raise DataError(
            f"{what} is a {type(found).__name__}; expected len({what}) and {what}[i], or {what}.batch(step, "
            "micro); an iterable of batches may be the training data, and then the validation data as well"
        )
    if micro_batches is None and (isinstance(source, ByMicroBatch) or isinstance(held_out, ByMicroBatch)):
        raise DataError(
            "micro_batches = 'auto', but the data are asked for by micro-batch, data.batch(step, micro), so "
            "they decide how many there are; set micro_batches to that number"
        )
    seen = parts[: _EXAMPLES if varying is None else 1]
    raw = [source(0, *part) for part in seen]
    with _samples_named(source, 0, seen[0][0], seen[-1][1]):
        examples = [as_batch(r, names, "step 0") for r in raw]
        structure = Structure.of(examples, [stop - start for start, stop in seen], varying, "step 0")
    return UserData(source, held_out, names, structure)


def length(data: Any) -> int | None:
    """None where data has none: a DataLoader has `__len__`, which raises over an IterableDataset."""
    try:
        return len(data)
    except TypeError:
        return None


def _source(
    data: Any, split: Split, order: tuple[int, int, bool], collate: Collate | None,
    micro_of: Callable[[int, int], int],
) -> Source | None:  # fmt: skip
    """None when the data is neither map-style nor by micro-batch. order: arguments of `Order`."""
    if all(hasattr(data, m) for m in ("__len__", "__getitem__")) and not isinstance(data, IterableDataset):
        if len(data) == 0:
            raise DataError(f"the {split} data, a {type(data).__name__}, is empty; give at least one sample")
        return Indexed(data, Order(len(data), *order), collate, order[1], split)
    return ByMicroBatch(data, micro_of) if hasattr(data, "batch") else None


@contextmanager
def _samples_named(source: Source, step: int, start: int, stop: int) -> Iterator[None]:
    """Says with a DataError which of the samples [start, stop) is unlike the others."""
    try:
        yield
    except DataError as error:
        if isinstance(source, Indexed):
            error.add_note(source.unlike(step, start, stop))
        raise


def _one_of_ours(data: Any, val: Any) -> Dataset:
    if missing := lacking(data):
        raise DataError(
            f"the data set {type(data).__name__} lacks {', '.join(missing)}; derive it from "
            "mpipipe.data.base.DatasetBase, which has them"
        )
    if val is not None:
        raise DataError(f"{type(data).__name__} has its own validation batches; leave val out")
    return data


class UserData(DatasetBase):
    """Sources whose batches are named and checked. Ask for whole micro-batches: only they have a shape.
    Where a batch differs in keys, dtypes or shapes from the first ones, `batch` raises DataError."""

    whole = True

    def __init__(self, train: Source, val: Source | None, names: Sequence[str], structure: Structure) -> None:
        self._sources: dict[Split, Source | None] = {"train": train, "val": val}
        self._names, self._structure = names, structure
        self.varying = structure.varying
        self.train_samples, self.val_samples = train.samples, val.samples if val else 0

    def specs(self, rows: int) -> Specs:
        return self._structure.of_rows(rows)

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        if not keys:
            return {}
        source = self._sources[split]
        if source is None:
            raise DataError("there is no validation data; give some as val, or do not evaluate")
        raw = source(step, start, stop)
        with _samples_named(source, step, start, stop):
            found = as_batch(raw, self._names, f"{split} step {step}")
            self._structure.check(found, stop - start, f"{split} step {step}")
        return {key: t for key, t in found.items() if key in keys}

    def name_of(self, split: Split, step: int, sample: int) -> str:
        """What the user calls a sample of a batch: "data[17]"; "" where it has no name."""
        source = self._sources[split]
        return source.name(step, sample) if isinstance(source, Indexed) else ""


class Stream(DatasetBase):
    """Whole batches from a plain iterable, in order: `next_batch` on rank 0, who sends them on.

    Training begins again where the iterable can (a DataLoader), and ends where it cannot (a generator).
    Validation begins again with each evaluation and is read to its end. A list is map-style, not a stream.
    """

    exact = False

    def __init__(
        self, data: Iterable[Any], val: Iterable[Any] | None, batch: int, names: Sequence[str], varying: bool,
        comm: Communicator | None,
    ) -> None:  # fmt: skip
        _check_iterables(data, val)
        self.varying, self._names = varying, names
        self.val_samples = 0 if val is None else getattr(val, "samples", None)
        self._data: dict[Split, Iterable[Any]] = {"train": data, "val": () if val is None else val}
        self._iterators: dict[Split, Iterator[Any]] = {"train": iter(()), "val": iter(())}
        structure = self._look(batch) if comm is None or comm.rank == 0 else None
        found = structure if comm is None else comm.bcast_object(structure)
        assert found is not None
        self._structure: Structure = found

    def specs(self, rows: int) -> Specs:
        return self._structure.of_rows(rows)

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        raise DataError("a plain iterable gives its batches in order only; give map-style data instead")

    def next_batch(self, split: Split, step: int) -> Batch | None:
        """The batch of the next step; None at the end. Raises DataError when it is unlike the first one."""
        if split == "val" and step == 0:
            self._iterators["val"] = iter(self._data["val"])
        raw = self._next(split)
        if raw is _ABSENT:
            return None
        found = as_batch(raw, self._names, f"{split} step {step}")
        self._structure.check(found, rows_of(found), f"{split} step {step}")
        return found

    def _look(self, batch: int) -> Structure:
        """At the first batch, which will be the first one to be given."""
        raw = self._next("train")
        if raw is _ABSENT:
            raise DataError("data ended before its first batch; give an iterable of batches")
        self._iterators["train"] = chain([raw], self._iterators["train"])
        first = as_batch(raw, self._names, "the first batch")
        if (rows := rows_of(first)) != batch:
            raise DataError(
                f"the first batch of data holds {rows} samples, the training batch is to be {batch}; make "
                "both the same, or give the samples one by one as map-style data"
            )
        return Structure.of([first], [batch], self.varying, "the first batch")

    def _next(self, split: Split) -> Any:
        raw = next(self._iterators[split], _ABSENT)
        if raw is _ABSENT and split == "train":  # the end, or not yet begun
            self._iterators[split] = iter(self._data[split])
            raw = next(self._iterators[split], _ABSENT)
        return raw


def _check_iterables(data: Any, val: Any) -> None:
    for name, given in (("data", data), ("val", val)):
        if isinstance(given, DataLoader) and given.num_workers > 0:
            raise DataError(
                f"{name} is a DataLoader with num_workers = {given.num_workers}: no process may fork beside "
                "MPI; set it to 0, or better give its dataset instead: loading overlaps computing by itself"
            )
    if val is not None and (not isinstance(val, Iterable) or isinstance(val, Iterator)):
        raise DataError(
            f"val is a {type(val).__name__}, which cannot be read again for the next evaluation; give "
            "map-style data (a list of samples is), or an iterable of batches such as a DataLoader"
        )
