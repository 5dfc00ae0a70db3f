"""What a watchdog sees of two ranks that are threads, while one of them is held inside of an instruction."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tiny import Case, even_cuts, plan_of, warm

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.flight import Doing, Pending
from mpipipe.cluster.local import run_local
from mpipipe.cluster.watchdog import stack_of
from mpipipe.data.base import Dataset
from mpipipe.runtime import interpreter
from mpipipe.runtime.flight import InterpreterView
from mpipipe.runtime.interpreter import Interpreter
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import Instr, Op, Program

CASE = Case("mlp")
LONG_S = 30.0
Looks = dict[int, tuple[Doing, tuple[Pending, ...], list[str], bool]]


def seen(held: threading.Event, go_on: threading.Event, case: Case = CASE, copies: int = 1) -> Looks:
    """Of each rank, at the second step of two; `held` is set by what holds one of them."""
    warm(case)
    views: dict[int, tuple[InterpreterView, int]] = {}

    def body(comm: Communicator) -> None:
        cuts = even_cuts(case.variants.graph.groups, comm.size // copies)
        plan = plan_of(case, "1f1b", cuts, copies=copies)
        trainer = Trainer(comm, case.variants, plan, case.settings, case.dataset)
        views[comm.rank] = InterpreterView(trainer.interpreter), threading.get_ident()
        for step in range(2):
            trainer.step(step)

    def stack(thread: int) -> list[FrameType]:
        """Without what starts a thread, which is in the file of the carrier."""
        frames = stack_of(thread)
        return frames[[frame.f_code for frame in frames].index(body.__code__) :]

    found: Looks = {}

    def look() -> None:
        assert held.wait(LONG_S)
        before: object = None  # until the other one has come to where it waits, and stays there
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            now = [(v.progress(), v.doing(stack(thread), "").waits_for) for v, thread in views.values()]
            if now == before and any(waits_for for _, waits_for in now):
                break
            before = now
            time.sleep(0.3)
        for rank, (view, thread) in views.items():
            doing, before = view.doing(stack(thread), "training"), view.progress()
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- copies of the pipeline ------------------------------------------------------------------------------


def hold_in_step_1(self: Interpreter, events: tuple[threading.Event, threading.Event]) -> None:
    held, go_on = events
    if (self.comm.rank, self.job.step) == (1, 1):
        held.set()
        assert go_on.wait(LONG_S)


@pytest.mark.slow
def test_before_the_first_instruction_the_last_ranks_of_other_copies_are_waited_for(
    events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all, start, late = interpreter.of_all_copies, Interpreter._start_weights, threading.local()

    def starts(self: Interpreter) -> None:
        late.of = self
        start(self)

    def holds(comm: Communicator, program: Program, mine: Sequence[float]) -> list[float]:
        hold_in_step_1(late.of, events)
        return of_all(comm, program, mine)

    monkeypatch.setattr(Interpreter, "_start_weights", starts)
    monkeypatch.setattr(interpreter, "of_all_copies", holds)
    found = seen(*events, Case("mlp", blocks=2), copies=2)
    assert (found[0][0].what, found[0][0].waits_for) == ("the weights of the losses", (1,))
    assert (found[1][0].what, found[1][0].waits_for) == ("the beginning of the step", ())


@pytest.mark.slow
def test_what_a_copy_waits_for_is_named_by_what_it_gets(events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    send_update = Interpreter._send_update

    def holds(self: Interpreter, i: Instr) -> None:
        hold_in_step_1(self, events)
        send_update(self, i)

    monkeypatch.setattr(Interpreter, "_send_update", holds)
    found = seen(*events, Case("mlp", blocks=2), copies=2)
    assert (found[0][0].what, found[0][0].waits_for) == ("the updated weights of stage 0", (1,))
    assert found[1][0].waits_for == ()


def test_what_waits_for_earlier_messages_waits_for_who_receives_them() -> None:
    """As rank 0 of two copies does with its first shard, while its last activation is on the way."""
    sent = [Instr(Op.SEND_ACT, 0, 5, 1, 3, 9)]
    codes = np.array([Instr(op, 0, -1, 0, 2, 8) for op in (Op.SEND_SHARD, Op.RECV_SHARD)])
    of = SimpleNamespace(
        comm=SimpleNamespace(rank=0, size=4),
        program=SimpleNamespace(codes=[codes]),
        outbox=SimpleNamespace(pending=lambda: sent),
    )
    view = InterpreterView(cast("Interpreter", of))
    assert view._inside(2, 1, True) == ("the receive of 0F5", (3,))
    assert view._inside(1, 0, False) == ("SEND_SHARD of stage 0", ())
    sent[0] = Instr(Op.SEND_SHARD, 0, -1, 0, 2, 8)  # they have left, and its own one waits for nothing
    assert view._inside(2, 1, True) == ("the gradients of its share of stage 0", (2,))
    assert view._inside(2, 2, True) == ("the receive of the gradients of its share of stage 0", (2,))
