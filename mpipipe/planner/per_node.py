"""How many ranks to put on each node: a plan for each number that its cores allow."""

from __future__ import annotations

from collections.abc import Callable

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.values import Cluster, Prediction


def by_ranks_per_node(
    planned: Callable[[Cluster], Prediction], cluster_of: Callable[[int], Cluster], most: int
) -> dict[int, Prediction]:
    """What plans with 1, 2, 4 ... and `most` ranks per node will do, but for those that have no plan.

    planned: what the plan for all ranks of a cluster will do; cluster_of: with so many ranks per node. Raises
    the PlanError or DeadlockError of the fewest where no number has a plan.
    """
    found: dict[int, Prediction] = {}
    failed: list[PlanError | DeadlockError] = []
    for per_node in sorted({1 << i for i in range(most.bit_length())} | {most}):
        try:
            found[per_node] = planned(cluster_of(per_node))
        except (PlanError, DeadlockError) as error:
            failed.append(error)
    if not found:
        raise failed[0]
    return found
