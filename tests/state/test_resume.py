"""Checkpoints of a run: written together, whole or passed over, on any number of ranks, through kills."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved_run import (
    NUMERICS,
    ORDER,
    digests,
    facts,
    forget_data,
    read_all,
    save,
    save_step,
    share,
    tensors,
)

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.config import Config
from mpipipe.errors import CheckpointError, ConfigError
from mpipipe.state import gather, parts, resume, saving
from mpipipe.state.checkpoint import Kind, Reader, load, read_index
from mpipipe.state.digests import tensor_digest, weights_sha256
from mpipipe.state.gather import together
from mpipipe.state.resume import (
    RunState,
    check_data,
    check_numerics,
    damage,
    newest,
    prune,
    read_state,
    set_aside,
    step_folder,
    survey,
    unreadable,
)
from mpipipe.state.verify import check_read, newest_sound
from mpipipe.train import beginning, otherwise
from mpipipe.values import Numerics, from_json, to_json

HERE = (Path(__file__).parent, *Path(__file__).parents[1:3])  # where a subprocess finds this file and mpipipe


# -- writing and reading ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_what_some_ranks_save_any_number_reads(tmp_path: Path, ranks: int) -> None:
    state = save_step(tmp_path, 100, ranks)
    folder = newest(tmp_path)
    assert folder == tmp_path / "checkpoints" / "step-00000100"
    assert digests(*read_all(folder)) == digests(*tensors(100))
    assert digests(load(folder)) == digests(tensors(100)[0])
    assert read_state(folder) == state
    assert replace(state, files={}, weights_sha256="") == facts(100)
    assert [type(n) for n in read_state(folder).optimizer["numbers"].values()] == [int, bool, float, float]
    sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != "run.json"}
    assert {name: file.nbytes for name, file in state.files.items()} == sizes
    assert len(sizes) == min(ranks, 4) + min(ranks, 3) + 2  # norm.mean is a buffer: no optimizer state
    model = tensors(100)[0]
    assert state.weights_sha256 == weights_sha256([tensor_digest(n, model[n]) for n in ORDER])
    assert list(read_index(folder)) == ORDER
    assert list(read_index(folder, "optimizer"))[:4] == [
        *(f"{ORDER[0]}/{s}" for s in ("exp_avg", "exp_avg_sq", "step")),
        f"{ORDER[1]}/exp_avg",
    ]


def test_an_optimizer_without_state_and_replicas_are_saved(tmp_path: Path) -> None:
    model, _ = tensors(1)
    folder = step_folder(tmp_path, 1)
    run_local(3, lambda comm: save(comm, folder, model if comm.rank else {}, {}, ORDER, facts(1)))
    assert sorted(p.name for p in folder.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer.safetensors.index.json",
        "run.json",
    ]
    shards = [load_file(path) for path in folder.glob("model-*.safetensors")]
    nbytes = sorted(sum(t.nbytes for t in shard.values()) for shard in shards)
    assert nbytes[1] - nbytes[0] <= max(t.nbytes for t in model.values()), "each writes about as much"
    assert digests(*read_all(newest(tmp_path) or folder)) == digests(model)


def test_names_that_ranks_and_model_do_not_share_stop_the_save_before_it_begins(tmp_path: Path) -> None:
    model, folder = tensors(1)[0], step_folder(tmp_path, 1)
    for order, says in (([*ORDER, "zz"], "'zz' is held by no rank"), (ORDER[:3], "'norm.mean' is unknown")):
        with pytest.raises(CheckpointError, match=says):
            run_local(2, lambda comm, o=order: save(comm, folder, share(model, comm), {}, o, facts(1)))
    assert not folder.exists()


def test_a_whole_checkpoint_and_foreign_files_are_never_written_over(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step-00000001: already holds a whole checkpoint"):
        save_step(tmp_path, 1)
    assert digests(*read_all(step_folder(tmp_path, 1))) == digests(*tensors(1))
    theirs = tmp_path / "pretrained"
    theirs.mkdir()
    (theirs / "model.safetensors").write_bytes(b"years of work")
    with pytest.raises(CheckpointError, match=r"model.safetensors: in the way"):
        run_local(1, lambda comm: save(comm, theirs, tensors(1)[0], {}, ORDER, facts(1)))
    assert (theirs / "model.safetensors").read_bytes() == b"years of work"
    (theirs / "model.safetensors").rename(theirs / "config.json")
    run_local(1, lambda comm: save(comm, theirs, tensors(1)[0], {}, ORDER, facts(1)))
    assert damage(theirs) == ""
    assert (theirs / "config.json").read_bytes() == b"years of work"


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_rank_0_collects_the_tensors_of_all(ranks: int) -> None:
    model = tensors(1)[0] | {"wte.weight": torch.randn(3, 4).t(), "norm.mean": torch.tensor(True)}
    model["blocks.0.weight"] = torch.randn(0, 3).bfloat16()
    found, *others = run_local(ranks, lambda comm: gather.collect(comm, share(model, comm), ORDER))
    assert list(found) == ORDER
    assert digests(found) == digests(model)
    assert others == [{}] * (ranks - 1)
    found["wte.weight"].zero_()
    assert model["wte.weight"].any(), "a copy"
    with pytest.raises(CheckpointError, match="'head' is held by no rank"):
        run_local(ranks, lambda comm: gather.collect(comm, share(model, comm), [*ORDER, "head"]))


# -- which one is whole -------------------------------------------------------------------------------


def test_only_whole_checkpoints_count_and_the_others_are_explained(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for step in (5, 10, 100_000_000, 20, 30):
        save_step(tmp_path, step)
    shutil.copytree(step_folder(tmp_path, 5), tmp_path / "checkpoints" / "step-best")  # a user's
    assert newest(tmp_path) == step_folder(tmp_path, 100_000_000)
    shard = "optimizer-00002-of-00002.safetensors"
    (step_folder(tmp_path, 100_000_000) / "run.json").unlink()
    os.truncate(step_folder(tmp_path, 30) / shard, 10)
    (step_folder(tmp_path, 20) / "model.safetensors.index.json").unlink()
    assert newest(tmp_path) == step_folder(tmp_path, 10)
    reasons = {folder.name: wrong for folder, wrong in survey(tmp_path)}
    assert list(reasons) == [f"step-{n:08d}" for n in (100_000_000, 30, 20, 10, 5)]
    assert "run.json: not found" in reasons["step-100000000"]
    assert f"{shard}: has 10 bytes, run.json says " in reasons["step-00000030"]
    assert "index.json: cannot be read (No such file" in reasons["step-00000020"]
    assert reasons["step-00000010"] == ""
    (step_folder(tmp_path, 10) / "run.json").write_text('{\n "step": 10\n}')  # as it was once
    assert "another version" in damage(step_folder(tmp_path, 10))
    with pytest.raises(CheckpointError, match="another version"):
        read_state(step_folder(tmp_path, 10))


def test_a_damaged_shard_names_the_older_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        save_step(tmp_path, step)
    os.truncate(step_folder(tmp_path, 10) / "run.json", 3)
    content = bytearray((step_folder(tmp_path, 20) / "model-00001-of-00002.safetensors").read_bytes())
    content[0] ^= 1  # as long as before: only reading it tells
    (step_folder(tmp_path, 20) / "model-00001-of-00002.safetensors").write_bytes(content)
    assert newest(tmp_path) == step_folder(tmp_path, 20)
    for step, older in ((20, r"step-00000005 is whole: remove .*step-00000020"), (5, "no older .* anew")):
        os.truncate(step_folder(tmp_path, step) / "optimizer-00001-of-00002.safetensors", 99)
        kind = "model" if step == 20 else "optimizer"
        with pytest.raises(CheckpointError, match=rf"{kind}-00001-of-00002.*damaged\n  .*{older}"):
            _ = Reader(step_folder(tmp_path, step), kind).specs


def test_prune_keeps_the_newest_and_takes_what_was_cut_off(tmp_path: Path) -> None:
    cut_off = step_folder(tmp_path, 3)
    cut_off.mkdir(parents=True)
    (cut_off / "model-00001-of-00002.safetensors.part").touch()
    assert prune(tmp_path, 1) == []
    assert cut_off.exists(), "nothing goes while nothing is whole"
    for step in (10, 20, 30):
        save_step(tmp_path, step)
        assert prune(tmp_path, 2) == []
        assert os.readlink(tmp_path / "checkpoint") == f"checkpoints/step-{step:08d}"
    assert [folder.name for folder, _ in survey(tmp_path)] == ["step-00000030", "step-00000020"]
    assert digests(load(tmp_path / "checkpoint")) == digests(tensors(30)[0])
    os.truncate(step_folder(tmp_path, 30) / "model-00001-of-00002.safetensors", 0)
    assert prune(tmp_path, 1) == []
    assert (tmp_path / "checkpoint").resolve() == step_folder(tmp_path, 20).resolve()
    assert step_folder(tmp_path, 30).exists(), "damaged after it was whole: for the user to look at"
    with pytest.raises(ValueError, match="keep = 0"):
        prune(tmp_path, 0)


def test_only_what_must_be_known_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look asks for every file, and a run may have kept many."""
    steps = range(1, 8)
    for step in steps:
        save_step(tmp_path, step)
    (step_folder(tmp_path, 4) / "run.json").unlink()
    seen, real = list[int](), resume.damage

    def looks(folder: Path) -> str:
        seen.append(int(folder.name.removeprefix("step-")))
        return real(folder)

    monkeypatch.setattr(resume, "damage", looks)
    assert newest(tmp_path) == step_folder(tmp_path, 7)
    assert run_local(2, lambda comm: newest_sound(comm, tmp_path)[0]) == [step_folder(tmp_path, 7)] * 2
    assert resume.way_out(step_folder(tmp_path, 4)).startswith(f"{step_folder(tmp_path, 3)} is whole")
    assert seen == [7, 7, 3]
    seen.clear()
    assert prune(tmp_path, 1, 2) == []
    assert seen == [7, 5, 3, 1], "not at those that stay, with no step that was cut off"
    assert [folder.name for folder, _ in survey(tmp_path)] == [f"step-{n:08d}" for n in (7, 6, 2)]
    seen.clear()
    assert prune(tmp_path, 1, 2) == []
    assert seen == [7]


def test_only_leftovers_without_a_run_json_make_room(tmp_path: Path) -> None:
    """Not a checkpoint that is damaged, nor one of another version."""
    save_step(tmp_path, 10)
    for step, spoil in ((20, damaged), (30, of_another_version)):
        save_step(tmp_path, step)
        folder = step_folder(tmp_path, step)
        spoil(folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(CheckpointError) as caught:
            save_step(tmp_path, step)
        assert damage(folder) in str(caught.value)
        assert f"{folder} was a whole checkpoint once and is in the way: move it away" in str(caught.value)
        assert prune(tmp_path, 1) == []
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert unreadable(survey(tmp_path)) == [
        (f, damage(f)) for f in (step_folder(tmp_path, s) for s in (30, 20))
    ]
    assert newest(tmp_path) == step_folder(tmp_path, 10)

    (step_folder(tmp_path, 20) / "run.json").unlink()  # what a kill leaves
    assert [folder.name for folder, _ in unreadable(survey(tmp_path))] == ["step-00000030"]
    save_step(tmp_path, 20)
    assert newest(tmp_path) == step_folder(tmp_path, 20)


def damaged(folder: Path) -> None:
    os.truncate(folder / "model-00001-of-00002.safetensors", 10)


def of_another_version(folder: Path) -> None:
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('{"checkpoint": 1,', '{"checkpoint": 2,'))


def test_a_run_json_that_cannot_be_looked_at_counts_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 10)
    save_step(tmp_path, 20)
    real = os.stat

    def stale(path: object, *args: object, **kwargs: object) -> os.stat_result:
        if str(path).endswith("step-00000020/run.json"):
            raise OSError(116, "Stale file handle", str(path))
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        for name in ("stat", "lstat"):
            patch.setattr(os, name, stale)
        patch.setattr(resume, "read_state", unreadable_state)
        with pytest.raises(CheckpointError, match="is in the way"):
            resume.make_room(step_folder(tmp_path, 20))
        assert prune(tmp_path, 1) == []
    assert [folder.name for folder, _ in unreadable(survey(tmp_path))] == []
    assert newest(tmp_path) == step_folder(tmp_path, 20), "it is as it was"


def unreadable_state(folder: Path) -> RunState:
    raise CheckpointError(f"{folder}: Stale file handle")


def test_a_save_that_cannot_take_back_its_run_json_leaves_the_rest_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 10)
    real = Path.unlink

    def stubborn(path: Path, missing_ok: bool = False) -> None:
        if path.name == "run.json":
            raise OSError(16, "Device or resource busy", path)
        real(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stubborn)
        resume.discard(step_folder(tmp_path, 10))
    assert damage(step_folder(tmp_path, 10)) == ""


def test_what_cannot_be_removed_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    real = os.unlink

    def stubborn(path: str, *args: object, **kwargs: object) -> None:
        if "optimizer" in os.fspath(path):
            raise OSError(16, "Device or resource busy", path)
        real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", stubborn)
    assert prune(tmp_path, 1) == [step_folder(tmp_path, 1)]
    monkeypatch.undo()
    assert newest(tmp_path) == step_folder(tmp_path, 2)
    assert "not found" in damage(step_folder(tmp_path, 1)), "its run.json went first"
    assert prune(tmp_path, 1) == []
    assert not step_folder(tmp_path, 1).exists()


# -- errors and kills ---------------------------------------------------------------------------------


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """As a disk or quota that is full: a file that grows beyond `nbytes` cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def errors_of(ranks: int, run_dir: Path, step: int, large: int | None) -> list[str]:
    """What each rank gets to hear when it saves; the rank `large` has more than the disk takes."""
    model, optimizer = tensors(step)

    def body(comm: Communicator) -> str:
        more = {"large": torch.ones(1 << 18)} if comm.rank == large else {}
        order = ORDER if large is None else [*ORDER, "large"]
        mine = share(model, comm) | more
        try:
            save(comm, step_folder(run_dir, step), mine, share(optimizer, comm), order, facts(step))
        except CheckpointError as error:
            return str(error)
        return ""

    return run_local(ranks, body)


@pytest.mark.parametrize(("ranks", "large"), [(1, 0), (2, 1), (3, 0), (3, 2)])
def test_a_full_disk_is_told_on_every_rank_and_costs_no_older_checkpoint(
    tmp_path: Path, ranks: int, large: int
) -> None:
    save_step(tmp_path, 1, ranks)
    with largest_file(1 << 19):
        said = errors_of(ranks, tmp_path, 2, large)
    assert len(set(said)) == 1
    assert (f"step-00000002: failed on 1 of {ranks} ranks\n  rank {large}: " in said[0]) == (ranks > 1)
    assert "cannot be written" in said[0]
    assert "File too large" in said[0]
    assert said[0].endswith("make room), then go on with --resume")
    assert not step_folder(tmp_path, 2).exists()
    assert newest(tmp_path) == step_folder(tmp_path, 1)
    assert digests(*read_all(step_folder(tmp_path, 1))) == digests(*tensors(1))
    assert errors_of(ranks, tmp_path, 2, None) == [""] * ranks  # there is room again
    assert newest(tmp_path) == step_folder(tmp_path, 2)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_flipped_bit_is_found_by_the_ranks_that_read(tmp_path: Path, kind: Kind) -> None:
    """Sizes are right, so `damage` sees nothing. On another number of ranks than saved it."""
    for step in (1, 2):
        state = save_step(tmp_path, step, 3)
    folder, older = step_folder(tmp_path, 2), step_folder(tmp_path, 1)

    def body(comm: Communicator) -> str:
        reader = Reader(folder, kind)
        for i, (name, s) in enumerate(reader.specs.items()):
            if i % 2 == comm.rank:
                reader.read(name, torch.empty(s.shape, dtype=getattr(torch, s.dtype)))
        try:
            check_read(comm, reader, state.files)
        except CheckpointError as error:
            return str(error)
        return ""

    assert run_local(2, body) == ["", ""]
    path = folder / f"{kind}-00002-of-00003.safetensors"
    bits = bytearray(path.read_bytes())
    bits[-2] ^= 16
    path.write_bytes(bits)
    assert damage(folder) == ""
    said = run_local(2, body)
    assert said[0] == said[1]
    assert re.match(rf"{path}: its sha256 is [0-9a-f]{{12}}, run.json says [0-9a-f]{{12}}; the", said[0])
    assert said[0].endswith(f"{older} is whole: remove {folder}, and --resume goes on from there")


@pytest.mark.parametrize("what", ["write_index", "to_text", "make_room"])
def test_what_fails_on_rank_0_alone_is_told_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    save_step(tmp_path, 1, 3)
    monkeypatch.setattr(saving if what == "make_room" else parts, what, fail)
    said = errors_of(3, tmp_path, 2, None)
    monkeypatch.undo()
    assert len(set(said)) == 1
    assert "rank 0: OSError(28, 'No space left on device')" in said[0]
    assert not step_folder(tmp_path, 2).exists()
    assert newest(tmp_path) == step_folder(tmp_path, 1)


def test_an_error_of_any_kind_on_some_ranks_is_one_error_of_all() -> None:
    def body(comm: Communicator) -> str:
        assert together(comm, "here", lambda: comm.rank * 2) == [0, 2, 4]
        try:
            together(comm, "here", lambda: 1 // (comm.rank % 2 or comm.rank))
        except CheckpointError as error:
            return str(error)
        return ""

    said = run_local(3, body)
    assert len(set(said)) == 1
    assert said[0].startswith("here: failed on 1 of 3 ranks\n  rank 0: ZeroDivisionError")


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import test_resume as t

run_dir, draw, cut_off, steps = Path(sys.argv[1]), random.Random(int(sys.argv[2])), 0, []
link, linked = run_dir / "checkpoint", False

def save_on(first):
    for step in range(first, 10**6):
        t.save_step(run_dir, step)
        t.prune(run_dir, 2)

deadline = time.monotonic() + 4
while len(steps) < 30 and time.monotonic() < deadline:
    done = steps[-1] if steps else 0
    child = os.fork()
    if child == 0:
        save_on(done + 1)
    time.sleep(draw.uniform(0.0, 0.12 if steps else 1.0))  # a busy machine is slow to begin
    os.kill(child, 9)
    os.waitpid(child, 0)
    folder = t.newest(run_dir)
    if folder is None:
        assert not steps
        continue
    steps.append(t.read_state(folder).step)
    assert steps[-1] >= done, (steps, done)
    assert t.digests(*t.read_all(folder)) == t.digests(*t.tensors(steps[-1])), folder
    linked = linked or link.is_symlink()  # prune makes it, after a save: the first kills may be before
    if linked:
        assert t.digests(t.load(link)) == t.digests(t.load(link.resolve())), link.resolve()
    cut_off += any(wrong for _, wrong in t.survey(run_dir))
t.save_step(run_dir, steps[-1] + 1)
t.prune(run_dir, 2)
assert link.resolve() == t.newest(run_dir), link.resolve()
print(len(steps), steps[-1], cut_off, len(list(t.survey(run_dir))))
"""


@pytest.mark.jobs
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Real ones: a process that saves and prunes in a loop is killed, goes on, is killed again, ..."""
    seed = random.randrange(1000)
    job = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), str(seed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, HERE)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert job.returncode == 0, f"seed {seed}\n{job.stderr}"
    kills, last, cut_off, left = map(int, job.stdout.split())
    assert kills >= 5
    assert last >= 5
    assert cut_off > 0, "no kill fell into a save: nothing was tested"
    assert left == 2, "prune removes what the kills left behind"


# -- going on as before -------------------------------------------------------------------------------


def test_other_numerics_are_refused_with_every_difference() -> None:
    check_numerics(NUMERICS, replace(NUMERICS))
    with pytest.raises(ConfigError) as caught:
        check_numerics(NUMERICS, replace(NUMERICS, threads=4, precision="bf16"))
    assert "  threads: 1 in the checkpoint, 4 now\n" in str(caught.value)
    assert "  precision: 'fp32' in the checkpoint, 'bf16' now\n" in str(caught.value)
    assert "--new-numerics" in str(caught.value)
    assert str(caught.value).count(" in the checkpoint, ") == 2


def test_other_bits_of_kernels_are_refused_and_unknown_ones_are_not() -> None:
    saved = replace(NUMERICS, bits="fast", kernels="1")
    check_numerics(saved, replace(saved))
    with pytest.raises(ConfigError) as caught:
        check_numerics(saved, replace(saved, kernels="2"), "0.1.7")
    assert "  kernels: '1' in the checkpoint, '2' now\n" in str(caught.value)
    assert "with the mpipipe that wrote the checkpoint, 0.1.7), or start" in str(caught.value)
    assert "--new-numerics" in str(caught.value)
    fields = json.loads(to_json(saved))
    del fields["kernels"]  # as those from before it was there
    older = from_json(Numerics, json.dumps(fields))
    assert older == replace(saved, kernels="")
    check_numerics(older, saved)
    for one in (older, replace(saved, op_table={"gate 8": "v4"})):  # what follows from the bits is no news
        with pytest.raises(ConfigError, match="bits: 'fast' in the checkpoint, 'torch' now") as caught:
            check_numerics(one, NUMERICS)
        assert str(caught.value).count(" in the checkpoint, ") == 1


def test_other_data_are_refused_where_both_are_known(tmp_path: Path) -> None:
    saved = {"samples": 64, "first_sha256": "ab12"}
    for known, now in ((saved, dict(saved)), ({}, saved), (saved, {})):
        check_data(tmp_path, known, now)
    with pytest.raises(CheckpointError) as caught:
        check_data(tmp_path, saved, {"samples": 80, "first_sha256": "ab12"})
    assert str(caught.value) == (
        f"{tmp_path}: was trained on other data than those that are there now\n"
        "  samples for training: 64 in the checkpoint, 80 now\n"
        "  put them back, and what they are read by (model.context, collate, shuffle), or go on with "
        "these by --new-numerics (in a script: new_data=True)"
    )
    with pytest.raises(CheckpointError, match="sha256 of the first samples: ab12 in the checkpoint, cd34"):
        check_data(tmp_path, saved, {"samples": 64, "first_sha256": "cd34"})


def test_a_checkpoint_of_an_earlier_version_knows_nothing_of_its_data(tmp_path: Path) -> None:
    save_step(tmp_path, 1, 1)
    forget_data(step_folder(tmp_path, 1))
    assert newest(tmp_path) == step_folder(tmp_path, 1)
    assert read_state(step_folder(tmp_path, 1)).data == {}


def test_what_cannot_be_read_is_set_aside_and_not_lost(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, 1)
    folder = step_folder(tmp_path, 2)
    for number in ("", "1"):
        (folder / "run.json").write_text("{}")
        assert set_aside(survey(tmp_path)) == [folder.with_name(f"{folder.name}.damaged{number}")]
        assert newest(tmp_path) == step_folder(tmp_path, 1)
        save_step(tmp_path, 2, 1)  # nothing is in the way
    assert newest(tmp_path) == folder
    assert set_aside(survey(tmp_path)) == []


def test_other_settings_of_the_training_are_told() -> None:
    def settings(model: str = "mlp", **train: Any) -> Config:
        given = {"steps": 100, "lr": 1e-3, "save_every": 10, **train}
        return Config.model_validate(
            {"model": {"name": model}, "data": {"name": "synthetic"}, "train": given}
        )

    before, note = settings(), "note: trained otherwise from here on: "
    assert otherwise(before, settings(save_every=5, keep=1)) == []
    assert otherwise(before, settings("resnet")) == [f"{note}model.name = resnet, was mlp"]
    assert otherwise(before, settings(steps=200, lr=5e-4)) == [
        f"{note}train.steps = 200, was 100, train.lr = 0.0005, was 0.001; the rate falls to its end at the "
        "last step"
    ]


@pytest.mark.parametrize(
    ("save_every", "step", "place"),
    [
        (0, 0, "the beginning (train.save_every=0)"),
        (0, 10, "step 10 (train.save_every=0)"),
        (5, 10, "the newest checkpoint, at most 5 steps back (train.save_every=5)"),
    ],
)
def test_it_is_said_where_a_run_that_dies_begins_again(save_every: int, step: int, place: str) -> None:
    """Another start resumes."""
    config = Config.model_validate({"train": {"save_every": save_every}})
    said = run_local(2, lambda comm: beginning(comm, config, 1, Path("run"), step))[0]
    assert any(line.startswith(f"recovery: a run that dies begins again from {place}; ") for line in said)


def test_how_to_stop_a_run_is_said_where_the_signal_does_not_start_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def says() -> bool:
        said = run_local(2, lambda comm: beginning(comm, Config(), 1, Path("run"), 0))[0]
        return any("`kill -USR1 7` stops it with a checkpoint" in line for line in said)

    monkeypatch.setattr("mpipipe.train.launcher_pid", lambda: 7)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert says()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert not says()
