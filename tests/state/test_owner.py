"""Who writes into a run folder."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import saved_run

from mpipipe.errors import CheckpointError
from mpipipe.state.owner import OWNER, check_owner, own


def test_the_one_that_began_last_owns_a_run_folder(tmp_path: Path) -> None:
    first = own(tmp_path, 0)
    check_owner(tmp_path, first)
    second = own(tmp_path, 0)
    check_owner(tmp_path, second)
    with pytest.raises(CheckpointError, match=rf"{OWNER}: another .* as process {second.pid}; this one"):
        check_owner(tmp_path, first)


@pytest.mark.parametrize("text", [None, "", "{}", '{"id": 3}'])
def test_without_a_readable_name_nobody_does(tmp_path: Path, text: str | None) -> None:
    mine = own(tmp_path, 0)
    (tmp_path / OWNER).unlink()
    if text is not None:
        (tmp_path / OWNER).write_text(text)
    with pytest.raises(CheckpointError, match=f"{OWNER}: cannot be read") as caught:
        check_owner(tmp_path, mine)
    assert caught.value.kind == "error"


def test_a_name_that_a_network_does_not_give_just_now_is_none_of_the_user_s_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = own(tmp_path, 0)

    def stale(path: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "read_bytes", stale)
    with pytest.raises(CheckpointError, match=f"{OWNER}: cannot be read") as caught:
        check_owner(tmp_path, mine)
    assert caught.value.kind == "failed"


def test_who_would_go_on_from_before_what_another_start_has_saved_does_not(tmp_path: Path) -> None:
    saved_run.save_step(tmp_path, 6)
    mine = own(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"step-00000006: saved by another start .* from step 3;"):
        own(tmp_path, 3)
    check_owner(tmp_path, mine)
