"""The searches of the compiled part, and what stands in for them without it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe.planner.native import compiled
from mpipipe.planner.placement.bounds import simple_bound_s
from mpipipe.planner.placement.items import Items
from mpipipe.planner.placement.linear import place_linearly
from mpipipe.planner.placement.mixed import Solved
from mpipipe.values import Int32

LIVE_IDEALS = 1_000_000  # of the exact search at a time; beyond, its bound is not met
SEED = 0


def solve_in_order(
    items: Items, n_accelerators: int, n_cpus: int, capacity_bytes: float, budget_s: float
) -> Solved:
    """Contiguous: exact over all ideals of the items, or the best of some topological orders."""
    devices = (n_accelerators, n_cpus, capacity_bytes)
    if compiled is None:
        device = place_linearly(items, *devices)
        return Solved(device, simple_bound_s(items, n_accelerators, n_cpus))
    found = compiled.solve_contiguous(*_arguments(items, *devices), budget_s, LIVE_IDEALS)
    if found["status"] == "infeasible":
        return Solved(None, np.inf)
    return Solved(found["device"] if found["status"] == "placed" else None, found["bound"])


def solve_in_chunks(
    items: Items,
    n_accelerators: int,
    n_cpus: int,
    capacity_bytes: float,
    budget_s: float,
    start: Int32 | None,
) -> Int32 | None:
    """Any device for any item, by local search from `start`; None: nothing better than it."""
    if compiled is None:
        return None
    first = np.zeros(0, np.int32) if start is None else start
    given = _arguments(items, n_accelerators, n_cpus, capacity_bytes)
    found = compiled.solve_chunks(*given, budget_s, LIVE_IDEALS, SEED, first)
    return found["device"] if found["status"] == "placed" else None


def _arguments(items: Items, n_accelerators: int, n_cpus: int, capacity_bytes: float) -> tuple[Any, ...]:
    """In the order of kernels/planner/placement_bind.cpp."""
    return (
        n_accelerators, n_cpus, items.accelerator_s, items.cpu_s, items.nbytes, capacity_bytes,
        items.edge_source, items.edge_dest, items.tensor_s, items.pin_start, items.pins,
    )  # fmt: skip
