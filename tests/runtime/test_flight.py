"""What a watchdog sees of two ranks that are threads, while one of them is held inside of an instruction."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tiny import Case, even_cuts, plan_of, warm

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.flight import Doing, Pending
from mpipipe.cluster.local import run_local
from mpipipe.cluster.watchdog import stack_of
from mpipipe.data.base import Dataset
from mpipipe.runtime.flight import InterpreterView
from mpipipe.runtime.interpreter import Interpreter
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import Instr

CASE = Case("mlp")
LONG_S = 30.0
Looks = dict[int, tuple[Doing, tuple[Pending, ...], list[str], bool]]


def seen(held: threading.Event, go_on: threading.Event) -> Looks:
    """Of each rank, at the second step of two; `held` is set by what holds one of them."""
    warm(CASE)
    views: dict[int, tuple[InterpreterView, int]] = {}

    def body(comm: Communicator) -> None:
        plan = plan_of(CASE, "1f1b", even_cuts(CASE.variants.graph.groups, 2))
        trainer = Trainer(comm, CASE.variants, plan, CASE.settings, CASE.dataset)
        views[comm.rank] = InterpreterView(trainer.interpreter), threading.get_ident()
        for step in range(2):
            trainer.step(step)

    found: Looks = {}

    def look() -> None:
        assert held.wait(LONG_S)
        before: object = None  # until the other one has come to where it waits, and stays there
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            now = [(v.progress(), v.doing(stack_of(thread), "").waits_for) for v, thread in views.values()]
            if now == before and any(waits_for for _, waits_for in now):
                break
            before = now
            time.sleep(0.3)
        for rank, (view, thread) in views.items():
            doing, before = view.doing(stack_of(thread), "training"), view.progress()
            recent = [r.instruction for r in view.recent() if r.took_s is None]
            found[rank] = doing, view.pending(), recent, before == view.progress()
        go_on.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    run_local(2, body)
    watcher.join()
    return found


@pytest.fixture
def events() -> tuple[threading.Event, threading.Event]:
    return threading.Event(), threading.Event()


def test_who_computes_and_who_waits_for_whom(events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held, go_on = events
    send = Interpreter._send_grad

    def holds(self: Interpreter, i: Instr) -> None:  # computing threads would wait for the lock of the tracer
        if (i.stage, i.micro, self.job.step) == (1, 2, 1):
            held.set()
            assert go_on.wait(LONG_S)
        send(self, i)

    monkeypatch.setattr(Interpreter, "_send_grad", holds)
    found = seen(held, go_on)
    doing, _, recent, rests = found[1]
    assert (doing.step, doing.what, doing.waits_for) == (2, "SEND_GRAD of stage 1", ())
    assert doing.at.endswith(" in wait"), "of the event"
    assert recent == ["1SEND_GRAD2->r0"]
    assert rests
    doing, pending, recent, rests = found[0]
    assert (doing.step, doing.waits_for) == (2, (1,))
    assert doing.what == "1B2"
    assert recent == ["0RECV_GRAD2<-r1"]
    assert ("1B2", "receive", 1) in [(p.what, p.kind, p.peer) for p in pending]


def test_a_rank_that_waits_for_its_data_is_where_they_are_loaded(
    events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go_on = events
    kind: type[Dataset] = type(CASE.dataset)
    batch = kind.batch

    def stuck_in_a_file(self: Any, split: str, step: int, start: int, stop: int, keys: frozenset[str]) -> Any:
        if step == 1 and "y" in keys:
            held.set()
            assert go_on.wait(LONG_S)
        return batch(self, split, step, start, stop, keys)

    monkeypatch.setattr(kind, "batch", stuck_in_a_file)
    found = seen(held, go_on)
    doing = found[1][0]
    assert "data" in doing.what, doing
    assert doing.waits_for == ()
    assert " in wait" in doing.at
