"""Ranks that differ are told so, all of them, with both values."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpipipe
from mpipipe.cluster.agree import agree, code_version
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import LaunchError


def test_equal_facts_pass() -> None:
    run_local(3, lambda comm: agree(comm, {"plan": "a", "torch": "2"}))


def test_the_first_difference_is_named_on_every_rank() -> None:
    messages: list[str] = []

    def body(comm: Communicator) -> None:
        facts = {"plan": "aa", "threads": "1" if comm.rank < 2 else "4"}
        with pytest.raises(LaunchError) as caught:
            agree(comm, facts)
        messages.append(str(caught.value))

    run_local(4, body, node_of_rank=(0, 0, 1, 1))
    assert len(messages) == 4
    assert len(set(messages)) == 1
    assert "on: threads (2 of 4 ranks differ" in messages[0]
    assert "rank 0 (node 0): 1\n" in messages[0]
    assert "rank 2 (node 1): 4\n" in messages[0]
    assert "fix: " in messages[0]


def test_a_missing_fact_is_a_difference() -> None:
    def body(comm: Communicator) -> None:
        agree(comm, {} if comm.rank else {"plan": "a"})

    with pytest.raises(LaunchError, match="missing"):
        run_local(2, body)


def test_the_code_version_follows_every_byte_and_every_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_version() == code_version() != code_version("kernels 2")
    monkeypatch.setattr(mpipipe, "__path__", [str(tmp_path)])
    source = tmp_path / "room" / "a.py"
    source.parent.mkdir()
    seen = set()
    for text in ("x = 1", "x = 2", ""):
        source.write_text(text)
        seen.add(code_version())
    source.rename(tmp_path / "a.py")
    seen.add(code_version())
    (tmp_path / "notes.txt").write_text("not code")
    assert code_version() in seen
    assert len(seen) == 4
