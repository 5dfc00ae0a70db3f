"""One safetensors file, written piece by piece and hashed on the way.

The library's own writer makes a copy of all tensors first and holds Python's lock meanwhile. This one holds
it between pieces only, so a thread writes while another one trains, and tensors may come from anywhere:
memory, another file, a conversion.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mpipipe.cluster.memory import BUFFER_BYTES
from mpipipe.errors import CheckpointError
from mpipipe.state.digests import pieces_digest, shard_sha256
from mpipipe.state.files import free_bytes, kind_of, write_whole
from mpipipe.state.shards import DTYPES, nbytes_of
from mpipipe.values import TensorSpec, Value

_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class File(Value):
    """Of a checkpoint, as its manifest has it."""

    nbytes: int
    sha256: str  # of a shard `shard_sha256`, else of its bytes


@dataclass(frozen=True)
class Written(Value):
    """A shard that is on disk under its name."""

    file: str
    facts: File
    tensor_bytes: int
    digests: dict[str, str]  # of its tensors, as they lie in it


def check_storable(specs: Mapping[str, TensorSpec], where: str) -> None:
    """Raises CheckpointError for a tensor that no shard can hold."""
    if strange := [name for name, spec in specs.items() if spec.dtype not in _WORDS]:
        raise CheckpointError(
            f"{where}: '{strange[0]}' is {specs[strange[0]].dtype}, for which safetensors has no word; keep "
            "it as another type"
        )


def write_shard(
    path: Path, specs: Mapping[str, TensorSpec], pieces: Callable[[str], Iterable[memoryview]]
) -> Written:
    """pieces: the bytes of a tensor, in order. Raises CheckpointError."""
    check_storable(specs, str(path))
    order = sorted(specs, key=lambda name: -_itemsize(specs[name]))  # so that each is aligned
    header = _header({name: specs[name] for name in order})
    digests: dict[str, str] = {}

    def write(partial: Path) -> None:
        with closing(_File(partial)) as file:
            file.write(memoryview(len(header).to_bytes(8, "little") + header))
            for name in order:
                digests[name] = pieces_digest(name, specs[name], file.written(pieces(name)))
            file.flush()

    tensor_bytes = sum(map(nbytes_of, specs.values()))
    nbytes = 8 + len(header) + tensor_bytes
    free = free_bytes(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error}); it needs {nbytes} bytes, {free} were free",
            kind=kind_of(error),
        ) from error
    facts = File(nbytes, shard_sha256(header, list(digests.values())))
    return Written(path.name, facts, tensor_bytes, digests)


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, spec in specs.items():
        end = start + nbytes_of(spec)
        entries[name] = {
            "dtype": _WORDS[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end],
        }  # fmt: skip
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // 8) * 8)


class _File:
    """Written past the page cache, where the file system can: a sixth of the processor's time, which training
    needs, and the cache keeps what is read. Whole buffers only; the rest of the file goes the usual way."""

    def __init__(self, path: Path) -> None:
        self._direct = getattr(os, "O_DIRECT", 0)
        try:
            self._file = os.open(path, os.O_WRONLY | self._direct)
        except OSError:  # such as that of memory
            self._file, self._direct = os.open(path, os.O_WRONLY), 0
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # begins at a page, as it must
        self._filled = 0

    def written(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self.write(piece)
            yield piece

    def write(self, piece: memoryview) -> None:
        while piece:
            count = min(len(piece), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = piece[:count]
            self._filled, piece = self._filled + count, piece[count:]
            if self._filled == len(self._buffer):
                self._out()

    def flush(self) -> None:
        self._usual()
        self._out()

    def close(self) -> None:
        os.close(self._file)

    def _out(self) -> None:
        left, self._filled = self._buffer[: self._filled], 0
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._usual()  # larger blocks than a page, or a part was written

    def _usual(self) -> None:
        if self._direct:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~self._direct)
            self._direct = 0


def _itemsize(spec: TensorSpec) -> int:
    return nbytes_of(TensorSpec((1,), spec.dtype))
