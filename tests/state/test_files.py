"""A file that cannot be written whole leaves nothing; a full disk is told with what is free."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mpipipe.errors import MpipipeError, UnreadableError
from mpipipe.state.files import check_proves_damage, free_bytes, room_in, write_text, write_whole


def test_an_error_while_writing_leaves_the_old_file_alone(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")

    def half(partial: Path) -> None:
        partial.write_text("ne")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a", half)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_an_error_of_the_user_s(tmp_path: Path, number: int, named: bool) -> None:
    file = str(tmp_path / "metrics.jsonl") if named else None
    with pytest.raises(MpipipeError) as caught, room_in(tmp_path / "not yet there"):
        raise OSError(number, os.strerror(number), file)
    place = file or f"{tmp_path}/not yet there"
    assert str(caught.value).startswith(f"{place}: cannot be written ({os.strerror(number)}), ")
    assert "bytes are free; checkpoints are as they were: make room" in str(caught.value)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), room_in(tmp_path):
        (tmp_path / "nothing").read_text()
    assert free_bytes(tmp_path / "a" / "b") > 0


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, "failed"), (errno.ENOTCONN, "failed"), (errno.EACCES, "error")]
)
def test_a_file_that_is_not_ours_to_read_is_no_failure_of_the_moment(
    tmp_path: Path, number: int, kind: str
) -> None:
    with pytest.raises(UnreadableError, match=os.strerror(number)) as caught:
        check_proves_damage(tmp_path / "run.json", OSError(number, os.strerror(number)))
    assert caught.value.kind == kind
