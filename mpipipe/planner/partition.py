"""Where to cut: an exact minimum of the slowest stage over all cuts of the linear order.

    B[s, r] = min over l < r of max(B[s-1, l], time_s(l, r)),   memory_s(l, r) <= memory of rank s

Dynamic programming as in PipeDream (Narayanan et al. 2019) and Alpa (Zheng et al. 2022), with
communication, the schedule's stage-dependent memory and unequal speeds. A second sweep picks, among
all cuts with that bottleneck, the smallest sum of squared stage times: the others are even too.

Both sweeps are in numpy here and, for many groups and stages, compiled (kernels/planner/cuts.h), with the
same cuts. Where the second one would take the compiled code more than `MOST_WORK` steps (seconds), it leaves
cuts that have the exact bottleneck and are even, but perhaps not the evenest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.bounds import bottleneck_bound_s
from mpipipe.planner.native import compiled
from mpipipe.planner.schedules import (
    SCHEDULES,
    build,
    check_name,
    kept_micro_batches,
)
from mpipipe.planner.sizes import counted, size_text
from mpipipe.planner.stages import Ranges, bounds, crossing_s
from mpipipe.planner.sweep import low_for, sweep, sweep_near
from mpipipe.values import RECOMPUTE, Costs, Float64, Int64, Recompute

MOST_WORK = 1 << 30  # (stage, first, end) that the search for least squares may look at
Cuts = tuple[int, ...]
Wish = Literal["auto", "none", "selective", "full"]  # for recomputation


@dataclass(frozen=True)
class Partition:
    cuts: Cuts  # index of the first group of stages 1 .. S-1
    bottleneck_s: float  # the slowest stage, one micro-batch, links included: the optimum
    lower_bound_s: float  # an independent bound: what no cut at all can undercut


def partition(
    costs: Costs,
    n_micro: int,
    schedule: str,
    n_stages: int,
    receive_window: int = 0,
    tied: str = "per_use",
    with_update: bool = False,
    explain: bool = True,
    finest: bool = False,
    n_ranks: int | None = None,
    recompute: Wish = "none",
) -> Partition:
    """The cuts with the smallest bottleneck. Stage s runs on rank s; of a schedule with several stages per
    rank, `costs` have a device for each stage (`mpipipe.planner.several`).

    The time of a stage is (forward + backward) / speed + the seconds of its messages on the
    links to both neighbours; its memory is `Ending.memory_bytes` with the stash that `schedule`
    keeps alive. `receive_window` and `tied` only size the receive buffers. `with_update`: the time counts
    the stage's share of the step's one update too, so that it balances m * (F + B) + STEP.

    Raises PlanError if there are more stages than groups or ranks, or if no cut fits into memory:
    then with the stage, the group, the bytes that are missing and the least number of ranks that would do;
    with explain=False without, as to find these takes longer than to find that there is no cut. finest: a
    micro-batch is one sample, so that smaller ones are no way out. n_ranks: as for `build`. recompute: what
    each stage makes again; "auto": nothing where a cut fits so, else the minimum is over the modes of each
    stage, too.
    """
    check_counts(costs, n_micro, schedule, n_stages)
    order = build(schedule, n_stages, n_micro, n_ranks)
    ranges = Ranges(costs, receive_window, n_micro, tied, with_update)
    kept = kept_micro_batches(order)
    found = None
    for modes in (("none",), RECOMPUTE) if recompute == "auto" else ((recompute,),):
        problem = Problem(costs, ranges, kept, modes)
        lower_bound_s = bottleneck_bound_s(ranges.seconds, problem.speed)
        found = problem.best(lower_bound_s)
        if found is not None:
            break
    if found is None:
        without = "" if problem.modes[-1] == "full" else " without recomputation"
        raise PlanError(_explain(problem, schedule, n_micro, finest) if explain else f"no cut fits{without}")
    bottleneck_s, cuts = found
    return Partition(cuts, bottleneck_s, lower_bound_s)


class Problem:
    """Times and memory of every (stage, first, end), one column at a time. kept: as of `kept_micro_batches`;
    modes: the last one needs least memory, as it keeps least."""

    def __init__(
        self, costs: Costs, ranges: Ranges, kept: Int64, modes: Sequence[Recompute] = ("none",)
    ) -> None:
        self.kept, self.modes = kept, tuple(modes)
        self.live = live = _most_whole(kept)
        devices = costs.cluster.devices[: len(live)]
        self.costs, self.ranges = costs, ranges
        self.memory = np.array([device.memory_bytes - device.base_bytes for device in devices], np.int64)
        self.speed = np.array([device.speed for device in devices])
        links = [costs.cluster.link(s, s + 1) for s in range(len(live) - 1)]
        distinct = {link: row for row, link in enumerate(dict.fromkeys(links), 1)}
        no_link = np.zeros(len(costs.groups) + 1)
        self._crossing_s = np.array([no_link, *(crossing_s(costs, link) for link in distinct)])
        rows = [distinct[link] for link in links]
        self._in, self._out = np.array([0, *rows]), np.array([*rows, 0])

    def times(self, low: int, end: int) -> Float64:
        """Seconds (n_stages, end - low) of the stages [first, end); inf where one does not fit."""
        in_s, out_s = self._crossing_s[:, low:end][self._in], self._crossing_s[self._out, end, None]
        least = np.full((len(self.live), end - low), np.inf)
        for mode in self.modes:
            ending = self.ranges.ending_at(end, low, mode)
            time = ending.seconds / self.speed[:, None] + in_s + out_s
            memory = ending.memory_bytes(self.kept)
            least = np.minimum(least, np.where(memory <= self.memory[:, None], time, np.inf))
        return least

    @property
    def compilable(self) -> bool:
        """The compiled code knows neither recomputation nor a backward in two."""
        return compiled is not None and self.modes == ("none",) and not self.kept[..., 1].any()

    def best(self, lower_bound_s: float) -> tuple[float, Cuts] | None:
        """The bottleneck and the cuts; None where nothing fits."""
        if compiled is None or self.modes != ("none",):
            return self.swept(lower_bound_s)
        found = self.searched(lower_bound_s)  # those that fit are among those whose whole stashes fit
        return found if self.compilable or found is None or self.fits(found[1]) else self.swept(lower_bound_s)

    def fits(self, cuts: Cuts) -> bool:
        """Without recomputation."""
        return all(
            self.ranges.ending_at(end, first).memory_bytes(kept)[0] <= memory
            for (first, end), kept, memory in zip(
                bounds(len(self.costs.groups), cuts), self.kept, self.memory, strict=True
            )
        )

    def swept(self, lower_bound_s: float) -> tuple[float, Cuts] | None:
        """The bottleneck and the cuts by both sweeps; None where nothing fits."""
        n_groups, n_stages = len(self.costs.groups), len(self.live)
        fastest = self.ranges.seconds / self.speed.max()
        best, cuts = sweep_near(n_groups, n_stages, self.times, fastest, lower_bound_s)
        bottleneck = float(best[n_stages, -1])
        if not np.isfinite(bottleneck):
            return None

        def squares(before: Float64, time: Float64) -> Float64:
            sums: Float64 = before + np.where(time <= bottleneck, time, np.inf) ** 2
            return sums

        _, cuts = sweep(n_groups, n_stages, self.times, squares, low_for(fastest, bottleneck))
        return bottleneck, cuts

    def searched(self, lower_bound_s: float, most_work: int = MOST_WORK) -> tuple[float, Cuts] | None:
        """As `swept`, by compiled code."""
        found = self.compiled().best(lower_bound_s, most_work)
        return None if found is None else (found[0], tuple(found[1]))

    def compiled(self) -> Any:
        """What kernels/planner/cuts.h makes of it."""
        assert compiled is not None
        r = self.ranges
        ties = [(tie.groups, tie.nbytes, r.kept_rows.get(tie.param, 0)) for tie in self.costs.ties]
        return compiled.Partition(
            r.fwd_s, r.bwd_input_s, r.bwd_weight_s, r.param_bytes, r.stash_bytes, r.workspace_bytes,
            r.act_in, r.held_in, r.grad_in, self._crossing_s, self.speed, self.memory, self.live, self._in,
            self._out, ties, r.window, r.tied_window, r.tied_repeats, self.costs.held_per_param_byte,
            r.state_per_param_byte, self.costs.batch_bytes.first, self.costs.batch_bytes.of_last,
        )  # fmt: skip


def check_counts(costs: Costs, n_micro: int, schedule: str, n_stages: int) -> None:
    """Raises PlanError where there cannot be a cut, whatever the costs are."""
    n_groups, n_ranks = len(costs.groups), len(costs.cluster.devices)
    check_name(schedule)
    if n_stages < 1 or n_micro < 1:
        raise PlanError(f"{n_stages} stages and {n_micro} micro-batches; both must be at least 1")
    check_stages(n_stages, n_groups, costs.copies)
    if n_stages > n_ranks:
        raise PlanError(f"{n_stages} stages but only {n_ranks} ranks; plan at most {n_ranks} stages")


def check_stages(n_stages: int, n_groups: int, n_copies: int = 1) -> None:
    """Raises PlanError where a stage would have no group. n_copies: of the pipeline."""
    if n_stages > n_groups:
        each = f", {n_groups} for each replica" if n_copies > 1 else ""
        raise PlanError(
            f"{n_stages} stages but only {counted(n_groups, 'group')} to cut between; start at most "
            f"{counted(n_groups * n_copies, 'rank')}{each}"
        )


def _explain(problem: Problem, schedule: str, n_micro: int, finest: bool) -> str:
    """Which stage cannot begin or finish, what it lacks at the least, and what would do."""
    stage, first, end, short = problem.compiled().misfit() if problem.compilable else misfit(problem)
    names, device = problem.costs.groups, problem.costs.cluster.devices[stage]
    base = size_text(device.base_bytes)
    taken = f", of which {base} are taken before any weight" if device.base_bytes else ""
    what = f"group {first} {names[first].name!r}" + (
        f" to group {end - 1} {names[end - 1].name!r}" if end - first > 1 else ""
    )
    return (
        f"stage {stage} of {len(problem.live)} (rank {stage}, {size_text(device.memory_bytes)}{taken}) "
        f"cannot hold {what}: {size_text(short)} short{_though(problem)} with schedule {schedule!r} and "
        f"{n_micro} micro-batches; {_next_move(problem, schedule, n_micro, finest)}"
    )


def _though(problem: Problem) -> str:
    return " even with full recomputation" if "full" in problem.modes else ""


def _next_move(problem: Problem, schedule: str, n_micro: int, finest: bool) -> str:
    try:
        enough = _enough_stages(problem, schedule, n_micro)
    except PlanError:  # a schedule of the user's, which refuses so many stages
        return f"use more ranks{'' if finest else ' or smaller micro-batches'}, or give more memory"
    if enough is None:
        smaller = "" if finest else " or use smaller micro-batches"
        return f"no number of ranks would do: give more memory{smaller}"
    least = size_text(int(problem.memory.min()))
    return (
        f"start {enough * problem.costs.copies} ranks: that is the least that would do{_though(problem)}, "
        f"with the {least} each "
        "that the smallest rank has for a stage"
    )


def _most_whole(kept: Int64) -> Int64:
    """Of `kept_micro_batches`, by stage: all that a schedule of whole backwards keeps, at its most."""
    return np.asarray(kept[..., 0].max(axis=1), np.int64)


def misfit(problem: Problem) -> tuple[int, int, int, int]:
    """The first stage that no cut lets begin and end, and its (first, end) that lacks least bytes."""
    n_groups, n_stages = len(problem.costs.groups), len(problem.live)
    best, _ = sweep(n_groups, n_stages, problem.times, np.maximum)
    usable = np.isfinite(best)  # (n_stages + 1, n_groups + 1): ends, with a group left for each later stage
    for count in range(n_stages + 1):
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


def _enough_stages(problem: Problem, schedule: str, n_micro: int) -> int | None:
    """Smallest number of stages that fits when every rank has the smallest rank's memory.

    Stages are counted from the end, where the live stash does not depend on how many come before
    (true of the built-in schedules, and tested; for others the answer is an estimate), so that one
    sweep answers for all counts. Raises PlanError where the schedule refuses as many stages as groups.
    """
    n_groups, count = len(problem.costs.groups), len(problem.live)
    memory, found = int(problem.memory.min()), None
    while True:
        count = min(2 * count, n_groups)
        order = SCHEDULES[schedule](count, n_micro)
        kept = kept_micro_batches(order)[::-1]
        if problem.compilable:
            found = problem.compiled().least_stages(_most_whole(kept), memory)
        else:
            found = least_stages(problem, kept, memory)
        if found is not None or count == n_groups:
            return found


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
