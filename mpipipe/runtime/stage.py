"""Forward and backward of one stage, for any micro-batch and any variant of the model.

    F(micro)   received -> code.forward -> sent       stash: input leaves, edges of the outputs
    B(micro)   gradients of sent -> autograd -> gradients of received; weights accumulate in place
    I, W       the same in two: I gives the gradients of received, W accumulates those of the weights

Between F and B only graph edges are held, not the outputs: what no operator saved is freed as soon
as it was sent. With recomputation less is held, and B or I first makes it again:

    selective   what `Code.selective` lets go is given back its values
    full        the graph itself is let go; the forward runs once more, from what was received
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpipipe.graph.capture import Batch, autocast
from mpipipe.graph.cut import Code, laid_out
from mpipipe.graph.place import placed
from mpipipe.graph.recompute import let_go
from mpipipe.ops.deferred import Pending
from mpipipe.ops.device import here
from mpipipe.runtime.weights import StageWeights
from mpipipe.values import Recompute

_Update = tuple[str, float | None, Tensor | None]  # buffer, momentum, value; None: it counts


@dataclass
class _Stash:
    inputs: list[Tensor]  # leaves that need a gradient
    edges: list[GradientEdge]  # of the sent tensors that need one
    uncut: list[tuple[int, ...] | None]  # of each, strides that its gradient has where nothing is cut
    pending: Pending | None = None  # of a backward in two
    others: list[Tensor] = field(
        default_factory=list
    )  # weights whose gradients come with those of the inputs
    refill: Callable[[], None] | None = None  # gives back the values that were let go
    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # as sent, and this graph's own ones


class Stage:
    """recompute: what B or I makes again, for "selective" by the code that forward is given."""

    def __init__(self, weights: StageWeights, precision: str, recompute: Recompute = "none") -> None:
        self.weights, self.precision, self.recompute = weights, precision, recompute
        self._stash: dict[int, Callable[[], _Stash]] = {}
        self._waiting: dict[int, tuple[Pending, list[tuple[Tensor, Tensor]]]] = {}  # (weight, its gradient)
        self._begun: dict[Hashable, dict[Tensor, Tensor]] = {}  # by block: weight -> its sum so far
        self._statistics: dict[int, list[_Update]] = {}  # by micro-batch

    def forward(
        self, code: Code, micro: int, received: Sequence[Tensor], batch: Batch, step: int, train: bool
    ) -> list[Tensor]:
        """Returns what is sent, detached; a loss may have its value after backward only. received: as
        `code.received`; batch: keys `code.inputs`."""
        call = partial(self._run, code, micro, received, batch, step, train)
        sent, statistics, stash = call()
        results = [t.detach() for t in sent]
        if train:
            again = partial(self._again, call, [t for t in results if t.dim() == 0])
            self._stash[micro] = again if self.recompute == "full" else (lambda: stash)
            self._statistics[micro] = [
                (update.buffer, update.momentum, None if value is None else value.detach())
                for update, value in zip(code.updates, statistics, strict=True)
            ]
        return results

    def _again(self, call: Callable[[], Any], losses: Sequence[Tensor]) -> _Stash:
        """losses: what the forward that was let go has returned, and backward may put its value into."""
        sent, _, stash = call()
        stash.losses = list(zip(losses, [t.detach() for t in sent if t.dim() == 0], strict=True))
        return stash

    def _run(
        self, code: Code, micro: int, received: Sequence[Tensor], batch: Batch, step: int, train: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None], _Stash]:
        """What is sent, statistics, and in training the graph of both. The graph is made in a forward that
        lets it go, too: some operators of torch have other bits without."""
        inputs = [t.detach() for t in received]
        for t, port in zip(inputs, code.received, strict=True):
            t.requires_grad_(train and port.needs_grad)
        code = placed(code, here())
        arguments = self.arguments(code, micro, inputs, batch, step, train)
        pending = None if code.deferred is None else Pending()
        with torch.set_grad_enabled(train), self.autocast():
            sent, statistics, *held = code.forward(*arguments, *([] if pending is None else [pending]))
        learn = [(t, p) for t, p in zip(sent, code.sent, strict=True) if train and p.needs_grad]
        edges, uncut = [get_gradient_edge(t) for t, _ in learn], [p.grad_uncut for _, p in learn]
        others = [] if code.deferred is None else self._not_deferred(code)
        stash = _Stash([t for t in inputs if t.requires_grad], edges, uncut, pending, others)
        if code.selective is not None:
            stash.refill = self._letting_go(code, [t.detach() for t in held[0]], arguments)
        return sent, statistics, stash

    def _letting_go(self, code: Code, held: Sequence[Tensor], arguments: Sequence[Any]) -> Callable[[], None]:
        assert code.selective is not None
        plain = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        for t in held[: code.selective.dropped]:
            let_go(t)

        def refill() -> None:
            assert code.selective is not None
            with torch.no_grad(), self.autocast():
                code.selective.refill(*plain, *held)

        return refill

    def autocast(self) -> torch.autocast:
        return autocast(self.precision, here().type)

    def _taken(self, micro: int) -> _Stash:
        """What is kept of a micro-batch, whole again."""
        stash = self._stash.pop(micro)()
        if stash.refill is not None:
            stash.refill()
        return stash

    def arguments(
        self, code: Code, micro: int, inputs: Sequence[Tensor], batch: Batch, step: int, train: bool
    ) -> list[Any]:
        """Of `code.forward`. train: weights as leaves of autograd."""
        w = self.weights
        return [
            *inputs,
            *(batch[key].to(here()).contiguous() for key in code.inputs),  # as they were captured
            *(w.leaf(*leaf) if train else w.data[leaf[0]] for leaf in code.leaves),
            *(w.buffer(name) for name in code.buffers),
            *((step, micro) if code.random else ()),
        ]

    def backward(self, micro: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """Accumulates the weights' gradients; returns those of the received tensors.

        grads: of the sent tensors that need one, in order.
        """
        stash = self._taken(micro)
        _differentiate(stash, grads)
        return _own(stash.inputs, grads)

    def backward_input(
        self, micro: int, grads: Sequence[Tensor], block: Hashable | None = None
    ) -> list[Tensor]:
        """As `backward`, but the gradients of the weights that `code.deferred` names wait for
        `backward_weight`; until then the caller leaves `grads` as they are. After split code. block: of
        additions that this micro-batch is in, where others of an earlier one wait: what does not wait is
        summed up beside theirs until `begin`, so that it is added where it is, as in a whole backward."""
        stash = self._taken(micro)
        assert stash.pending is not None, "forward was given the code of a whole backward"
        alone = [leaf for leaf in stash.others if leaf.grad is None]  # of which W adds each micro-batch's
        with self._beside(block, stash.others):
            _differentiate(stash, grads, [*stash.inputs, *stash.others, stash.pending.trigger])
        rest = [(leaf, leaf.grad) for leaf in alone if leaf.grad is not None]
        for leaf in alone:
            leaf.grad = None
        self._waiting[micro] = stash.pending, rest
        return _own(stash.inputs, grads)

    @contextmanager
    def _beside(self, block: Hashable | None, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Lets backward add to sums of a block that has not begun."""
        running = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None and block is not None]
        sums = self._begun.setdefault(block, {}) if running else {}
        for leaf, total in running:
            if leaf not in sums:
                sums[leaf] = torch.zeros_like(total)
            leaf.grad = sums[leaf]
        yield
        for leaf, total in running:
            leaf.grad = total

    @torch.no_grad()
    def begin(self, block: Hashable) -> None:
        """The accumulators are those of a block from now on; they hold zeros."""
        for leaf, total in self._begun.pop(block, {}).items():
            assert leaf.grad is not None
            leaf.grad.copy_(total)

    @torch.no_grad()
    def backward_weight(self, micro: int) -> None:
        """Accumulates the weights' gradients that `backward_input` has left."""
        pending, rest = self._waiting.pop(micro)
        pending.run()
        for leaf, g in rest:
            if leaf.grad is None:
                leaf.grad = g.clone()
            else:
                leaf.grad.add_(g)

    def _not_deferred(self, code: Code) -> list[Tensor]:
        assert code.deferred is not None
        leaves = (self.weights.leaf(*use) for use in code.leaves if use not in code.deferred)
        return [leaf for leaf in leaves if leaf.requires_grad]

    @torch.no_grad()
    def apply_statistics(self, buffers: Callable[[str], Tensor] | None = None) -> None:
        """Buffer updates of the step, in micro-batch order, whatever the order of the forwards was. buffers:
        others than the stage's own, by name."""
        rounds: list[dict[str, _Update]] = []  # with one update of a buffer each
        done: Counter[str] = Counter()
        for _, updates in sorted(self._statistics.items()):
            for update in updates:
                if done[update[0]] == len(rounds):
                    rounds.append({})
                rounds[done[update[0]]][update[0]] = update
                done[update[0]] += 1
        for of_round in rounds:
            _apply(of_round.values(), buffers or self.weights.buffer)
        self._statistics.clear()

    def statistics_of(self, micros: Sequence[int]) -> list[Tensor]:
        """Those of some micro-batches, in their order."""
        found = (value for micro in micros for _, _, value in self._statistics[micro])
        return [value.contiguous() for value in found if value is not None]

    def room_for_statistics(self, micro: int) -> list[Tensor]:
        """For those of a micro-batch that another copy of the stage has done, each like one of its own: a
        buffer may have another dtype, as a BatchNorm without weights has in bf16."""
        own = next(iter(self._statistics.values()))
        room = [(name, momentum, None if t is None else torch.empty_like(t)) for name, momentum, t in own]
        self._statistics[micro] = room
        return [t for _, _, t in room if t is not None]

    def forget_statistics(self) -> None:
        """Where they are not to be applied."""
        self._statistics.clear()

    def forget(self) -> None:
        """All that is left of a step that updates nothing, or was broken off."""
        self.forget_statistics()
        for kept in (self._stash, self._waiting, self._begun):
            kept.clear()
        self.weights.forget()


def _differentiate(stash: _Stash, grads: Sequence[Tensor], inputs: Sequence[Tensor] | None = None) -> None:
    if stash.edges:
        pairs = zip(grads, stash.uncut, strict=True)
        uncut = [g if stride is None else laid_out(g, stride) for g, stride in pairs]
        torch.autograd.backward(stash.edges, uncut, inputs=inputs)
    for loss, own in stash.losses:
        loss.copy_(own)


def _apply(updates: Iterable[_Update], buffers: Callable[[str], Tensor]) -> None:
    """Of different buffers, together: each is small, and a call of torch would take longer than its sums."""
    by_momentum: dict[float | None, list[tuple[Tensor, Tensor | None]]] = {}
    for name, momentum, value in updates:
        by_momentum.setdefault(momentum, []).append((buffers(name), value))
    for momentum, pairs in by_momentum.items():
        there = [buffer for buffer, _ in pairs]
        if momentum is None:
            torch._foreach_add_(there, 1)
        else:
            torch._foreach_mul_(there, 1.0 - momentum)
            torch._foreach_add_(there, [value for _, value in pairs if value is not None], alpha=momentum)


def _own(inputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the inputs in memory of their own: the caller's buffers are filled again."""
    taken = {g.untyped_storage().data_ptr() for g in given}
    found = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs)
    return [g.clone() if g.untyped_storage().data_ptr() in taken else g for g in found]
