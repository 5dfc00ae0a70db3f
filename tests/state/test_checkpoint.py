"""Checkpoints: the same bits back, the Hugging Face layout, and nothing lost to a kill."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpipipe.errors import CheckpointError
from mpipipe.state import files, writing
from mpipipe.state.checkpoint import (
    Reader,
    index_name,
    load,
    read_index,
    save_shard,
    shard_name,
    write_index,
)
from mpipipe.state.digests import tensor_digest, weights_sha256
from mpipipe.state.shards import DTYPES, Shard
from mpipipe.values import TensorSpec

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
        file = save_shard(folder, shard, n_shards, part).file
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
    index = json.loads((tmp_path / index_name()).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in WEIGHTS.values())
    assert index["weight_map"]["wte.weight"] == shard_name(0, 2)
    assert list(read_index(tmp_path)) == list(WEIGHTS)
    theirs = load_file(tmp_path / shard_name(0, 2)) | load_file(tmp_path / shard_name(1, 2))
    assert same({name: theirs[name] for name in WEIGHTS}, WEIGHTS)


@pytest.mark.parametrize("refuses", ["nothing", "open", "write"])
def test_files_of_many_pieces_are_written_past_the_page_cache_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    real, direct = getattr(os, refuses, None), getattr(os, "O_DIRECT", 0)
    refused: list[int] = []

    def call(first: object, second: int, *rest: object) -> int:
        if direct and (second & direct if refuses == "open" else not refused):
            refused.append(errno.EINVAL)
            raise OSError(errno.EINVAL, "as some file systems say")
        assert real is not None
        return real(first, second, *rest)  # type: ignore[no-any-return]

    monkeypatch.setattr(writing, "BUFFER_BYTES", 8192)
    if refuses != "nothing":
        monkeypatch.setattr(writing.os, refuses, call)
    weights = {
        "a": torch.randn(5000),
        "b": torch.randint(0, 9, (3,)).byte(),
        "c": torch.randn(7777).bfloat16(),
    }
    written = save_shard(tmp_path, 0, 1, weights)
    assert len(refused) == (bool(direct) and refuses != "nothing")
    path = tmp_path / written.file
    theirs = load_file(path)
    assert same({name: theirs[name] for name in weights}, weights)
    assert path.stat().st_size == written.facts.nbytes
    assert written.tensor_bytes == sum(t.nbytes for t in weights.values())


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
    (tmp_path / index_name()).write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index"):
        load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_shard(tmp_path / "file", 0, 1, {})


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES.values()], ids=str)
def test_every_dtype_of_the_format_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5 * dtype.itemsize), dtype=torch.uint8)
    save_file({"a": torch.ones(3), "x": bits.view(dtype)}, tmp_path / "f.safetensors")
    shard = Shard(tmp_path / "f.safetensors")
    assert shard.specs["x"] == TensorSpec((3, 5), str(dtype).removeprefix("torch."))
    out = torch.empty(3, 5, dtype=dtype)
    shard.read("x", out)
    assert torch.equal(out.view(torch.uint8), bits)


def test_a_tensor_is_read_into_its_place_and_nothing_beside_it(tmp_path: Path) -> None:
    save(tmp_path, WEIGHTS, 2)
    source = Reader(tmp_path)
    assert list(source.names) == list(WEIGHTS)
    assert source.specs["blocks.0.bias"] == TensorSpec((5,), "bfloat16")
    flat = torch.full((24,), 7.0)
    view, columns = flat[1:22].view(7, 3), torch.zeros(3, 7).t()
    for out in (view, columns, torch.nn.Parameter(torch.zeros(7, 3))):
        source.read("wte.weight", out)
        assert torch.equal(out, WEIGHTS["wte.weight"])
    assert flat[[0, 22, 23]].tolist() == [7.0] * 3
    for name, tensor in WEIGHTS.items():  # scalars, booleans and empty tensors among them
        out = torch.empty_like(tensor)
        source.read(name, out)
        assert tensor_digest(name, out) == tensor_digest(name, tensor)


@pytest.mark.slow
def test_reading_takes_the_memory_of_the_tensor_not_of_the_file(tmp_path: Path) -> None:
    save(tmp_path, {f"{i}": torch.ones(1 << 20) for i in range(32)}, 1)  # 128 MiB
    out, source = torch.zeros(1 << 20), Reader(tmp_path)
    before, most = resident_bytes(), 0
    for name in source.names:
        source.read(name, out)
        most = max(most, resident_bytes())
    assert most - before < 16 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_tensor_that_does_not_fit_its_place_is_refused(tmp_path: Path) -> None:
    save(tmp_path, WEIGHTS, 2)
    source = Reader(tmp_path)
    with pytest.raises(CheckpointError, match=r"'wte.weight' is float32 \[7, 3\].*float32 \[3, 7\] is asked"):
        source.read("wte.weight", torch.empty(3, 7))
    with pytest.raises(CheckpointError, match=r"'blocks.0.bias' is bfloat16 \[5\].*float32 \[5\] is asked"):
        source.read("blocks.0.bias", torch.empty(5))
    with pytest.raises(CheckpointError, match="has no tensor 'head'"):
        source.read("head", torch.empty(5))
    source.check(source.specs)
    wanted = {n: s for n, s in source.specs.items() if n != "mask"} | {"steps": TensorSpec((), "int32")}
    with pytest.raises(CheckpointError, match=r"(?s)mask.*steps.*int64.*int32"):
        source.check(wanted)


def test_a_damaged_shard_is_noticed_wherever_it_was_cut(tmp_path: Path) -> None:
    save(tmp_path, WEIGHTS, 1)
    path = tmp_path / shard_name(0, 1)
    whole = path.read_bytes()
    header_bytes = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + header_bytes]
    damaged = [whole[:n] for n in (0, 4, 8, 60, 8 + header_bytes, len(whole) - 1)] + [
        whole + b"x",
        b"\xff" * 8 + whole[8:],
        whole.replace(b'"F32"', b'"Q32"'),
        whole.replace(b"[7,3]", b"[7,4]"),
        whole[:8] + b"[" + header[1:] + whole[8 + header_bytes :],
        header_bytes.to_bytes(8, "little") + b"[]".ljust(header_bytes) + whole[8 + header_bytes :],
    ]
    for content in damaged:
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"00001-of-00001.*damaged\n  .*restore the file"):
            Reader(tmp_path).read("wte.weight", torch.empty(7, 3))
    path.write_bytes(whole)
    source, last = Reader(tmp_path), "ln.weight"
    assert source.spec(last).dtype == "float64"  # the header is read, then the file is cut
    os.truncate(path, 8 + header_bytes)
    with pytest.raises(CheckpointError, match=r"ends 32 bytes too soon.*damaged"):
        source.read(last, torch.empty_like(WEIGHTS[last]))


def test_a_link_that_moves_on_does_not_mix_two_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"{step}", {"a": torch.tensor([step]), "b": torch.tensor([step])}, 2)
    (tmp_path / "link").symlink_to("1")
    source, out = Reader(tmp_path / "link"), torch.zeros(2, dtype=torch.int64)
    source.read("a", out[:1])
    files.link_whole(tmp_path / "link", "2")
    source.read("b", out[1:])
    assert out.tolist() == [1, 1]


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
