"""One safetensors file, read tensor by tensor into memory that is already there.

    8 bytes: length of the header | header: JSON {name: {dtype, shape, data_offsets}} | the values

The library's own reader maps the file, and mapped pages count as memory of this process. This one
reads what is asked for, straight into its place. It checks the header against the size of the file,
so a file that was cut off is noticed before the first value is used.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpipipe.errors import CheckpointError
from mpipipe.graph.program import spec
from mpipipe.values import TensorSpec

DTYPES = {  # the format's words -> torch's
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip


class Shard:
    """specs: name -> shape and dtype of each tensor in the file."""

    def __init__(self, path: str | Path) -> None:
        """Reads the header alone. Raises OSError, or ValueError for a file that is damaged."""
        self.path = Path(path)
        self.specs: dict[str, TensorSpec] = {}
        self._starts: dict[str, int] = {}
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            text = file.read(length)
        try:
            self._read_header(json.loads(text), 8 + length, size)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a header of safetensors: {error!r}") from error

    def _read_header(self, header: dict[str, Any], start: int, size: int) -> None:
        end = start
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            found = TensorSpec(tuple(entry["shape"]), DTYPES[entry["dtype"]])
            first, last = (start + offset for offset in entry["data_offsets"])
            nbytes = math.prod(found.shape) * getattr(torch, found.dtype).itemsize
            if first < start or last - first != nbytes:
                raise ValueError(f"'{name}' has {last - first} bytes, {found} needs {nbytes}")
            self.specs[name], self._starts[name], end = found, first, max(end, last)
        if end != size:
            raise ValueError(f"{size} bytes, the header promises {end}")

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
        self._fill(target.view(-1).view(torch.uint8).numpy().data, self._starts[name])
        if not direct:
            out.detach().copy_(target)

    def read_part(self, name: str, first: int, out: Tensor) -> None:
        """Fills `out`, contiguous, 1-D and of the dtype on disk, with the elements of `name` from number
        `first` on. Raises OSError."""
        self._fill(out.view(torch.uint8).numpy().data, self._starts[name] + first * out.itemsize)

    def _fill(self, memory: memoryview, start: int) -> None:
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            while memory:  # one read gives 2 GiB at most
                count = file.readinto(memory)
                if not count:
                    raise OSError(f"it ends {len(memory)} bytes too soon")
                memory = memory[count:]
