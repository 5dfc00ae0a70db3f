"""Where no cut fits: which stage lacks memory, how much, and what would do."""

from __future__ import annotations

import numpy as np

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.problem import Problem, most_whole
from mpipipe.planner.schedules import SCHEDULES, kept_micro_batches
from mpipipe.planner.sizes import size_text
from mpipipe.values import Int64

MORE_MEMORY = "give more memory (a larger pipeline.memory_bytes, where it is set)"
SMALLER = "smaller micro-batches (a larger pipeline.micro_batches)"


def no_cut_text(problem: Problem, schedule: str, n_micro: int, finest: bool) -> str:
    """Which stage cannot begin or finish, what it lacks at the least, and what would do."""
    stage, first, end, short = problem.compiled().misfit() if problem.compilable else misfit(problem)
    names, device, least = problem.costs.groups, problem.costs.cluster.devices[stage], problem.nearest()[0]
    base = size_text(device.base_bytes)
    taken = f", of which {base} are taken before any weight" if device.base_bytes else ""
    what = f"group {first} {names[first].name!r}" + (
        f" to group {end - 1} {names[end - 1].name!r}" if end - first > 1 else ""
    )
    return (
        f"stage {stage} of {len(problem.live)} (rank {stage}, {size_text(device.memory_bytes)}{taken}) "
        f"cannot hold {what}: {size_text(short)} short{_though(problem)} with schedule {schedule!r} and "
        f"{n_micro} micro-batches, and every cut lacks {size_text(least)} or more on some rank; "
        f"{_next_move(problem, schedule, n_micro, finest)}"
    )


def _though(problem: Problem) -> str:
    return " even with full recomputation" if "full" in problem.modes else ""


def _next_move(problem: Problem, schedule: str, n_micro: int, finest: bool) -> str:
    if problem.memory.min() < 0:  # before any weight
        return f"no number of ranks would do: {MORE_MEMORY}"
    first = "" if "full" in problem.modes else "set pipeline.recompute=auto; without it "
    try:
        enough, surely = _enough_stages(problem, schedule, n_micro)
    except (PlanError, DeadlockError):  # a schedule of the user's, which is not for so many stages
        return f"{first}use more ranks{'' if finest else f' or {SMALLER}'}, or {MORE_MEMORY}"
    if enough is None:
        none = "no number of ranks would do" if surely else "more ranks may not do"
        return f"{first}{none}: {MORE_MEMORY}{'' if finest else f', or use {SMALLER}'}"
    least = size_text(int(problem.memory.min()))
    what = "that is the least that would do" if surely else "so many would do, and fewer may"
    return (
        f"{first}start {enough * problem.costs.copies} ranks: {what}{_though(problem)}, with the {least} "
        "each that the smallest rank has for a stage"
    )


def misfit(problem: Problem) -> tuple[int, int, int, int]:
    """The first stage that no cut lets begin and end, and its (first, end) that lacks least bytes."""
    n_groups, n_stages = len(problem.costs.groups), len(problem.live)
    usable = np.isfinite(problem.sweep())  # (n_stages + 1, n_groups + 1)
    for count in range(n_stages + 1):  # ends, with a group left for each later stage
        usable[count, n_groups - (n_stages - count) + 1 :] = False
    usable[n_stages, :n_groups] = False
    stage = next(s for s in range(n_stages) if not usable[s + 1].any())
    later = n_stages - 1 - stage
    lacks = []
    for end in [n_groups] if not later else range(stage + 1, n_groups - later + 1):
        ending = problem.ranges.ending_at(end, mode=problem.modes[-1])
        memory = ending.memory_bytes(problem.kept[stage])
        firsts = np.flatnonzero(usable[stage, :end])
        lacks += [(int(memory[f] - problem.memory[stage]), int(f), end) for f in firsts]
    short, first, end = min(lacks)
    return stage, first, end, short


def _enough_stages(problem: Problem, schedule: str, n_micro: int) -> tuple[int | None, bool]:
    """Smallest number of stages that fits when every rank has the smallest rank's memory; and whether surely
    none that is smaller does.

    Stages are counted from the end, where in most schedules the stashes do not depend on how many come
    before, so that one sweep answers for all counts. In others, such as zb-h1, fewer stages keep less, and
    fewer than are found may do. Raises PlanError where the schedule refuses as many stages as groups.
    """
    n_groups, count = len(problem.costs.groups), len(problem.live)
    memory, surely, before = int(problem.memory.min()), True, problem.kept[::-1]
    while True:
        count = min(2 * count, n_groups)
        order = SCHEDULES[schedule](count, n_micro)
        kept = kept_micro_batches(order)[::-1]
        surely, before = surely and _alike(before, kept), kept
        if problem.compilable:
            found = problem.compiled().least_stages(most_whole(kept), memory)
        else:
            found = least_stages(problem, kept, memory)
        if found is not None or count == n_groups:
            return found, surely


def _alike(fewer: Int64, more: Int64) -> bool:
    """Whether the last stages keep the same in both, as of `kept_micro_batches`, from the last stage on."""
    pairs = zip(fewer.tolist(), more.tolist(), strict=False)
    return all({*map(tuple, a)} == {*map(tuple, b)} for a, b in pairs)


def least_stages(problem: Problem, kept: Int64, memory: int) -> int | None:
    """At most as many as `kept` has; kept[k]: of a stage with k stages after it; memory: of every rank."""
    n_groups, mode = len(problem.costs.groups), problem.modes[-1]
    endings = [problem.ranges.ending_at(end, mode=mode) for end in range(1, n_groups + 1)]
    covered = np.zeros(n_groups + 1, bool)  # [first]: groups first.. fit into `count` stages
    covered[n_groups] = True
    for count in range(1, len(kept) + 1):
        longer = np.zeros(n_groups + 1, bool)
        for end in np.flatnonzero(covered[1:]) + 1:
            longer[:end] |= endings[end - 1].memory_bytes(kept[count - 1]) <= memory
        if longer[0]:
            return count
        covered = longer
    return None
