"""The groups of a model as code, and what one of them was measured to cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch._ops import OpOverload

from mpipipe.graph.anatomy import Anatomy, needs_grad, output_specs, spec_of
from mpipipe.graph.cut import Code, Selective, extract
from mpipipe.graph.groups import group_of
from mpipipe.graph.layers import Layer
from mpipipe.graph.rewrite import op_text, settings_text
from mpipipe.values import Graph, Value, digest

Parts = tuple[tuple[int, ...], int]  # indices of received tensors whose gradients share memory; bytes of it


@dataclass(frozen=True)
class Remade(Value):
    """What selective recomputation does with a group whose received tensors are there: seconds; saved_bytes:
    of its own making that it lets go; sent: indices of what it sends and can make again; received: of what
    it reads for it."""

    seconds: float
    saved_bytes: int
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, made: Selective, seconds: float) -> Remade:
        return cls(seconds, made.inside_bytes, made.sent, made.received)


@dataclass(frozen=True)
class Waiting(Value):
    """What a backward in two keeps from I to W: bytes of its own making; received, sent: indices of tensors;
    grads: of what is sent, those whose gradients it keeps."""

    own_bytes: int = 0
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    grads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample(Value):
    """One distinct group, measured. saved_received, saved_sent: indices of the tensors that
    backward needs."""

    fwd_s: float
    bwd_input_s: float
    bwd_weight_s: float
    spread: float
    workspace_bytes: int  # live only while it runs, beside what is saved
    saved_bytes: int  # of its own making
    saved_received: tuple[int, ...]
    saved_sent: tuple[int, ...]
    remade: Remade | None = None
    split_s: float = 0.0  # that a backward in two takes longer, and the forward before it
    at_work_bytes: int = 0  # of workspace_bytes what is tensors
    waiting: Waiting = Waiting()
    returned: tuple[Parts, ...] = ()  # where such memory is larger than each of these gradients
    cast_bytes: int = 0  # copies of its weights that all micro-batches of a step share; in none of these

    @property
    def seconds(self) -> float:
        return self.fwd_s + self.bwd_input_s + self.bwd_weight_s

    def times(self, factor: float) -> Sample:
        """The same work on a device that needs `factor` as long."""
        return replace(
            self,
            fwd_s=self.fwd_s * factor,
            bwd_input_s=self.bwd_input_s * factor,
            bwd_weight_s=self.bwd_weight_s * factor,
            split_s=self.split_s * factor,
            remade=self.remade and replace(self.remade, seconds=self.remade.seconds * factor),
        )


@dataclass(frozen=True)
class Piece:
    """A group as code, with the key that is equal for equal work."""

    name: str
    code: Code
    received: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]
    key: str
    workspace_bytes: int
    params: tuple[str, ...]
    param_bytes: int

    @property
    def lasting(self) -> bool:
        """Whether the key says all: operators of torch and of mpipipe, but no code of the user's, which
        may be another one in the next run."""
        targets = [n.target for n in self.code.forward.graph.nodes if n.op == "call_function"]
        return all(_is_ours(t) for t in targets)


def _is_ours(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in ("aten", "prims")
    module = str(getattr(target, "__module__", "")).partition(".")[0]
    return not isinstance(target, Layer) and module in ("mpipipe", "torch", "_operator")


def pieces(anatomy: Anatomy, graph: Graph, uses: dict[str, int]) -> list[Piece]:
    groups = group_of(anatomy)
    bodies: list[list[fx.Node]] = [[] for _ in graph.groups]
    for node, g in groups.items():
        bodies[g].append(node)
    return [
        _piece(anatomy, name, body, groups, uses) for name, body in zip(graph.groups, bodies, strict=True)
    ]


def _piece(
    anatomy: Anatomy, name: str, body: list[fx.Node], groups: dict[fx.Node, int], uses: dict[str, int]
) -> Piece:
    inside = set(body)
    received = list(
        dict.fromkeys(n for op in body for n in op.all_input_nodes if n in groups and n not in inside)
    )
    outputs = anatomy.captured.outputs
    sent = [n for n in body if n in outputs or any(u in groups and u not in inside for u in n.users)]
    code = extract(anatomy, body, received, sent, [], uses)
    sizes = [sum(s.nbytes for s in output_specs(n)) for n in body]
    params = tuple(dict.fromkeys(leaf[0] for leaf in code.leaves))
    weights = [spec_of(anatomy.node_of_param[p]).nbytes for p in params]
    # one output and its gradient, and a weight gradient before it is added
    return Piece(
        name,
        code,
        tuple(received),
        tuple(sent),
        _key(anatomy, code),
        2 * max(sizes) + max(weights, default=0),
        params,
        sum(weights),
    )


def _key(anatomy: Anatomy, code: Code) -> str:
    """Operators, wiring, constants, shapes and dtypes; without names."""
    index: dict[fx.Node, int] = {}
    lines = [repr([(p.spec, p.stride, p.needs_grad) for p in code.received])]
    leaves = [anatomy.node_of_param[name] for name, _ in code.leaves]
    lines.append(repr([(spec_of(node), needs_grad(node)) for node in leaves]))
    for node in code.forward.graph.nodes:
        index[node] = len(index)
        shapes = output_specs(node) if "val" in node.meta and node.op == "call_function" else ()
        op = op_text(node) if node.op == "call_function" else node.op
        lines.append(f"{op} {settings_text(node, lambda n: f'%{index[n]}')} {shapes}")
    return digest(*lines)


def grad_bytes(code: Code) -> int:
    """Of the gradients of what is sent."""
    return sum(p.spec.nbytes for p in code.sent if p.needs_grad)
