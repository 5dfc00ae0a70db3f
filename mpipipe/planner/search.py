"""The plan: cuts, schedule, program and what they are predicted to cost, by one path.

    Costs -> partition -> Layout -> program_for (schedule, check, lower, prove) -> predict -> Plan

A plan that is given (resume, `--plan`) enters at `program_for`. The cuts are the exact minimum of
the bottleneck; that this is also the shortest step is not claimed, `gap` bounds what is missing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from mpipipe.errors import PlanError
from mpipipe.planner.bounds import step_bound_s
from mpipipe.planner.lower import lower
from mpipipe.planner.partition import partition
from mpipipe.planner.prove import prove
from mpipipe.planner.schedules import SCHEDULES, check, forward_only
from mpipipe.planner.simulate import simulate
from mpipipe.planner.stages import bounds, stage_costs, stage_ties
from mpipipe.values import Cluster, Costs, Layout, Numerics, Plan, Prediction, Program, Tie, Timeline


def make_plan(
    costs: Costs,
    numerics: Numerics,
    schedule: str,
    receive_window: int,
    group_names: Sequence[str],
    n_ranks: int,
) -> tuple[Plan, Program]:
    """Plan `n_ranks` stages, one per rank. Raises PlanError if no cut fits (see `partition`)."""
    found = partition(costs, numerics.micro_batches, schedule, n_ranks, receive_window, numerics.tied)
    layout = Layout(
        cuts=tuple(group_names[cut] for cut in found.cuts),
        ranks=tuple((rank,) for rank in range(n_ranks)),
        schedule=schedule,
        receive_window=receive_window,
    )
    program = program_for(layout, numerics, costs.ties, group_names)
    prediction, _ = predict(costs, layout, program, group_names)
    return Plan(numerics, layout, prediction), program


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
    if layout.schedule not in SCHEDULES:
        raise PlanError(f"schedule {layout.schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
    build = SCHEDULES[layout.schedule] if train else forward_only
    schedule = build(layout.n_stages, n_micro or numerics.micro_batches)
    check(schedule)
    program = lower(schedule, stage_ties(ties, cuts), numerics.tied, layout.receive_window, train)
    prove(program)
    return program


def predict(
    costs: Costs, layout: Layout, program: Program, group_names: Sequence[str]
) -> tuple[Prediction, Timeline]:
    """What `program` will take. Raises PlanError if a rank's memory is too small for it."""
    cuts = cut_indices(layout, group_names)
    norm_s = norm_seconds(costs.cluster, layout.n_stages)
    ties = stage_ties(costs.ties, cuts)
    timeline = simulate(program, stage_costs(costs, cuts), costs.cluster, norm_s, ties)
    bound = step_bound_s(costs, program.n_micro, layout.n_stages, norm_s)
    step = timeline.makespan_s
    base = [device.base_bytes for device in costs.cluster.devices]
    peaks = tuple(peak + own for peak, own in zip(timeline.peak_bytes, base, strict=True))
    _check_memory(peaks, costs.cluster)
    prediction = Prediction(
        step_s=step,
        bubble=timeline.bubble,
        bubble_rank=timeline.bubble_rank,
        peak_bytes=peaks,
        lower_bound_s=bound,
        gap=step / bound - 1.0 if bound else 0.0,
    )
    return prediction, timeline


def cut_indices(layout: Layout, group_names: Sequence[str]) -> tuple[int, ...]:
    """Index of the first group of stages 1 .. S-1. Raises PlanError for a name that is no group,
    cuts out of order, or stages that are not on ranks 0 .. S-1 in order."""
    if layout.ranks != tuple((rank,) for rank in range(len(layout.cuts) + 1)):
        raise PlanError(
            f"layout.ranks is {layout.ranks} for {len(layout.cuts) + 1} stages; "
            "stage s must be on rank s alone: ((0,), (1,), ...)"
        )
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


def norm_seconds(cluster: Cluster, n_ranks: int) -> float:
    """Of the norm's collective, a few bytes per parameter: one slow latency per doubling."""
    links = [cluster.link(rank, rank + 1) for rank in range(n_ranks - 1)]
    return math.ceil(math.log2(n_ranks)) * max((link.latency_s for link in links), default=0.0)


def _check_memory(peaks: Sequence[int], cluster: Cluster) -> None:
    for rank, peak in enumerate(peaks):
        has = cluster.devices[rank].memory_bytes
        if peak > has:
            raise PlanError(
                f"rank {rank} needs {peak} bytes and has {has}, {peak - has} short; "
                "let the planner choose the cuts, use smaller micro-batches, or more ranks"
            )
