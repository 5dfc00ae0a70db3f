"""Token files: ours, nanoGPT's and Megatron's; what is wrong with one is said with its place."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpipipe.config import parse
from mpipipe.data import open_dataset
from mpipipe.data import tokens as token_files
from mpipipe.data.tokenizer import open_tokenizer
from mpipipe.data.tokens import Tokens
from mpipipe.data.windows import Part, Windows
from mpipipe.errors import DataError

BOTH = frozenset(["tokens", "labels"])


def write(path: Path, ids: Any, stored: str = "<u2", **sidecar: Any) -> Path:
    np.asarray(ids).astype(stored).tofile(path)
    if sidecar:
        path.with_suffix(".json").write_text(json.dumps(sidecar))
    return path


def megatron(path: Path, documents: list[list[int]], code: int, dtype: str, **change: Any) -> Path:
    lengths = [len(d) for d in documents]
    starts = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    np.concatenate(documents).astype(dtype).tofile(path)
    head = (change.get("magic", b"MMIDIDX\0\0"), 1, code, len(documents), len(documents) + 1)
    boundaries = np.arange(len(documents) + 1, dtype="<i8")
    parts = [np.array(lengths, "<i4"), (starts + change.get("gap", 0)).astype("<i8"), boundaries]
    path.with_suffix(".idx").write_bytes(struct.pack("<9sQBQQ", *head) + b"".join(p.tobytes() for p in parts))
    return path


def tokens(path: Path, **change: Any) -> Tokens:
    given: dict[str, Any] = {
        "val_path": None, "dtype": "auto", "context": 4, "val_fraction": 0.25, "val_batch": 4,
        "val_batches": 2, "vocab": None, "seed": 0,
    }  # fmt: skip
    return Tokens(path, **(given | change))


def rows(data: Tokens, split: Any, steps: int = 20) -> list[list[int]]:
    """Windows of context + 1, as they were loaded."""
    found = []
    for step in range(steps):
        batch = data.batch(split, step, 0, 4, BOTH)
        pairs = zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True)
        found += [[*row, labels[-1]] for row, labels in pairs]
    return found


@pytest.mark.parametrize(("dtype", "name", "high"), [("<u2", "uint16", 60000), ("<u4", "uint32", 3_000_000)])
def test_a_token_file_says_what_it_is(tmp_path: Path, dtype: str, name: str, high: int) -> None:
    line = np.arange(40) + high - 40
    path = write(tmp_path / "a.bin", line, dtype, dtype=name, vocab=high, tokens=40)
    data = tokens(path)
    assert (data.vocab, data.tokens_per_sample, data.val_samples) == (high, 4, None)
    assert {row[0] - line[0] for row in rows(data, "train", 60)} == set(range(30 - 4))
    assert {row[0] - line[0] for row in rows(data, "val")} <= set(range(30, 36))
    for split in ("train", "val"):
        assert all(row == list(range(row[0], row[0] + 5)) for row in rows(data, split))


def test_without_a_sidecar_it_is_as_the_configuration_says(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", np.arange(40), "<u4")
    model = "model: {vocab: 40, context: 4}\n"
    data = open_dataset(
        parse(f"{model}data: {{name: tokens, path: {path}, dtype: uint32, val_fraction: 0.2}}"), tmp_path
    )
    assert data.vocab == 40
    assert data.batch("train", 0, 0, 3, BOTH)["labels"].dtype == torch.int64
    with pytest.raises(DataError, match=r"a\.bin: nothing says how many ids.*data\.vocab"):
        tokens(path, dtype="uint32")


@pytest.mark.parametrize("most", [40, 50257, 128256])
def test_a_bare_file_that_looks_like_uint32_is_not_read_as_uint16(tmp_path: Path, most: int) -> None:
    line = np.random.default_rng(0).integers(0, most, 1000)
    wide = write(tmp_path / "wide.bin", line, "<u4")
    for at_once in ({}, {"val_path": wide}):
        narrow = write(tmp_path / "narrow.bin", line)
        with pytest.raises(DataError, match=r"wide\.bin: .* looks like uint32: of its first 1000 "):
            tokens(narrow if at_once else wide, told=min(most, 65536), **at_once)
    assert tokens(wide, told=most, dtype="uint32").vocab == most
    assert tokens(narrow, told=65536).vocab == 65536
    assert tokens(wide, told=65536, dtype="uint16").vocab == 65536


def test_few_words_tell_nothing(tmp_path: Path) -> None:
    assert tokens(write(tmp_path / "a.bin", [300, 5] * 31), told=301).vocab == 301
    assert tokens(write(tmp_path / "b.bin", ([65] * 1999 + [256]) * 31), told=257).vocab == 257
    assert tokens(write(tmp_path / "c.bin", [7] * 999), told=65536).vocab == 65536


def test_a_bare_file_of_a_large_vocabulary_is_told_its_dtype(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", np.arange(40))
    for change in ({"told": 65537}, {"vocab": 65537}):
        with pytest.raises(DataError, match=r"a\.bin: nothing says its dtype, .* has 65537 ids.*=uint32"):
            tokens(path, **change)
    assert tokens(path, told=65537, dtype="uint16").vocab == 65537
    assert tokens(path, told=40, vocab=65537).vocab == 40
    pair = megatron(tmp_path / "b.bin", [list(range(40))], 8, "<u2")
    assert tokens(pair, told=65537).vocab == 65537


@pytest.mark.parametrize(
    ("model", "key", "vocab"),
    [
        ("{name: 'my.own:model', context: 4}", "vocab: 40", 40),
        ("{name: gpt, vocab: 64, context: 4}", "vocab: 40", 40),
        ("{name: gpt, vocab: 64, context: 4}", "", 64),
        ("{name: gpt, vocab: 30, context: 4}", "vocab: 40", None),
        ("{name: 'my.own:model', context: 4}", "", None),
    ],
)
def test_a_bare_file_is_told_its_vocabulary(tmp_path: Path, model: str, key: str, vocab: int | None) -> None:
    path = write(tmp_path / "a.bin", np.arange(40))
    config = parse(f"model: {model}\ndata: {{name: tokens, path: {path}, val_fraction: 0.2, {key}}}")
    if vocab is None:
        with pytest.raises(DataError, match=r"set data\.vocab|has 40 ids, the model has 30"):
            open_dataset(config, tmp_path)
    else:
        assert open_dataset(config, tmp_path).vocab == vocab


def test_a_file_of_its_own_for_validation(tmp_path: Path) -> None:
    train, val = write(tmp_path / "t.bin", [1] * 20), write(tmp_path / "v.bin", [2] * 5)
    data = tokens(train, val_path=val, vocab=3)
    assert {i for row in rows(data, "train") for i in row} == {1}
    assert {i for row in rows(data, "val") for i in row} == {2}
    assert data.unigram_entropy == pytest.approx(-0.8 * np.log(0.8) - 0.2 * np.log(0.2))


def test_of_a_long_line_the_frequencies_are_those_of_some_ids_of_each_part() -> None:
    class Ids:
        """Too many to be read; of a slice the first ten."""

        def __init__(self, n: int, value: int) -> None:
            self.n, self.value, self.read = n, value, 0

        def __len__(self) -> int:
            return self.n

        def __getitem__(self, wanted: slice) -> Any:
            self.read += min(wanted.stop, self.n) - wanted.start
            return np.full(10, self.value)

    train, val = Ids(9 * 10**10, 1), Ids(10**10, 2)
    parts: Any = [Part(Path("a"), ids) for ids in (train, val)]  # type: ignore[arg-type]
    data = Windows(*parts, vocab=3, context=4, val_batch=1, val_batches=1, seed=0)
    assert data.unigram_entropy == pytest.approx(-0.9 * np.log(0.9) - 0.1 * np.log(0.1), rel=0.01)
    assert 5e7 < train.read + val.read < 7e7, "a moment, also from a network"
    assert val.read == pytest.approx(train.read / 9, rel=0.05)


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "<u1")])
def test_megatron_documents_are_one_line(tmp_path: Path, code: int, dtype: str) -> None:
    documents = [list(range(7)), list(range(7, 9)), list(range(9, 30))]
    path = megatron(tmp_path / "a.1.bin", documents, code, dtype)
    for given in (path, tmp_path / "a.1"):  # Megatron names the pair by its prefix
        data = tokens(given, vocab=30)
        assert all(row == list(range(row[0], row[0] + 5)) for row in rows(data, "train"))


@pytest.mark.slow
def test_a_long_megatron_index_takes_no_memory(tmp_path: Path) -> None:
    path = megatron(tmp_path / "a.bin", [[1]] * (1 << 18), 8, "<u2")
    tracemalloc.start()
    try:
        assert len(token_files.open_tokens(path, "auto")[0].ids) == 1 << 18
        assert tracemalloc.get_traced_memory()[1] < path.with_suffix(".idx").stat().st_size / 2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("at_a_time", [1, 1 << 16])
def test_damaged_megatron_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(token_files, "_DOCUMENTS", at_a_time)
    path = tmp_path / "a.bin"
    for change, message in (
        ({"magic": b"TNTIDX\0\0\0"}, r"a\.idx: starts with b'TNTIDX.*expected b'MMIDIDX"),
        ({"code": 7}, r"a\.idx: .*dtype 7; expected .* an integer type \(1, 2, 3, 4, 5, 8\)"),
        ({"gap": 2}, r"a\.idx: its documents hold 9 tokens, a\.bin holds 9.*without gaps"),
    ):
        megatron(path, [[1, 2, 3], [4] * 6], change.pop("code", 8), "<u2", **change)
        with pytest.raises(DataError, match=message):
            tokens(path, vocab=9)
    index = path.with_suffix(".idx")
    for nbytes, message in ((57, "57 bytes are too few for its 2 documents"), (0, r"starts with b'\\x00")):
        os.truncate(index, nbytes)
        with pytest.raises(DataError, match=rf"a\.idx: {message}"):
            tokens(path, vocab=9)
    megatron(path, [[1, 2, 3], [4] * 6], 8, "<u2")
    assert len(token_files.open_tokens(path, "auto")[0].ids) == 9
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"hold 9 tokens, a\.bin holds 8"):
        tokens(path, vocab=9)
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:40])
    with pytest.raises(DataError, match=r"a\.idx: 40 bytes are too few for its 2 documents"):
        tokens(path, vocab=9)


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    line = [1] * 40
    line[33] = 7
    data = tokens(write(tmp_path / "a.bin", line), vocab=5)
    rows(data, "train")
    with pytest.raises(
        DataError, match=r"a\.bin: token 33 is 7, but the vocabulary has 5 ids; .*data\.vocab"
    ):
        rows(data, "val")
    assert data.unigram_entropy == 0.0
    below = tokens(megatron(tmp_path / "b.bin", [[1] * 19 + [-1] + [1] * 20], 4, "<i4"), vocab=5)
    with pytest.raises(DataError, match=r"b\.bin: token 19 is -1"):
        rows(below, "train")


def test_what_contradicts_is_refused_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", range(40), dtype="uint16", vocab=40, tokens=40)
    other = write(tmp_path / "b.bin", range(40), dtype="uint16", vocab=41, tokens=40)
    cut = write(tmp_path / "c.bin", range(39), dtype="uint16", vocab=40, tokens=40)
    for change, message in (
        ({"vocab": 39}, r"a\.bin: its vocabulary has 40 ids, the model has 39; .*model\.vocab to null"),
        ({"dtype": "uint32"}, r"a\.bin: data\.dtype = uint32, its sidecar says uint16"),
        ({"val_path": other}, r"a\.bin has 40 ids in its vocabulary, .*b\.bin has 41"),
        ({"tokenizer": open_tokenizer("bytes")}, r"a\.bin: its sidecar has 40 ids, data\.tokenizer has 256"),
        ({"told": 41}, r"a\.bin: its sidecar has 40 ids, data\.vocab has 41 ids; .*leave data\.vocab out"),
        ({"context": 10}, r"a\.bin: 10 of its 40 tokens are for validation.*needs 11"),
    ):
        with pytest.raises(DataError, match=message):
            tokens(path, **change)
    with pytest.raises(DataError, match=r"c\.bin: holds 39 tokens, its sidecar says 40"):
        tokens(cut)


def test_files_that_are_no_token_files_are_refused(tmp_path: Path) -> None:
    odd, empty, strange = tmp_path / "odd.bin", tmp_path / "empty.bin", tmp_path / "strange.bin"
    odd.write_bytes(b"abc")
    empty.touch()
    write(strange, range(40)).with_suffix(".json").write_text("[1]")
    for path, message in (
        (tmp_path / "none.bin", r"none\.bin: cannot be read .* \(data\.path, data\.val_path\), or make"),
        (tmp_path, r"cannot be read \(Is a directory\); name a token file"),
        (odd, r"odd\.bin: 3 bytes are not a multiple of the 2"),
        (empty, r"empty\.bin: is empty"),
        (strange, r"strange\.json: does not describe a token file"),
    ):
        with pytest.raises(DataError, match=message):
            tokens(path, vocab=9)


def test_a_tokenizer_gives_vocabulary_encoding_and_decoding(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", range(40))
    data = tokens(path, tokenizer=open_tokenizer("bytes"))
    assert data.vocab == 256
    assert data.decode(data.encode("naïve") or []) == "naïve"
    assert data.decode([97, 256, 98]) == "a\ufffdb"  # of a model with more ids than there are bytes
    assert tokens(path, vocab=40).encode("a") is None
