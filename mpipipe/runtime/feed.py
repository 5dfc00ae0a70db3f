"""What the stages of one rank read: the micro-batches of a step, and the shapes that all ranks must know.

    fixed     every micro-batch of so many rows has the shapes `data.specs(rows)`; nothing to agree on
    varying   rank 0 looks, and tells the others the shapes of the step
    stream    rank 0 reads (data that can be read once only) and sends to those whose stages read

Labels are read before the first forward, for the weight of the loss, and kept until their forward, as is
what another stage of the rank reads later. What comes next is loaded by a thread meanwhile (a fork beside MPI
would be unsafe): all labels of the next step, so that no rank waits for them when it begins, and a few
micro-batches of the rest.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

from mpipipe.cluster.comm import Communicator
from mpipipe.errors import DataError
from mpipipe.graph.program import Batch, Mode, Specs, empty, spec
from mpipipe.runtime.prefetch import Prefetch
from mpipipe.runtime.transport import as_bytes
from mpipipe.values import Split, TensorSpec

AHEAD = 2  # micro-batches that are loaded before they are asked for
Bounds = tuple[tuple[int, int], ...]
Keys = frozenset[str]
# (mode, specs, rank, micro-batch, of how many) -> the keys that a rank reads before the step, and at the
# forward of each of its stages
Reads = Callable[[Mode, Specs, int, int, int], tuple[Keys, tuple[Keys, ...]]]


class Request(NamedTuple):
    """Samples [start, stop) of the batch of a step."""

    split: Split
    step: int
    start: int
    stop: int
    keys: Keys

    def __str__(self) -> str:
        """For people."""
        if not self.keys:
            return f"the batch of {self.split} step {self.step}"
        return (
            f"{', '.join(sorted(self.keys))} of samples {self.start} to {self.stop - 1} of {self.split} step "
            f"{self.step}"
        )


class Data(Protocol):
    """The part of a data set that training needs (`mpipipe.data.base.Dataset`)."""

    @property
    def varying(self) -> bool: ...
    @property
    def exact(self) -> bool: ...
    @property
    def whole(self) -> bool:
        """Loading some keys takes as long as loading all."""
        ...

    def specs(self, rows: int) -> Specs: ...
    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch: ...


class Stream(Protocol):
    """Data that is read in order, once."""

    def next_batch(self, split: Split, step: int) -> Batch | None:
        """The whole batch of a step; None at the end."""
        ...


class Source(Protocol):
    """Where a job gets its micro-batches from."""

    specs: Sequence[Specs]

    def peek(self, micro: int, keys: frozenset[str]) -> Batch:
        """Some keys of a micro-batch, which will be asked for again."""
        ...

    def take(self, micro: int, keys: frozenset[str]) -> Batch: ...

    def name_of(self, sample: int) -> str:
        """What the user calls a sample of the batch; "" where that is not known."""
        ...


class Given:
    """Micro-batches that are already here."""

    def __init__(self, micros: Sequence[Batch], specs: Sequence[Specs]) -> None:
        self.micros, self.specs = micros, specs

    def peek(self, micro: int, keys: frozenset[str]) -> Batch:
        return {k: self.micros[micro][k] for k in keys}

    take = peek

    def name_of(self, sample: int) -> str:
        return ""


def specs_of(batch: Batch) -> Specs:
    return {key: spec(t) for key, t in batch.items()}


def rows_of(batch: Batch) -> int:
    """Samples of a batch: the first size of its tensors. Raises DataError where they differ."""
    rows = {key: t.shape[0] if t.dim() else 0 for key, t in batch.items()}
    if len(set(rows.values())) != 1:
        raise DataError(
            f"the tensors of a batch have different numbers of samples: {rows}; "
            "the first dimension of each is the sample"
        )
    found = next(iter(rows.values()))
    if found == 0:
        raise DataError("a batch without a sample; give at least one")
    return found


def slices(batch: Batch, bounds: Bounds) -> list[Batch]:
    return [{key: t[start:stop] for key, t in batch.items()} for start, stop in bounds]


class Feed:
    """One for each rank. first: specs of the primary graph; during: entered around a wait for data, which may
    take minutes."""

    def __init__(
        self, comm: Communicator, data: Data, reads: Reads, first: Specs,
        during: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        self.comm, self.data, self.reads, self.first, self.during = comm, data, reads, first, during
        self.ahead: Prefetch[Request, Batch] = Prefetch(partial(_load, data), AHEAD)
        weakref.finalize(self, self.ahead.stop)

    def begin(self, mode: Mode, split: Split, step: int, bounds: Bounds) -> Source | None:
        """The micro-batches of a step; None where the data has ended. Collective unless the data is fixed.

        bounds: samples [start, stop) of each micro-batch; of a stream, only their number counts in training,
        only the size of the first in evaluation.
        """
        if not self.data.exact:
            return self._stream(mode, split, step, bounds)
        if not self.data.varying:
            specs = [self.data.specs(stop - start) for start, stop in bounds]
            loaded = _Loaded(self, mode, split, step, bounds, specs)
            loaded.expect()
            return loaded
        found: list[Specs] = []
        kept: list[Batch] = []
        if self.comm.rank == 0:
            every = frozenset(self.first)
            requests = [Request(split, step, *part, every) for part in bounds]
            self.ahead.expect(requests)
            kept = [self.get(request) for request in requests]
            found = [self.checked(specs_of(b), f"step {step}, micro-batch {i}") for i, b in enumerate(kept)]
            if split == "train":
                self.ahead.expect([Request(split, step + 1, *part, every) for part in bounds])
        source = _Loaded(self, mode, split, step, bounds, self.comm.bcast_object(found))
        source.kept.update(enumerate(kept))
        if self.comm.rank != 0:  # which has them all, and the next step's under way
            source.expect()
        return source

    def forget(self) -> None:
        """What is loaded ahead, but for data that can be read once only."""
        if self.data.exact:
            self.ahead.expect([])

    def get(self, request: Request) -> Batch:
        with self.during("its data"):
            return self.ahead.get(request)

    def checked(self, specs: Specs, place: str) -> Specs:
        """`specs`, if it has the keys, dtypes and dimensions of the first batch. Raises DataError."""
        for key in [*self.first, *specs]:
            had, has = self.first.get(key), specs.get(key)
            if had is None or has is None or had.dtype != has.dtype or len(had.shape) != len(has.shape):
                raise DataError(
                    f"{place}: the structure of the batch changes: {key!r} is {_text(has)}, in the first "
                    f"batch it is {_text(had)}; give every batch the same keys, dtypes and numbers of "
                    "dimensions"
                )
        return specs

    def _stream(self, mode: Mode, split: Split, step: int, bounds: Bounds) -> Source | None:
        micros: list[Batch] = []
        if self.comm.rank == 0:
            batch = self.get(Request(split, step, 0, 0, frozenset()))
            if split == "train":
                self.ahead.expect([Request(split, step + 1, 0, 0, frozenset())])
            if batch:
                rows = rows_of(batch)
                if rows < len(bounds) and mode == "train":
                    raise DataError(
                        f"step {step}: a batch of {rows} samples for {len(bounds)} micro-batches; give "
                        "larger batches (a DataLoader: drop_last=True), or lower micro_batches"
                    )
                largest = bounds[0][1] - bounds[0][0]
                parts = split_evenly(rows, len(bounds)) if mode == "train" else split_by(rows, largest)
                micros = slices(batch, parts)
        found = [self.checked(specs_of(m), f"step {step}, micro-batch {i}") for i, m in enumerate(micros)]
        specs = self.comm.bcast_object(found)
        if self.comm.rank == 0:
            self._send(mode, micros, specs)
        else:
            micros = self._receive(mode, specs)
        return Given(micros, specs) if specs else None

    def _send(self, mode: Mode, micros: Sequence[Batch], specs: Sequence[Specs]) -> None:
        """One message at a time to each rank: nothing else is under way between two steps."""
        for rank in range(1, self.comm.size):
            for i, (micro, shapes) in enumerate(zip(micros, specs, strict=True)):
                for key in self._every_key(mode, shapes, rank, i, len(specs)):
                    self.comm.wait(self.comm.isend(as_bytes(micro[key].contiguous()), rank, 0))

    def _receive(self, mode: Mode, specs: Sequence[Specs]) -> list[Batch]:
        micros = []
        for i, shapes in enumerate(specs):
            micro = {}
            for key in self._every_key(mode, shapes, self.comm.rank, i, len(specs)):
                micro[key] = empty(shapes[key])
                self.comm.wait(self.comm.irecv(as_bytes(micro[key]), 0, 0))
            micros.append(micro)
        return micros

    def _every_key(self, mode: Mode, specs: Specs, rank: int, micro: int, n_micro: int) -> list[str]:
        before, stages = self.reads(mode, specs, rank, micro, n_micro)
        return sorted(before.union(*stages))


def _load(data: Data, request: Request) -> Batch:
    """On the thread that loads; without a reference to the feed, so that both can end."""
    try:
        if data.exact:
            return data.batch(*request)
        stream: Stream = data  # type: ignore[assignment]
        return stream.next_batch(request.split, request.step) or {}
    except (StopIteration, SystemExit) as error:  # one rank must not take it for the end, and leave
        raise DataError(
            f"{request.split} step {request.step}: the data set raised {error!r}; only a plain iterable may "
            "end"
        ) from error


class _Loaded:
    """Micro-batches that this rank loads for itself."""

    def __init__(
        self, feed: Feed, mode: Mode, split: Split, step: int, bounds: Bounds, specs: Sequence[Specs]
    ) -> None:
        self.feed, self.split, self.step, self.bounds, self.specs = feed, split, step, bounds, specs
        self.kept: dict[int, Batch] = {}
        rank, n = feed.comm.rank, len(specs)
        before, stages = zip(*(feed.reads(mode, s, rank, i, n) for i, s in enumerate(specs)), strict=True)
        later = [frozenset[str]().union(*of_micro) for of_micro in stages]
        self.left = [Counter(itertools.chain(*of_micro)) for of_micro in stages]  # forwards that read a key
        if feed.data.whole:  # what costs the same is loaded once
            before = tuple(b | t if b else b for b, t in zip(before, later, strict=True))
        self.before = before
        self.later = tuple(t - b for b, t in zip(before, later, strict=True))

    def expect(self) -> None:
        """Lets the first of this step, and of the next, be loaded ahead."""
        now = [*self._requests(self.step, self.before), *self._requests(self.step, self.later)]
        if self.split == "train":
            now += self._requests(self.step + 1, self.later)
            self.feed.ahead.expect(now, self._requests(self.step + 1, self.before))
        else:
            self.feed.ahead.expect(now)

    def peek(self, micro: int, keys: Keys) -> Batch:
        if micro not in self.kept:
            self.kept[micro] = self._load(micro, self.before[micro])
        return {key: self.kept[micro][key] for key in keys}

    def take(self, micro: int, keys: Keys) -> Batch:
        found, left = self.kept.pop(micro, {}), self.left[micro]
        if missing := frozenset(keys - found.keys()):
            found |= self._load(micro, self.later[micro] if missing <= self.later[micro] else missing)
        left.subtract(keys)
        if rest := {key: t for key, t in found.items() if left[key] > 0}:
            self.kept[micro] = rest
        return {key: found[key] for key in keys}

    def name_of(self, sample: int) -> str:
        name_of = getattr(self.feed.data, "name_of", None)  # a user's data has names
        return name_of(self.split, self.step, sample) if name_of else ""

    def _requests(self, step: int, keys_of_micro: Sequence[Keys]) -> list[Request]:
        return [self._request(step, micro, keys) for micro, keys in enumerate(keys_of_micro) if keys]

    def _request(self, step: int, micro: int, keys: Keys) -> Request:
        return Request(self.split, step, *self.bounds[micro], keys)

    def _load(self, micro: int, keys: Keys) -> Batch:
        batch = self.feed.get(self._request(self.step, micro, keys))
        for key in keys:
            has, said = spec(batch[key]) if key in batch else None, self.specs[micro][key]
            if has != said:
                raise DataError(
                    f"{self.split} step {self.step}, micro-batch {micro}: {key!r} is {_text(has)}, the data "
                    f"set promised {_text(said)}; make its specs() and batch() agree"
                )
        return dict(batch)


def split_evenly(batch: int, parts: int) -> Bounds:
    """`parts` micro-batches that differ by one sample at most, larger ones first."""
    small, larger = divmod(batch, parts)
    stops = [small * (i + 1) + min(i + 1, larger) for i in range(parts)]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def split_by(batch: int, rows: int) -> Bounds:
    """Micro-batches of `rows` samples; the last one takes what is left."""
    return tuple((i, min(i + rows, batch)) for i in range(0, batch, rows))


def _text(s: TensorSpec | None) -> str:
    return "not there" if s is None else s.text
