"""List scheduling (Graham 1969) of F, I and W: each rank does the first of what it prefers that can begin.

A `Policy` says what it prefers, and how many stashes it has room for; a stash lives from F through W, or B.
Of forwards that of the rank's last stage comes first: it is what frees the others. Where nothing can begin,
the rank does the oldest W that it owes, unless the wait is too short for it. A weight gradient that needs
that of another use of its parameter (`Work.tied`) waits for it: as W are done in the order of their I, and
the I of a later stage come first, such waits close no circle. Where a rank has several stages,
room is kept for the forwards that are due on the later ones: else it fills up with what nobody can finish.

Compiled where it can be (kernels/planner/listed.h), with the same results; what is here is what they mean.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mpipipe.planner.native import compiled
from mpipipe.planner.schedules.fill import Work
from mpipipe.planner.schedules.orders import by_rank
from mpipipe.values import Action, Op, Schedule


@dataclass(frozen=True)
class Policy:
    """last_backward_first: of the stages of a rank; else that of the first one. first_whole: stage 0, whose
    gradient nobody waits for, does its backward in one. least_gap: a W is done where the wait is at least so
    many times as long. room: by rank, stashes of its stages at once."""

    forwards_first: bool
    last_backward_first: bool
    first_whole: bool
    least_gap: float
    room: tuple[int, ...]


def listed_seconds(
    rank_of_stage: Sequence[int], n_micro: int, work: Work, policies: Sequence[Policy]
) -> list[float]:
    """Of each policy, until the last action has ended; endless where there is no room for an order."""
    if compiled is None:
        return [_Lister(rank_of_stage, n_micro, work, policy).run()[1] for policy in policies]
    of = [compiled.Policy(*_fields(policy)) for policy in policies]
    found: list[float] = compiled.listed_seconds(compiled_work(rank_of_stage, work), n_micro, of)
    return found


def listed_shortest(
    rank_of_stage: Sequence[int],
    n_micro: int,
    work: Work,
    policies: Sequence[Policy],
    most_s: float = math.inf,
) -> tuple[int, float]:
    """The first of the policies whose order is shortest, and its seconds; endless where that is more than
    `most_s`."""
    if compiled is None:
        took_s = listed_seconds(rank_of_stage, n_micro, work, policies)
        best = min(range(len(took_s)), key=took_s.__getitem__)
        return best, took_s[best] if took_s[best] <= most_s else math.inf
    of = [compiled.Policy(*_fields(policy)) for policy in policies]
    found: tuple[int, float] = compiled.listed_shortest(
        compiled_work(rank_of_stage, work), n_micro, of, most_s
    )
    return found if found[1] <= most_s else (found[0], math.inf)


def listed(rank_of_stage: Sequence[int], n_micro: int, work: Work, policy: Policy) -> Schedule:
    """The order of a policy that has one."""
    if compiled is None:
        return by_rank(rank_of_stage, n_micro, _Lister(rank_of_stage, n_micro, work, policy).run()[0])
    how = compiled.Policy(*_fields(policy))
    codes = compiled.listed_order(compiled_work(rank_of_stage, work), n_micro, how)
    return Schedule(tuple(rank_of_stage), n_micro, tuple(codes))


def _fields(policy: Policy) -> tuple[bool, bool, bool, float, tuple[int, ...]]:
    p = policy
    return p.forwards_first, p.last_backward_first, p.first_whole, p.least_gap, p.room


def compiled_work(rank_of_stage: Sequence[int], w: Work) -> object:
    assert compiled is not None
    seconds = w.fwd_s, w.bwd_input_s, w.bwd_weight_s, w.bwd_s, w.act_s, w.grad_s
    return compiled.Work(list(rank_of_stage), *seconds, w.tied)


@dataclass
class _Rank:
    stages: list[int]  # ascending
    room: int
    order: list[Action] = field(default_factory=list)
    owed: deque[Action] = field(default_factory=deque)  # W
    held: int = 0
    clock_s: float = 0.0


class _Lister:
    def __init__(self, rank_of_stage: Sequence[int], n_micro: int, work: Work, policy: Policy) -> None:
        self._n_micro, self._work, self._policy = n_micro, work, policy
        self._done = {kind: [0] * len(rank_of_stage) for kind in (Op.F, Op.I)}  # by stage
        self._ends_s: dict[tuple[Op, int, int], float] = {}
        self._ranks = [_Rank([], room) for room in policy.room]
        for stage, rank in enumerate(rank_of_stage):
            self._ranks[rank].stages.append(stage)

    def run(self) -> tuple[list[list[Action]], float]:
        """The order of each rank, and its seconds."""
        while True:
            nexts = [(rank, *self._next(rank)) for rank in self._ranks]
            rank, start_s, action = min(nexts, key=lambda found: found[1])
            if action is None:
                break
            self._do(rank, action, start_s)
        whole = min(self._done[Op.I]) == self._n_micro
        return [r.order for r in self._ranks], max(r.clock_s for r in self._ranks) if whole else math.inf

    def _preferred(self, rank: _Rank) -> Iterator[tuple[Op, int]]:
        forwards = [(Op.F, stage) for stage in reversed(rank.stages)]
        backwards = [(Op.I, stage) for stage in rank.stages]
        if self._policy.last_backward_first:
            backwards.reverse()
        yield from forwards + backwards if self._policy.forwards_first else backwards + forwards

    def _next(self, rank: _Rank) -> tuple[float, Action | None]:
        """What the rank does next, and when; endless: nobody knows yet."""
        soonest_s, soonest = math.inf, None
        for kind, stage in self._preferred(rank):
            ready_s = self._ready_s(rank, kind, stage)
            action = Action(kind, stage, self._done[kind][stage])
            if ready_s <= rank.clock_s:
                return rank.clock_s, action
            if ready_s < soonest_s:
                soonest_s, soonest = ready_s, action
        if rank.owed:
            _, stage, micro = weight = rank.owed[0]
            start_s = max(rank.clock_s, self._uses_s(stage, micro))
            if start_s < math.inf and (
                soonest_s - start_s >= self._policy.least_gap * self._work.bwd_weight_s[stage]
            ):
                return start_s, weight
        return soonest_s, soonest

    def _ready_s(self, rank: _Rank, kind: Op, stage: int) -> float:
        """When the next F or I of a stage can begin; endless: not known yet, or there is none, or no room."""
        micro = self._done[kind][stage]
        if micro == self._n_micro:
            return math.inf
        if kind == Op.F:
            due = sum(other > stage and self._done[Op.F][other] < micro for other in rank.stages)
            if rank.held + due >= rank.room:
                return math.inf
            if not stage:
                return 0.0
            return self._ends_s.get((Op.F, stage - 1, micro), math.inf) + self._work.act_s[stage - 1]
        own_s = self._ends_s.get((Op.F, stage, micro), math.inf)
        if stage == len(self._work.fwd_s) - 1:
            return own_s
        after_s = self._ends_s.get((Op.I, stage + 1, micro), math.inf) + self._work.grad_s[stage + 1]
        uses_s = self._uses_s(stage, micro) if self._is_whole(stage) else 0.0
        return max(own_s, after_s, uses_s)

    def _is_whole(self, stage: int) -> bool:
        return stage == 0 and self._policy.first_whole

    def _uses_s(self, stage: int, micro: int) -> float:
        """When the gradients of other uses of what a stage owns are there."""
        uses = ((user, sent_s) for user, owner, sent_s in self._work.tied if owner == stage)
        return max((self._ends_s.get((Op.W, use, micro), math.inf) + s for use, s in uses), default=0.0)

    def _do(self, rank: _Rank, action: Action, start_s: float) -> None:
        kind, stage, micro = action
        if kind == Op.W:
            rank.owed.popleft()
            rank.held -= 1
            rank.clock_s = start_s + self._work.bwd_weight_s[stage]
        else:
            self._done[kind][stage] += 1
            if kind == Op.F:
                rank.held += 1
                rank.clock_s = start_s + self._work.fwd_s[stage]
            elif self._is_whole(stage):
                rank.held -= 1
                rank.clock_s = start_s + self._work.bwd_s[stage]
                action = Action(Op.B, stage, micro)
            else:
                rank.owed.append(Action(Op.W, stage, micro))
                rank.clock_s = start_s + self._work.bwd_input_s[stage]
        self._ends_s[kind, stage, micro] = rank.clock_s
        rank.order.append(action)
