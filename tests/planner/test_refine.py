"""Costs from a measured step: what is measured is what is predicted then, and the plan follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import made_plan
from planner_cases import barely_fitting, problems

from mpipipe.errors import PlanError
from mpipipe.planner import make_plan, program_for, simulate, stage_costs
from mpipipe.planner.change import pays_off
from mpipipe.planner.copies import stages_in
from mpipipe.planner.mirrors import state_bytes
from mpipipe.planner.prediction import expect_plan, norm_seconds
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.refine import refine, refined_costs, stage_seconds
from mpipipe.planner.search import plan_of
from mpipipe.planner.stages import in_order, stage_ties
from mpipipe.values import Layout, Op, Plan, Recompute, Timeline

RATIO = st.floats(0.25, 4.0)
RATIOS = [(2.0, 3.0, 3.0, 1.0), (1.5, 2.0, 2.0, 1.0), (1.0, 0.5, 0.5, 1.0), (0.5, 4.0, 4.0, 1.0)]
ONES = [(1.0, 1.0, 1.0, 1.0)] * 4


def step(plan: Plan, ratios: list[tuple[float, ...]], split: float = 1.0) -> Timeline:
    """Simulated with F, I, W and STEP of each stage multiplied, and what halves take longer."""
    costs = plan.costs
    assert costs is not None
    names = [g.name for g in costs.groups]
    cuts = cut_indices(plan.layout, names)
    stages = [
        replace(
            s, fwd_s=s.fwd_s * f, bwd_input_s=s.bwd_input_s * i, bwd_weight_s=s.bwd_weight_s * w,
            step_s=s.step_s * u, split_s=s.split_s * split,
        )
        for s, (f, i, w, u) in zip(stages_in(costs, plan.layout, cuts), ratios, strict=False)
    ]  # fmt: skip
    program = program_for(plan.layout, plan.numerics, costs.ties, names)
    norm_s = norm_seconds(costs.cluster, plan.layout.n_ranks)
    return simulate(program, stages, costs.cluster, norm_s, stage_ties(costs.ties, cuts))


@settings(max_examples=20)
@given(problems("huge"), st.lists(st.tuples(RATIO, RATIO, RATIO), min_size=4, max_size=4))
@pytest.mark.slow
def test_the_refined_costs_predict_the_step_that_was_measured(problem, ratios) -> None:
    """Also with ties and with ranks of other speeds; a backward that is not split has one ratio."""
    costs, n_stages, n_micro = problem
    names = [g.name for g in costs.groups]
    numerics = replace(made_plan()[0].numerics, batch=n_micro, micro_batch=1, micro_batches=n_micro)
    plan = make_plan(costs, numerics, "1f1b", 3, n_stages)[0]
    measured = step(plan, [(f, b, b, u) for f, b, u in ratios])
    refined = refine(plan, measured)
    assert refined.ran.layout == plan.layout
    assert refined.ran.prediction.step_s == pytest.approx(measured.makespan_s)
    assert refined.plan == refined.ran or refined.plan.prediction.step_s < refined.ran.prediction.step_s
    assert refined.plan.numerics == plan.numerics
    assert refined.plan.costs is not None
    placed = in_order(refined.plan.costs, plan.layout.order)
    stages = stage_costs(placed, cut_indices(plan.layout, names))
    took = stage_seconds(measured)
    assert [s.fwd_s * n_micro for s in stages] == pytest.approx(took[Op.F].tolist())
    assert [s.step_s for s in stages] == pytest.approx(took[Op.STEP].tolist())
    assert all(g.update_s >= -1e-12 for g in refined.plan.costs.groups)
    kept = [(g.param_bytes, g.stash_bytes, g.act_bytes) for g in costs.groups]
    assert [(g.param_bytes, g.stash_bytes, g.act_bytes) for g in refined.plan.costs.groups] == kept


def test_a_step_of_ranks_that_share_cores_counts_that_once() -> None:
    made, _ = made_plan(4, 8, 12)
    assert made.costs is not None
    where = made.costs.cluster
    devices = tuple(replace(device, alone=2.0) for device in where.devices)
    crowded = made.costs.but(cluster=replace(where, devices=devices, node_of_rank=(0,) * 4))
    plan = plan_of(crowded, made.numerics, made.layout)
    measured = expect_plan(plan, crowded)[1]
    assert measured.makespan_s < 0.95 * made.prediction.step_s
    assert refine(plan, measured).ran.prediction.step_s == pytest.approx(measured.makespan_s, rel=0.15)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-planned", "v-planned"])
def test_backwards_in_two_are_refined_beside_those_in_one(schedule: str) -> None:
    """Of an order that follows from costs some stages do some in one, others in two."""
    plan = in_both(schedule)
    program = program_for(plan.layout, plan.numerics, (), [g.name for g in plan.costs.groups])  # type: ignore[union-attr]
    assert (Op.B in program.codes[0][:, 0]) == (schedule != "zb-h1")
    measured = step(plan, RATIOS)
    assert refine(plan, measured).ran.prediction.step_s == pytest.approx(measured.makespan_s)


def in_both(schedule: str) -> Plan:
    made, _ = made_plan(2, 8, 12)
    assert made.costs is not None
    groups = tuple(replace(g, split_s=0.1 * g.bwd_weight_s) for g in made.costs.groups)
    return make_plan(replace(made.costs, groups=groups), made.numerics, schedule, 3, 2)[0]


@pytest.mark.parametrize("split", [-10.0, -1.0, 0.0, 0.5, 30.0])
def test_a_backward_that_takes_longer_than_its_halves_counts_all_the_same(split: float) -> None:
    """However few are measured: their sum is kept, and no part is taken for nothing, which it would stay."""
    plan = in_both("zb-planned")
    measured = step(plan, RATIOS, split)
    took = stage_seconds(measured)
    assert ((took[Op.B] > 0.0) & (took[Op.I] > 0.0)).any(), "a stage has both"
    costs = refined_costs(plan.costs, plan.layout, measured)  # type: ignore[arg-type]
    expected = stage_seconds(step(plan_of(costs, plan.numerics, plan.layout), ONES))
    whole_s, expected_s = (of[Op.B] + of[Op.I] + of[Op.W] for of in (took, expected))
    assert expected_s == pytest.approx(whole_s)
    assert all(g.bwd_weight_s > 0.0 and g.split_s > 0.0 for g in costs.groups)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_made_again_takes_as_much_longer_as_the_forward(schedule: str, mode: Recompute) -> None:
    """Slow forwards with backwards as planned: of these less is left for what they do themselves."""
    plan, _ = made_plan(2, 4, 8)
    groups = tuple(
        replace(g, selective_share=0.25, bwd_input_s=0.008)
        for g in plan.costs.groups  # type: ignore[union-attr]
    )
    layout = replace(plan.layout, schedule=schedule, recompute=(mode, "none"))
    names = [g.name for g in groups]
    plan = plan_of(replace(plan.costs, groups=groups), plan.numerics, layout)  # type: ignore[type-var]
    measured = step(plan, [(2.0, 1.0, 1.0, 1.0)] * 2)
    assert refine(plan, measured).ran.prediction.step_s == pytest.approx(measured.makespan_s)
    refined = refined_costs(plan.costs, layout, measured)  # type: ignore[arg-type]
    stages = stage_costs(refined, cut_indices(layout, names), layout.recompute)
    took, back = stage_seconds(measured), (Op.B,) if schedule == "1f1b" else (Op.I, Op.W)
    assert [s.fwd_s * 4 for s in stages] == pytest.approx(took[Op.F].tolist())
    assert [(s.bwd_input_s + s.bwd_weight_s) * 4 for s in stages] == pytest.approx(
        sum(took[op] for op in back).tolist()
    )


def test_a_stage_that_was_slow_gives_groups_away() -> None:
    plan, _ = made_plan(2, 8, 12)
    measured = step(plan, [(3.0, 3.0, 3.0, 1.0), (1.0, 1.0, 1.0, 1.0)])
    refined = refine(plan, measured)
    names = [g.name for g in plan.costs.groups]  # type: ignore[union-attr]
    (before,), (after,) = (cut_indices(p.layout, names) for p in (plan, refined.plan))
    assert after < before
    assert refined.plan.prediction.step_s < 0.8 * refined.ran.prediction.step_s
    assert replace(refined.plan.layout, cuts=()) == replace(plan.layout, cuts=())


def test_what_was_predicted_well_changes_nothing() -> None:
    plan, timelines = made_plan(2, 8, 12)
    refined = refine(plan, timelines["predicted"])
    assert refined.plan.layout == plan.layout
    assert refined.plan.prediction.step_s == pytest.approx(plan.prediction.step_s)


def test_the_spread_is_that_of_the_micro_batches_of_a_stage() -> None:
    plan, timelines = made_plan(2, 5, 8)
    measured = timelines["predicted"]
    times = [t.copy() for t in measured.times]
    f = np.flatnonzero(measured.program.codes[0][:, 0] == Op.F)
    times[0][f, 1] = times[0][f, 0] + np.array([4.0, 5.0, 6.0, 9.0, 9.0])  # median 6, least 4
    b = np.flatnonzero(measured.program.codes[0][:, 0] == Op.B)
    times[0][b, 1] = times[0][b, 0] + np.array([6.0, 6.0, 6.0, 6.0, 7.0])
    costs = refined_costs(plan.costs, plan.layout, replace(measured, times=tuple(times)))  # type: ignore[arg-type]
    (cut,) = cut_indices(plan.layout, [g.name for g in costs.groups])
    assert [g.spread for g in costs.groups[:cut]] == pytest.approx([12 / 10 - 1] * cut)
    assert [g.spread for g in costs.groups[cut:]] == pytest.approx([0.0] * (8 - cut))
    assert sum(g.fwd_s for g in costs.groups[:cut]) == pytest.approx(33 / 5)


def test_what_cannot_be_a_measured_step_of_the_plan_is_refused() -> None:
    plan, timelines = made_plan()
    measured = timelines["measured"]
    with pytest.raises(PlanError, match="no costs to be refined"):
        refine(replace(plan, costs=None), measured)
    with pytest.raises(PlanError, match="another program"):
        refine(plan, made_plan(n_micro=6)[1]["measured"])
    with pytest.raises(PlanError, match="end before they begin"):
        refine(plan, replace(measured, times=tuple(-t for t in measured.times)))
    with pytest.raises(PlanError, match=r"measured F of stage 0 take 0 s, .* missing or torn"):
        refine(plan, replace(measured, times=tuple(0 * t for t in measured.times)))


def test_another_plan_pays_off_only_where_all_of_the_costs_say_so() -> None:
    plan, _ = made_plan()
    assert plan.costs is not None
    even, half = (replace(plan.layout, cuts=(f"blocks.{i}",)) for i in (4, 2))
    before, after = (plan_of(plan.costs, plan.numerics, layout) for layout in (half, even))
    stays, said = pays_off(before, after, [], 100, build_s=0.0)
    assert not stays
    assert f"{after.prediction.step_s:.3g} s; as it was, {before.prediction.step_s:.3g} s" in said
    less, none = (
        refined_costs(plan.costs, even, step(after, [(first,) * 4, (second,) * 4]))
        for first, second in ((1.0, 2.0), (3.0, 1.0))
    )
    assert not pays_off(before, after, [less], 100, build_s=0.0)[0]
    for parts in ([none], [less, none]):
        stays, said = pays_off(before, after, parts, 100, build_s=0.0)
        assert (stays, "whichever steps count" in said) == (True, True)
    gain_s = before.prediction.step_s - after.prediction.step_s
    assert not pays_off(before, after, [], 100, build_s=99 * gain_s)[0]
    assert "too few steps are left" in pays_off(before, after, [], 100, build_s=101 * gain_s)[1]
    assert pays_off(before, before, [], 100, build_s=0.0)[0]


@pytest.mark.parametrize("missing", [0, 1])
def test_another_plan_needs_room_for_what_is_there_until_it_stands(missing: int) -> None:
    plan, _ = made_plan()
    assert plan.costs is not None
    before, after = (replace(plan.layout, cuts=(f"blocks.{i}",)) for i in (2, 4))
    names = [g.name for g in plan.costs.groups]
    held = state_bytes(plan.costs, before, cut_indices(before, names))
    peaks = plan_of(plan.costs, plan.numerics, after).prediction.peak_bytes
    devices = [
        replace(device, memory_bytes=int(peak + has) - missing)
        for device, peak, has in zip(plan.costs.cluster.devices, peaks, held, strict=True)
    ]
    costs = replace(plan.costs, cluster=replace(plan.costs.cluster, devices=tuple(devices)))
    ran, better = (plan_of(plan.costs, plan.numerics, layout) for layout in (before, after))
    stays, said = pays_off(ran, replace(better, costs=costs), [], 100, build_s=0.0)
    assert (stays, "no room for what moves" in said) == (bool(missing), bool(missing))


def test_a_plan_that_barely_fits_stays_as_it_is():
    costs, cuts = barely_fitting()
    numerics = replace(made_plan()[0].numerics, batch=4, micro_batch=1, micro_batches=4)
    layout = Layout(cuts, ((0,), (1,)), "1f1b", 8)
    plan = plan_of(costs, numerics, layout)
    with pytest.raises(PlanError, match="cannot hold"):
        make_plan(costs, numerics, "1f1b", 8, 2)
    assert refine(plan, step(plan, [(1.0, 1.0, 1.0, 1.0)] * 2)).plan.layout == layout
