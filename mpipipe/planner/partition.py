"""Where to cut: an exact minimum of the slowest stage over all cuts of the linear order.

    B[s, r] = min over l < r of max(B[s-1, l], time_s(l, r)),   memory_s(l, r) <= memory of rank s

Dynamic programming as in PipeDream (Narayanan et al. 2019) and Alpa (Zheng et al. 2022), with
communication, the schedule's stage-dependent memory and unequal speeds. A second sweep picks, among
all cuts with that bottleneck, the smallest sum of squared stage times: the others are even too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.bounds import bottleneck_bound_s
from mpipipe.planner.schedules import SCHEDULES, live_micro_batches
from mpipipe.planner.sizes import size_text
from mpipipe.planner.stages import Ranges, crossing_s
from mpipipe.planner.sweep import low_for, sweep, sweep_near
from mpipipe.values import Costs, Float64


@dataclass(frozen=True)
class Partition:
    cuts: tuple[int, ...]  # index of the first group of stages 1 .. S-1
    bottleneck_s: float  # the slowest stage, one micro-batch, links included: the optimum
    lower_bound_s: float  # an independent bound: what no cut at all can undercut


def partition(
    costs: Costs,
    n_micro: int,
    schedule: str,
    n_stages: int,
    receive_window: int = 0,
    tied: str = "per_use",
) -> Partition:
    """The cuts with the smallest bottleneck. Stage s runs on rank s.

    The time of a stage is (forward + backward) / speed + the seconds of its messages on the
    links to both neighbours; its memory is `Ending.memory_bytes` with the stash that `schedule`
    keeps alive. `receive_window` and `tied` only size the receive buffers.

    Raises PlanError if there are more stages than groups or ranks, or if no cut fits into memory:
    then with the stage, the group, the bytes that are missing and the least number of ranks that would do.
    """
    _check_counts(costs, n_micro, schedule, n_stages)
    live = live_micro_batches(SCHEDULES[schedule](n_stages, n_micro))
    problem = _Problem(costs, Ranges(costs, receive_window, n_micro, tied), np.array(live))
    lower_bound_s = bottleneck_bound_s(costs, n_stages)
    fastest = np.array([group.seconds for group in costs.groups]) / max(problem.speed)
    best, cuts = sweep_near(len(costs.groups), n_stages, problem.times, fastest, lower_bound_s)
    bottleneck = best[n_stages, -1]
    if not np.isfinite(bottleneck):
        raise PlanError(_explain(problem, best, schedule, n_micro))

    def squares(before: Float64, time: Float64) -> Float64:
        sums: Float64 = before + np.where(time <= bottleneck, time, np.inf) ** 2
        return sums

    low = low_for(fastest, float(bottleneck))
    _, cuts = sweep(len(costs.groups), n_stages, problem.times, squares, low)
    return Partition(cuts, float(bottleneck), lower_bound_s)


class _Problem:
    """Times and memory of every (stage, first, end), one column at a time."""

    def __init__(self, costs: Costs, ranges: Ranges, live: np.ndarray) -> None:
        devices = costs.cluster.devices[: len(live)]
        self.costs, self.ranges, self.live = costs, ranges, live
        self.memory = np.array([device.memory_bytes - device.base_bytes for device in devices], np.int64)
        self.speed = np.array([device.speed for device in devices])
        no_link = np.zeros(len(costs.groups) + 1)
        links = [no_link, *(crossing_s(costs, s) for s in range(len(live) - 1)), no_link]
        self._in_s, self._out_s = np.array(links[:-1]), np.array(links[1:])

    def times(self, low: int, end: int) -> Float64:
        """Seconds (n_stages, end - low) of the stages [first, end); inf where one does not fit."""
        ending = self.ranges.ending_at(end, low)
        time = ending.seconds / self.speed[:, None] + self._in_s[:, low:end] + self._out_s[:, end, None]
        fits = ending.memory_bytes(self.live[:, None]) <= self.memory[:, None]
        return np.where(fits, time, np.inf)


def _check_counts(costs: Costs, n_micro: int, schedule: str, n_stages: int) -> None:
    n_groups, n_ranks = len(costs.groups), len(costs.cluster.devices)
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule {schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
    if n_stages < 1 or n_micro < 1:
        raise PlanError(f"{n_stages} stages and {n_micro} micro-batches; both must be at least 1")
    check_stages(n_stages, n_groups)
    if n_stages > n_ranks:
        raise PlanError(f"{n_stages} stages but only {n_ranks} ranks; plan at most {n_ranks} stages")


def check_stages(n_stages: int, n_groups: int) -> None:
    """Raises PlanError where a stage would have no group."""
    if n_stages > n_groups:
        raise PlanError(
            f"{n_stages} stages but only {n_groups} groups to cut between; start at most {n_groups} ranks"
        )


def _explain(problem: _Problem, best: Float64, schedule: str, n_micro: int) -> str:
    """Which stage cannot begin or finish, what it lacks at the least, and what would do."""
    stage, first, end, short = _misfit(problem, best)
    names, device = problem.costs.groups, problem.costs.cluster.devices[stage]
    base = size_text(device.base_bytes)
    taken = f", of which {base} are taken before any weight" if device.base_bytes else ""
    what = f"group {first} {names[first].name!r}" + (
        f" to group {end - 1} {names[end - 1].name!r}" if end - first > 1 else ""
    )
    return (
        f"stage {stage} of {len(problem.live)} (rank {stage}, {size_text(device.memory_bytes)}{taken}) "
        f"cannot hold {what}: {size_text(short)} short with schedule {schedule!r} and {n_micro} "
        f"micro-batches; {_next_move(problem, schedule, n_micro)}"
    )


def _next_move(problem: _Problem, schedule: str, n_micro: int) -> str:
    try:
        enough = _enough_stages(problem, schedule, n_micro)
    except PlanError:  # a schedule of the user's, which refuses so many stages
        return "use more ranks or smaller micro-batches, or give more memory"
    if enough is None:
        return "no number of ranks would do: give more memory or use smaller micro-batches"
    least = size_text(int(problem.memory.min()))
    return (
        f"start {enough} ranks: that is the least that would do, with the {least} each that the smallest "
        "rank has for a stage"
    )


def _misfit(problem: _Problem, best: Float64) -> tuple[int, int, int, int]:
    """The first stage that no cut lets begin and end, and its (first, end) that lacks least bytes."""
    n_groups, n_stages = len(problem.costs.groups), len(problem.live)
    usable = np.isfinite(best)  # (n_stages + 1, n_groups + 1): ends, with a group left for each later stage
    for count in range(n_stages + 1):
        usable[count, n_groups - (n_stages - count) + 1 :] = False
    usable[n_stages, :n_groups] = False
    stage = next(s for s in range(n_stages) if not usable[s + 1].any())
    later = n_stages - 1 - stage
    lacks = []
    for end in [n_groups] if not later else range(stage + 1, n_groups - later + 1):
        memory = problem.ranges.ending_at(end).memory_bytes(int(problem.live[stage]))
        firsts = np.flatnonzero(usable[stage, :end])
        lacks += [(int(memory[f] - problem.memory[stage]), int(f), end) for f in firsts]
    short, first, end = min(lacks)
    return stage, first, end, short


def _enough_stages(problem: _Problem, schedule: str, n_micro: int) -> int | None:
    """Smallest number of stages that fits when every rank has the smallest rank's memory.

    Stages are counted from the end, where the live stash does not depend on how many come before
    (true of the built-in schedules, and tested; for others the answer is an estimate), so that one
    sweep answers for all counts. Raises PlanError where the schedule refuses as many stages as groups.
    """
    n_groups, memory = len(problem.costs.groups), problem.memory.min()
    live = live_micro_batches(SCHEDULES[schedule](n_groups, n_micro))[::-1]
    endings = map(problem.ranges.ending_at, range(1, n_groups + 1))
    sizes = [(ending.memory_bytes(0), ending.stash_bytes) for ending in endings]
    covered = np.zeros(n_groups + 1, bool)  # [first]: groups first.. fit into `count` stages
    covered[n_groups] = True
    for count in range(1, n_groups + 1):
        longer = np.zeros(n_groups + 1, bool)
        for end in np.flatnonzero(covered[1:]) + 1:
            rest, stash = sizes[end - 1]
            longer[:end] |= rest + live[count - 1] * stash <= memory
        if longer[0]:
            return count
        covered = longer
    return None
