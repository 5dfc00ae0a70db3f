"""The tensors of one stage: flat weights and gradients, and what autograd sees.

    flat data   |--- wte.weight ---|-- qkv.weight --|...   one buffer per (dtype, decay)
    flat grad   |------------------|----------------|...   same offsets
    flat state  |------------------|----------------|...   those of the optimizer

A *leaf* is what the stage's code takes as an argument: a view of the flat data for one use of a
parameter. Its `.grad` is a view of the flat gradient, so autograd accumulates in place, in
micro-batch order. A tied parameter has one leaf per use:

    per_use   each use accumulates on its own; merged in the order of the uses, once per step. Of a table that
              is also a head, the look-ups may keep their rows until then (`planner.stages.kept_rows`), and
              the head adds to the owner's gradient, or sends its own into that: the same bits, one gradient
              less
    eager     each micro-batch is merged, last use first, as autograd does within one process

Products in a shorter dtype take a copy of a leaf's data (`mpipipe.ops.linear`). All micro-batches of a step
share it: made by the first forward, dropped before the update, and before a step, as anything may have
written to the weights between two. With recomputation as well: while a stage is at work, all its copies are
there anyway; only of several stages on a rank those of the others are held beside them.

Where there are copies of the stage, each copy holds all of it and owns some of its parameters: it
alone updates them. What one copy owns lies in buffers of its own, so that they travel as they are.

Invariants
  1. Views are aligned to 64 bytes and lie in canonical (registration) order.
  2. The owner of a parameter is the stage of its first use; other stages hold a copy of the data (none on
     the owner's rank) and accumulators for their own uses (none there beside rows), but no state.
  3. Copy 0 owns all tied parameters; the others are shared out by bytes, the same on every copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpipipe.graph.cut import Leaf
from mpipipe.graph.source import ModelSource
from mpipipe.ops.device import here, on_host
from mpipipe.ops.embedding import RowSums, keep_rows
from mpipipe.ops.linear import Casts, share_casts
from mpipipe.planner.copies import shard
from mpipipe.values import Graph

_ALIGN_BYTES, _ALIGN_BYTES_OFF_HOST = 64, 512  # of a GPU: all that its libraries choose a kernel by


@dataclass(frozen=True)
class Flat:
    """Some tensors in one buffer."""

    buffer: Tensor  # 1-D
    views: dict[str, Tensor]

    @classmethod
    def like(cls, shapes: dict[str, torch.Size], dtype: torch.dtype) -> Flat:
        step = (_ALIGN_BYTES if on_host() else _ALIGN_BYTES_OFF_HOST) // dtype.itemsize
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-shape.numel() // step) * step
        buffer = _zeros(end, dtype)
        return cls(buffer, {n: buffer[o : o + shapes[n].numel()].view(shapes[n]) for n, o in offsets.items()})

    def sibling(self) -> Flat:
        """A zeroed buffer with the same names, shapes and offsets."""
        return Flat.like({n: v.shape for n, v in self.views.items()}, self.buffer.dtype)


def _zeros(n: int, dtype: torch.dtype) -> Tensor:
    """(n,), on the device of this rank. In main memory pages that the system gives when they are first
    written: where another plan is taken up, what is made comes as what it is made of goes."""
    if not on_host():
        return torch.zeros(n, dtype=dtype, device=here())
    nbytes = n * dtype.itemsize
    room = np.zeros(nbytes + _ALIGN_BYTES, np.uint8)
    start = -room.ctypes.data % _ALIGN_BYTES
    return torch.from_numpy(room[start : start + nbytes]).view(dtype)


@dataclass
class ParamGroup:
    """Owned parameters that are trained alike. owner: the copy of the pipeline that updates them."""

    decay: bool
    data: Flat
    grad: Flat
    owner: int = 0


@dataclass(frozen=True)
class Sums:
    """What backward adds into: the gradients of each group, and of uses other than an owner's first."""

    flats: list[Flat]
    extra: dict[Leaf, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [*(flat.buffer for flat in self.flats), *self.extra.values()]

    def sibling(self) -> Sums:
        """Zeroed ones of the same form."""
        extra = {leaf: torch.zeros_like(t) for leaf, t in self.extra.items()}
        return Sums([flat.sibling() for flat in self.flats], extra)


def updates_of(
    source: ModelSource, graph: Graph, stage: int, owner: Mapping[str, int], trained: Iterable[str],
    n_copies: int,
) -> dict[str, int]:  # fmt: skip
    """Parameter of a stage -> the copy of it that has its optimizer state. The rest: as `StageWeights`."""
    nbytes = {n: source.params[n].nbytes for n in trained if owner[n] == stage}
    return shard(nbytes, {tie.param for tie in graph.ties}, n_copies)


class StageWeights:
    """owner: parameter or buffer -> owning stage (`Variants.stage_of_param`);
    leaves: every (parameter, use) that the training code of this stage reads; trained: all parameters with a
    gradient, in canonical order; there: stages on this rank, before this one, whose data needs no copy; copy:
    of the stage, of `n_copies`; n_shares: of the micro-batches, whose gradients are added up apart; as_rows:
    tied parameters whose first use keeps rows."""

    def __init__(
        self,
        source: ModelSource,
        graph: Graph,
        stage: int,
        owner: dict[str, int],
        leaves: Sequence[Leaf],
        trained: Sequence[str],
        tied: str,
        there: Sequence[StageWeights] = (),
        copy: int = 0,
        n_copies: int = 1,
        n_shares: int = 1,
        as_rows: Collection[str] = (),
    ) -> None:
        self.stage, self.tied, self.copy, self.n_copies, self._source = stage, tied, copy, n_copies, source
        self._trained = frozenset(trained)
        tied_groups = {tie.param: tie.groups for tie in graph.ties}
        self.groups = self._groups(source, updates_of(source, graph, stage, owner, trained, n_copies))
        self.data: dict[str, Tensor] = {n: v for g in self.groups for n, v in g.data.views.items()}
        self.grad: dict[str, Tensor] = {n: v for g in self.groups for n, v in g.grad.views.items()}
        for name in self.data:
            source.fill(name, self.data[name])
        rest = [n for n in source.params if n not in self.data and owner[n] == stage]
        copies = {n for n, _ in leaves if owner[n] != stage}
        for name in [*rest, *(n for n in source.params if n in copies)]:
            near = next((weights for weights in there if owner[name] == weights.stage), None)
            self.data[name] = near.data[name] if near else self._made(name)
        self.owned = [n for n in source.persistent if owner[n] == stage]
        self.buffers: dict[str, Tensor] = {}

        self.uses = {n: tied_groups[n] for n, _ in leaves if n in tied_groups and n in self._trained}
        self.leaves: dict[Leaf, Tensor] = {}
        self._casts: list[Casts] = []  # of the leaves
        self.rows: dict[str, RowSums] = {}  # of owned parameters
        in_place = {n: g for weights in (*there, self) for n, g in weights.grad.items() if n in as_rows}
        self._lent = [g for n, g in in_place.items() if n in self.uses and n not in self.grad]
        self.extra = self._make_leaves(source, leaves, owner, as_rows, in_place)
        self.shares = [Sums([group.grad for group in self.groups], self.extra)]
        self.shares += [self.shares[0].sibling() for _ in range(1, n_shares)]
        self._share = 0
        self._grads = [(leaf, leaf.grad) for leaf in self.leaves.values()]  # between two micro-batches

    def _groups(self, source: ModelSource, copy_of: Mapping[str, int]) -> list[ParamGroup]:
        by_key: dict[tuple[int, torch.dtype, bool], dict[str, torch.Size]] = {}
        for name in (name for name in source.params if name in copy_of):
            p = source.params[name]
            key = copy_of[name], p.dtype, p.dim() >= 2  # no decay on norms and biases
            by_key.setdefault(key, {})[name] = p.shape
        groups = []
        for (copy, dtype, decay), shapes in by_key.items():
            data = Flat.like(shapes, dtype)
            groups.append(ParamGroup(decay, data, data.sibling(), copy))
        return groups

    @property
    def own_groups(self) -> list[ParamGroup]:
        """What this copy updates."""
        return [group for group in self.groups if group.owner == self.copy]

    @property
    def own_grads(self) -> dict[str, Tensor]:
        """Of what this copy updates, in canonical order."""
        found = {name: grad for group in self.own_groups for name, grad in group.grad.views.items()}
        return {name: found[name] for name in self._source.params if name in found}

    @property
    def learning(self) -> dict[str, Tensor]:
        """The parameters of all stages that are trained, fake, in canonical order."""
        return {name: p for name, p in self._source.params.items() if name in self._trained}

    def _make_leaves(
        self, source: ModelSource, leaves: Sequence[Leaf], owner: dict[str, int], as_rows: Collection[str],
        in_place: Mapping[str, Tensor],
    ) -> dict[Leaf, Tensor]:  # fmt: skip
        """Fills `self.leaves`, with their casts and rows; returns the accumulators of uses other than an
        owner's first. in_place: gradients on this rank to which the use after the rows adds."""
        extra: dict[Leaf, Tensor] = {}
        for name, use in leaves:
            leaf = self.data[name].detach()
            self.leaves[name, use] = leaf
            if not source.params[name].requires_grad:
                continue
            leaf.requires_grad_()  # unused ones too: what a cut carries follows the capture
            if name not in self._trained:
                continue
            self._casts.append(share_casts(leaf))
            if name not in self.uses:
                leaf.grad = self.grad[name]
            elif self.tied == "per_use":
                first = owner[name] == self.stage and use == self.uses[name][0]
                if first and name in as_rows:
                    self.rows[name] = keep_rows(leaf)
                    continue
                leaf.grad = self.grad[name] if first else in_place.get(name)
                if leaf.grad is None:
                    leaf.grad = extra[name, use] = torch.zeros_like(leaf)
        return extra

    def leaf(self, name: str, use: int) -> Tensor:
        """The leaf of a use; a variant's node that training does not have takes any of them."""
        found = self.leaves.get((name, use))
        if found is None:
            found = next((t for (n, _), t in self.leaves.items() if n == name), None)
        return self.data[name] if found is None else found

    def buffer(self, name: str) -> Tensor:
        """A buffer of the model; made when first asked for, constants on every stage that reads them."""
        if name not in self.buffers:
            self.buffers[name] = self._made(name)
        return self.buffers[name]

    def _made(self, name: str) -> Tensor:
        return self._source.materialise([name])[name].to(here())

    def accumulators(self) -> list[Tensor]:
        """Every tensor that backward adds into now, block by block."""
        return self.shares[self._share].tensors

    def add_to(self, share: int) -> None:
        """Lets backward add into the accumulators of one of its shares of the micro-batches."""
        if share == self._share:
            return
        self._share, sums = share, self.shares[share]
        self.extra = sums.extra
        for group, flat in zip(self.groups, sums.flats, strict=True):
            group.grad = flat
        self.grad = {n: v for flat in sums.flats for n, v in flat.views.items()}
        for leaf, t in self.leaves.items():
            if leaf in sums.extra:
                t.grad = sums.extra[leaf]
            elif t.grad is not None and leaf[0] in self.grad:
                t.grad = self.grad[leaf[0]]

    def begin_again(self) -> None:
        """With the first share, which has the sums of all now."""
        self.add_to(0)
        for sums in self.shares[1:]:
            for t in sums.tensors:
                t.zero_()

    def forget(self) -> None:
        """What backward has added, to the gradient of another stage on this rank, too; and the casts."""
        for accumulator in (*(t for sums in self.shares for t in sums.tensors), *self._lent):
            accumulator.zero_()
        for leaf, grad in self._grads:
            leaf.grad = grad
        self._share = -1  # wherever a step was broken off
        self.add_to(0)
        self.forget_rows()
        self.forget_casts()

    def forget_casts(self) -> None:
        """Before the weights change, or may have changed."""
        for casts in self._casts:
            casts.forget()

    def forget_rows(self) -> None:
        for name, rows in self.rows.items():
            rows.forget()
            self._looked_up(name).grad = None

    def add_rows(self, name: str) -> None:
        """To the gradient of an owned parameter, once those of its other use are in it."""
        self.rows[name].into(self.grad[name])
        leaf = self._looked_up(name)
        if leaf.grad is not None:  # of a shape in which the model reads the table in another way
            self.grad[name].add_(leaf.grad)
            leaf.grad = None

    def _looked_up(self, name: str) -> Tensor:
        """The leaf whose rows are kept."""
        return self.leaves[name, self.uses[name][0]]

    def state_dict(self) -> dict[str, Tensor]:
        """Owned parameters and persistent buffers by canonical name."""
        return {n: self.data[n] if n in self.data else self.buffer(n) for n in self.owned}


class BlockSums:
    """Micro-batches in order inside a block, blocks by a fixed binary tree.

    A binary counter: level i holds the sum of 2^i blocks. With one block there is nothing to keep.
    """

    def __init__(self, accumulators: Sequence[Tensor]) -> None:
        self.accumulators = accumulators
        self.levels: list[list[Tensor]] = []
        self.full: list[bool] = []

    @torch.no_grad()
    def end_of_block(self) -> None:
        """Moves the accumulators into the tree and zeroes them."""
        level = self.whole_sub_tree()
        if level == len(self.full):
            self.levels.append([torch.empty_like(a) for a in self.accumulators])
            self.full.append(False)
        for kept, a in zip(self.levels[level], self.accumulators, strict=True):
            kept.copy_(a)
            a.zero_()
        self.full[level] = True

    @torch.no_grad()
    def whole_sub_tree(self) -> int:
        """Adds to the accumulators what forms whole sub-trees with them: after 2^i blocks, all of it. The
        level of the sum."""
        level = 0
        while level < len(self.full) and self.full[level]:
            self._add(self.levels[level])
            self.full[level] = False
            level += 1
        return level

    @torch.no_grad()
    def finish(self) -> None:
        """The sum of all blocks, into the accumulators; the tree is empty again."""
        for level, kept in enumerate(self.levels):
            if self.full[level]:
                self._add(kept)
                self.full[level] = False

    def forget(self) -> None:
        """What a step that was broken off has left."""
        self.full = [False] * len(self.full)

    def _add(self, kept: list[Tensor]) -> None:
        for k, a in zip(kept, self.accumulators, strict=True):
            torch.add(k, a, out=a)


class Tree:
    """Sums of parts of the blocks that are alike large, added in the binary tree of the blocks, in place.
    Once all parts are there the whole goes into `totals`, as by `BlockSums.finish`."""

    def __init__(self, totals: Sequence[Tensor], n_parts: int) -> None:
        self._totals, self._left = totals, n_parts
        self._sums: dict[tuple[int, int], list[Tensor]] = {}  # (level, index)

    @torch.no_grad()
    def add(self, index: int, sums: list[Tensor]) -> None:
        """Those of the part with this index: at once with its neighbour, if that is there."""
        level = 0
        while (neighbour := self._sums.pop((level, index ^ 1), None)) is not None:
            for its, mine in zip(neighbour, sums, strict=True):
                its.add_(mine)
            sums, level, index = neighbour, level + 1, index >> 1
        self._sums[level, index] = sums
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        trees = [sums for _, sums in sorted(self._sums.items())]  # the smallest first
        self._sums.clear()
        for i, total in enumerate(self._totals):
            found = trees[0][i].add_(0.0)
            for tree in trees[1:]:
                found.add_(tree[i])
            if found is not total:
                total.copy_(found)
