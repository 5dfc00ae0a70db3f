"""`tokenize`: the same bytes for any number of workers, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipipe.data import tokenize as command
from mpipipe.data.tokenize import main
from mpipipe.data.tokenizer import open_tokenizer
from mpipipe.data.tokens import read_sidecar
from mpipipe.errors import DataError

WORDS = ["one", "two", "three"]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer of three words, with an end of text, as Hugging Face saves one."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {w: i for i, w in enumerate(["[UNK]", *WORDS, "<|endoftext|>", "stop"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    made.save(str(tmp_path / "words" / "tokenizer.json"))
    return tmp_path / "words"


def run(*args: object) -> int:
    return main([str(a) for a in args])


def ids(path: Path, dtype: str = "<u2") -> list[int]:
    return [int(i) for i in np.fromfile(path, dtype)]


@pytest.mark.jobs
def test_workers_do_not_change_the_bytes(
    tmp_path: Path, words: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really by several processes, each of which imports the package; the pieces are cut here."""
    monkeypatch.setattr(command, "PIECE_BYTES", 2000)
    rng = np.random.default_rng(0)
    texts = [" ".join(WORDS[i] for i in rng.integers(0, 3, 40)) for _ in range(200)]
    (tmp_path / "b.txt").write_text("\n".join(texts))  # several pieces
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts[:9]))
    for n in (1, 2):
        args = [tmp_path / "b.txt", tmp_path / "a.jsonl", "-o", tmp_path / f"{n}.bin", "--tokenizer", words]
        assert run(*args, "--workers", n, "--append-eos") == 0
    assert (tmp_path / "b.txt").stat().st_size > 10 * command.PIECE_BYTES
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()
    want = [i for part in (texts, *([t] for t in texts[:9])) for t in part for i in _encoded(t)]
    found = ids(tmp_path / "1.bin")
    assert [i for i in found if i != 4] == want, "in the order in which they were given"
    assert found.count(4) == 1 + 9
    assert found[-1] == 4
    sidecar = read_sidecar(tmp_path / "2.bin")
    assert sidecar is not None
    assert (sidecar.dtype, sidecar.vocab, sidecar.tokens) == ("uint16", 6, len(found))
    assert f"{len(found)} tokens (uint16, vocabulary 6) from 2 files" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part"))


def _encoded(text: str) -> list[int]:
    return [1 + WORDS.index(w) for w in text.split()]


def test_bytes_of_a_folder_in_name_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PIECE_BYTES", 3)
    texts = {"b/x.txt": "zwei\ndrei", "a.txt": "naïve\n\n", "c.txt": "", "d.txt": "one line without an end"}
    for name, text in texts.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    out = tmp_path / "new" / "out.bin"
    assert run(tmp_path / "in", "-o", out, "--tokenizer", "bytes", "--dtype", "uint32", "--workers", 1) == 0
    assert bytes(ids(out, "<u4")).decode() == "".join(
        texts[n] for n in ("a.txt", "c.txt", "d.txt", "b/x.txt")
    )
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.bin", "out.json"]


def test_a_tokenizer_is_a_file_a_folder_or_bytes(words: Path) -> None:
    for path in (words, words / "tokenizer.json"):
        known = open_tokenizer(str(path))
        assert (known.vocab, known.eos) == (6, 4)
        assert known.decode(known.encode("two three")) == "two three"
    (words / "tokenizer_config.json").write_text('{"eos_token": {"content": "stop"}}')
    assert open_tokenizer(str(words)).eos == 5, "the folder's own word on it counts first"
    (words / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer"):
        open_tokenizer(str(words))
    with pytest.raises(DataError, match=r"tokenizer 'nowhere': no file nowhere; give tokenizer\.json"):
        open_tokenizer("nowhere")


def test_a_text_is_neither_cut_nor_filled_up_as_a_saved_tokenizer_would(tmp_path: Path, words: Path) -> None:
    file = str(words / "tokenizer.json")
    saved = pytest.importorskip("tokenizers").Tokenizer.from_file(file)
    saved.enable_truncation(2)
    saved.enable_padding(length=2)
    saved.save(file)
    for text in ("one", "one two three"):
        assert open_tokenizer(file).encode(text) == list(_encoded(text))
    (tmp_path / "a.txt").write_text("one two three")
    assert run(tmp_path / "a.txt", "-o", tmp_path / "a.bin", "--tokenizer", words, "--workers", 1) == 0
    assert ids(tmp_path / "a.bin") == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n\n{"body": "two"}', "a.jsonl, line 3: expected an object"),
        ("a.jsonl", b'{"body": "two"}', "a text under 'text', found the keys body; name the right one"),
        ("a.jsonl", b'{"text": 1}', "a.jsonl, line 1: expected an object with a text under 'text'"),
        ("a.jsonl", b"[]\n", "a.jsonl, line 1: expected an object with a text under 'text', found a list"),
        ("a.jsonl", b'{"text": "one"}\n{', "a.jsonl, line 2: is not JSON"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "\\ud83d"}', "a.jsonl, line 2: its text holds half of"),
        ("a.txt", b"one\ntwo \xff", "a.txt, line 2: byte 0xff is not UTF-8"),
        ("a.txt", b"", "no text in 1 files"),
    ],
)  # fmt: skip
def test_wrong_input_names_its_line_and_leaves_nothing(
    tmp_path: Path, capsys: Any, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out" / "out.bin"
    assert run(tmp_path / name, "-o", out, "--tokenizer", "bytes", "--workers", 1) == 1
    assert message in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


def test_wrong_arguments_are_refused(tmp_path: Path, words: Path, capsys: Any) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out.bin"
    text.write_text("one")
    (tmp_path / "mine.json").write_text('{"my": "data"}')
    for args, message in (
        ([tmp_path / "none", "-o", out, "--tokenizer", "bytes"], "none: no such file or folder"),
        ([text, "-o", tmp_path / "out", "--tokenizer", "bytes"], "expected a name that ends in .bin"),
        ([text, "-o", out, "--tokenizer", "bytes", "--append-eos"], "bytes has no end-of-text token"),
        ([text, "-o", out, "--tokenizer", "bytes", "--workers", 0], "workers 0; expected"),
        ([text, "-o", tmp_path / "mine.bin", "--tokenizer", "bytes"], "mine.json: does not describe a token"),
    ):
        assert run(*args) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == '{"my": "data"}'


def test_a_large_vocabulary_takes_four_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Large:
        vocab, eos = 70000, None

        def encode(self, text: str) -> list[int]:
            return [65536 + ord(c) for c in text]

    monkeypatch.setattr(command, "_open", lambda path: Large())
    (tmp_path / "a.txt").write_text("ab")
    args = [tmp_path / "a.txt", "-o", tmp_path / "out.bin", "--tokenizer", "large", "--workers", 1]
    assert run(*args) == 0
    assert ids(tmp_path / "out.bin", "<u4") == [65633, 65634]
    assert run(*args, "--dtype", "uint16") == 1
    assert "uint16 holds ids below 65536, large has 70000; use uint32" in capsys.readouterr().err
