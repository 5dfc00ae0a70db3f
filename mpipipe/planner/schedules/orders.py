"""What the schedules are built with, and what can be asked of any of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.values import Action, Int32, Int64, Op, Program, Schedule

_IN_TWO = np.isin(range(len(Op)), (Op.I, Op.W))  # by op
Build = Callable[..., Schedule]  # (n_stages, n_micro), and n_ranks where there are fewer than stages


def by_rank(rank_of_stage: Sequence[int], n_micro: int, actions: Iterable[Iterable[Action]]) -> Schedule:
    """From the actions of each rank, rank 0 first."""
    codes = tuple(np.array([*each], np.int32).reshape(-1, 3) for each in actions)
    return Schedule(tuple(rank_of_stage), n_micro, codes)


def coded(kinds: np.ndarray, stage: int, micros: np.ndarray) -> Int32:
    """The actions of one stage, (n, 3)."""
    return np.stack([kinds, np.full_like(kinds, stage), micros], axis=1).astype(np.int32)


def one_each(name: str, n_stages: int, n_ranks: int | None) -> None:
    """Raises PlanError where a schedule of one stage per rank is asked for another number."""
    if n_ranks not in (None, n_stages):
        raise PlanError(
            f"schedule {name!r} has one stage per rank, not {n_stages} stages on {n_ranks} ranks; choose "
            "interleaved, zb-v, v-half, v-planned or interleaved-planned"
        )


def two_each(name: str, n_stages: int, n_ranks: int | None) -> int:
    """The ranks of a schedule of two stages on each; raises PlanError where another number is asked for."""
    if n_stages % 2 or n_ranks not in (None, n_stages // 2):
        where = "" if n_ranks is None else f" on {n_ranks} ranks"
        raise PlanError(
            f"schedule {name!r} has two stages per rank, not {n_stages} stages{where}; use "
            f"{2 * (n_ranks or (n_stages + 1) // 2)} stages"
        )
    return n_stages // 2


# -- placements --------------------------------------------------------------------------------


def wrapped(n_stages: int, n_ranks: int) -> tuple[int, ...]:
    """Stage s on rank s modulo the number of ranks (Narayanan et al. 2021)."""
    return tuple(stage % n_ranks for stage in range(n_stages))


def v_shaped(n_ranks: int) -> tuple[int, ...]:
    """Two stages per rank: down the ranks and up again, so that rank 0 has the first and the last one."""
    return (*range(n_ranks), *reversed(range(n_ranks)))


def stages_of_ranks(order: Schedule | Program) -> list[list[int]]:
    """The stages of each rank, ascending."""
    stages: list[list[int]] = [[] for _ in order.codes]
    for stage in range(order.n_stages):
        for rank in order.holders(stage):
            stages[rank].append(stage)
    return stages


def is_plain(order: Schedule | Program) -> bool:
    """One stage per rank, and no backward in two."""
    one = len(order.codes) == order.n_stages * len(order.copies)
    return one and not is_in_two(order)


def is_even(order: Schedule | Program) -> bool:
    """Each stage has as many copies."""
    return all(len(order.copies_on(rank)) == 1 for rank in range(len(order.codes)))


def is_in_two(order: Schedule | Program) -> bool:
    """It has backwards in two."""
    return any(_IN_TWO[codes[:, 0]].any() for codes in order.codes)


def in_copies(parts: Sequence[Schedule], copies: Sequence[Sequence[int]]) -> Schedule:
    """The order of several copies of a pipeline from that of each, with stage s of copy c on rank
    `copies[c][s]`; micro-batches are numbered on from copy to copy. What several copies have on one rank they
    do in turn there, those first whose ranks come to them first; on all ranks alike, so that none waits for
    another in a circle. Raises PlanError where stages of one rank would be on two, or the other way round."""
    held: dict[int, dict[int, Int32]] = {}  # by rank and copy
    done = 0
    for copy, (part, ranks) in enumerate(zip(parts, copies, strict=True)):
        to = dict(zip(part.rank_of_stage, ranks, strict=True))
        if [to[rank] for rank in part.rank_of_stage] != list(ranks) or len({*to.values()}) < len(to):
            raise PlanError(
                f"stages are on ranks {list(ranks)}, the schedule has them on {list(part.rank_of_stage)}; "
                "ranks may be numbered otherwise, but the same stages must be together"
            )
        for rank, codes in enumerate(part.codes):
            held.setdefault(to[rank], {})[copy] = codes + np.array((0, 0, done), np.int32)
        done += part.n_micro
    stages = {(rank, stage) for ranks in copies for stage, rank in enumerate(ranks)}
    together = Counter(rank for rank, _ in stages)  # in one copy at least
    if sorted(held) != list(range(len(held))) or any(
        ranks.count(rank) != together[rank] for ranks in copies for rank in ranks
    ):
        raise PlanError(
            f"the stages of {len(copies)} copies are on ranks {[list(ranks) for ranks in copies]}; a rank "
            "may be in several with the same stages, and each of the ranks 0, 1, ... is in one"
        )
    late = [0] * len(copies)  # how much its ranks have to do before it
    for mine in held.values():
        for i, copy in enumerate(mine):
            late[copy] += i * len(copies) // len(mine)
    turns = (sorted(held[rank], key=late.__getitem__) for rank in range(len(held)))
    in_turn = tuple(_in_turn([held[rank][copy] for copy in order]) for rank, order in enumerate(turns))
    first, *others = (tuple(ranks) for ranks in copies)
    return Schedule(first, done, in_turn, tuple(others))


def _in_turn(parts: Sequence[Int32]) -> Int32:
    """The first of each, then the second of each, and so on."""
    if len(parts) == 1:
        return parts[0]
    turns = np.concatenate([np.arange(len(part)) for part in parts])
    return np.concatenate(parts)[np.argsort(turns, kind="stable")]


# -- what is kept ------------------------------------------------------------------------------


def live_micro_batches(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the largest number of micro-batches between their F and the end of their
    backward; 1 for a stage without backward, which keeps only what it works on."""
    return tuple(kept_micro_batches(schedule).sum(axis=2).max(axis=1).tolist())


def kept_micro_batches(schedule: Schedule) -> Int64:
    """By stage, micro-batches whose whole stash is there, from F through B or I, and those that wait for W at
    the same time: all such pairs that no other one exceeds, (stages, pairs, 2), the last one repeated."""
    pairs = [np.zeros((1, 2), np.int64)] * schedule.n_stages
    for codes, stages in zip(schedule.codes, stages_of_ranks(schedule), strict=True):
        for stage in stages:
            own = codes[codes[:, 1] == stage]
            whole = stashes(own, 1, 0)
            if not _IN_TWO[own[:, 0]].any():
                pairs[stage] = np.array([[whole.max(initial=0), 0]])
                continue
            late = stashes(own, 0, 1)
            most_late = np.full(whole.max(initial=0) + 1, -1)
            np.maximum.at(most_late, whole, late)
            with_more = np.maximum.accumulate(np.append(most_late[1:], -1)[::-1])[::-1]
            best = np.flatnonzero(most_late > with_more)
            pairs[stage] = np.stack([best, most_late[best]], axis=1)
    most = max(map(len, pairs))
    return np.stack([np.pad(of, ((0, most - len(of)), (0, 0)), "edge") for of in pairs])


def live_stages(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the largest number of stashes of its stages that live at once: as `live_micro_batches`, but
    of all stages together, which need not be at their most at the same time."""
    return tuple(int(stashes(codes, 1).max(initial=0)) for codes in schedule.codes)


def stashes(codes: np.ndarray, size: np.ndarray | int, waiting: np.ndarray | int | None = None) -> np.ndarray:
    """During each action of one rank the sum of what its live micro-batches keep: from F through B, or I, of
    `size` each, and `waiting` from then through W; None = the same. Without a backward it is only that of the
    micro-batch at work."""
    ops = codes[:, 0]
    added, backward = np.where(ops == Op.F, size, 0), (ops == Op.B) | (ops == Op.I)
    if not backward.any():
        return added
    late = size if waiting is None else waiting
    left, gone = np.where(ops == Op.I, late, 0), np.where(backward, size, np.where(ops == Op.W, late, 0))
    during: np.ndarray = np.cumsum(added + left - gone) - left + gone
    return during
