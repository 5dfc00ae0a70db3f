"""Bytes as tokens: vocabulary 256, no tokenizer, memory-mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpipipe.data.tokenizer import Bytes
from mpipipe.data.windows import Part, Windows
from mpipipe.errors import DataError
from mpipipe.state.files import kind_of

VOCAB = 256


class Text(Windows):
    """`Windows` of the bytes of a file, its last `val_fraction` for validation. Raises DataError when
    the file is missing or too short."""

    def __init__(
        self, path: Path, context: int, val_fraction: float, val_batch: int, val_batches: int, seed: int
    ) -> None:
        train, val = Part(path, _map(path)).split(val_fraction)
        super().__init__(train, val, VOCAB, context, val_batch, val_batches, seed, "bytes", val_fraction)

    def encode(self, text: str) -> list[int] | None:
        return Bytes().encode(text)

    def decode(self, ids: list[int]) -> str | None:
        return Bytes().decode(ids)


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except ValueError as error:  # numpy cannot map an empty file
        raise DataError(f"{path}: is empty; set data.path to a file or folder with text") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); set data.path to a readable file and run.dir to "
            "a folder that every node sees",
            kind=kind_of(error),
        ) from error
