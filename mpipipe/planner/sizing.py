"""Costs as a function of the size of a micro-batch, and which sizes to take costs of.

    take a small and a usual size -> search -> the size that promises most -> take it -> search ... -> Joint

Small products are slow for their size and every call has a price, so a micro-batch of two samples takes less
than two of one. Between the sizes that were taken costs are linear. The answer is of a size that was taken.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpipipe.errors import CaptureError, PlanError
from mpipipe.planner.asked import Asked
from mpipipe.planner.joint import Joint, preferred, search
from mpipipe.planner.prediction import LIKE
from mpipipe.values import OF_SAMPLES_BYTES, OF_SAMPLES_S, BatchBytes, Costs, GroupCost

PER_RANK = 4  # micro-batches for each rank: about where a pipeline is worth its bubble
MOST_SIZES = 5  # that are taken


def costs_at(taken: Mapping[int, Costs], batch: int, count: int) -> Costs:
    """For `count` micro-batches, from the costs of steps of one micro-batch of some sizes: linear between two
    of them, and beyond them as far as costs grow. Seconds are those of the mean micro-batch, bytes of the
    largest. The cluster is that of the size taken last. Raises PlanError where sizes have other groups."""
    sizes, mean, most = sorted(taken), batch / count, math.ceil(batch / count)
    first, last = taken[sizes[0]], list(taken.values())[-1]
    at = min(max(bisect.bisect_left(sizes, most), 1), len(sizes) - 1) if len(sizes) > 1 else 0
    low, high = (sizes[at - 1], sizes[at]) if at else (0, sizes[0])
    _check_same(first, last, sizes[0], list(taken)[-1])
    nothing: dict[str, Any] = dict.fromkeys((*OF_SAMPLES_S, *OF_SAMPLES_BYTES), 0)
    none = [replace(g, **nothing) for g in first.groups]
    pairs = zip(taken[low].groups if low else none, taken[high].groups, strict=True)
    groups = tuple(_between(a, b, (mean - low) / (high - low), (most - low) / (high - low)) for a, b in pairs)
    rows_bytes = {name: nbytes * count * most // high for name, nbytes in taken[high].rows_bytes.items()}
    ahead = taken[high].batch_bytes
    batch_bytes = BatchBytes(
        ahead.first * most // high, ahead.last * most // high, ahead.weighing * count * most // high
    )
    return replace(last, groups=groups, rows_bytes=rows_bytes, batch_bytes=batch_bytes)


def _between(a: GroupCost, b: GroupCost, seconds_at: float, bytes_at: float) -> GroupCost:
    """At 0 it is `a`, at 1 `b`."""
    found: dict[str, Any] = {
        name: _line(getattr(a, name), getattr(b, name), seconds_at) for name in OF_SAMPLES_S
    }
    found |= {name: round(_line(getattr(a, name), getattr(b, name), bytes_at)) for name in OF_SAMPLES_BYTES}
    found["act_parts"] = _shared(b.act_parts, found["act_bytes"])
    found["grad_parts"] = _shared(b.grad_parts, found["grad_bytes"])
    return replace(b, **found)


def _shared(parts: Sequence[int], total: int) -> tuple[int, ...]:
    return tuple(round(total * part / sum(parts)) for part in parts)


def _line(a: float, b: float, at: float) -> float:
    return b + max(0.0, b - a) * (at - 1.0) if at > 1.0 else max(0.0, a * (1.0 - at) + b * at)


def _check_same(first: Costs, last: Costs, size: int, other: int) -> None:
    pairs = itertools.zip_longest(first.groups, last.groups)
    wrong = next(((a, b) for a, b in pairs if a is None or b is None or a.name != b.name), None)
    if wrong is not None:
        names = [repr(g.name) if g else "nothing" for g in wrong]
        raise PlanError(
            f"the model has other operators for {size} samples than for {other}: {names[0]} in the place of "
            f"{names[1]}; set pipeline.micro_batches to a number"
        )


def settle(
    asked: Asked,
    take: Callable[[int], Costs],
    late: Callable[[], bool] = lambda: False,
    share: Callable[[Callable[[], int | None]], int | None] = lambda decide: decide(),
) -> tuple[Joint | None, dict[int, Costs]]:
    """The search with costs that are taken where they are needed, and these by size. The size of the plan's
    micro-batches is one of them.

    take: costs of a micro-batch of so many samples; CaptureError where the model does not take so few.
    late: the time is used. share: what one rank decides is made known to all; the others have no Joint.
    Raises PlanError as `search` does.
    """
    asked, taken = _smallest(asked, take)
    found: list[Joint] = []

    def decide() -> int | None:
        """The size to take next; None where the answer is found."""
        batch, known = asked.numerics.batch, [c for c in asked.counts if asked.of(c).micro_batch in taken]
        if len(asked.sizes) > 1 and len(taken) == 1:
            return usual_size(asked)
        joint = search(asked, lambda count: costs_at(taken, batch, count), late, known)
        if joint.best.micro_batch not in taken:
            of_taken = preferred([t for t in joint.tried if t.micro_batches in known])
            promises = joint.best.step_s * LIKE < of_taken.step_s and len(taken) < MOST_SIZES and not late()
            if promises or of_taken.made is None:
                return joint.best.micro_batch
            joint = replace(joint, best=of_taken, exact=False)
        found[:] = [joint]
        return None

    while (size := share(decide)) is not None:
        taken[size] = take(size)
    return (found[0] if found else None), taken


def usual_size(asked: Asked) -> int:
    """That of a micro-batch that is likely to be chosen; not the smallest where there are several."""
    usual = math.ceil(asked.numerics.batch / (PER_RANK * asked.n_ranks))
    return min(asked.sizes[1:] or asked.sizes, key=lambda size: (abs(size - usual), size))


def _smallest(asked: Asked, take: Callable[[int], Costs]) -> tuple[Asked, dict[int, Costs]]:
    """The costs of the smallest micro-batch: of a single sample, or what is next where the model takes no
    single one, as one with BatchNorm may; numbers that would have smaller ones are then left out."""
    first, *others = asked.sizes
    try:
        return asked, {first: take(first)}
    except CaptureError:
        batch, second = asked.numerics.batch, min(others, default=0)
        counts = tuple(count for count in asked.counts if second and batch // count >= second)
        if not counts:
            raise
    asked = replace(asked, counts=counts)
    return asked, {asked.sizes[0]: take(asked.sizes[0])}
