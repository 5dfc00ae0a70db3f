"""Operators whose weight gradients wait: a backward in two (Qi et al. 2023, Zero Bubble).

    forward    x  ->  [ op as torch has it, x cut off ]  ->  y          a graph of its own per operator
    backward   gradient of y  ->  that of x at once;  (graph, gradient of y) is put down in `Pending`
    later      `Pending.run`: all graphs that were put down, towards the weights alone

Both ways go through torch's own backward of the operator, so neither changes a bit. A graph of its own and
two runs of autograd take as long as a small product, so most linear layers and convolutions, whose weight
gradient is one known call, do without:

    forward    x  ->  [ op as torch has it ]  ->  y                     in the graph of the micro-batch
    backward   as ever, but not towards the weights;  (x, gradient of y) is put down
    later      the call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Later(NamedTuple):
    """How the weight gradients of an operator that makes one tensor are made without a graph of its own.

    serves: of its input and its weight, whether `add` has the bits of its own backward; add: given the
    gradient of the result and the operator's arguments, adds to those of weight and bias. The input is None
    where the weight is frozen and the bias alone learns, which `serves` may refuse."""

    serves: Callable[[Tensor, Tensor], bool]
    add: Callable[..., None]


class Pending:
    """Weight gradients that one micro-batch on one stage has not done yet."""

    def __init__(self) -> None:
        # every deferred operator depends on it, on what the stage received, or on a weight that does not
        # wait, so that backward comes to all
        self.trigger = torch.empty(0, requires_grad=True)
        self._calls: list[Callable[[], None]] = []
        self._edges: list[GradientEdge] = []
        self._grads: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, edge: GradientEdge, grad: Tensor, weights: Sequence[Tensor]) -> None:
        self._edges.append(edge)
        self._grads.append(grad)
        self._weights += weights

    def add_call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def run(self) -> None:
        """Accumulates them in the weights, as a whole backward does."""
        with torch.no_grad():
            while self._calls:  # what one was made of is given back then
                self._calls.pop()()
        if self._edges:
            torch.autograd.backward(self._edges, self._grads, inputs=self._weights)
        self._edges, self._grads, self._weights = [], [], []


class Deferred:
    """A call of `op`, which makes one tensor. weights: which of its arguments are leaves whose gradients
    wait; no other operator of the micro-batch may read them. later: may be given where the first argument is
    the input, the second the weight, and all other tensors are among `weights`."""

    def __init__(self, op: Callable[..., Tensor], weights: Sequence[int], later: Later | None = None) -> None:
        self.op, self.weights, self.later = op, weights, later
        self.__name__ = f"deferred_{getattr(op, '__name__', 'op').replace('.', '_')}"

    def __call__(self, pending: Pending, *args: Any, **kwargs: Any) -> Tensor:
        leaves = [args[i] for i in self.weights if args[i].requires_grad]
        if not leaves or not torch.is_grad_enabled():
            return self.op(*args, **kwargs)
        if self.later is not None and args[0].requires_grad and self.later.serves(*args[:2]):
            return self._without_graph(self.later, pending, *args, **kwargs)
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and i not in self.weights]

        def call(*tensors: Tensor) -> Tensor:
            replaced = dict(zip(places, tensors, strict=True))
            return self.op(*(replaced.get(i, a) for i, a in enumerate(args)), **kwargs)

        result: Tensor = _Deferred.apply(pending, call, leaves, pending.trigger, *(args[i] for i in places))
        return result

    def _without_graph(self, later: Later, pending: Pending, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        """Where backward comes to it by itself, as the input has a gradient."""
        x = _cast(x)
        y = self.op(x, *rest, **kwargs)
        # of a view the node of what it is a view of: an operator that writes into y puts another in its place
        made = y if y._base is None or y._base.grad_fn is None else y._base
        assert made.grad_fn is not None
        kept = x.detach() if rest[0].requires_grad else None

        def put_down(grads: tuple[Tensor | None]) -> None:
            if grads[0] is not None:  # as it is where nothing depends on the result
                pending.add_call(partial(later.add, grads[0], kept, *rest, **kwargs))

        made.grad_fn.register_prehook(put_down)
        return y


def _cast(x: Tensor) -> Tensor:
    """As autocast gives it to the operator, which then shares it with what waits."""
    if x.is_meta or x.dtype is torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pending: Pending,
        call: Callable[..., Tensor],
        leaves: list[Tensor],
        _: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        with torch.enable_grad():
            inputs = [_cut_off(t, pending) if t.requires_grad else t for t in tensors]
            result = call(*inputs)
        ctx.pending, ctx.leaves, ctx.edge = pending, leaves, get_gradient_edge(result)
        ctx.inputs = [get_gradient_edge(t) if t.requires_grad else None for t in inputs]
        ctx.set_materialize_grads(False)
        return result.data  # neither the inner graph nor a view of it: it may be written in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(ctx.inputs)
        if grad is not None:
            places = [i for i, edge in enumerate(ctx.inputs) if edge is not None]
            ctx.pending.add(ctx.edge, grad, ctx.leaves)
            inputs = [ctx.inputs[i] for i in places]
            if inputs:
                grads = _gradients(ctx.edge, inputs, grad)
                for i, g in zip(places, grads, strict=True):
                    found[i] = g
        return None, None, None, None, *found


def _gradients(edge: GradientEdge, inputs: list[GradientEdge], grad: Tensor) -> tuple[Tensor | None, ...]:
    """As `torch.autograd.grad([edge], inputs, [grad], retain_graph=True)`, whose checks in Python take more
    than half of a call, once for each operator of a micro-batch."""
    found: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        (edge,), (grad,), True, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def _cut_off(t: Tensor, pending: Pending) -> Tensor:
    """An input of an operator's own graph. A leaf is there as long as the graph, also where the operator
    makes a copy and backward needs that alone: in another dtype, or without gaps."""
    if not t.is_contiguous() or (not t.is_meta and torch.is_autocast_enabled(t.device.type)):
        cut: Tensor = _Source.apply(pending.trigger, t.detach)
        return cut
    return t.detach().requires_grad_()


class _Source(torch.autograd.Function):
    """Something to differentiate by that no node of the graph holds. The engine never comes here."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, made: Callable[[], Tensor]) -> Tensor:
        return made()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
