"""Segments of a linear order on devices, exactly: good placements at once, in numpy alone.

    best[a, c, j] = min over i < j of min(max(best[a-1, c, i], accelerator(i, j)),
                                          max(best[a, c-1, i], cpu(i, j)))

What the first j items of the order cost on a accelerators and c CPUs, each with one segment: exact for the
orders that are tried, where `solve_contiguous` of the compiled part is exact for all orders of the graph.
"""

from __future__ import annotations

import time

import numpy as np

from mpipipe.planner.placement.items import Items
from mpipipe.planner.placement.problem import topological
from mpipipe.values import Float64, Int32


def place_linearly(
    items: Items, n_accelerators: int, n_cpus: int, capacity_bytes: float, budget_s: float = np.inf
) -> list[Int32]:
    """The best device of each item (n,) over several topological orders, accelerators in their order before
    the CPUs; none if no segments of these orders fit into memory. After `budget_s` no other order begins."""
    end, best_s = time.perf_counter() + budget_s, np.inf
    best: list[Int32] = []
    for order in orders(items):
        if best and time.perf_counter() > end:
            break
        costs = segments(items, order, capacity_bytes)
        load_s, device = _split(*costs, n_accelerators, n_cpus)
        if load_s < best_s:
            best_s, best = load_s, [device[np.argsort(order)]]
    return best


def orders(items: Items) -> list[list[int]]:
    """Topological orders that differ in what they finish first: as the items are numbered, branch by branch,
    level by level, heavy ones early; and as late as readers allow: a weight comes right before its use."""
    n = len(items)
    edges = list(zip(items.edge_source.tolist(), items.edge_dest.tolist(), strict=True))
    back = [(n - 1 - b, n - 1 - a) for a, b in edges]
    early, late = np.zeros(n), np.zeros(n)
    for a, b in sorted(edges):
        early[b] = max(early[b], early[a] + 1)
    for a, b in sorted(edges, reverse=True):
        late[a] = min(late[a], late[b] - 1)
    priorities = (np.arange(n), -np.arange(n), early, late, -items.accelerator_s)
    found = [topological(n, edges, priority.tolist()) for priority in priorities]
    found += [_after_needs(n, edges, sign) for sign in (1, -1)]
    found += [[n - 1 - v for v in reversed(_after_needs(n, back, sign))] for sign in (1, -1)]
    return [list(order) for order in dict.fromkeys(map(tuple, found))]


def _after_needs(n: int, edges: list[tuple[int, int]], sign: int) -> list[int]:
    """Depth first from the last items: each comes right after what it needs and nobody has needed before.
    sign: 1 or -1, the order among needs."""
    needs: list[list[int]] = [[] for _ in range(n)]
    for a, b in edges:
        needs[b].append(a)
    read = {a for a, _ in edges}
    order: dict[int, None] = {}
    for end in (v for v in range(n) if v not in read):
        stack = [(end, False)]
        while stack:
            v, done = stack.pop()
            if done:
                order[v] = None
            elif v not in order:
                stack.append((v, True))
                stack += [(a, False) for a in sorted(needs[v], key=lambda a: -sign * a)]
    return list(order)


def segments(items: Items, order: list[int], capacity_bytes: float) -> tuple[Float64, Float64]:
    """Seconds (n + 1, n + 1) of [i, j) of the order on an accelerator, and on a CPU; inf where i >= j, where
    an item cannot run, and where an accelerator's memory is too small."""
    n, at = len(items), np.argsort(order).astype(np.int32)
    empty = np.arange(n + 1)[:, None] >= np.arange(n + 1)

    def summed(values: Float64) -> Float64:
        sums = np.concatenate([[0.0], np.cumsum(values[order])])
        between: Float64 = sums[None, :] - sums[:, None]
        return between

    fits = np.isfinite(items.accelerator_s)
    here = summed(np.where(fits, items.accelerator_s, 0.0)) + _communication(items, at)
    full = summed(items.nbytes) > capacity_bytes * (1 + 1e-12)
    here[empty | full | (summed(np.where(fits, 0.0, 1.0)) > 0)] = np.inf
    on_cpu = np.isfinite(items.cpu_s)
    cpu = summed(np.where(on_cpu, items.cpu_s, 0.0))
    cpu[empty | (summed(np.where(on_cpu, 0.0, 1.0)) > 0)] = np.inf
    return here, cpu


def _communication(items: Items, at: Int32) -> Float64:
    """Seconds (n + 1, n + 1) of the tensors of which [i, j) has some pins but not all; `at`: place by item.

    A tensor is counted at its first pin within, that is for i in (the pin before, this pin] and j > this pin,
    and taken back where all are within, i <= its first pin and j > its last.
    """
    n = len(items)
    change = np.zeros((n + 2, n + 2))
    for pins, seconds in zip(items.tensors(), items.tensor_s.tolist(), strict=True):
        places = np.sort(at[pins])
        before = np.concatenate([[-1], places[:-1]])
        change[before + 1, places + 1] += seconds  # places differ, and so do these cells
        change[places + 1, places + 1] -= seconds
        change[0, places[-1] + 1] -= seconds
        change[places[0] + 1, places[-1] + 1] += seconds
    total: Float64 = change.cumsum(0).cumsum(1)[: n + 1, : n + 1]
    return total


def _split(here: Float64, cpu: Float64, n_accelerators: int, n_cpus: int) -> tuple[float, Int32]:
    """The smallest largest load, and the device of each place (n,)."""
    n = len(here) - 1
    start = np.full(n + 1, np.inf)
    start[0] = 0.0
    best: dict[tuple[int, int], Float64] = {(0, 0): start}
    came: dict[tuple[int, int], tuple[Int32, Int32]] = {}  # by end: the segment's begin; 1: it is a CPU's
    for a in range(n_accelerators + 1):
        for c in range(n_cpus + 1):
            ways = [(best[a - 1, c], here)] if a else []
            ways += [(best[a, c - 1], cpu)] if c else []
            if not ways:
                continue
            costs = [np.maximum(before[:, None], load) for before, load in ways]
            begins = [cost.argmin(0) for cost in costs]
            values = np.array(
                [cost[begin, np.arange(n + 1)] for cost, begin in zip(costs, begins, strict=True)]
            )
            which = values.argmin(0)
            on_cpu = which if a else np.ones(n + 1, int)
            came[a, c] = (np.choose(which, begins), on_cpu)
            best[a, c] = values.min(0)
    (a, c), value = min(((key, float(f[n])) for key, f in best.items()), key=lambda pair: pair[1])
    device = np.zeros(n, np.int32)
    end = n if np.isfinite(value) else 0
    while end:
        begin, is_cpu = (int(by_end[end]) for by_end in came[a, c])
        a, c = (a, c - 1) if is_cpu else (a - 1, c)
        device[begin:end] = n_accelerators + c if is_cpu else a
        end = begin
    return value, device
