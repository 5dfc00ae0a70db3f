"""Loading ahead, told by events and never by time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mpipipe.runtime.prefetch import Prefetch


class Loader:
    """Doubles a number when it is let; remembers in which order and by which thread."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.threads: set[str] = set()
        self.may = threading.Semaphore(0)
        self.began = threading.Semaphore(0)

    def __call__(self, request: int) -> int:
        self.begun.append(request)
        self.threads.add(threading.current_thread().name)
        self.began.release()
        assert self.may.acquire(timeout=60)
        if request < 0:
            raise KeyError(request)
        return 2 * request

    def wait(self, n: int) -> None:
        for _ in range(n):
            assert self.began.acquire(timeout=60)

    def let(self, n: int = 1000) -> None:
        self.may.release(n)


@pytest.fixture
def load() -> Loader:
    return Loader()


@pytest.fixture
def ahead(load: Loader) -> Iterator[Prefetch[int, int]]:
    with Prefetch(load, 2) as ahead:
        yield ahead
        load.let()


def test_what_comes_all_at_once_is_loaded_however_much_it_is(load: Loader, ahead: Prefetch[int, int]) -> None:
    ahead.expect([1, 2, 3], [5, 6, 7, 8])
    load.let()
    load.wait(6)  # nobody has asked: two of the first, which are more urgent, and all of the others
    assert load.begun == [1, 2, 5, 6, 7, 8]
    ahead.expect([5, 6, 7, 8, 9])
    assert [ahead.get(r) for r in (5, 6, 7, 8)] == [10, 12, 14, 16]
    load.wait(1)
    assert load.begun == [1, 2, 5, 6, 7, 8, 9], "none of them twice"


def test_what_is_expected_is_loaded_before_it_is_asked_for(load: Loader, ahead: Prefetch[int, int]) -> None:
    ahead.expect([1, 2, 3, 4])
    load.let(2)
    load.wait(2)  # nobody has asked
    assert load.begun == [1, 2]
    load.let()
    assert [ahead.get(r) for r in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert load.begun == [1, 2, 3, 4], "each once, in order"
    assert load.threads == {"mpipipe-prefetch"}


def test_no_more_than_depth_are_held(load: Loader, ahead: Prefetch[int, int]) -> None:
    load.let()
    ahead.expect(range(1, 9))
    load.wait(2)
    assert ahead.get(1) == 2
    load.wait(1)  # the third, in the place of the first
    assert ahead.get(100) == 200  # by now the thread has done all else that it may
    assert load.begun == [1, 2, 3, 100]


def test_anything_may_be_asked_for_in_any_order(load: Loader, ahead: Prefetch[int, int]) -> None:
    load.let()
    ahead.expect([1, 2, 3, 4, 5, 6])
    assert ahead.get(9) == 18
    assert [ahead.get(r) for r in (6, 1, 1, 5)] == [12, 2, 2, 10]
    ahead.expect([7, 7])
    assert [ahead.get(7), ahead.get(7)] == [14, 14]


def test_what_is_expected_anew_takes_the_place_of_the_old(load: Loader, ahead: Prefetch[int, int]) -> None:
    ahead.expect([1, 2, 3])
    load.wait(1)  # 1 is being loaded
    ahead.expect([8, 9])
    load.let()
    assert [ahead.get(8), ahead.get(9)] == [16, 18]
    assert load.begun == [1, 8, 9], "the old ones are not loaded any more"
    ahead.expect([4, 5])
    load.wait(4)
    ahead.expect([5, 6])
    assert [ahead.get(5), ahead.get(6)] == [10, 12]
    assert load.begun.count(5) == 1, "what is still expected is kept"


def test_an_error_comes_out_where_its_batch_is_asked_for(load: Loader, ahead: Prefetch[int, int]) -> None:
    load.let()
    ahead.expect([1, -2, 3])
    assert ahead.get(1) == 2
    with pytest.raises(KeyError, match="-2") as raised:
        ahead.get(-2)
    assert raised.value.__notes__ == ["while loading -2"]
    assert raised.traceback[-1].name == "__call__", "with the place where it arose"
    assert ahead.get(3) == 6


def test_nothing_is_loaded_before_the_thread_of_another_one_has_ended(
    load: Loader, ahead: Prefetch[int, int]
) -> None:
    ahead.expect([1, 2])
    load.wait(1)
    with Prefetch(load, 2) as later:
        later.after(ahead)
        later.expect([3])
        assert not load.began.acquire(timeout=0.2)
        load.let()
        assert later.get(3) == 6
        assert load.begun == [1, 3], "what was expected of the first one is not loaded any more"


def test_close_ends_the_thread_and_later_gets_are_defects(load: Loader) -> None:
    ahead = Prefetch(load, 2)
    ahead.expect([1, 2])
    load.wait(1)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    load.let()
    closing.join(60)
    assert not closing.is_alive()
    assert not ahead._thread.is_alive()
    with pytest.raises(RuntimeError, match="5 is asked of a Prefetch that is closed"):
        ahead.get(5)


ENDS_WHILE_LOADING = """
import threading, torch
from mpipipe.runtime.prefetch import Prefetch

begun = threading.Event()

def load(request):
    begun.set()
    {load}

ahead = Prefetch(load, 1)
ahead.expect([1])
begun.wait()
"""


def ends(load: str) -> subprocess.CompletedProcess[str]:
    script = ENDS_WHILE_LOADING.format(load=load)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_program_may_end_while_a_batch_is_loaded() -> None:
    """A thread that came back from torch then would abort it."""
    done = ends("return torch.randn(1500, 1500) @ torch.randn(1500, 1500)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_program_ends_though_a_batch_never_comes() -> None:
    done = ends("threading.Event().wait()")
    assert (done.returncode, done.stderr) == (0, "")
