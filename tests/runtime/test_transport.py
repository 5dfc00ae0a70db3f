"""When receives are posted and when sends begin: the order of calls to a communicator that notes them. And
which buffers stay."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from exchanging import AWAITED, BUCKETS, sums_that_come_during_a_wait, sums_that_leave_during_a_wait
from tiny import Case, even_cuts, placement, plan_of, warm
from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.planner.exchange import BUCKETS_AHEAD
from mpipipe.planner.simulate import AHEAD, receive_bytes
from mpipipe.runtime.trainer import Trainer
from mpipipe.runtime.transport import Incoming, Landing, Mailbox, Outbox, Piece
from mpipipe.values import Instr, Op


class Noting:
    """Messages are on their way until they are waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.posted: list[Way] = []

    def _post(self, what: str, tag: int) -> Any:
        self.calls.append((what, tag))
        self.posted.append(Way(tag))
        return self.posted[-1]

    def isend(self, buf: Any, peer: int, tag: int, crossing: bool = False) -> Any:
        return self._post("send", tag)

    def irecv(self, buf: Any, peer: int, tag: int, crossing: bool = False) -> Any:
        return self._post("receive", tag)

    def wait(self, *requests: Any) -> None:
        if not any(request.arrived for request in requests):
            requests[0].arrived = True
            self.calls.append(("wait", requests[0].tag))


class Way:
    def __init__(self, tag: int) -> None:
        self.tag, self.arrived = tag, False

    def done(self) -> bool:
        return self.arrived


def instr(op: Op, micro: int, tag: int) -> Instr:
    return Instr(op, 0, micro, 1, 1, tag)


def one(_: Instr) -> list[Tensor]:
    return [torch.zeros(1)]


def mailbox_of(comm: Noting, receives: list[Instr], window: int) -> Mailbox:
    outbox = Outbox(comm, Landing())  # type: ignore[arg-type]
    return Mailbox(comm, receives, window, one, Landing(), outbox)  # type: ignore[arg-type]


def test_a_tied_gradient_is_expected_with_the_last_receives_and_a_copy_when_it_is_taken() -> None:
    comm = Noting()
    grads = [instr(Op.RECV_GRAD, micro, micro) for micro in range(3)]
    tied, copy = instr(Op.RECV_TIED, -1, 7), instr(Op.RECV_COPY, -1, 8)
    mailbox = mailbox_of(comm, [*grads, tied, copy], 2)
    for receive in (*grads, tied, copy):
        mailbox.take(receive)
    assert comm.calls == [
        ("receive", 0), ("receive", 1), ("wait", 0),
        ("receive", 2), ("wait", 1),
        ("receive", 7), ("wait", 2),
        ("wait", 7),
        ("receive", 8), ("wait", 8),
    ]  # fmt: skip


def test_what_is_sent_once_per_step_lets_the_others_go_first() -> None:
    comm = Noting()
    outbox = Outbox(comm, Landing())  # type: ignore[arg-type]
    for micro in range(2):
        outbox.send([torch.zeros(1)], instr(Op.SEND_GRAD, micro, micro))
    outbox.send([torch.zeros(1)], instr(Op.SEND_TIED, -1, 7))
    assert comm.calls == [("send", 0), ("send", 1)]
    outbox.start_all()
    assert comm.calls == [("send", 0), ("send", 1), ("wait", 0), ("wait", 1), ("send", 7)]


def test_a_message_in_pieces_has_room_for_a_few_and_each_is_taken_in_turn() -> None:
    comm, room, taken = Noting(), list[int](), list[int]()

    def pieces() -> Iterator[Piece]:
        for i in range(6):
            room.append(i)
            yield torch.full((1,), i), lambda t: taken.append(int(t))

    incoming = Incoming(comm, instr(Op.RECV_SHARD, -1, 3), pieces(), Landing())  # type: ignore[arg-type]
    incoming.advance()
    assert (room, taken, comm.calls) == ([0, 1, 2, 3], [], [("receive", 3)] * 4)
    comm.posted[0].arrived = comm.posted[2].arrived = True
    incoming.advance()  # not the third one before the second
    assert (room, taken) == ([0, 1, 2, 3, 4], [0])
    comm.posted[1].arrived = True
    assert incoming.take_next()
    assert (room, taken) == (list(range(6)), [0, 1])  # and not the third one, which has arrived as well
    while incoming.first():
        incoming.first()[0].arrived = True  # type: ignore[attr-defined]
        incoming.advance()
    assert (taken, len(comm.posted), incoming.take_next()) == (list(range(6)), 6, False)


@pytest.mark.parametrize("awaited", AWAITED, ids=str)
def test_while_a_rank_waits_the_sums_of_others_come_in_and_its_own_leave(awaited: Instr) -> None:
    """A message leaves when its receive is posted, so the last buckets may arrive as the wait ends."""
    during, added = run_local(3, lambda comm: sums_that_come_during_a_wait(comm, awaited, 1))[0]
    assert during >= BUCKETS - BUCKETS_AHEAD
    assert added == list(range(BUCKETS))
    run_local(3, lambda comm: sums_that_leave_during_a_wait(comm, awaited, 1))


def test_a_rank_that_waits_adds_one_bucket_and_then_looks_for_what_it_waits_for() -> None:
    """Here that has come meanwhile."""
    comm, added = Noting(), list[int]()
    grad, sums = instr(Op.RECV_GRAD, 0, 1), instr(Op.RECV_SHARD, -1, 2)
    mailbox = mailbox_of(comm, [grad], 1)

    def add(i: int) -> None:
        added.append(i)
        comm.posted[0].arrived = True

    mailbox.expect(sums, ((torch.zeros(1), lambda _, i=i: add(i)) for i in range(6)))
    for way in comm.posted[1:]:
        way.arrived = True
    mailbox.take(grad)
    assert added == [0]
    mailbox.finish(sums)
    assert added == list(range(6))
    assert [tag for what, tag in comm.calls if what == "wait"] == [2, 2]  # for the two that had no room


@pytest.mark.parametrize("waits", [False, True])
def test_what_follows_a_message_in_pieces_is_done_once_that_is_whole(waits: bool) -> None:
    """Here two more, of which the first has no pieces. waits: for something else meanwhile."""
    comm, begun = Noting(), list[int]()
    grad, rounds = instr(Op.RECV_GRAD, 0, 1), [instr(Op.RECV_SHARD, -1, tag) for tag in (2, 3, 4)]
    mailbox = mailbox_of(comm, [grad], 1)

    def begin(n: int) -> None:
        begun.append(n)
        pieces: list[Piece] = [] if n == 1 else [(torch.zeros(1), None)]
        mailbox.expect(rounds[n], pieces, partial(begin, n + 1) if n < 2 else None)

    begin(0)
    assert begun == [0]
    comm.posted[1].arrived = True
    if waits:
        mailbox.take(grad)
    else:
        mailbox.advance()
    assert begun == [0, 1, 2]
    assert mailbox.pending() == [*([] if waits else [grad]), rounds[2]]
    for receive in rounds:
        mailbox.finish(receive)
    assert ("wait", 4) in comm.calls


def test_no_more_buckets_have_memory_than_are_expected_at_a_time() -> None:
    comm, room, alive = Noting(), list["weakref.ref[Tensor]"](), list[int]()
    mailbox, sums = mailbox_of(comm, [], 1), instr(Op.RECV_SHARD, -1, 2)

    def pieces() -> Iterator[Piece]:
        for _ in range(BUCKETS):
            alive.append(sum(t() is not None for t in room))
            made = torch.zeros(1)
            room.append(weakref.ref(made))
            yield made, None
            del made

    mailbox.expect(sums, pieces())
    mailbox.finish(sums)
    assert len(alive) == BUCKETS
    assert max(alive) < BUCKETS_AHEAD, "and then one more is made"


def test_what_is_sent_once_per_step_starts_when_the_others_have_left_without_being_waited_for() -> None:
    comm = Noting()
    outbox = Outbox(comm, Landing())  # type: ignore[arg-type]
    outbox.send([torch.zeros(1)], instr(Op.SEND_GRAD, 0, 0))
    outbox.send([torch.zeros(1)], shard := instr(Op.SEND_SHARD, -1, 7))
    assert comm.calls == [("send", 0)]
    assert [i.tag for i in outbox.pending()] == [0, 7]
    comm.posted[0].arrived = True
    outbox.drop_sent()
    outbox.send([torch.zeros(1)], instr(Op.SEND_GRAD, 1, 1))  # does not wait for the shard
    assert comm.calls == [("send", 0), ("send", 7), ("send", 1)]
    assert shard in outbox.pending()
    outbox.wait_all()
    assert comm.calls[3:] == [("wait", 1), ("wait", 7)]
    assert outbox.pending() == []


@pytest.mark.parametrize("window", [2, 8])
@pytest.mark.parametrize(
    ("model", "tied", "schedule", "n_ranks"),
    [
        ("gpt, untied", "per_use", "1f1b", 3),
        ("gpt", "eager", "gpipe", 3),
        ("conv and norm", "per_use", "interleaved", 2),
        ("conv and norm", "per_use", "zb-h2", 3),
        ("conv and norm", "per_use", "zb-v", 2),
        ("skips", "per_use", "1f1b", 3),
        ("skips", "per_use", "interleaved", 2),
    ],
)
@pytest.mark.slow
def test_the_buffers_that_stay_are_those_that_a_plan_counts(
    model: str, tied: str, schedule: str, n_ranks: int, window: int
) -> None:
    """In these models all tensors of one size are of the same form."""
    case, order = Case(model, tied=tied, batch=16, micro_batches=8), placement(schedule, n_ranks)  # type: ignore[arg-type]
    warm(case)

    def body(comm: Communicator) -> tuple[int, int]:
        cuts = even_cuts(case.variants.graph.groups, len(order))
        plan = plan_of(case, schedule, cuts, window, order)
        trainer = Trainer(comm, case.variants, plan, case.settings, case.dataset)
        for step in range(2):  # the second one is given what the first has left
            trainer.step(step)
        program, interpreter = trainer.program, trainer.interpreter
        instrs = [i if i.op in AHEAD else None for i in program.instrs(comm.rank)]
        kept = sum(t.nbytes for free in interpreter.pool._free.values() for t in free)
        tensors = [tuple(t.nbytes for t in interpreter._targets(i)) if i else () for i in instrs]
        parts = {(int(i.op), i.stage): each for i, each in zip(instrs, tensors, strict=True) if i}
        sizes = np.array([sum(each) for each in tensors])
        return kept, receive_bytes(program.codes[comm.rank], sizes, window, parts)

    for kept, counted in run_local(n_ranks, body):
        assert kept == counted > 0


@pytest.mark.slow
def test_new_weights_are_offered_before_those_of_the_partner_may_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, done, lock = Case("mlp", batch=8, micro_batches=4, blocks=2), [], threading.Lock()
    warm(case)

    def noting(method: Any) -> Any:
        def noted(of: Any, *given: Any) -> None:
            instr = next(one for one in given if isinstance(one, Instr))
            if instr.op in (Op.SEND_UPDATE, Op.RECV_UPDATE):
                with lock:
                    done.append((of._comm.rank, instr.op))
            method(of, *given)

        return noted

    monkeypatch.setattr(Outbox, "send", noting(Outbox.send))
    monkeypatch.setattr(Mailbox, "post", noting(Mailbox.post))

    def body(comm: Communicator) -> None:
        plan = plan_of(case, "1f1b", (), copies=2)
        Trainer(comm, case.variants, plan, case.settings, case.dataset).step(0)

    run_local(2, body)
    for rank in (0, 1):
        assert [op for at, op in done if at == rank] == [Op.SEND_UPDATE, Op.RECV_UPDATE]


@pytest.mark.slow
def test_in_an_evaluation_no_rank_runs_far_ahead_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the activations of all micro-batches, which no plan counts."""
    case, window, most = Case("mlp", batch=8, micro_batches=4, evaluate=True), 3, [0]
    warm(case)
    send, full = Outbox.send, threading.Event()

    def noting(box: Outbox, *given: Any) -> None:
        send(box, *given)
        most[0] = max(most[0], len(box.pending()))
        if most[0] > window:
            full.set()

    monkeypatch.setattr(Outbox, "send", noting)

    def body(comm: Communicator) -> float:
        plan = plan_of(case, "1f1b", even_cuts(case.variants.graph.groups, 2), window)
        trainer = Trainer(comm, case.variants, plan, case.settings, case.dataset)
        if comm.rank == 1:
            last = trainer.interpreter.stages[1]
            forward = last.forward
            monkeypatch.setattr(last, "forward", lambda *given: (full.wait(60), forward(*given))[1])
        return trainer.evaluate(1, 2 * 40)["loss"]

    first, second = run_local(2, body)
    assert first == second
    assert most[0] == window + 1, "the one that is sent now, too"
