"""The plan: cuts, schedule, program and what they are predicted to cost, by one path.

    Costs -> partition -> Layout -> program_for (schedule, check, lower, prove) -> predict -> Plan

The search starts from the exact minimum of the bottleneck and goes on by simulated step time; that
the result is the shortest step is not claimed, `gap` bounds what is missing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from mpipipe.errors import DeadlockError, PlanError, did_you_mean, nearest
from mpipipe.planner.bounds import uneven_bound_s, work_bound_s
from mpipipe.planner.copies import (
    Copies,
    check_copies,
    check_nodes,
    check_order,
    fastest_copy,
    largest_share,
    loaded,
    nodes_for,
    placements,
    replicas_text,
    shape_of,
    shape_text,
    stages_in,
)
from mpipipe.planner.lower import at_window, lower, tied_pairs
from mpipipe.planner.mirrors import mirror_bytes, mirror_s
from mpipipe.planner.orders import Order, Orders
from mpipipe.planner.partition import Wish, check_counts, check_stages
from mpipipe.planner.placing import LEAST_GAIN, any_order_bound_s, promising
from mpipipe.planner.prove import prove
from mpipipe.planner.recompute import with_least, with_mode
from mpipipe.planner.schedules import (
    BY_HAND,
    PLAIN,
    PLANNED,
    build,
    check,
    check_name,
    forward_only,
    from_text,
    grid,
    in_copies,
    is_of_file,
    stages_on,
    stashes,
)
from mpipipe.planner.schedules.orders import is_even, is_plain
from mpipipe.planner.simulate import message_bytes, rank_memory_bytes, simulate, times_of
from mpipipe.planner.sizes import size_text
from mpipipe.planner.stages import StageTie, bounds, stage_ties
from mpipipe.planner.starts import starts
from mpipipe.planner.uneven import balanced, has_one_stage_each
from mpipipe.values import (
    RECOMPUTE,
    Cluster,
    Costs,
    Int64,
    Layout,
    Numerics,
    Op,
    Plan,
    Prediction,
    Program,
    Schedule,
    Tie,
    Timeline,
    makespan_s,
    share_of,
)

REFINE_WORK = 512  # stages x micro-batches up to which neighbouring cuts are simulated
Cuts = tuple[int, ...]
Failure = PlanError | DeadlockError


def make_plan(
    costs: Costs,
    numerics: Numerics,
    schedule: str,
    receive_window: int,
    group_names: Sequence[str],
    n_ranks: int,
    n_copies: Copies = 1,
    recompute: Wish = "none",
    quick: bool = False,
    by_hand: Plan | None = None,
) -> tuple[Plan, Program]:
    """Plan as many stages as the schedule has on `n_ranks` / `n_copies`, in the best of the orders of ranks
    that are promising: the next ones are taken only where they gain something. Raises PlanError if no cut
    fits (see `partition`), DeadlockError for an order that cannot end.

    receive_window: at least; more where a schedule needs it. n_copies: of the pipeline, or of each stage.
    recompute: "auto" = that of least time, for each cut that is looked at; they begin with those that fit
    without, where there are any. quick: they end there, and where nothing fits nobody asks what is
    missing. by_hand: a plan with the order of `BY_HAND`, where there is one already."""
    check_copies(n_copies, n_ranks, numerics)
    making = _Making(costs, numerics, schedule, receive_window, group_names, recompute, by_hand)
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
    group_names: Sequence[str]
    recompute: Wish
    by_hand: Plan | None
    bounds_s: dict[bool, float] = field(default_factory=dict)  # of plain programs, and of others

    def even(self, n_ranks: int, n_copies: int, quick: bool) -> tuple[Plan, Program]:
        """With so many copies of the pipeline, in the best of the orders of ranks."""
        costs, numerics, schedule = self.costs, self.numerics, self.schedule
        n_micro, n_each = largest_share(numerics.micro_batches, n_copies), n_ranks // n_copies
        if schedule in PLANNED and numerics.micro_batches % n_copies:
            raise PlanError(
                f"{schedule} with {replicas_text(n_copies)}: all have one order, so {numerics.micro_batches} "
                f"micro-batches would have to be a multiple of {n_copies}; choose another schedule"
            )
        of_copy = costs.but(copies=n_copies)
        check_counts(of_copy, n_micro, schedule, n_each)
        n_stages = stages_on(schedule, n_each)
        check_stages(n_stages, len(costs.groups), n_copies, n_stages // n_each)
        homes = build(schedule, n_stages, n_micro, n_each).rank_of_stage
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
                if schedule in PLANNED:
                    cuts += self._by_hand(ranks, cuts)
                found = self._on(ranks, cuts)
            except (PlanError, DeadlockError) as error:  # it may fit in another order
                first = first or _alone(error)
                continue
            if best is None or found[0].prediction.step_s < (1 - LEAST_GAIN) * best[0].prediction.step_s:
                best = found
        if best is None:
            assert first is not None
            raise first
        return best

    def _by_hand(self, ranks: tuple[tuple[int, ...], ...], starts: Sequence[Cuts]) -> list[Cuts]:
        """The best cuts of the order by hand that is never shorter; none where it does not fit."""
        with suppress(PlanError, DeadlockError):
            plan = self.by_hand or replace(self, schedule=BY_HAND[self.schedule])._on(ranks, starts)[0]
            return [cut_indices(plan.layout, self.group_names)]
        return []

    def uneven(self, copies: tuple[int, ...]) -> tuple[Plan, Program]:
        """With so many copies of each stage, on ranks that follow each other."""
        n_micro, n_stages = largest_share(self.numerics.micro_batches, copies), len(copies)
        check_counts(self.costs.but(copies=max(copies)), n_micro, self.schedule, n_stages)
        if not has_one_stage_each(self.schedule, n_stages):
            raise PlanError(
                f"replicas {shape_text(copies)}: unlike numbers need one stage on each rank, in an order "
                f"that does not follow from costs, and schedule {self.schedule} is not so; choose 1f1b, "
                "gpipe or zb-h1"
            )
        check_stages(n_stages, len(self.costs.groups))
        edges = itertools.pairwise((0, *itertools.accumulate(copies)))
        return self._on(tuple(tuple(range(*edge)) for edge in edges), [balanced(self.costs, copies)[0]])

    def _on(self, ranks: tuple[tuple[int, ...], ...], starts: Sequence[Cuts]) -> tuple[Plan, Program]:
        """With these ranks for each stage, and the best cuts from `starts` on."""
        costs, numerics, names = self.costs, self.numerics, self.group_names
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
                self.recompute, costs, layout, program, names, self._bound_s(program)
            )
            programs[key] = program
            return Plan(numerics, layout, prediction, costs)

        work = len(ranks) * largest_share(numerics.micro_batches, max(map(len, ranks)))
        if self.schedule in PLANNED:
            orders = Orders(costs, Layout((), ranks, self.schedule, self.receive_window), numerics)
            if work <= REFINE_WORK:
                starts = [*starts, orders.near(starts)]
            best = self._planned(orders, starts, plan_with, work)
        else:
            best = _refine(plan_with, starts, len(names), work)
        return best, programs[stage_ties(costs.ties, cut_indices(best.layout, names)), best.layout.actions]

    def _planned(
        self, orders: Orders, starts: Sequence[Cuts], plan_with: Callable[[Cuts, float, Order], Plan | None],
        work: int,
    ) -> Plan:  # fmt: skip
        """With the shortest of the orders for each of the cuts; of a large program, the first that will do of
        those that should be. Memory is looked at where the first one does not fit, or makes something again
        for it: then the cuts next to these may, too."""
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
                        errors.append(_alone(error))
                        continue
                    if found is not None:
                        made.append(found)
                        if not every:
                            return

            shortest = orders.shortest(cuts)
            attempt([next(shortest)], math.inf)
            fits = not errors and not made[0].layout.recompute
            if every or not made:
                attempt(shortest)
            attempt(orders.by_hand())
            if not fits:
                short = True
                for mode in modes:
                    attempt(orders.within(cuts, mode))
                attempt(orders.leanest())
            if not made and most_s == math.inf:
                raise errors[-1]
            return min(made, key=lambda found: found.prediction.step_s, default=None)

        n_groups = len(self.group_names)
        best = _refine(partial(plan, small), starts, n_groups, REFINE_WORK + 1)
        if not short or not small:
            return best
        near = _refine(partial(plan, False), [cut_indices(best.layout, self.group_names)], n_groups, work)
        return min(best, near, key=lambda found: found.prediction.step_s)

    def _bound_s(self, program: Program) -> float:
        """Of all cuts and orders of ranks."""
        if (plain := is_plain(program)) not in self.bounds_s:
            self.bounds_s[plain] = least_step_s(self.costs, program)
        return self.bounds_s[plain]


def with_window(
    layout: Layout,
    numerics: Numerics,
    ties: Sequence[Tie],
    group_names: Sequence[str],
    order: Schedule | None = None,
) -> tuple[Layout, Program]:
    """The layout with the least receive window, from its own on, with which the program can run, and that.
    order: of `layout.actions`, where it need not be read. Raises DeadlockError where none will do."""
    # 2p - 2 is what those by hand need without ties, and as many for each copy that a rank serves; one that
    # follows from costs may do all forwards first
    most = max(
        (4 * len(layout.cuts) + 4) * max(layout.turns),
        _received(layout, numerics, stage_ties(ties, cut_indices(layout, group_names))),
    )
    lowered = _lowered(layout, numerics, ties, group_names, order=order)

    def proved(window: int) -> tuple[Layout, Program]:
        program = at_window(lowered, window)
        prove(program)
        return replace(layout, receive_window=window), program

    least = layout.receive_window
    try:
        return proved(least)
    except DeadlockError as error:
        if least >= most:
            raise
        first = _alone(error)
    try:
        found = proved(most)
    except DeadlockError:
        raise first from None
    fails = least
    while found[0].receive_window - fails > 1:
        middle = (found[0].receive_window + fails) // 2
        try:
            found = proved(middle)
        except DeadlockError:
            fails = middle
    return found


def _alone(error: Failure) -> Failure:
    """Without the frames that it went through: kept in one of them, it would keep all that they hold, large
    programs among it, until somebody looks for circles."""
    return error.with_traceback(None)


def _received(layout: Layout, numerics: Numerics, ties: Sequence[StageTie]) -> int:
    """The most activations and gradients of a step that come to a rank of a plan with its own order."""
    if not layout.actions:
        return 0
    of_ties = len(tied_pairs(ties)) if numerics.tied == "eager" else 0
    return numerics.micro_batches * (2 * max(Counter(layout.order).values()) + of_ties)


def plan_of(costs: Costs, numerics: Numerics, layout: Layout, group_names: Sequence[str]) -> Plan:
    """The plan with a layout that is given. Raises PlanError and DeadlockError as `program_for` and
    `predict` do."""
    program = program_for(layout, numerics, costs.ties, group_names)
    return Plan(numerics, layout, predict(costs, layout, program, group_names)[0], costs)


def leaner(made: tuple[Plan, Program], most_s: float, receive_window: int) -> tuple[Plan, Program]:
    """Of a plan whose order follows from costs, that with the same cuts and the fewest stashes whose step
    takes so long at most, and whose fullest rank needs less; any other plan as it is."""
    (plan, _), names = made, [group.name for group in made[0].costs.groups] if made[0].costs else []
    layout, numerics, costs = plan.layout, plan.numerics, plan.costs
    if layout.schedule not in PLANNED or layout.recompute or costs is None:
        return made
    for order in Orders(costs, layout, numerics).by_room(cut_indices(layout, names), most_s):
        with suppress(PlanError, DeadlockError):
            wished = replace(layout, actions=order.actions, receive_window=receive_window)
            other, program = with_window(wished, numerics, costs.ties, names, order.schedule)
            found = Plan(numerics, other, predict(costs, other, program, names)[0], costs)
            if found.prediction.step_s <= most_s and fullest(found) < fullest(plan):
                return found, program
    return made


def fullest(plan: Plan) -> float:
    """Of the memory of the rank that has least left, the share that is needed."""
    devices = plan.costs.cluster.devices if plan.costs else ()
    peaks = zip(plan.prediction.peak_bytes, devices, strict=False)
    return max((peak / device.memory_bytes for peak, device in peaks), default=0.0)


def _refine(
    plan: Callable[[Cuts, float], Plan | None], starts: Sequence[Cuts], n_groups: int, work: int
) -> Plan:
    """The best of some cuts by simulated step, then better ones one group away while there are any.

    The bottleneck leaves out how a pipeline fills and the update; a simulation does not. plan: None where a
    step would take more than so many seconds. `work`: stages x micro-batches; a large program keeps the best
    start.
    """
    tried: dict[Cuts, Plan | None] = {}
    errors: list[Failure] = []
    least_s = math.inf

    def attempt(cuts: Cuts) -> Plan | None:
        nonlocal least_s
        inside = all(a < b for a, b in itertools.pairwise((0, *cuts, n_groups)))
        if inside and cuts not in tried:
            try:
                found = tried[cuts] = plan(cuts, least_s)
            except (PlanError, DeadlockError) as error:  # it does not fit into memory, say
                errors.append(_alone(error))
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
        near = [(*best[:i], best[i] + d, *best[i + 1 :]) for i in range(len(best)) for d in (-1, 1)]
        made = [(p.prediction.step_s, cuts, p) for cuts in near if (p := attempt(cuts)) is not None]
        shortest = min(made, key=lambda each: each[:2], default=None)
        if shortest is None or shortest[0] >= chosen.prediction.step_s * (1 - 1e-9):
            break
        _, best, chosen = shortest
    return chosen


def program_for(
    layout: Layout,
    numerics: Numerics,
    ties: Sequence[Tie],
    group_names: Sequence[str],
    train: bool = True,
    n_micro: int | None = None,
) -> Program:
    """The checked and proved program of a layout; `train=False`: forward only, for evaluation.

    n_micro: micro-batches, by default those of `numerics`. Raises PlanError if the layout does not
    fit the groups, DeadlockError if the program cannot run without buffering.
    """
    program = _lowered(layout, numerics, ties, group_names, train, n_micro)
    prove(program)
    return program


def _lowered(
    layout: Layout, numerics: Numerics, ties: Sequence[Tie], group_names: Sequence[str], train: bool = True,
    n_micro: int | None = None, order: Schedule | None = None,
) -> Program:  # fmt: skip
    """As `program_for`, without a proof."""
    cuts = cut_indices(layout, group_names)
    if train:
        check_copies(shape_of(layout), layout.n_ranks, numerics)
    check_nodes(layout, numerics)
    schedule = replace(_order(layout, n_micro or numerics.micro_batches, train, order), nodes=layout.nodes)
    return lower(schedule, stage_ties(ties, cuts), numerics.tied, layout.receive_window, train)


def _order(layout: Layout, n_micro: int, train: bool, known: Schedule | None = None) -> Schedule:
    """Its schedule, on its ranks; checked. known: of its actions."""
    check_name(layout.schedule)
    place = {rank: i for i, rank in enumerate(dict.fromkeys(layout.order))}

    def made(count: int) -> Schedule:
        if not train:
            return forward_only(layout.n_stages, count, [place[rank] for rank in layout.order])
        if layout.actions and known is None:
            return _given_actions(layout, count)
        schedule = known or build(layout.schedule, layout.n_stages, count, len(place))
        check(schedule)
        return schedule

    shares = [len(share_of(copy, layout.n_copies, n_micro)) for copy in range(layout.n_copies)]
    of_count = {count: made(count) for count in set(shares)}
    return in_copies([of_count[count] for count in shares], layout.copies)


@lru_cache(maxsize=8)  # the same ones again and again, for another receive window or another tie
def _read(actions: tuple[str, ...]) -> Schedule:
    return from_text("\n".join(actions), "layout.actions")


def _given_actions(layout: Layout, n_micro: int) -> Schedule:
    schedule = _read(layout.actions)
    has, asked = (schedule.n_stages, schedule.n_micro), (layout.n_stages, n_micro)
    if has != asked:
        raise PlanError(
            f"layout.actions are of {has[0]} stages and {has[1]} micro-batches, the plan has {asked[0]} and "
            f"{asked[1]} in each copy; make them fit, or remove layout.actions"
        )
    return schedule


def predict(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str], bound_s: float | None = None
) -> tuple[Prediction, Timeline]:
    """What `program` will take. bound_s: `step_bound_s`, where it is known already, as it is the same for
    every cut. Raises PlanError if a rank's memory is too small for it."""
    prediction, timeline = expect(costs, layout, program, group_names, bound_s)
    _check_memory(
        timeline,
        costs.cluster,
        ["let the planner choose the cuts", "use smaller micro-batches", "more ranks"],
    )
    return prediction, timeline


def predict_with(
    wish: Wish, costs: Costs, layout: Layout, program: Program, group_names: Sequence[str],
    bound_s: float | None = None,
) -> tuple[Layout, Prediction]:  # fmt: skip
    """As `expect_with`; raises PlanError if a rank's memory is too small for it."""
    layout, prediction, timeline = expect_with(wish, costs, layout, program, group_names, bound_s)
    own_order = layout.schedule if is_of_file(layout.schedule) else ""
    ways_out = ["use smaller micro-batches", "give more memory" if own_order else "more ranks"]
    if wish not in ("auto", "full"):
        ways_out.insert(0, "set pipeline.recompute=auto")
    _check_memory(timeline, costs.cluster, ways_out, own_order)
    return layout, prediction


def expect_with(
    wish: Wish, costs: Costs, layout: Layout, program: Program, group_names: Sequence[str],
    bound_s: float | None = None,
) -> tuple[Layout, Prediction, Timeline]:  # fmt: skip
    """As `expect`, and the layout with the recomputation that is wished for; auto: none, or what is needed
    for it to fit, but for mirrors."""
    layout = with_mode(layout, "none" if wish == "auto" else wish)
    prediction, timeline = expect(costs, layout, program, group_names, bound_s)
    if wish == "auto" and too_full(timeline.peak_bytes, costs.cluster) is not None:
        less = with_least(costs, layout, cut_indices(layout, group_names), program)
        if less != layout:
            return less, *expect(costs, less, program, group_names, bound_s)
    return layout, prediction, timeline


def least_step_s(costs: Costs, program: Program) -> float:
    """No cut, and no order of ranks, makes a step of such a program shorter."""
    n_ranks, n_copies = len(program.codes), len(program.copies)
    norm_s = norm_seconds(costs.cluster, n_ranks)
    if not is_even(program):
        return uneven_bound_s(costs, program.n_micro, n_copies, n_ranks, norm_s)
    bound = any_order_bound_s if is_plain(program) else work_bound_s
    return bound(fastest_copy(costs, n_ranks, n_copies), len(program.share(0)), n_ranks // n_copies, norm_s)


def expect(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str], bound_s: float | None = None
) -> tuple[Prediction, Timeline]:
    """As `predict`, whether the memory is there or not."""
    cuts = cut_indices(layout, group_names)
    norm_s = norm_seconds(costs.cluster, layout.n_ranks)
    ties, stages = stage_ties(costs.ties, cuts), stages_in(costs, layout, cuts)
    timeline = simulate(program, stages, loaded(costs.cluster, layout), norm_s, ties)
    bound = least_step_s(costs, program) if bound_s is None else bound_s
    step = timeline.makespan_s
    bases = [device.base_bytes for device in costs.cluster.devices]
    if layout.mirror_every:
        step += mirror_s(costs, layout, cuts) / layout.mirror_every
        mirrors = mirror_bytes(costs, layout, cuts).tolist()
        bases = [base + taken for base, taken in zip(bases, mirrors, strict=False)]
    memory = tuple(held + base for held, base in zip(timeline.memory_bytes, bases, strict=False))
    timeline = replace(timeline, memory_bytes=memory)
    prediction = Prediction(
        step_s=step,
        bubble=timeline.bubble,
        bubble_rank=timeline.bubble_rank,
        peak_bytes=timeline.peak_bytes,
        lower_bound_s=bound,
        gap=step / bound - 1.0 if bound else 0.0,
    )
    return prediction, timeline


def least_of(costs: Costs, layout: Layout, cuts: Cuts, program: Program) -> float:
    """Seconds of the step without recomputation, which only makes it longer."""
    cluster, norm_s = loaded(costs.cluster, layout), norm_seconds(costs.cluster, layout.n_ranks)
    stages = stages_in(costs, layout, cuts)
    return makespan_s(times_of(program, stages, cluster, norm_s, stage_ties(costs.ties, cuts))[0])


def sizes_of_messages(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str]
) -> tuple[Int64, ...]:
    """Bytes of each message instruction, 0 for the others: per rank an array (n,)."""
    cuts = cut_indices(layout, group_names)
    stages = stages_in(costs, layout, cuts)
    return message_bytes(program, stages, stage_ties(costs.ties, cuts))


def tensor_peak_bytes(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str]
) -> tuple[int, ...]:
    """By rank, the most bytes of live tensors in a step. A process needs more: what `predict` says."""
    stages = stages_in(costs, layout, cut_indices(layout, group_names))
    sizes = sizes_of_messages(costs, layout, program, group_names)
    ranks = range(len(program.codes))
    return tuple(int(rank_memory_bytes(program, stages, sizes, rank, tensors=True).max()) for rank in ranks)


def cut_indices(layout: Layout, group_names: Sequence[str]) -> tuple[int, ...]:
    """Index of the first group of stages 1 .. S-1. Raises PlanError for a name that is no group,
    cuts out of order, or as `check_order` does."""
    check_order(layout)
    place = {name: index for index, name in enumerate(group_names)}
    for name in layout.cuts:
        if name not in place:
            meant = nearest(name, group_names) or group_names[0]
            raise PlanError(
                f"layout.cuts names {name!r}, which is no group of this model{did_you_mean(meant)}"
            )
    cuts = tuple(place[name] for name in layout.cuts)
    bounds(len(group_names), cuts)
    return cuts


def norm_seconds(cluster: Cluster, n_ranks: int) -> float:
    """Of the norm's collective, a few bytes per parameter: one slow latency per doubling, in any order."""
    spanned = cluster.in_order(range(n_ranks)).spanned
    latencies = [link.latency_s for level, link in cluster.links.items() if level in spanned]
    return math.ceil(math.log2(n_ranks)) * max(latencies, default=0.0)


def too_full(peaks: Sequence[int], cluster: Cluster) -> tuple[int, int] | None:
    """(rank, bytes) where most is missing; None where all fits."""
    short = [(peak - device.memory_bytes, rank) for rank, (peak, device) in
             enumerate(zip(peaks, cluster.devices, strict=False))]  # fmt: skip
    most, rank = max(short)
    return (rank, most) if most > 0 else None


def _check_memory(timeline: Timeline, cluster: Cluster, ways_out: Sequence[str], own_order: str = "") -> None:
    """Shows where in the order it is too much first. own_order: the file of the user's that it is from."""
    peaks = timeline.peak_bytes
    full = too_full(peaks, cluster)
    if full is not None:
        rank, short = full
        has = cluster.devices[rank].memory_bytes
        actions = [codes[codes[:, 0] <= Op.W, :3] for codes in timeline.program.codes]
        over = int(np.argmax(timeline.memory_bytes[rank] > has))
        before = int((timeline.program.codes[rank][:over, 0] <= Op.W).sum())
        if own_order and stashes(actions[rank], 1)[before] > 1:
            ways_out = [f"do a backward of this rank sooner in {own_order}", *ways_out]
        raise PlanError(
            f"rank {rank} needs {size_text(peaks[rank])} and has {size_text(has)}, {size_text(short)} short; "
            f"{', '.join(ways_out[:-1])}, or {ways_out[-1]}\n{grid(actions, {rank: before})}"
        )
