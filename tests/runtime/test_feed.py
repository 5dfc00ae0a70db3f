"""Who loads what, who tells whom the shapes, and what is refused on the way."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from tiny import Case, plan_of
from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.data.base import DatasetBase
from mpipipe.data.pairs import Pairs
from mpipipe.errors import CaptureError, DataError
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import EncoderDecoder, cross_entropy
from mpipipe.runtime.feed import Feed, Source
from mpipipe.runtime.setting import set_threads
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import TensorSpec

Batch = dict[str, Tensor]
Asked = tuple[str, int, int, int, tuple[str, ...]]  # split, step, start, stop, keys
BOUNDS = ((0, 2), (2, 4), (4, 5))
FIRST = {"x": TensorSpec((2, 3), "float32"), "labels": TensorSpec((2,), "int64")}
# what ranks 0, 1 and 2 read at their forwards; the last one reads the labels before the step as well
KEYS: dict[int, tuple[str, ...]] = {0: ("x",), 1: (), 2: ("labels",)}


class Recorder(DatasetBase):
    """Remembers what it was asked for. `width` and `change`: of the batch from a step on."""

    sample = {"x": TensorSpec((3,), "float32"), "labels": TensorSpec((), "int64")}  # noqa: RUF012

    def __init__(self, varying: bool = False, exact: bool = True, whole: bool = False) -> None:
        self.varying, self.exact, self.whole = varying, exact, whole
        self.asked: list[Asked] = []
        self.steps = 4  # of a stream
        self.change: Callable[[int, Batch], Batch] = lambda step, batch: batch

    def batch(self, split: Any, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        self.asked.append((split, step, start, stop, tuple(sorted(keys))))
        return {k: t for k, t in self.made(step, start, stop).items() if k in keys}

    def next_batch(self, split: Any, step: int) -> Batch | None:
        self.asked.append((split, step, 0, 0, ()))
        return self.made(step, 0, 5) if step < self.steps else None

    def made(self, step: int, start: int, stop: int) -> Batch:
        width = 3 + (start if self.varying else 0)
        rows = torch.arange(start, stop)
        x = (10.0 * step + rows)[:, None].repeat(1, width)
        return self.change(step, {"x": x, "labels": 100 * step + rows})


def reads(mode: str, specs: Any, rank: int, *_: int) -> tuple[frozenset[str], tuple[frozenset[str], ...]]:
    return frozenset(KEYS[2] if rank == 2 else ()), (frozenset(KEYS[rank]),)


def feed(comm: Communicator, data: Recorder, of: Any = reads) -> Feed:
    return Feed(comm, data, of, FIRST)


def step(source: Source | None, rank: int) -> list[Batch]:
    """What one rank does with the micro-batches of a step."""
    assert source is not None
    before, (later,) = reads("train", {}, rank)
    for micro in range(len(source.specs)) if before else ():
        source.peek(micro, before)
    return [source.take(micro, later) for micro in range(len(source.specs))] if later else []


def recorded(ranks: int, steps: int = 2, **kind: bool) -> tuple[list[list[list[Batch]]], list[list[Asked]]]:
    """By rank: the micro-batches of each step, and what the data set was asked for."""

    def body(comm: Communicator) -> tuple[list[list[Batch]], list[Asked]]:
        data = Recorder(**kind)
        mine = feed(comm, data)
        found = [step(mine.begin("train", "train", s, BOUNDS), comm.rank) for s in range(steps)]
        mine.ahead.close()  # what is loaded ahead is loaded by now, or never
        return found, data.asked

    taken, asked = zip(*run_local(ranks, body), strict=True)
    return list(taken), list(asked)


def expect_batches(taken: list[list[list[Batch]]], **kind: bool) -> None:
    """Every rank has got its keys, of the right samples."""
    data = Recorder(**kind)
    for rank, steps in enumerate(taken):
        for number, micros in enumerate(steps):
            wanted = [data.made(number, *part) for part in BOUNDS]
            assert len(micros) == (len(BOUNDS) if KEYS[rank] else 0)
            for got, full in zip(micros, wanted, strict=bool(KEYS[rank])):
                assert set(got) == set(KEYS[rank])
                assert all(torch.equal(t, full[key]) for key, t in got.items())


def of_steps(asked: list[Asked], steps: int = 2) -> list[Asked]:
    """Without what was loaded ahead of a step that never came."""
    return [a for a in asked if a[1] < steps]


@pytest.mark.parametrize("kind", [{}, {"varying": True}, {"exact": False}])
def test_each_wait_for_data_is_told_to_what_watches_this_rank(kind: dict[str, bool]) -> None:
    def body(comm: Communicator) -> list[str]:
        waits = list[str]()

        @contextmanager
        def during(phase: str) -> Iterator[None]:
            waits.append(phase)
            yield

        mine = Feed(comm, Recorder(**kind), reads, FIRST, during)
        step(mine.begin("train", "train", 0, BOUNDS), comm.rank)
        mine.ahead.close()
        return waits

    zero, one, _ = run_local(3, body)
    assert zero == ["its data"] * (1 if "exact" in kind else len(BOUNDS))
    assert one == [], "it reads nothing"


# -- fixed shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_each_rank_loads_the_keys_that_its_stages_read_and_each_once(whole: bool) -> None:
    taken, asked = recorded(3, whole=whole)
    expect_batches(taken)
    for rank, found in enumerate(asked):
        each = [("train", s, *part, KEYS[rank]) for s in range(2) for part in BOUNDS if KEYS[rank]]
        assert sorted(of_steps(found)) == each, rank


@pytest.mark.parametrize(
    "stages", [({"x", "labels"},), ({"x"}, {"labels"}), ({"x", "labels"}, {"x", "labels"})]
)
def test_micro_batches_are_loaded_once_whoever_on_a_rank_reads_them(stages: tuple[set[str], ...]) -> None:
    """One rank reads the labels before the step, everything at the forwards of its stages."""
    of_stages = tuple(map(frozenset, stages))

    def all_of_it(
        mode: str, specs: Any, rank: int, *_: int
    ) -> tuple[frozenset[str], tuple[frozenset[str], ...]]:
        return frozenset({"labels"}), of_stages

    def body(comm: Communicator, whole: bool) -> list[Asked]:
        data = Recorder(whole=whole)
        mine = feed(comm, data, all_of_it)
        source = mine.begin("train", "train", 0, BOUNDS)
        assert source is not None
        for micro, (start, stop) in enumerate(BOUNDS):
            assert source.peek(micro, frozenset({"labels"}))["labels"].tolist() == list(range(start, stop))
        for keys in of_stages:  # a stage goes on to the next micro-batch, as another one comes later
            for micro, (start, stop) in enumerate(BOUNDS):
                taken = source.take(micro, keys)
                assert taken.keys() == keys
                assert all(len(t) == stop - start for t in taken.values())
        assert not source.kept  # type: ignore[attr-defined]
        mine.ahead.close()
        return of_steps(data.asked, 1)

    early = [("train", 0, *part, ("labels",)) for part in BOUNDS]
    late = [("train", 0, *part, ("x",)) for part in BOUNDS]
    assert run_local(1, lambda comm: body(comm, False)) == [early + late], "labels are not loaded again"
    assert run_local(1, lambda comm: body(comm, True)) == [
        [("train", 0, *part, ("labels", "x")) for part in BOUNDS]
    ]


def test_a_data_set_that_breaks_its_promise_is_refused() -> None:
    def body(comm: Communicator, change: Callable[[int, Batch], Batch]) -> None:
        data = Recorder()
        data.change = change
        mine = feed(comm, data)
        step(mine.begin("train", "train", 3, BOUNDS), 0)

    wider = r"train step 3, micro-batch 0: 'x' is float32\[2, 4\], the data set promised float32\[2, 3\]"
    with pytest.raises(DataError, match=wider):
        run_local(1, lambda comm: body(comm, lambda _, b: b | {"x": torch.zeros(2, 4)}))
    with pytest.raises(DataError, match=r"'x' is not there, the data set promised float32\[2, 3\]"):
        run_local(1, lambda comm: body(comm, lambda _, b: {"labels": b["labels"]}))


# -- shapes that vary --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rank_0_looks_and_all_agree_on_varying_shapes(ranks: int) -> None:
    shapes = {(2, 3), (2, 5), (1, 7)}

    def body(comm: Communicator) -> list[tuple[int, ...]]:
        source = feed(comm, Recorder(varying=True)).begin("train", "train", 1, BOUNDS)
        assert source is not None
        return [s["x"].shape for s in source.specs]

    by_rank = run_local(ranks, body)
    assert [set(found) for found in by_rank] == [shapes] * ranks
    taken, asked = recorded(ranks, varying=True)
    expect_batches(taken, varying=True)
    whole = [("train", s, *part, ("labels", "x")) for s in range(2) for part in BOUNDS]
    assert sorted(of_steps(asked[0])) == whole, "rank 0 loads each once, to look and to use"
    assert all(found == [] for found in asked[1:2]), "who reads nothing loads nothing"


CHANGES: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "lost key": (lambda b: {"labels": b["labels"]}, r"'x' is not there, in the first batch it is float32"),
    "new key": (lambda b: b | {"z": b["x"]}, r"'z' is float32\[2, \d\], in the first batch it is not there"),
    "dtype": (lambda b: b | {"x": b["x"].long()}, r"'x' is int64\[2, \d\], .* it is float32\[2, 3\]"),
    "dimensions": (lambda b: b | {"x": b["x"][..., None]}, r"'x' is float32\[2, \d, 1\], .* float32\[2, 3\]"),
}


# of a data set that is asked for keys, others cannot come
REFUSED = [("exact", change) for change in CHANGES] + [("varying", c) for c in CHANGES if c != "new key"]


@pytest.mark.parametrize(("kind", "change"), REFUSED)
def test_a_structure_that_changes_is_refused_on_every_rank(kind: str, change: str) -> None:
    changes, says = CHANGES[change]

    def body(comm: Communicator) -> None:
        data = Recorder(**{kind: kind == "varying"})
        data.change = lambda s, batch: changes(batch) if s == 1 else batch
        mine = feed(comm, data)
        for s in range(2):
            step(mine.begin("train", "train", s, BOUNDS), comm.rank)

    with pytest.raises(
        DataError, match=rf"step 1, micro-batch 0: the structure of the batch changes: {says}"
    ):
        run_local(2, body)


@pytest.mark.slow
def test_too_many_shapes_propose_buckets() -> None:
    """An encoder-decoder on texts of every length: each length would be captured anew."""
    data = Pairs(16, 12, 64, 8, 8, 3, varying=True, bucket=1)

    def model() -> EncoderDecoder:
        return EncoderDecoder(16, 1, 8, 2, 12, True, 0.0)

    def body(comm: Communicator) -> None:
        set_threads(1)
        variants = Variants(ModelSource(model, 3), cross_entropy, data.specs, 2, "fp32", max_shapes=1)
        case = Case("gpt", clip=None)
        trainer = Trainer(comm, variants, plan_of(case, "1f1b", ()), case.settings, data)
        trainer.step(0)

    with pytest.raises(
        CaptureError, match=r"(?s)2 shapes.*capture.max_shapes = 1.*source int64\[2, .*buckets"
    ):
        run_local(1, body)


# -- streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_stream_is_read_by_rank_0_and_sent_to_who_needs_it(ranks: int) -> None:
    taken, asked = recorded(ranks, exact=False)
    expect_batches(taken)
    assert of_steps(asked[0]) == [("train", s, 0, 0, ()) for s in range(2)], "once, in order"
    assert asked[1:] == [[]] * (ranks - 1)


def test_a_stream_ends_on_every_rank() -> None:
    def body(comm: Communicator) -> list[bool]:
        data = Recorder(exact=False)
        data.steps = 2
        mine = feed(comm, data)
        return [mine.begin("train", "train", s, BOUNDS) is not None for s in range(4)]

    assert run_local(3, body) == [[True, True, False, False]] * 3


def test_validation_is_not_read_ahead_of_a_stream() -> None:
    def body(comm: Communicator) -> list[Asked]:
        data = Recorder(exact=False)
        mine = feed(comm, data)
        assert mine.begin("eval", "val", 0, BOUNDS) is not None
        mine.ahead.close()
        return data.asked

    assert run_local(1, body) == [[("val", 0, 0, 0, ())]]


# -- the end -----------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Callable[[], int]:
    """Counts the threads that load."""

    def count() -> int:
        return sum(t.name == "mpipipe-prefetch" for t in threading.enumerate())

    gc.collect()
    until = time.monotonic() + 10
    while count() and time.monotonic() < until:  # those of earlier tests end without being waited for
        time.sleep(0.01)
    before = count()
    return lambda: count() - before


@pytest.mark.parametrize("during", [False, True], ids=["idle", "with batches ahead"])
@pytest.mark.slow
def test_the_thread_that_loads_ends_with_its_trainer(threads: Callable[[], int], during: bool) -> None:
    case = Case("mlp")
    tiny.warm(case)

    def body(comm: Communicator) -> int:
        set_threads(1)
        trainer = Trainer(comm, case.variants, plan_of(case, "1f1b", ()), case.settings, case.dataset)
        if during:
            trainer.step(0)
        return threads()

    assert run_local(1, body) == [1]
    gc.collect()
    for _ in range(1000):  # it is told to end, not waited for: the collector must not block
        if threads() == 0:
            break
        time.sleep(0.01)
    assert threads() == 0


def test_the_thread_may_be_the_one_that_collects_its_feed(threads: Callable[[], int]) -> None:
    """An object that ends is collected by whichever thread allocates next."""
    feeds: list[Feed] = []
    collected = threading.Event()

    class Collects(Recorder):
        def batch(self, *request: Any) -> Batch:
            feeds.clear()
            gc.collect()
            collected.set()
            return {}

    def body(comm: Communicator) -> None:
        feeds.append(feed(comm, Collects()))
        feeds[0].begin("train", "train", 0, BOUNDS)

    run_local(1, body)
    assert collected.wait(60)
    for thread in threading.enumerate():
        if thread.name == "mpipipe-prefetch":
            thread.join(60)
    assert threads() == 0
