"""Ranks that compute longer than others of their kind for the same work: another guest on their core, heat.

    its stages / planned, and a fixed piece of work   both FACTOR times the others' ?-> it is slow
                                                                                    '-> groups are dear

A stage alone cannot tell: its groups may be dearer than they were timed, on whatever rank they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from mpipipe.planner.crowded import is_crowded
from mpipipe.values import Cluster, Costs, Timeline

FACTOR = 1.3  # above which it is the rank
LEAST_S = 0.03  # of computing, in a micro-batch that is rehearsed or in a step, below which all is noise


def compared(factors: Sequence[float]) -> list[float]:
    """Each over the median of the others; 1 for a rank alone.

    >>> compared([1.0, 2.0, 6.0])
    [0.25, 0.5714285714285714, 4.0]
    """
    if len(factors) == 1:
        return [1.0]
    return [f / statistics.median([*factors[:i], *factors[i + 1 :]]) for i, f in enumerate(factors)]


def busy_s(timeline: Timeline) -> list[float]:
    """Seconds that each rank computes."""
    return [timeline.busy_s(rank) for rank in range(len(timeline.times))]


def with_slow_ranks(
    costs: Costs, took_s: Sequence[float], planned_s: Sequence[float], same_s: Sequence[float]
) -> Costs:
    """With ranks as slow as they are beside the others of their kind, by two measures of which the lesser
    counts. By rank: seconds that its stages took, those that were planned, and seconds of work that is the
    same on all ranks. As they are where ranks share cores, or costs were not timed."""
    if not can_tell(costs, took_s, planned_s) or min(same_s) <= 0.0:
        return costs
    stages = _beside(costs.cluster, [took / planned for took, planned in zip(took_s, planned_s, strict=True)])
    both = list(map(min, stages, _beside(costs.cluster, same_s)))
    return _slowed(costs, {rank: by for rank, by in enumerate(both) if by > FACTOR})


def with_recovered_ranks(costs: Costs, took_s: Sequence[float], planned_s: Sequence[float]) -> Costs:
    """With ranks that are slow in `costs` as fast as they were in a step, beside the others of their kind.
    By rank: seconds that it computed, and those that were planned with the speeds in `costs`."""
    devices = costs.cluster.devices
    usual = {d.kind: max(other.speed for other in devices if other.kind == d.kind) for d in devices}
    slow = [usual[d.kind] / d.speed for d in devices]
    if max(slow) <= FACTOR or not can_tell(costs, took_s, planned_s):
        return costs
    now = _beside(
        costs.cluster,
        [took / planned * by for took, planned, by in zip(took_s, planned_s, slow, strict=True)],
    )
    after = {rank: by if by > FACTOR else 1.0 for rank, by in enumerate(now) if slow[rank] > FACTOR}
    return _slowed(costs, {rank: by / slow[rank] for rank, by in after.items() if by < slow[rank]})


def can_tell(costs: Costs, took_s: Sequence[float], planned_s: Sequence[float]) -> bool:
    """Whether what ranks took beside what was planned, by rank, is a matter of the ranks."""
    return (
        costs.source == "measured" and not is_crowded(costs.cluster) and min(*took_s, *planned_s) >= LEAST_S
    )


def _beside(cluster: Cluster, factors: Sequence[float]) -> list[float]:
    """Each over the median of the others of its kind."""
    found = [1.0] * len(factors)
    kinds = [device.kind for device in cluster.devices]
    for kind in set(kinds):
        ranks = [rank for rank, other in enumerate(kinds) if other == kind]
        for rank, by in zip(ranks, compared([factors[rank] for rank in ranks]), strict=True):
            found[rank] = by
    return found


def _slowed(costs: Costs, factors: Mapping[int, float]) -> Costs:
    return costs.but(cluster=costs.cluster.slowed(factors)) if factors else costs
