"""Weights on disk: safetensors shards with an index, in the Hugging Face layout.

    model-00001-of-00003.safetensors ...   one per stage, written by its rank
    model.safetensors.index.json           {"metadata": {"total_size"}, "weight_map": {name: file}}

Invariants
  1. Tensors are keyed by canonical parameter name, never by rank: any number of ranks opens them.
  2. A folder is a checkpoint from the moment its index exists. The index is written last, and no
     shard is written into a folder that has one: a kill at any byte corrupts nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mpipipe.errors import CheckpointError
from mpipipe.state.files import write_text, write_whole
from mpipipe.values import digest

INDEX = "model.safetensors.index.json"


def shard_name(shard_index: int, n_shards: int) -> str:
    """File name of shard `shard_index`, counted from 0."""
    return f"model-{shard_index + 1:05d}-of-{n_shards:05d}.safetensors"


def save_shard(
    folder: str | Path, shard_index: int, n_shards: int, tensors: Mapping[str, torch.Tensor]
) -> str:
    """Writes one shard and gives its file name. A tied parameter goes under one name only.
    Raises CheckpointError."""
    folder, name = Path(folder), shard_name(shard_index, n_shards)
    if (folder / INDEX).exists():
        raise CheckpointError(f"{folder}: already holds a whole checkpoint; save to another folder")
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, lambda partial: save_file(plain, partial, metadata={"format": "pt"}))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{folder / name}: cannot be written ({error})") from error
    return name


def write_index(folder: str | Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Makes the folder a checkpoint, once every shard is there. weight_map: parameter -> file name;
    total_size: bytes of all tensors. Raises CheckpointError when a shard is missing."""
    folder = Path(folder)
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise CheckpointError(
                f"{folder / file}: missing, but the index is about to name it; save it first"
            )
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    try:
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"{folder / INDEX}: cannot be written ({error})") from error


def read_index(folder: str | Path) -> dict[str, str]:
    """Parameter name -> shard file, in the order written. Raises CheckpointError."""
    path = Path(folder) / INDEX
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): str(file) for key, file in index["weight_map"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: not found; the folder is no checkpoint, or one that was cut off"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not an index of safetensors shards ({error!r})") from error


def load(folder: str | Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors called `names`, or all, in the index's order; reads only those.
    Raises CheckpointError for a name, a shard or a tensor that is not there."""
    index = read_index(folder)
    asked = set(index if names is None else names)
    unknown = sorted(asked - set(index))
    if unknown:
        raise CheckpointError(f"{folder}: has no parameter '{unknown[0]}' ({len(unknown)} names are missing)")
    wanted = [key for key in index if key in asked]
    found: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(index[key] for key in wanted):
        found |= _read_shard(Path(folder) / file, [key for key in wanted if index[key] == file])
    return {key: found[key] for key in wanted}


def _read_shard(path: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as shard:
            return {name: shard.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); the checkpoint is damaged") from error


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """sha256 of a tensor's name, dtype, shape and bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    h = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    h.update(flat.view(torch.uint8).numpy().data)
    return h.hexdigest()


def weights_sha256(digests: Sequence[str]) -> str:
    """One sha256 for the whole model, from its tensors' digests in canonical order: the same for
    every cut, so two runs with equal bits print equal lines."""
    return digest(*digests)
