"""What users bring: samples, micro-batches or batches, as dicts, tuples or arrays."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from mpipipe.checks import check_samples
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.config import parse
from mpipipe.data import open_dataset
from mpipipe.data.base import Dataset, DatasetBase
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.data.user import Stream, as_batch, from_user
from mpipipe.errors import ConfigError, DataError
from mpipipe.values import TensorSpec

NAMES = ["x", "labels"]
BOTH = frozenset(NAMES)
X, Y = torch.arange(30.0).view(10, 3), torch.arange(10)


class Samples:
    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return X[i], int(Y[i])


def user(data: Any, val: Any = None, **how: Any) -> Dataset:
    return from_user(data, val, **({"batch": 4, "micro_batches": 2, "names": NAMES} | how))


def ids(data: Dataset, split: Any, step: int, *bounds: int) -> list[int]:
    return [i for a, b in pairwise(bounds) for i in data.batch(split, step, a, b, BOTH)["labels"].tolist()]


# -- map-style ---------------------------------------------------------------------------------


def test_what_a_resume_knows_data_by_can_be_kept() -> None:
    """As JSON, whatever integers a data set of a user's own counts by."""

    class Counted(SyntheticTokens):
        def __init__(self) -> None:
            super().__init__(vocab=5, context=4, seed=0)
            self.train_samples = np.int64(8)

    found = run_local(1, lambda comm: check_samples(comm, Counted(), 2))[0]
    assert json.loads(json.dumps(found))["samples"] == 8


@pytest.mark.parametrize(
    "data", [Samples(), TensorDataset(X, Y), [{"x": X[i], "labels": Y[i]} for i in range(10)]]
)
def test_map_style_visits_every_sample_once_per_epoch(data: Any) -> None:
    mine = user(data)
    assert mine.specs(2) == {"x": TensorSpec((2, 3), "float32"), "labels": TensorSpec((2,), "int64")}
    seen = [i for step in range(5) for i in ids(mine, "train", step, 0, 2, 4)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    batch = mine.batch("train", 1, 0, 2, BOTH)
    assert torch.equal(batch["x"], X[batch["labels"]])
    named = [mine.name_of("train", 1, sample) for sample in range(2)]  # type: ignore[attr-defined]
    assert named == [f"data[{label}]" for label in batch["labels"].tolist()]
    assert set(mine.batch("train", 1, 0, 2, frozenset(["x"]))) == {"x"}
    assert (mine.exact, mine.varying, mine.train_samples, mine.val_samples) == (True, False, 10, 0)
    assert ids(user(data, seed=1), "train", 0, 0, 4) != seen[:4]
    assert ids(user(data, shuffle=False), "train", 2, 0, 2, 4) == [8, 9, 0, 1]


def test_validation_is_in_order() -> None:
    mine = user(Samples(), Samples(5))
    assert mine.val_samples == 5
    assert ids(mine, "val", 0, 0, 2, 4) + ids(mine, "val", 1, 0, 1) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="there is no validation data"):
        user(Samples()).batch("val", 0, 0, 2, BOTH)


class Augmented(Samples):
    def __getitem__(self, i: int) -> Any:
        return torch.tensor([torch.rand(()), np.random.rand(), random.random()]), i


def test_random_samples_are_a_function_of_seed_step_and_place() -> None:
    mine = user(Augmented())
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    whole = mine.batch("train", 3, 0, 2, BOTH)
    rows = [mine.batch("train", 3, i, i + 1, BOTH)["x"] for i in (1, 0)]
    assert torch.equal(torch.cat(rows[::-1]), whole["x"])
    assert len(set(whole["x"].flatten().tolist())) == 6
    assert not torch.equal(user(Augmented(), seed=1).batch("train", 3, 0, 2, BOTH)["x"], whole["x"])
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(state[0], after[0])
    assert state[1:] == after[1:], "the user's generators are left alone"


def pad(samples: list[Any]) -> Any:
    width = max(len(s) for s in samples)
    return {"tokens": torch.stack([torch.nn.functional.pad(s, (0, width - len(s))) for s in samples])}


def test_lengths_that_differ_are_found_or_told_or_refused() -> None:
    texts = [torch.ones(n, dtype=torch.int64) for n in (3, 4, 7, 5, 2, 6, 8, 9)]
    mine = user(texts, collate=pad, shuffle=False)
    assert mine.varying
    assert mine.specs(2)["tokens"].shape == (2, 7), "the largest of those that were looked at"
    keys = frozenset(["tokens"])
    assert mine.batch("train", 1, 2, 4, keys)["tokens"].shape == (2, 9)
    late = [torch.ones(4)] * 6 + [torch.ones(5)] * 2
    assert user(late, collate=pad, shuffle=False, varying=True).varying
    fixed = user(late, collate=pad, shuffle=False)
    assert not fixed.varying
    with pytest.raises(DataError, match=r"train step 1: 'tokens' is float32 \(2, 5\).*float32 \(2, 4\)"):
        fixed.batch("train", 1, 2, 4, keys)
    with pytest.raises(
        DataError, match=r"samples cannot be put together: data\[1\] is int64\[4\], but data\[0\]"
    ):
        user(texts, shuffle=False)


def test_a_sample_that_is_unlike_the_others_is_named() -> None:
    samples = [{"x": X[i], "labels": Y[i]} for i in range(4)] + [{"x": X[4]}] + [{"x": X[5], "labels": 7}]
    mine = user(samples, shuffle=False, varying=False)
    expected = (
        r"data\[4\] is {x: float32\[3\]}, but data\[3\] {labels: int64\[\], x: float32\[3\]}; give them"
    )
    with pytest.raises(DataError, match=expected):
        mine.batch("train", 0, 3, 5, BOTH)
    with pytest.raises(DataError, match=r"val\[4\] is {x: float32\[3\]}, but val\[3\]"):
        user(samples[:4], samples, shuffle=False).batch("val", 0, 3, 5, BOTH)


@pytest.mark.parametrize("collate", [None, default_collate])
def test_a_sample_that_makes_another_batch_is_named(collate: Any) -> None:
    """torch puts the keys of the first sample together, and what is no integer with integers; that step 0 has
    such a batch is seen when the data are taken, and that all of one micro-batch are so, too."""
    usual, other = {"x": X[0], "labels": Y[0]}, {"x": X[0], "labels": Y[0].float()}
    forms = "{labels: float32[], x: float32[3]}", "{labels: int64[], x: float32[3]}"
    with pytest.raises(DataError, match="by the first batches") as caught:
        user([usual] * 3 + [other], shuffle=False, collate=collate)
    assert caught.value.__notes__ == [f"data[3] is {forms[0]}, but data[0] {forms[1]}"]
    samples = [usual] * 8 + [{"x": X[0]}] + [usual] * 3 + [other] * 4
    later = user(samples, shuffle=False, collate=collate, batch=8)
    with pytest.raises(DataError, match=r"the batch has the keys \['x'\]") as caught:
        later.batch("train", 1, 0, 4, BOTH)
    assert caught.value.__notes__ == [f"data[8] is {{x: float32[3]}}, but data[9] {forms[1]}"]
    with pytest.raises(DataError, match="by the first batches") as caught:
        later.batch("train", 1, 4, 8, BOTH)
    assert caught.value.__notes__ == [f"each of its samples is {forms[0]}; the first is data[12]"]


def test_long_lists_are_said_by_their_number() -> None:
    with pytest.raises(DataError, match=r"data\[1\] is 8 times int, but data\[0\] 9 times int"):
        user([[0] * 9, [0] * 8] * 4, shuffle=False)


def test_what_a_sample_raises_says_which_one_it_was() -> None:
    class Lost(Samples):
        def __getitem__(self, i: int) -> Any:
            return {}["path"] if i == 6 else super().__getitem__(i)

    with pytest.raises(KeyError) as caught:
        user(Lost(), shuffle=False).batch("train", 1, 2, 4, BOTH)
    assert caught.value.__notes__ == ["raised by data[6]"]


# -- by micro-batch ----------------------------------------------------------------------------


class Micro:
    """Changes in one way or another from step 2 on."""

    def __init__(self, change: str = "") -> None:
        self.change = change

    def batch(self, step: int, micro: int) -> Any:
        x = np.full((2, 3), 10 * step + micro, np.float32)
        batch: dict[str, Any] = {"x": x, "labels": np.zeros(2, np.int64)}
        if step >= 2:
            batch |= {
                "key": {"mask": x}, "dtype": {"x": x.astype(np.float64)}, "rank": {"x": x[:, 0]},
                "width": {"x": x[:, :2]}, "rows": {"x": x[:1], "labels": np.zeros(1, np.int64)},
            }.get(self.change, {})  # fmt: skip
        return batch


def test_micro_batches_are_asked_for_by_number() -> None:
    mine = user(Micro(), Micro())
    for split in ("train", "val"):
        values = [mine.batch(split, s, a, a + 2, BOTH)["x"][0, 0].item() for s in range(3) for a in (0, 2)]  # type: ignore[arg-type]
        assert values == [0, 1, 10, 11, 20, 21]
    assert (mine.train_samples, mine.val_samples) == (None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("key", r"the keys \['labels', 'mask', 'x'\], the first one \['labels', 'x'\]"),
        ("dtype", r"'x' is float64 \(2, 3\), by the first batches it should be float32 \(2, 3\)"),
        ("rank", r"'x' is float32 \(2,\), .* float32 \(2, 3\)"),
        ("width", r"'x' is float32 \(2, 2\), .* float32 \(2, 3\)"),
        ("rows", r"'x' is float32 \(1, 3\), .* float32 \(2, 3\)"),
    ],
)
def test_a_structure_that_changes_names_step_key_and_both(change: str, message: str) -> None:
    mine = user(Micro(change))
    mine.batch("train", 1, 0, 2, BOTH)
    with pytest.raises(DataError, match=rf"train step 2: .*{message}"):
        mine.batch("train", 2, 0, 2, BOTH)
    if change != "width":
        return
    assert user(Micro(change), varying=True).batch("train", 2, 0, 2, BOTH)["x"].shape == (2, 2)


def test_the_number_of_samples_must_be_the_one_that_is_asked_for() -> None:
    with pytest.raises(
        DataError, match=r"step 0: expected 4 samples as the first dimension, found .*\(2, 3\)"
    ):
        user(Micro(), batch=8)


# -- plain iterables ---------------------------------------------------------------------------


def batches(n: int, rows: int = 4) -> Iterator[Any]:
    for i in range(n):
        yield torch.full((rows, 3), float(i)), torch.full((rows,), i)


class Again:
    def __init__(self, n: int) -> None:
        self.n, self.begun = n, 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return batches(self.n)


def read(data: Dataset, split: Any, steps: int) -> list[int | None]:
    assert isinstance(data, Stream)
    found = [data.next_batch(split, step) for step in range(steps)]
    return [None if batch is None else int(batch["labels"][0]) for batch in found]


def test_a_generator_is_read_in_order_to_its_end() -> None:
    mine = user(batches(3))
    assert (mine.exact, mine.train_samples, mine.val_samples) == (False, None, 0)
    assert mine.specs(2) == {"x": TensorSpec((2, 3), "float32"), "labels": TensorSpec((2,), "int64")}
    assert read(mine, "train", 5) == [0, 1, 2, None, None]
    with pytest.raises(DataError, match="in order only"):
        mine.batch("train", 0, 0, 2, BOTH)


def test_what_can_begin_again_does_and_validation_each_time() -> None:
    mine = user(Again(2), Again(3))
    assert read(mine, "train", 5) == [0, 1, 0, 1, 0]
    for _ in range(2):
        assert read(mine, "val", 4) == [0, 1, 2, None]
        assert read(mine, "val", 2) == [0, 1]
    assert mine.val_samples is None, "until it ends"
    assert user(Again(2), [Samples()[i] for i in range(6)]).val_samples == 6, "a list holds samples"
    held_out = user(Again(2), Samples(6))
    assert held_out.val_samples == 6
    assert read(held_out, "val", 3) == [0, 4, None]
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True)
    assert read(user(loader), "train", 3) == [0, 4, 0]


def test_one_rank_reads_and_all_know_the_shapes() -> None:
    sources = [Again(3) for _ in range(3)]

    def body(comm: Communicator) -> tuple[bool, Any]:
        mine = user(sources[comm.rank], comm=comm)
        if comm.rank == 0:
            assert read(mine, "train", 2) == [0, 1]
        return mine.exact, mine.specs(1)

    results = run_local(3, body)
    assert [s.begun for s in sources] == [1, 0, 0]
    assert results == [(False, user(batches(1)).specs(1))] * 3


def test_iterables_that_cannot_serve_are_refused() -> None:
    with pytest.raises(DataError, match=r"num_workers = 2: no process may fork"):
        user(DataLoader(TensorDataset(X, Y), batch_size=4, num_workers=2))
    with pytest.raises(DataError, match=r"val is a generator, which cannot be read again.* a DataLoader"):
        user(batches(3), batches(3))
    with pytest.raises(DataError, match=r"data ended before its first batch"):
        user(iter(()))
    with pytest.raises(DataError, match=r"the first batch of data holds 3 samples, .* to be 4"):
        user(batches(3, rows=3))
    changed = user(iter([(X[:4], Y[:4]), (X[:4].double(), Y[:4])]))
    assert isinstance(changed, Stream)
    changed.next_batch("train", 0)
    with pytest.raises(DataError, match=r"train step 1: 'x' is float64 .* float32"):
        changed.next_batch("train", 1)


# -- the rest ----------------------------------------------------------------------------------


def test_elements_of_a_batch_are_named_in_order_the_last_one_labels() -> None:
    names = ["a", "b", "c", "labels"]
    t = torch.zeros(2)
    assert list(as_batch((t, t, t, t), names)) == names
    assert list(as_batch([t, t], names)) == ["a", "labels"]
    assert list(as_batch(t, names)) == list(as_batch((t,), names)) == ["a"]
    assert list(as_batch({"z": np.zeros(2)}, names)) == ["z"]
    with pytest.raises(DataError, match=r"a batch of 2 elements, names for 1 \(a\)"):
        as_batch((t, t), ["a"])
    with pytest.raises(
        DataError, match=r"step 4: 'b' is a list; expected a tensor or array of bool, .*collate"
    ):
        as_batch((t, [1, 2], t), names, "step 4")
    assert as_batch((np.zeros(2, np.complex64),), names)["a"].dtype == torch.complex64
    with pytest.raises(DataError, match=r"'a' is a tensor of uint16"):
        as_batch((t.to(torch.uint16),), names)
    with pytest.raises(DataError, match=r"'a' is a ndarray"):
        as_batch((np.array(["text"]),), names)
    given = np.zeros(2)[::-1]
    as_batch((given,), names)["a"][0] = 1
    assert given.tolist() == [0, 0], "the user's array is not written to"


def test_ours_go_through_and_half_of_one_is_told_what_it_lacks() -> None:
    ours = SyntheticTokens(9, 4, 0)
    assert user(ours) is ours
    with pytest.raises(DataError, match=r"SyntheticTokens has its own validation batches"):
        user(ours, Samples())

    class Half:
        vocab = None
        specs = batch = DatasetBase.specs

    with pytest.raises(DataError, match=r"Half lacks decode, encode, exact, .*varying.*; derive it from"):
        user(Half())


def test_what_is_no_data_is_refused() -> None:
    for data, val, message in (
        (7, None, r"data is a int; expected len\(data\) and data\[i\]"),
        (Samples(), 7, r"val is a int; expected len\(val\)"),
        (Samples(), Again(2), r"val is a Again; expected"),
        ([], None, r"the train data, a list, is empty"),
    ):
        with pytest.raises(DataError, match=message):
            user(data, val)


def test_a_configuration_names_data_of_ones_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "import torch\ndef make(n):\n    return [{'x': torch.ones(3)}] * n, [{'x': torch.zeros(3)}] * 5\n"
    (tmp_path / "my_own_data.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    data, val = open_dataset(parse("model: mlp\ndata: {name: 'my_own_data:make', args: {n: 30}}"), tmp_path)
    assert (len(data), len(val)) == (30, 5)
    assert torch.equal(user(data, val).batch("train", 0, 0, 2, frozenset(["x"]))["x"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{name: 'my_made_data:make', args: {typo: 1}}", r"data\.args does not fit my_made_data:make\(n=3\)"),
        ("{name: 'my_made_data:N'}", r"data\.name = my_made_data:N: is of type int, which cannot be called;"),
    ],
)
def test_arguments_that_do_not_fit_and_what_cannot_be_called_are_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, section: str, message: str
) -> None:
    """Any other error would be taken for a crash, and the run started again."""
    (tmp_path / "my_made_data.py").write_text("N = 3\ndef make(n=N):\n    return [1] * n\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_dataset(parse(f"model: mlp\ndata: {section}"), tmp_path)


def test_a_factory_whose_arguments_nobody_knows_is_called() -> None:
    assert open_dataset(parse("model: mlp\ndata: {name: 'builtins:dict', args: {n: 3}}"), ".") == {"n": 3}
