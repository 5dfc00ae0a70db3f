"""Forward and backward of one stage, for any micro-batch and any variant of the model.

    F(micro)   received -> code.forward -> sent       stash: input leaves, edges of the outputs
    B(micro)   gradients of sent -> autograd -> gradients of received; weights accumulate in place

Between F and B only graph edges are held, not the outputs: what no operator saved is freed as soon
as it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpipipe.graph.capture import Batch, autocast
from mpipipe.graph.cut import Code
from mpipipe.runtime.weights import StageWeights


@dataclass
class _Stash:
    inputs: list[Tensor]  # leaves that need a gradient
    edges: list[GradientEdge]  # of the sent tensors that need one


class Stage:
    def __init__(self, weights: StageWeights, precision: str) -> None:
        self.weights, self.precision = weights, precision
        self._stash: dict[int, _Stash] = {}
        self._statistics: dict[int, list[tuple[str, float | None, Tensor | None]]] = {}  # by micro-batch

    def forward(
        self, code: Code, micro: int, received: Sequence[Tensor], batch: Batch, step: int, train: bool
    ) -> list[Tensor]:
        """Returns what is sent, detached. received: as `code.received`; batch: keys `code.inputs`."""
        inputs = [t.detach() for t in received]
        for t, port in zip(inputs, code.received, strict=True):
            t.requires_grad_(train and port.needs_grad)
        arguments = self.arguments(code, micro, inputs, batch, step, train)
        with torch.set_grad_enabled(train), autocast(self.precision):
            sent, statistics = code.forward(*arguments)
        if train:
            edges = [get_gradient_edge(t) for t, p in zip(sent, code.sent, strict=True) if p.needs_grad]
            self._stash[micro] = _Stash([t for t in inputs if t.requires_grad], edges)
            self._statistics[micro] = [
                (update.buffer, update.momentum, None if value is None else value.detach())
                for update, value in zip(code.updates, statistics, strict=True)
            ]
        return [t.detach() for t in sent]

    def arguments(
        self, code: Code, micro: int, inputs: Sequence[Tensor], batch: Batch, step: int, train: bool
    ) -> list[Any]:
        """Of `code.forward`. train: weights as leaves of autograd."""
        w = self.weights
        return [
            *inputs,
            *(batch[key] for key in code.inputs),
            *(w.leaf(*leaf) if train else w.data[leaf[0]] for leaf in code.leaves),
            *(w.buffer(name) for name in code.buffers),
            *((step, micro) if code.random else ()),
        ]

    def backward(self, micro: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """Accumulates the weights' gradients; returns those of the received tensors.

        grads: of the sent tensors that need one, in order.
        """
        stash = self._stash.pop(micro)
        if stash.edges:
            torch.autograd.backward(stash.edges, list(grads))
        given = {g.untyped_storage().data_ptr() for g in grads}
        out = []
        for leaf in stash.inputs:
            g = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            # the caller's buffers are filled again: nothing that we return may share them
            out.append(g.clone() if g.untyped_storage().data_ptr() in given else g)
        return out

    @torch.no_grad()
    def apply_statistics(self, buffers: Callable[[str], Tensor] | None = None) -> None:
        """Buffer updates of the step, in micro-batch order, whatever the order of the forwards was. buffers:
        others than the stage's own, by name."""
        updates = (update for _, of_micro in sorted(self._statistics.items()) for update in of_micro)
        for name, momentum, value in updates:
            buffer = (buffers or self.weights.buffer)(name)
            if momentum is None or value is None:
                buffer.add_(1)
            else:
                buffer.mul_(1.0 - momentum).add_(value, alpha=momentum)
        self._statistics.clear()

    def forget_statistics(self) -> None:
        """Of a step that updates nothing."""
        self._statistics.clear()
