"""Unlike numbers of copies of the stages, such as 15 and 1 (Narayanan et al. 2019, PipeDream): which, and
where to cut. By compute alone, on ranks of one speed, as a first answer: the simulated step decides.

A stage of c seconds for a micro-batch, in r copies, takes c / r of them. With S copies of the pipeline, the
least common multiple of all r, S micro-batches go through it beside each other, so with m micro-batches and p
stages a step takes about (m + (p - 1) S) max(c / r).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mpipipe.planner.copies import legal_copies, pipeline_copies
from mpipipe.planner.stages import Cuts, Ranges
from mpipipe.values import Costs, Float64, Int64, Numerics

MOST_STAGES = 6
MOST_RANKS = 32  # above, there are too many shapes to look at within a plan's time
MOST_GROUPS = 256
SIMULATED = 4  # shapes
Shape = tuple[int, ...]  # copies of each stage


def balanced(costs: Costs, copies: Shape) -> tuple[Cuts, float]:
    """The cuts into stages with so many copies of which the slowest takes least, and its seconds for each
    micro-batch."""
    _, cuts, slowest_s = _Table(costs, [(n,) for n in copies], sum(copies)).best(len(copies), sum(copies))
    return cuts, slowest_s


def promising_shapes(costs: Costs, numerics: Numerics, n_ranks: int) -> list[Shape]:
    """Those of unlike numbers that use all ranks and should take least, the best first."""
    n_groups, found = len(costs.groups), dict[Shape, float]()  # seconds of the slowest stage
    if n_ranks > MOST_RANKS or n_groups > MOST_GROUPS:
        return []
    n_micro, even_s = numerics.micro_batches, float(Ranges(costs).seconds.sum()) / n_ranks

    def step_s(shape: Shape) -> float:
        return (n_micro + (len(shape) - 1) * pipeline_copies(shape)) * found[shape]

    legal = tuple(n for n in legal_copies(numerics) if n < n_ranks)
    for ways in _ways(legal, n_ranks, n_micro)[1:]:
        others_s = sorted(map(step_s, found))
        if len(others_s) >= SIMULATED and (n_micro + ways) * even_s >= others_s[SIMULATED - 1]:
            break  # no shape of so many ways, or of more, is among the best
        choices = tuple(n for n in legal if ways % n == 0)
        most_stages = min(MOST_STAGES, n_groups, n_ranks - 1)
        table = _Table(costs, [choices] * most_stages, n_ranks)
        for n_stages in range(2, most_stages + 1):
            shape, _, slowest_s = table.best(n_stages, n_ranks)
            if len({*shape}) > 1 and pipeline_copies(shape) == ways:
                found[shape] = slowest_s
    for mirrored in {shape[::-1]: None for shape in found}:  # the estimate does not know how a pipeline fills
        if mirrored not in found:
            found[mirrored] = balanced(costs, mirrored)[1]
    return sorted(found, key=step_s)[:SIMULATED]


def _ways(legal: Shape, n_ranks: int, most: int) -> list[int]:
    """The least common multiples, up to `most`, of legal numbers that are so many ranks at most together;
    ascending."""
    fewest = {1: 0}  # ranks
    for n in legal:
        for ways, used in [*fewest.items()]:
            both = math.lcm(ways, n)
            if both <= most and used + n <= min(n_ranks, fewest.get(both, n_ranks)):
                fewest[both] = used + n
    return sorted(fewest)


class _Table:
    """The best of all cuts and copies, by dynamic programming over stages, the ranks that they use and the
    group at which they end. choices: of each stage."""

    def __init__(self, costs: Costs, choices: Sequence[Shape], n_ranks: int) -> None:
        before_s = np.concatenate([[0.0], np.cumsum(Ranges(costs).seconds)])
        n = len(before_s)
        seconds = np.where(np.tri(n, dtype=bool), np.inf, before_s - before_s[:, None])  # (first, end)
        least = np.full((n_ranks + 1, n), np.inf)  # of the slowest stage, by ranks used and end
        least[0, 0] = 0.0
        self._least: list[Float64] = [least]
        self._took: list[Int64] = []  # of the last stage: its copies and its first group
        shared = {count: seconds / count for legal in choices for count in legal}
        for legal in choices:
            self._add(legal, shared)

    def _add(self, legal: Shape, shared: Mapping[int, Float64]) -> None:
        before = self._least[-1]
        least, took = np.full_like(before, np.inf), np.zeros((*before.shape, 2), np.int64)
        for used, count in itertools.product(range(1, len(before)), legal):
            if count > used or np.isinf(before[used - count]).all():
                continue
            slowest_s = np.maximum(before[used - count][:, None], shared[count])
            first = slowest_s.argmin(axis=0)
            found = slowest_s[first, np.arange(len(first))]
            better = found < least[used]
            least[used, better] = found[better]
            took[used, better, 0], took[used, better, 1] = count, first[better]
        self._least.append(least)
        self._took.append(took)

    def best(self, n_stages: int, n_ranks: int) -> tuple[Shape, Cuts, float]:
        """The copies of each stage, the cuts, and the seconds of the slowest; nothing where there is none."""
        used, end, copies, edges = n_ranks, self._least[0].shape[1] - 1, list[int](), list[int]()
        slowest_s = float(self._least[n_stages][used, end])
        if np.isinf(slowest_s):
            return (), (), slowest_s
        for took in reversed(self._took[:n_stages]):
            count, first = took[used, end].tolist()
            used, end = used - count, first
            copies.append(count)
            edges.append(first)
        return tuple(reversed(copies)), tuple(reversed(edges[:-1])), slowest_s
