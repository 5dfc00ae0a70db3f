"""The data sets: any slice on any rank is the same slice, and errors name the way out."""

from __future__ import annotations

import errno
import math
import os
import resource
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from mpipipe.config import Config, parse
from mpipipe.data import Dataset, open_dataset, prepare
from mpipipe.data.base import draws, fingerprint, uniforms
from mpipipe.data.windows import least
from mpipipe.errors import DataError

TOKENS = "data: {name: synthetic}\nmodel: {vocab: 1000, context: 16}\n"
VECTORS = "data: {name: synthetic, samples: 64}\nmodel: {name: mlp, inputs: 5, classes: 3}\n"


def text_config(path: Path | None, *overrides: str) -> Config:
    named = [] if path is None else [f"data.path={path}"]
    return parse("model: {context: 8}", overrides=[*named, *overrides])


def first_letter(config: Config, run: Path) -> str:
    return chr(open_dataset(config, run).batch("train", 0, 0, 1, frozenset({"tokens"}))["tokens"][0, 0])


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    path = tmp_path / "letters.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 5000).astype(np.uint8)))
    return path


def all_sets(letters: Path) -> list[Dataset]:
    configs = [parse(TOKENS), parse(VECTORS), text_config(letters)]
    return [open_dataset(c, letters.parent) for c in configs]


def test_a_batch_has_the_promised_keys_shapes_and_dtypes(letters: Path) -> None:
    for data in all_sets(letters):
        specs = data.specs(6)
        for split in ("train", "val"):
            batch = data.batch(split, 0, 0, 6, frozenset(specs))
            assert {k: (tuple(t.shape), str(t.dtype)) for k, t in batch.items()} == {
                k: (s.shape, f"torch.{s.dtype}") for k, s in specs.items()
            }


def test_slices_of_a_batch_join_to_the_batch(letters: Path) -> None:
    for data in all_sets(letters):
        keys = frozenset(data.specs(1))
        for split in ("train", "val"):
            whole = data.batch(split, 3, 0, 13, keys)
            for key in keys:
                parts = [
                    data.batch(split, 3, a, b, frozenset([key]))[key]
                    for a, b in pairwise((0, 1, 2, 6, 11, 13))
                ]
                assert torch.equal(torch.cat(parts), whole[key])


def test_only_the_asked_keys_are_loaded(letters: Path) -> None:
    for data in all_sets(letters):
        for key in data.specs(1):
            assert set(data.batch("train", 0, 0, 2, frozenset([key, "unknown"]))) == {key}
        assert data.batch("train", 0, 0, 2, frozenset()) == {}


def test_training_batches_depend_on_step_and_seed_and_on_nothing_else(letters: Path) -> None:
    for text in (TOKENS, VECTORS, None):
        config = text_config(letters) if text is None else parse(text)
        other = config.model_copy(update={"train": config.train.model_copy(update={"seed": 1})})
        a, b, c = (open_dataset(x, letters.parent) for x in (config, config, other))
        key = next(iter(a.specs(1)))
        first = a.batch("train", 7, 0, 8, frozenset([key]))[key]
        assert torch.equal(b.batch("train", 7, 0, 8, frozenset([key]))[key], first)
        assert not torch.equal(a.batch("train", 8, 0, 8, frozenset([key]))[key], first)
        assert not torch.equal(c.batch("train", 7, 0, 8, frozenset([key]))[key], first)


def test_labels_of_a_text_are_the_next_bytes_and_splits_do_not_meet(letters: Path) -> None:
    raw = letters.read_bytes()
    data = open_dataset(text_config(letters), letters.parent)
    n_train = 5000 - 250
    for split, low, high in (("train", 0, n_train), ("val", n_train, 5000)):
        for step in range(8):
            batch = data.batch(split, step, 0, 16, frozenset(["tokens", "labels"]))
            for row, labels in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
                assert row[1:] == labels[:-1]
                assert raw.find(bytes([*row, labels[-1]]), low, high) >= 0


def test_validation_windows_are_fixed_and_spread_over_the_validation_part(letters: Path) -> None:
    keys = frozenset(["tokens"])
    config = text_config(letters, "eval.batches=2", "eval.batch=4")
    data = open_dataset(config, letters.parent)
    seed = open_dataset(
        text_config(letters, "eval.batches=2", "eval.batch=4", "train.seed=9"), letters.parent
    )
    part = letters.read_bytes()[-250:]
    starts = []
    for step in range(2):
        batch = data.batch("val", step, 0, 4, keys)["tokens"]
        assert torch.equal(batch, seed.batch("val", step, 0, 4, keys)["tokens"])
        starts += [part.find(bytes(row)) for row in batch.tolist()]
    assert starts == [i * 242 // 8 for i in range(8)]
    assert torch.equal(data.batch("val", 2, 0, 4, keys)["tokens"], data.batch("val", 0, 0, 4, keys)["tokens"])


def test_training_windows_reach_every_place(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(range(20)) + bytes([200]) * 20)
    data = open_dataset(text_config(path, "data.val_fraction=0.5", "model.context=4"), tmp_path)
    seen = {
        row[0]
        for s in range(20)
        for row in data.batch("train", s, 0, 16, frozenset(["tokens"]))["tokens"].tolist()
    }
    assert seen == set(range(20 - 4))


def test_unigram_entropy_is_that_of_the_counts(letters: Path) -> None:
    raw = letters.read_bytes()
    want = -sum(n / len(raw) * math.log(n / len(raw)) for n in Counter(raw).values())
    assert open_dataset(text_config(letters), letters.parent).unigram_entropy == pytest.approx(want)


def test_unigram_entropy_of_made_up_tokens_is_that_of_their_draws() -> None:
    data = open_dataset(parse(TOKENS), ".")
    drawn = data.batch("train", 0, 0, 20000, frozenset(["tokens", "labels"]))
    assert drawn["tokens"].min() >= 0
    assert drawn["tokens"].max() < 1000
    for key in ("tokens", "labels"):
        p = torch.bincount(drawn[key].flatten(), minlength=1000).double() / drawn[key].numel()
        assert -(p * p.clamp(min=1e-12).log()).sum().item() == pytest.approx(data.unigram_entropy, abs=0.01)


@pytest.mark.parametrize("vocab", [2, 3, 1000, 32000])
def test_made_up_labels_are_a_permutation_of_the_tokens(vocab: int) -> None:
    data = open_dataset(parse(TOKENS, overrides=[f"model.vocab={vocab}"]), ".")
    drawn = data.batch("train", 0, 0, 500, frozenset(["tokens", "labels"]))
    pairs = set(zip(drawn["tokens"].flatten().tolist(), drawn["labels"].flatten().tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    assert all(0 <= b < vocab for _, b in pairs)
    assert data.vocab == vocab


def test_made_up_vectors_come_from_a_fixed_set_with_every_class() -> None:
    data = open_dataset(parse(VECTORS), ".")
    keys = frozenset(["x", "y"])
    batches = [data.batch("train", step, 0, 32, keys) for step in range(20)]
    rows = {tuple(row) for batch in batches for row in batch["x"].tolist()}
    assert len(rows) == 64
    assert {y for batch in batches for y in batch["y"].tolist()} == {0, 1, 2}
    val = {tuple(row) for row in data.batch("val", 0, 0, 32, keys)["x"].tolist()}
    assert not rows & val


def test_draws_are_one_stream_whatever_the_slice() -> None:
    whole = draws(1, "a", 5, 0, 50)
    for a, b in ((0, 50), (3, 9), (4, 8), (49, 50), (7, 7)):
        assert np.array_equal(draws(1, "a", 5, a, b), whole[a:b])
    others = [draws(2, "a", 5, 0, 50), draws(1, "b", 5, 0, 50), draws(1, "a", 6, 0, 50)]
    assert not any(np.array_equal(o, whole) for o in others)
    u = uniforms(0, "a", 0, 0, 10000)
    assert (u >= 0).all()
    assert (u < 1).all()
    assert abs(u.mean() - 0.5) < 0.02


def test_draws_are_frozen() -> None:
    """The data order of a seed never changes between versions."""
    assert draws(0, "train", 0, 0, 3).tolist() == [
        18227181148921736558,
        6489191723650445927,
        8402422599064413966,
    ]


def test_a_folder_is_joined_in_name_order_without_hidden_files_and_tests(tmp_path: Path) -> None:
    folder, run = tmp_path / "folder", tmp_path / "run"
    for name, text in (
        ("b/x", "2"),
        ("a", "1"),
        ("c", "3"),
        (".d", "no"),
        ("tests/t", "no"),
        ("b/.e/f", "no"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text * 20)
    config = text_config(folder, "data.val_fraction=0.3")
    prepare(config, run, is_root=False)
    assert not run.exists()
    prepare(config, run, is_root=True)
    (corpus,) = run.iterdir()
    assert Counter(corpus.read_text()) == {"1": 20, "2": 20, "3": 20}
    prepare(config, run, is_root=True)
    assert open_dataset(config, run).vocab == 256


def test_the_text_of_a_run_stays_as_it_was_whatever_another_start_gathers(tmp_path: Path) -> None:
    configs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name * 200)
        configs.append(text_config(tmp_path / name))

    def read() -> list[str]:
        return [first_letter(config, run) for config in configs]

    run = tmp_path / "run"
    of_run = [configs[0].model_dump(mode="json")["data"]]
    prepare(configs[0], run, is_root=True)
    prepare(configs[1], run, True, of_run)
    assert read() == ["a", "b"]
    for name in "ab":
        (tmp_path / name / "text").write_text("c" * 200)
    for config in configs:
        prepare(config, run, True, of_run)
    assert read() == ["a", "c"]  # gathered again: no run has gone by it, but perhaps a refused start
    prepare(configs[0], run, is_root=True)
    assert read() == ["c", "c"]


def test_a_text_that_an_earlier_version_gathered_is_read(tmp_path: Path) -> None:
    """It had one name for all; one of the right name comes first."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text").write_text("b" * 200)
    config, run = text_config(tmp_path / "texts"), tmp_path / "run"
    run.mkdir()
    (run / "corpus.bin").write_text("a" * 200)
    for expected in "ab":
        assert first_letter(config, run) == expected
        prepare(config, run, is_root=True)


def test_a_folder_of_text_may_hold_the_runs_that_read_it(tmp_path: Path) -> None:
    """What they write is nobody's text; a folder with a configuration alone is no run."""
    (tmp_path / "a").write_text("a" * 200)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").write_text("p" * 100)
    os.mkfifo(tmp_path / "pipe")
    config = text_config(tmp_path)
    for start in ("first", "second", "first", "unwatched"):
        run = tmp_path / "runs" / start
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text("run: {}")
        if start != "unwatched":
            (run / "flight").mkdir(exist_ok=True)
            (run / "flight" / "rank-0.alive").write_text("1 2 3")
        prepare(config, run, is_root=True)
        (corpus,) = run.glob("corpus-*.bin")
        assert corpus.read_text() == "a" * 200 + "p" * 100
    mixed = parse(
        f"data: {{name: mixture, sources: [{{path: {tmp_path}}}], weights: [1]}}\nmodel: {{context: 8}}"
    )
    for refused in (config, mixed):
        with pytest.raises(DataError, match=r"the folder that this run writes to; name another run\.dir"):
            prepare(refused, tmp_path, is_root=True)


def test_a_folder_that_cannot_be_listed_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("a" * 200)
    (tmp_path / "deep").mkdir()
    list_of = os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name == "deep":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return list_of(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"deep: cannot be read \(Input/output error\)") as found:
        prepare(text_config(tmp_path), tmp_path / "run", is_root=True)
    assert found.value.kind == "failed"


def test_a_file_system_that_fails_for_a_moment_is_worth_another_start(
    letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, kind in ((errno.EIO, "failed"), (errno.EACCES, "error")):
        failing = OSError(number, os.strerror(number), str(letters))
        monkeypatch.setattr(np, "memmap", Mock(side_effect=failing))
        with pytest.raises(DataError, match=rf"cannot be read \({os.strerror(number)}\)") as found:
            open_dataset(text_config(letters), letters.parent)
        assert found.value.kind == kind
        monkeypatch.setattr(Path, "open", Mock(side_effect=failing))
        with pytest.raises(DataError, match=rf"letters.*: cannot be read \({os.strerror(number)}\)") as found:
            prepare(text_config(letters.parent), letters.parent / "run", is_root=True)
        assert found.value.kind == kind
        monkeypatch.undo()


@pytest.mark.slow
def test_the_standard_library_is_the_default_text(tmp_path: Path) -> None:
    config = text_config(None)
    prepare(config, tmp_path, is_root=True)
    raw = next(tmp_path.glob("corpus-*.bin")).read_bytes()
    assert len(raw) > 1 << 20
    assert b"class OrderedDict(dict):" in raw
    data = open_dataset(config, tmp_path)
    assert 2.5 < data.unigram_entropy < 4.0


def test_text_is_encoded_and_decoded_and_vectors_are_not(letters: Path) -> None:
    tokens, vectors, text = all_sets(letters)
    assert text.decode(text.encode("naïve")) == "naïve"
    assert text.decode([97, 256, 98]) == "a\ufffdb"  # of a model with more ids than there are bytes
    assert text.decode([255]) == "\ufffd"
    assert [d.encode("a") for d in (tokens, vectors)] == [None, None]
    assert [d.decode([1]) for d in (tokens, vectors)] == [None, None]
    assert [d.tokens_per_sample for d in (tokens, vectors, text)] == [16, 1, 8]
    assert (vectors.vocab, vectors.unigram_entropy) == (None, None)


def test_missing_empty_and_short_corpora_are_refused(tmp_path: Path) -> None:
    empty, short, folder = tmp_path / "empty", tmp_path / "short", tmp_path / "folder"
    empty.touch()
    short.write_text("x" * 50)
    folder.mkdir()
    with pytest.raises(DataError, match=r"nowhere.*no such file"):
        prepare(text_config(tmp_path / "nowhere"), tmp_path, is_root=True)
    with pytest.raises(DataError, match=r"folder.*holds no file"):
        prepare(text_config(folder), tmp_path, is_root=True)
    with pytest.raises(DataError, match=r"empty: is empty"):
        open_dataset(text_config(empty), tmp_path)
    with pytest.raises(DataError, match=r"short: 2 of its 50 bytes are for validation.*needs 9"):
        open_dataset(text_config(short), tmp_path)
    with pytest.raises(DataError, match=r"corpus-\w+\.bin: cannot be read"):
        open_dataset(text_config(None), tmp_path)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5, 0.7, 1 / 3])
def test_the_error_of_a_short_text_says_how_long_one_must_be(tmp_path: Path, fraction: float) -> None:
    path, enough = tmp_path / "text", least(8, fraction)
    config = text_config(path, f"data.val_fraction={fraction}")
    path.write_bytes(b"a" * (enough - 1))
    with pytest.raises(
        DataError, match=rf"of its {enough - 1} bytes are .* needs 9 \(a file of {enough} has them\)"
    ):
        open_dataset(config, tmp_path)
    path.write_bytes(b"a" * enough)
    assert open_dataset(config, tmp_path).specs(1)["tokens"].shape == (1, 8)


def test_a_fingerprint_tells_other_samples(letters: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_bytes(letters.read_bytes()[:-100])
    data = [open_dataset(text_config(path), tmp_path) for path in (letters, letters, other)]
    found = [fingerprint(d, 4) for d in data]
    assert found[0] == found[1] != found[2]
    assert fingerprint(data[0], 3) != found[0]


def test_a_full_disk_while_files_are_joined_leaves_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / name).write_bytes(b"x" * 600)
    config, run = text_config(tmp_path / "texts"), tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            DataError, match=r"texts/b: cannot be copied to .*corpus-\w+\.bin \(File too large\)"
        ):
            prepare(config, run, True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(run.iterdir()) == []
    prepare(config, run, True)
    assert [path.stat().st_size for path in run.iterdir()] == [1200]
