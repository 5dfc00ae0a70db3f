"""Dynamic programming over (stage, end) for any cost of a stage that is known from its number, its
first group and its end:

    V[s, r] = min over l < r of combine(V[s-1, l], cost_s(l, r))

One column (all stages, all first groups, one end) is one numpy expression: O(stages * groups^2).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpipipe.values import Float64

Column = Callable[[int], Float64]  # end -> cost (n_stages, end) by first group; inf = forbidden
Combine = Callable[[Float64, Float64], Float64]  # (best of the stages before, cost of this one)


def sweep(n_groups: int, n_stages: int, column: Column, combine: Combine) -> tuple[Float64, tuple[int, ...]]:
    """Table of the best value of the first s stages covering the first r groups, (S+1, N+1), and
    the cuts that reach its last corner (meaningless where that is inf)."""
    best = np.full((n_stages + 1, n_groups + 1), np.inf)
    best[0, 0] = 0.0
    first = np.zeros((n_stages, n_groups + 1), np.int64)
    for end in range(1, n_groups + 1):
        value = combine(best[:-1, :end], column(end))  # (n_stages, end)
        first[:, end] = value.argmin(axis=1)
        best[1:, end] = value.min(axis=1)
    cuts, end = [], n_groups
    for stage in range(n_stages - 1, 0, -1):
        end = int(first[stage, end])
        cuts.append(end)
    return best, tuple(reversed(cuts))
