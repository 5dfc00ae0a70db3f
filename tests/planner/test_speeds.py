"""Which ranks are slow by themselves, and that plans follow from it."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
from made_run import made_plan

from mpipipe.planner import make_plan, speeds
from mpipipe.planner.prediction import expect_plan
from mpipipe.planner.refine import refine
from mpipipe.planner.search import plan_of
from mpipipe.planner.speeds import with_speeds
from mpipipe.values import Costs


def costs_of(*speeds: float, kinds: str = "", **changes: object) -> Costs:
    made = made_plan(len(speeds), 8, 24)[0].costs
    assert made is not None
    like = made.cluster.devices[0]
    kinds = kinds or "a" * len(speeds)
    devices = tuple(replace(like, speed=s, kind=k, **changes) for s, k in zip(speeds, kinds, strict=True))  # type: ignore[arg-type]
    return replace(made, source="measured", cluster=replace(made.cluster, devices=devices))


def found(costs: Costs, *took_s: float) -> list[float]:
    """Speeds by what ranks took that were planned to take a second each."""
    return [d.speed for d in with_speeds(costs, took_s, [1.0] * len(took_s)).cluster.devices]


def test_the_slow_one_is_as_slow_as_it_was_beside_the_others() -> None:
    assert found(costs_of(1, 1, 1, 1), 1.0, 1.1, 3.0, 1.2) == pytest.approx([1, 1, 1.1 / 3.0, 1])
    assert found(costs_of(1, 1), 1.5, 1.0) == pytest.approx([1 / 1.5, 1])


def test_all_slower_than_planned_is_no_matter_of_a_rank() -> None:
    for took in ((1.0, 1.2, 1.0), (2.0, 2.0, 2.0), (1.0, 1.0, 0.8)):
        assert found(costs_of(1, 1, 1), *took) == [1, 1, 1]


def test_one_that_was_slow_is_not_when_it_is_not() -> None:
    assert found(costs_of(1, 0.5, 1), 1.0, 0.5, 1.0) == [1, 1, 1]
    assert found(costs_of(1, 0.5, 1), 1.0, 1.0, 1.0) == [1, 0.5, 1]
    assert found(costs_of(1, 0.5, 1), 1.0, 2.0, 1.0) == [1, 0.25, 1]


def test_another_kind_has_its_own_speed() -> None:
    assert found(costs_of(4, 1, 1, kinds="abb"), 1.0, 1.0, 1.0) == [4, 1, 1]
    assert found(costs_of(4, 1, 1, kinds="abb"), 1.0, 2.0, 1.0) == [4, 0.5, 1]
    assert found(costs_of(1, 0.9, 1), 1.0, 1.0, 1.0) == [1, 0.9, 1], "a cluster's file says so"


@pytest.mark.parametrize(
    ("costs", "took"),
    [
        (replace(costs_of(1, 1), source="modelled"), (2.0, 1.0)),
        (costs_of(1, 1, alone=2.0), (2.0, 1.0)),
        (costs_of(1, 1), (2.0, 0.001)),
    ],
    ids=["modelled", "shared cores", "nothing"],
)
def test_where_nothing_can_be_told_all_stays(costs: Costs, took: tuple[float, float]) -> None:
    assert with_speeds(costs, took, [1.0, 1.0]) is costs


@pytest.mark.parametrize("schedule", ["1f1b", "v-planned"])
@pytest.mark.parametrize("rank", [0, 3])
def test_one_refinement_plans_around_a_slow_rank(schedule: str, rank: int) -> None:
    """As well as where its speed was known, though the next plan puts other groups on it; and again, when it
    is as fast as the others."""
    calm, made = costs_of(1, 1, 1, 1), made_plan(4, 8, 24)[0]
    slow = calm.but(cluster=calm.cluster.slowed({rank: 1.5}))

    def searched(costs: Costs) -> float:
        return make_plan(costs, made.numerics, schedule, 3, 4)[0].prediction.step_s

    plan = make_plan(calm, made.numerics, schedule, 3, 4)[0]
    around = refine(plan, expect_plan(plan, slow)[1]).plan
    assert expect_plan(around, slow)[0].step_s == pytest.approx(around.prediction.step_s)
    assert around.prediction.step_s <= 1.01 * searched(slow)
    assert around.prediction.step_s < 0.95 * expect_plan(plan, slow)[0].step_s
    back = refine(around, expect_plan(around, calm)[1]).plan
    assert back.prediction.step_s <= 1.01 * searched(calm)
    assert plan_of(calm, made.numerics, back.layout).prediction.step_s == pytest.approx(
        back.prediction.step_s
    )


def test_the_examples() -> None:
    assert doctest.testmod(speeds).failed == 0
