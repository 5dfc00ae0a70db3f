"""What may be cut and what may not: replicated nodes, aliases and liveness of a captured graph.

    order   the operators that exist once, in program order; a stage is a part of it
    free    integer and constant sub-graphs (positions, masks): copied to every stage that needs
            them, because a mask grows with the square of the sequence and costs nothing to make

Batch inputs never cross a cut: each rank loads the keys that its own stage reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._prims_common import is_non_overlapping_and_dense_or_false

from mpipipe.graph.capture import Captured, autocast
from mpipipe.graph.match import Match, chosen
from mpipipe.graph.patterns import matches
from mpipipe.graph.program import spec
from mpipipe.graph.rewrite import aliased_inputs, mutated_inputs
from mpipipe.graph.source import TRACING
from mpipipe.graph.tape import tensors
from mpipipe.ops.device import on_host
from mpipipe.values import TensorSpec


def spec_of(node: fx.Node) -> TensorSpec:
    return spec(node.meta["val"])


def output_specs(node: fx.Node) -> tuple[TensorSpec, ...]:
    return tuple(map(spec, tensors(node.meta["val"])))


def needs_grad(node: fx.Node) -> bool:
    return any(t.requires_grad for t in tensors(node.meta["val"]))


@dataclass(frozen=True)
class Lowering:
    """Which operators become our own, as `Numerics` has it. table: form of a match -> "torch", or what it
    becomes; a form that it does not have becomes ours."""

    bits: str = "torch"
    table: Mapping[str, str] = field(default_factory=dict)

    def keeps_bits(self, match: Match) -> bool:
        """Whether it has torch's bits: a GPU sums in another order than a processor."""
        return match.same_bits and on_host()

    def wants(self, match: Match) -> bool:
        return self.keeps_bits(match) or (self.bits == "fast" and self.table.get(match.form) != "torch")

    def owns(self, match: Match) -> bool:
        """Whether the product in it is made by a kernel, too: only where that was measured to be faster."""
        return self.bits == "fast" and self.table.get(match.product, "torch") != "torch"


@dataclass(frozen=True)
class Anatomy:
    captured: Captured
    lowering: Lowering = field(default_factory=Lowering)

    @cached_property
    def operators(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.captured.graph.nodes if n.op == "call_function")

    @cached_property
    def node_of_param(self) -> dict[str, fx.Node]:
        """A node that reads it, by canonical name."""
        return {name: node for node, name in self.captured.param.items()}

    @cached_property
    def needed(self) -> frozenset[fx.Node]:
        """Operators that the outputs, a buffer update or an in-place write depend on."""
        wanted = [*self.captured.outputs, *(u.node for u in self.captured.updates)]
        wanted += [u.statistic for u in self.captured.updates if u.statistic is not None]
        wanted += [n for n in self.operators if mutated_inputs(n)]
        seen: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node not in seen:
                seen.add(node)
                wanted += node.all_input_nodes
        return frozenset(seen)

    @cached_property
    def free(self) -> frozenset[fx.Node]:
        c = self.captured
        mutated = {self.root(target) for n in self.operators for target in mutated_inputs(n)}
        free: set[fx.Node] = set()
        for node in self.operators:
            sources = [n for n in node.all_input_nodes if n not in free]
            pure = all(
                n in c.buffer
                or n in c.constant
                or (n in c.inputs and not spec_of(n).dtype.startswith(("float", "bf", "complex")))
                for n in sources
            )
            if pure and self.root(node) not in mutated and node not in c.outputs:
                free.add(node)
        return frozenset(free)

    @cached_property
    def order(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.operators if n in self.needed and n not in self.free)

    @cached_property
    def index(self) -> dict[fx.Node, int]:
        return {n: i for i, n in enumerate(self.order)}

    @cached_property
    def _roots(self) -> dict[fx.Node, fx.Node]:
        roots: dict[fx.Node, fx.Node] = {}
        for node in self.operators:
            sources = aliased_inputs(node)
            roots[node] = roots.get(sources[0], sources[0]) if sources else node
        return roots

    def root(self, node: fx.Node) -> fx.Node:
        """The node whose memory this one shows, as far as the schemas tell."""
        return self._roots.get(node, node)

    def made_by(self, node: fx.Node, through: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
        """A node, all that it is made of, and all that writes into the memory of these; as far as
        `through` lets pass."""
        seen: set[fx.Node] = set()
        todo = [node]
        while todo:
            n = todo.pop()
            if n not in seen and through(n):
                seen.add(n)
                todo += [*n.all_input_nodes, *self._writers.get(self.root(n), ())]
        return seen

    @cached_property
    def _writers(self) -> dict[fx.Node, list[fx.Node]]:
        writers: dict[fx.Node, list[fx.Node]] = {}
        for n in self.operators:
            for target in mutated_inputs(n):
                writers.setdefault(self.root(target), []).append(n)
        return writers

    @cached_property
    def learning(self) -> frozenset[str]:
        """Parameters to which the loss has a gradient."""
        found = self.made_by(self.captured.outputs[0], needs_grad)
        return frozenset(name for n, name in self.captured.param.items() if n in found)

    @cached_property
    def grads(self) -> dict[fx.Node, torch.Tensor]:
        """The gradient of each operator's result as it arrives where nothing is cut, a fake tensor.

        Kernels, so bits, may depend on its strides: a message must not change them. Found by one backward
        over fake tensors.
        """
        loss = self.captured.outputs[0].meta["val"]
        if self.captured.mode != "train" or not loss.requires_grad:
            return {}
        nodes = [n for n in self.order if n in self.values and needs_grad(n)]
        nodes = [n for n in nodes if isinstance(self.values[n], torch.Tensor)]
        with TRACING, loss.fake_mode:
            values, loss = [self.values[n] for n in nodes], self.values[self.captured.outputs[0]]
            grads = torch.autograd.grad(loss, values, retain_graph=True, allow_unused=True)
        return {n: g for n, g in zip(nodes, grads, strict=True) if g is not None}

    @cached_property
    def matches(self) -> tuple[Match, ...]:
        """What could become operators of our own, whether it does or not."""
        return matches(self)

    def lowered(self, body: Iterable[fx.Node]) -> list[Match]:
        """What does, of a part of the graph."""
        return list(chosen(self.matches, self.lowering.wants, set(body)))

    @cached_property
    def values(self) -> Mapping[fx.Node, Any]:
        """Fake results of the operators as they are lowered, whoever makes their products; none of those that
        no longer exist."""
        plain = {n: n.meta["val"] for n in self.captured.graph.nodes if "val" in n.meta}
        found = self.lowered(self.order)
        if all(self.lowering.keeps_bits(m) for m in found):
            return plain
        gone, starts = {n for m in found for n in m.nodes}, {m.first: m for m in found}
        env = {n: v for n, v in plain.items() if n not in self.index}
        fake_mode = self.captured.outputs[0].meta["val"].fake_mode
        with TRACING, fake_mode, torch.enable_grad(), autocast(self.captured.precision):
            for n in self.order:
                if n in starts:
                    match = starts[n]
                    made = match.op(*fx.node.map_arg(match.args, env.__getitem__))
                    made = made if len(match.results) > 1 else (made,)
                    env |= zip(match.results, made, strict=True)
                elif n not in gone:
                    args, kwargs = fx.node.map_arg((n.args, n.kwargs), env.__getitem__)
                    env[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        apart = [n for m in found if not m.atomic for n in m.nodes if n not in env]
        return env | {n: plain[n] for n in apart}  # which a cut may send

    @cached_property
    def last_write(self) -> dict[fx.Node, int]:
        """Alias root -> index of the last operator that writes it in place."""
        writes: dict[fx.Node, int] = {}
        for node in self.order:
            for target in mutated_inputs(node):
                writes[self.root(target)] = self.index[node]
        return writes

    @cached_property
    def last_use(self) -> dict[fx.Node, int]:
        outputs = {n: len(self.order) - 1 for n in self.captured.outputs}
        return {
            n: max([self.index[u] for u in n.users if u in self.index] + [outputs.get(n, -1)])
            for n in self.order
        }

    def crossings(self) -> list[tuple[fx.Node, ...]]:
        """For each position c: what is made before operator c and used from c on."""
        live: dict[fx.Node, None] = {}
        out: list[tuple[fx.Node, ...]] = [()]
        for i, node in enumerate(self.order):
            live[node] = None
            for n in [n for n in live if self.last_use[n] <= i]:
                del live[n]
            out.append(tuple(live))
        return out

    def legal(self, position: int, crossing: tuple[fx.Node, ...]) -> bool:
        """A cut needs plain, dense tensors, and none that a later stage would write for an earlier one."""
        for node in crossing:
            value = node.meta["val"]
            if not isinstance(value, torch.Tensor) or not is_non_overlapping_and_dense_or_false(value):
                return False
            if self.last_write.get(self.root(node), -1) >= position:
                return False
        return True
