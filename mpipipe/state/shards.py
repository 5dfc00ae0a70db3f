"""One safetensors file, read tensor by tensor into memory that is already there.

    8 bytes: length of the header | header: JSON {name: {dtype, shape, data_offsets}} | the values

The library's own reader maps the file, and mapped pages count as memory of this process. This one
reads what is asked for, straight into its place. It checks the header against the size of the file
and its tensors against each other before anything is allocated: they follow each other without a gap or an
overlap, as the format wants it, so a file that was cut off, or made to do harm, is noticed first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpipipe.errors import CheckpointError
from mpipipe.graph.program import spec
from mpipipe.state.files import JSON_BYTES, parse_json
from mpipipe.values import TensorSpec

DTYPES = {  # the format's words -> torch's
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_MOST, _DIMENSIONS = 1 << 60, 64  # of what torch takes as a shape


class Shard:
    """specs: name -> shape and dtype of each tensor in the file, as they lie in it; header: its bytes."""

    def __init__(self, path: str | Path) -> None:
        """Reads the header alone. Raises OSError, or ValueError for a file that is damaged."""
        self.path = Path(path)
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, JSON_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            self.header = file.read(length)
        try:
            entries = _entries(parse_json(self.header))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a header of safetensors: {error!r}") from error
        self.specs: dict[str, TensorSpec] = {}
        self._starts: dict[str, int] = {}
        end = 8 + length
        for name, found, first, last in sorted(entries, key=lambda entry: entry[2:]):
            if 8 + length + first != end:
                raise ValueError(f"'{name}' begins at byte {8 + length + first}, not {end}")
            self.specs[name], self._starts[name], end = found, end, 8 + length + last
        if end != size:
            raise ValueError(f"{size} bytes, the header promises {end}")

    def pieces(self, name: str, buffer: bytearray) -> Iterator[memoryview]:
        """The bytes of `name`, in order, each piece read into `buffer`. Raises OSError."""
        start = self._starts[name]
        end = start + nbytes_of(self.specs[name])
        with self.path.open("rb", buffering=0) as file:
            for first in range(start, end, len(buffer) or 1):  # a tensor without elements has no piece
                piece = memoryview(buffer)[: min(len(buffer), end - first)]
                _fill(file, piece, first)
                yield piece

    def read(self, name: str, out: Tensor) -> None:
        """Fills `out` with the bits of `name`; a contiguous tensor in main memory without a copy.

        Raises CheckpointError for another shape or dtype, OSError.
        """
        there, mine = self.specs[name], spec(out)
        if there != mine:
            raise CheckpointError(
                f"{self.path}: '{name}' is {there.dtype} {list(there.shape)} on disk, but {mine.dtype} "
                f"{list(mine.shape)} is asked for; use the settings that it was saved with"
            )
        direct = out.device.type == "cpu" and out.is_contiguous()
        target = out.detach() if direct else torch.empty(out.shape, dtype=out.dtype)
        self._read(target.view(-1), self._starts[name])
        if not direct:
            out.detach().copy_(target)

    def read_part(self, name: str, first: int, out: Tensor) -> None:
        """Fills `out`, contiguous, 1-D and of the dtype on disk, with the elements of `name` from number
        `first` on. Raises OSError."""
        self._read(out, self._starts[name] + first * out.itemsize)

    def _read(self, flat: Tensor, start: int) -> None:
        with self.path.open("rb", buffering=0) as file:
            _fill(file, flat.view(torch.uint8).numpy().data, start)


def nbytes_of(spec: TensorSpec) -> int:
    itemsize: int = getattr(torch, spec.dtype).itemsize
    return math.prod(spec.shape) * itemsize


def _entries(header: Any) -> list[tuple[str, TensorSpec, int, int]]:
    """(name, spec, first byte, last byte) of each tensor; nothing is allocated for what a header says.

    Raises ValueError, KeyError, TypeError or AttributeError for one that says nonsense."""
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (first, last) = entry["shape"], entry["data_offsets"]
        counts = all(type(n) is int and 0 <= n < _MOST for n in (*shape, first, last))
        if not counts or type(shape) is not list or len(shape) > _DIMENSIONS or len(entry) != 3:
            raise ValueError(f"'{name}' is {str(entry)[:200]}")
        if math.prod(max(n, 1) for n in shape) >= _MOST:
            raise ValueError(f"'{name}' has the shape {shape}, larger than any tensor")
        there = TensorSpec(tuple(shape), DTYPES[entry["dtype"]])
        if last - first != nbytes_of(there):
            raise ValueError(f"'{name}' has {last - first} bytes, {there} needs {nbytes_of(there)}")
        found.append((name, there, first, last))
    return found


def _fill(file: RawIOBase, memory: memoryview, start: int) -> None:
    file.seek(start)
    while memory:  # one read gives 2 GiB at most
        count = file.readinto(memory)
        if not count:
            raise OSError(f"it ends {len(memory)} bytes too soon")
        memory = memory[count:]
