"""Tensors on disk: safetensors shards with an index, in the Hugging Face layout.

    model-00001-of-00003.safetensors ...       one per rank that owns something, written by it
    model.safetensors.index.json               {"metadata": {"total_size"}, "weight_map": {name: file}}
    optimizer-00001-of-00003.safetensors ...   the same for the optimizer, by "<parameter>/<state>"

Invariants
  1. Tensors are keyed by canonical parameter name, never by rank: any number of ranks opens them.
  2. An index is written when all of its shards are on disk, and no shard is written into a folder
     that has one: a kill at any byte corrupts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from mpipipe.errors import CheckpointError
from mpipipe.graph.program import empty, spec
from mpipipe.state.digests import begun_digest, pieces_of, tensor_digest
from mpipipe.state.files import (
    cannot_read,
    check_name,
    check_proves_damage,
    inside,
    kind_of,
    parse_json,
    read_small,
    write_text,
)
from mpipipe.state.names import compare_names
from mpipipe.state.resume import way_out
from mpipipe.state.shards import Shard
from mpipipe.state.writing import Written, write_shard
from mpipipe.values import TensorSpec

Kind = Literal["model", "optimizer"]


def index_name(kind: Kind = "model") -> str:
    return f"{kind}.safetensors.index.json"


def shard_name(shard_index: int, n_shards: int, kind: Kind = "model") -> str:
    """File name of shard `shard_index`, counted from 0."""
    return f"{kind}-{shard_index + 1:05d}-of-{n_shards:05d}.safetensors"


def save_shard(
    folder: str | Path,
    shard_index: int,
    n_shards: int,
    tensors: Mapping[str, torch.Tensor],
    kind: Kind = "model",
) -> Written:
    """Writes one shard. A tied parameter goes under one name only. Raises CheckpointError."""
    folder, name = Path(folder), shard_name(shard_index, n_shards, kind)
    if (folder / index_name(kind)).exists():
        raise CheckpointError(f"{folder}: already holds a whole checkpoint; save to another folder")
    specs = {key: spec(t) for key, t in tensors.items()}
    return write_shard(folder / name, specs, lambda key: pieces_of(tensors[key]))


def write_index(
    folder: str | Path, weight_map: Mapping[str, str], total_size: int, kind: Kind = "model"
) -> None:
    """Names the shards, once every one is there. weight_map: name -> file; total_size: bytes of all
    tensors. Raises CheckpointError when a shard is missing."""
    folder, path = Path(folder), Path(folder) / index_name(kind)
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise CheckpointError(
                f"{folder / file}: missing, but the index is about to name it; save it first"
            )
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    try:
        write_text(path, json.dumps(index, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})", kind=kind_of(error)) from error


def read_index(folder: str | Path, kind: Kind = "model") -> dict[str, str]:
    """Name -> shard file, in the order written. Raises CheckpointError."""
    path = Path(folder) / index_name(kind)
    try:
        found = {name: str(file) for name, file in parse_json(read_small(path))["weight_map"].items()}
        for file in set(found.values()):
            check_name(file)
        return found
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: not found; the folder is no checkpoint, or one that was cut off"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        check_proves_damage(path, error)
        raise CheckpointError(f"{path}: is not an index of safetensors shards ({error!r})") from error


class Reader:
    """Reads single tensors of a checkpoint; a rank reads what it owns, and what it is to `keep`.

    index: the file that names them; names: what the checkpoint holds, in canonical order; digests:
    `tensor_digest` of what was read. Raises CheckpointError, here and below, with the file and the next move.
    The folder is settled here: a link that moves on later does not mix two steps.
    """

    def __init__(self, folder: str | Path, kind: Kind = "model") -> None:
        self.folder, self.index = Path(folder).resolve(), index_name(kind)
        try:
            inside(self.folder, self.index)
        except ValueError as error:
            raise self.damaged(f"{self.folder}: {error}") from error
        self._index = read_index(self.folder, kind)
        self._shards: dict[str, Shard] = {}
        self.digests: dict[str, str] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self.names: Collection[str] = self._index.keys()

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """The names in each file, in order."""
        found: dict[str, list[str]] = {}
        for name, file in self._index.items():
            found.setdefault(file, []).append(name)
        return found

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor; reads the header of every shard."""
        return {name: self.spec(name) for name in self.names}

    def spec(self, name: str) -> TensorSpec:
        return self._shard(name).specs[name]

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills `out`, which has the shape and dtype of the tensor, with its bits."""
        if name in self._kept:
            out.copy_(self._kept[name])
            return
        shard = self._shard(name)
        with self._reading(shard.path):
            shard.read(name, out)
        self.digests[name] = tensor_digest(name, out)

    def keep(self, names: Iterable[str]) -> None:
        """Has these in memory: they are to be read again when the files may be gone."""
        for name in names:
            found = empty(self.spec(name))
            self.read(name, found)
            self._kept[name] = found

    def pieces(self, name: str, buffer: bytearray) -> Iterator[memoryview]:
        """The bytes of a tensor, in order, each piece read into `buffer`."""
        shard = self._shard(name)
        h = begun_digest(name, shard.specs[name])
        with self._reading(shard.path):
            for piece in shard.pieces(name, buffer):
                h.update(piece)
                yield piece
        self.digests[name] = h.hexdigest()

    def check(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Raises CheckpointError unless names, shapes and dtypes are exactly those wanted."""
        compare_names(self.specs, wanted, str(self.folder), dtypes=True)

    def _shard(self, name: str) -> Shard:
        if name not in self._index:
            raise CheckpointError(f"{self.folder}: has no tensor '{name}', among {len(self._index)} others")
        file = self._index[name]
        if file not in self._shards:
            with self._reading(self.folder / file):
                self._shards[file] = Shard(inside(self.folder, file))
        if name not in self._shards[file].specs:
            raise self.damaged(f"{self.folder / file}: lacks '{name}', which the index promises")
        return self._shards[file]

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        """Makes a CheckpointError of what is found wrong with a file."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise self.damaged(cannot_read(path, error)) from error

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{what}; the checkpoint is damaged\n  {way_out(self.folder)}")


def load(folder: str | Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """The parameters and buffers called `names`, or all, in the index's order; reads only those.
    Raises CheckpointError for a name, a shard or a tensor that is not there."""
    source = Reader(folder)
    asked = set(source.names if names is None else names)
    unknown = sorted(asked - set(source.names))
    if unknown:
        raise CheckpointError(f"{folder}: has no parameter '{unknown[0]}' ({len(unknown)} names are missing)")
    found = {}
    for name in (name for name in source.names if name in asked):
        found[name] = empty(source.spec(name))
        source.read(name, found[name])
    return found
