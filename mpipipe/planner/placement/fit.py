"""Why nothing fits: which item, how many bytes are missing, how many devices would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.placement.items import Items
from mpipipe.planner.placement.problem import Problem
from mpipipe.planner.sizes import size_text


def check_items(problem: Problem, items: Items, source: str) -> None:
    """Raises PlanError if an item can run on no device, however many there are. A CPU takes everything."""
    if problem.n_cpus:
        return
    for item in np.flatnonzero(~np.isfinite(items.accelerator_s)):
        raise PlanError(
            f"{source}: {_named(problem, items, int(item))} is not supported on an accelerator and there are "
            "0 CPUs; set maxCPUs to 1, or take it as supported"
        )
    heaviest = int(items.nbytes.argmax())
    needs, has = items.nbytes[heaviest], problem.capacity_bytes
    if needs > has:
        raise PlanError(
            f"{source}: {_named(problem, items, heaviest)} needs {size_text(int(needs))}, a device has "
            f"{size_text(int(has))}: {size_text(int(np.ceil(needs - has)))} short, and no number of devices "
            f"would do; give --memory {int(np.ceil(needs))}B at least"
        )


def does_not_fit(
    problem: Problem, items: Items, source: str, fits: Callable[[Items, float, int], bool]
) -> PlanError:
    """The error, once it is known that the accelerators cannot hold the items together.

    fits(items, capacity_bytes, count): whether that many accelerators can, for items without costs. Devices
    are counted up from what the sum of the bytes asks for: the first number that fits is the smallest.
    """
    total, has = float(items.nbytes.sum()), problem.capacity_bytes
    n = problem.n_accelerators
    free = replace(items, accelerator_s=np.zeros(len(items)), tensor_s=np.zeros(len(items.tensor_s)))
    first = max(n + 1, int(np.ceil(total / has * (1 - 1e-12))))
    counts = (count for count in range(first, len(items)) if fits(free, has, count))
    enough = next(counts, len(items))  # one for each item always would
    lacking = total - n * has
    short = (
        f"{size_text(int(np.ceil(lacking)))} short"
        if lacking > 0
        else f"enough in sum, but {_named(problem, items, int(items.nbytes.argmax()))} and others do not go "
        "together"
    )
    return PlanError(
        f"{source}: all need {size_text(int(total))}, {n} devices of {size_text(int(has))} have "
        f"{size_text(int(n * has))}: {short}; give --devices {enough}, the smallest number that would do, or "
        "more --memory"
    )


def _named(problem: Problem, items: Items, item: int) -> str:
    members = np.flatnonzero(items.of_operator == item)
    first = problem.operators[members[0]]
    more = f" with {len(members) - 1} more that have to share its device" if len(members) > 1 else ""
    return f"node {first.id} ({first.name}){more}"
