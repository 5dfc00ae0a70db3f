"""Dynamic programming over (stage, end) for any cost of a stage that is known from its number, its
first group and its end:

    V[s, r] = min over l < r of combine(V[s-1, l], cost_s(l, r))

One column (all stages, all first groups, one end) is one numpy expression: O(stages * groups^2).
`sweep_near` looks at the short stages first, which for many stages is a small part of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpipipe.values import Float64

Column = Callable[[int, int], Float64]  # (low, end) -> cost (n_stages, end - low) by first group; inf = no
Combine = Callable[[Float64, Float64], Float64]  # (best of the stages before, cost of this one)
Low = Callable[[int], int]  # end -> no stage that ends there begins earlier
Swept = tuple[Float64, tuple[int, ...]]
_ROUNDING = 1.0 + 1e-9  # of sums that are taken in another order


def sweep(n_groups: int, n_stages: int, column: Column, combine: Combine, low: Low = lambda _: 0) -> Swept:
    """Table of the best value of the first s stages covering the first r groups, (S+1, N+1), and
    the cuts that reach its last corner (meaningless where that is inf)."""
    best = np.full((n_stages + 1, n_groups + 1), np.inf)
    best[0, 0] = 0.0
    first = np.zeros((n_stages, n_groups + 1), np.int64)
    for end in range(1, n_groups + 1):
        start = low(end)
        value = combine(best[:-1, start:end], column(start, end))  # (n_stages, end - start)
        first[:, end] = start + value.argmin(axis=1)
        best[1:, end] = value.min(axis=1)
    cuts, end = [], n_groups
    for stage in range(n_stages - 1, 0, -1):
        end = int(first[stage, end])
        cuts.append(end)
    return best, tuple(reversed(cuts))


def low_for(seconds: Float64, limit: float) -> Low:
    """For `sweep`: stages of at most `limit`, where one takes at least the sum of its groups' `seconds`."""
    before = np.concatenate([[0.0], np.cumsum(seconds)])
    lows = np.searchsorted(before * _ROUNDING, before - limit * _ROUNDING)
    return lambda end: min(int(lows[end]), end - 1)


def sweep_near(swept: Callable[[Low], Swept], seconds: Float64, guess: float) -> Swept:
    """`sweep` with the greatest of the costs, exact: no stage of the best cut costs more than its value. So
    stages of up to twice the guess are enough if a value below that is found; else they are doubled.

    swept: `sweep`, but for `low`; seconds: by group, such that no stage costs less than their sum; guess:
    near the value, from below.
    """
    limit, whole = 2.0 * guess, float(seconds.sum()) * _ROUNDING
    while limit < whole:
        best, cuts = swept(low_for(seconds, limit))
        if best[-1, -1] <= limit:
            return best, cuts
        limit *= 2.0
    return swept(lambda _: 0)


def least(guess: float, attempt: Callable[[float], float]) -> float:
    """The least value that can be had, exact to the last bit, by bisection.

    guess: no value is below it. attempt(limit): a value of at most `limit` that can be had, else inf.
    """
    if math.isfinite(found := attempt(guess)):
        return found
    below, more = guess, 0.0625  # nothing can be had at `below`
    while math.isinf(found := attempt(limit := guess * (1.0 + more))):
        below, more = limit, 2.0 * more
    last_step = False
    while (following := math.nextafter(found, -math.inf)) > below:
        middle = below + (found - below) / 2.0
        near = found - below < 1e-3 * found  # then try whether it is the least already, every other time
        tried = following if (near and last_step) or middle <= below else min(middle, following)
        value, last_step = attempt(tried), not last_step
        if math.isinf(value):
            below = tried
        else:
            found = value
    return found
