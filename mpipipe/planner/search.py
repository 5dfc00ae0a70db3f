"""The plan: cuts, schedule, program and what they are predicted to cost, by one path.

    Costs -> partition -> Layout -> program_for (schedule, check, lower, prove) -> predict -> Plan

The search starts from the exact minimum of the bottleneck and goes on by simulated step time; that
the result is the shortest step is not claimed, `gap` bounds what is missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.copies import (
    Copies,
    check_copies,
    check_known,
    largest_share,
    pipeline_copies,
    placements,
    replicas_text,
)
from mpipipe.planner.exchange import nodes_for
from mpipipe.planner.orders import Order, Orders
from mpipipe.planner.partition import Wish, check_counts, check_stages, too_many
from mpipipe.planner.placing import LEAST_GAIN, promising
from mpipipe.planner.prediction import LIKE, dear, least_of, least_step_s, predict, predict_with
from mpipipe.planner.programs import Failure, alone, built, cut_indices, program_for, with_window
from mpipipe.planner.schedules import BY_HAND, PLAIN, PLANNED, homes_of, stages_on
from mpipipe.planner.schedules.orders import is_plain
from mpipipe.planner.sizes import counted, multiples_beside
from mpipipe.planner.stages import Cuts, StageTie, neighbours, stage_ties, walked
from mpipipe.planner.starts import starts
from mpipipe.planner.uneven import balanced
from mpipipe.values import RECOMPUTE, Costs, Layout, Numerics, Plan, Program

REFINE_WORK = 512  # stages x micro-batches, of all copies, up to which neighbouring cuts are simulated
LEAN_WORK = 1 << 10  # stages x micro-batches, of all cuts that are tried for less memory


def make_plan(
    costs: Costs,
    numerics: Numerics,
    schedule: str,
    receive_window: int,
    n_ranks: int,
    n_copies: Copies = 1,
    recompute: Wish = "none",
    quick: bool = False,
    by_hand: Plan | None = None,
    brief: bool = False,
    like: float = LIKE,
) -> tuple[Plan, Program]:
    """Plan as many stages as the schedule has on `n_ranks` / `n_copies`, in the best of the orders of ranks
    that are promising: the next ones are taken only where they gain something. Raises PlanError if no cut
    fits (see `partition`), DeadlockError for an order that cannot end.

    receive_window: at least; more where a schedule needs it. n_copies: of the pipeline, or of the stages of
    each rank.
    recompute: "auto" = that of least time, for each cut that is looked at; they begin with those that fit
    without, where there are any. quick: they end there, and where nothing fits nobody asks what is
    missing. by_hand: a plan with the order of `BY_HAND`, where there is one already. brief, of an order that
    follows from costs: made for the cuts and ranks of `by_hand` alone; without it, for the first cuts. like:
    of two plans with such an order whose steps differ by less, that which is less `dear` is taken."""
    if n_copies != 1:  # of one, `check_counts` says so
        check_known(n_ranks, costs)
    check_copies(n_copies, n_ranks, numerics)
    making = _Making(costs, numerics, schedule, receive_window, recompute, by_hand, brief, like)
    if isinstance(n_copies, int):
        return making.even(n_ranks, n_copies, quick)
    return making.uneven(n_copies)


@dataclass(frozen=True)
class _Making:
    """Of one plan: what `make_plan` is given, but for ranks and copies."""

    costs: Costs
    numerics: Numerics
    schedule: str
    receive_window: int
    recompute: Wish
    by_hand: Plan | None
    brief: bool
    like: float
    bounds_s: dict[bool, float] = field(default_factory=dict)  # of plain programs, and of others

    def even(self, n_ranks: int, n_copies: int, quick: bool) -> tuple[Plan, Program]:
        """With so many copies of the pipeline, in the best of the orders of ranks."""
        costs, numerics, schedule = self.costs, self.numerics, self.schedule
        n_micro, n_each = largest_share(numerics.micro_batches, n_copies), n_ranks // n_copies
        self._check_shares(n_copies)
        of_copy = costs.but(copies=n_copies)
        n_stages = stages_on(schedule, n_each)
        check_stages(n_stages, len(costs.groups), n_copies, n_stages // n_each)
        check_counts(of_copy, n_micro, schedule, n_each)
        homes = self._homes(n_stages, n_micro, n_each)
        if self.brief and self.by_hand is not None:
            layout = self.by_hand.layout
            return self._on(layout.ranks, [cut_indices(layout, costs.names)])
        one_each = schedule if n_stages == n_each else PLAIN[0]
        levels = len(costs.cluster.in_order(range(min(n_ranks, len(costs.cluster.devices)))).spanned)
        wish: Wish = "none" if quick and self.recompute == "auto" else self.recompute
        orders = promising(of_copy, n_micro, one_each, n_each, self.receive_window, numerics.tied, wish)
        best: tuple[Plan, Program] | None = None
        first: Failure | None = None
        for on in (on for order in orders for on in placements(order, n_copies, levels > 1)):
            copies = tuple(tuple(order[rank] for rank in homes) for order in on)
            try:
                cuts = starts(
                    of_copy, copies[0], n_micro, schedule, self.receive_window, numerics.tied, wish,
                    not quick, numerics.micro_batch == 1,
                )  # fmt: skip
                ranks = tuple(zip(*copies, strict=True))
                if self.brief:
                    return self._on(ranks, cuts[:1])
                if schedule in PLANNED:
                    cuts += self._by_hand(ranks, cuts)
                found = self._on(ranks, cuts)
            except (PlanError, DeadlockError) as error:  # it may fit in another order
                first = first or alone(error)
                continue
            if best is None or found[0].prediction.step_s < (1 - LEAST_GAIN) * best[0].prediction.step_s:
                best = found
        if best is None:
            assert first is not None
            raise first
        return best

    def _check_shares(self, copies: Copies) -> None:
        """Raises PlanError where copies of the pipeline cannot have one order."""
        n_micro, n_copies = self.numerics.micro_batches, pipeline_copies(copies)
        if self.schedule in PLANNED and n_micro % n_copies:
            near = multiples_beside(n_micro, n_copies)
            raise PlanError(
                f"{self.schedule} with {replicas_text(copies)}: all have one order, so {n_micro} "
                f"micro-batches would have to be a multiple of {n_copies}; use pipeline.micro_batches={near}"
                ", or another schedule"
            )

    def _homes(self, n_stages: int, n_micro: int, n_ranks: int) -> tuple[int, ...]:
        """The rank of each stage, of those of one copy."""
        if self.schedule in PLANNED:
            return homes_of(self.schedule, n_ranks)
        return built(self.schedule, n_stages, n_micro, n_ranks, self.numerics.micro_batches).rank_of_stage

    def _by_hand(self, ranks: tuple[tuple[int, ...], ...], starts: Sequence[Cuts]) -> list[Cuts]:
        """The best cuts of the order by hand that is never shorter; none where it does not fit."""
        with suppress(PlanError, DeadlockError):
            plan = self.by_hand or replace(self, schedule=BY_HAND[self.schedule])._on(ranks, starts)[0]
            return [cut_indices(plan.layout, self.costs.names)]
        return []

    def uneven(self, copies: tuple[int, ...]) -> tuple[Plan, Program]:
        """With so many copies of the stages of each rank, on ranks that follow each other."""
        n_micro, n_each = largest_share(self.numerics.micro_batches, copies), len(copies)
        self._check_shares(copies)
        check_counts(self.costs.but(copies=max(copies)), n_micro, self.schedule, n_each)
        n_stages = stages_on(self.schedule, n_each)
        if n_stages > (n_groups := len(self.costs.groups)):
            most = counted(n_groups * n_each // n_stages, "number")
            raise too_many(
                n_stages, n_groups, f"give pipeline.replicas {most} at most, or train a model of more layers"
            )
        homes = self._homes(n_stages, n_micro, n_each)
        edges = [*itertools.pairwise((0, *itertools.accumulate(copies)))]
        ranks = tuple(tuple(range(*edges[home])) for home in homes)
        if self.brief and self.by_hand is not None:
            return self._on(ranks, [cut_indices(self.by_hand.layout, self.costs.names)])
        cuts = [balanced(self.costs, tuple(copies[home] for home in homes))[0]]
        if self.schedule in PLANNED and not self.brief:
            cuts += self._by_hand(ranks, cuts)
        return self._on(ranks, cuts)

    def _on(self, ranks: tuple[tuple[int, ...], ...], starts: Sequence[Cuts]) -> tuple[Plan, Program]:
        """With these ranks for each stage, and the best cuts from `starts` on."""
        costs, numerics, names = self.costs, self.numerics, self.costs.names
        programs: dict[tuple[tuple[StageTie, ...], tuple[str, ...]], Program] = {}
        nodes = nodes_for(costs.cluster, ranks, numerics)

        def plan_with(cuts: Cuts, most_s: float = math.inf, order: Order | None = None) -> Plan | None:
            """None where its step would take more than `most_s`."""
            if order and order.least_s > most_s:
                return None
            layout = Layout(tuple(names[cut] for cut in cuts), ranks, self.schedule, self.receive_window)
            layout = replace(layout, actions=order.actions if order else (), nodes=nodes)
            key = stage_ties(costs.ties, cuts), layout.actions
            program = programs.get(key)
            if program is None:
                made = order.schedule if order else None
                program = with_window(layout, numerics, costs.ties, names, made)[1]
            if order is None:  # one for all cuts; of those from costs only what may be taken is kept
                programs[key] = program
            layout = replace(layout, receive_window=program.receive_window)
            if most_s < math.inf and least_of(costs, layout, cuts, program) > most_s:
                return None
            layout, prediction = predict_with(
                self.recompute, costs, layout, program, self._bound_s(program), numerics.micro_batch == 1
            )
            programs[key] = program
            return Plan(numerics, layout, prediction, costs)

        n_copies = pipeline_copies(tuple(map(len, ranks)))
        work = len(ranks) * largest_share(numerics.micro_batches, n_copies) * n_copies
        if self.schedule in PLANNED:
            orders = Orders(
                costs, Layout((), ranks, self.schedule, self.receive_window), numerics, not self.brief
            )
            near = orders.near(starts) if work <= REFINE_WORK else ()
            best = self._planned(orders, [*starts, *near[:1]], near[1:], plan_with, work)
        else:
            best = _refine(plan_with, starts, len(names), work)
        return best, programs[stage_ties(costs.ties, cut_indices(best.layout, names)), best.layout.actions]

    def _planned(
        self, orders: Orders, starts: Sequence[Cuts], uneven: Sequence[Cuts],
        plan_with: Callable[[Cuts, float, Order], Plan | None], work: int,
    ) -> Plan:  # fmt: skip
        """From the best of `starts` on, and from `uneven`, with the shortest of the orders for each of the
        cuts; of a large program, the first that will do of those that should be. Memory is looked at where
        the first one does not fit, or makes something again for it: then the cuts next to these may, too."""
        short, small = False, work <= REFINE_WORK
        modes = RECOMPUTE if self.recompute == "auto" else (self.recompute,)

        def plan(every: bool, cuts: Cuts, most_s: float) -> Plan | None:
            nonlocal short
            made: list[Plan] = []
            errors: list[Failure] = []

            def attempt(tried: Iterable[Order], most_s: float = most_s) -> None:
                for order in tried:
                    least_s = min(most_s, *(other.prediction.step_s for other in made), math.inf)
                    try:
                        found = plan_with(cuts, least_s, order)
                    except (PlanError, DeadlockError) as error:
                        errors.append(alone(error))
                        continue
                    if found is not None:
                        made.append(found)
                        if not every:
                            return

            shortest = orders.shortest(cuts)
            attempt([next(shortest)], math.inf)
            fits = not errors and not made[0].layout.recompute
            if every or (not made and not self.brief):
                attempt(shortest)
            attempt(orders.by_hand())
            if not fits:
                short = True
                for mode in modes:
                    if not self.brief or mode == modes[0] or not made:
                        attempt(orders.within(cuts, mode))
                if not self.brief or not made:
                    attempt(orders.leanest())
            if not made and most_s == math.inf:
                raise errors[-1]
            return min(made, key=lambda found: found.prediction.step_s, default=None)

        n_groups = len(self.costs.groups)
        best = _refine(partial(plan, small), starts, n_groups, REFINE_WORK + 1)
        if uneven:
            with suppress(PlanError, DeadlockError):  # they may need more memory
                other = _refine(partial(plan, small), uneven, n_groups, REFINE_WORK + 1)
                best = self._preferred(best, other)
        if not short or not small:
            return best
        near = _refine(partial(plan, False), [cut_indices(best.layout, self.costs.names)], n_groups, work)
        return min(best, near, key=lambda found: found.prediction.step_s)

    def _preferred(self, *plans: Plan) -> Plan:
        """The shortest; or, of those that are nearly as short, that which could be `dear` least."""
        most_s = min(plan.prediction.step_s for plan in plans) * self.like

        def dearness(plan: Plan) -> float:
            orders, cuts = _orders_of(plan), cut_indices(plan.layout, self.costs.names)
            lean = _leanest(orders, plan, cuts, most_s, self.receive_window) if orders else None
            return dear(lean[0] if lean else plan)

        return min((plan for plan in plans if plan.prediction.step_s <= most_s), key=dearness)

    def _bound_s(self, program: Program) -> float:
        """Of all cuts and orders of ranks."""
        if (plain := is_plain(program)) not in self.bounds_s:
            self.bounds_s[plain] = least_step_s(self.costs, program)
        return self.bounds_s[plain]


def plan_of(costs: Costs, numerics: Numerics, layout: Layout) -> Plan:
    """The plan with a layout that is given. Raises PlanError and DeadlockError as `program_for` and
    `predict` do."""
    program = program_for(layout, numerics, costs.ties, costs.names)
    prediction = predict(costs, layout, program, finest=numerics.micro_batch == 1)[0]
    return Plan(numerics, layout, prediction, costs)


def leaner(
    made: tuple[Plan, Program], most_s: float, receive_window: int, walk: bool = True
) -> tuple[Plan, Program]:
    """Of a plan whose order follows from costs, that with the fewest stashes whose step takes so long at
    most, and which is less `dear`; any other plan as it is. walk: of a small program, then also with cuts
    near its own, whichever are less dear."""
    plan, costs, orders = made[0], made[0].costs, _orders_of(made[0])
    if orders is None or costs is None:
        return made
    cuts = cut_indices(plan.layout, costs.names)
    best = _leanest(orders, plan, cuts, most_s, receive_window) or made

    def better(other: Cuts) -> bool:
        nonlocal best
        found = _leanest(orders, best[0], other, most_s, receive_window)
        best = found or best
        return found is not None

    most = LEAN_WORK // (plan.layout.n_stages * plan.numerics.micro_batches)
    if walk and most >= 4 * len(cuts):  # else not even each cut alone could be moved
        walked(len(costs.groups), cuts, most, better)
    return best


def _orders_of(plan: Plan) -> Orders | None:
    """For any cuts; None for a plan whose order does not follow from costs, or that makes something again."""
    if plan.layout.schedule not in PLANNED or plan.layout.recompute or plan.costs is None:
        return None
    return Orders(plan.costs, plan.layout, plan.numerics)


def _leanest(
    orders: Orders, plan: Plan, cuts: Cuts, most_s: float, receive_window: int
) -> tuple[Plan, Program] | None:
    """With these cuts; None where none is less dear than `plan`. orders: `_orders_of` it."""
    numerics, costs = plan.numerics, plan.costs
    assert costs is not None
    names = costs.names
    layout = replace(plan.layout, cuts=tuple(names[cut] for cut in cuts), receive_window=receive_window)
    for order in orders.by_room(cuts, most_s):
        with suppress(PlanError, DeadlockError):
            wished = replace(layout, actions=order.actions)
            other, program = with_window(wished, numerics, costs.ties, names, order.schedule)
            found = Plan(numerics, other, predict(costs, other, program)[0], costs)
            if found.prediction.step_s <= most_s and dear(found) < dear(plan):
                return found, program
    return None


def _refine(
    plan: Callable[[Cuts, float], Plan | None], starts: Sequence[Cuts], n_groups: int, work: int
) -> Plan:
    """The best of some cuts by simulated step, then better ones one group away while there are any.

    The bottleneck leaves out how a pipeline fills and the update; a simulation does not. plan: None where a
    step would take more than so many seconds. `work`: stages x micro-batches of all copies; a large program
    keeps the best start.
    """
    tried: dict[Cuts, Plan | None] = {}
    errors: list[Failure] = []
    least_s = math.inf

    def attempt(cuts: Cuts) -> Plan | None:
        nonlocal least_s
        if cuts not in tried:
            try:
                found = tried[cuts] = plan(cuts, least_s)
            except (PlanError, DeadlockError) as error:  # it does not fit into memory, say
                errors.append(alone(error))
                return None
            if found is not None:
                least_s = min(least_s, found.prediction.step_s)
        return tried.get(cuts)

    every = [found for cuts in dict.fromkeys(starts) if (found := attempt(cuts)) is not None]
    if not every:
        raise errors[0]

    chosen = min(every, key=lambda found: found.prediction.step_s)
    best = next(cuts for cuts, found in tried.items() if found is chosen)
    while work <= REFINE_WORK:
        near = neighbours(n_groups, best)
        made = [(p.prediction.step_s, cuts, p) for _, cuts in near if (p := attempt(cuts)) is not None]
        shortest = min(made, key=lambda each: each[:2], default=None)
        if shortest is None or shortest[0] >= chosen.prediction.step_s * (1 - 1e-9):
            break
        _, best, chosen = shortest
    return chosen
