"""What a run may choose before step 0, searched together: number of micro-batches, schedule and cuts.

The batch is given, so fewer micro-batches are larger ones: kernels get faster, the bubble and the memory
grow. Number and size belong to `Numerics`: they are searched at the first start of a run only. Schedule and
cuts belong to `Layout`.

A number whose bound is above the best step found is not simulated. The answer is the shortest simulated step
of all numbers, schedules and cuts that were asked for wherever `Joint.exact` says so: then each cut was
simulated or ruled out by a bound, in the order of ranks that `make_plan` chose. Else cuts are those of
`make_plan`, and `Joint.bound_s` says how short a step could be at best.

Where ranks share cores, all this is as if no rank ever left its share to others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.asked import Asked, check_groups
from mpipipe.planner.bounds import bottleneck_bound_s, uneven_bound_s, work_bound_s
from mpipipe.planner.copies import (
    Copies,
    fastest_copy,
    largest_share,
    legal_copies,
    most_copies,
    ranks_in_each,
)
from mpipipe.planner.crowded import uncrowded
from mpipipe.planner.every_cut import ROUNDING, EveryCut, Made, step_s
from mpipipe.planner.placing import any_order_bound_s
from mpipipe.planner.prediction import EQUAL, FOR_MEMORY, LIKE, dear, fullest, norm_seconds
from mpipipe.planner.schedules import BY_HAND, FILLED, PLAIN, PLANNED, build, check, stages_on
from mpipipe.planner.search import leaner, make_plan
from mpipipe.planner.uneven import promising_shapes
from mpipipe.values import Costs, Numerics, Plan, Program, split_text

# Ranks times micro-batches up to which a schedule is compared with others: beyond, it takes seconds.
MOST_PLANNED = 1 << 11  # those that are made anew for each cut; beyond, for the best one of the order by hand
MOST_BRIEF = 1 << 15  # stages times micro-batches of all that are made so in a search: some seconds
MOST_FILLED = 1 << 14  # the others that are made action by action
MOST_COMPARED = 1 << 17  # all but 1f1b and zb-h1: programs of so many ranks are large, and kept
LEAST_COMPARED = (PLAIN[0], "zb-h1")
MOST_AGAIN = 1 << 7  # stages times micro-batches of a plan for which one with less memory is searched
LIMIT, LESS = 0.97, 0.9  # of what its fullest rank needs: what that one may have, and is worth a longer step
MOST_SWEPT = 1 << 12  # groups times ranks: beyond, cuts with recomputation are looked for by 1f1b alone
SKIPPED = "not tried here; pipeline.schedule="


@dataclass(frozen=True)
class Tried:
    """One number of micro-batches with one schedule and number of copies. made: its best plan and program;
    None where there is none, and then `why`. bound_s: no cut of this number has a shorter step; None where
    no cut will do."""

    micro_batches: int
    batch: int  # samples of all of them
    schedule: str
    made: Made | None
    bound_s: float | None
    why: str
    copies: Copies = 1

    @property
    def micro_batch(self) -> int:
        """Samples of the largest one."""
        return -(-self.batch // self.micro_batches)

    @property
    def in_words(self) -> str:
        return split_text(self.batch, self.micro_batches)

    @property
    def step_s(self) -> float:
        return step_s(self.made)

    @property
    def skipped(self) -> bool:
        """It takes too long to be made just to be compared."""
        return self.why.startswith(SKIPPED)

    @property
    def dear(self) -> float:
        """As of `dear`; endless where there is no plan."""
        return math.inf if self.made is None else dear(self.made[0])


@dataclass(frozen=True)
class Joint:
    """best: one of `tried`, which are in the order in which they were looked at; exact: nothing that was
    asked for has a shorter step, but for what `preferred` takes as equal and `with_less_memory` for worth it;
    late: the time was used before."""

    best: Tried
    tried: tuple[Tried, ...]
    exact: bool
    late: bool

    @property
    def plan(self) -> Plan:
        return self._made[0]

    @property
    def program(self) -> Program:
        return self._made[1]

    @property
    def costs(self) -> Costs:
        """Those that the plan was made with."""
        assert self.plan.costs is not None
        return self.plan.costs

    @property
    def _made(self) -> Made:
        assert self.best.made is not None
        return self.best.made

    @property
    def bound_s(self) -> float:
        """Nothing that was asked for and fits, as `partition` counts memory, has a shorter step."""
        return min(self.best.step_s, *(t.bound_s for t in self.tried if t.bound_s is not None))


def least_s(tried: Tried) -> float:
    """Its step, or what that takes at least; endless where no cut will do."""
    return tried.step_s if tried.made or tried.bound_s is None else tried.bound_s


def preferred(tried: Collection[Tried], best: Tried | None = None) -> Tried:
    """The one with the shortest step, or `best`; of those of its number of micro-batches that are as fast,
    but for `LIKE`: that with the fewest copies; then 1f1b, else what is `dear` least, else the first."""
    best = best or min(tried, key=lambda t: t.step_s)
    alike = (t for t in tried if t.micro_batches == best.micro_batches and t.step_s <= best.step_s * LIKE)
    return min(alike, key=lambda t: (most_copies(t.copies), t.schedule != PLAIN[0], t.dear))


def most_compared(schedule: str) -> float:
    """Ranks times micro-batches of one copy up to which it is made only to be compared."""
    if schedule in PLANNED:
        return MOST_PLANNED
    if schedule in FILLED:
        return MOST_FILLED
    return math.inf if schedule in LEAST_COMPARED else MOST_COMPARED


def search(
    asked: Asked,
    costs_of: Callable[[int], Costs],
    late: Callable[[], bool] = lambda: False,
    first: Collection[int] = (),
) -> Joint:
    """The shortest simulated step of all numbers, schedules and cuts that fit into memory.

    costs_of: a number of micro-batches -> costs. late: asked between two things to try, True when the time is
    used; what was found until then is the answer. first: numbers that are looked at before the others, so
    that only one of them rules another one out. Raises PlanError where nothing fits, or the time is used
    before anything is found; DeadlockError where the only schedule cannot run.
    """
    costs = {count: uncrowded(costs_of(count)) for count in asked.counts}
    check_groups(asked, len(costs[asked.counts[0]].groups))
    slowest = {count: _bottleneck_s(costs[count], asked.n_ranks) for count in asked.counts}

    def promise(count: int) -> tuple[bool, float]:
        """Where stages are equal, the step; the shortest first rules out the most."""
        return count not in first, (count + asked.n_ranks - 1) * slowest[count]

    finder = _Finder(asked, late)
    alone = all(len(legal_copies(asked.of(count))) == 1 for count in asked.counts)
    finder.exact = not asked.uneven or alone  # else only a few shapes of many are looked at
    for count in sorted(asked.counts, key=promise):
        shapes = promising_shapes(costs[count], asked.of(count), asked.n_ranks) if asked.uneven else []
        for copies in (*asked.copies, *shapes):
            finder.look(count, costs[count], copies)
    return finder.joint()


def with_less_memory(joint: Joint, asked: Asked, late: Callable[[], bool] = lambda: False) -> Joint:
    """Of what was found for `asked`, where the schedule was left open: with a plan whose step is up to
    `FOR_MEMORY` times the shortest and that needs much less memory, while there is one. For the plan that is
    to run: plans that are compared should be the shortest."""
    most_s = FOR_MEMORY * min(t.step_s for t in joint.tried)
    while len(asked.schedules) > 1 and (other := _with_less(joint, asked, most_s, late)) is not None:
        joint = other
    return joint


def _with_less(joint: Joint, asked: Asked, most_s: float, late: Callable[[], bool]) -> Joint | None:
    """With what is least `dear` for ranks that have less memory than the plan of `joint` needs: a limit finds
    cuts and orders that nothing else does. None where that gains little, or to look for it would take long;
    only orders that follow from costs are made for it."""
    best, layout, costs = joint.best, joint.plan.layout, joint.costs
    share, count, devices = fullest(joint.plan), best.micro_batches, costs.cluster.devices
    if layout.n_stages == 1 or layout.recompute or layout.n_stages * count > MOST_AGAIN or not share:
        return None
    devices = tuple(replace(d, memory_bytes=math.ceil(LIMIT * share * d.memory_bytes)) for d in devices)
    tight = costs.but(cluster=replace(costs.cluster, devices=devices))
    alike = {t.schedule: t for t in joint.tried if t.micro_batches == count and t.copies == best.copies}
    schedules = tuple(name for name in PLANNED if name in alike and least_s(alike[name]) <= most_s)
    again = replace(asked, schedules=schedules, copies=(best.copies,), uneven=False, recompute="none")
    finder = _Finder(again, late)
    finder.look(count, tight, best.copies)
    try:
        tried = finder.joint().tried
    except (PlanError, DeadlockError):
        return None
    found = min((t for t in tried if t.step_s <= most_s), key=lambda t: t.dear, default=None)
    if found is None or found.made is None or late():
        return None
    same, plan = alike[found.schedule], replace(found.made[0], costs=costs)
    found = replace(found, made=(plan, found.made[1]), bound_s=same.bound_s)
    if found.dear >= best.dear or fullest(plan) > LESS * share:
        return None
    return replace(joint, best=found, tried=tuple(found if t is same else t for t in joint.tried))


def _bottleneck_s(costs: Costs, n_ranks: int) -> float:
    speed = np.array([device.speed for device in costs.cluster.devices[:n_ranks]])
    return bottleneck_bound_s(np.array([group.seconds for group in costs.groups]), speed)


class _Finder:
    def __init__(self, asked: Asked, late: Callable[[], bool]) -> None:
        self.asked, self._late = asked, late
        self.best_s = math.inf
        self.tried: list[Tried] = []
        self.errors: dict[int, PlanError | DeadlockError] = {}
        self.exact, self.was_late = True, False
        self.brief_left = MOST_BRIEF  # counted, not timed: a search finds the same wherever it is made

    def late(self) -> bool:
        self.was_late = self.was_late or self._late()
        return self.was_late

    def look(self, count: int, costs: Costs, copies: Copies) -> None:
        """All schedules with one number of micro-batches and of copies, unless its bound rules it out; of one
        rank, which never waits, the first that has an order for it."""
        whole_s, bound_s = self._bounds_s(count, costs, copies)
        n_ranks, share = ranks_in_each(copies, self.asked.n_ranks), largest_share(count, copies)
        several, promising = len(self.asked.schedules) > 1, copies not in self.asked.copies
        for schedule in self.asked.schedules if n_ranks > 1 else [self._first_for(count, copies)]:
            if several and promising and stages_on(schedule, n_ranks) > n_ranks:
                continue  # their shapes are those that promise most with one stage on each rank
            least_s = whole_s if schedule in PLAIN else bound_s
            large = several and n_ranks * share > most_compared(schedule)
            work = stages_on(schedule, n_ranks) * share
            brief = large and schedule in PLANNED and work <= self.brief_left
            if large and not brief:
                self._note(count, schedule, copies, None, least_s, f"{SKIPPED}{schedule}")
                self.exact = False
            elif least_s >= self.best_s * ROUNDING:
                self._note(count, schedule, copies, None, least_s, "ruled out by its bound")
            elif self.late():
                self._note(count, schedule, copies, None, least_s, "not looked at, the time was used")
            else:
                self.brief_left -= work if brief else 0
                self._simulate(costs, self.asked.of(count), schedule, copies, least_s, brief)

    def _bounds_s(self, count: int, costs: Costs, copies: Copies) -> tuple[float, float]:
        """With whole backwards and one stage on each rank, and with any schedule."""
        norm_s = norm_seconds(costs.cluster, self.asked.n_ranks)
        if isinstance(copies, tuple):
            return 2 * (uneven_bound_s(costs, count, max(copies), self.asked.n_ranks, norm_s),)
        n_ranks, share = self.asked.n_ranks // copies, largest_share(count, copies)
        of_copy = fastest_copy(costs, self.asked.n_ranks, copies)
        bound_s = share * _bottleneck_s(of_copy, n_ranks)
        if bound_s < self.best_s * ROUNDING < math.inf and not self.late():
            whole_s = any_order_bound_s(of_copy, share, n_ranks, norm_s)
            return whole_s, work_bound_s(of_copy, share, n_ranks, norm_s)
        return bound_s, bound_s

    def _simulate(
        self, costs: Costs, numerics: Numerics, schedule: str, copies: Copies, least_s: float, brief: bool
    ) -> None:
        """brief: an order that follows from costs, too long to be made for each cut, but not for one."""
        asked, count = self.asked, numerics.micro_batches
        made: Made | None = None
        failed = ""
        if refused := self._refused(schedule, count, copies):
            self.errors.setdefault(count, refused)
            self._note(count, schedule, copies, None, None, str(refused))
            return
        try:
            quick = schedule != asked.schedules[0] and len(costs.groups) * asked.n_ranks > MOST_SWEPT
            made = make_plan(
                costs, numerics, schedule, asked.receive_window, asked.n_ranks, copies, asked.recompute,
                quick, self._by_hand(schedule, count, copies), brief, self._like,
            )  # fmt: skip
        except (PlanError, DeadlockError) as error:
            self.errors.setdefault(count, error)
            failed = str(error)
        exact = False
        if copies == 1:
            every = EveryCut(costs, numerics, schedule, asked.receive_window, asked.n_ranks, asked.recompute)
            made, exact = every.best(made, self.late)
        self.exact = self.exact and exact
        if made is None:
            # of one cut that was tried, others may fit
            bound_s, why = (least_s, f"{SKIPPED}{schedule}") if brief else (None, failed)
            self._note(count, schedule, copies, None, bound_s, why)
        else:
            self._note(count, schedule, copies, made, made[0].prediction.lower_bound_s, "")
        self.best_s = min(self.best_s, step_s(made))

    def _by_hand(self, schedule: str, count: int, copies: Copies) -> Plan | None:
        """What was made of the order by hand that is never shorter than this one."""
        hand = BY_HAND.get(schedule), count, copies
        found = (t.made[0] for t in self.tried if t.made and (t.schedule, t.micro_batches, t.copies) == hand)
        return next(found, None)

    def _first_for(self, count: int, copies: Copies) -> str:
        names = self.asked.schedules
        return next((name for name in names if not self._refused(name, count, copies)), names[0])

    def _refused(self, schedule: str, count: int, copies: Copies) -> PlanError | DeadlockError | None:
        """Why there is no such order; None where there is. One that follows from costs is not made twice."""
        if schedule in PLANNED:
            return None
        n_ranks, share = ranks_in_each(copies, self.asked.n_ranks), largest_share(count, copies)
        try:
            check(build(schedule, stages_on(schedule, n_ranks), share, n_ranks))
        except (PlanError, DeadlockError) as error:
            return error
        return None

    def _note(
        self, count: int, schedule: str, copies: Copies, made: Made | None, bound_s: float | None, why: str
    ) -> None:
        batch = self.asked.numerics.batch
        self.tried.append(Tried(count, batch, schedule, made, bound_s, why, copies))

    def joint(self) -> Joint:
        if self.best_s == math.inf:
            raise self._nothing()
        exact = self.exact and not self.was_late
        best = min(self.tried, key=lambda t: t.step_s)
        tried = tuple(self._leaner(t, best) for t in self.tried)
        best = min((best, *tried), key=lambda t: t.step_s)  # other cuts may have made one shorter
        return Joint(preferred(tried, best), tried, exact, self.was_late)

    @property
    def _like(self) -> float:
        return LIKE if len(self.asked.schedules) > 1 else EQUAL

    def _leaner(self, tried: Tried, best: Tried) -> Tried:
        """With less memory where that is as good as the best one."""
        most_s = best.step_s * self._like
        if tried.made is None or tried.micro_batches != best.micro_batches or tried.step_s > most_s:
            return tried
        n_ranks = ranks_in_each(tried.copies, self.asked.n_ranks)
        if len(self.asked.schedules) > 1 and (
            n_ranks * largest_share(tried.micro_batches, tried.copies) > MOST_PLANNED
        ):  # to look for fewer stashes takes longer than to find it
            return tried
        made = leaner(tried.made, most_s, self.asked.receive_window, walk=not self.was_late)
        bound_s = None if tried.bound_s is None else min(tried.bound_s, step_s(made))
        return replace(tried, made=made, bound_s=bound_s)

    def _nothing(self) -> PlanError | DeadlockError:
        if not self.errors:
            return PlanError("the time was used before any plan was found; raise --budget, or leave it out")
        finest = max(self.errors)  # the smallest micro-batches need the least memory
        if len(self.asked.counts) == 1:
            return self.errors[finest]
        return PlanError(f"no number of micro-batches will do; with {finest}: {self.errors[finest]}")
