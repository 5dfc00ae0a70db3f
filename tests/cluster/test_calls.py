"""Ranks of a script, as threads of this process, that do not make the same calls."""

from __future__ import annotations

import doctest
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpipipe.cluster import calls, watchdog
from mpipipe.cluster.calls import (
    END,
    HEARD_S,
    MARK,
    OLD_S,
    CallsWatchdog,
    Unwatched,
    _new_folder,
    _shared_folder,
    apart,
    watch_calls,
)
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.flight import KEPT_CALLS, Calls, Sign
from mpipipe.cluster.local import run_local
from mpipipe.cluster.watchdog import CALLED, FOLDER
from mpipipe.values import from_json

LIMIT_S, LONG_S = 0.3, 20.0
Ranks = tuple[list[CallsWatchdog], list[int], Callable[[], bool]]


def made(*names: str) -> Calls:
    found = Calls()
    for name in names:
        found = found.and_then(name, "script.py:1")
    return found


def test_the_examples_in_its_documentation() -> None:
    found = doctest.testmod(calls)
    assert (found.attempted, found.failed) == (2, 0)


@pytest.mark.parametrize("ahead", [0, 1, KEPT_CALLS - 1])
def test_ranks_are_apart_where_a_call_of_the_same_number_is_another_one(ahead: int) -> None:
    """However far one of them has come since, as far as signs tell."""
    steps = ["Pipeline", *["Pipeline.step"] * 20]
    one, other = made(*steps, "Pipeline.save"), made(*steps, "Pipeline.step", *["Pipeline.step"] * ahead)
    first, *ranks, _ = apart({0: one, 1: other, 2: other})
    assert "the ranks of this script make different calls" in first
    assert ranks[0] == "rank 0: Pipeline.save, script.py:1"
    assert ranks[1].startswith("ranks 1, 2: Pipeline.step")
    assert apart({0: made(*steps), 1: other}) == [], "it has not come to it yet"
    assert apart({0: made("Pipeline"), 1: other}) == [], "nor may be known any more"


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Two of them, the exit codes that they ended the job with, and a wait for both."""
    monkeypatch.setattr(calls, "SEEN_S", 0.1)
    monkeypatch.setattr(watchdog, "GATHER_S", 0.5)
    codes, both = list[int](), threading.Semaphore(0)

    def abort(code: int) -> None:
        codes.append(code)
        both.release()

    dogs = list[CallsWatchdog]()
    for rank in range(2):
        comm: Any = SimpleNamespace(rank=rank, size=2, abort=abort)
        dogs.append(CallsWatchdog(comm, tmp_path / "signs", LIMIT_S))
    yield dogs, codes, lambda: all(both.acquire(timeout=LONG_S) for _ in dogs)
    for dog in dogs:
        dog.close()


@pytest.fixture
def watched(ranks: Ranks) -> Ranks:
    """The same, which look at each other."""
    for dog in ranks[0]:
        dog.start()
    return ranks


@pytest.mark.slow
def test_a_call_that_meets_another_one_ends_all_and_names_both(watched, capfd) -> None:
    dogs, codes, _ = watched
    with dogs[0].made("Pipeline.save"), dogs[1].made("Pipeline.step", counts=True):
        for dog in dogs:
            dog._thread.join(LONG_S / 10)
    assert codes[0] == 1, "which ends all ranks"
    said = capfd.readouterr().err
    assert said.count("mpipipe: error: the ranks of this script make different calls") == 1
    assert "rank 0: Pipeline.save, cluster/test_calls.py:" in said
    assert "rank 1: Pipeline.step, cluster/test_calls.py:" in said
    assert "if pipe.rank == 0" in said


@pytest.mark.slow
def test_a_call_that_meets_the_end_of_a_script_is_told(watched, capfd, tmp_path) -> None:
    dogs, codes, _ = watched
    dogs[1].finish()
    with dogs[0].made("Pipeline.evaluate"):
        dogs[0]._thread.join(LONG_S)
    assert codes == [1]
    assert f"rank 1: {END}" in capfd.readouterr().err


def test_the_last_rank_that_ends_clears_up(watched, tmp_path) -> None:
    dogs, codes, _ = watched
    for dog in dogs:
        with dog.made("Pipeline"), dog.made("Pipeline.fit"):
            pass
    dogs[0].finish()
    sign = from_json(Sign, (tmp_path / "signs" / FOLDER / "rank-0.alive").read_bytes())
    assert [name for name, _ in sign.calls.newest] == ["Pipeline", "Pipeline.fit", END]
    dogs[1].finish()
    assert not (tmp_path / "signs").exists()
    assert codes == []


@pytest.mark.slow
def test_who_waits_for_a_rank_that_is_at_something_else_says_so_once_and_goes_on(
    watched, capfd, monkeypatch
) -> None:
    """What a rank does between two calls is its own affair, also within a callback."""
    dogs, codes, _ = watched
    monkeypatch.setattr(calls, "NOTE_S", LIMIT_S)
    monkeypatch.setattr(watchdog, "OTHER_S", LIMIT_S)
    monkeypatch.setattr(dogs[0], "_waits", lambda: True)
    fit, step = dogs[0].made("Pipeline.fit"), dogs[0].made("Pipeline.step", counts=True)
    with dogs[1].made("Pipeline.fit"), dogs[1].outside(), fit, step:
        time.sleep(5 * LIMIT_S)
    assert codes == []
    said = capfd.readouterr().err
    assert said.count("mpipipe: note: rank 0 waits in Pipeline.step (cluster/test_calls.py:") == 1
    assert "rank 1 is at cluster/test_calls.py:" in said
    assert "outside of any call; all ranks must make this one" in said


@pytest.mark.slow
def test_within_a_call_a_standstill_is_one(watched, tmp_path, capfd) -> None:
    dogs, codes, left = watched
    with dogs[0].made("Pipeline.step", counts=True), dogs[1].made("Pipeline.step", counts=True):
        assert left()
    assert codes == [watchdog.STOOD_STILL] * 2
    said = capfd.readouterr().err
    assert "mpipipe: watchdog: no progress for " in said
    assert "is in Pipeline.step, cluster/test_calls.py:" in said


@pytest.mark.slow
def test_between_two_calls_nothing_is_one(watched, tmp_path, monkeypatch) -> None:
    dogs, codes, _ = watched
    monkeypatch.setattr(watchdog, "OTHER_S", LIMIT_S)
    dogs[1]._stop()  # silent, as in a call in C that holds the interpreter's lock
    time.sleep(4 * LIMIT_S)
    assert codes == []
    assert not (tmp_path / "signs" / FOLDER / CALLED).exists()


@pytest.mark.slow
@pytest.mark.parametrize("callback", [False, True])
def test_what_holds_the_lock_of_the_interpreter_right_after_a_call_is_no_standstill(
    ranks, callback: bool
) -> None:
    """The thread gives no sign there, and its last one was of the call."""
    dogs, codes, _ = ranks
    dogs[0].start()
    with dogs[0].made("Pipeline.step"), dogs[1].made("Pipeline.step"):
        dogs[1].start()
        dogs[1]._stop()
        with dogs[1].outside() if callback else nullcontext():
            if callback:
                time.sleep(4 * LIMIT_S)
        assert codes == []
    with dogs[0].made("Pipeline.evaluate"):
        time.sleep(4 * LIMIT_S)
    assert codes == []


@pytest.mark.slow
def test_a_difference_that_one_look_alone_sees_ends_nothing(ranks, monkeypatch) -> None:
    """Signs are overwritten in place, so a look may meet half of one."""
    dogs, codes, _ = ranks
    looks = iter([["half of a sign"], ["half of another one"], [], ["half of a sign"]])
    monkeypatch.setattr(dogs[0], "_compared", lambda others: next(looks, []))
    dogs[0].start()
    time.sleep(3 * LIMIT_S)
    assert next(looks, None) is None
    assert codes == []


def test_each_call_that_fails_waits_once_for_what_the_others_have_called(ranks, monkeypatch) -> None:
    dog, slept = ranks[0][0], list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(2):
        with pytest.raises(ValueError, match="shapes"), dog.made("Pipeline.fit"), dog.made("Pipeline.step"):
            raise ValueError("of shapes, say")
    assert slept == [HEARD_S] * 2


def shared_folders(see: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """That of ranks on nodes of their own."""
    monkeypatch.setattr(calls, "SEEN_S", 0.1)

    def body(comm: Communicator) -> Path | None:
        return _shared_folder(comm)

    def of_this_rank(file: Path, patience_s: float) -> bool:
        return see[int(threading.current_thread().name.removeprefix("rank-"))] and file.is_file()

    monkeypatch.setattr(calls, "seen", of_this_rank)
    return run_local(len(see), body, node_of_rank=tuple(range(len(see))))


def test_several_nodes_share_a_folder_below_the_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, *others = shared_folders((True, True, True), monkeypatch)
    assert first is not None
    assert (first / MARK).is_file()
    assert first.parent == tmp_path / "mpipipe"
    assert others == [first, first]


def test_where_one_node_does_not_see_the_folder_none_is_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert shared_folders((True, True, False), monkeypatch) == [None] * 3
    assert list((tmp_path / "mpipipe").iterdir()) == []


def test_without_a_home_several_nodes_have_no_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    assert shared_folders((True, True), monkeypatch) == [None] * 2


def test_what_scripts_have_left_is_removed_after_a_day(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long_ago_s = time.time() - 1.1 * OLD_S
    for name, mark, sign_s in [
        ("left", MARK, long_ago_s),
        ("used", MARK, time.time()),
        ("own", "a", long_ago_s),
    ]:
        flight = tmp_path / f"mpipipe-{name}" / FOLDER
        flight.mkdir(parents=True)
        (flight / "rank-0.alive").touch()
        (flight.parent / mark).touch()
        os.utime(flight / "rank-0.alive", (sign_s, sign_s))
        for path in (flight.parent / mark, flight, flight.parent):
            os.utime(path, (long_ago_s, long_ago_s))
    made = _new_folder(several=False)
    assert made is not None
    assert set(tmp_path.iterdir()) == {made, tmp_path / "mpipipe-used", tmp_path / "mpipipe-own"}


def test_one_rank_or_off_is_watched_by_nobody(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert isinstance(run_local(1, lambda comm: watch_calls(comm, "auto"))[0], Unwatched)
    assert isinstance(run_local(2, lambda comm: watch_calls(comm, "off"))[0], Unwatched)
    assert list(tmp_path.iterdir()) == []
