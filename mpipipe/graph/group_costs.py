"""From the samples of distinct groups to what every group of a model costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from mpipipe.graph.anatomy import Anatomy, needs_grad, output_specs, spec_of
from mpipipe.graph.cut import uncut_strides
from mpipipe.graph.groups import group_of
from mpipipe.graph.pieces import Piece, Remade, Sample
from mpipipe.graph.split import split
from mpipipe.values import GroupCost


def group_costs(
    anatomy: Anatomy,
    parts: Sequence[Piece],
    samples: dict[str, Sample],
    update_s: float = 0.0,
    fill: float = 1.0,
    statistic_s: float = 0.0,
) -> tuple[GroupCost, ...]:
    """Puts the samples of distinct groups back on every group, in order: seconds of the mean micro-batch,
    bytes of the largest. update_s: seconds of the update of a parameter without elements; fill: as in
    `Numerics`; statistic_s: of what a micro-batch adds to a buffer, which is counted with its backward."""
    crossing = anatomy.crossings()
    starts: list[int] = []
    groups = group_of(anatomy)
    for i, node in enumerate(anatomy.order):
        if groups[node] >= len(starts):
            starts.append(i)
    ends = [*starts[1:], len(anatomy.order)]
    seen: set[fx.Node] = set()
    waiting: set[fx.Node] = set()  # of all groups so far, for their weight gradients
    again, remade = _remade(anatomy, parts, samples)
    beside, at_once = _beside(parts, samples), _at_once(anatomy, parts)
    out = []
    for piece, position in zip(parts, ends, strict=True):
        s = samples[piece.key].times(fill)
        size = _new_bytes(anatomy, _values(piece, s.saved_received, s.saved_sent), seen)
        waits = s.waiting
        late = _new_bytes(anatomy, _values(piece, waits.received, waits.sent), waiting)
        come_late = [piece.sent[i] for i in waits.grads]
        anew = {n: _laid_out_bytes(anatomy, n) for n in come_late}  # where they come as messages
        late_grads = sum(max(_nbytes(n) + beside[n], anew[n]) for n in come_late)
        from_before = {anatomy.root(n) for n in piece.received}
        made = again.get(piece.name)
        selective = (made.saved_bytes if made else 0) + sum(b for r, b in size.items() if r in remade)
        share = min(1.0, made.seconds / (samples[piece.key].fwd_s or math.inf)) if made else 0.0
        applied_s = statistic_s * len(piece.code.updates)
        cut = [n for n in crossing[position] if isinstance(n.meta["val"], torch.Tensor)]
        sizes = {n: _nbytes(n) for n in cut}
        grads = [b for n, b in sizes.items() if n.meta["val"].requires_grad]
        out.append(
            GroupCost(
                piece.name, s.fwd_s, s.bwd_input_s, s.bwd_weight_s + applied_s, piece.param_bytes,
                s.saved_bytes + sum(size.values()),
                s.workspace_bytes, sum(sizes.values()),
                sum(grads), update_s * len(piece.params),
                s.spread, share, selective, s.split_s, s.at_work_bytes,
                sum(b for r, b in size.items() if r in from_before),
                sum(b for n, b in sizes.items() if anatomy.root(n) in seen),
                tuple(sizes.values()) if len(sizes) > 1 else (), tuple(grads) if len(grads) > 1 else (),
                waits.own_bytes + sum(late.values()) + late_grads,
                sum(b for r, b in late.items() if r in from_before),
                late_grads - sum(anew.values()), at_once[piece.key],
                s.cast_bytes,
            )
        )  # fmt: skip
    return tuple(out)


def _laid_out_bytes(anatomy: Anatomy, node: fx.Node) -> int:
    """What a stage makes of the gradient of `node`, where it is sent dense and was not."""
    grad = anatomy.grads.get(node)
    if grad is None or (stride := uncut_strides(grad)) is None:
        return 0
    made = torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device="meta")
    return made.untyped_storage().nbytes()


def _nbytes(node: fx.Node) -> int:
    return sum(spec.nbytes for spec in output_specs(node))


def _memory_bytes(node: fx.Node) -> int:
    """Of all that a tensor keeps there: a view, what it is a view of."""
    return max(_nbytes(node), node.meta["val"].untyped_storage().nbytes())


def _values(piece: Piece, received: Sequence[int], sent: Sequence[int]) -> list[fx.Node]:
    return [piece.received[i] for i in received] + [piece.sent[i] for i in sent]


def _new_bytes(anatomy: Anatomy, values: Sequence[fx.Node], seen: set[fx.Node]) -> dict[fx.Node, int]:
    """By root, of those that are not yet among `seen`, and are from now on."""
    found = {anatomy.root(n): _memory_bytes(n) for n in values if anatomy.root(n) not in seen}
    seen.update(found)
    return found


def _beside(parts: Sequence[Piece], samples: dict[str, Sample]) -> Counter[fx.Node]:
    """By tensor whose gradient waits, bytes that wait with it: the gradient is a part of what the group that
    gives it has made for all that it read, as that of a concatenation, and keeps the rest of that there.
    Where several wait, the last one counts it, too: they may be on different stages."""
    late = {p.sent[i]: at for at, p in enumerate(parts) for i in samples[p.key].waiting.grads}
    readers = Counter(n for piece in parts for n in piece.received)  # the gradients of several are added up
    found = Counter[fx.Node]()
    for piece in parts:
        for indices, nbytes in samples[piece.key].returned:
            waiting = [n for n in (piece.received[i] for i in indices) if n in late and readers[n] == 1]
            if waiting:
                last = max(waiting, key=late.__getitem__)
                found[last] += nbytes - _nbytes(last)
    return found


def _at_once(anatomy: Anatomy, parts: Sequence[Piece]) -> dict[str, int]:
    """By key, bytes of the trained weights whose gradients do not wait for W."""
    found = dict[str, int]()
    for piece in parts:
        if piece.key not in found:
            late = split(piece.code).deferred or frozenset()
            nodes = [anatomy.node_of_param[leaf[0]] for leaf in piece.code.leaves if leaf not in late]
            found[piece.key] = sum(spec_of(n).nbytes for n in nodes if needs_grad(n))
    return found


def _remade(
    anatomy: Anatomy, parts: Sequence[Piece], samples: dict[str, Sample]
) -> tuple[dict[str, Remade], set[fx.Node]]:
    """The groups of which selective recomputation makes something again, by name, and the results that they
    make: those that read only what is there, kept for backward or made again itself."""
    there: set[fx.Node] = set()
    for piece in parts:
        s = samples[piece.key]
        there |= {anatomy.root(n) for n in _values(piece, s.saved_received, s.saved_sent)}
    again: dict[str, Remade] = {}
    made: set[fx.Node] = set()
    for piece in parts:
        found = samples[piece.key].remade
        if found and all(anatomy.root(piece.received[i]) in there for i in found.received):
            again[piece.name] = found
            made |= {anatomy.root(piece.sent[i]) for i in found.sent}
            there |= made
    return again, made
