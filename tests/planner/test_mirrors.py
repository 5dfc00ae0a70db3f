"""How often mirrors are made, where they lie, and what they take."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.errors import PlanError
from mpipipe.planner.mirrors import (
    MOST,
    interval_s,
    mirror_bytes,
    mirror_s,
    partner_shift,
    state_bytes,
    with_mirrors,
)
from mpipipe.planner.prediction import predict
from mpipipe.planner.programs import cut_indices, program_for
from mpipipe.planner.search import make_plan
from mpipipe.planner.stages import own_bytes
from mpipipe.values import Cluster, Costs, Device, GroupCost, Link, Numerics, Plan, Tie

MIB = 1 << 20


def costs(ranks: int, memory_bytes: int = 1 << 40, nodes: int = 1) -> Costs:
    """Six groups of 1 MiB of weights; the first and the last share them."""
    group = GroupCost("", 1e-3, 1e-3, 1e-3, MIB, 0, 0, 8, 8)
    devices = (Device("any", 1.0, memory_bytes, 1),) * ranks
    links = {"node": Link(1e-6, 1e9), "switch": Link(1e-5, 1e8)}
    cluster = Cluster(devices, tuple(r * nodes // ranks for r in range(ranks)), links)
    groups = tuple(replace(group, name=f"g{i}") for i in range(6))
    return Costs(groups, cluster, (Tie("w", MIB, (0, 5)),), 4.0, 1e-10, "modelled", 0.0, 2.0)


def planned(c: Costs) -> Plan:
    numerics = Numerics(8, 2, 4, 1, 1, "torch", "mkl", "fp32", "per_use", {}, "", "", 0)
    return make_plan(c, numerics, "1f1b", 4, len(c.cluster.devices))[0]


def cuts(c: Costs, plan: Plan) -> tuple[int, ...]:
    return cut_indices(plan.layout, [g.name for g in c.groups])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8))
def test_no_shift_has_more_mirrors_on_other_nodes(nodes: list[int]) -> None:
    def away(shift: int) -> int:
        return sum(node != nodes[(r + shift) % len(nodes)] for r, node in enumerate(nodes))

    shift = partner_shift(nodes)
    assert 1 <= shift < len(nodes)
    assert away(shift) == max(map(away, range(1, len(nodes))))


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.1, 1e5), (1.0, 1e4), (10.0, 1e4)])
def test_no_other_interval_loses_less_time(cost_s: float, mtbf_s: float) -> None:
    """Against the exact expectation for failures that come at random: M (e^((T + cost) / M) - 1) / T."""

    def per_second(work_s: float) -> float:
        return mtbf_s * math.expm1((work_s + cost_s) / mtbf_s) / work_s

    best = interval_s(cost_s, mtbf_s)
    assert all(per_second(best) <= per_second(best * x) for x in (0.5, 0.8, 0.95, 1.05, 1.2, 2.0))


def test_a_rank_keeps_two_versions_of_its_own_state_and_its_partner_s() -> None:
    c = costs(2)
    plan = planned(c)
    (cut,) = cuts(c, plan)
    own = [3 * MIB * cut, 3 * MIB * (5 - cut)]  # the last group's weight is the first one's
    assert mirror_bytes(c, plan.layout, (cut,)).tolist() == [2 * sum(own)] * 2
    mirrored, said = with_mirrors(plan, c, 7)
    assert mirrored.layout.mirror_every == 7
    assert "every 7 steps" in said
    names = [g.name for g in c.groups]
    program = program_for(mirrored.layout, mirrored.numerics, c.ties, names)
    assert predict(c, mirrored.layout, program)[0] == mirrored.prediction
    longer_s = mirror_s(c, plan.layout, (cut,)) / 7
    assert mirrored.prediction.step_s == plan.prediction.step_s + longer_s
    assert longer_s > 0.0
    assert predict(c, plan.layout, program)[0].peak_bytes == plan.prediction.peak_bytes


def test_a_weight_with_several_uses_is_owned_once() -> None:
    """Also where two of them are in one group, the first or another one."""
    c = costs(2)
    plan = planned(c)
    (cut,) = cuts(c, plan)
    for groups, owned in (((0, 0), 6), ((0, 0, 5), 5), ((0, 5, 5), 5)):
        tied = replace(c, ties=(Tie("w", MIB, groups),))
        assert own_bytes(tied).sum() == owned * MIB
        assert state_bytes(tied, plan.layout, (cut,)).sum() == 3 * owned * MIB


@pytest.mark.parametrize("nodes", [1, 2])
def test_they_cost_less_than_their_share_of_a_step(nodes: int) -> None:
    c = costs(4, nodes=nodes)
    plan = planned(c)
    found, said = with_mirrors(plan, c, "auto")
    cost_s = mirror_s(c, plan.layout, cuts(c, plan))
    assert cost_s <= MOST * found.layout.mirror_every * plan.prediction.step_s
    assert ("to another rank, as there is one node" in said) == (nodes == 1)


def test_they_are_left_out_where_there_is_no_room() -> None:
    roomy = costs(2)
    plan = planned(roomy)
    tight = costs(2, max(plan.prediction.peak_bytes) + MIB)
    found, said = with_mirrors(plan, tight, "auto")
    assert found == plan
    assert "no mirrors" in said
    with pytest.raises(PlanError, match=r"run\.mirror_every = 3: mirrors need"):
        with_mirrors(plan, tight, 3)
