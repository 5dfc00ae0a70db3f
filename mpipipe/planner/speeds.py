"""Ranks that compute longer than others of their kind for the same work: another guest on their core, heat.

seconds of each rank / planned -> of one a multiple of the others' ?-> the rank is that slow
                                                                   '-> what it has to do takes as long
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mpipipe.planner.crowded import is_crowded
from mpipipe.values import Cluster, Costs, Timeline

FACTOR = 1.3  # above which it is the rank
LEAST_S = 0.01  # of computing, below which all is noise


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


def with_speeds(costs: Costs, took_s: Sequence[float], planned_s: Sequence[float]) -> Costs:
    """With ranks as slow as they were, by what each computed in `took_s` where it was planned to take
    `planned_s`, seconds by rank. A rank that was slow and is not has the speed of its kind again. As they
    are where ranks share cores, or groups were not timed, and so may be dear themselves."""
    if costs.source != "measured" or is_crowded(costs.cluster) or min(*took_s, *planned_s) < LEAST_S:
        return costs
    found = _slower(costs.cluster, [took / planned for took, planned in zip(took_s, planned_s, strict=True)])
    return costs.but(cluster=costs.cluster.slowed(found)) if found else costs


def _slower(cluster: Cluster, factors: Sequence[float]) -> dict[int, float]:
    """Rank -> how many times as long as now it takes, of those that have another speed; below 1 for one that
    was slow. factors: seconds / those with the speeds of `cluster`."""
    usual = {d.kind: max(o.speed for o in cluster.devices if o.kind == d.kind) for d in cluster.devices}
    before = [usual[d.kind] / d.speed for d in cluster.devices]
    beside = compared([factor * slow for factor, slow in zip(factors, before, strict=True)])
    calm = [1.0 if slow > FACTOR else slow for slow in before]
    after = [by if by > FACTOR else least for by, least in zip(beside, calm, strict=True)]
    return {
        rank: now / then for rank, (now, then) in enumerate(zip(after, before, strict=True)) if now != then
    }
