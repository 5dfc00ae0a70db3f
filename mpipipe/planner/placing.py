"""Which rank holds which stage, where ranks differ in speed, in memory or in what lies between them.

An order is a permutation: stage s is on rank order[s]. Two orders are alike where an exchange of equal ranks,
domains or nodes makes one of the other; of those only the first is looked at.

Where few orders are not alike, all are tried: the smallest bottleneck over all orders and all cuts (the
problem of `partition`) is then among the results. Beyond that a search: ranks that are near to each other
stay neighbours, the fastest, the slowest or those with most memory first; then pairs change places as long as
that helps and WORK lasts. How far a plan is at most from the shortest step of any order, its gap tells.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from mpipipe.errors import PlanError
from mpipipe.planner.bounds import step_bound_s
from mpipipe.planner.copies import Order
from mpipipe.planner.partition import Wish, partition
from mpipipe.planner.stages import Ranges, in_order
from mpipipe.values import Cluster, Costs, Device

WORK = 1_000_000  # groups x ranks of all orders that are tried: those of six unlike ranks with 230 groups
EXACT_RANKS = 10  # beyond, orders are not even counted
KEPT = 4  # orders that are worth a simulation
LEAST_GAIN = 1e-3  # for which stages leave the ranks of their number
SAME_MEMORY = 0.02  # relative: ranks of one sort differ by that much by chance
BOUND_ORDERS = 64  # orders of speeds of which the bound is the least
Score = tuple[float, float]  # bottleneck, and seconds of a micro-batch on all links
Unit = tuple[int | None, ...]


def promising(
    costs: Costs, n_micro: int, schedule: str, n_ranks: int, receive_window: int = 0, tied: str = "per_use",
    recompute: Wish = "none",
) -> tuple[Order, ...]:  # fmt: skip
    """The KEPT orders of the ranks 0 .. n_ranks - 1 with the smallest bottleneck, of equal ones those with
    least time on links; but first of all stage s on rank s, if that fits, and alone if no other can gain, or
    none fits."""
    same, cluster = tuple(range(n_ranks)), costs.cluster
    if n_ranks > len(cluster.devices) or _nothing_to_gain(cluster, n_ranks):
        return (same,)
    known: dict[Order, Score] = {}
    how = n_micro, schedule, n_ranks, receive_window, tied, recompute

    def score(order: Order) -> Score:
        if order not in known:
            known[order] = _score(in_order(costs, order), *how)
        return known[order]

    if score(same)[0] <= (1 + LEAST_GAIN) * _least_s(costs, *how):
        return (same,)
    tries = max(KEPT, WORK // (len(costs.groups) * n_ranks))
    orders = _few_orders(cluster, n_ranks, tries)
    for order in _search(cluster, n_ranks, score, tries) if orders is None else orders:
        score(order)
    fits = [order for order, (bottleneck_s, _) in known.items() if math.isfinite(bottleneck_s)]
    best = [*(order for order in fits if order == same), *sorted(fits, key=score)[:KEPT]]
    return tuple(dict.fromkeys(best)) or (same,)


def any_order_bound_s(costs: Costs, n_micro: int, n_stages: int, norm_s: float = 0.0) -> float:
    """`step_bound_s` whatever rank holds which stage: its least over all orders of unlike speeds, where they
    are few; else that of as many fastest ranks, or all work shared out by speed, whichever is more."""
    speeds = [device.speed for device in costs.cluster.devices[:n_stages]]
    alike = map(math.factorial, Counter(speeds).values())
    if math.factorial(len(speeds)) // math.prod(alike) <= BOUND_ORDERS:
        placed = (_with_speeds(costs, order) for order in _arrangements(speeds))
        return min(step_bound_s(c, n_micro, n_stages, norm_s) for c in placed)
    update_s = float(Ranges(costs).ending_at(len(costs.groups)).step_s[0]) / sum(speeds)
    shared_s = n_micro * sum(group.seconds for group in costs.groups) / sum(speeds) + norm_s + update_s
    fastest = _with_speeds(costs, [max(speeds)] * n_stages)
    return max(shared_s, step_bound_s(fastest, n_micro, n_stages, norm_s))


def _with_speeds(costs: Costs, speeds: Sequence[float]) -> Costs:
    devices = costs.cluster.devices
    if all(device.speed == speed for device, speed in zip(devices, speeds, strict=False)):
        return costs
    changed = tuple(replace(d, speed=speed) for d, speed in zip(devices, speeds, strict=False))
    return costs.but(cluster=replace(costs.cluster, devices=changed))


def _arrangements(items: list[float]) -> Iterator[tuple[float, ...]]:
    """The permutations of a multiset, each once."""
    if len(set(items)) <= 1:
        yield tuple(items)
        return
    for item in dict.fromkeys(items):
        rest = items.copy()
        rest.remove(item)
        yield from ((item, *later) for later in _arrangements(rest))


def _score(
    costs: Costs, n_micro: int, schedule: str, n_ranks: int, receive_window: int, tied: str, recompute: Wish
) -> Score:
    """Of stage s on rank s; endless where no cut fits."""
    try:
        found = partition(
            costs, n_micro, schedule, n_ranks, receive_window, tied, explain=False, recompute=recompute
        )
    except PlanError:
        return math.inf, math.inf
    ends = [(costs.groups[cut - 1], costs.cluster.link(s, s + 1)) for s, cut in enumerate(found.cuts)]
    crossing_s = sum(link.seconds(g.act_bytes) + link.seconds(g.grad_bytes) for g, link in ends)
    return found.bottleneck_s, crossing_s


def _least_s(
    costs: Costs, n_micro: int, schedule: str, n_ranks: int, receive_window: int, tied: str, recompute: Wish
) -> float:
    """No order has a smaller bottleneck: that of the fastest rank, the largest memory and the fastest link
    everywhere."""
    devices = costs.cluster.devices[:n_ranks]
    largest = replace(max(devices, key=_own_bytes), speed=max(device.speed for device in devices))
    links = costs.cluster.links.values()
    best = replace(min(links, key=lambda x: x.latency_s), bytes_per_s=max(x.bytes_per_s for x in links))
    cluster = Cluster((largest,) * n_ranks, (0,) * n_ranks, {"node": replace(best, contention=1.0)})
    relaxed = costs.but(cluster=cluster)
    return _score(relaxed, n_micro, schedule, n_ranks, receive_window, tied, recompute)[0]


def _own_bytes(device: Device) -> int:
    """What it has for a stage."""
    return device.memory_bytes - device.base_bytes


# -- a few orders: all of them -----------------------------------------------------------------------


def _nothing_to_gain(cluster: Cluster, n_ranks: int) -> bool:
    """All ranks are alike, on one unit; or there are many, and neighbours already."""
    units = [_units(cluster, rank) for rank in range(n_ranks)]
    if len(set(_sorts(cluster.devices[:n_ranks]))) > 1:
        return False
    runs = [[unit for unit, _ in itertools.groupby(u[: i + 1] for u in units)] for i in range(3)]
    grouped = all(len(run) == len(set(run)) for run in runs)
    return len(runs[2]) == 1 or (grouped and n_ranks > EXACT_RANKS)


def _few_orders(cluster: Cluster, n_ranks: int, most: int) -> list[Order] | None:
    """All that are not alike; None where they are more than `most`."""
    if n_ranks > EXACT_RANKS:
        return None
    units = [_units(cluster, rank) for rank in range(n_ranks)]
    orders = _unlike(_sorts(cluster.devices[:n_ranks]), units, ())
    found = list(itertools.islice(orders, most + 1))
    return found if len(found) <= most else None


def _unlike(sorts: Sequence[int], units: Sequence[Unit], begun: Order) -> Iterator[Order]:
    """Goes on with one rank of each sort: those of a sort change places without moving a rank of `begun`."""
    if len(begun) == len(sorts):
        yield begun
        return
    used = {units[rank][: i + 1] for rank in begun for i in range(len(units[rank]))}
    first: dict[Hashable, int] = {}
    for rank, unit in enumerate(units):
        if rank not in begun:
            inside = (unit[: i + 1] for i in range(len(unit)))
            key = tuple(u if u in used else _shape(sorts, units, u) for u in inside)
            first.setdefault((key, sorts[rank]), rank)
    for rank in first.values():
        yield from _unlike(sorts, units, (*begun, rank))


def _units(cluster: Cluster, rank: int) -> Unit:
    """The node, the domain in it, the core in that, the rank itself."""
    numa = cluster.numa_of_rank[rank] if cluster.numa_of_rank else None
    core = cluster.core_of_rank[rank] if cluster.core_of_rank else None
    return cluster.node_of_rank[rank], numa, core, rank


def _shape(sorts: Sequence[int], units: Sequence[Unit], unit: Unit) -> Hashable:
    """What a unit is made of, without numbers: equal for two that can be exchanged."""
    depth = len(unit)
    members = [rank for rank, other in enumerate(units) if other[:depth] == unit]
    if depth == len(units[0]):
        return sorts[members[0]]
    parts = {units[rank][: depth + 1] for rank in members}
    return tuple(sorted((_shape(sorts, units, part) for part in parts), key=repr))


def _sorts(devices: Sequence[Device]) -> list[int]:
    """Equal numbers for ranks of one speed, and of memory that differs by chance alone."""
    memory = sorted(map(_own_bytes, devices))
    steps = [b for a, b in itertools.pairwise(memory) if b > (1 + SAME_MEMORY) * a]
    pairs = [(device.speed, bisect.bisect(steps, _own_bytes(device))) for device in devices]
    return [pairs.index(pair) for pair in pairs]


# -- many orders: a search ---------------------------------------------------------------------------


def _search(cluster: Cluster, n_ranks: int, score: Callable[[Order], Score], tries: int) -> Iterator[Order]:
    """Some orders, the better ones near the end; `tries` at most, as each costs a partition."""
    left = iter(range(tries))
    starts = list(_starts(cluster, n_ranks))
    yield from (order for order, _ in zip(starts, left, strict=False))
    best = min(starts, key=score)
    sorts = _sorts(cluster.devices[:n_ranks])
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(n_ranks), 2):
            a, b = best[i], best[j]
            if sorts[a] == sorts[b] and _units(cluster, a)[:-1] == _units(cluster, b)[:-1]:
                continue
            if next(left, None) is None:
                return
            other = (*best[:i], b, *best[i + 1 : j], a, *best[j + 1 :])
            yield other
            if score(other) < score(best):
                best, improved = other, True


def _starts(cluster: Cluster, n_ranks: int) -> Iterator[Order]:
    """Node by node, and in a node domain by domain: as they come, by speed, by memory."""
    wishes: tuple[Callable[[Device], float], ...] = (
        lambda device: 0.0,
        lambda device: -device.speed,
        lambda device: device.speed,
        lambda device: -_own_bytes(device),
    )
    units = [_units(cluster, rank) for rank in range(n_ranks)]
    inside = [[unit[: i + 1] for i in range(len(unit))] for unit in units]
    members: dict[Unit, list[int]] = {}
    for rank, around in enumerate(inside):
        for unit in around:
            members.setdefault(unit, []).append(rank)
    for wish in wishes:
        found = [wish(device) for device in cluster.devices[:n_ranks]]
        mean = {unit: (sum(found[rank] for rank in m) / len(m), m[0]) for unit, m in members.items()}
        keys = [[mean[unit] for unit in around] for around in inside]
        yield tuple(sorted(range(n_ranks), key=keys.__getitem__))
