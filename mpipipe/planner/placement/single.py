"""A lower bound from one device: of what is shared out over k accelerators, one of them has a k-th at least.

    load >= least load of a set S of items with f(S) >= f(all) / k,   for any f >= 0 that adds up over items

The least load, communication included, is a mixed-integer programme of a single device, without the symmetry
of k alike ones. Two kinds of f: seconds of work, and the number of the j k + 1 heaviest items, of which one
device has j + 1 (the pigeonhole principle).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, csr_array

from mpipipe.planner.placement.items import Items
from mpipipe.planner.placement.mixed import MOST_ROWS, circles, memory_shares
from mpipipe.values import Float64

_COUNTS = 2  # numbers j that are tried: those with the largest bound before communication
_BELOW = 1e-9  # of what a device has at least, for sums in another order


def single_device_bound_s(
    items: Items, n_accelerators: int, n_cpus: int, capacity_bytes: float, known_s: float, budget_s: float
) -> float:
    """Seconds that no placement below `known_s`, the load of one that is known, can undercut; 0 if there is
    nothing to say."""
    end, best_s = time.perf_counter() + budget_s, 0.0
    if not 0 < known_s < np.inf or len(items.pins) + len(items) > MOST_ROWS:
        return 0.0
    stays = items.cpu_s > known_s if n_cpus else np.ones(len(items), bool)
    measures = [
        *_works(items, n_accelerators, n_cpus, known_s, stays),
        *_counts(items, n_accelerators, stays),
    ]
    for done, (measure, least) in enumerate(measures):
        left_s = end - time.perf_counter()
        if left_s > 0 and best_s < known_s:
            share_s = left_s / (len(measures) - done)
            best_s = max(best_s, _least_load_s(items, measure / least, capacity_bytes, known_s, share_s))
    return best_s


def _works(
    items: Items, k: int, n_cpus: int, known_s: float, stays: NDArray[np.bool_]
) -> Iterator[tuple[Float64, float]]:
    """Seconds on accelerators: of all items less what CPUs can take off, and of items that stay there."""
    work = np.where(np.isfinite(items.accelerator_s), items.accelerator_s, 0.0)
    kinds = [(work, work.sum() - _absorbed_s(items, work, n_cpus * known_s, ~stays))]
    if n_cpus:
        kinds.append((np.where(stays, work, 0.0), work[stays].sum()))
    yield from ((measure, float(total) / k * (1 - _BELOW)) for measure, total in kinds if total > 0)


def _absorbed_s(items: Items, work: Float64, cpus_s: float, may: NDArray[np.bool_]) -> float:
    """Most seconds of accelerators that CPUs do in `cpus_s` of theirs, if items could be parted."""
    order = np.flatnonzero(may)
    order = order[np.argsort(-work[order] / np.maximum(items.cpu_s[order], 1e-30), kind="stable")]
    before = np.cumsum(items.cpu_s[order]) - items.cpu_s[order]
    share = np.clip((cpus_s - before) / np.maximum(items.cpu_s[order], 1e-30), 0.0, 1.0)
    return float((work[order] * share).sum())


def _counts(items: Items, k: int, stays: NDArray[np.bool_]) -> Iterator[tuple[Float64, float]]:
    """1 for each of the j k + 1 heaviest items, of which a device has j + 1."""
    heavy = np.flatnonzero(stays & np.isfinite(items.accelerator_s))
    heavy = heavy[np.argsort(-items.accelerator_s[heavy], kind="stable")]
    tops = [(heavy[: j * k + 1], j + 1) for j in range(1, (len(heavy) - 1) // k + 1)]
    tops.sort(key=lambda top: -float(items.accelerator_s[top[0][-top[1] :]].sum()))
    for top, least in tops[:_COUNTS]:
        measure = np.zeros(len(items))
        measure[top] = 1.0
        yield measure, least * (1 - _BELOW)


def _least_load_s(
    items: Items, measure: Float64, capacity_bytes: float, known_s: float, budget_s: float
) -> float:
    """Of one accelerator whose items measure 1 or more."""
    n, t = len(items), len(items.tensor_s)
    differ, of_tensor = circles(items)
    runs = np.isfinite(items.accelerator_s)
    share = memory_shares(items, capacity_bytes)
    rows = block_array([[differ, -of_tensor], [csr_array([measure, share]), None]], format="csr")
    least = np.full(rows.shape[0], -np.inf)
    most = np.zeros(rows.shape[0])
    least[-2], most[-2:] = 1.0, [np.inf, 1.0]
    result = milp(
        np.concatenate([np.where(runs, items.accelerator_s, 0.0), items.tensor_s]) / known_s,
        constraints=LinearConstraint(rows, least, most),
        bounds=Bounds(0.0, np.concatenate([runs, np.ones(t)]).astype(float)),
        integrality=np.arange(n + t) < n,
        options={"time_limit": budget_s},
    )
    return max(0.0, (result.mip_dual_bound or 0.0) * known_s)
