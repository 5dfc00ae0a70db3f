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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mpipipe.cluster.overlap import Overlap
from mpipipe.graph.pieces import Sample
from mpipipe.runtime.costing import Updates
from mpipipe.runtime.gemm import Routes
from mpipipe.values import Value, digest, from_json, to_json

MOST = 4096  # samples in a file; about 1 MB


@dataclass(frozen=True)
class Kept(Value):
    """What a file has. Of each, by the name under which it is found again, the last used are last."""

    kind: str = ""
    samples: dict[str, Sample] = field(default_factory=dict)  # names: `mpipipe.runtime.known.names_of`
    routes: dict[str, Routes] = field(default_factory=dict)  # `mpipipe.runtime.gemm`
    tables: dict[str, dict[str, str]] = field(default_factory=dict)  # `mpipipe.runtime.op_table`
    overlaps: dict[str, Overlap] = field(default_factory=dict)  # `mpipipe.cluster.overlap`
    updates: dict[str, Updates] = field(default_factory=dict)  # `mpipipe.runtime.costing`


class CostCache:
    """folder: None = nothing is kept. kind: of the machine, as in `Device.kind`; say: takes a note; quiet:
    whether others leave the machine alone. Else times are not kept; what decides bits is, so that all starts
    have the same."""

    def __init__(
        self, folder: Path | None, kind: str, say: Callable[[str], object], quiet: bool = True
    ) -> None:
        self._path = None if folder is None else folder / f"costs-{digest(kind)[:16]}.json"
        self._kind, self._say, self._quiet = kind, say, quiet

    def read(self) -> Kept:
        """What is there."""
        if self._path is None:
            return Kept(self._kind)
        try:
            return self._there(self._path)
        except ValueError as error:
            self._say(f"note: {self._path} is damaged, and made anew ({str(error).splitlines()[0]})")
            return Kept(self._kind)

    def write(self, new: Kept) -> None:
        """Adds to what is there; the least lately used go when there are too many."""
        new = new if self._quiet else Kept(routes=new.routes, tables=new.tables)
        if self._path is None or new == Kept():
            return
        there = Kept(self._kind)
        with suppress(ValueError):
            there = self._there(self._path)
        names = [f.name for f in fields(Kept) if f.name != "kind"]
        every = {name: _newest(getattr(there, name), getattr(new, name)) for name in names}
        with suppress(OSError):  # no home, a read-only one, a full disk
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path, to_json(Kept(self._kind, **every), None))

    def _there(self, path: Path) -> Kept:
        """Raises ValueError where the file is not one of ours."""
        try:
            return from_json(Kept, path.read_bytes())
        except OSError:
            return Kept(self._kind)


def _newest(there: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
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
