"""Cuts for several stages per rank: those of `partition`, made even over the ranks.

`partition` makes the slowest stage as fast as it can be. Where a rank has several stages, their sum
counts: a heavy stage may share its rank with a light one. From its cuts on, one cut at a time is moved by one
group, as long as the most loaded rank has less to do then, or as much and the others are more even.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.partition import Wish, partition
from mpipipe.planner.problem import ENDLESS
from mpipipe.planner.stages import Cuts, in_order
from mpipipe.values import Costs, Device, Link


def shared(costs: Costs, rank_of_stage: Sequence[int]) -> Costs:
    """As `in_order`: a device for each stage, of which those of one rank have its memory in equal parts."""
    placed = in_order(costs, rank_of_stage)
    if len(set(rank_of_stage)) == len(rank_of_stage):
        return placed
    count = np.bincount(rank_of_stage)

    def part(device: Device, n: int) -> Device:
        return replace(device, memory_bytes=device.memory_bytes // n, base_bytes=device.base_bytes // n)

    parts = (part(d, int(count[r])) for d, r in zip(placed.cluster.devices, rank_of_stage, strict=True))
    links = placed.cluster.links or {"node": Link(0.0, math.inf)}  # a single rank has none
    return replace(placed, cluster=replace(placed.cluster, devices=tuple(parts), links=links))


def started(
    costs: Costs, rank_of_stage: Sequence[int], n_micro: int, schedule: str, receive_window: int, tied: str,
    recompute: Wish = "none",
) -> list[Cuts]:  # fmt: skip
    """Cuts to begin with. Where none fit as `partition` counts memory, with equal parts of it for the stages
    of a rank, such as do not look at it: whether they fit is then for the simulation to say."""
    placed, n_ranks = shared(costs, rank_of_stage), len(set(rank_of_stage))
    endless = tuple(replace(device, memory_bytes=ENDLESS) for device in placed.cluster.devices)
    found: list[Cuts] = []
    error: PlanError | None = None
    for update in (False, True):
        for on in (placed, replace(placed, cluster=replace(placed.cluster, devices=endless))):
            try:
                cuts = partition(
                    on, n_micro, schedule, len(rank_of_stage), receive_window, tied, update, explain=False,
                    n_ranks=n_ranks, recompute=recompute,
                ).cuts  # fmt: skip
            except PlanError as no_cut:
                error = no_cut
                continue
            found += [evened(placed, rank_of_stage, cuts), cuts]
            break
    if not found and error is not None:
        raise error
    return list(dict.fromkeys(found))


def evened(costs: Costs, rank_of_stage: Sequence[int], cuts: Cuts) -> Cuts:
    """costs: by stage, as `shared` gives them."""
    before_s = np.concatenate([[0.0], np.cumsum([group.seconds for group in costs.groups])]).tolist()
    speed = [device.speed for device in costs.cluster.devices]
    n_ranks = max(rank_of_stage) + 1

    def key(edges: Sequence[int]) -> tuple[float, float]:
        load = [0.0] * n_ranks
        for stage, (first, end) in enumerate(itertools.pairwise(edges)):
            load[rank_of_stage[stage]] += (before_s[end] - before_s[first]) / speed[stage]
        return max(load), sum(x * x for x in load)

    edges = [0, *cuts, len(costs.groups)]
    best = key(edges)
    improved = True
    while improved:
        improved = False
        for i, d in itertools.product(range(1, len(edges) - 1), (-1, 1)):
            moved = [*edges[:i], edges[i] + d, *edges[i + 1 :]]
            if moved[i - 1] < moved[i] < moved[i + 1] and (now := key(moved)) < (
                best[0],
                best[1] * (1 - 1e-9),
            ):
                edges, best, improved = moved, now, True
    return tuple(edges[1:-1])
