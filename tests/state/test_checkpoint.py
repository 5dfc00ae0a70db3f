"""Checkpoints: the same bits back, the Hugging Face layout, and nothing lost to a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from mpipipe.errors import CheckpointError
from mpipipe.state import files
from mpipipe.state.checkpoint import (
    INDEX,
    load,
    read_index,
    save_shard,
    shard_name,
    tensor_digest,
    weights_sha256,
    write_index,
)

WEIGHTS = {
    "wte.weight": torch.randn(7, 3),
    "blocks.0.bias": torch.randn(5).bfloat16(),
    "steps": torch.tensor(3),
    "mask": torch.tensor([True, False]),
    "empty": torch.empty(0, 4),
    "ln.weight": torch.randn(4, dtype=torch.float64),
}


def save(folder: Path, weights: dict[str, torch.Tensor], n_shards: int) -> None:
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(n_shards):
        part = {name: weights[name] for name in names[shard::n_shards]}
        file = save_shard(folder, shard, n_shards, part)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, {name: weight_map[name] for name in names}, sum(t.nbytes for t in weights.values()))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(tensor_digest(k, a[k]) == tensor_digest(k, b[k]) for k in a)


@pytest.mark.parametrize("n_shards", [1, 2, 4, 8])
def test_the_same_bits_come_back_for_any_number_of_shards(tmp_path: Path, n_shards: int) -> None:
    save(tmp_path, WEIGHTS, n_shards)
    assert same(load(tmp_path), WEIGHTS)
    assert same(load(tmp_path, {"mask", "steps"}), {k: WEIGHTS[k] for k in ("steps", "mask")})
    assert load(tmp_path, []) == {}
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".part")]


def test_the_layout_is_that_of_hugging_face(tmp_path: Path) -> None:
    save(tmp_path, WEIGHTS, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in WEIGHTS.values())
    assert index["weight_map"]["wte.weight"] == shard_name(0, 2)
    assert list(read_index(tmp_path)) == list(WEIGHTS)


def test_views_of_one_flat_buffer_and_strided_tensors_are_saved(tmp_path: Path) -> None:
    flat = torch.randn(24)
    weights = {"a": flat[:6].view(2, 3), "b": flat[8:24].view(4, 4), "c": torch.randn(3, 5).t()}
    save(tmp_path, {k: v.requires_grad_() if v.is_leaf else v for k, v in weights.items()}, 1)
    assert same(load(tmp_path), weights)


@pytest.mark.parametrize("last", range(12))
def test_a_kill_between_any_two_system_calls_leaves_a_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    calls = 0

    def mortal(real):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls > last:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(files.os, "fsync", mortal(os.fsync))
    monkeypatch.setattr(Path, "replace", mortal(Path.replace))
    killed = False
    try:
        save(tmp_path, WEIGHTS, 2)
    except KeyboardInterrupt:
        killed = True
    monkeypatch.undo()
    # Three files of three calls each; the folder is a checkpoint from the index's rename on.
    assert killed == (last < 9)
    if last < 8:
        with pytest.raises(CheckpointError, match="not found"):
            load(tmp_path)
        save(tmp_path, WEIGHTS, 2)
    assert same(load(tmp_path), WEIGHTS)


def test_a_whole_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    save(tmp_path, WEIGHTS, 1)
    with pytest.raises(CheckpointError, match="already holds"):
        save_shard(tmp_path, 0, 1, {"wte.weight": torch.zeros(7, 3)})
    assert same(load(tmp_path), WEIGHTS)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"index.json: not found"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"00001-of-00001.*missing"):
        write_index(tmp_path, {"a": shard_name(0, 1)}, 4)
    save(tmp_path, WEIGHTS, 2)
    with pytest.raises(CheckpointError, match="no parameter 'head'"):
        load(tmp_path, ["head", "mask"])
    second = tmp_path / shard_name(1, 2)
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*damaged"):
        load(tmp_path)
    assert same(load(tmp_path, ["wte.weight"]), {"wte.weight": WEIGHTS["wte.weight"]})
    second.unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        load(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index"):
        load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_shard(tmp_path / "file", 0, 1, {})


def test_digests_tell_name_shape_dtype_and_bits_apart() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    others = [
        tensor_digest("b", x),
        tensor_digest("a", x.view(2, 2)),
        tensor_digest("a", x.view(torch.int32)),
        tensor_digest("a", torch.tensor([-0.0, 1.0, 2.0, 3.0])),
        tensor_digest("a", x.double()),
    ]
    assert len({tensor_digest("a", x), *others}) == 6
    assert tensor_digest("a", x.view(2, 2).t()) == tensor_digest("a", x.view(2, 2).t().contiguous())
    assert tensor_digest("a", x) == "088d0596eb6245e3190a9815151adac5c5b5c22702dc53c10030ecd7f435e528"
    assert weights_sha256(["1", "2"]) != weights_sha256(["2", "1"])
    assert weights_sha256(["1", "2"]) != weights_sha256(["12"])
