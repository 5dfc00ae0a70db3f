"""What no cut can undercut: proofs of how good a partition and a step can be at best."""

from __future__ import annotations

import numpy as np

from mpipipe.planner.stages import Ranges
from mpipipe.planner.sweep import sweep_near
from mpipipe.values import Costs, Float64


def bottleneck_bound_s(costs: Costs, n_stages: int) -> float:
    """All work spread over all speeds without loss, or the heaviest group on the fastest rank:
    every cut has a stage at least this slow, even with free links and endless memory."""
    speeds = [device.speed for device in costs.cluster.devices[:n_stages]]
    seconds = [group.seconds for group in costs.groups]
    return max(sum(seconds) / sum(speeds), max(seconds) / max(speeds))


def step_bound_s(costs: Costs, n_micro: int, n_stages: int, norm_s: float = 0.0) -> float:
    """No cut into `n_stages` stages (stage s on rank s) and no order of F and full B makes a step
    shorter, even with free links and endless memory.

    Stage s, of c_s seconds, works m c_s seconds. Before its first F, micro-batch F goes through all
    stages before it; after its last B, that micro-batch's B does. So for each cut
        step >= max over s of (m c_s + sum of c_j for j < s) + norm + update.
    The sum is at least the groups' seconds over the highest speed, which makes the term one of
    (s, first, end): `sweep` finds its exact minimum over all cuts. The update after NORM takes at
    least all updates over all speeds. 1F1B with equal stages of one group each and free links
    meets this bound.
    """
    ranges, n_groups = Ranges(costs), len(costs.groups)
    speed = np.array([device.speed for device in costs.cluster.devices[:n_stages]])
    before_s = np.concatenate([[0.0], np.cumsum([g.seconds for g in costs.groups])]) / speed.max()

    def reach(low: int, end: int) -> Float64:
        work = n_micro * ranges.ending_at(end).seconds[low:] / speed[:, None]
        return np.asarray(work + before_s[low:end], np.float64)

    fastest = n_micro * np.array([g.seconds for g in costs.groups]) / speed.max()
    best, _ = sweep_near(n_groups, n_stages, reach, fastest, n_micro * bottleneck_bound_s(costs, n_stages))
    update_s = float(ranges.ending_at(n_groups).step_s[0]) / float(speed.sum())
    return float(best[n_stages, n_groups]) + norm_s + update_s
