"""What no cut can undercut: proofs of how good a partition and a step can be at best."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from mpipipe.planner.native import compiled
from mpipipe.planner.stages import Ranges
from mpipipe.planner.sweep import least, sweep_near
from mpipipe.values import Costs, Float64


def bottleneck_bound_s(seconds: Float64, speed: Float64) -> float:
    """All work spread over all speeds without loss, or the heaviest group on the fastest rank:
    every cut has a stage at least this slow, even with free links and endless memory.

    seconds: by group, on a device of speed 1; speed: by rank.
    """
    return float(max(seconds.sum() / speed.sum(), seconds.max() / speed.max()))


def step_bound_s(costs: Costs, n_micro: int, n_stages: int, norm_s: float = 0.0) -> float:
    """No cut into `n_stages` stages (stage s on rank s) and no order of F and full B makes a step
    shorter, even with free links and endless memory.

    Stage s, of c_s seconds, works m c_s seconds. Before its first F, micro-batch F goes through all
    stages before it; after its last B, that micro-batch's B does. So for each cut
        step >= max over s of (m c_s + sum of c_j for j < s) + norm + update.
    The sum is at least the groups' seconds over the highest speed, which makes the term one of
    (s, first, end): its exact minimum over all cuts is found. The update after NORM takes at
    least all updates over all speeds. 1F1B with equal stages of one group each and free links
    meets this bound.
    """
    ranges = Ranges(costs)
    speed = np.array([device.speed for device in costs.cluster.devices[:n_stages]])
    before_s = np.concatenate([[0.0], np.cumsum(ranges.seconds)]) / speed.max()
    guess = n_micro * bottleneck_bound_s(ranges.seconds, speed)
    if (speed == speed[0]).all():
        reach_s = least(guess, _reach_of(before_s.tolist(), n_stages, n_micro))
    elif compiled is None:
        reach_s = _swept_reach_s(ranges, speed, before_s, n_micro, guess)
    else:
        reach_s = _searched_reach_s(ranges, speed, before_s, n_micro, guess)
    update_s = float(ranges.ending_at(len(costs.groups)).step_s[0]) / float(speed.sum())
    return reach_s + norm_s + update_s


def _reach_of(before_s: list[float], n_stages: int, n_micro: int) -> Callable[[float], float]:
    """For `least`, on ranks that are alike: the later a stage begins the later it can end, so that each takes
    as much as it can. Where that covers the groups with fewer stages, some of these can be split."""
    n_groups = len(before_s) - 1

    def attempt(limit: float) -> float:
        first, most = 0, 0.0
        for _ in range(n_stages):
            start_s = before_s[first]
            end = bisect_right(before_s, start_s + (limit - start_s) / n_micro, first) - 1  # but for rounding
            while end < n_groups and n_micro * (before_s[end + 1] - start_s) + start_s <= limit:
                end += 1
            while end > first and n_micro * (before_s[end] - start_s) + start_s > limit:
                end -= 1
            most = max(most, n_micro * (before_s[end] - start_s) + start_s)
            first = end
        return most if first == n_groups else math.inf

    return attempt


def _swept_reach_s(ranges: Ranges, speed: Float64, before_s: Float64, n_micro: int, guess: float) -> float:
    def reach(low: int, end: int) -> Float64:
        work = n_micro * ranges.ending_at(end, low).seconds / speed[:, None]
        return np.asarray(work + before_s[low:end], np.float64)

    n_groups, n_stages = len(before_s) - 1, len(speed)
    best, _ = sweep_near(n_groups, n_stages, reach, n_micro * ranges.seconds / speed.max(), guess)
    return float(best[n_stages, n_groups])


def _searched_reach_s(ranges: Ranges, speed: Float64, before_s: Float64, n_micro: int, guess: float) -> float:
    """As `_swept_reach_s`, by compiled code: a partition without memory, where every stage waits for a message
    of `before_s` seconds."""
    assert compiled is not None
    nothing, ones = np.zeros(len(before_s) - 1, np.int64), np.ones(len(speed), np.int64)
    found = compiled.Partition(
        ranges.fwd_s, ranges.bwd_input_s, ranges.bwd_weight_s, *(nothing,) * 5,
        np.array([0.0 * before_s, before_s]), speed / n_micro, ones, ones, ones, 0 * ones, (), 0, 0, 0, 0.0,
    )  # fmt: skip
    return float(found.best(guess, 0)[0])
