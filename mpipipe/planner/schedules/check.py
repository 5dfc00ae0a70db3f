"""Is a schedule whole, in order, and without a circle of waits?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.schedules.grid import grid
from mpipipe.values import Action, Op, Schedule


class _Fault(NamedTuple):
    rank: int
    place: int  # in the order of that rank
    text: str
    lacking: Action | None = None


def check(schedule: Schedule, train: bool = True) -> None:
    """Raises PlanError, naming the action and showing its place, unless

    1. every (stage, micro-batch) has one F, and one B or one I and one W, or no backward where none trains;
    2. every stage is on its rank;
    3. backward ascends in micro-batches on every stage;
    4. on each rank, no action comes before one that it needs on the same rank.
    """
    if _is_sound(schedule, train):
        return
    for fault in _faults(schedule, train):
        raise PlanError(f"{fault.text}\n{grid(schedule.codes, {fault.rank: fault.place}, fault.lacking)}")


def _faults(schedule: Schedule, train: bool) -> Iterator[_Fault]:
    place: dict[Action, int] = {}  # which action of its rank it is
    for rank in range(len(schedule.codes)):
        for index, (kind, stage, micro) in enumerate(schedule.codes[rank].tolist()):
            text = _out_of_place(schedule, rank, kind, stage, micro)
            if not text and (action := Action(Op(kind), stage, micro)) in place:
                text = f"action {action} on rank {rank} comes twice; it must come once"
            if text:
                yield _Fault(rank, index, text)
                return  # what follows counts on places that are right
            place[Action(Op(kind), stage, micro)] = index
    yield from _lacking(schedule, place, train)
    yield from _descending(schedule, place)
    for action, index in place.items():
        yield from _too_early(schedule, action, index, place)


def _is_sound(schedule: Schedule, train: bool) -> bool:
    """Whether `check` finds nothing, in whole arrays."""
    n_stages, n_micro = schedule.n_stages, schedule.n_micro
    place = np.full((4, n_stages, n_micro), -1, np.int32)  # of each F, B, I and W on its rank
    home = np.array(schedule.rank_of_stage)
    for rank, codes in enumerate(schedule.codes):
        inside = (codes >= 0) & (codes < (4, n_stages, n_micro))
        if not inside.all() or (home[codes[:, 1]] != rank).any():
            return False
        kind, stage, micro = codes.T
        place[kind, stage, micro] = index = np.arange(len(codes))
        if (place[kind, stage, micro] != index).any():  # one of them comes twice
            return False
    f, b, i, w = place
    if (f < 0).any():
        return False
    same = (home[1:] == home[:-1])[:, None]  # stages of one rank
    ordered = not (same & (f[1:] < f[:-1])).any()
    if not train:
        return bool(ordered and (place[1:] < 0).all())
    whole, split = (b >= 0) & (i < 0) & (w < 0), (b < 0) & (i >= 0) & (w > i)
    back = np.maximum(b, i)
    ordered &= not (same & (back[:-1] < back[1:])).any()
    ascending = all((np.diff(last, axis=1) > 0).all() for last in (back, np.maximum(b, w)))
    return bool(ordered and ascending and (whole | split).all() and (back > f).all())


def _out_of_place(schedule: Schedule, rank: int, kind: int, stage: int, micro: int) -> str:
    name = Op(kind).name if kind in range(len(Op)) else f"kind {kind}"
    action = f"{stage}{name}{micro}"
    if not (0 <= stage < schedule.n_stages and 0 <= micro < schedule.n_micro):
        return (
            f"action {action} on rank {rank} is outside the {schedule.n_stages} stages and "
            f"{schedule.n_micro} micro-batches; mend the schedule function"
        )
    if kind not in (Op.F, Op.B, Op.I, Op.W):
        return f"action {action} on rank {rank} is a {name}; only F, B, I, W may be here"
    home = schedule.rank_of_stage[stage]
    return f"action {action} is on rank {rank}, its stage on rank {home}" if home != rank else ""


def _lacking(schedule: Schedule, place: dict[Action, int], train: bool) -> Iterator[_Fault]:
    for stage in range(schedule.n_stages):
        for micro in range(schedule.n_micro):
            kinds = {k for k in (Op.F, Op.B, Op.I, Op.W) if Action(k, stage, micro) in place}
            allowed: Sequence[set[Op]] = [{Op.F, Op.B}, {Op.F, Op.I, Op.W}] if train else [{Op.F}]
            if kinds not in allowed:
                have = " ".join(k.name for k in sorted(kinds)) or "nothing"
                text = f"stage {stage}, micro-batch {micro} has {have}; it needs " + (
                    "F and B, or F, I and W" if train else "F"
                )
                in_two = kinds & {Op.I, Op.W} or (Op.B not in kinds and _mostly_in_two(place, stage))
                wished = allowed[-1] if in_two else allowed[0]
                rank = schedule.rank_of_stage[stage]
                if wished - kinds:
                    lacking = Action(min(wished - kinds), stage, micro)
                    yield _Fault(rank, len(schedule.codes[rank]), text, lacking)
                else:
                    yield _Fault(rank, place[Action(max(kinds - wished), stage, micro)], text)


def _mostly_in_two(place: dict[Action, int], stage: int) -> bool:
    """Whether most backwards of a stage are in two; where it has as many of both, most of all."""
    more = Counter[int]()
    for action in place:
        more[action.stage] += (action.kind == Op.I) - (action.kind == Op.B)
    return (more[stage] or more.total()) > 0


def _descending(schedule: Schedule, place: dict[Action, int]) -> Iterator[_Fault]:
    for rank, codes in enumerate(schedule.codes):
        for kinds in ((Op.B, Op.I), (Op.B, Op.W)):
            rows = np.flatnonzero(np.isin(codes[:, 0], kinds))
            for stage in np.unique(codes[rows, 1]).tolist():
                own = rows[codes[rows, 1] == stage]
                micros = codes[own, 2]
                for wrong in np.flatnonzero(np.diff(micros) < 0).tolist():
                    text = (
                        f"stage {stage}: the backward of micro-batch {micros[wrong + 1]} comes after "
                        f"that of {micros[wrong]}; it must ascend, the order of addition decides the bits"
                    )
                    yield _Fault(rank, int(own[wrong + 1]), text)


def _too_early(schedule: Schedule, action: Action, index: int, place: dict[Action, int]) -> Iterator[_Fault]:
    rank = schedule.rank_of_stage[action.stage]
    for need in needs(action):
        same_rank = need in place and schedule.rank_of_stage[need.stage] == rank
        if same_rank and place[need] > index:
            text = f"action {action} comes before {need}, whose result it needs, on the same rank"
            yield _Fault(rank, index, text)


def needs(action: Action) -> list[Action]:
    """What it waits for, of which those count that there are."""
    kind, stage, micro = action
    if kind == Op.F:
        return [Action(Op.F, stage - 1, micro)]
    if kind == Op.W:
        return [Action(Op.I, stage, micro)]
    return [Action(Op.F, stage, micro), *(Action(k, stage + 1, micro) for k in (Op.B, Op.I))]


def check_ends(schedule: Schedule) -> None:
    """Raises DeadlockError, showing where each rank stands, if a schedule that `check` lets pass waits in a
    circle, with endless buffers. (`prove` says it of a program, and without buffers.)"""
    rows = [list(schedule.actions(rank)) for rank in range(len(schedule.codes))]
    at, done = [0] * len(rows), set[Action]()
    waiting: dict[Action, int] = {}
    there = {action for row in rows for action in row}
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        while at[rank] < len(rows[rank]):
            action = rows[rank][at[rank]]
            missing = next((need for need in needs(action) if need in there and need not in done), None)
            if missing is not None:
                waiting[missing] = rank
                break
            done.add(action)
            at[rank] += 1
            if action in waiting:
                ready.append(waiting.pop(action))
    stuck = {rank: index for rank, index in enumerate(at) if index < len(rows[rank])}
    if stuck:
        waits = ", ".join(
            f"rank {rank} for {need}" for need, rank in sorted(waiting.items(), key=lambda x: x[1])
        )
        raise DeadlockError(
            f"the order cannot end, each rank waits: {waits}; change the order of one of them\n"
            f"{grid(schedule.codes, stuck)}"
        )
