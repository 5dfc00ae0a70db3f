"""What would make a step shorter: the plan's own costs, simulated under one change at a time.

Every figure is a prediction against a prediction, so what the costs leave out cancels in part; it is no
promise. Where a change moves the best cuts, the step is planned anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.copies import loaded, replicas_text, shape_of, stages_in
from mpipipe.planner.more_copies import more_copies
from mpipipe.planner.prediction import norm_seconds
from mpipipe.planner.programs import cut_indices, program_for
from mpipipe.planner.recompute import wish_of
from mpipipe.planner.schedules import SCHEDULES
from mpipipe.planner.search import make_plan, plan_of
from mpipipe.planner.simulate import simulate
from mpipipe.planner.stages import stage_ties
from mpipipe.values import (
    OF_SAMPLES_BYTES,
    OF_SAMPLES_S,
    Cluster,
    Costs,
    Link,
    Numerics,
    Plan,
    StageCost,
    Value,
)

LEAST_SHARE = 0.001  # of the step: what is saved below it is not worth a line


@dataclass(frozen=True)
class WhatIf(Value):
    change: str
    how: str  # the key to set, or why it is a bound
    step_s: float  # predicted
    saved_s: float  # of the step that is predicted as it is

    @property
    def share(self) -> float:
        return self.saved_s / (self.step_s + self.saved_s)


def what_if(plan: Plan) -> tuple[WhatIf, ...]:
    """The changes that help, the most helpful first. Raises PlanError if the plan holds no costs, or has a
    schedule that is not known here."""
    if (costs := plan.costs) is None:
        raise PlanError("the plan holds no costs; make it anew with this version of mpipipe")
    plan = plan_of(costs, plan.numerics, plan.layout)
    now_s = plan.prediction.step_s
    found = []
    for change, how, step in _changes(plan, costs):
        try:
            step_s = step()
        except (PlanError, DeadlockError):  # it does not fit: into memory, or into the groups there are
            continue
        if now_s - step_s > LEAST_SHARE * now_s:
            found.append(WhatIf(change, how, step_s, now_s - step_s))
    return tuple(sorted(found, key=lambda w: w.step_s))


def _changes(plan: Plan, costs: Costs) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """What is changed, how it is done, and the function that simulates the step."""
    numerics, layout, n, copies = plan.numerics, plan.layout, plan.layout.n_ranks, shape_of(plan.layout)

    def planned(
        costs: Costs, numerics: Numerics = numerics, schedule: str = layout.schedule, n: int = n
    ) -> float:
        window, wish = layout.receive_window, wish_of(layout)
        made, _ = make_plan(costs, numerics, schedule, window, n, copies, wish)
        return made.prediction.step_s

    finer = _finer(numerics)
    if finer is not None:
        yield (
            f"{finer.micro_batches} micro-batches instead of {numerics.micro_batches}",
            f"pipeline.micro_batches={finer.micro_batches}; changes the bits, and half of a "
            "micro-batch is taken to need half of the time",
            lambda: planned(_halved(costs), finer),
        )
    for schedule in sorted(SCHEDULES):
        if schedule != layout.schedule:
            yield (
                f"the schedule {schedule} instead of {layout.schedule}",
                f"pipeline.schedule={schedule}",
                partial(planned, costs, schedule=schedule),
            )
    if found := more_copies(plan, costs, wish_of(layout)):
        other = f" by {found.schedule}" if found.schedule != layout.schedule else ""
        made = found.prediction.step_s
        yield (
            f"{replicas_text(found.copies)}{other} instead of {replicas_text(copies)}",
            f"of a new run, with {found.how}",
            lambda: made,
        )
    if n > 1:
        yield ("free links", "a bound: no network is", lambda: planned(_free(costs)))
    if isinstance(copies, tuple):  # other ranks need other copies
        return
    if n > 1:
        yield ("stages of equal work", "a bound: groups cannot be cut", lambda: _balanced_s(plan, costs))
    if n > copies:
        less = "one rank less" + " for each replica" * (copies > 1)
        yield (less, f"mpirun -n {n - copies}", lambda: planned(costs, n=n - copies))
    if n < len(costs.groups) * copies and costs.cluster.links:  # a single rank has measured none
        more, how = costs.but(cluster=_with_more(costs.cluster, copies)), f"mpirun -n {n + copies}"
        yield (
            f"one more rank{' for each replica,' * (copies > 1)} like the last",
            f"{how}, if it has cores of its own",
            lambda: planned(more, n=n + copies),
        )


def _finer(numerics: Numerics) -> Numerics | None:
    """Twice the micro-batches; None where a sample cannot be halved."""
    count = 2 * numerics.micro_batches
    if count > numerics.batch:
        return None
    return replace(numerics, micro_batches=count, micro_batch=math.ceil(numerics.batch / count))


def _halved(costs: Costs) -> Costs:
    """Of micro-batches of half as many samples; parameters stay."""
    groups = tuple(
        replace(
            g,
            **{name: getattr(g, name) / 2 for name in OF_SAMPLES_S},
            **{name: getattr(g, name) // 2 for name in OF_SAMPLES_BYTES},
            act_parts=tuple(nbytes // 2 for nbytes in g.act_parts),
            grad_parts=tuple(nbytes // 2 for nbytes in g.grad_parts),
        )
        for g in costs.groups
    )
    return replace(costs, groups=groups)


def _free(costs: Costs) -> Costs:
    links = dict.fromkeys(costs.cluster.links, Link(0.0, math.inf))
    return costs.but(cluster=replace(costs.cluster, links=links))


def _with_more(cluster: Cluster, more: int) -> Cluster:
    ranks = range(len(cluster.devices))
    return cluster.in_order((*ranks, *more * (ranks[-1],)))


def _balanced_s(plan: Plan, costs: Costs) -> float:
    """Of the plan as it is, but for the work, which every rank has the same share of by its speed."""
    names, n = costs.names, plan.layout.n_ranks
    cuts = cut_indices(plan.layout, names)
    stages = stages_in(costs, plan.layout, cuts)
    speeds = [costs.cluster.devices[rank].speed for order in plan.layout.copies for rank in order]

    def even(seconds: Callable[[StageCost], float]) -> float:
        return sum(seconds(s) * speed for s, speed in zip(stages, speeds, strict=True)) / sum(speeds)

    program = program_for(plan.layout, plan.numerics, costs.ties, names)
    equal = [
        replace(
            stage,
            fwd_s=even(lambda s: s.fwd_s),
            bwd_input_s=even(lambda s: s.bwd_input_s),
            bwd_weight_s=even(lambda s: s.bwd_weight_s),
            step_s=even(lambda s: s.step_s),
            split_s=even(lambda s: s.split_s),
        )
        for stage in stages
    ]
    norm_s = norm_seconds(costs.cluster, n)
    links = loaded(costs.cluster, plan.layout)
    return simulate(program, equal, links, norm_s, stage_ties(costs.ties, cuts)).makespan_s
