"""The whole path: a plan, its prediction, its bounds, and plans that do not fit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_cases import HUGE, all_cuts, cluster, problems, uniform

from mpipipe.errors import PlanError
from mpipipe.planner import (
    cut_indices,
    make_plan,
    partition,
    predict,
    program_for,
    simulate,
    stage_costs,
)
from mpipipe.planner.bounds import step_bound_s
from mpipipe.planner.schedules import PLAIN
from mpipipe.values import Costs, Layout, Link, Numerics, Op, Plan, from_json, to_json


def numerics(n_micro: int, tied: str = "per_use") -> Numerics:
    return Numerics(4 * n_micro, 4, n_micro, 1, 1, "torch", "mkl", "fp32", tied, {}, "2", "x", 0)


def names(costs: Costs) -> list[str]:
    return [g.name for g in costs.groups]


def planned(costs: Costs, n_ranks: int, n_micro: int, schedule: str = "1f1b", tied: str = "per_use"):
    return make_plan(costs, numerics(n_micro, tied), schedule, 4, n_ranks)


@pytest.mark.parametrize(
    ("schedule", "ranks", "groups", "moves"),
    [
        ("1f1b", 4, 3, "; start at most 3 ranks, or train a model of more layers"),
        ("zb-v", 2, 3, "; start at most 1 rank, or choose a schedule with one stage on each rank, or train"),
        ("zb-v", 1, 1, "; choose a schedule with one stage on each rank, or train a model of more layers"),
        ("zb-v", 4, 2, "; start at most 1 rank, or choose a .* on each rank, and at most 2 ranks, or"),
    ],
)
def test_more_stages_than_parts_of_the_model_are_refused_with_moves_that_help(schedule, ranks, groups, moves):
    with pytest.raises(PlanError, match=f"this model can be cut into {groups} part.*{moves}"):
        planned(uniform(groups, ranks), ranks, 8, schedule)


@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from(PLAIN), st.sampled_from(["per_use", "eager"]))
@pytest.mark.slow
def test_a_plan_is_within_memory_above_its_bound_and_comes_back_from_json(problem, schedule, tied):
    costs, n_stages, n_micro = problem
    try:
        partition(costs, n_micro, schedule, n_stages, 4, tied)
    except PlanError:
        assume(False)
    plan, program = planned(costs, n_stages, n_micro, schedule, tied)  # what fits there fits here
    predicted = plan.prediction
    assert predicted.lower_bound_s <= predicted.step_s * (1 + 1e-12)
    assert predicted.gap == pytest.approx(predicted.step_s / predicted.lower_bound_s - 1)
    assert all(p <= d.memory_bytes for p, d in zip(predicted.peak_bytes, costs.cluster.devices, strict=True))
    assert from_json(Plan, to_json(plan)) == plan
    again = program_for(plan.layout, plan.numerics, costs.ties, names(costs))
    assert again.hash == program.hash
    assert predict(costs, plan.layout, again)[0] == predicted


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(memory="huge", max_groups=6), st.sampled_from(PLAIN))
def test_no_cut_and_no_schedule_beats_the_bound(problem, schedule):
    costs, n_stages, n_micro = problem
    bound = step_bound_s(costs, n_micro, n_stages)
    for cuts in all_cuts(len(costs.groups), n_stages):
        layout = Layout(
            tuple(names(costs)[c] for c in cuts), tuple((r,) for r in range(n_stages)), schedule, 2
        )
        program = program_for(layout, numerics(n_micro), costs.ties, names(costs))
        step = simulate(program, stage_costs(costs, cuts), costs.cluster).makespan_s
        assert step >= bound * (1 - 1e-12)


@given(st.integers(1, 6), st.integers(1, 8))
@pytest.mark.slow
def test_a_balanced_pipeline_meets_its_bound(p, m):
    plan, _ = planned(uniform(p, p, param_bytes=8, step_s_per_byte=0.125), p, m)
    assert plan.prediction.gap == pytest.approx(0.0, abs=1e-12)
    assert plan.prediction.step_s == 3.0 * (m + p - 1) + 1.0
    assert plan.layout.cuts == tuple(f"g{s}" for s in range(1, p))


def test_the_norm_costs_a_latency_per_doubling():
    free = uniform(4, 4)
    slow = dataclasses.replace(free, cluster=cluster([1.0] * 4, [HUGE] * 4, Link(0.0, 1.0), Link(0.25, 1.0)))
    steps = [planned(costs, 4, 1)[0].prediction.step_s for costs in (free, slow)]
    assert steps[1] == steps[0] + 2 * 0.25


def test_evaluation_has_its_own_number_of_micro_batches():
    costs = uniform(4, 2)
    plan, _ = planned(costs, 2, 8)
    program = program_for(plan.layout, plan.numerics, (), names(costs), train=False, n_micro=3)
    ops = [i.op for rank in range(2) for i in program.instrs(rank)]
    assert ops.count(Op.F) == 6
    assert set(ops) == {Op.F, Op.SEND_ACT, Op.RECV_ACT}


def layout(cuts: tuple[str, ...], ranks=((0,), (1,)), schedule: str = "1f1b") -> Layout:
    return Layout(cuts, ranks, schedule, 4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (layout(("g9",)), "'g9', which is no group of this model; did you mean 'g"),
        (layout(("g0",)), "stage 0 is empty"),
        (layout(("g2", "g1"), ((0,), (1,), (2,))), "stage 1 is empty"),
        (layout(("g1",), ((1,), (2,))), r"layout.ranks is \[\[1\], \[2\]\]; each of the ranks 0 to 1"),
        (layout(("g1", "g2")), "3 stages by layout.cuts, but layout.ranks has 2"),
        (layout(("g1",), ((0, 1), (2,))), "2 replicas with pipeline.blocks = 1"),
        (layout(("g1",), schedule="2f2b"), "'2f2b' is not known"),
    ],
)
def test_a_given_plan_that_does_not_fit_is_refused(wrong, words):
    with pytest.raises(PlanError, match=words):
        program_for(wrong, numerics(2), (), ["g0", "g1", "g2", "g3"])


def test_a_given_plan_that_needs_too_much_memory_is_refused():
    costs = dataclasses.replace(uniform(4, 2, param_bytes=10), cluster=cluster([1.0] * 2, [100, 100]))
    program = program_for(layout(("g3",)), numerics(2), (), names(costs))
    with pytest.raises(PlanError, match="rank 0 needs 120 bytes and has 100 bytes, 20 bytes short"):
        predict(costs, layout(("g3",)), program)


def test_cuts_are_found_by_name():
    assert cut_indices(layout(("b",)), ["a", "b", "c"]) == (1,)


def test_a_plan_does_not_depend_on_the_run():
    costs = uniform(12, 4, param_bytes=3)
    hashes = {planned(costs, 4, 8)[1].hash for _ in range(3)}
    assert len(hashes) == 1
    assert all(a.hash != b.hash for a, b in itertools.combinations(
        [planned(costs, n, 8)[0] for n in (2, 3, 4)], 2))  # fmt: skip
