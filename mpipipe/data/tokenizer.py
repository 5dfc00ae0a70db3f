"""From text to token ids and back: bytes, or a tokenizer that Hugging Face's `tokenizers` can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from mpipipe.data.extras import optional
from mpipipe.errors import DataError

BYTES = "bytes"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    @property
    def vocab(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eos(self) -> int | None:
        """The id that ends a document; None where there is none."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


def open_tokenizer(path: str) -> Tokenizer:
    """`bytes`, a tokenizer's JSON file, or a folder with `tokenizer.json`. Raises DataError."""
    if path == BYTES:
        return Bytes()
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(f"tokenizer '{path}': no file {file}; give tokenizer.json, its folder, or bytes")
    return _Hf(file)


class Bytes:
    vocab, eos = 256, None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """With the sign for what is no text in place of ids that are no bytes, which a model may have."""
        return bytes(i if i < self.vocab else 0xFF for i in ids).decode(errors="replace")


class _Hf:
    """Without the special tokens that a tokenizer's template would put around each text, and each text whole:
    a saved tokenizer may keep a length to cut or to fill up to."""

    def __init__(self, file: Path) -> None:
        library = optional("tokenizers", "tokenizers")
        try:
            self._of = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{file}: is not a tokenizer ({error}); give a whole tokenizer.json") from error
        self._of.no_truncation()
        self._of.no_padding()
        ids: dict[str, int] = self._of.get_vocab(with_added_tokens=True)
        self.vocab = max(ids.values()) + 1
        ends = [ids[token] for token in (_named_end(file.parent), *_ENDS) if token in ids]
        self.eos = ends[0] if ends else None

    def encode(self, text: str) -> list[int]:
        return list(self._of.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._of.decode(ids))


def _named_end(folder: Path) -> str | None:
    """The `eos_token` of the tokenizer_config.json beside a tokenizer.json."""
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    end: Any = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    return end.get("content") if isinstance(end, dict) else end
