"""Saves in the background: what is on disk is what was held when they began; failures reach all ranks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_run import ORDER, digests, facts, read_all, save_step, share, tensors
from unseen import shows

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import CheckpointError
from mpipipe.state import files, parts, saving
from mpipipe.state.resume import newest, read_state, step_folder
from mpipipe.state.saving import Saver


def begin(saver: Saver, run_dir: Path, step: int, **how: Any) -> tuple[Any, Any]:
    """What this rank holds, which may be changed from now on."""
    model, optimizer = (share(t, saver.comm) for t in tensors(step))
    saver.save(step_folder(run_dir, step), model, optimizer, ORDER, facts(step), background=True, **how)
    return model, optimizer


@pytest.mark.parametrize("ranks", [1, 3])
def test_training_goes_on_while_a_copy_is_written(tmp_path: Path, ranks: int) -> None:
    def body(comm: Communicator) -> list[int]:
        saver, whole = Saver(comm), []
        for step in (1, 2, 3):
            for part in begin(saver, tmp_path, step, then=lambda step=step: whole.append(step)):
                for t in part.values():
                    t.fill_(7.0)
            saver.poll()
        saver.finish()
        assert saver.saved == read_state(step_folder(tmp_path, 3))
        saver.finish()  # of nothing
        saver.poll()
        return whole

    assert run_local(ranks, body) == [[1, 2, 3], *[[]] * (ranks - 1)], "each waits for the one before"
    for step in (1, 2, 3):
        assert digests(*read_all(step_folder(tmp_path, step))) == digests(*tensors(step))


def test_what_the_others_have_written_is_looked_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parts.write_text

    def unseen(path: Path, text: str) -> None:
        write(path.with_name(f"{path.name}.unseen") if path.name.startswith("rank-") else path, text)

    monkeypatch.setattr(parts, "write_text", unseen)
    monkeypatch.setattr(parts, "look_anew", shows)
    monkeypatch.setattr(parts, "PATIENCE_S", 5.0)
    save_step(tmp_path, 1, ranks=3)
    assert newest(tmp_path) == step_folder(tmp_path, 1)


def test_a_checkpoint_is_not_there_before_all_ranks_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, real = threading.Event(), parts.Save.write

    def late(self: parts.Save, rank: int, mine: parts.Held) -> parts.Part:
        assert rank != 1 or may_write.wait(30)
        return real(self, rank, mine)

    monkeypatch.setattr(parts.Save, "write", late)

    def body(comm: Communicator) -> None:
        saver = Saver(comm)
        begin(saver, tmp_path, 1)
        for _ in range(5):
            saver.poll()
        comm.barrier()
        assert newest(tmp_path) is None
        comm.barrier()
        may_write.set()
        saver.finish()
        assert newest(tmp_path) == step_folder(tmp_path, 1)

    run_local(2, body)


@pytest.mark.parametrize("failing", [0, 2])
def test_what_fails_in_the_background_ends_all_ranks_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    save_step(tmp_path, 1, 3)
    real = parts.Save.write

    def fails(self: parts.Save, rank: int, mine: parts.Held) -> parts.Part:
        if rank == failing:
            raise OSError(28, "No space left on device")
        return real(self, rank, mine)

    monkeypatch.setattr(parts.Save, "write", fails)

    def body(comm: Communicator) -> tuple[int, str]:
        saver = Saver(comm)
        begin(saver, tmp_path, 2)
        for step in range(3, 10_000):
            try:
                saver.poll(0.001)
            except CheckpointError as error:
                saver.poll()
                return step, str(error)
        raise AssertionError("nothing was said")

    said = run_local(3, body)
    assert len(set(said)) == 1
    text = said[0][1]
    assert f"step-00000002: failed on 1 of 3 ranks\n  rank {failing}: OSError(28, " in text
    assert "earlier checkpoints are as they were: mend it (a full disk: make room), then go on" in text
    assert newest(tmp_path) == step_folder(tmp_path, 1)
    assert not step_folder(tmp_path, 2).exists()


@pytest.mark.parametrize(
    "name", ["optimizer-00002-of-00002.safetensors", "model.safetensors.index.json", "run.json"]
)
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, "failed"), (errno.ESTALE, "failed"), (errno.ETIMEDOUT, "failed"),
        (errno.ENOSPC, "error"), (errno.EACCES, "error"), (errno.EROFS, "error"),
    ],
)  # fmt: skip
def test_a_file_system_that_fails_for_a_moment_is_not_the_user_s_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, kind: str
) -> None:
    really = files._sync

    def sync(path: Path, flags: int) -> None:
        if path.name == f"{name}.part":
            raise OSError(number, os.strerror(number))
        really(path, flags)

    monkeypatch.setattr(files, "_sync", sync)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        save_step(tmp_path, 1, 2)
    assert caught.value.kind == kind
    assert ("mend it (a full disk" in str(caught.value)) == (kind == "error")
    assert str(caught.value).endswith("go on with --resume")


@pytest.mark.slow
def test_what_an_earlier_save_has_left_is_not_taken_for_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file system shows late that it was removed: the record of rank 1 is that of another save."""
    save_step(tmp_path, 1, 2)
    records: list[str] = []
    real = parts.write_text

    def stale(path: Path, text: str) -> None:
        records.extend([text] if path.name == "rank-1.json" else [])
        real(path, records[0] if path.name == "rank-1.json" else text)

    monkeypatch.setattr(parts, "write_text", stale)
    monkeypatch.setattr(parts, "PATIENCE_S", 0.05)
    save_step(tmp_path, 2, 2)
    with pytest.raises(CheckpointError, match=r"rank-1.json: written by rank 1, and not seen .* every node"):
        save_step(tmp_path, 3, 2)
    assert newest(tmp_path) == step_folder(tmp_path, 2)


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, "failed"), (errno.EACCES, "error")])
def test_a_record_that_cannot_be_read_may_be_there_at_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: str
) -> None:
    real = parts.read_small

    def fails(path: Path) -> bytes:
        if path.name == "rank-1.json":
            raise OSError(number, os.strerror(number))
        return real(path)

    monkeypatch.setattr(parts, "read_small", fails)
    monkeypatch.setattr(parts, "PATIENCE_S", 0.05)
    with pytest.raises(CheckpointError, match=r"rank-1\.json: written by rank 1, and not seen") as caught:
        save_step(tmp_path, 1, 2)
    assert caught.value.kind == kind


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_elsewhere_waits_for_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    def body(comm: Communicator) -> None:
        saver = Saver(comm)
        saver.settle()
        begin(saver, tmp_path, 1)
        saver.settle()
        assert newest(tmp_path) == step_folder(tmp_path, 1)

    run_local(ranks, body)
    monkeypatch.setattr(saving, "SETTLE_S", 0.05)
    monkeypatch.setattr(parts.Save, "write", lambda *_: threading.Event().wait(1))

    def stuck(comm: Communicator) -> None:
        saver = Saver(comm)
        begin(saver, tmp_path, 2)
        saver.settle()

    run_local(ranks, stuck)
    assert newest(tmp_path) == step_folder(tmp_path, 1)


def test_files_beside_the_tensors_are_in_the_manifest(tmp_path: Path) -> None:
    def beside(folder: Path) -> list[str]:
        (folder / "config.json").write_text("{}")
        return ["config.json"]

    def body(comm: Communicator) -> None:
        saver = Saver(comm)
        begin(saver, tmp_path, 1, beside=beside)
        saver.finish()

    run_local(2, body)
    assert read_state(step_folder(tmp_path, 1)).files["config.json"].nbytes == 2


def test_a_dtype_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        model = {"a": torch.zeros(2, dtype=torch.complex128)}
        Saver(comm).save(tmp_path / "x", model, {}, ["a"], facts(1))

    with pytest.raises(CheckpointError, match="'a' is complex128, for which safetensors has no word"):
        run_local(1, body)
