"""What the order of the groups costs. A plan cuts them in the order of the model, because the order in which
autograd adds gradients, and with it the bits, follows that of the forwards. Stages of the whole graph, in any
order that its edges allow, are placed here beside it: no cut of a plan can beat them by more than this says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpipipe.errors import PlanError
from mpipipe.planner.placement.problem import Operator, Problem, gap, loads
from mpipipe.planner.placement.solve import place
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.stages import bounds
from mpipipe.values import Cluster, Costs, Graph, Link, Node, Plan, Value

BUDGET_S = 1.0


@dataclass(frozen=True)
class Order(Value):
    """Seconds of the most loaded stage for one micro-batch: forward, backward, and each tensor that it sends
    or receives, once. All messages have the price of `fastest_link`: the bound then holds wherever a stage
    is, and the gap is about the order alone, not about who sits beside whom."""

    planned_s: float  # of the plan's cuts
    bound_s: float  # of stages in any order, at least

    @property
    def gap(self) -> float:
        return gap(self.planned_s, self.bound_s)


def any_order(graph: Graph, plan: Plan, costs: Costs) -> Order | None:
    """The plan's stages beside the best ones of the whole graph, without limits of memory. None for one
    stage, for several per rank, for ranks of unequal speed, and where no placement was found in time."""
    used = costs.cluster.in_order(plan.layout.order)
    alone = plan.layout.n_stages > plan.layout.ranks_per_copy or plan.layout.n_stages == 1
    if alone or len({device.speed for device in used.devices}) > 1:
        return None
    problem = problem_of(graph, costs, used)
    edges = bounds(len(graph.groups), cut_indices(plan.layout, graph.groups))
    stage_of = [stage for stage, edge in enumerate(edges) for _ in range(*edge)]
    try:
        found = place(problem, "the graph", contiguous=True, budget_s=BUDGET_S)
    except PlanError:
        return None
    return Order(loads(problem, stage_of).most_s, found.bound_s)


def fastest_link(cluster: Cluster) -> Link:
    """No message between two of its ranks takes less."""
    links = [cluster.link_at(level) for level in cluster.spanned]
    return Link(min(link.latency_s for link in links), max(link.bytes_per_s for link in links))


def problem_of(graph: Graph, costs: Costs, used: Cluster) -> Problem:
    """The groups as operators. What a group gives to others is one tensor, which crosses a link once to each
    stage that reads it, and once back as a gradient where it has one. used: the ranks that have a stage, of
    equal speed."""
    maker = {node.name: node for node in graph.nodes}
    edges: set[tuple[int, int]] = set()
    given: list[dict[str, Node]] = [{} for _ in graph.groups]
    for node in graph.nodes:
        for name in node.inputs:
            made = maker.get(name)
            if made is not None and node.group >= 0 and made.group >= 0 and made.group != node.group:
                edges.add((made.group, node.group))
                given[made.group][name] = made
    link, speed = fastest_link(used), used.devices[0].speed
    operators = [
        Operator(
            i, cost.name, cost.seconds / speed, math.inf, 0.0, sum(_seconds(link, n) for n in nodes.values())
        )
        for i, (cost, nodes) in enumerate(zip(costs.groups, given, strict=True))
    ]
    return Problem(tuple(operators), tuple(sorted(edges)), len(used.devices), 0, math.inf)


def _seconds(link: Link, node: Node) -> float:
    ways = [2 if "float" in spec.dtype else 1 for spec in node.outputs]
    return sum(way * link.seconds(spec.nbytes) for way, spec in zip(ways, node.outputs, strict=True))
