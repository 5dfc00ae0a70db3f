"""Which hosts a restart takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpipipe.cluster import hosts
from mpipipe.cluster.starter import Host, Starter
from mpipipe.errors import LaunchError


def test_hosts_share_the_ranks_unless_they_say_how_many() -> None:
    assert hosts.parse("a,b", 5) == [Host("a", 3), Host("b", 3)]
    assert hosts.parse("a:4,b", 2) == [Host("a", 4), Host("b", 1)]
    assert hosts.parse("a,b", None) == [Host("a", 1), Host("b", 1)]
    for wrong in ("a,,b", "a:x", ""):
        with pytest.raises(LaunchError, match="expected names, such as a,b"):
            hosts.parse(wrong, 2)


def test_slurm_says_which_nodes_are_down(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"a": "allocated", "b": "down*", "c": "mixed-", "d": "idle", "e": "allocated*", "f": "draining"}
    states |= {"g": "allocated@", "h": "idle~", "i": "mixed^", "j": "allocated+", "k": "down"}
    said = "".join(f"{name} {state}\n" for name, state in states.items())
    monkeypatch.setattr(hosts, "_said", lambda command: said)
    assert hosts.down([Host(name, 1) for name in states]) == {"b", "e", "h", "k"}
    monkeypatch.setattr(hosts, "_said", lambda command: "a\nb\n")
    assert hosts.of_slurm({"SLURM_JOB_NODELIST": "x[1-2]"}, 4) == [Host("a", 2), Host("b", 2)]
    assert hosts.of_slurm({}, 4) is None


@pytest.mark.slow
def test_a_host_answers_by_running_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ANSWER_S", 1.0)
    launcher = tmp_path / "launcher"  # -n 1 --host NAME:1 program
    launcher.write_text('#!/bin/sh\ncase $4 in a:*) exec "$5" ;; b:*) exit 1 ;; *) exec sleep 60 ;; esac\n')
    launcher.chmod(0o755)
    asked = [Host(name, 2) for name in "abc"]
    assert hosts.answering(asked, Starter((str(launcher),), "Open MPI", True), ["true"], {}) == asked[:1]
