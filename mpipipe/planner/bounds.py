"""What no cut can undercut: proofs of how good a partition and a step can be at best."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from functools import partial

import numpy as np

from mpipipe.planner.stages import Ranges
from mpipipe.planner.sweep import least
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
    before_s = np.concatenate([[0.0], np.cumsum(ranges.seconds)])
    guess = n_micro * bottleneck_bound_s(ranges.seconds, speed)
    longest = _Longest(before_s.tolist(), speed.tolist(), n_micro)
    reach_s = least(guess, longest.reach_s)
    if longest.has_empty(reach_s):
        reach_s = least(reach_s, partial(_reach_s, before_s, speed, n_micro))
    update_s = float(ranges.ending_at(len(costs.groups)).step_s[0]) / float(speed.sum())
    return reach_s + norm_s + update_s


def work_bound_s(costs: Costs, n_micro: int, n_ranks: int, norm_s: float = 0.0) -> float:
    """As `step_bound_s`, for any number of stages per rank and for backwards in two: all work over all
    speeds, or the heaviest group on the fastest rank, and the update. How a pipeline fills is not in it."""
    return uneven_bound_s(costs, n_micro, 1, n_ranks, norm_s)


def uneven_bound_s(costs: Costs, n_micro: int, n_copies: int, n_ranks: int, norm_s: float = 0.0) -> float:
    """As `work_bound_s`, where each stage has as many copies as it likes, `n_copies` at most: these share
    the micro-batches with the heaviest group."""
    ranges, devices = Ranges(costs), costs.cluster.devices[:n_ranks]
    seconds, speed = ranges.seconds, np.array([device.speed for device in devices])
    update_s = float(ranges.ending_at(len(costs.groups)).step_s[0]) / float(speed.sum())
    heaviest_s = float(seconds.max()) / max(device.speed * device.alone for device in devices) / n_copies
    return n_micro * max(float(seconds.sum() / speed.sum()), heaviest_s) + norm_s + update_s


class _Longest:
    """Stages that each take as much as a limit lets them, and may be empty. The later a stage begins the
    later it can end: no cut within the limit comes farther."""

    def __init__(self, before_s: list[float], speed: list[float], n_micro: int) -> None:
        self._before_s, self._speed, self._n_micro = before_s, speed, n_micro
        self._fastest = max(speed)

    def reach_s(self, limit: float) -> float:
        """For `least`."""
        ends = self._ends(limit)
        if ends[-1] < len(self._before_s) - 1:
            return math.inf
        cuts = zip(self._speed, itertools.pairwise([0, *ends]), strict=True)
        return max(self._one_s(first, end, speed) for speed, (first, end) in cuts)

    def has_empty(self, limit: float) -> bool:
        return any(first == end for first, end in itertools.pairwise([0, *self._ends(limit)]))

    def _ends(self, limit: float) -> list[int]:
        """Of each stage; a group is left for each of the later ones."""
        before_s, n_groups, n_stages = self._before_s, len(self._before_s) - 1, len(self._speed)
        ends, first = [], 0
        for later, speed in zip(range(n_stages - 1, -1, -1), self._speed, strict=True):
            room_s = (limit - before_s[first] / self._fastest) * speed / self._n_micro
            end = bisect_right(before_s, before_s[first] + room_s, first) - 1  # but for rounding
            while end < n_groups and self._one_s(first, end + 1, speed) <= limit:
                end += 1
            while end > first and self._one_s(first, end, speed) > limit:
                end -= 1
            first = max(first, min(end, n_groups - later))
            ends.append(first)
        return ends

    def _one_s(self, first: int, end: int, speed: float) -> float:
        before_s = self._before_s
        return self._n_micro * (before_s[end] - before_s[first]) / speed + before_s[first] / self._fastest


def _reach_s(before_s: Float64, speed: Float64, n_micro: int, limit: float) -> float:
    """For `least`, without empty stages: `limit` if they can cover the groups. The later a stage begins the
    sooner it is done with the groups to its end: so of the ends of those before, the last one will do."""
    ends, place = np.arange(len(before_s)) == 0, np.arange(len(before_s))
    for rate in speed:
        last = np.maximum.accumulate(np.where(ends, place, -1))[:-1]
        work_s = n_micro * (before_s[1:] - before_s[last]) / rate + before_s[last] / speed.max()
        ends[0], ends[1:] = False, (last >= 0) & (work_s <= limit)
    return limit if ends[-1] else math.inf
