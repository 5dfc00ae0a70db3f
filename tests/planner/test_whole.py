"""Stages of the whole graph beside those of a plan: equal on a chain, better where branches intertwine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpipipe.planner.search import plan_of
from mpipipe.planner.whole import any_order, fastest_link
from mpipipe.values import (
    Cluster,
    Costs,
    Device,
    Graph,
    GroupCost,
    Layout,
    Link,
    Node,
    Numerics,
    Plan,
    TensorSpec,
)

MIB = TensorSpec((1 << 18,), "float32")
NUMERICS = Numerics(
    batch=4, micro_batch=1, micro_batches=4, blocks=1, threads=1, bits="torch", gemm="mkl", precision="fp32",
    tied="per_use", op_table={}, torch="2.13", instruction_set="AVX2", seed=0,
)  # fmt: skip


def graph(edges: dict[int, tuple[int, ...]]) -> Graph:
    """Of group -> the groups that it reads; a node each."""
    nodes = tuple(
        Node(f"n{i}", "aten.relu.default", "", tuple(f"n{j}" for j in read), (MIB,), (), i, "")
        for i, read in edges.items()
    )
    return Graph(nodes, tuple(f"g{i}" for i in edges), {}, {}, {}, ())


def planned(
    seconds: list[float], cuts: tuple[str, ...], bytes_per_s: float, speeds: tuple[float, ...]
) -> Plan:
    groups = tuple(
        GroupCost(f"g{i}", s / 2, s / 2, 0.0, 0, 0, 0, MIB.nbytes, MIB.nbytes) for i, s in enumerate(seconds)
    )
    devices = tuple(Device("made up", speed, 1 << 40, 1) for speed in speeds)
    links = {"node": Link(0.0, bytes_per_s)}
    costs = Costs(groups, Cluster(devices, (0,) * len(speeds), links), (), 4.0, 0.0, "measured", 0.0)
    layout = Layout(cuts, tuple((r,) for r in range(len(speeds))), "1f1b", 2)
    return plan_of(costs, NUMERICS, layout)


def test_a_chain_has_one_order():
    plan = planned([1.0] * 4, ("g2",), 1e12, (1.0, 1.0))
    found = any_order(graph({0: (), 1: (0,), 2: (1,), 3: (2,)}), plan, plan.costs)
    crossing_s = 2 * MIB.nbytes / 1e12
    assert found is not None
    assert found.planned_s == pytest.approx(2.0 + crossing_s, rel=1e-12)
    assert found.gap == 0.0


def test_intertwined_branches_are_parted_where_messages_are_dear():
    """0 -> 2 -> 4 and 1 -> 3 -> 5: a cut in this order sends two tensors and back, parted they send none."""
    plan = planned([1.0] * 6, ("g3",), MIB.nbytes * 10.0, (1.0, 1.0))
    branches = graph({0: (), 1: (), 2: (0,), 3: (1,), 4: (2,), 5: (3,)})
    found = any_order(branches, plan, plan.costs)
    assert found is not None
    assert found.planned_s == pytest.approx(3.0 + 2 * 2 * 0.1)
    assert found.bound_s == pytest.approx(3.0)


def test_slow_ranks_take_longer():
    plan = planned([1.0] * 4, ("g2",), 1e12, (0.5, 0.5))
    found = any_order(graph({0: (), 1: (0,), 2: (1,), 3: (2,)}), plan, plan.costs)
    assert found is not None
    assert found.planned_s == pytest.approx(4.0, rel=1e-4)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_on_two_nodes_the_price_of_a_message_is_that_of_the_fastest_link(order: tuple[int, ...]):
    """Ranks 0 and 1 are on two nodes: at that price the bound would be above what can be reached."""
    plan = planned([1.0] * 3, ("g1", "g2"), 1e12, (1.0,) * 3)
    links = {"node": Link(0.0, MIB.nbytes * 10.0), "switch": Link(0.0, MIB.nbytes / 10.0)}
    cluster = Cluster(plan.costs.cluster.devices, (0, 1, 0), links)
    plan = replace(plan, layout=replace(plan.layout, ranks=tuple((rank,) for rank in order)))
    found = any_order(graph({0: (), 1: (0,), 2: (1,)}), plan, replace(plan.costs, cluster=cluster))
    assert found is not None
    assert found.planned_s == pytest.approx(1.0 + 4 * 0.1)
    assert found.gap == 0.0


def test_the_fastest_link_is_of_a_level_that_occurs():
    device, links = Device("", 1.0, 0, 1), {"node": Link(1e-6, 1e10), "switch": Link(1e-5, 1e9, 2.0)}
    apart, mixed = (Cluster((device,) * 3, nodes, links) for nodes in ((0, 1, 2), (0, 1, 0)))
    assert fastest_link(apart) == Link(1e-5, 1e9)
    assert fastest_link(mixed) == Link(1e-6, 1e10)
    strange = replace(mixed, links={"node": Link(1e-6, 1e8), "switch": Link(1e-5, 1e9)})
    assert fastest_link(strange) == Link(1e-6, 1e9)


def test_nothing_is_said_of_one_stage_or_unlike_ranks():
    chain = graph({0: (), 1: (0,)})
    one = planned([1.0, 1.0], (), 1e9, (1.0,))
    unlike = planned([1.0, 1.0], ("g1",), 1e9, (1.0, 2.0))
    assert any_order(chain, one, one.costs) is None
    assert any_order(chain, unlike, unlike.costs) is None


def test_a_tensor_is_sent_once_to_each_stage_that_reads_it():
    plan = planned([1.0, 1.0, 1.0, 1.0], ("g1", "g2"), MIB.nbytes * 10.0, (1.0, 1.0, 1.0))
    fan = graph({0: (), 1: (0,), 2: (0,), 3: (0,)})
    found = any_order(fan, plan, replace(plan.costs))
    assert found is not None
    assert found.planned_s == pytest.approx(2.0 + 0.2)  # stage 2 has two groups and receives once
