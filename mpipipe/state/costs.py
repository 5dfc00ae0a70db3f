"""Costs that outlive a run: one JSON file for each kind of machine, read and written by rank 0.

    <cache folder>/costs-<digest of the kind>.json       {"kind": ..., "samples": {name: Sample}}

No locks: a file appears whole, under its name, by a rename. Of two jobs that write at once, one loses an
update, which its next run makes again. What cannot be read or written is never an error, at most a note.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpipipe.graph.profile import Sample
from mpipipe.values import Value, digest, from_json, to_json

MOST = 4096  # samples in a file; about 1 MB


@dataclass(frozen=True)
class _Content(Value):
    kind: str
    samples: dict[str, Sample]  # the last used are last


class CostCache:
    """folder: None = nothing is kept. kind: of the machine, as in `Device.kind`; say: takes a note."""

    def __init__(self, folder: Path | None, kind: str, say: Callable[[str], object]) -> None:
        self._path = None if folder is None else folder / f"costs-{digest(kind)[:16]}.json"
        self._kind, self._say = kind, say

    def read(self) -> dict[str, Sample]:
        """By name (`mpipipe.runtime.known.names_of`); empty where there are none."""
        try:
            return {} if self._path is None else _samples(self._path)
        except ValueError as error:
            self._say(f"note: {self._path} is damaged, and made anew ({str(error).splitlines()[0]})")
            return {}

    def write(self, samples: Mapping[str, Sample]) -> None:
        """Adds to what is there; the least lately used go when there are too many."""
        if self._path is None or not samples:
            return
        there: dict[str, Sample] = {}
        with suppress(ValueError):
            there = {name: s for name, s in _samples(self._path).items() if name not in samples}
        newest = list({**there, **samples}.items())[-MOST:]
        with suppress(OSError):  # no home, a read-only one, a full disk
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path, to_json(_Content(self._kind, dict(newest)), None))


def _samples(path: Path) -> dict[str, Sample]:
    """Raises ValueError where the file is not one of ours."""
    try:
        return from_json(_Content, path.read_bytes()).samples
    except OSError:
        return {}


def _replace(path: Path, text: str) -> None:
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(partial).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(partial).unlink()
        raise
