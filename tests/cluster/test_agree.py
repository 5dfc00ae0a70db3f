"""Ranks that differ are told so, all of them, with both values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpipipe
from mpipipe.cluster.agree import agree, code_version, surroundings
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


def test_two_copies_of_the_package_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Somewhere:
        """The package's path, another one at each look: the ranks are threads of one process."""

        looks = 0

        def __getitem__(self, _: int) -> str:
            self.looks += 1
            return f"/copy-{self.looks}/mpipipe"

    monkeypatch.setattr(mpipipe, "__path__", Somewhere())
    with pytest.raises(LaunchError) as caught:
        run_local(2, lambda comm: agree(comm, {"code": str(comm.rank)}, "use one copy"))
    assert set(re.findall(r"is (/copy-\d/mpipipe)", str(caught.value))) == {
        "/copy-1/mpipipe",
        "/copy-2/mpipipe",
    }
    assert str(caught.value).endswith("fix: use one copy")


def test_what_decides_bits_beside_the_arguments_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    before = surroundings("kernels 1")
    assert (before["code"], before["OMP_THREAD_LIMIT"]) == (code_version("kernels 1"), "(not set)")
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "17")  # torch is told the number, so this has no effect
    assert surroundings("kernels 1") == before | {"OMP_THREAD_LIMIT": "1"}


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
    seen, seen_of_another_room = set(), set()
    for text in ("x = 1", "x = 2", ""):
        source.write_text(text)
        seen.add(code_version())
        seen_of_another_room.add(code_version(rooms=("other",)))
    assert len(seen_of_another_room) == 1
    source.rename(tmp_path / "a.py")
    seen.add(code_version())
    (tmp_path / "notes.txt").write_text("not code")
    assert code_version() in seen
    assert len(seen) == 4
