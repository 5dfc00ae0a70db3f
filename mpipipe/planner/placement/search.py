"""The searches of the compiled part, and what stands in for them without it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe.planner.native import compiled
from mpipipe.planner.placement.bounds import simple_bound_s
from mpipipe.planner.placement.items import Items
from mpipipe.planner.placement.linear import place_linearly
from mpipipe.values import Int32

LIVE_IDEALS = 1_000_000  # of the exact search at a time; beyond, its bound is not met
EXACT = 0.9  # of the budget for the exact search
LINEAR = (
    100_000_000  # items x items x devices of an order that is cut beside a placement that is there: a second
)
SEED = 0


def solve_in_order(
    items: Items, n_accelerators: int, n_cpus: int, capacity_bytes: float, budget_s: float
) -> tuple[list[Int32], float]:
    """Contiguous placements by item, none if nothing is found, and the bound; inf: nothing fits.

    Exact over all ideals of the items. Where that does not end in time, or is not there, also by segments of
    some topological orders.
    """
    devices = (n_accelerators, n_cpus, capacity_bytes)
    if compiled is None:
        bound_s = simple_bound_s(items, n_accelerators, n_cpus)
        return place_linearly(items, *devices, budget_s), bound_s
    found = compiled.solve_contiguous(*_arguments(items, *devices), budget_s * EXACT, LIVE_IDEALS)
    if found["status"] == "infeasible":
        return [], np.inf
    devices_of = [found["device"]] if found["status"] == "placed" else []
    small = len(items) ** 2 * (n_accelerators + n_cpus) <= LINEAR
    if not devices_of or (small and found["bound"] < found["load"]):
        devices_of += place_linearly(items, *devices, budget_s * (1 - EXACT))
    return devices_of, found["bound"]


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
