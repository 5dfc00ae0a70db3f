"""The placement without an order of devices as a mixed-integer programme, solved by HiGHS: a lower bound, the
proof of an optimum, and now and then a better placement.

    minimise T, where
    x[v, d] = 1 if item v is on device d;  sum over d of x[v, d] = 1
    y[t, d] >= x[p, d] - x[q, d]  for pins p, q of tensor t that follow each other in a circle
    sum over v of seconds[v] x[v, d] + sum over t of seconds[t] y[t, d] <= T,  and bytes likewise

In a circle, because then some pair of neighbours differs if any two pins do, with one row for each pin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, block_diag, csr_array, eye_array, kron

from mpipipe.planner.placement.items import Items
from mpipipe.values import Float64, Int32

PRECISION = 1e-6  # of HiGHS, relative to the load that is known
MOST_ROWS = 100_000  # beyond, its first relaxation alone takes minutes and does not look at the clock
_INFEASIBLE = 2  # a status of scipy.optimize.milp


@dataclass(frozen=True, eq=False)
class Solved:
    device: Int32 | None  # (n,), where it found a placement
    bound_s: float  # no placement is below; inf: none fits into memory


def solve_mixed(
    items: Items, n_accelerators: int, n_cpus: int, capacity_bytes: float, known_s: float, budget_s: float
) -> Solved:
    """`known_s`: the load of a placement that is known, above which nothing is looked for; inf: none is."""
    n, n_devices = len(items), n_accelerators + n_cpus
    if (n + len(items.pins)) * n_devices > MOST_ROWS or budget_s <= 0:
        return Solved(None, 0.0)
    scale = known_s if 0 < known_s < np.inf else 1.0
    rows, least, most = _rows(items, n_accelerators, n_cpus, capacity_bytes, scale)
    n_x, load = n * n_devices, rows.shape[1] - 1  # x by device and item, y by device and tensor, T
    upper = np.ones(load + 1)
    upper[:n_x] = _allowed(items, n_accelerators, n_cpus, known_s).ravel()
    upper[load] = known_s / scale
    result = milp(
        np.arange(load + 1) == load,
        constraints=LinearConstraint(rows, least, most),
        bounds=Bounds(0.0, upper),
        integrality=np.arange(load + 1) < n_x,
        options={"time_limit": budget_s, "mip_rel_gap": PRECISION},
    )
    return _solved(result, (n_devices, n), scale)


def _rows(
    items: Items, k: int, n_cpus: int, capacity_bytes: float, scale: float
) -> tuple[csr_array, Float64, Float64]:
    """Coefficients, and the least and most of each row: one device for each item, the circles of pins, loads,
    memory."""
    n, n_devices = len(items), k + n_cpus
    runs = np.isfinite(items.accelerator_s)
    seconds = [np.where(runs, items.accelerator_s, 0.0)] * k + [items.cpu_s] * n_cpus
    accelerator = eye_array(k, n_devices)
    differ, of_tensor = circles(items)
    rows = block_array(
        [
            [kron(np.ones((1, n_devices)), eye_array(n)), None, None],
            [kron(accelerator, differ), kron(eye_array(k), -of_tensor), None],
            [
                block_diag([s[None] / scale for s in seconds]),
                kron(accelerator.T, items.tensor_s[None] / scale),
                np.full((n_devices, 1), -1.0),
            ],
            [kron(accelerator, memory_shares(items, capacity_bytes)[None]), None, None],
        ],
        format="csr",
    )
    most = np.concatenate([np.ones(n), np.zeros(len(items.pins) * k + n_devices), np.ones(k)])
    least = np.where(np.arange(len(most)) < n, 1.0, -np.inf)
    return rows, least, most


def memory_shares(items: Items, capacity_bytes: float) -> Float64:
    """(n,) of a device's memory; 2, too much, of what has none."""
    return items.nbytes / capacity_bytes if capacity_bytes else np.where(items.nbytes > 0, 2.0, 0.0)


def circles(items: Items) -> tuple[csr_array, csr_array]:
    """(pins, n): each pin minus the one before it in its tensor, the last before the first; (pins, t): the
    tensor of each pin."""
    n, t, p = len(items), len(items.tensor_s), len(items.pins)
    each = np.arange(p)
    before = each - 1
    before[items.pin_start[:-1]] = items.pin_start[1:] - 1
    ones = np.ones(p)
    here = csr_array((ones, (each, items.pins)), shape=(p, n))
    there = csr_array((ones, (each, items.pins[before])), shape=(p, n))
    of_tensor = np.repeat(np.arange(t), np.diff(items.pin_start))
    return here - there, csr_array((ones, (each, of_tensor)), shape=(p, t))


def _allowed(items: Items, k: int, n_cpus: int, known_s: float) -> Float64:
    """(devices, n): 0 where an item cannot be, 1 elsewhere.

    Accelerators are alike, so that they may be numbered by the heaviest item that each has: the j-th heaviest
    one is on one of the first j + 1, or on a CPU.
    """
    allowed = np.ones((k + n_cpus, len(items)))
    allowed[:k, ~np.isfinite(items.accelerator_s)] = 0.0
    for j, item in enumerate(np.argsort(-items.accelerator_s, kind="stable")[: max(k - 1, 0)]):
        allowed[j + 1 : k, item] = 0.0
    allowed[k:, items.cpu_s > known_s * (1 + PRECISION)] = 0.0
    return allowed


def _solved(result: Any, shape: tuple[int, int], scale: float) -> Solved:
    if result.status == _INFEASIBLE:
        return Solved(None, np.inf)
    bound_s = max(0.0, (result.mip_dual_bound or 0.0) * scale)
    if result.x is None:
        return Solved(None, bound_s)
    device = result.x[: shape[0] * shape[1]].reshape(shape).argmax(0)
    return Solved(device.astype(np.int32), bound_s)
