"""`python -m mpipipe checkpoint`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_run import ORDER, digests, facts, read_all, save_step, share, tensors

from mpipipe.__main__ import main as program
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.commands.arguments import size
from mpipipe.commands.checkpoint import main
from mpipipe.state.checkpoint import Reader, load
from mpipipe.state.files import write_text
from mpipipe.state.resume import damage, prune, read_state, step_folder
from mpipipe.state.saving import Saver


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints of three ranks each, with a file of the model beside the tensors."""
    folder = tmp_path / "run"

    def beside(path: Path) -> list[str]:
        write_text(path / "config.json", json.dumps({"model_type": "x", "dtype": "float32"}))
        return ["config.json"]

    def body(comm: Communicator, step: int) -> None:
        model, optimizer = (share(t, comm) for t in tensors(step))
        Saver(comm).save(step_folder(folder, step), model, optimizer, ORDER, facts(step), beside)

    for step in (10, 20):
        run_local(3, lambda comm, step=step: body(comm, step))  # type: ignore[misc]
    prune(folder, 2)
    return folder


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([str(a) for a in args]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([str(a) for a in args]) == 1
    said = capsys.readouterr().err
    assert said.startswith("mpipipe: error: ")
    return said


def test_inspect_tells_of_all_and_describes_the_newest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "inspect", run)
    assert text.index("step-00000020 9 ") < text.index("step-00000010 9 ")
    for told in (
        "48 float32 in 4 tensors",
        "75 float32 in 9 tensors",
        "micro_batches 4",
        "bits torch",
        "Own",
    ):
        assert told in text, told
    os.truncate(step_folder(run, 20) / "model-00001-of-00003.safetensors", 3)
    text = printed(capsys, "inspect", run)
    assert "model-00001-of-00003.safetensors: has 3 bytes" in text
    assert "step 10 " in text
    assert "step 10 " in printed(capsys, "inspect", step_folder(run, 10))


def test_verify_reads_every_byte(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "verify", run, "--threads", 2)
    assert text.count(": whole, ") == 2
    assert text.count(" in 9 files, ") == 2
    (step_folder(run, 30)).mkdir()
    assert "a save that was cut off" in printed(capsys, "verify", run)
    path = step_folder(run, 20) / "optimizer-00002-of-00003.safetensors"
    bits = bytearray(path.read_bytes())
    bits[-1] ^= 1
    path.write_bytes(bits)
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr()
    assert f"{step_folder(run, 20)}: damaged" in said.out
    assert f"{step_folder(run, 10)}: whole" in said.out
    assert f"{path}: its sha256 is " in said.err
    assert "whole" in printed(capsys, "verify", step_folder(run, 10))


@pytest.mark.parametrize("file_size", [None, "0.00002MB"])
def test_merge_makes_another_checkpoint_with_the_same_bits(
    run: Path, tmp_path: Path, file_size: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    sizes = ["--file-size", file_size] if file_size else []
    assert "step-00000020 in " in printed(capsys, "merge", run, "-o", out, *sizes)
    assert damage(out) == ""
    assert digests(*read_all(out)) == digests(*tensors(20))
    before, after = read_state(step_folder(run, 20)), read_state(out)
    assert after == before.__class__(**{**vars(before), "files": after.files})
    assert len(list(out.glob("model-*"))) == (1 if file_size is None else 4)
    assert (out / "config.json").read_bytes() == (step_folder(run, 20) / "config.json").read_bytes()
    printed(capsys, "verify", out)
    assert "is there already" in refused(capsys, "merge", run, "-o", out)


def test_export_is_a_plain_folder_of_the_library(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tensors(20)[0]
    assert "in 1 file, " in printed(capsys, "export", run, "-o", tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]
    assert digests(load_file(tmp_path / "a" / "model.safetensors")) == digests(model)
    printed(
        capsys,
        "export",
        step_folder(run, 10),
        "-o",
        tmp_path / "b",
        "--dtype",
        "bf16",
        "--file-size",
        "0.00002MB",
    )
    files = sorted(p.name for p in (tmp_path / "b").iterdir())
    assert files == ["config.json", *(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)), files[-1]]
    rounded = {name: t.bfloat16() for name, t in tensors(10)[0].items()}
    assert digests(load(tmp_path / "b")) == digests(rounded)
    assert list(Reader(tmp_path / "b").names) == ORDER
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"


def test_counts_and_flags_keep_their_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"n": torch.tensor(3), "on": torch.tensor([True]), "none": torch.empty(0, 3), "w": torch.randn(3)}

    def body(comm: Communicator) -> None:
        Saver(comm).save(tmp_path / "x", model, {}, list(model), facts(1))

    run_local(1, body)
    printed(capsys, "export", tmp_path / "x", "-o", tmp_path / "y", "--dtype", "fp16")
    found = load_file(tmp_path / "y" / "model.safetensors")
    wanted = {n: t.half() if t.is_floating_point() else t for n, t in model.items()}
    assert digests({n: found[n] for n in wanted}) == digests(wanted)


@pytest.mark.parametrize("command", ["export", "merge"])
def test_a_damaged_checkpoint_leaves_nothing_behind(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path, 1, 1)
    path = step_folder(tmp_path, 1) / "model-00001-of-00001.safetensors"
    bits = bytearray(path.read_bytes())
    bits[-1] ^= 1
    path.write_bytes(bits)
    assert "its sha256 is " in refused(capsys, command, tmp_path, "-o", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["verify"], ["export", "-o", str(tmp_path / "x")]):
        assert program(["checkpoint", *command, str(tmp_path)]) == 1
        assert "is neither a run nor a whole checkpoint" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    assert "has no checkpoint that is whole\n" in refused(capsys, "verify", tmp_path)
    (tmp_path / "checkpoints" / "step-00000001").mkdir()
    assert "has no checkpoint that is whole\n" in refused(capsys, "verify", tmp_path)
    assert "no checkpoint that is whole\n" in refused(capsys, "merge", tmp_path, "-o", tmp_path / "x")


def test_sizes_are_read() -> None:
    assert [size(text) for text in ("5GB", "1.5 mb", "2TB")] == [5 * 10**9, 1_500_000, 2 * 10**12]
    for text in ("5", "GB", "0GB", "-1GB", "five GB"):
        with pytest.raises(Exception, match="is no size"):
            size(text)
