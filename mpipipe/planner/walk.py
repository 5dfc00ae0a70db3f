"""One walk of all ranks through their programs: who can go on, who waits for whom.

The rules say for the instruction at which a rank stands whether it waits, and for which rank. A
wait that ends must stay ended, as ranks go on: then the order in which ranks are tried does not
matter. A rank is tried again only when the rank it waits for has moved, so the work is linear in
the number of instructions (times the neighbours of a rank).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mpipipe.errors import DeadlockError
from mpipipe.values import RECVS, SENDS, Instr, Op, Program

RECV_OF: dict[int, Op] = {
    Op.SEND_ACT: Op.RECV_ACT,
    Op.SEND_GRAD: Op.RECV_GRAD,
    Op.SEND_TIED: Op.RECV_TIED,
    Op.SEND_COPY: Op.RECV_COPY,
}
Partners = tuple[list[int], ...]


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
    """A program with its messages matched; plain lists, they are read one by one."""

    program: Program
    ops: tuple[list[int], ...]
    peers: tuple[list[int], ...]
    partner: Partners  # index at the peer of the other end of each message; -1: no message


@lru_cache(maxsize=2)  # a program is proved, then simulated, often more than once
def match(program: Program) -> Ends:
    """Pair the n-th SEND with the n-th RECV of each (from rank, to rank, tag), as MPI does.

    Raises DeadlockError if an end is missing or if the two ends do not mean the same value.
    """
    partner: Partners = tuple([-1] * len(codes) for codes in program.codes)
    rows = [codes.tolist() for codes in program.codes]
    waiting: dict[tuple[int, int, int], deque[int]] = {}
    for rank, index, peer, tag in _messages(program, RECVS):
        waiting.setdefault((peer, rank, tag), deque()).append(index)
    for rank, index, peer, tag in _messages(program, SENDS):
        queue = waiting.get((rank, peer, tag))
        if not queue:
            raise DeadlockError(f"{place(program, rank, index)}: rank {peer} has no RECV for it (tag {tag})")
        other = queue.popleft()
        op, stage, micro, to, _, _ = rows[rank][index]
        if rows[peer][other] != [RECV_OF[op], to, micro, stage, rank, tag]:
            raise DeadlockError(
                f"{place(program, rank, index)} would be received as {place(program, peer, other)}: "
                f"tag {tag} does not name one value there; give each channel its own tags"
            )
        partner[rank][index], partner[peer][other] = other, index
    for (peer, rank, tag), queue in waiting.items():
        if queue:
            raise DeadlockError(
                f"{place(program, rank, queue[0])}: rank {peer} has no SEND for it (tag {tag})"
            )
    ops = tuple(codes[:, 0].tolist() for codes in program.codes)
    return Ends(program, ops, tuple(codes[:, 4].tolist() for codes in program.codes), partner)


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
