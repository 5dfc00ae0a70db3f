"""A schedule that follows from costs is in the plan, and a plan with another one is refused."""

from dataclasses import replace

import pytest
from planner_cases import HUGE, cluster, group
from test_search import numerics

from mpipipe.errors import PlanError
from mpipipe.planner import make_plan, program_for
from mpipipe.planner.search import plan_of
from mpipipe.values import Costs, Link, Plan, from_json, to_json

NAMES = [f"g{i}" for i in range(6)]
COSTS = Costs(
    tuple(group(name, 2 + i % 3, 3, 1 + i % 2, stash_bytes=10, act_bytes=8, grad_bytes=8)
          for i, name in enumerate(NAMES)),
    cluster([1.0, 0.5, 1.0], [HUGE] * 3, Link(0.5, 16.0)), (), 4.0, 0.0, "measured", 0.0,
)  # fmt: skip


def planned(schedule: str, costs: Costs = COSTS) -> Plan:
    return make_plan(costs, numerics(8), schedule, 4, NAMES, 3)[0]


def test_the_plan_has_the_order_in_it_and_is_no_longer_than_by_hand() -> None:
    plan = planned("zb-planned")
    assert plan.prediction.step_s <= min(planned(name).prediction.step_s for name in ("zb-h1", "zb-h2"))
    again = from_json(Plan, to_json(plan))
    assert again == plan
    assert len(again.layout.actions) == 3
    program = program_for(again.layout, again.numerics, (), NAMES)
    assert [str(i) for i in program.instrs(2) if i.peer < 0 and i.micro >= 0] == (
        again.layout.actions[2].split(",")
    )
    assert plan_of(COSTS, plan.numerics, plan.layout, NAMES).prediction.step_s == plan.prediction.step_s


def test_little_memory_gives_another_order() -> None:
    wide = planned("zb-planned")
    devices = tuple(replace(d, memory_bytes=130) for d in COSTS.cluster.devices)
    tight = planned("zb-planned", replace(COSTS, cluster=replace(COSTS.cluster, devices=devices)))
    assert tight.layout.actions != wide.layout.actions
    assert max(tight.prediction.peak_bytes) <= 130 < max(wide.prediction.peak_bytes)


def test_actions_of_another_size_are_refused() -> None:
    plan = planned("zb-planned")
    with pytest.raises(PlanError, match=r"actions are of 3 stages and 8 micro-batches, the plan has 3 and 4"):
        program_for(plan.layout, numerics(4), (), NAMES)
    with pytest.raises(PlanError, match=r"layout.actions are of 1 stages"):
        program_for(replace(plan.layout, actions=("0F0",)), numerics(8), (), NAMES)
