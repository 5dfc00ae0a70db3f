"""Draws of the costs: one walk for all of them gives what a simulation of each gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import made_costs, made_plan
from planner_cases import all_cuts, barely_fitting, problems, uniform

from mpipipe.planner import noise as module
from mpipipe.planner.many import Many
from mpipipe.planner.noise import ASSUMED_SPREAD, WORTH, drawn_costs, noise, shorter, spreads
from mpipipe.planner.search import make_plan, plan_of
from mpipipe.values import Costs, Layout, Numerics, Plan


def numerics(n_micro: int, tied: str = "per_use") -> Numerics:
    return replace(made_plan()[0].numerics, batch=n_micro, micro_batch=1, micro_batches=n_micro, tied=tied)


def planned(costs: Costs, n_stages: int, n_micro: int, schedule: str = "1f1b", tied: str = "per_use") -> Plan:
    return make_plan(costs, numerics(n_micro, tied), schedule, 3, n_stages)[0]


@settings(max_examples=15)
@given(problems("huge"), st.sampled_from(["1f1b", "gpipe"]), st.sampled_from(["per_use", "eager"]))
@pytest.mark.slow
def test_one_walk_is_as_many_simulations(problem, schedule: str, tied: str) -> None:
    costs, n_stages, n_micro = problem
    plan, names = planned(costs, n_stages, n_micro, schedule, tied), [g.name for g in costs.groups]
    factors = np.random.default_rng(1).uniform(0.5, 1.5, (3, len(names)))
    cuts = list(all_cuts(len(names), n_stages))[:5]
    steps_s = Many(plan, costs, factors).steps_s(cuts)
    for c, each in enumerate(cuts):
        layout = replace(plan.layout, cuts=tuple(names[cut] for cut in each))
        for d in range(3):
            simulated = plan_of(drawn_costs(costs, factors[d]), plan.numerics, layout)
            assert steps_s[c, d] == pytest.approx(simulated.prediction.step_s)


@settings(max_examples=8)
@given(problems("mixed"), st.sampled_from(["1f1b", "gpipe", "zb-planned"]))
@pytest.mark.slow
def test_only_cuts_that_fit_are_tried(problem, schedule: str) -> None:
    """As `predict` says, or more carefully: it counts the receives that follow each other in the program."""
    costs, n_stages, n_micro = problem
    endless = replace(
        costs.cluster, devices=tuple(replace(d, memory_bytes=2**62) for d in costs.cluster.devices)
    )
    plan = planned(replace(costs, cluster=endless), n_stages, n_micro, schedule)
    names = [g.name for g in costs.groups]
    found = Many(plan, costs, np.ones((1, len(names))))
    for cuts in all_cuts(len(names), n_stages):
        layout = replace(plan.layout, cuts=tuple(names[cut] for cut in cuts))
        if found.fits(cuts, range(n_stages)):
            plan_of(costs, plan.numerics, layout)  # raises if it does not fit


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.slow
def test_of_two_stages_all_cuts_are_held_against_the_plan(seed: int) -> None:
    """Three groups have two cuts: the draws are simulated one by one."""
    costs = replace(made_costs(2, 3), spread=0.5)
    plan, names = planned(costs, 2, 4), [g.name for g in costs.groups]
    found = noise(plan, costs, draws=20, seed=seed)
    assert found is not None
    factors = module._factors(costs.groups, spreads(costs)[0], 20, seed)
    other = replace(plan.layout, cuts=tuple({names[1], names[2]} - set(plan.layout.cuts)))
    steps = np.array([
        [plan_of(drawn_costs(costs, f), plan.numerics, layout).prediction.step_s for f in factors]
        for layout in (plan.layout, other)
    ])  # fmt: skip
    gains = np.maximum(0.0, 1 - steps[1] / steps[0])
    assert (found.cuts, found.draws, found.spread, found.widest, found.assumed) == (1, 20, 0.5, 0.5, False)
    assert found.step_s == pytest.approx((steps[0].min(), steps[0].max()))
    assert found.held == (gains <= WORTH).sum()
    assert found.gain == pytest.approx(gains.max())


def test_equal_groups_are_off_together_so_that_no_cut_is_better() -> None:
    costs = replace(uniform(12, 4), spread=0.2)
    plan = planned(costs, 4, 6)
    found = noise(plan, costs)
    assert found is not None
    assert (found.held, found.gain) == (found.draws, 0.0)
    low, high = found.step_s
    assert 0.8 * plan.prediction.step_s <= low < plan.prediction.step_s < high <= 1.2 * plan.prediction.step_s
    assert noise(plan, costs) == found != noise(plan, costs, seed=1)


def test_the_spread_of_a_group_comes_before_that_of_all_and_one_is_assumed_of_models() -> None:
    costs = made_costs(2, 4)
    first, *rest = costs.groups
    known = replace(costs, spread=0.2, groups=(replace(first, spread=0.4), *rest))
    assert spreads(known)[0].tolist() == [0.4, 0.2, 0.2, 0.2]
    modelled = replace(costs, spread=0.0, source="modelled")
    assert spreads(modelled)[0].tolist() == [ASSUMED_SPREAD] * 4
    assert spreads(modelled)[1]
    some = replace(modelled, groups=(replace(first, spread=0.4), *rest))
    assert (spreads(some)[0].tolist(), spreads(some)[1]) == ([0.4, *[ASSUMED_SPREAD] * 3], False)


def test_without_a_spread_or_with_too_much_to_walk_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = replace(made_costs(2, 4), spread=0.0)
    plan = planned(costs, 2, 4)
    assert noise(plan, costs) is None
    monkeypatch.setattr(module, "_MOST_INSTRUCTIONS", 10)
    assert noise(plan, replace(costs, spread=0.1)) is None


def test_one_rank_has_no_other_cut() -> None:
    costs = replace(uniform(4, 1), spread=0.1)
    found = noise(planned(costs, 1, 2), costs)
    assert found is not None
    assert (found.cuts, found.held, found.gain) == (0, found.draws, 0.0)


def test_predict_is_the_draw_in_which_nothing_is_off() -> None:
    plan, _ = made_plan(4, 6, 16)
    assert plan.costs is not None
    names = [g.name for g in plan.costs.groups]
    cuts = tuple(names.index(name) for name in plan.layout.cuts)
    found = Many(plan, plan.costs, np.ones((1, 16))).steps_s([cuts])
    assert found[0, 0] == pytest.approx(plan.prediction.step_s)


def test_a_plan_that_barely_fits_has_its_noise_too() -> None:
    costs, cuts = barely_fitting()
    layout = Layout(cuts, ((0,), (1,)), "1f1b", 8)
    found = noise(plan_of(costs, numerics(4), layout), costs, draws=3)
    assert found is not None
    assert (found.held, found.gain) == (3, 0.0), "nothing else fits"


@settings(max_examples=6)
@given(problems("huge"))
@pytest.mark.slow
def test_the_draws_in_which_one_plan_is_shorter_are_counted(problem) -> None:
    costs, n_stages, n_micro = problem
    costs = replace(costs, spread=0.3, source="measured")
    plan, names = planned(costs, n_stages, n_micro), [g.name for g in costs.groups]
    factors = module._factors(costs.groups, spreads(costs)[0], 5, 7)
    for cuts in list(all_cuts(len(names), n_stages))[:3]:
        layout = replace(plan.layout, cuts=tuple(names[cut] for cut in cuts))
        other = plan_of(costs, plan.numerics, layout)
        fewer = 0
        for each in factors:
            drawn = drawn_costs(costs, each)
            a, b = (plan_of(drawn, p.numerics, p.layout).prediction.step_s for p in (plan, other))
            fewer += a < b * (1 - WORTH)
        assert shorter(plan, other, costs, draws=5, seed=7) == (fewer, 5)
    assert shorter(plan, plan, costs, draws=5) == (0, 5)
    assert shorter(plan, plan, replace(costs, spread=0.0)) is None
