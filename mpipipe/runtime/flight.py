"""What a watchdog sees of a rank that runs a program. Reads what the interpreter writes anyway, from
another thread, so an instruction costs no more than without."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable
from types import FrameType

import numpy as np

from mpipipe.cluster.flight import Doing, Pending, Recent
from mpipipe.cluster.watchdog import Outside, View, line, stack_of, waiting
from mpipipe.runtime.interpreter import Interpreter, Outcome
from mpipipe.runtime.prefetch import THREAD
from mpipipe.values import COMPUTE, RECVS, Instr, Op

LAST = 12  # instructions that a record names
_SENT = {Op.RECV_ACT: Op.F, Op.SEND_ACT: Op.F, Op.RECV_GRAD: Op.B, Op.SEND_GRAD: Op.B}


class InterpreterView:
    """Of one rank."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._of, self._outside = interpreter, Outside(interpreter.comm.rank, interpreter.comm.size)

    def progress(self) -> Hashable:
        outcome = self._outcome
        return None if outcome is None else (self._of.job.mode, self._of.job.step, _counts(outcome))

    def doing(self, stack: list[FrameType], phase: str) -> Doing:
        outcome = self._outcome
        running = any(frame.f_code is Interpreter.run.__code__ for frame in stack)
        if outcome is None or not running:
            step = self._of.job.step + 1 if outcome is not None else 0
            loading = _loading(stack)
            found = self._outside.doing(stack, phase)
            what = "its data" if loading else found.what
            return Doing(step, what, found.waits_for, loading or found.at)
        begun, ended = _counts(outcome)
        what, waits_for = self._inside(begun, ended, waiting(stack) is not None)
        loading = _loading(stack)
        what = f"the data of {what}" if loading else what
        return Doing(self._of.job.step + 1, what, waits_for, loading or line(stack[-1]))

    def recent(self) -> tuple[Recent, ...]:
        outcome = self._outcome
        if outcome is None:
            return ()
        now = time.perf_counter()
        begun = np.flatnonzero(outcome.times[:, 0])[-LAST:].tolist()
        found = []
        for i in begun:
            start_s, end_s = outcome.times[i].tolist()
            took_s = round(end_s - start_s, 6) if end_s else None
            found.append(Recent(str(self._instr(i)), round(now - start_s, 6), took_s))
        return tuple(found)

    def pending(self) -> tuple[Pending, ...]:
        if self._outcome is None:
            return ()
        receives = [(i, "receive") for i in self._of.mailbox.pending()]
        sends = [(i, "send") for i in self._of.outbox.pending()]
        return tuple(Pending(_message(i), kind, i.peer, i.tag) for i, kind in [*receives, *sends])

    @property
    def _outcome(self) -> Outcome | None:
        return getattr(self._of, "outcome", None)  # None before the first program

    def _instr(self, i: int) -> Instr:
        op, *rest = self._of.program.codes[self._of.comm.rank][i].tolist()
        return Instr(Op(op), *rest)

    def _inside(self, begun: int, ended: int, waits: bool) -> tuple[str, tuple[int, ...]]:
        """What a rank within a program does, or waits for and from whom."""
        if not begun:
            return self._beginning(waits)
        instr = self._instr(begun - 1) if begun > ended else None
        sent = self._of.outbox.pending() if waits else []
        if sent and (instr is None or (instr.micro < 0 <= sent[0].micro)):  # what waits until these have left
            return f"the receive of {_message(sent[0])}", (sent[0].peer,)
        if instr is None:
            return "the end of the step", ()
        if instr.op in RECVS:
            return _message(instr), (instr.peer,) if waits else ()
        if instr.op == Op.NORM:
            return "the norm of the gradients", self._outside.others if waits else ()
        if instr.op in COMPUTE and instr.micro >= 0:
            return f"{instr.op.name} of stage {instr.stage}, micro-batch {instr.micro}", ()
        return f"{instr.op.name} of stage {instr.stage}", ()

    def _beginning(self, waits: bool) -> tuple[str, tuple[int, ...]]:
        """Where the ranks of the last stage of all copies tell each other the weights of their losses."""
        program, rank = self._of.program, self._of.comm.rank
        last = program.holders(program.n_stages - 1)
        others = tuple(other for other in last if other != rank)
        if waits and rank in last and others:
            return "the weights of the losses", others
        return "the beginning of the step", ()


class ViewOfNow:
    """Of the interpreter that there is when it is asked. It keeps none: one that is to go holds weights."""

    def __init__(self, find: Callable[[], Interpreter | None], outside: Outside) -> None:
        """outside: the view while there is none."""
        self._find, self._outside = find, outside

    @property
    def _now(self) -> View:
        found = self._find()
        return self._outside if found is None else InterpreterView(found)

    def progress(self) -> Hashable:
        return self._now.progress()

    def doing(self, stack: list[FrameType], phase: str) -> Doing:
        return self._now.doing(stack, phase)

    def recent(self) -> tuple[Recent, ...]:
        return self._now.recent()

    def pending(self) -> tuple[Pending, ...]:
        return self._now.pending()


def _counts(outcome: Outcome) -> tuple[int, int]:
    """How many instructions have begun and ended."""
    begun, ended = np.count_nonzero(outcome.times, axis=0).tolist()
    return begun, ended


def _message(i: Instr) -> str:
    """What made it: "2F5"; of what is sent once per step, its name, as the one that receives it sees it."""
    made = i.other if i.op in RECVS else i.stage
    if i.op in _SENT:
        return f"{made}{_SENT[i.op].name}{i.micro}"
    if i.op in (Op.RECV_SHARD, Op.SEND_SHARD):
        return f"the gradients of its share of stage {i.stage}"
    if i.op in (Op.RECV_UPDATE, Op.SEND_UPDATE):
        return f"the updated weights of stage {i.stage}"
    kind = "weights" if i.op in (Op.RECV_COPY, Op.SEND_COPY) else "gradients"
    return f"the tied {kind} of stage {made}"


def _loading(stack: list[FrameType]) -> str:
    """Where the thread that loads data is, if a stack waits for it."""
    if not any(frame.f_code.co_filename.endswith("mpipipe/runtime/prefetch.py") for frame in stack):
        return ""
    alive = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == THREAD and thread.ident in alive and (found := stack_of(thread.ident)):
            return line(found[-1])
    return ""
