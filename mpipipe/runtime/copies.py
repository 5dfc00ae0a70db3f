"""What the copies of a stage exchange in a step: gradients to the owner of a parameter, its new weights back.

    last backward   each copy has the sums of its own micro-batches
    SHARD           a copy sends what its partner collects for owners, and adds what it collects itself
    NORM, STEP      of the own shard: norms, update and optimizer state are nowhere else
    UPDATE          the new weights go to the other copies, back along the same ways

Optimizer state sharded by whole parameters (ZeRO-1, Rajbhandari et al. 2020). The sums of the copies are
added in the binary tree of the blocks, continued: so the bits are those of one copy. Who meets whom, and for
which owners, is in `mpipipe.planner.copies`.

Copy 0 owns the tied parameters, the sums of their uses on other stages, and the buffers: it is given the
statistics of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from mpipipe.cluster.comm import Communicator, Request
from mpipipe.graph.rewrite import BufferUpdate
from mpipipe.planner.copies import halving, owners_for, parts_width
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.weights import StageWeights, Tree
from mpipipe.values import Program, share_of


class Copies:
    """Of one stage on this rank. updates: of its buffers, in every training micro-batch."""

    def __init__(self, stage: Stage, updates: Sequence[BufferUpdate]) -> None:
        self.stage, self.weights = stage, stage.weights
        self.copy, self.n = stage.weights.copy, stage.weights.n_copies
        self._low = halving(self.n)  # copies that halve; an odd number of such groups meets in pairs
        self._updates = updates
        self._tree = Tree()  # of the groups

    # -- gradients and statistics ------------------------------------------------------------------

    def begin(self) -> None:
        """The own sums are whole."""
        self._left = self.n // self._low
        if self._low == 1:
            self._add(self.copy, accumulators(self.weights, [self.copy]))

    def part_for(self, other: int, n_micro: int) -> list[Tensor]:
        """What a partner collects of the sums that are here, and of the statistics of their micro-batches."""
        owners = owners_for(other, self.copy, self.n)
        parts = accumulators(self.weights, owners)
        if 0 in owners:
            parts += self.stage.statistics_of(self._micros(self.copy, other, n_micro))
        return parts

    def room_for(self, other: int, n_micro: int) -> list[Tensor]:
        """For what is collected here from a partner."""
        owners = owners_for(self.copy, other, self.n)
        parts = [torch.empty_like(t) for t in accumulators(self.weights, owners)]
        if 0 in owners:
            micros = self._micros(other, self.copy, n_micro)
            parts += [self._empty(update) for _ in micros for update in self._measured]
        return parts

    def arrived(self, other: int, parts: Sequence[Tensor], n_micro: int) -> None:
        owners, differ = owners_for(self.copy, other, self.n), self.copy ^ other
        own = accumulators(self.weights, owners)
        sums, values = parts[: len(own)], iter(parts[len(own) :])
        for micro in self._micros(other, self.copy, n_micro) if 0 in owners else ():
            self.stage.take_statistics(
                micro, [(u, None if u.statistic is None else next(values)) for u in self._updates]
            )
        if differ >= self._low:
            self._add(other // self._low, list(sums))
            return
        with torch.no_grad():
            for mine, its in zip(own, sums, strict=True):
                mine.add_(its)
        if 2 * differ == self._low:  # the last of these rounds
            self._add(self.copy // self._low, accumulators(self.weights, [self.copy]))

    def _micros(self, copy: int, other: int, n_micro: int) -> range:
        """Whose sums a copy has when it meets another one."""
        width = parts_width(copy, other, self.n)
        first = copy - copy % width
        last = first + width - 1
        return range(share_of(first, self.n, n_micro).start, share_of(last, self.n, n_micro).stop)

    @property
    def _measured(self) -> list[BufferUpdate]:
        return [update for update in self._updates if update.statistic is not None]

    def _empty(self, update: BufferUpdate) -> Tensor:
        return torch.empty_like(self.weights.buffer(update.buffer))

    def _add(self, group: int, sums: list[Tensor]) -> None:
        self._tree.add(group, sums)
        self._left -= 1
        if self._left == 0:
            self._tree.finish(accumulators(self.weights, [self.copy]))

    # -- weights -------------------------------------------------------------------------------------

    def updated_for(self, other: int) -> list[Tensor]:
        """What a partner is given: weights that are new here, and buffers that training changes."""
        return self._updated(owners_for(self.copy, other, self.n))

    def updated_by(self, other: int) -> list[Tensor]:
        """Likewise what it gives."""
        return self._updated(owners_for(other, self.copy, self.n))

    def _updated(self, owners: range) -> list[Tensor]:
        weights = [group.data.buffer for group in self.weights.groups if group.owner in owners]
        buffers = dict.fromkeys(update.buffer for update in self._updates) if 0 in owners else ()
        return [*weights, *(self.weights.buffer(name) for name in buffers)]


def accumulators(weights: StageWeights, owners: Iterable[int]) -> list[Tensor]:
    """What backward adds into for the parameters that these copies update."""
    wanted = {*owners}
    sums = [group.grad.buffer for group in weights.groups if group.owner in wanted]
    return [*sums, *weights.extra.values()] if 0 in wanted else sums


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
