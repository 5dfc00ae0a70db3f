"""One walk of all ranks through their programs: who can go on, who waits for whom.

The rules say for the instruction at which a rank stands whether it waits, and for which rank. A
wait that ends must stay ended, as ranks go on: then the order in which ranks are tried does not
matter. A rank is tried again only when the rank it waits for has moved, so the work is linear in
the number of instructions (times the neighbours of a rank).

`match`, and the walks of `prove` and `simulate`, are compiled where they can be (kernels/planner/walk.h),
with the same results; what is here in Python is what they mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from mpipipe.errors import DeadlockError
from mpipipe.planner.native import compiled
from mpipipe.values import RECVS, SENDS, Instr, Int32, Op, Program

RECV_OF: dict[int, Op] = {send: Op(send + 1) for send in SENDS}
Partners = tuple[Int32, ...]
Lists = tuple[list[int], ...]
NO_RECV, OTHER_VALUE, NO_SEND = 1, 2, 3  # what is wrong with a message


class Rules(Protocol):
    """What a walk asks and tells, about the instruction `index` of a rank."""

    def waits_for(self, rank: int, index: int) -> int:
        """The rank whose progress it needs first; -1 if it can be passed now."""

    def passed(self, rank: int, index: int) -> None:
        """It is done."""

    def norm(self, index: list[int]) -> None:
        """All ranks stand at a NORM, each at its `index`, and pass it together."""


@dataclass(frozen=True, eq=False)
class Ends:
    """A program with its messages matched; plain lists where they are read one by one."""

    program: Program
    partners: Partners  # index at the peer of the other end of each message; -1: no message

    @cached_property
    def partner(self) -> Lists:
        return tuple(partner.tolist() for partner in self.partners)

    @cached_property
    def ops(self) -> Lists:
        return tuple(codes[:, 0].tolist() for codes in self.program.codes)

    @cached_property
    def peers(self) -> Lists:
        return tuple(codes[:, 4].tolist() for codes in self.program.codes)

    def sender_of(self, rank: int, index: int, at: Sequence[int]) -> int:
        """The rank that has yet to send what a RECV takes, where ranks stand `at`; -1: none, or no RECV."""
        if self.ops[rank][index] not in RECVS:
            return -1
        peer = self.peers[rank][index]
        return -1 if at[peer] > self.partner[rank][index] else peer


@lru_cache(maxsize=2)  # a program is proved, then simulated, often more than once
def match(program: Program) -> Ends:
    """Pair the n-th SEND with the n-th RECV of each (from rank, to rank, tag), as MPI does.

    Raises DeadlockError if an end is missing or if the two ends do not mean the same value.
    """
    if compiled is None:
        return Ends(program, matched(program))
    partners, (kind, rank, index, other) = compiled.match(program.codes)
    if kind:
        raise _fault(program, kind, rank, index, other)
    return Ends(program, tuple(partners))


def matched(program: Program) -> Partners:
    """The partners of each rank's messages."""
    partner: Partners = tuple(np.full(len(codes), -1, np.int32) for codes in program.codes)
    waiting: dict[tuple[int, int, int], deque[int]] = {}
    for rank, index, peer, tag in _messages(program, RECVS):
        waiting.setdefault((peer, rank, tag), deque()).append(index)
    for rank, index, peer, tag in _messages(program, SENDS):
        queue = waiting.get((rank, peer, tag))
        if not queue:
            raise _fault(program, NO_RECV, rank, index)
        other = queue.popleft()
        op, stage, micro, to, _, _ = program.codes[rank][index].tolist()
        if program.codes[peer][other].tolist() != [RECV_OF[op], to, micro, stage, rank, tag]:
            raise _fault(program, OTHER_VALUE, rank, index, other)
        partner[rank][index], partner[peer][other] = other, index
    for (_, rank, _), queue in waiting.items():
        if queue:
            raise _fault(program, NO_SEND, rank, queue[0])
    return partner


def _fault(program: Program, kind: int, rank: int, index: int, other: int = -1) -> DeadlockError:
    peer, tag = program.codes[rank][index, 4:].tolist()
    here = place(program, rank, index)
    if kind == OTHER_VALUE:
        return DeadlockError(
            f"{here} would be received as {place(program, peer, other)}: "
            f"tag {tag} does not name one value there; give each channel its own tags"
        )
    return DeadlockError(
        f"{here}: rank {peer} has no {'RECV' if kind == NO_RECV else 'SEND'} for it (tag {tag})"
    )


def walk(ends: Ends, rules: Rules, at: list[int]) -> bool:
    """Take every rank as far as the rules let it; True if all reach their end.

    at: index of the next instruction of each rank; kept up to date, for the rules to read.
    """
    waiters: list[set[int]] = [set() for _ in at]  # [rank]: the ranks that wait for it
    ready, in_norm = list(range(len(at))), set[int]()
    while ready:
        rank = ready.pop()
        before = at[rank]
        peer = _advance(rank, ends.ops[rank], rules, at)
        if peer >= 0:
            waiters[peer].add(rank)
        elif at[rank] < len(ends.ops[rank]):
            in_norm.add(rank)
        if at[rank] > before:
            ready += waiters[rank]
            waiters[rank].clear()
        if len(in_norm) == len(at):
            rules.norm(at.copy())
            at[:] = [index + 1 for index in at]
            ready += in_norm
            in_norm.clear()
    return all(index == len(ops) for index, ops in zip(at, ends.ops, strict=True))


def _advance(rank: int, ops: list[int], rules: Rules, at: list[int]) -> int:
    """Go on to the end or the next NORM (-1), or to a wait (the rank waited for)."""
    while at[rank] < len(ops) and ops[at[rank]] != Op.NORM:
        peer = rules.waits_for(rank, at[rank])
        if peer >= 0:
            return peer
        rules.passed(rank, at[rank])
        at[rank] += 1
    return -1


def place(program: Program, rank: int, index: int) -> str:
    """How a message names an instruction."""
    codes = program.codes[rank]
    return f"rank {rank} at {instr_at(program, rank, index)} (instruction {index} of {len(codes)})"


def instr_at(program: Program, rank: int, index: int) -> Instr:
    op, *rest = program.codes[rank][index].tolist()
    return Instr(Op(op), *rest)


def _messages(program: Program, ops: frozenset[Op]) -> Iterator[tuple[int, int, int, int]]:
    """rank, index, peer, tag of each message instruction of these kinds, in program order."""
    for rank, codes in enumerate(program.codes):
        indices = np.flatnonzero(np.isin(codes[:, 0], sorted(ops)))
        for index, (peer, tag) in zip(indices.tolist(), codes[indices, 4:].tolist(), strict=True):
            yield rank, index, peer, tag
