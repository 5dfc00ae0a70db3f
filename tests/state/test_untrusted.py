"""Files from anywhere: nothing is run, nothing is allocated for what they say, no path leaves the folder, and
no changed byte goes unnoticed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corruption import Files, corrupted
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from saved_run import save_step

from mpipipe.cluster.local import run_local
from mpipipe.commands.checkpoint import main
from mpipipe.errors import CheckpointError
from mpipipe.state import verify
from mpipipe.state.checkpoint import Reader, index_name, load, read_index
from mpipipe.state.digests import shard_sha256, tensor_digest
from mpipipe.state.pretrained import Weights
from mpipipe.state.resume import damage, read_state, step_folder
from mpipipe.state.shards import Shard
from mpipipe.state.verify import check_read, flaw, newest_sound
from mpipipe.state.writing import File


def sound(folder: Path) -> str:
    """What `checkpoint verify` and a resume find before the first tensor is used."""
    return damage(folder) or flaw(folder, read_state(folder).files)


def read(folder: Path) -> None:
    """As `Pipeline(resume=folder)` reads."""
    state = read_state(folder)
    for reader in (Reader(folder), Reader(folder, "optimizer")):
        for name, s in reader.specs.items():
            reader.read(name, torch.empty(s.shape, dtype=getattr(torch, s.dtype)))
        run_local(1, lambda comm, reader=reader: check_read(comm, reader, state.files))  # type: ignore[misc]


def write(folder: Path, files: Files) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.full)])
def test_no_corrupted_checkpoint_is_taken_for_a_whole_one(tmp_path: Path, count: int) -> None:
    save_step(tmp_path, 1, 2)
    folder, seed = step_folder(tmp_path, 1), random.randrange(1 << 30)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files) == 7
    mutants = corrupted(files, random.Random(seed))
    for i in range(count):
        said, changed = next(mutants)
        write(folder, changed)
        where = f"seed {seed}, number {i}: {said}"
        assert sound(folder), where
        try:
            read(folder)
        except CheckpointError:
            continue
        raise AssertionError(f"{where}: was read")
    write(folder, files)
    assert sound(folder) == ""
    read(folder)


def test_a_tensor_without_elements_is_no_damage(tmp_path: Path) -> None:
    tensors = {"empty": torch.empty(0, 4), "full": torch.ones(3)}
    save_file(tensors, tmp_path / "a.safetensors")
    shard = Shard(tmp_path / "a.safetensors")
    assert list(shard.pieces("empty", bytearray())) == []
    digests = [tensor_digest(name, tensors[name]) for name in shard.specs]
    facts = File((tmp_path / "a.safetensors").stat().st_size, shard_sha256(shard.header, digests))
    assert flaw(tmp_path, {"a.safetensors": facts}) == ""


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_resume_finds_the_newest_checkpoint_whose_bits_are_right(tmp_path: Path, ranks: int) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step, 2)
    assert (
        run_local(ranks, lambda comm: newest_sound(comm, tmp_path))
        == [(step_folder(tmp_path, 4), [])] * ranks
    )
    for step, name in ((4, "optimizer-00002-of-00002.safetensors"), (3, "model.safetensors.index.json")):
        path = step_folder(tmp_path, step) / name
        bits = bytearray(path.read_bytes())
        bits[-2] ^= 4
        path.write_bytes(bits)
    (step_folder(tmp_path, 2) / "run.json").unlink()
    found = run_local(ranks, lambda comm: newest_sound(comm, tmp_path))
    assert found == [found[0]] * ranks
    folder, passed_over = found[0]
    assert folder == step_folder(tmp_path, 1)
    assert [path for path, _ in passed_over] == [step_folder(tmp_path, step) for step in (4, 3, 2)]
    reasons = [wrong for _, wrong in passed_over]
    assert "optimizer-00002-of-00002.safetensors: its sha256 is " in reasons[0]
    assert "model.safetensors.index.json: its sha256 is " in reasons[1]
    assert "run.json: not found" in reasons[2]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["run.json", "model-00002-of-00002.safetensors", index_name()])
def test_a_file_that_cannot_be_read_for_a_moment_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, ranks: int
) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, 2)
    folder, fails, really = step_folder(tmp_path, 2), [True], Path.open

    def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.parts[-2:] == (folder.name, name) and fails:
            fails.pop()
            raise OSError(errno.EIO, "Input/output error", str(path))
        return really(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(verify, "RETRY_S", 0.0)
    assert run_local(ranks, lambda comm: newest_sound(comm, tmp_path)) == [(folder, [])] * ranks
    assert not fails

    again = re.escape(f"{folder / name}: cannot be read just now (Input/output error)")
    for use in (lambda: run_local(ranks, lambda comm: newest_sound(comm, tmp_path)), lambda: read(folder)):
        fails.extend([True] * 99)
        with pytest.raises(CheckpointError, match=again) as caught:
            use()
        assert "is damaged\n" not in str(caught.value)
        assert caught.value.kind == "failed", "another start may read it"
    assert main(["verify", str(tmp_path)]) == 1
    assert re.search(again, capsys.readouterr().err)
    fails.clear()
    assert run_local(ranks, lambda comm: newest_sound(comm, tmp_path)) == [(folder, [])] * ranks


# -- made to do harm, checksums and all -------------------------------------------------------------


def shard_file(path: Path, header: bytes, nbytes: int = 24) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    return path


def tensor(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HARMFUL = {
    "overlapping": {"a": tensor(), "b": tensor(shape=[1], offsets=[20, 24])},
    "twice the same": {"a": tensor(), "b": tensor()},
    "a gap": {"a": tensor(shape=[1], offsets=[0, 4]), "b": tensor(shape=[1], offsets=[20, 24])},
    "bytes of nobody": {"a": tensor(shape=[1], offsets=[0, 4])},
    "beyond the end": {"a": tensor(shape=[8], offsets=[0, 32])},
    "before the beginning": {"a": tensor(shape=[8], offsets=[-8, 24])},
    "end before begin": {"a": tensor(shape=[0], offsets=[24, 0])},
    "negative sizes": {"a": tensor(shape=[-2, -3])},
    "a petabyte": {"a": tensor(shape=[1 << 48], offsets=[0, 1 << 50])},
    "sizes that overflow": {"a": tensor(shape=[1 << 32, 1 << 32], offsets=[0, 1 << 66])},
    "huge and empty": {"a": tensor(), "b": tensor(shape=[1 << 62, 1 << 62, 0], offsets=[24, 24])},
    "a thousand dimensions": {"a": tensor(), "b": tensor(shape=[1] * 999 + [0], offsets=[24, 24])},
    "a float": {"a": tensor(shape=[2.0, 3])},
    "a bool": {"a": tensor(shape=[True, 6])},
    "words": {"a": tensor(shape="23")},
    "a dict": {"a": tensor(offsets={"0": 24})},
    "no such type": {"a": tensor(dtype="PICKLE")},
    "a type that is a list": {"a": tensor(dtype=["F32"])},
    "more keys": {"a": tensor() | {"code": "import os"}},
    "no tensors": {},
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Shard(shard_file(tmp_path / "x", json.dumps(HARMFUL[case]).encode()))


RAW = {
    "too deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "a key twice": b'{"a": 1, "a": 1}',
    "not a number": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 24]}}',
    "a number without an end": b'{"a": {"dtype": "F32", "shape": ['
    + b"9" * 5000
    + b'], "data_offsets": [0, 24]}}',
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("case", RAW)
def test_a_header_that_is_no_json_of_ours_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Shard(shard_file(tmp_path / "x", RAW[case]))
    (tmp_path / index_name()).write_bytes(RAW[case])
    with pytest.raises(CheckpointError, match="is not an index"):
        read_index(tmp_path)


def test_lengths_are_not_believed(tmp_path: Path) -> None:
    """A file that says how long its header is gets no memory for it; a file of holes is not read."""
    tracemalloc.start()
    try:
        for length in (1 << 63, (1 << 64) - 1, 1 << 40, 101_000_000):
            path = tmp_path / "x"
            path.write_bytes(length.to_bytes(8, "little"))
            os.truncate(path, min(length + 8, 1 << 40))
            with pytest.raises(ValueError, match="a header of"):
                Shard(path)
        for name in ("run.json", index_name()):
            (tmp_path / name).touch()
            os.truncate(tmp_path / name, 1 << 40)
        assert "1099511627776 bytes" in damage(tmp_path)
        with pytest.raises(CheckpointError, match="1099511627776 bytes"):
            read_index(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["F32", "BOOL"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
counts = st.integers(0, 4) | st.sampled_from([-1, 6, 24, 1 << 31, 1 << 63])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16"]) | json_values,
        "shape": st.lists(counts, max_size=3) | json_values,
        "data_offsets": st.tuples(st.just(0), st.sampled_from([0, 12, 24]))
        | st.lists(counts, max_size=3)
        | json_values,
    }
)


@settings(max_examples=25)
@given(header=st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3) | json_values)
@pytest.mark.slow
def test_whatever_a_header_says_it_is_read_as_tensors_of_this_file_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: Any
) -> None:
    path = shard_file(tmp_path_factory.getbasetemp() / "drawn.safetensors", json.dumps(header).encode())
    try:
        shard = Shard(path)
    except ValueError:
        return
    tensors = {name: torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for name, s in shard.specs.items()}
    assert sum(t.nbytes for t in tensors.values()) == 24
    for name, out in tensors.items():
        shard.read(name, out)
        assert not out.view(-1).view(torch.uint8).any()


NAMES = [
    "../x.safetensors",
    "/etc/passwd",
    "a/x.safetensors",
    "..",
    ".",
    "",
    "a\\x",
    "x\0",
    "x\x1b[31m",
    "x" * 300,
]


@pytest.mark.parametrize("name", NAMES)
def test_no_index_and_no_manifest_names_a_file_outside(tmp_path: Path, name: str) -> None:
    save_step(tmp_path, 1, 1)
    folder = step_folder(tmp_path, 1)
    save_file({"wte.weight": torch.zeros(3)}, folder.parent / "x.safetensors")
    (folder / index_name()).write_text(json.dumps({"weight_map": {"wte.weight": name}}))
    for use in (load, Reader, Weights, read_index):
        with pytest.raises(CheckpointError, match="is no name of a file in this folder"):
            use(folder)
    signed(folder, lambda run: run.update(files={name: {"nbytes": 1, "sha256": ""}}))
    assert "is no name of a file in this folder" in damage(folder)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "run.json"]
)
def test_no_link_leads_outside(tmp_path: Path, name: str) -> None:
    save_step(tmp_path, 1, 1)
    folder = step_folder(tmp_path, 1)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert "is a link that leads out of the folder" in damage(folder)
    if name != "run.json":
        with pytest.raises(CheckpointError, match="is a link that leads out of the folder"):
            load(folder)
    (folder / name).unlink()
    (tmp_path / "elsewhere").rename(folder / "kept")
    (folder / name).symlink_to("kept")
    assert damage(folder) == "", "a link within the folder is a file like any other"


def signed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the manifest says, and makes its checksum right."""
    run = json.loads((folder / "run.json").read_text())["run"]
    change(run)
    body = json.dumps(run)
    sha256 = hashlib.sha256(body.encode()).hexdigest()
    (folder / "run.json").write_text(f'{{"checkpoint": 1, "sha256": "{sha256}", "run":\n{body}\n}}\n')


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.update(step=-1),
        lambda run: run.update(step=1.5),
        lambda run: run.update(files={"run.json": 3}),
        lambda run: run.update(files=[]),
        lambda run: run.update(numerics={}),
        lambda run: run["numerics"].update(bits="none"),
        lambda run: run.update(extra={"a": deep(900)}),
        lambda run: run.update(code="import os"),
        lambda run: run.pop("graph"),
    ],
    ids=["step", "float", "facts", "list", "numerics", "bits", "deep", "more", "less"],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path, 1, 1)
    signed(step_folder(tmp_path, 1), change)
    assert "run.json: cannot be read" in damage(step_folder(tmp_path, 1))
    assert main(["verify", str(tmp_path)]) == 1
    assert main(["inspect", str(tmp_path)]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_what_a_stranger_writes_does_not_reach_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path, 1, 1)
    signed(step_folder(tmp_path, 1), lambda run: run.update(version="\x1b[2J", extra={"\x1b]0;x\x07": 1}))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
