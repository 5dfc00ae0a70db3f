"""Who writes into a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpipipe.errors import CheckpointError
from mpipipe.state.owner import OWNER, check_owner, own


def test_the_one_that_began_last_owns_a_run_folder(tmp_path: Path) -> None:
    first = own(tmp_path)
    check_owner(tmp_path, first)
    second = own(tmp_path)
    check_owner(tmp_path, second)
    with pytest.raises(CheckpointError, match=rf"{OWNER}: another .* as process {second.pid}; this one"):
        check_owner(tmp_path, first)


@pytest.mark.parametrize("text", [None, "", "{}", '{"id": 3}'])
def test_without_a_readable_name_nobody_does(tmp_path: Path, text: str | None) -> None:
    mine = own(tmp_path)
    (tmp_path / OWNER).unlink()
    if text is not None:
        (tmp_path / OWNER).write_text(text)
    with pytest.raises(CheckpointError, match=f"{OWNER}: cannot be read"):
        check_owner(tmp_path, mine)
