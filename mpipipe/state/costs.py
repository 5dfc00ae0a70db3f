"""Costs that outlive a run: one JSON file for each kind of machine, read and written by rank 0.

    <cache folder>/costs-<digest of the kind>.json   {"kind": ..., "samples": {name: Sample},
                                                      "routes": {name: routes of the matrix products},
                                                      "tables": {name: which operators are our own},
                                                      "overlaps": {name: how messages move on},
                                                      "updates": {name: what an optimizer's update takes}}

No locks: a file appears whole, under its name, by a rename. Of two jobs that write at once, one loses an
update, which its next run makes again. What cannot be read or written is never an error, at most a note.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from mpipipe.cluster.overlap import Overlap
from mpipipe.cluster.routes import Route
from mpipipe.graph.pieces import Sample
from mpipipe.runtime.costing import Updates
from mpipipe.values import Value, digest, from_json, to_json

MOST = 4096  # samples in a file; about 1 MB
Routes = tuple[Route, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class _Content(Value):
    kind: str
    samples: dict[str, Sample] = field(default_factory=dict)  # the last used are last
    routes: dict[str, Routes] = field(default_factory=dict)  # likewise
    tables: dict[str, dict[str, str]] = field(default_factory=dict)  # likewise
    overlaps: dict[str, Overlap] = field(default_factory=dict)  # likewise
    updates: dict[str, Updates] = field(default_factory=dict)  # likewise


class CostCache:
    """folder: None = nothing is kept. kind: of the machine, as in `Device.kind`; say: takes a note."""

    def __init__(self, folder: Path | None, kind: str, say: Callable[[str], object]) -> None:
        self._path = None if folder is None else folder / f"costs-{digest(kind)[:16]}.json"
        self._kind, self._say = kind, say

    def read(self) -> dict[str, Sample]:
        """By name (`mpipipe.runtime.known.names_of`); empty where there are none."""
        return self._content().samples

    def routes(self) -> dict[str, Routes]:
        """By name (`mpipipe.runtime.gemm`); empty where there are none."""
        return self._content().routes

    def tables(self) -> dict[str, dict[str, str]]:
        """By name (`mpipipe.runtime.op_table`); empty where there are none."""
        return self._content().tables

    def overlaps(self) -> dict[str, Overlap]:
        """By name (`mpipipe.cluster.overlap`); empty where there are none."""
        return self._content().overlaps

    def updates(self) -> dict[str, Updates]:
        """By name (`mpipipe.runtime.costing`); empty where there are none."""
        return self._content().updates

    def write(
        self, samples: Mapping[str, Sample] = MappingProxyType({}),
        routes: Mapping[str, Routes] = MappingProxyType({}),
        tables: Mapping[str, dict[str, str]] = MappingProxyType({}),
        overlaps: Mapping[str, Overlap] = MappingProxyType({}),
        updates: Mapping[str, Updates] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Adds to what is there; the least lately used go when there are too many."""
        if self._path is None or not (samples or routes or tables or overlaps or updates):
            return
        there = _Content(self._kind)
        with suppress(ValueError):
            there = self._there(self._path)
        now = _Content(
            self._kind, _newest(there.samples, samples), _newest(there.routes, routes),
            _newest(there.tables, tables), _newest(there.overlaps, overlaps), _newest(there.updates, updates),
        )  # fmt: skip
        with suppress(OSError):  # no home, a read-only one, a full disk
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path, to_json(now, None))

    def _content(self) -> _Content:
        if self._path is None:
            return _Content(self._kind)
        try:
            return self._there(self._path)
        except ValueError as error:
            self._say(f"note: {self._path} is damaged, and made anew ({str(error).splitlines()[0]})")
            return _Content(self._kind)

    def _there(self, path: Path) -> _Content:
        """Raises ValueError where the file is not one of ours."""
        try:
            return from_json(_Content, path.read_bytes())
        except OSError:
            return _Content(self._kind)


def _newest(there: Mapping[str, T], new: Mapping[str, T]) -> dict[str, T]:
    kept = {name: value for name, value in there.items() if name not in new}
    return dict(list({**kept, **new}.items())[-MOST:])


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
