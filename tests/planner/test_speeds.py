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
from mpipipe.planner.speeds import with_recovered_ranks, with_slow_ranks
from mpipipe.values import Costs, Plan


def costs_of(*speeds: float, kinds: str = "", **changes: object) -> Costs:
    made = made_plan(len(speeds), 8, 24)[0].costs
    assert made is not None
    like = made.cluster.devices[0]
    kinds = kinds or "a" * len(speeds)
    devices = tuple(
        replace(like, speed=s, kind=k, **changes)  # type: ignore[arg-type]
        for s, k in zip(speeds, kinds, strict=True)
    )
    return replace(made, source="measured", cluster=replace(made.cluster, devices=devices))


def slow(costs: Costs, took_s: tuple[float, ...], same_s: tuple[float, ...] = ()) -> list[float]:
    """Speeds by what ranks took that were planned to take a second each; the same work takes as long, unless
    it is given."""
    found = with_slow_ranks(costs, took_s, [1.0] * len(took_s), same_s or took_s)
    return [device.speed for device in found.cluster.devices]


def now(costs: Costs, *took_s: float) -> list[float]:
    """Speeds by a step in which each was planned to compute for a second."""
    found = with_recovered_ranks(costs, took_s, [1.0] * len(took_s))
    return [device.speed for device in found.cluster.devices]


def test_the_slow_one_is_as_slow_as_it_was_beside_the_others() -> None:
    assert slow(costs_of(1, 1, 1, 1), (1.0, 1.1, 3.0, 1.2)) == pytest.approx([1, 1, 1.1 / 3.0, 1])
    assert slow(costs_of(1, 1), (1.5, 1.0)) == pytest.approx([1 / 1.5, 1])
    assert slow(costs_of(1, 1), (3.0, 1.0), (1.5, 1.0)) == pytest.approx([1 / 1.5, 1]), "the lesser of both"


def test_all_slower_than_planned_is_no_matter_of_a_rank() -> None:
    for took in ((1.0, 1.2, 1.0), (2.0, 2.0, 2.0), (1.0, 1.0, 0.8)):
        assert slow(costs_of(1, 1, 1), took) == [1, 1, 1]


def test_groups_that_are_dear_make_no_rank_slow() -> None:
    assert slow(costs_of(1, 1), (2.0, 1.0), (1.0, 1.0)) == [1, 1]
    assert slow(costs_of(1, 1), (0.5, 1.0), (1.0, 1.1)) == [1, 1], "nor others that are cheap"
    assert slow(costs_of(1, 1), (1.0, 1.0), (2.0, 1.0)) == [1, 1], "it has nothing to do that is slow there"
    assert now(costs_of(1, 1), 2.0, 1.0) == [1, 1]


def test_one_that_was_slow_is_not_when_it_is_not() -> None:
    assert now(costs_of(1, 0.5, 1), 1.0, 0.5, 1.0) == [1, 1, 1]
    assert now(costs_of(1, 0.5, 1), 1.0, 1.0, 1.0) == [1, 0.5, 1]
    assert now(costs_of(1, 0.5, 1), 1.0, 0.75, 1.0) == pytest.approx([1, 1 / 1.5, 1])
    assert now(costs_of(1, 0.5, 1), 1.0, 2.0, 1.0) == [1, 0.5, 1], "its groups may be dear"


def test_another_kind_has_its_own_speed() -> None:
    assert slow(costs_of(4, 1, 1, kinds="abb"), (1.0, 2.0, 1.0)) == [4, 0.5, 1]
    assert slow(costs_of(4, 1, 1, kinds="abb"), (2.0, 1.0, 1.0)) == [4, 1, 1], "nothing to compare it with"
    assert now(costs_of(4, 0.5, 1, kinds="abb"), 1.0, 0.5, 1.0) == [4, 1, 1]
    assert now(costs_of(1, 0.9, 1), 1.0, 1.0, 1.0) == [1, 0.9, 1], "a cluster's file says so"


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
    assert with_slow_ranks(costs, took, [1.0, 1.0], took) is costs
    known = costs.but(cluster=costs.cluster.slowed({0: 2.0}))
    assert with_recovered_ranks(known, took, [1.0, 1.0]) is known


def searched(costs: Costs, schedule: str) -> Plan:
    return make_plan(costs, made_plan(4, 8, 24)[0].numerics, schedule, 3, 4)[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "v-planned"])
@pytest.mark.parametrize("rank", [0, 3])
def test_one_refinement_plans_around_a_slow_rank(schedule: str, rank: int) -> None:
    """And one that sees it recovered plans as if it had never been slow."""
    calm = costs_of(1, 1, 1, 1)
    known = calm.but(cluster=calm.cluster.slowed({rank: 1.5}))
    plan = searched(calm, schedule)
    begun = plan_of(known, plan.numerics, plan.layout)  # as a rehearsal leaves it
    around = refine(begun, expect_plan(begun, known)[1]).plan
    assert around.prediction.step_s <= 1.01 * searched(known, schedule).prediction.step_s
    assert around.prediction.step_s < 0.95 * begun.prediction.step_s
    back = refine(around, expect_plan(around, calm)[1]).plan
    assert back.prediction.step_s <= 1.01 * plan.prediction.step_s
    assert plan_of(calm, plan.numerics, back.layout).prediction.step_s == pytest.approx(
        back.prediction.step_s
    )


@pytest.mark.slow
@pytest.mark.parametrize("dear", [range(6), range(18, 24), range(22, 24)])
@pytest.mark.parametrize("schedule", ["1f1b", "v-planned"])
def test_groups_that_are_dearer_than_they_were_timed_move_on_as_such(schedule: str, dear: range) -> None:
    calm = costs_of(1, 1, 1, 1)
    groups = [
        replace(g, fwd_s=2 * g.fwd_s, bwd_input_s=2 * g.bwd_input_s, bwd_weight_s=2 * g.bwd_weight_s)
        if i in dear
        else g
        for i, g in enumerate(calm.groups)
    ]
    true = replace(calm, groups=tuple(groups))
    plan = searched(calm, schedule)
    for _ in range(4):  # looks at the steps of a run
        plan = refine(plan, expect_plan(plan, true)[1]).plan
    assert expect_plan(plan, true)[0].step_s <= 1.01 * searched(true, schedule).prediction.step_s


def test_the_examples_in_its_documentation() -> None:
    found = doctest.testmod(speeds)
    assert found.attempted
    assert found.failed == 0
