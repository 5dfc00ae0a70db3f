"""What the copies of a stage exchange in a step: gradients to the owner of a parameter, its new weights back.

    last backward   each copy has the sums of its own micro-batches
    SHARD           a copy sends what others own, and adds what they have of its own shard
    NORM, STEP      of the own shard: norms, update and optimizer state are nowhere else
    UPDATE          the new weights go to the other copies

Optimizer state sharded by whole parameters (ZeRO-1, Rajbhandari et al. 2020). The sums of the copies are
added in the binary tree of the blocks, continued: so the bits are those of one copy. They come in an order in
which neighbours in the tree follow each other, and are added at once: so few are held (`sums_held`).

Copy 0 owns the tied parameters, the sums of their uses on other stages, and the buffers: it is given the
statistics of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mpipipe.cluster.comm import Communicator, Request
from mpipipe.graph.rewrite import BufferUpdate
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.weights import StageWeights, Tree
from mpipipe.values import Program


class Copies:
    """Of one stage on this rank. updates: of its buffers, in every training micro-batch."""

    def __init__(self, stage: Stage, updates: Sequence[BufferUpdate]) -> None:
        self.stage, self.weights, self.copy = stage, stage.weights, stage.weights.copy
        self._updates = updates
        self._tree = Tree()
        self._left = 0  # copies whose sums have not come

    # -- gradients and statistics ------------------------------------------------------------------

    def begin(self) -> None:
        """The own sums are whole."""
        self._left = self.weights.n_copies
        self._add(self.copy, accumulators(self.weights, self.copy))

    def part_of(self, other: int, share: range) -> list[Tensor]:
        """What copy `other` owns of the own sums, and of the statistics of the own micro-batches."""
        parts = accumulators(self.weights, other)
        return parts if other else [*parts, *self.stage.statistics_of(share)]

    def room_for(self, share: range) -> list[Tensor]:
        """For what another copy, with these micro-batches, has of the own shard."""
        parts = [torch.empty_like(t) for t in accumulators(self.weights, self.copy)]
        return parts if self.copy else [*parts, *(self._empty(u) for _ in share for u in self._measured)]

    def arrived(self, other: int, share: range, parts: Sequence[Tensor]) -> None:
        n = len(accumulators(self.weights, self.copy))
        self._add(other, list(parts[:n]))
        values = iter(parts[n:])
        for micro in share if self.copy == 0 else ():
            self.stage.take_statistics(
                micro, [(u, None if u.statistic is None else next(values)) for u in self._updates]
            )

    @property
    def _measured(self) -> list[BufferUpdate]:
        return [update for update in self._updates if update.statistic is not None]

    def _empty(self, update: BufferUpdate) -> Tensor:
        return torch.empty_like(self.weights.buffer(update.buffer))

    def _add(self, copy: int, sums: list[Tensor]) -> None:
        self._tree.add(copy, sums)
        self._left -= 1
        if self._left == 0:
            self._tree.finish(accumulators(self.weights, self.copy))

    # -- weights -------------------------------------------------------------------------------------

    def updated_by(self, copy: int) -> list[Tensor]:
        """Weights, and buffers that training changes, that a copy owns."""
        weights = [group.data.buffer for group in self.weights.groups if group.owner == copy]
        buffers = dict.fromkeys(update.buffer for update in self._updates)
        return weights if copy else [*weights, *(self.weights.buffer(name) for name in buffers)]


def accumulators(weights: StageWeights, owner: int) -> list[Tensor]:
    """What backward adds into for the parameters that copy `owner` updates."""
    sums = [group.grad.buffer for group in weights.groups if group.owner == owner]
    return sums if owner else [*sums, *weights.extra.values()]


def of_all_copies(comm: Communicator, program: Program, mine: Sequence[float]) -> list[float]:
    """A number for each micro-batch of the step, of which each rank of the last stage has those that it does.
    Nothing else has this tag between two copies."""
    found, requests = np.zeros(program.n_micro), list[Request]()
    shares = {rank: program.share_on(rank) for rank in program.holders(program.n_stages - 1)}
    parts = {rank: found[share.start : share.stop] for rank, share in shares.items()}
    own = parts.pop(comm.rank)
    own[:] = mine
    for rank, part in parts.items():
        requests.append(comm.irecv(part.view(np.uint8), rank, 0))
        requests.append(comm.isend(own.view(np.uint8), rank, 0))
    for request in requests:
        comm.wait(request)
    return found.tolist()
