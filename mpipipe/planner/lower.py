"""Schedule -> Program: write the messages, the norm and the update into the order.

Around each action, on the rank of its stage (nothing is sent within one rank):

    RECV_ACT  F  SEND_ACT                           activations go to the next stage
    RECV_GRAD [RECV_TIED]  B  SEND_GRAD [SEND_TIED] gradients go back; [..] only with tied="eager"

and at the end of every rank's step

    [SHARD ..] [SEND_TIED | RECV_TIED ..]  NORM  STEP ..  [UPDATE ..] [SEND_COPY | RECV_COPY ..]

with TIED here for tied="per_use". A split backward is I then W: GRAD messages stand around I, TIED
around W. SEND_GRAD comes before SEND_TIED, it is what the other ranks wait for.

Where there are copies of a stage, each owns some of its parameters. SHARD carries to it the
gradients that other copies have for them, UPDATE the updated weights back: a stage's copies meet in pairs,
in the rounds of `Exchange.partners`, and exchange them (SEND and RECV). So all ranks go through the same
rounds, and a copy is given the gradients in an order in which it can add them in their binary tree at once.
Copy 0 owns the tied parameters: the gradients of their other uses come to it within copy 0.

The first round of a stage begins as soon as it can: SEND_SHARD right behind the last B or W of the stage,
SEND_UPDATE right behind its STEP. What waits for other copies comes when nothing else is left to do, round by
round through the stages of a rank, SHARD in the order in which they are done:

    .. last B of stage 2  SEND_SHARD  .. last B of stage 0  SEND_SHARD      two stages of a rank, two rounds
    RECV_SHARD of 2  SEND_SHARD of 2  RECV_SHARD of 0  SEND_SHARD of 0
    RECV_SHARD of 2  RECV_SHARD of 0

There a later SEND_SHARD stands at the latest: a rank begins it as soon as it has taken what the RECV_SHARD
before it brings, between two computations of its other stages.

One TIED (and one COPY) message per pair of stages carries every parameter tied between the two:
the runtime sends them one after the other under the one tag.

Tags. A *channel* is one (message kind, from stage, to stage); a tag is channel * slots + micro
modulo slots, with slots = receive_window. So the receives posted at one time on a channel have
different tags, and messages under one tag are sent and received in the same order (micro-batches
ascend), which MPI never overtakes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.exchange import exchange_of
from mpipipe.planner.schedules import stages_of_ranks
from mpipipe.planner.stages import StageTie
from mpipipe.values import Action, Instr, Int32, Op, Program, Schedule

Pair = tuple[int, int]  # user stage, owner stage
N = TypeVar("N", int, Int32)


def tied_pairs(ties: Sequence[StageTie]) -> dict[Pair, int]:
    """Bytes of the tied message of each (user, owner) pair, in the order of their channels: the
    last stages first, as backward comes to them. (With the first owner first, a user could wait
    for an owner whose own gradient waits for the user's next message.)"""
    pairs: dict[Pair, int] = {}
    for tie in ties:
        for user in tie.users:
            pairs[user, tie.owner] = pairs.get((user, tie.owner), 0) + tie.nbytes
    return dict(sorted(pairs.items(), reverse=True))


def lower(
    schedule: Schedule, ties: Sequence[StageTie], tied: str, receive_window: int, train: bool = True
) -> Program:
    """The program of one step; `train=False` for a forward-only schedule: no ties, no NORM, no STEP.

    tied: "per_use" (one tied message per step and pair) or "eager" (one per micro-batch).
    receive_window: receives that each rank posts ahead; 0 = a receive is posted only when reached.
    Raises PlanError for an unknown mode or a negative window, or where tied="eager" and a rank does the
    weight gradient of a tied parameter's owner before that of a user.
    """
    if tied not in ("per_use", "eager"):
        raise PlanError(f"tied mode {tied!r} is not known; choose 'per_use' or 'eager'")
    if receive_window < 0:
        raise PlanError(f"receive window {receive_window} is negative; 4 is a good value")
    if train and tied == "eager":
        _check_local_ties(schedule, tied_pairs(ties))
    pairs = tied_pairs(ties) if train else {}
    codes = []
    for rank, (actions, stages) in enumerate(zip(schedule.codes, stages_of_ranks(schedule), strict=True)):
        wires = [_Wires(schedule, c, pairs, max(1, receive_window)) for c in schedule.copies_on(rank)]
        last = list(_end_of_step(stages, _done(actions, stages), wires, tied == "per_use")) if train else []
        behind = {s: wires[0].exchange(Op.SEND_SHARD, s)[:1] for s in stages} if train else {}
        codes.append(_written(actions, stages, wires, tied == "eager", behind, last))
    return Program(
        schedule.rank_of_stage, schedule.n_micro, receive_window, tuple(codes), schedule.other_copies,
        tied == "eager", schedule.nodes,
    )  # fmt: skip


def at_window(program: Program, receive_window: int) -> Program:
    """As if it had been lowered with this window."""
    if receive_window == program.receive_window:
        return program
    before, now = max(1, program.receive_window), max(1, receive_window)
    codes = tuple(codes.copy() for codes in program.codes)
    for of_rank in codes:
        micro, tag = of_rank[:, 2], of_rank[:, 5]
        of_rank[:, 5] = np.where(tag < 0, tag, _tag(tag // before, np.maximum(micro, 0), now))
    return replace(program, receive_window=receive_window, codes=codes)


def _check_local_ties(schedule: Schedule, pairs: Iterable[Pair]) -> None:
    """On one rank no message makes an owner wait for its users: the order itself must."""
    for (user, owner), (copy, ranks) in itertools.product(pairs, enumerate(schedule.copies)):
        rank = ranks[owner]
        if ranks[user] != rank:
            continue
        codes = schedule.codes[rank]
        done = codes[np.isin(codes[:, 0], (Op.B, Op.W))]
        last = {(stage, micro): place for place, (_, stage, micro) in enumerate(done.tolist())}
        for micro in schedule.share(copy):
            if last[owner, micro] < last[user, micro]:
                raise PlanError(
                    f"rank {rank} does the weight gradient of stage {owner}, micro-batch {micro}, before "
                    f"that of stage {user}, whose uses of a tied parameter come first with "
                    "pipeline.tied=eager; choose per_use, or another order"
                )


def max_tag(program: Program) -> int:
    """The largest tag in use, to hold against MPI's TAG_UB; -1 without messages."""
    return max((int(codes[:, 5].max()) for codes in program.codes if len(codes)), default=-1)


def _written(
    actions: Int32, stages: Sequence[int], wires: Sequence[_Wires], eager: bool,
    behind: Mapping[int, Sequence[Instr]], last: Sequence[Instr],
) -> Int32:  # fmt: skip
    """The instructions of one rank. Around each action of one kind, stage and copy of the pipeline stand the
    same ones but for the micro-batch: they are made once, and written for all of these actions together.
    behind: the last B or W of each stage; last: of all."""
    parts, slots = [], wires[0].slots
    lengths = np.zeros(len(actions), np.int64)
    for of_copy, stage, kind in itertools.product(wires, stages, (Op.F, Op.B, Op.I, Op.W)):
        micro, share = actions[:, 2], of_copy.share
        here = (micro >= share.start) & (micro < share.stop)
        place = np.flatnonzero((actions[:, 0] == kind) & (actions[:, 1] == stage) & here)
        action = Action(kind, stage, 0)
        instrs = list(_with_messages(action, of_copy.n_stages, of_copy, eager)) if len(place) else []
        lengths[place] = len(instrs)
        parts.append((place, instrs))
    starts = np.cumsum(lengths) - lengths
    codes = np.empty((int(lengths.sum()), len(Instr._fields)), np.int32)
    for place, instrs in parts:
        micros = actions[place, 2]
        for offset, instr in enumerate(instrs):
            rows = starts[place] + offset
            codes[rows] = instr
            codes[rows, 2] = micros
            if instr.tag >= 0:
                codes[rows, 5] = _tag(instr.tag // slots, micros, slots)
    more = [(_after_weights(codes, stage), instr) for stage, instrs in behind.items() for instr in instrs]
    more += [(len(codes), instr) for instr in last]
    rows = np.array([instr for _, instr in more], np.int32).reshape(-1, len(Instr._fields))
    return np.insert(codes, [place for place, _ in more], rows, axis=0)


def _after_weights(codes: Int32, stage: int) -> int:
    """Behind the last B or W of a stage, and the messages with what it has made."""
    at = int(np.flatnonzero(np.isin(codes[:, 0], (Op.B, Op.W)) & (codes[:, 1] == stage))[-1]) + 1
    while at < len(codes) and codes[at, 0] in (Op.SEND_GRAD, Op.SEND_TIED):
        at += 1
    return at


def _tag(channel: N, micro: N, slots: int) -> N:
    return channel * slots + micro % slots


class _Wires:
    """Who is where, seen from one copy of the pipeline, and which tag a message has. Both ends compute the
    same channel."""

    def __init__(self, order: Schedule, copy: int, pairs: dict[Pair, int], slots: int) -> None:
        self.order, self.copy, self.slots, self.share = order, copy, slots, order.share(copy)
        self.rank_of_stage = order.copies[copy]
        self.pairs = tuple(pairs)
        self.n_stages, n_pairs = len(self.rank_of_stage), len(pairs)
        self._tied = {pair: 2 * self.n_stages + i for i, pair in enumerate(pairs)}
        self._copy = {pair: 2 * self.n_stages + n_pairs + i for i, pair in enumerate(pairs)}
        self._between_copies = 2 * (self.n_stages + n_pairs)

    def message(self, op: Op, stage: int, micro: int, other: int) -> Iterator[Instr]:
        """The instruction of `stage` for a message to or from stage `other`, if ranks differ."""
        peer = self.rank_of_stage[other]
        if peer != self.rank_of_stage[stage]:
            tag = _tag(self._channel(op, stage, other), max(micro, 0), self.slots)
            yield Instr(op, stage, micro, other, peer, tag)

    def exchange(self, send: Op, stage: int) -> list[Instr]:
        """With other copies of the stage: SEND and RECV of each round."""
        channel = self._between_copies + stage
        if send == Op.SEND_UPDATE:
            channel += self.n_stages
        holders = self.order.holders(stage)
        copy = holders.index(self.rank_of_stage[stage])
        found = list(exchange_of(self.order.nodes_of(stage)).partners(copy))
        if send == Op.SEND_UPDATE:
            found.reverse()
        return [
            Instr(op, stage, -1, stage, holders[other], _tag(channel, 0, self.slots))
            for other in found
            for op in (send, Op(send + 1))
        ]

    def is_first_of(self, stage: int) -> bool:
        """Of the copies of the pipeline that its rank is in, the one in which it is given tied weights."""
        return self.order.copies_on(self.rank_of_stage[stage]).start == self.copy

    def _channel(self, op: Op, stage: int, other: int) -> int:
        match op:
            case Op.SEND_ACT:
                return stage
            case Op.RECV_ACT:
                return other
            case Op.SEND_GRAD:
                return self.n_stages + stage
            case Op.RECV_GRAD:
                return self.n_stages + other
            case Op.SEND_TIED:
                return self._tied[stage, other]
            case Op.RECV_TIED:
                return self._tied[other, stage]
            case Op.SEND_COPY:
                return self._copy[other, stage]
            case Op.RECV_COPY:
                return self._copy[stage, other]
        raise ValueError(f"{op.name} is not a message")


def _with_messages(action: Action, n_stages: int, wires: _Wires, eager: bool) -> Iterator[Instr]:
    kind, stage, micro = action
    compute = Instr(kind, stage, micro)
    if kind == Op.F:
        if stage > 0:
            yield from wires.message(Op.RECV_ACT, stage, micro, stage - 1)
        yield compute
        if stage < n_stages - 1:
            yield from wires.message(Op.SEND_ACT, stage, micro, stage + 1)
        return
    if kind in (Op.B, Op.I) and stage < n_stages - 1:
        yield from wires.message(Op.RECV_GRAD, stage, micro, stage + 1)
    weights = eager and kind in (Op.B, Op.W)
    for user, owner in wires.pairs:
        if weights and owner == stage:
            yield from wires.message(Op.RECV_TIED, stage, micro, user)
    yield compute
    if kind in (Op.B, Op.I) and stage > 0:
        yield from wires.message(Op.SEND_GRAD, stage, micro, stage - 1)
    for user, owner in wires.pairs:
        if weights and user == stage:
            yield from wires.message(Op.SEND_TIED, stage, micro, owner)


def _done(actions: Int32, stages: Sequence[int]) -> list[int]:
    """The stages of a rank in the order in which their gradients are whole."""
    of_weights = np.isin(actions[:, 0], (Op.B, Op.W))
    return sorted(stages, key=lambda stage: int(np.flatnonzero(of_weights & (actions[:, 1] == stage))[-1]))


def _end_of_step(
    stages: Sequence[int], done: Sequence[int], wires: Sequence[_Wires], merge_tied: bool
) -> Iterator[Instr]:
    """Every rank goes through the pairs in the same order, sending or receiving: the first message
    that is not done can always go on, so no circle of waits can close. done: the stages as of `_done`; wires:
    of each copy of the pipeline that the rank is in."""
    first = wires[0]
    yield from _later_rounds([first.exchange(Op.SEND_SHARD, stage) for stage in done])
    for user, owner in first.pairs if merge_tied and first.copy == 0 else ():
        if user in stages:
            yield from first.message(Op.SEND_TIED, user, -1, owner)
        if owner in stages:
            yield from first.message(Op.RECV_TIED, owner, -1, user)
    yield Instr(Op.NORM, -1, -1)
    updates = [first.exchange(Op.SEND_UPDATE, stage) for stage in stages]
    for stage, exchange in zip(stages, updates, strict=True):
        yield Instr(Op.STEP, stage, -1)
        yield from exchange[:1]
    yield from _later_rounds(updates)
    for user, owner in first.pairs:
        for of_copy in wires if owner in stages else ():
            if of_copy.is_first_of(user):
                yield from of_copy.message(Op.SEND_COPY, owner, -1, user)
        if user in stages:
            yield from first.message(Op.RECV_COPY, user, -1, owner)


def _later_rounds(exchanges: Sequence[Sequence[Instr]]) -> Iterator[Instr]:
    """Of stages with equally many copies, all but their first SEND: RECV of a round, then SEND of the next
    one, which may carry what the RECV has brought. All ranks go through the rounds in one order, and the SEND
    of a round comes before all RECV of it, so the first round that is not done can always go on."""
    for recv in range(1, max(map(len, exchanges), default=0), 2):
        for exchange in exchanges:
            yield from exchange[recv : recv + 2]
