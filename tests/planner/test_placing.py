"""The order of the ranks against brute force over all permutations, and against its own claims."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import FREE, HUGE, cluster, group

from mpipipe.errors import PlanError
from mpipipe.planner import make_plan, partition, placing, program_for
from mpipipe.planner.placing import promising
from mpipipe.planner.prediction import expect
from mpipipe.planner.stages import in_order
from mpipipe.values import Cluster, Costs, Device, Layout, Link, Numerics, Plan

NUMERICS = Numerics(
    batch=4, micro_batch=1, micro_batches=4, blocks=1, threads=1, bits="torch", gemm="mkl", precision="fp32",
    tied="per_use", op_table={}, torch="", instruction_set="", seed=0,
)  # fmt: skip
LINKS = {
    "core": Link(0.0, 64.0),
    "numa": Link(0.125, 32.0),
    "node": Link(0.25, 8.0),
    "switch": Link(1.0, 2.0),
}


@st.composite
def machines(draw: st.DrawFn, n_ranks: int) -> Cluster:
    """Nodes, domains and cores that lie one in the other, or are not told."""
    speeds = st.sampled_from([0.5, 1.0, 2.0])
    memories = st.sampled_from([40, 80, HUGE])
    devices = tuple(Device("cpu", draw(speeds), draw(memories), 1) for _ in range(n_ranks))
    node = [draw(st.integers(0, 1)) for _ in range(n_ranks)]
    numa = [2 * n + draw(st.integers(0, 1)) for n in node]
    core = [2 * n + draw(st.integers(0, 1)) for n in numa]
    told = draw(st.sampled_from([0, 1, 2]))
    return Cluster(devices, tuple(node), LINKS, tuple(numa) if told else (), tuple(core) if told > 1 else ())


@st.composite
def cases(draw: st.DrawFn, n_ranks: int, n_groups: int = 7) -> Costs:
    small = st.integers(0, 9)
    groups = tuple(
        group(
            f"g{i}", 1 + draw(small), draw(small), draw(small), param_bytes=draw(small),
            stash_bytes=draw(small), act_bytes=draw(small), grad_bytes=draw(small),
        )
        for i in range(n_groups)
    )  # fmt: skip
    return Costs(groups, draw(machines(n_ranks)), (), 2.0, 0.125, "modelled", 0.0)


def bottleneck(costs: Costs, order: tuple[int, ...]) -> float:
    try:
        return partition(in_order(costs, order), 4, "1f1b", len(order)).bottleneck_s
    except PlanError:
        return math.inf


def planned(costs: Costs, n_ranks: int) -> Plan:
    return make_plan(costs, NUMERICS, "1f1b", 4, n_ranks)[0]


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(2, 4).flatmap(cases))
def test_no_permutation_has_a_smaller_bottleneck(costs):
    n_ranks = len(costs.cluster.devices)
    least = min(bottleneck(costs, order) for order in itertools.permutations(range(n_ranks)))
    if least == math.inf:
        assert promising(costs, 4, "1f1b", n_ranks) == (tuple(range(n_ranks)),)
        with pytest.raises(PlanError, match="cannot hold"):
            planned(costs, n_ranks)
        return
    found = min(bottleneck(costs, order) for order in promising(costs, 4, "1f1b", n_ranks))
    assert least <= found <= least * (1 + placing.LEAST_GAIN)


@pytest.mark.full
@settings(max_examples=10)
@given(st.integers(5, 6).flatmap(cases))
def test_no_permutation_of_six_ranks_has_a_smaller_bottleneck(costs):
    test_no_permutation_has_a_smaller_bottleneck.hypothesis.inner_test(costs)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(2, 4).flatmap(cases))
def test_an_order_that_is_left_out_is_like_one_that_is_not(costs):
    n_ranks = len(costs.cluster.devices)
    some = placing._few_orders(costs.cluster, n_ranks, 24)
    assert some is not None
    assert some[0] == tuple(range(n_ranks))
    every = {bottleneck(costs, order) for order in itertools.permutations(range(n_ranks))}
    assert {bottleneck(costs, order) for order in some} == every


@pytest.mark.parametrize(
    ("nodes", "numa", "speeds", "orders"),
    [
        ((0, 0, 1, 1), (), (1, 1, 1, 1), 3),
        ((0, 0, 0, 1, 1, 1), (), (1,) * 6, 10),
        ((0, 0, 0, 0), (0, 0, 1, 1), (1, 1, 1, 1), 3),
        ((0, 0, 0, 0), (), (1, 2, 1, 2), 6),
        ((0, 0, 1, 1), (), (1, 2, 1, 2), 12),  # 24, by the exchange of both nodes
        ((0, 1, 2, 3), (), (1, 1, 1, 1), 1),
        ((0,) * 6, (), (1, 2, 3, 4, 5, 6), 720),
    ],
)
def test_orders_are_counted_without_those_that_are_alike(nodes, numa, speeds, orders):
    devices = tuple(Device("cpu", speed, HUGE, 1) for speed in speeds)
    found = placing._few_orders(Cluster(devices, nodes, LINKS, numa), len(nodes), 1000)
    assert len(found) == len(set(found)) == orders


def test_memory_that_differs_by_chance_makes_no_other_sort():
    memories = (1000, 1010, 1020, 2000)
    devices = [Device("cpu", 1.0, memory + base, 1, base) for base, memory in enumerate(memories)]
    assert placing._sorts(devices) == [0, 0, 0, 3]


def two_nodes(link: float, far: float, speeds: tuple[float, ...] = (1.0,) * 4) -> Costs:
    """Ranks 0 and 2 on one node, 1 and 3 on the other."""
    groups = tuple(group(f"g{i}", act_bytes=8, grad_bytes=8) for i in range(8))
    machine = cluster(list(speeds), [HUGE] * 4, Link(0.0, link), Link(0.0, far))
    return Costs(groups, replace(machine, node_of_rank=(0, 1, 0, 1)), (), 2.0, 0.0, "modelled", 0.0)


def test_neighbours_in_the_pipeline_share_a_node():
    plan = planned(two_nodes(1e9, 8.0), 4)
    assert plan.layout.ranks == ((0,), (2,), (1,), (3,))


def test_where_nothing_is_gained_stages_stay_on_the_ranks_of_their_number():
    for costs in (two_nodes(1e9, 1e9), two_nodes(1e9, 1e9, (1.0, 1.0001, 1.0, 1.0))):
        assert planned(costs, 4).layout.order == (0, 1, 2, 3)


def test_the_largest_memory_is_given_to_the_stage_that_needs_it():
    groups = tuple(group(f"g{i}", stash_bytes=10) for i in range(2))
    costs = Costs(groups, cluster([1.0, 1.0], [10, 20]), (), 2.0, 0.0, "modelled", 0.0)
    plan = planned(costs, 2)  # the first stage keeps two stashes, and rank 1 has room for them
    assert plan.layout.order == (1, 0)
    assert plan.prediction.peak_bytes == (10, 20)


@settings(max_examples=15)
@given(cases(4), st.permutations(range(4)))
@pytest.mark.slow
def test_a_plan_is_the_one_of_the_cluster_numbered_anew(costs, order):
    endless = tuple(replace(d, memory_bytes=HUGE) for d in costs.cluster.devices)
    machine = replace(costs.cluster, devices=endless)
    names, found = [g.name for g in costs.groups], []
    for here, ranks in ((machine, order), (machine.in_order(order), range(4))):
        layout = Layout(("g1", "g3", "g6"), tuple((r,) for r in ranks), "1f1b", 4)
        program = program_for(layout, NUMERICS, (), names)
        prediction, timeline = expect(replace(costs, cluster=here), layout, program)
        assert prediction.gap >= 0
        by_stage = [(timeline.busy_s(r), prediction.peak_bytes[r]) for r in ranks]
        found.append((prediction.step_s, prediction.lower_bound_s, by_stage))
    assert found[0] == found[1]


@settings(max_examples=6)
@given(cases(3, 5))
@pytest.mark.slow
def test_the_bound_holds_for_every_cut_and_order(costs):
    endless = tuple(replace(d, memory_bytes=HUGE) for d in costs.cluster.devices)
    costs = replace(costs, cluster=replace(costs.cluster, devices=endless))
    names, steps = [g.name for g in costs.groups], []
    for order in itertools.permutations(range(3)):
        for cuts in itertools.combinations(names[1:], 2):
            layout = Layout(cuts, tuple((r,) for r in order), "1f1b", 4)
            program = program_for(layout, NUMERICS, (), names)
            steps.append(expect(costs, layout, program, 1.0)[0].step_s)
    for few in (0, 64):  # orders of speeds that the bound goes through
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placing, "BOUND_ORDERS", few)
            assert placing.any_order_bound_s(costs, 4, 3) <= min(steps) * (1 + 1e-12)


@pytest.mark.slow
def test_many_ranks_are_searched_within_the_work_that_is_allowed(monkeypatch):
    groups = tuple(group(f"g{i}", 1 + i % 3, act_bytes=4, grad_bytes=4) for i in range(24))
    speeds = [1.0, 2.0, 4.0] * 4
    machine = replace(cluster(speeds, [HUGE] * 12, FREE, Link(0.5, 4.0)), node_of_rank=(0, 1, 2, 3) * 3)
    costs = Costs(groups, machine, (), 2.0, 0.0, "modelled", 0.0)
    asked = []
    score = placing._score
    monkeypatch.setattr(placing, "_score", lambda *a: asked.append(a) or score(*a))
    monkeypatch.setattr(placing, "WORK", 20 * 24 * 12)
    orders = promising(costs, 4, "1f1b", 12)
    assert len(asked) <= 22
    assert orders[0] == tuple(range(12))
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert bottleneck(costs, orders[1]) < bottleneck(costs, orders[0])
    assert planned(costs, 12).prediction.gap >= 0


def test_more_stages_than_there_can_be_are_refused():
    costs = two_nodes(1e9, 8.0, (1.0, 2.0, 1.0, 1.0))
    with pytest.raises(PlanError, match="5 stages but only 4 ranks"):
        planned(costs, 5)
    with pytest.raises(PlanError, match=r"4 stages, .* cut into 3 parts at most"):
        planned(replace(costs, groups=costs.groups[:3]), 4)


def test_equal_ranks_that_are_neighbours_already_cost_no_search(monkeypatch):
    groups = tuple(group(f"g{i}", act_bytes=4, grad_bytes=4) for i in range(16))
    costs = Costs(
        groups, cluster([1.0] * 12, [HUGE] * 12, FREE, Link(0.5, 4.0)), (), 2.0, 0.0, "modelled", 0.0
    )
    monkeypatch.setattr(placing, "_score", None)
    assert promising(costs, 4, "1f1b", 12) == (tuple(range(12)),)


def test_contention_counts_as_far_as_an_order_talks_over_a_level():
    machine = Cluster(
        (Device("cpu", 1.0, HUGE, 1),) * 4,
        (0, 0, 1, 1),
        {"node": Link(0.0, 8.0, 2.0), "switch": Link(1.0, 8.0, 2.0)},
    )
    near, far = machine.loaded((0, 1, 2, 3)), machine.loaded((0, 2, 1, 3))
    assert near.link(0, 1) == Link(0.0, 4.0)  # all of a node's ranks have a neighbour there
    assert near.link(1, 2) == Link(1.0, 8.0)  # half of them have one on another node: 2 x 1/2
    assert far.link(0, 2) == Link(1.0, 4.0)
    assert machine.loaded((0, 2)).link(0, 2) == Link(1.0, 4.0)
