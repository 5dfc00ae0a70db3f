"""Gradients of tied parameters: which use is where, and in which order the uses are merged.

per_use   owner's gradient = use 0 + use 1 + ... , once per step, after the blocks are summed; of a use 0
          that keeps rows those are added to use 1, which is there already
eager     per micro-batch: last use + ... + first use (the order of autograd in one process), then
          into the accumulator
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpipipe.graph.cut import Leaf
from mpipipe.runtime.weights import StageWeights
from mpipipe.values import Graph


class Ties:
    def __init__(
        self, graph: Graph, cuts: Sequence[str], owner: dict[str, int], trained: frozenset[str]
    ) -> None:
        starts = [0, *(graph.groups.index(c) for c in cuts)]

        def stage(group: int) -> int:
            return sum(start <= group for start in starts) - 1

        self.owner = owner
        self.uses: dict[str, tuple[int, ...]] = {t.param: t.groups for t in graph.ties if t.param in trained}
        self.stage_of_use = {(n, g): stage(g) for n, groups in self.uses.items() for g in groups}

    def between(self, user: int, owner: int) -> list[Leaf]:
        """Uses on stage `user` of parameters that stage `owner` owns: the parts of a tied message."""
        return [use for use, s in self.stage_of_use.items() if s == user and self.owner[use[0]] == owner]

    def params_between(self, user: int, owner: int) -> list[str]:
        """Parameters that stage `owner` owns and stage `user` holds a copy of."""
        return list(dict.fromkeys(name for name, _ in self.between(user, owner)))

    @torch.no_grad()
    def merge_step(self, weights: StageWeights, arrived: dict[Leaf, Tensor]) -> None:
        """per_use: adds the sums of the other uses (`arrived`, local ones too) to the owner's
        gradient, in the order of uses."""
        for name, groups in self.uses.items():
            if name in weights.rows:
                weights.add_rows(name)
            elif self.owner[name] == weights.stage:
                for group in groups[1:]:
                    weights.grad[name].add_(arrived[name, group])

    @torch.no_grad()
    def merge_micro(self, weights: StageWeights, arrived: dict[Leaf, Tensor]) -> None:
        """eager: adds one micro-batch, all uses summed from the last to the first."""
        for name, groups in self.uses.items():
            if self.owner[name] != weights.stage:
                continue
            total: Tensor | None = None
            for group in reversed(groups):
                g = arrived.get((name, group))
                if g is not None:
                    total = g if total is None else total + g
            if total is not None:
                weights.grad[name].add_(total)


def take_gradients(weights: StageWeights) -> dict[Leaf, Tensor]:
    """eager: the gradients that one backward left in the leaves of tied parameters."""
    taken: dict[Leaf, Tensor] = {}
    for (name, use), leaf in weights.leaves.items():
        if name in weights.uses and leaf.grad is not None:
            taken[name, use] = leaf.grad
            leaf.grad = None
    return taken
