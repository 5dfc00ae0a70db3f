"""Token files, memory-mapped: ids as `python -m mpipipe tokenize` and nanoGPT write them, and Megatron's.

name.bin               uint16 or uint32, little-endian, nothing else
name.json              beside it, of ours: {"dtype": "uint16", "vocab": 50257, "tokens": 301966}
name.bin + name.idx    Megatron's indexed data set; its documents are taken as one line of ids
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpipipe.data.tokenizer import Tokenizer
from mpipipe.data.windows import Part, Windows
from mpipipe.errors import DataError
from mpipipe.state.files import kind_of
from mpipipe.values import Value, from_json

Dtype = Literal["uint16", "uint32"]
Kind = Literal["auto", Dtype]
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_HALVES, _SURE = 1 << 16, 32  # words of a bare file that are looked at; of them, at least so many must tell
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, number of documents, of their boundaries
_DOCUMENTS = 1 << 16  # of an index that are looked at at a time: it may name hundreds of millions
_MEGATRON = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class Sidecar(Value):
    """What the bytes of a token file do not tell."""

    dtype: Dtype
    vocab: int  # ids are below this
    tokens: int


class Tokens(Windows):
    """`Windows` of a token file. Validation: `val_path`, or else the last `val_fraction` of `path`.

    Number of ids: what the sidecar, the tokenizer or `told` (data.vocab) says, which must agree and be no
    more than `vocab`, that of the model; where nothing says it, `vocab` itself.
    Raises DataError when a file is missing, damaged or too short, or has ids beyond the vocabulary.
    """

    def __init__(
        self, path: Path, val_path: Path | None, dtype: Kind, context: int, val_fraction: float,
        val_batch: int, val_batches: int, vocab: int | None, seed: int, tokenizer: Tokenizer | None = None,
        told: int | None = None,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        most = told or (tokenizer.vocab if tokenizer else vocab)
        train, known = open_tokens(path, dtype, most)
        if val_path is None:
            train, val = train.split(val_fraction)
        else:
            val, val_known = open_tokens(val_path, dtype, known or most)
            if None not in (known, val_known) and known != val_known:
                raise DataError(
                    f"{path} has {known} ids in its vocabulary, {val_path} has {val_known}; "
                    "write both with one tokenizer"
                )
            known = known or val_known
        said = {
            "its sidecar": known,
            "data.tokenizer": tokenizer.vocab if tokenizer else None,
            "data.vocab": told,
        }
        vocab = _agreed(path, {name: n for name, n in said.items() if n is not None}, vocab)
        fraction = val_fraction if val_path is None else None
        super().__init__(train, val, vocab, context, val_batch, val_batches, seed, val_fraction=fraction)

    def encode(self, text: str) -> list[int] | None:
        return self._tokenizer.encode(text) if self._tokenizer else None

    def decode(self, ids: list[int]) -> str | None:
        return self._tokenizer.decode(ids) if self._tokenizer else None


def _agreed(path: Path, said: dict[str, int], model: int | None) -> int:
    if len(set(said.values())) > 1:
        raise DataError(
            f"{path}: {', '.join(f'{name} has {n} ids' for name, n in said.items())}; give the tokenizer "
            "that wrote the file, and leave data.vocab out where something else tells it"
        )
    known = next(iter(said.values()), None)
    if known is not None and model is not None and known > model:
        raise DataError(
            f"{path}: its vocabulary has {known} ids, the model has {model}; give the model {known} or more "
            "(a built-in one: set model.vocab to null)"
        )
    if (vocab := known or model) is None:
        raise DataError(f"{path}: nothing says how many ids there are; set data.vocab (GPT-2's: 50257)")
    return vocab


def open_tokens(path: Path, dtype: Kind, vocab: int | None = None) -> tuple[Part, int | None]:
    """The ids of a token file, and the size of the vocabulary where its sidecar tells it. vocab: that
    size, as far as others know it. A bare file is taken for uint16; DataError where it looks otherwise."""
    prefix = path.name.removesuffix(".bin")  # Megatron names the pair by it
    if (index := path.with_name(f"{prefix}.idx")).is_file():
        path = path.with_name(f"{prefix}.bin")
        return Part(path, _megatron(path, index)), None
    sidecar = read_sidecar(path)
    written: Dtype = sidecar.dtype if sidecar else "uint16"
    kind: Dtype = written if dtype == "auto" else dtype
    if sidecar and kind != written:
        raise DataError(f"{path}: data.dtype = {dtype}, its sidecar says {written}; set data.dtype to auto")
    ids = _map(path, DTYPES[kind])
    if dtype == "auto" and not sidecar:
        _check_bare(path, ids, vocab)
    if sidecar and sidecar.tokens != len(ids):
        raise DataError(
            f"{path}: holds {len(ids)} tokens, its sidecar says {sidecar.tokens}; write the file again, or "
            f"rename {sidecar_path(path).name} if it belongs to another"
        )
    return Part(path, ids), sidecar.vocab if sidecar else None


def _check_bare(path: Path, ids: NDArray[Any], vocab: int | None) -> None:
    """ids: as uint16, of a file that says nothing of itself."""
    if vocab is not None and vocab > 1 << 16:
        raise DataError(
            f"{path}: nothing says its dtype, and the vocabulary has {vocab} ids, uint16 holds 65536; set "
            "data.dtype=uint32, or uint16 if it was written so"
        )
    low, high = ids[: len(ids) // 2 * 2][:_HALVES].reshape(-1, 2).T  # of uint32, little-endian
    for bound in (1, 256):  # every id below 65536; below 16 million
        n = int((low >= bound).sum())
        if n >= _SURE and (high < bound).all():  # tokens of uint16 would be so once in 2**n
            raise DataError(
                f"{path}: nothing says its dtype, and it looks like uint32: of its first {len(low)} pairs of "
                f"uint16, {n} begin with {bound} or more and none ends so; set data.dtype=uint32, or uint16 "
                "if it was written so"
            )


def sidecar_path(path: Path) -> Path:
    return path.with_suffix(".json")


def read_sidecar(path: Path) -> Sidecar | None:
    """What is known of the token file `path`; None where nothing stands beside it. Raises DataError."""
    if not (beside := sidecar_path(path)).is_file():
        return None
    try:
        return from_json(Sidecar, beside.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{beside}: does not describe a token file ({error}); rename it", kind=kind_of(error)
        ) from error


def _map(path: Path, dtype: str) -> NDArray[Any]:
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except ValueError as error:  # numpy cannot map an empty file
        raise DataError(f"{path}: is empty; make it with: python -m mpipipe tokenize") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); name a token file that every node sees (data.path, "
            "data.val_path), or make one with: python -m mpipipe tokenize",
            kind=kind_of(error),
        ) from error
    if len(raw) % (size := np.dtype(dtype).itemsize):
        raise DataError(
            f"{path}: {len(raw)} bytes are not a multiple of the {size} of a token; the file is cut off, or "
            "data.dtype is wrong"
        )
    return raw.view(dtype)


def _megatron(path: Path, index: Path) -> NDArray[Any]:
    """The ids of Megatron-LM's indexed data set (Shoeybi et al. 2019), format version 1."""
    with index.open("rb") as file:
        magic, version, code, n, _ = _HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size, b"\0"))
    if magic != _MAGIC or version != 1 or code not in _MEGATRON:
        raise DataError(
            f"{index}: starts with {magic!r}, version {version}, dtype {code}; expected {_MAGIC!r}, 1 and "
            f"an integer type ({', '.join(map(str, _MEGATRON))}); give Megatron's index, or remove it if "
            f"{path.name} holds bare tokens"
        )
    if (nbytes := index.stat().st_size) < _HEAD.size + 12 * n:
        raise DataError(f"{index}: {nbytes} bytes are too few for its {n} documents; copy the file again")
    all_lengths = np.memmap(index, "<i4", "r", _HEAD.size, (n,))
    all_starts = np.memmap(index, "<i8", "r", _HEAD.size + 4 * n, (n,))
    ids = _map(path, _MEGATRON[code])
    total, without_gaps = 0, True
    for first in range(0, n, _DOCUMENTS):
        lengths = all_lengths[first : first + _DOCUMENTS].astype(np.int64)
        ends = total + np.cumsum(lengths)
        starts = all_starts[first : first + _DOCUMENTS]
        without_gaps &= np.array_equal(starts, (ends - lengths) * ids.itemsize)
        total = int(ends[-1])
    if not without_gaps or total != len(ids):
        raise DataError(
            f"{index}: its documents hold {total} tokens, {path.name} holds {len(ids)}, and they "
            "must stand there without gaps; give the pair that was written together"
        )
    return ids
