"""Costs as a run has shown them, and the plan that follows: profile-guided, one run late.

A rank that was known to be slow and is not has the speed of the others again. Of each stage and kind of
work, the seconds of its groups are multiplied by measured / planned then, so that their sums are what was
measured; how the seconds of a stage are shared among its groups is kept. Links are kept too, and memory. What
changes is the `Layout`: the bits of a run stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.copies import shape_of, stages_in
from mpipipe.planner.crowded import uncrowded
from mpipipe.planner.mirrors import with_mirrors
from mpipipe.planner.noise import WORTH
from mpipipe.planner.prediction import expect_plan
from mpipipe.planner.programs import cut_indices, program_for
from mpipipe.planner.recompute import wish_of
from mpipipe.planner.search import make_plan, plan_of
from mpipipe.planner.speeds import busy_s, with_recovered_ranks
from mpipipe.planner.stages import bounds, in_order, remade_s, without_remade_s
from mpipipe.values import (
    COMPUTE,
    Costs,
    Float64,
    GroupCost,
    Layout,
    Op,
    Plan,
    Program,
    StageCost,
    Timeline,
    Value,
)

_BACK = (Op.B, Op.I, Op.W)
_LEAST = 0.1  # of what was planned, made longer as all of W
Seconds = dict[Op, Float64]


@dataclass(frozen=True)
class Refined(Value):
    """Both on the refined costs: `ran` is the layout of the run, `plan` a better one, or the same where what
    is found gains less than `WORTH`."""

    ran: Plan
    plan: Plan


def refine(plan: Plan, measured: Timeline) -> Refined:
    """Plans anew from the measured step of a run of `plan`.

    Raises PlanError where the plan holds no costs, the step is of another program, or its spans cannot be.
    """
    if plan.costs is None:
        raise PlanError("the plan holds no costs to be refined; run again with this version of mpipipe")
    program = program_for(plan.layout, plan.numerics, plan.costs.ties, plan.costs.names)
    if program.hash != measured.program.hash:
        raise PlanError(
            "the measured step is that of another program than the plan's; refine the run as it was"
        )
    if any((times[:, 1] < times[:, 0]).any() for times in measured.times):
        raise PlanError("the measured step has spans that end before they begin; run again to measure anew")
    costs = with_recovered_ranks(plan.costs, busy_s(measured), busy_s(expect_plan(plan, plan.costs)[1]))
    costs = uncrowded(refined_costs(costs, plan.layout, measured))  # what it took while others waited
    ran = plan_of(costs, plan.numerics, plan.layout)
    layout = plan.layout
    try:
        best, _ = make_plan(
            costs, plan.numerics, layout.schedule, layout.receive_window, layout.n_ranks,
            shape_of(layout), wish_of(layout),
        )  # fmt: skip
        if layout.mirror_every:
            best, _ = with_mirrors(best, costs, layout.mirror_every)
    except PlanError:  # by the memory of `partition`, which is a little above what is simulated
        return Refined(ran, ran)
    worth = best.prediction.step_s < ran.prediction.step_s * (1.0 - WORTH)
    return Refined(ran, best if worth else ran)


def refined_costs(costs: Costs, layout: Layout, measured: Timeline) -> Costs:
    """Costs whose stages take what was measured. spread: of the micro-batches of each stage, median over
    least. Raises PlanError where spans are missing or cannot be."""
    cuts = cut_indices(layout, costs.names)
    placed = in_order(costs, layout.order)
    stages = stages_in(costs, layout, cuts)
    counts = _sums(measured.program, [np.ones(len(times)) for times in measured.times])
    ratios, whole = _ratios(stages, measured, counts), _whole(counts, layout.n_stages)
    rate = float(ratios[Op.STEP].min())  # of the update of a byte; what a stage has beyond goes to its groups
    groups = list[GroupCost]()
    for s, (first, end) in enumerate(bounds(len(costs.groups), cuts)):
        speed, spread = placed.cluster.devices[s].speed, _spread(measured, s)
        mine = costs.groups[first:end]
        of_stage = {op: float(found[s]) for op, found in ratios.items() if np.isfinite(found[s])}
        again_s = float(remade_s(costs.columns, layout.modes[s])[first:end].sum())
        into, weight, split = _backward(mine, again_s, of_stage, whole[s])
        whole_s = sum(stage.step_s for stage in stages[s :: layout.n_stages]) * speed
        planned_s = whole_s - sum(g.update_s for g in mine)  # of the bytes alone
        beyond_s = (ratios[Op.STEP][s] - rate) * planned_s
        groups += [
            replace(
                g,
                fwd_s=g.fwd_s * of_stage[Op.F],
                bwd_input_s=g.bwd_input_s * into,
                bwd_weight_s=g.bwd_weight_s * weight,
                split_s=g.split_s * split,
                update_s=g.update_s * ratios[Op.STEP][s] + beyond_s * share,
                spread=spread,
            )
            for g, share in zip(mine, _shares(mine), strict=True)
        ]
    return replace(
        costs,
        groups=tuple(groups),
        step_s_per_byte=costs.step_s_per_byte * rate,
        source="measured",
        spread=float(np.median([g.spread for g in groups])),
    )


def stage_seconds(timeline: Timeline) -> Seconds:
    """Of a whole step, by kind of work that there is: seconds of each stage, (stages,)."""
    return _sums(timeline.program, [times[:, 1] - times[:, 0] for times in timeline.times])


def _sums(program: Program, values: Sequence[Float64]) -> Seconds:
    """values: by rank, (instructions,)."""
    found: Seconds = {}
    for codes, each in zip(program.codes, values, strict=True):
        for op in COMPUTE & {Op(code) for code in np.unique(codes[:, 0]).tolist()}:
            mine = codes[:, 0] == op
            here = np.bincount(codes[mine, 1], each[mine], minlength=program.n_stages)
            found[op] = found.get(op, np.zeros(program.n_stages)) + here
    return found


def _ratios(stages: Sequence[StageCost], measured: Timeline, counts: Seconds) -> Seconds:
    """measured / planned of each kind of work that there is, (stages,); NaN where a stage has none of it.
    stages: as `stages_in` gives them. counts: of each kind of work, by stage."""
    took = stage_seconds(measured)
    copies, call_s = len(measured.program.copies), np.array([s.call_s for s in stages])
    call_s = call_s.reshape(copies, -1).mean(axis=0)
    planned = {
        Op.F: [s.fwd_s for s in stages], Op.B: [s.bwd_input_s + s.bwd_weight_s for s in stages],
        Op.I: [s.bwd_input_s for s in stages], Op.W: [s.bwd_weight_s + s.split_s for s in stages],
        Op.STEP: [s.step_s for s in stages],
    }  # fmt: skip
    shares = [len(measured.program.share(copy)) for copy in range(copies)]
    of_stage = {
        op: np.average(np.reshape(seconds, (copies, -1)), 0, None if op == Op.STEP else shares)
        for op, seconds in planned.items()
    }
    ratios: Seconds = {}
    for op, seconds in took.items():
        expected = counts[op] * of_stage[op]
        if op != Op.STEP:  # what a call takes is counted apart
            own_s = np.maximum(seconds - counts[op] * call_s, 0.1 * seconds)
            seconds = np.where(expected > 0.0, own_s, seconds)
        for stage in np.flatnonzero((counts[op] > 0) & ~(seconds > 0.0) & (expected > 0.0)).tolist():
            raise PlanError(
                f"the measured {op.name} of stage {stage} take {seconds[stage]:g} s, planned are "
                f"{expected[stage]:g} s: spans of the run are missing or torn; run again to measure anew"
            )
        found = np.divide(seconds, expected, out=np.ones(len(expected)), where=expected > 0.0)
        ratios[op] = np.where(counts[op] > 0, found, np.nan)
    if Op.F not in ratios or not ratios.keys() & set(_BACK) or Op.STEP not in ratios:
        raise PlanError("the measured step has no forward, backward and update; run again to measure one")
    return ratios


def _whole(counts: Seconds, n_stages: int) -> Float64:
    """Which part of the backwards of each stage are one, (stages,). counts: as of `_ratios`."""
    none = np.zeros(n_stages)
    whole, in_two = counts.get(Op.B, none), counts.get(Op.I, none)
    return np.divide(whole, whole + in_two, out=np.zeros(n_stages), where=whole + in_two > 0)


def _backward(
    groups: Sequence[GroupCost], again_s: float, ratios: Mapping[Op, float], whole: float
) -> tuple[float, float, float]:
    """Of a stage, by what the seconds of I and W of its groups are multiplied, and what two halves take
    longer; alike where all of its backwards are one, or the last two where none is. ratios: of the kinds of
    work that the stage has. again_s: planned of a forward that is made again, which takes as much longer as
    the forward. whole: the part of its backwards that are one."""
    into_s, weight_s = sum(g.bwd_input_s for g in groups), sum(g.bwd_weight_s for g in groups)
    split_s = sum(g.split_s for g in groups)

    def took_s(kind: Op, own_s: float) -> float:
        return without_remade_s(ratios[kind] * (own_s + again_s), ratios[Op.F] * again_s)

    if Op.I not in ratios:
        of_all = took_s(Op.B, into_s + weight_s) / (into_s + weight_s or 1.0)
        return of_all, of_all, of_all
    into, late = took_s(Op.I, into_s) / (into_s or 1.0), ratios[Op.W]
    if Op.B not in ratios:
        return into, late, late
    # Of W what a whole backward takes beside I; the rest is what halves take longer. Neither is taken for
    # nothing, as few are measured, but all together take what they took.
    both_s, whole_s = late * (weight_s + split_s), took_s(Op.B, into_s + weight_s)
    least_s, most_s = _LEAST * late * weight_s, both_s - _LEAST * late * split_s
    own_s = min(max(whole_s - into * into_s, least_s), most_s) if split_s and weight_s else late * weight_s
    planned_s = into * into_s + whole * own_s + (1.0 - whole) * both_s
    of_all = (whole * whole_s + (1.0 - whole) * (into * into_s + both_s)) / (planned_s or 1.0)
    split = (both_s - own_s) / (split_s or 1.0)
    return of_all * into, of_all * own_s / (weight_s or 1.0), of_all * split


def _spread(measured: Timeline, stage: int) -> float:
    """Of a micro-batch on a stage: the sum of the medians of its kinds over that of the least, less 1."""
    typical_s, least_s = 0.0, 0.0
    for codes, times in zip(measured.program.codes, measured.times, strict=True):
        for op in (Op.F, *_BACK):
            took = (times[:, 1] - times[:, 0])[(codes[:, 0] == op) & (codes[:, 1] == stage)]
            if len(took):
                typical_s, least_s = typical_s + float(np.median(took)), least_s + float(took.min())
    return max(0.0, typical_s / least_s - 1.0) if least_s > 0.0 else 0.0


def _shares(groups: Sequence[GroupCost]) -> list[float]:
    """Of the bytes of a stage's weights; equal ones where it has none."""
    total = sum(g.param_bytes for g in groups)
    return [g.param_bytes / total if total else 1.0 / len(groups) for g in groups]
