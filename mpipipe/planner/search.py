"""The plan: cuts, schedule, program and what they are predicted to cost, by one path.

    Costs -> partition -> Layout -> program_for (schedule, check, lower, prove) -> predict -> Plan

The search starts from the exact minimum of the bottleneck and goes on by simulated step time; that
the result is the shortest step is not claimed, `gap` bounds what is missing.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.bounds import work_bound_s
from mpipipe.planner.lower import lower
from mpipipe.planner.partition import Wish, check_counts, check_stages, partition
from mpipipe.planner.placing import LEAST_GAIN, Order, any_order_bound_s, promising
from mpipipe.planner.prove import prove
from mpipipe.planner.recompute import with_modes
from mpipipe.planner.schedules import PLAIN, build, check, check_name, forward_only, grid, on_ranks, stages_on
from mpipipe.planner.schedules.orders import is_plain
from mpipipe.planner.several import started
from mpipipe.planner.simulate import message_bytes, simulate
from mpipipe.planner.sizes import size_text
from mpipipe.planner.stages import StageTie, bounds, in_order, stage_costs, stage_ties
from mpipipe.values import (
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
)

REFINE_WORK = 512  # stages x micro-batches up to which neighbouring cuts are simulated
Cuts = tuple[int, ...]


def make_plan(
    costs: Costs,
    numerics: Numerics,
    schedule: str,
    receive_window: int,
    group_names: Sequence[str],
    n_ranks: int,
    recompute: Wish = "none",
) -> tuple[Plan, Program]:
    """Plan as many stages as the schedule has on `n_ranks`, in the best of the orders of ranks that are
    promising: the next ones are taken only where they gain something. Raises PlanError if no cut fits (see
    `partition`), DeadlockError for an order that cannot end.

    receive_window: at least; more where a schedule needs it. recompute: "auto" = that of least time, for each
    cut that is looked at; they begin with those that fit without, where there are any."""
    check_counts(costs, numerics.micro_batches, schedule, n_ranks)
    n_stages = stages_on(schedule, n_ranks)
    check_stages(n_stages, len(costs.groups))
    homes = build(schedule, n_stages, numerics.micro_batches, n_ranks).rank_of_stage
    bounds_s: dict[bool, float] = {}

    def bound_s(program: Program) -> float:
        """Of all cuts and orders of ranks."""
        if (plain := is_plain(program)) not in bounds_s:
            bounds_s[plain] = least_step_s(costs, program)
        return bounds_s[plain]

    best: tuple[Plan, Program] | None = None
    one_each = schedule if n_stages == n_ranks else PLAIN[0]
    for order in promising(costs, numerics.micro_batches, one_each, n_ranks, receive_window, numerics.tied):
        on = tuple(order[rank] for rank in homes)
        found = _plan_in(on, costs, numerics, schedule, receive_window, group_names, bound_s, recompute)
        if best is None or found[0].prediction.step_s < (1 - LEAST_GAIN) * best[0].prediction.step_s:
            best = found
    assert best is not None
    return best


def _plan_in(
    order: Order, costs: Costs, numerics: Numerics, schedule: str, receive_window: int,
    group_names: Sequence[str], bound_s: Callable[[Program], float], recompute: Wish,
) -> tuple[Plan, Program]:  # fmt: skip
    """With stage s on rank `order[s]`."""
    programs: dict[tuple[StageTie, ...], tuple[Layout, Program]] = {}
    n_micro = numerics.micro_batches
    if len(set(order)) == len(order):
        placed = in_order(costs, order)
        starts = [
            partition(
                placed, n_micro, schedule, len(order), receive_window, numerics.tied, update,
                finest=numerics.micro_batch == 1, recompute=recompute,
            ).cuts
            for update in (False, True)
        ]  # fmt: skip
    else:
        starts = started(costs, order, n_micro, schedule, receive_window, numerics.tied, recompute)

    def laid(cuts: Cuts) -> tuple[Layout, Program]:
        names = tuple(group_names[cut] for cut in cuts)
        layout = Layout(names, tuple((rank,) for rank in order), schedule, receive_window)
        ties = stage_ties(costs.ties, cuts)
        if ties not in programs:
            programs[ties] = with_window(layout, numerics, costs.ties, group_names)
        known, program = programs[ties]
        return replace(layout, receive_window=known.receive_window), program

    def plan(cuts: Cuts) -> Plan:
        layout, program = laid(cuts)
        layout = with_modes(costs, layout, cuts, program, recompute)
        prediction = predict(costs, layout, program, group_names, bound_s(program))[0]
        return Plan(numerics, layout, prediction, costs)

    best = _refine(plan, starts, len(group_names), len(order) * n_micro)
    return best, laid(cut_indices(best.layout, group_names))[1]


def with_window(
    layout: Layout, numerics: Numerics, ties: Sequence[Tie], group_names: Sequence[str]
) -> tuple[Layout, Program]:
    """The layout with the least receive window, from its own on, with which the program can run, and that.
    Raises DeadlockError where none will do."""
    most = 4 * len(layout.cuts) + 4  # 2p - 2 is what the built-in ones need without ties

    def proved(window: int) -> tuple[Layout, Program]:
        wider = replace(layout, receive_window=window)
        return wider, program_for(wider, numerics, ties, group_names)

    least = layout.receive_window
    try:
        return proved(least)
    except DeadlockError as error:
        if least >= most:
            raise
        first = error
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


def plan_of(costs: Costs, numerics: Numerics, layout: Layout, group_names: Sequence[str]) -> Plan:
    """The plan with a layout that is given. Raises PlanError and DeadlockError as `program_for` and
    `predict` do."""
    program = program_for(layout, numerics, costs.ties, group_names)
    return Plan(numerics, layout, predict(costs, layout, program, group_names)[0], costs)


def _refine(plan: Callable[[Cuts], Plan], starts: Sequence[Cuts], n_groups: int, work: int) -> Plan:
    """The best of some cuts by simulated step, then better ones one group away while there are any.

    The bottleneck leaves out how a pipeline fills and the update; a simulation does not. `work`:
    stages x micro-batches; a large program keeps the best start.
    """
    tried: dict[Cuts, Plan] = {}
    errors: list[PlanError] = []

    def attempt(cuts: Cuts) -> Plan | None:
        inside = all(a < b for a, b in itertools.pairwise((0, *cuts, n_groups)))
        if inside and cuts not in tried:
            try:
                tried[cuts] = plan(cuts)
            except PlanError as error:  # it does not fit into memory
                errors.append(error)
                return None
        return tried.get(cuts)

    for cuts in dict.fromkeys(starts):
        attempt(cuts)
    if not tried:
        raise errors[0]

    best = min(tried, key=lambda cuts: tried[cuts].prediction.step_s)
    chosen = tried[best]
    while work <= REFINE_WORK:
        near = [(*best[:i], best[i] + d, *best[i + 1 :]) for i in range(len(best)) for d in (-1, 1)]
        found = [(p.prediction.step_s, cuts) for cuts in near if (p := attempt(cuts)) is not None]
        if not found or min(found)[0] >= chosen.prediction.step_s * (1 - 1e-9):
            break
        best = min(found)[1]
        chosen = tried[best]
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
    cuts = cut_indices(layout, group_names)
    schedule = _order(layout, n_micro or numerics.micro_batches, train)
    check(schedule)
    program = lower(schedule, stage_ties(ties, cuts), numerics.tied, layout.receive_window, train)
    prove(program)
    return program


def _order(layout: Layout, n_micro: int, train: bool) -> Schedule:
    """Its schedule, on its ranks."""
    if not train and layout.n_ranks < layout.n_stages:
        return forward_only(layout.n_stages, n_micro, layout.order)
    check_name(layout.schedule)
    if not train:
        return on_ranks(forward_only(layout.n_stages, n_micro), layout.order)
    return on_ranks(build(layout.schedule, layout.n_stages, n_micro, layout.n_ranks), layout.order)


def predict(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str], bound_s: float | None = None
) -> tuple[Prediction, Timeline]:
    """What `program` will take. bound_s: `step_bound_s`, where it is known already, as it is the same for
    every cut. Raises PlanError if a rank's memory is too small for it."""
    prediction, timeline = expect(costs, layout, program, group_names, bound_s)
    _check_memory(timeline, costs.cluster)
    return prediction, timeline


def least_step_s(costs: Costs, program: Program) -> float:
    """No cut, and no order of ranks, makes a step of such a program shorter."""
    n_ranks = len(program.codes)
    bound = any_order_bound_s if is_plain(program) else work_bound_s
    return bound(costs, program.n_micro, n_ranks, norm_seconds(costs.cluster, n_ranks))


def expect(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str], bound_s: float | None = None
) -> tuple[Prediction, Timeline]:
    """As `predict`, whether the memory is there or not."""
    cuts = cut_indices(layout, group_names)
    norm_s = norm_seconds(costs.cluster, layout.n_ranks)
    ties = stage_ties(costs.ties, cuts)
    stages = stage_costs(in_order(costs, layout.order), cuts, layout.recompute)
    timeline = simulate(program, stages, costs.cluster.loaded(layout.order), norm_s, ties)
    bound = least_step_s(costs, program) if bound_s is None else bound_s
    step = timeline.makespan_s
    bases = [device.base_bytes for device in costs.cluster.devices]
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


def sizes_of_messages(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str]
) -> tuple[Int64, ...]:
    """Bytes of each message instruction, 0 for the others: per rank an array (n,)."""
    cuts = cut_indices(layout, group_names)
    stages = stage_costs(in_order(costs, layout.order), cuts)
    return message_bytes(program, stages, stage_ties(costs.ties, cuts))


def cut_indices(layout: Layout, group_names: Sequence[str]) -> tuple[int, ...]:
    """Index of the first group of stages 1 .. S-1. Raises PlanError for a name that is no group,
    cuts out of order, or as `check_order` does."""
    check_order(layout)
    place = {name: index for index, name in enumerate(group_names)}
    for name in layout.cuts:
        if name not in place:
            near = difflib.get_close_matches(name, group_names, n=1) or list(group_names[:1])
            raise PlanError(
                f"layout.cuts names {name!r}, which is no group of this model; did you mean {near[0]!r}?"
            )
    cuts = tuple(place[name] for name in layout.cuts)
    bounds(len(group_names), cuts)
    return cuts


def check_order(layout: Layout) -> None:
    """Raises PlanError for stages of which each is not on one rank, or ranks that are not 0, 1, ..."""
    n_stages = len(layout.cuts) + 1
    if layout.n_stages != n_stages:
        raise PlanError(
            f"{n_stages} stages by layout.cuts, but layout.ranks has {layout.n_stages}; "
            "make them fit each other"
        )
    if len(layout.recompute) not in (0, n_stages):
        raise PlanError(
            f"{n_stages} stages by layout.cuts, but layout.recompute has {len(layout.recompute)}; give a "
            "mode for each, or none at all"
        )
    if {len(on) for on in layout.ranks} != {1} or {*layout.order} != {*range(layout.n_ranks)}:
        raise PlanError(
            f"layout.ranks is {[list(on) for on in layout.ranks]}; each of the ranks 0 to "
            f"{layout.n_ranks - 1} must hold a stage, and each stage be on one rank: [[0], [1], ...], in any "
            "order"
        )


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


def _check_memory(timeline: Timeline, cluster: Cluster) -> None:
    """Shows where in the order it is too much first."""
    peaks = timeline.peak_bytes
    full = too_full(peaks, cluster)
    if full is not None:
        rank, short = full
        has = cluster.devices[rank].memory_bytes
        actions = [codes[codes[:, 0] <= Op.W] for codes in timeline.program.codes]
        over = int(np.argmax(timeline.memory_bytes[rank] > has))
        before = int((timeline.program.codes[rank][:over, 0] <= Op.W).sum())
        raise PlanError(
            f"rank {rank} needs {size_text(peaks[rank])} and has {size_text(has)}, {size_text(short)} short; "
            "let the planner choose the cuts, use smaller micro-batches, or more ranks\n"
            + grid([each[:, :3] for each in actions], {rank: before})
        )
