"""A rank reads its own tensors out of a folder, straight into their place."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mpipipe.errors import CheckpointError, ConfigError
from mpipipe.state.checkpoint import save_shard, write_index
from mpipipe.state.pretrained import Weights, find, write_files
from mpipipe.values import TensorSpec


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def test_one_file_or_several(tmp_path: Path) -> None:
    tensors = {"a": numbers(4, 3), "b": numbers(5), "c": torch.arange(6).view(2, 3), "d": torch.tensor(2.0)}
    (tmp_path / "one").mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    for i, names in enumerate(("ab", "cd")):
        save_shard(tmp_path / "two", i, 2, {n: tensors[n] for n in names})
    write_index(
        tmp_path / "two", {n: f"model-0000{1 + (n in 'cd')}-of-00002.safetensors" for n in tensors}, 1
    )
    for folder in ("one", "two"):
        weights = Weights(tmp_path / folder)
        assert weights.specs == {
            n: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()
        }
        for name, t in tensors.items():
            flat = torch.full((t.numel() + 2,), 7, dtype=t.dtype)
            weights.read(name, flat[1:-1].view(t.shape))
            assert torch.equal(flat[1:-1].view(t.shape), t)
            assert flat[0] == flat[-1] == 7


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece_bytes", [1 << 20, 64])
def test_floating_point_types_are_converted(
    stored: torch.dtype,
    wanted: torch.dtype,
    piece_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpipipe.state.pretrained._PIECE_BYTES", piece_bytes)
    t = numbers(37, 5, dtype=stored)
    save_file({"t": t, "empty": t[:0]}, tmp_path / "model.safetensors")
    out, weights = torch.zeros(37, 5, dtype=wanted), Weights(tmp_path)
    weights.read("t", out)
    weights.read("empty", out[:0])
    assert torch.equal(out, t.to(wanted))


def test_numbers_that_are_counts_are_not_converted(tmp_path: Path) -> None:
    save_file({"t": torch.arange(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'t' is int64"):
        Weights(tmp_path).read("t", torch.zeros(3))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_file({"t": numbers(100)}, tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    weights, content = Weights(tmp_path), file.read_bytes()
    file.write_bytes(content[:-40])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read .* damaged"):
        Weights(tmp_path)
    for out in (torch.zeros(100), torch.zeros(100, dtype=torch.bfloat16)):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read .* damaged"):
            weights.read("t", out)


def test_what_lies_at_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder on this machine, and nothing is fetched"):
        find(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert find(config).weights is None
    with pytest.raises(ConfigError, match="to start from random ones"):
        find(tmp_path)
    save_file({"t": numbers(2)}, tmp_path / "model.safetensors")
    (tmp_path / "vocab.txt").write_text("a\n")
    (tmp_path / "training_args.bin").write_text("")
    found = find(str(tmp_path))
    assert (found.config, [f.name for f in found.companions]) == (config, ["vocab.txt"])
    assert found.weights is not None
    assert list(found.weights.specs) == ["t"]


def test_files_are_written_and_copied(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"a\xff\n")
    write_files(tmp_path / "new", {"config.json": "{}"}, [tmp_path / "vocab.txt"])
    write_files(tmp_path / "new", {"config.json": '{"a": 1}'}, [])
    assert {f.name: f.read_bytes() for f in (tmp_path / "new").iterdir()} == {
        "config.json": b'{"a": 1}',
        "vocab.txt": b"a\xff\n",
    }
    with pytest.raises(CheckpointError, match=r"gone\.txt: cannot be written or read"):
        write_files(tmp_path / "new", {}, [tmp_path / "gone.txt"])


# -- memory ---------------------------------------------------------------------------------------------

READ = """
import hashlib, json, sys, torch
from pathlib import Path
from mpipipe.state.pretrained import Weights
from mpipipe.graph.source import ModelSource
from torch import nn

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
width, n_mine = map(int, sys.argv[3:])


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(8))


class Initial:
    def __init__(self):
        self.weights = Weights(folder)
        self.names, self.read = list(self.weights.specs), self.weights.read


def resident(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024


source = ModelSource(Layers, 0, Initial())
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the highest value starts anew
mine = list(source.params)[:n_mine]
flat = torch.zeros(sum(source.params[n].numel() for n in mine), dtype=dtype)
end, sums = 0, []
for name in mine:
    view = flat[end : end + width * width].view(width, width)
    source.fill(name, view)
    end += width * width
    sums.append(hashlib.sha256(view.numpy().data).hexdigest())  # no copy
print(json.dumps({"above": resident("VmHWM") - before, "share": flat.nbytes, "sums": sums}))
"""


def peak_of_a_reader(
    folder: Path, stored: torch.dtype, asked: torch.dtype, width: int, n_mine: int
) -> tuple[int, int]:
    """(bytes above what there was before, bytes of the rank's share) of a process that loads its share."""
    tensors = {f"layers.{i}.weight": numbers(width + i, width, dtype=stored)[:width] for i in range(8)}
    sums = [hashlib.sha256(t.to(asked).numpy()).hexdigest() for t in list(tensors.values())[:n_mine]]
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    arguments = [str(folder), str(asked).removeprefix("torch."), str(width), str(n_mine)]
    done = subprocess.run(
        [sys.executable, "-c", READ, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sums"] == sums

    return found["above"], found["share"]


MB = 10**6


@pytest.mark.jobs
def test_a_share_is_read_without_the_rest(tmp_path: Path) -> None:
    """128 MB on disk, a quarter of it on this rank: a map of the file or a second copy would show."""
    above, share = peak_of_a_reader(tmp_path, torch.float32, torch.float32, 2000, 2)
    assert share == 32 * MB
    assert above < share + 12 * MB


@pytest.mark.full
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_share_of_a_gigabyte_takes_its_size_and_less_than_200_mb(
    stored: torch.dtype, tmp_path: Path
) -> None:
    """The bar: 1 GB on disk, half of it on this rank, converted or not."""
    width = 5600 if stored == torch.float32 else 8000
    above, share = peak_of_a_reader(tmp_path, stored, torch.float32, width, 4)
    assert 1000 * MB < (tmp_path / "model.safetensors").stat().st_size < 1100 * MB
    assert above < share + 200 * MB
    assert above < share + 40 * MB  # what was measured
