"""In which order each stage works: functions (n_stages, n_micro) -> Schedule.

Order only: no messages (`lower` writes them in) and no times (`simulate` finds them). Stage s is
on rank s, unless `on_ranks` moves it. Backward runs in ascending micro-batch order on every stage, in
every schedule: that is the order in which gradients are added, and so it decides the bits.

4 stages, 6 micro-batches, "1f1b":

    rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
    rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    rank 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
    rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.values import Action, Int32, Op, Program, Schedule


def gpipe(n_stages: int, n_micro: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019); every stash lives at once."""
    kinds = np.repeat([Op.F, Op.B], n_micro)
    micros = np.tile(np.arange(n_micro), 2)
    return _schedule(n_micro, [_codes(kinds, stage, micros) for stage in range(n_stages)])


def one_f_one_b(n_stages: int, n_micro: int) -> Schedule:
    """One forward, one backward (Narayanan et al. 2019): as short as GPipe, and stage s keeps at
    most min(n_stages - s, n_micro) stashes."""
    return _schedule(n_micro, [_one_f_one_b_stage(s, n_stages, n_micro) for s in range(n_stages)])


def _one_f_one_b_stage(stage: int, n_stages: int, n_micro: int) -> Int32:
    """Warm-up forwards, then F B pairs, then the backwards that are left."""
    ahead = min(n_stages - 1 - stage, n_micro)
    every = np.arange(n_micro)
    key_f = np.where(every < ahead, every, 2 * every - ahead)  # position in the order
    key_b = np.where(every < n_micro - ahead, 2 * every + ahead + 1, n_micro + every)
    kinds = np.empty(2 * n_micro, np.int32)
    micros = np.empty(2 * n_micro, np.int32)
    kinds[key_f], micros[key_f] = Op.F, every
    kinds[key_b], micros[key_b] = Op.B, every
    return _codes(kinds, stage, micros)


def forward_only(n_stages: int, n_micro: int) -> Schedule:
    """Evaluation: no backward, nothing is stashed."""
    micros = np.arange(n_micro)
    kinds = np.full(n_micro, Op.F)
    return _schedule(n_micro, [_codes(kinds, stage, micros) for stage in range(n_stages)])


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
_BUILT_IN = frozenset(SCHEDULES)
_ACTION = re.compile(r"([FB])(\d+)")


def register(name: str, order: Callable[[int, int], Sequence[str]]) -> None:
    """Makes a schedule of one's own known to the planner, on every rank.

    order(n_stages, n_micro) -> one line per stage, such as "F0 F1 B0 B1": F and B of each micro-batch once,
    B in ascending order. What cannot run is refused when a plan is made (PlanError, DeadlockError).
    """

    def build(n_stages: int, n_micro: int) -> Schedule:
        lines = list(order(n_stages, n_micro))
        if len(lines) != n_stages:
            raise PlanError(
                f"schedule {name!r} gives {len(lines)} lines for {n_stages} stages; one line each"
            )
        schedule = _schedule(n_micro, [_parse(name, stage, line) for stage, line in enumerate(lines)])
        check(schedule)
        return schedule

    if name in _BUILT_IN:
        raise PlanError(f"schedule {name!r} is built in; give yours another name")
    SCHEDULES[name] = build


def _parse(name: str, stage: int, line: str) -> Int32:
    found = [_ACTION.fullmatch(word) for word in line.split()]
    for word, match in zip(line.split(), found, strict=True):
        if match is None:
            raise PlanError(
                f"schedule {name!r}, stage {stage}: {word!r} is no action; write F or B and the number of "
                "the micro-batch, such as F0"
            )
    kinds = np.array([Op[match[1]] for match in found if match])
    return _codes(kinds, stage, np.array([int(match[2]) for match in found if match]))


def _codes(kinds: np.ndarray, stage: int, micros: np.ndarray) -> Int32:
    return np.stack([kinds, np.full_like(kinds, stage), micros], axis=1).astype(np.int32)


def _schedule(n_micro: int, codes: list[Int32]) -> Schedule:
    return Schedule(tuple(range(len(codes))), n_micro, tuple(codes))


def stages_of_ranks(order: Schedule | Program) -> list[list[int]]:
    """The stages of each rank, ascending."""
    stages: list[list[int]] = [[] for _ in order.codes]
    for stage, rank in enumerate(order.rank_of_stage):
        stages[rank].append(stage)
    return stages


def on_ranks(schedule: Schedule, ranks: Sequence[int]) -> Schedule:
    """The same order, with the work of rank s on rank `ranks[s]`."""
    if tuple(ranks) == schedule.rank_of_stage:
        return schedule
    held = dict(zip(ranks, schedule.codes, strict=True))
    rank_of_stage = tuple(ranks[rank] for rank in schedule.rank_of_stage)
    return Schedule(rank_of_stage, schedule.n_micro, tuple(held[rank] for rank in range(len(held))))


def live_micro_batches(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the largest number of micro-batches between their F and the end of their
    backward; 1 for a stage without backward, which keeps only what it works on."""
    live = [0] * schedule.n_stages
    for codes, stages in zip(schedule.codes, stages_of_ranks(schedule), strict=True):
        for stage in stages:
            kinds = codes[codes[:, 1] == stage, 0]
            ends = (kinds == Op.B) | (kinds == Op.W)
            count = np.cumsum((kinds == Op.F).astype(np.int32) - ends, dtype=np.int32)
            live[stage] = int(count.max()) if ends.any() else 1
    return tuple(live)


def check(schedule: Schedule) -> None:
    """Raises PlanError, naming the action, unless

    1. every (stage, micro-batch) has one F, and either no backward anywhere or one B or one I and
       one W everywhere;
    2. every stage is on its rank;
    3. backward ascends in micro-batches on every stage;
    4. on each rank, no action comes before one that it needs on the same rank.
    """
    if _is_sound(schedule):
        return
    place: dict[Action, int] = {}  # which action it is, and why
    for rank in range(len(schedule.codes)):
        for index, action in enumerate(schedule.actions(rank)):
            _check_place(schedule, rank, action, place)
            place[action] = index
    _check_complete(schedule, place)
    _check_ascending(schedule)
    for action, index in place.items():
        _check_needs(schedule, action, index, place)


def _is_sound(schedule: Schedule) -> bool:
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
    if (place[1:] < 0).all():
        return ordered
    whole, split = (b >= 0) & (i < 0) & (w < 0), (b < 0) & (i >= 0) & (w > i)
    back = np.maximum(b, i)
    ordered &= not (same & (back[:-1] < back[1:])).any()
    ascending = all((np.diff(last, axis=1) > 0).all() for last in (back, np.maximum(b, w)))
    return bool(ordered and ascending and (whole | split).all() and (back > f).all())


def _check_place(schedule: Schedule, rank: int, action: Action, seen: dict[Action, int]) -> None:
    if not (0 <= action.stage < schedule.n_stages and 0 <= action.micro < schedule.n_micro):
        raise PlanError(
            f"action {action} on rank {rank} is outside the {schedule.n_stages} stages and "
            f"{schedule.n_micro} micro-batches; mend the schedule function"
        )
    if action.kind not in (Op.F, Op.B, Op.I, Op.W):
        raise PlanError(
            f"action {action} on rank {rank} is a {action.kind.name}; only F, B, I, W may be here"
        )
    if schedule.rank_of_stage[action.stage] != rank:
        raise PlanError(
            f"action {action} is on rank {rank}, its stage on rank {schedule.rank_of_stage[action.stage]}"
        )
    if action in seen:
        raise PlanError(f"action {action} on rank {rank} comes twice; it must come once")


def _check_complete(schedule: Schedule, place: dict[Action, int]) -> None:
    trained = any(action.kind != Op.F for action in place)
    for stage in range(schedule.n_stages):
        for micro in range(schedule.n_micro):
            kinds = {k for k in (Op.F, Op.B, Op.I, Op.W) if Action(k, stage, micro) in place}
            allowed: Sequence[set[Op]] = [{Op.F, Op.B}, {Op.F, Op.I, Op.W}] if trained else [{Op.F}]
            if kinds not in allowed:
                have = " ".join(sorted(k.name for k in kinds)) or "nothing"
                raise PlanError(
                    f"stage {stage}, micro-batch {micro} has {have}; it needs "
                    + ("F and B, or F, I and W" if trained else "F")
                )


def _check_ascending(schedule: Schedule) -> None:
    for codes in schedule.codes:
        for kinds in ((Op.B, Op.I), (Op.B, Op.W)):
            rows = codes[np.isin(codes[:, 0], kinds)]
            for stage in np.unique(rows[:, 1]).tolist():
                micros = rows[rows[:, 1] == stage, 2]
                wrong = np.flatnonzero(np.diff(micros) < 0)
                if len(wrong):
                    raise PlanError(
                        f"stage {stage}: the backward of micro-batch {micros[wrong[0] + 1]} comes after "
                        f"that of {micros[wrong[0]]}; it must ascend, the order of addition decides the bits"
                    )


def _check_needs(schedule: Schedule, action: Action, index: int, place: dict[Action, int]) -> None:
    kind, stage, micro = action
    if kind == Op.F:
        needs = [Action(Op.F, stage - 1, micro)]
    elif kind == Op.W:
        needs = [Action(Op.I, stage, micro)]
    else:
        needs = [Action(Op.F, stage, micro)]
        needs += [Action(k, stage + 1, micro) for k in (Op.B, Op.I)]
    for need in needs:
        same_rank = need in place and schedule.rank_of_stage[need.stage] == schedule.rank_of_stage[stage]
        if same_rank and place[need] > index:
            raise PlanError(f"action {action} comes before {need}, whose result it needs, on the same rank")
