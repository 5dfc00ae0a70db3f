"""The placement of a problem: exact where that can be proved in the given time, always with a bound."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.placement.bounds import simple_bound_s
from mpipipe.planner.placement.fit import check_items, does_not_fit
from mpipipe.planner.placement.items import Items, contract
from mpipipe.planner.placement.mixed import PRECISION, solve_mixed
from mpipipe.planner.placement.problem import Loads, Problem, check, gap, loads
from mpipipe.planner.placement.search import solve_in_chunks, solve_in_order
from mpipipe.planner.placement.single import single_device_bound_s
from mpipipe.values import Int32, Value

SHARE = (
    0.25  # of the budget, for the order, the chunks and their first bound each; the rest is for the programme
)
_ROUNDING = 1e-9  # of sums in another order, relative
_FIT_S = 5.0  # for each number of devices of which a message says whether it would do


@dataclass(frozen=True)
class Placement(Value):
    device_of: tuple[int, ...]  # by operator; accelerators in the order of the pipeline, then CPUs
    loads: Loads
    bound_s: float  # no placement of this kind is loaded less
    contiguous: bool  # of this kind: the devices have an order in which no forward edge goes back
    seconds: float  # that it took

    @property
    def load_s(self) -> float:
        return self.loads.most_s

    @property
    def gap(self) -> float:
        """0: proved optimal."""
        return gap(self.load_s, self.bound_s)


def place(problem: Problem, source: str, *, contiguous: bool = False, budget_s: float = 10.0) -> Placement:
    """The best placement found in `budget_s` seconds; `source` names the problem in messages.

    Without `contiguous` a device may have several chunks of the graph: the result is never above the
    contiguous one, where the search starts. Raises PlanError where no placement can be, or none is found.
    """
    started = time.perf_counter()
    check(problem, source)
    items = contract(problem, contiguous)
    check_items(problem, items, source)
    room = problem.n_cpus or items.nbytes.sum() <= problem.n_accelerators * problem.capacity_bytes
    found: list[list[int]] = []
    bound_s = math.inf
    if room:
        found, bound_s = (
            _in_order(problem, budget_s) if contiguous else _in_chunks(problem, items, started, budget_s)
        )
    if bound_s == math.inf:
        raise does_not_fit(problem, items, source, _fits_in_order if contiguous else _fits)
    if not found:
        raise PlanError(
            f"{source}: no placement on {problem.n_devices} devices was found within --budget {budget_s:g}s; "
            f"give --budget {max(10.0, 10 * budget_s):g}s, or more --memory"
        )
    best = _best(problem, found)
    what = loads(problem, best)
    if bound_s >= what.most_s * (1 - (_ROUNDING if contiguous else PRECISION)):
        bound_s = what.most_s
    return Placement(tuple(best), what, bound_s, contiguous, time.perf_counter() - started)


Found = tuple[list[list[int]], float]  # placements by operator, and the bound; inf: none fits into memory


def _in_order(problem: Problem, budget_s: float) -> Found:
    items = contract(problem, contiguous=True)
    found, bound_s = solve_in_order(items, *_devices(problem), budget_s)
    return [device[items.of_operator].tolist() for device in found], bound_s


def _in_chunks(problem: Problem, items: Items, started: float, budget_s: float) -> Found:
    """By local search from the contiguous placement; if not proved, from elsewhere and by the programme."""
    devices = _devices(problem)
    found, _ = _in_order(problem, budget_s * SHARE)
    start = None
    if found:
        start = np.zeros(len(items), np.int32)
        start[items.of_operator] = _best(problem, found)
    found += _by_operator(items, solve_in_chunks(items, *devices, budget_s * SHARE, start))
    known_s = min((loads(problem, device_of).most_s for device_of in found), default=math.inf)
    bound_s = simple_bound_s(items, problem.n_accelerators, problem.n_cpus)
    if bound_s < known_s * (1 - PRECISION):
        single_s = single_device_bound_s(items, *devices, known_s, budget_s * SHARE)
        bound_s = max(bound_s, min(single_s, known_s))
    if bound_s < known_s * (1 - PRECISION):  # the contiguous placement may lie in a valley of its own
        scattered = solve_in_chunks(items, *devices, budget_s * SHARE / 2, None)
        found += [each for each in _by_operator(items, scattered) if _holds(problem, each)]
        known_s = min((loads(problem, device_of).most_s for device_of in found), default=math.inf)
    if bound_s < known_s * (1 - PRECISION):
        solved = solve_mixed(items, *devices, known_s, started + budget_s - time.perf_counter())
        found += [each for each in _by_operator(items, solved.device) if _holds(problem, each)]
        bound_s = max(bound_s, min(solved.bound_s, known_s))
    return found, bound_s


def _best(problem: Problem, found: list[list[int]]) -> list[int]:
    return min(found, key=lambda device_of: loads(problem, device_of).most_s)


def _devices(problem: Problem) -> tuple[int, int, float]:
    return problem.n_accelerators, problem.n_cpus, problem.capacity_bytes


def _by_operator(items: Items, device: Int32 | None) -> list[list[int]]:
    """No placement, or one."""
    return [] if device is None else [device[items.of_operator].tolist()]


def _holds(problem: Problem, device_of: list[int]) -> bool:
    """Whether each accelerator has the memory; HiGHS allows for one part in a million more."""
    held = loads(problem, device_of).memory_bytes[: problem.n_accelerators]
    return max(held) <= problem.capacity_bytes


def _fits_in_order(items: Items, capacity_bytes: float, count: int) -> bool:
    return bool(solve_in_order(items, count, 0, capacity_bytes, _FIT_S)[0])


def _fits(items: Items, capacity_bytes: float, count: int) -> bool:
    """By the largest first, each where there is room; where that fails, by the programme."""
    free = [capacity_bytes] * count
    for nbytes in sorted(items.nbytes.tolist(), reverse=True):
        room = next((i for i, left in enumerate(free) if left >= nbytes), None)
        if room is None:
            return solve_mixed(items, count, 0, capacity_bytes, math.inf, _FIT_S).device is not None
        free[room] -= nbytes
    return True
