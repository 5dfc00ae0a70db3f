"""Proof that a program runs to its end without any buffering.

The model is the least that MPI promises:

1. A SEND blocks its rank until the peer has posted the matching RECV.
2. A rank has posted its next `receive_window` RECVs in program order, and the one it stands at.
   The window moves on when the rank passes a RECV, not earlier. A RECV of once per step (micro -1)
   is posted when the rank reaches it, because its buffer may be as large as an embedding.
3. A RECV blocks until the matching SEND is reached. NORM blocks until every rank is at its NORM.
4. A SEND between copies of a stage (SHARD, UPDATE) is begun and blocks nothing: that it has left counts at
   NORM, or at the end of the step, and there its receiver has passed the RECV.

Each rule asks only how far other ranks have come, and ranks never go back: one walk decides for
all possible timings, and a real MPI, which buffers more, can only do better. Steps may follow each
other: at the end of a proved step every message of it has been received.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe.errors import DeadlockError
from mpipipe.planner.native import compiled
from mpipipe.planner.walk import Ends, match, place, walk
from mpipipe.values import RECVS, SENDS, Int32, Op, Program

EXCHANGED = {Op.SEND_SHARD, Op.SEND_UPDATE}


def prove(program: Program) -> None:
    """Return if every rank reaches its end under the rules above and every SEND has exactly one
    RECV that means the same value.

    Raises DeadlockError with every blocked rank, its instruction and what it waits for.
    """
    ends = match(program)
    if compiled is None:
        rules = NoBuffering(ends)
        ended = walk(ends, rules, at := rules.at)
    else:
        ended, at = compiled.prove(program.codes, ends.partners, program.receive_window)
    if not ended:
        raise DeadlockError(_report(ends, at))


class NoBuffering:
    """The rules of the file's head; `received[rank]` counts the RECVs it has passed."""

    def __init__(self, ends: Ends) -> None:
        n_ranks = len(ends.ops)
        self.ends, self.at, self.received = ends, [0] * n_ranks, [0] * n_ranks
        self._ordinals = [_ordinals(codes) for codes in ends.program.codes]
        self._once = [(codes[:, 2] < 0).tolist() for codes in ends.program.codes]

    def waits_for(self, rank: int, index: int) -> int:
        ends = self.ends
        op, peer, other = ends.ops[rank][index], ends.peers[rank][index], ends.partner[rank][index]
        if op in EXCHANGED:
            return -1
        if op in SENDS:
            return -1 if self._is_posted(peer, other) else peer
        if op in RECVS:
            return -1 if self.at[peer] >= other else peer
        return -1

    def passed(self, rank: int, index: int) -> None:
        self.received[rank] += self.ends.ops[rank][index] in RECVS

    def norm(self, index: list[int]) -> None:
        pass

    def _is_posted(self, rank: int, recv: int) -> bool:
        if self.at[rank] >= recv or self._once[rank][recv]:
            return self.at[rank] >= recv
        return self._ordinals[rank][recv] - self.received[rank] < self.ends.program.receive_window


def _report(ends: Ends, at: Sequence[int]) -> str:
    program = ends.program
    blocked = [rank for rank, codes in enumerate(program.codes) if at[rank] < len(codes)]
    lines = [f"  {place(program, r, at[r])} waits for {_reason(ends, at, r)}" for r in blocked]
    return (
        f"deadlock: {len(blocked)} of {len(program.codes)} ranks are blocked with "
        f"receive_window {program.receive_window} and no buffering\n"
        + "\n".join(lines)
        + "\n  try a larger receive_window; if it stays, the order of the schedule is wrong"
    )


def _reason(ends: Ends, at: Sequence[int], rank: int) -> str:
    codes, index = ends.program.codes, at[rank]
    op, peer = codes[rank][index, [0, 4]].tolist()
    if op == Op.NORM:
        late = [r for r, c in enumerate(codes) if at[r] == len(c) or c[at[r], 0] != Op.NORM]
        return f"ranks {late}, which are not at NORM"
    verb = "post" if op in SENDS else "reach"
    where = "its end" if at[peer] == len(codes[peer]) else f"instruction {at[peer]}"
    return f"rank {peer} to {verb} its instruction {ends.partners[rank][index]}; it is at {where}"


def _ordinals(codes: Int32) -> list[int]:
    """For each instruction, the number of RECVs before it."""
    is_recv = np.isin(codes[:, 0], sorted(RECVS))
    counts: list[int] = (np.cumsum(is_recv) - is_recv).tolist()
    return counts
