"""What the copies of a stage exchange in a step: gradients to the owner of a parameter, its new weights back.

    last backward   each copy has the sums of its own micro-batches
    SHARD           a copy sends what its partner collects for owners, and adds what it collects itself, in
                    buckets: while one is added the next one is on its way, and no more memory is needed;
                    once all are added it meets the next partner, while its rank computes other stages
    NORM, STEP      of the own shard: norms, update and optimizer state are nowhere else
    UPDATE          the new weights go to the other copies, back along the same ways

Optimizer state sharded by whole parameters (ZeRO-1, Rajbhandari et al. 2020). The sums of the copies are
added in the binary tree of the blocks, continued: so the bits are those of one copy. Fast ones that meet node
by node are added where they are, as they come. Who meets whom, and for which owners, is in
`mpipipe.planner.exchange`.

Copy 0 owns the tied parameters, the sums of their uses on other stages, and the buffers: it is given the
statistics of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mpipipe.cluster.comm import Communicator, Request
from mpipipe.graph.rewrite import BufferUpdate
from mpipipe.planner.exchange import BUCKET_BYTES, exchange_of, halving
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.transport import Piece, flat
from mpipipe.runtime.weights import StageWeights, Tree
from mpipipe.values import Program, share_of


class Copies:
    """Of one stage on this rank. updates: of its buffers, in every training micro-batch; nodes: as of
    `Exchange`."""

    def __init__(self, stage: Stage, updates: Sequence[BufferUpdate], nodes: tuple[int, ...]) -> None:
        self.stage, self.weights = stage, stage.weights
        self.copy, self.n, self._exchange = stage.weights.copy, stage.weights.n_copies, exchange_of(nodes)
        self._low = halving(self.n)  # copies that halve; an odd number of such groups meets in pairs
        self._updates = updates
        self._own: dict[int, Tree] = {}  # of each bucket of the own shard, by its address

    # -- gradients and statistics ------------------------------------------------------------------

    def begin(self) -> None:
        """The own sums are whole."""
        if self._exchange.by_node:
            return
        for bucket in self._buckets([self.copy]):
            own = self._own[bucket.data_ptr()] = Tree([bucket], self.n // self._low)
            if self._low == 1:
                own.add(self.copy, [bucket])

    def part_for(self, other: int, n_micro: int) -> list[Tensor]:
        """What a partner collects of the sums that are here, and of the statistics of their micro-batches."""
        owners = self._exchange.owners_for(other, self.copy)
        parts = list(self._buckets(owners))
        if 0 in owners:
            parts += self.stage.statistics_of(self._micros(self.copy, other, n_micro))
        return parts

    def pieces_from(self, other: int, n_micro: int) -> Iterator[Piece]:
        """Of what is collected here from a partner."""
        owners = self._exchange.owners_for(self.copy, other)
        for mine in self._buckets(owners):
            yield torch.empty_like(mine), partial(self._take, other, mine)
        for micro in self._micros(other, self.copy, n_micro) if 0 in owners else ():
            for value in self.stage.room_for_statistics(micro):
                yield value, None

    def _buckets(self, owners: Iterable[int]) -> Iterator[Tensor]:
        for sums in accumulators(self.weights, owners):
            yield from flat(sums).split(max(1, BUCKET_BYTES // sums.itemsize))

    @torch.no_grad()
    def _take(self, other: int, mine: Tensor, its: Tensor) -> None:
        """While they halve: a partner's sum to the own one, which is beside it in the tree. What is whole
        then goes into the tree of the groups at once, bucket by bucket, as do the sums of other groups. Node
        by node all are added to the own ones."""
        differ, own = self.copy ^ other, self._own.get(mine.data_ptr())
        if differ < self._low or self._exchange.by_node:
            mine.add_(its)
            its, other = mine, self.copy
        if own is not None and 2 * differ >= self._low:
            own.add(other // self._low, [its])

    def _micros(self, copy: int, other: int, n_micro: int) -> list[int]:
        """Whose sums a copy has when it meets another one."""
        return [
            micro for part in self._exchange.parts(copy, other) for micro in share_of(part, self.n, n_micro)
        ]

    # -- weights -------------------------------------------------------------------------------------

    def updated_for(self, other: int) -> list[Tensor]:
        """What a partner is given: weights that are new here, and buffers that training changes."""
        return self._updated(self._exchange.owners_for(self.copy, other))

    def updated_by(self, other: int) -> list[Tensor]:
        """Likewise what it gives."""
        return self._updated(self._exchange.owners_for(other, self.copy))

    def _updated(self, owners: Sequence[int]) -> list[Tensor]:
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
