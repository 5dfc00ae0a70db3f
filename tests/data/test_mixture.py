"""Several sources as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpipipe.config import parse
from mpipipe.data import open_dataset, prepare
from mpipipe.data.base import Dataset
from mpipipe.data.mixture import Mixture
from mpipipe.data.pairs import Pairs
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.data.text import Text
from mpipipe.errors import ConfigError, DataError

BOTH = frozenset(["tokens", "labels"])


@pytest.fixture
def texts(tmp_path: Path) -> list[Dataset]:
    for name in "abc":
        (tmp_path / name).write_text(name * 400)
    return [Text(tmp_path / name, 8, 0.1, 4, 2, seed=0) for name in "abc"]


def letters(data: Dataset, split: str, steps: int, seed_rows: int = 32) -> list[str]:
    rows = [data.batch(split, s, 0, seed_rows, BOTH)["tokens"] for s in range(steps)]  # type: ignore[arg-type]
    return [chr(int(row[0])) for row in torch.cat(rows)]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.slow
def test_samples_come_by_weight(texts: list[Dataset], split: str) -> None:
    found = letters(Mixture(texts, [1, 2, 5], seed=0), split, 100)
    shares = [found.count(c) / len(found) for c in "abc"]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)


def test_each_sample_is_that_of_its_source_and_any_slice_is_the_same(texts: list[Dataset]) -> None:
    data = Mixture(texts, [1, 1, 1], seed=0)
    whole = data.batch("train", 3, 0, 16, BOTH)
    for i, row in enumerate(whole["tokens"]):
        source = texts["abc".index(chr(int(row[0])))]
        assert torch.equal(source.batch("train", 3, i, i + 1, BOTH)["tokens"][0], row)
    parts = [data.batch("train", 3, a, b, BOTH) for a, b in ((0, 5), (5, 6), (6, 16))]
    assert all(torch.equal(torch.cat([p[k] for p in parts]), whole[k]) for k in BOTH)


def test_the_seed_changes_training_and_not_validation(texts: list[Dataset]) -> None:
    a, b = (Mixture(texts, [1, 1, 1], seed) for seed in (0, 1))
    assert letters(a, "train", 1) != letters(b, "train", 1)
    assert letters(a, "val", 1) == letters(b, "val", 1)
    assert a.val_samples is None
    assert (a.encode("a"), a.decode([98])) == ([97], "b")


def test_sources_have_all_samples_for_validation_or_none(texts: list[Dataset]) -> None:
    for source in texts[:2]:
        source.val_samples = 0  # type: ignore[misc]
    assert Mixture(texts[:2], [1, 1], seed=0).val_samples == 0
    with pytest.raises(
        DataError, match=r"of source 0 and source 2 one has samples for validation, the other"
    ):
        Mixture(texts, [1, 1, 1], seed=0)


def test_sources_that_do_not_fit_are_named(texts: list[Dataset]) -> None:
    bytes_of = texts[0]
    for other, message in (
        (SyntheticTokens(300, 8, 0), r"one and two do not mix: vocabulary 256 and 300"),
        (SyntheticTokens(256, 9, 0), r"one and two do not mix: batches .*\(1, 8\).* and .*\(1, 9\)"),
        (Pairs(256, 8, 9, 4, 4, 0, varying=True), r"two has micro-batches of varying shapes"),
    ):
        with pytest.raises(DataError, match=message):
            Mixture([bytes_of, other], [1, 1], 0, ["one", "two"])
    for weights in ([1], [1, 0]):
        with pytest.raises(DataError, match=r"2 entries, data\.weights = \[1.*one weight above 0"):
            Mixture([bytes_of, bytes_of], weights, 0)


def test_a_source_of_ones_own_must_be_a_data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_source.py").write_text("def make():\n    return [1, 2]\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "text").write_text("a" * 400)
    sources = f"[{{name: text, path: {tmp_path / 'text'}}}, {{name: 'my_source:make'}}]"
    config = parse(f"model: {{context: 8}}\ndata: {{name: mixture, sources: {sources}, weights: [1, 1]}}")
    prepare(config, tmp_path / "run", is_root=True)
    with pytest.raises(
        DataError, match=r"data\.sources\.1 \(my_source:make\) is a list, which lacks batch, .*DatasetBase"
    ):
        open_dataset(config, tmp_path / "run")


def test_arguments_of_a_source_that_do_not_fit_are_named_with_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "source_of_n.py").write_text("def make(n):\n    return [1] * n\n")
    monkeypatch.syspath_prepend(tmp_path)
    sources = "[{name: 'source_of_n:make', args: {typo: 1}}]"
    config = parse(f"data: {{name: mixture, sources: {sources}, weights: [1]}}")
    with pytest.raises(
        ConfigError, match=r"data\.sources\.0\.args does not fit source_of_n:make\(n\): missing .*'n'"
    ):
        open_dataset(config, tmp_path / "run")


@pytest.mark.slow
def test_folders_of_a_mixture_are_gathered_apart(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name * 400)
    sources = ", ".join(f"{{name: text, path: {tmp_path / name}}}" for name in "ab")
    text = f"model: {{context: 8}}\ndata: {{name: mixture, sources: [{sources}], weights: [1, 3]}}"
    run = tmp_path / "run"
    prepare(parse(text), run, is_root=True)
    found = letters(open_dataset(parse(text), run), "train", 40)
    assert found.count("b") / len(found) == pytest.approx(0.75, abs=0.05)
