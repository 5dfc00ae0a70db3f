"""A checkpoint copied into other files: merged into fewer, or as a plain folder of Hugging Face.

Tensor by tensor, a few MiB at a time. What is read is checked against run.json before the new folder gets its
name, so a damaged checkpoint leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from mpipipe.errors import CheckpointError
from mpipipe.state.checkpoint import Kind, Reader, index_name, shard_name, write_index
from mpipipe.state.digests import PIECE_BYTES, pieces_of
from mpipipe.state.files import inside, parse_json, read_small, sync_folder, write_text, write_whole
from mpipipe.state.parts import file_facts
from mpipipe.state.pretrained import CONFIG, SINGLE
from mpipipe.state.resume import RUN, RunState, read_state, to_text
from mpipipe.state.shards import nbytes_of
from mpipipe.state.verify import flaw, read_flaw
from mpipipe.state.writing import File, Written, write_shard
from mpipipe.values import TensorSpec

KINDS: tuple[Kind, ...] = ("model", "optimizer")


def merge(folder: Path, out: Path, file_bytes: int) -> RunState:
    """A checkpoint from which a run goes on as from `folder`, in files of `file_bytes` at most, or of one
    tensor. Raises CheckpointError."""
    state = read_state(folder)
    with _whole_folder(out) as partial:
        names = _companions(folder, partial, state.files)
        shards: dict[str, File] = {}
        for kind in KINDS:
            reader = Reader(folder, kind)
            written = _copy(reader, state.files, partial, kind, file_bytes)
            shards |= {w.file: w.facts for w in written}
            names.append(_index(written, reader.names, partial, kind))
        merged = replace(state, files={name: file_facts(partial / name) for name in names} | shards)
        write_text(partial / RUN, to_text(merged))
    return merged


def export(folder: Path, out: Path, file_bytes: int, dtype: str | None = None) -> dict[str, int]:
    """The parameters and buffers alone, as `from_pretrained` and the library of safetensors read them: one
    file, or several with an index, and what the model brought along, such as config.json. Gives the bytes of
    each file of weights.

    dtype: of all floating-point tensors, rounded to the nearest; None: as they are. Raises CheckpointError.
    """
    state = read_state(folder)
    with _whole_folder(out) as partial:
        if CONFIG in _companions(folder, partial, state.files) and dtype is not None:
            _say_dtype(partial / CONFIG, dtype)
        reader = Reader(folder)
        written = _copy(reader, state.files, partial, "model", file_bytes, dtype)
        sizes = {w.file: w.facts.nbytes for w in written}
        if len(written) == 1:
            (partial / written[0].file).rename(partial / SINGLE)
            return {SINGLE: sizes[written[0].file]}
        _index(written, reader.names, partial, "model")
    return sizes


def _copy(
    reader: Reader,
    files: Mapping[str, File],
    out: Path,
    kind: Kind,
    file_bytes: int,
    dtype: str | None = None,
) -> list[Written]:
    """All tensors, in the order of the index. files: of the manifest, to check them by."""
    specs = {name: _as(spec, dtype) for name, spec in reader.specs.items()}
    split = _split(specs, file_bytes)
    buffer = bytearray(PIECE_BYTES)

    def pieces(name: str) -> Iterator[memoryview]:
        stored = reader.spec(name)
        for piece in reader.pieces(name, buffer):
            if stored == specs[name]:
                yield piece
            else:
                values = torch.frombuffer(piece, dtype=getattr(torch, stored.dtype))
                yield from pieces_of(values.to(getattr(torch, specs[name].dtype)))

    written = [
        write_shard(out / shard_name(i, len(split), kind), {name: specs[name] for name in names}, pieces)
        for i, names in enumerate(split)
    ]
    for file in [reader.index, *reader.files]:
        if wrong := read_flaw(reader, file, reader.digests, files):
            raise reader.damaged(wrong)
    return written


def _as(spec: TensorSpec, dtype: str | None) -> TensorSpec:
    floating = getattr(torch, spec.dtype).is_floating_point
    return replace(spec, dtype=dtype) if dtype is not None and floating else spec


def _split(specs: Mapping[str, TensorSpec], file_bytes: int) -> list[list[str]]:
    """The names of each file, in order."""
    files: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        if not files or nbytes_of(spec) > room:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= nbytes_of(spec)
    return files


def _index(written: Sequence[Written], order: Iterable[str], out: Path, kind: Kind) -> str:
    file_of = {name: w.file for w in written for name in w.digests}
    write_index(out, {name: file_of[name] for name in order}, sum(w.tensor_bytes for w in written), kind)
    return index_name(kind)


def _companions(folder: Path, out: Path, files: Mapping[str, File]) -> list[str]:
    """Copies what is neither tensors nor an index; the names."""
    indexes = {index_name(kind) for kind in KINDS}
    found = {n: facts for n, facts in files.items() if n not in indexes and not n.endswith(".safetensors")}
    if wrong := flaw(folder, found):
        raise CheckpointError(f"{wrong}; the checkpoint is damaged")
    for name in found:
        content = read_small(inside(folder, name))
        write_whole(out / name, lambda partial, content=content: partial.write_bytes(content))  # type: ignore[misc]
    return list(found)


def _say_dtype(config: Path, dtype: str) -> None:
    """Where the config of a model says of which type the weights are."""
    told = parse_json(read_small(config))
    told |= {key: dtype for key in ("dtype", "torch_dtype") if isinstance(told.get(key), str)}
    write_text(config, json.dumps(told, indent=2) + "\n")


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name `out` once it is filled. Raises CheckpointError."""
    partial = out.with_name(f"{out.name}.{os.getpid()}.part")
    if out.exists():
        raise CheckpointError(f"{out}: is there already; name a new folder")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed one: a container gives out few numbers
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        partial.rename(out)
        sync_folder(out.parent)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{out}: cannot be made ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
