"""Weight gradients where a rank would wait (Qi et al. 2023): how zb-v and v-half are completed.

Given is for each rank the order of its F and I, and how many stashes it has room for; a stash lives from F
through W. The ranks are taken in the order of their clocks. One whose next F or I is not there yet, or whose
next F has no room, does the oldest W that it owes:

    rank 1   F0 F1 I0 F2 I1 I2   with room for two   ->   F0 F1 I0 W0 F2 I1 W1 I2 W2
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mpipipe.errors import PlanError
from mpipipe.planner.schedules.orders import by_rank
from mpipipe.values import Action, Op, Schedule

Skeleton = Sequence[Sequence[Action]]  # by rank, F and I alone
Use = tuple[int, int, float]  # stage of a user, stage of its owner, seconds of its message


@dataclass(frozen=True)
class Work:
    """Seconds of each stage for one micro-batch, and of its messages (0 to a stage of the same rank)."""

    fwd_s: tuple[float, ...]
    bwd_input_s: tuple[float, ...]
    bwd_weight_s: tuple[float, ...]
    bwd_s: tuple[float, ...]  # in one: less than both together
    act_s: tuple[float, ...]  # to the next stage
    grad_s: tuple[float, ...]  # to the one before
    tied: tuple[Use, ...] = ()  # where an owner's weight gradient of a micro-batch needs its user's

    def in_turn(self, turns: Sequence[int]) -> Work:
        """Of ranks that do each action for several copies of the pipeline in turn: for so many, by stage."""

        def of_all(seconds: Sequence[float]) -> tuple[float, ...]:
            return tuple(n * each for n, each in zip(turns, seconds, strict=True))

        return replace(
            self, fwd_s=of_all(self.fwd_s), bwd_input_s=of_all(self.bwd_input_s),
            bwd_weight_s=of_all(self.bwd_weight_s), bwd_s=of_all(self.bwd_s),
        )  # fmt: skip


def units(n_stages: int) -> Work:
    """The papers' costs: F, I and W take one unit each, messages nothing."""
    ones, zeros = (1.0,) * n_stages, (0.0,) * n_stages
    return Work(ones, ones, ones, (2.0,) * n_stages, zeros, zeros)


def filled(
    rank_of_stage: Sequence[int],
    n_micro: int,
    skeleton: Skeleton,
    room: Sequence[int],
    work: Work,
) -> Schedule:
    """The order with its W. room: by rank, stashes of its stages at once. Raises PlanError where there is no
    room for the order of F and I."""
    ranks = [_Rank(list(actions), room[rank]) for rank, actions in enumerate(skeleton)]
    clock = _Clock(work, len(rank_of_stage))
    turns = [(0.0, rank) for rank in range(len(ranks))]
    waiting: dict[Action, int] = {}  # what a rank without other work needs -> that rank
    while turns:
        now_s, rank = heapq.heappop(turns)
        done, next_s = clock.turn(ranks[rank], now_s)
        if next_s < math.inf:
            heapq.heappush(turns, (next_s, rank))
        elif not ranks[rank].ended:
            waiting[clock.need(ranks[rank].next)] = rank
        if done is not None and done in waiting:
            other = waiting.pop(done)
            heapq.heappush(turns, (clock.ready_s(ranks[other].next), other))
    short = next((rank for rank, each in enumerate(ranks) if not each.ended), None)
    if short is not None:
        raise PlanError(
            f"rank {short} has room for {room[short]} stashes, which is too little for its order of forwards "
            "and backwards; give it more memory, or choose a schedule that keeps less"
        )
    return by_rank(rank_of_stage, n_micro, (each.order for each in ranks))


def seconds(schedule: Schedule, work: Work) -> float:
    """Until the last action of an order has ended; endless where its actions wait in a circle."""
    clock = _Clock(work, schedule.n_stages)
    rows = [iter(list(schedule.actions(rank))) for rank in range(len(schedule.codes))]
    ready = [(0.0, rank, next(row, None)) for rank, row in enumerate(rows)]
    waiting: dict[Action, list[tuple[float, int, Action]]] = {}  # by need: clock, rank and its next action
    while ready:
        now_s, rank, action = ready.pop()
        while action is not None:
            start_s = clock.ready_s(action)
            if start_s == math.inf:
                waiting.setdefault(clock.need(action), []).append((now_s, rank, action))
                break
            now_s = clock.passes(action, max(now_s, start_s))
            for done in _parts(action):
                ready += waiting.pop(done, [])
            action = next(rows[rank], None)
    return math.inf if waiting else clock.end_s


def _parts(action: Action) -> list[Action]:
    """What has ended with it: both halves of a backward in one."""
    return [action._replace(kind=kind) for kind in ((Op.I, Op.W) if action.kind == Op.B else (action.kind,))]


class _Rank:
    def __init__(self, skeleton: list[Action], room: int) -> None:
        self.skeleton, self.room, self.place = skeleton, room, 0
        self.order: list[Action] = []
        self.owed: deque[Action] = deque()  # W
        self.held = 0

    @property
    def ended(self) -> bool:
        return self.place == len(self.skeleton) and not self.owed

    @property
    def next(self) -> Action:
        return self.skeleton[self.place]

    @property
    def full(self) -> bool:
        return self.next.kind == Op.F and self.held >= self.room

    def do(self, action: Action) -> None:
        self.order.append(action)
        if action.kind == Op.W:
            self.owed.popleft()
            self.held -= 1
            return
        self.place += 1
        if action.kind == Op.F:
            self.held += 1
        else:
            self.owed.append(Action(Op.W, action.stage, action.micro))


class _Clock:
    """When what is done, of those that have had their turn."""

    def __init__(self, work: Work, n_stages: int) -> None:
        self.end_s = 0.0
        self._work, self._last = work, n_stages - 1
        self._ends_s: dict[Action, float] = {}
        self._seconds = {
            Op.F: work.fwd_s, Op.I: work.bwd_input_s, Op.W: work.bwd_weight_s, Op.B: work.bwd_s,
        }  # fmt: skip

    def need(self, action: Action) -> Action:
        """What it still waits for; itself where there is nothing."""
        return next((need for need, _ in self._needs(action) if need not in self._ends_s), action)

    def ready_s(self, action: Action) -> float:
        """When it can begin; endless where that is not known yet."""
        return max(
            (self._ends_s.get(need, math.inf) + sent_s for need, sent_s in self._needs(action)), default=0.0
        )

    def _needs(self, action: Action) -> Iterator[tuple[Action, float]]:
        """And how long the message with it takes."""
        kind, stage, micro = action
        if kind == Op.F and stage:
            yield Action(Op.F, stage - 1, micro), self._work.act_s[stage - 1]
        if kind in (Op.I, Op.B) and stage < self._last:
            yield Action(Op.I, stage + 1, micro), self._work.grad_s[stage + 1]
        elif kind in (Op.I, Op.B):
            yield Action(Op.F, stage, micro), 0.0
        if kind in (Op.W, Op.B):
            yield from (
                (Action(Op.W, user, micro), sent_s)
                for user, owner, sent_s in self._work.tied
                if owner == stage
            )

    def turn(self, rank: _Rank, now_s: float) -> tuple[Action | None, float]:
        """What the rank does now, and when its next turn is; endless: when what it needs is done, if ever."""
        if rank.place == len(rank.skeleton):
            return self._do(rank, rank.owed[0], now_s) if rank.owed else (None, math.inf)
        ready_s = self.ready_s(rank.next)
        if ready_s <= now_s and not rank.full:
            return self._do(rank, rank.next, now_s)
        if rank.owed:
            weight = rank.owed[0]
            if rank.full or ready_s - now_s >= self._seconds[Op.W][weight.stage]:
                return self._do(rank, weight, now_s)
        return None, math.inf if rank.full else ready_s

    def _do(self, rank: _Rank, action: Action, now_s: float) -> tuple[Action, float]:
        rank.do(action)
        return action, self.passes(action, now_s)

    def passes(self, action: Action, now_s: float) -> float:
        """Its end, when it begins now."""
        end_s = now_s + self._seconds[action.kind][action.stage]
        self._ends_s |= dict.fromkeys(_parts(action), end_s)
        self.end_s = max(self.end_s, end_s)
        return end_s
