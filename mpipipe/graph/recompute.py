"""Selective recomputation: what is cheap to make is let go after forward and made again before backward.

    forward    as ever; then the memory of some results is given back, while their tensors stay
    refill     cheap operators make the same values again, of what backward keeps anyway, in the same tensors
    backward   as ever

Products, convolutions, attention and recurrent layers are kept; norms, activations, dropout, pools, copies
and sums are made again (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 3;
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). Autograd's graph is
that of a stage that keeps all, so gradients are added in the same order, in a backward in two as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from mpipipe.graph.anatomy import Anatomy
from mpipipe.graph.capture import autocast
from mpipipe.graph.cut import Code, Selective
from mpipipe.graph.rewrite import aliased_inputs, memory_of, mutated_inputs, schema_name, torch_op
from mpipipe.graph.source import TRACING
from mpipipe.graph.tape import storage_id
from mpipipe.ops import fused
from mpipipe.ops.batch_norm import batch_norm, batch_norm_with_statistics
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.max_pool2d import max_pool2d
from mpipipe.ops.swiglu import swiglu

_CHEAP = {
    f"aten::{name}"
    for name in (
        "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "native_group_norm", "batch_norm",
        "instance_norm", "softmax", "_softmax", "mean", "sum", "dropout", "clone", "_to_copy", "cat", "stack",
        "pad", "max_pool2d", "avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
    )
}  # fmt: skip
_OWN = (batch_norm, batch_norm_with_statistics, layer_norm, rms_norm, max_pool2d, swiglu, fused.gelu_of)


def selective(anatomy: Anatomy, code: Code, sent_too: bool = False) -> Code:
    """With `code.selective`; as it is where nothing can be let go. sent_too: what is sent as well, as if it
    stayed on the stage and backward needed it: of a part of one."""
    graph = deepcopy(code.forward.graph)
    part_products(graph)
    module = fx.GraphModule(code.forward, graph)
    seen = _Seen(anatomy, replace(code, forward=module))
    results: Any = graph.output_node()
    sent = set(results.args[0][0])
    out = {n for n in results.all_input_nodes if n not in sent} if sent_too else set(results.all_input_nodes)
    kept = seen.kept | ({seen.memory[n] for n in sent if n in seen.memory} if sent_too else set())
    fixed = {m for n in graph.nodes if n in out or n.op != "call_function" for m in seen.memory_of(n)}
    dropped, there, made = list[fx.Node](), set[fx.Node](), set[fx.Node]()
    first: dict[int, fx.Node] = {}
    for n in graph.nodes:
        memory = seen.memory.get(n)
        own = memory is not None and first.setdefault(memory, n) is n
        if n.op != "call_function":
            there.add(n)
        elif is_cheap(n) and all(i in there for i in n.all_input_nodes) and not seen.is_written(n):
            there.add(n)
            if not own or memory not in kept:
                made.add(n)
            elif memory not in fixed and memory_of(n).op == "call_function":  # strides of a batch may differ
                dropped.append(n)
        elif own and memory in kept and memory not in seen.written:
            there.add(n)
    if not dropped:
        return code
    needed = _needed(dropped, made)
    handles = [n for n in graph.nodes if n in needed and n not in made and n.op == "call_function"]
    held = [*dropped, *(n for n in handles if n not in dropped)]
    refill = _refill(module, graph, dropped, held, made & needed)
    results.args = ((*results.args[0], tuple(held)),)
    gone = {seen.memory[n]: n for n in dropped}
    others = [n for m, n in gone.items() if m not in {seen.memory.get(s) for s in results.args[0][0]}]
    return replace(
        code,
        forward=fx.GraphModule(module, graph),
        selective=Selective(
            refill,
            len(dropped),
            sum(seen.nbytes(n) for n in others),
            tuple(i for i, n in enumerate(results.args[0][0]) if seen.memory.get(n) in gone),
            tuple(i for i, n in enumerate(graph.nodes) if i < len(code.received) and n in needed),
        ),
    )


def is_cheap(node: fx.Node) -> bool:
    """Whether its result costs little to make again, beside the products of a stage."""
    op = torch_op(node)
    pointwise = isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags
    return pointwise or schema_name(node) in _CHEAP or node.target in _OWN or bool(aliased_inputs(node))


def refilled(t: Tensor, value: Tensor) -> None:
    """Gives a tensor that was let go memory again, and the values of another one of its layout; autograd,
    which keeps it, sees no change."""
    if isinstance(t, FakeTensor):
        return
    storage, source = t.untyped_storage(), value.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)


def let_go(t: Tensor) -> None:
    """Gives back its memory; shape and all else stay."""
    t.untyped_storage().resize_(0)


class _Seen:
    """The memory of the results of some code, found on fake tensors: node -> number. kept: by backward;
    written: in place."""

    def __init__(self, anatomy: Anatomy, code: Code) -> None:
        self.memory: dict[fx.Node, int] = {}
        self.kept: set[int] = set()
        saved: list[Tensor] = []

        def pack(t: Tensor) -> Tensor:
            saved.append(t.detach())
            return t.detach()

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        fake = anatomy.captured.outputs[0].meta["val"].fake_mode
        run = fx.Interpreter(code.forward, garbage_collect_values=False)
        with TRACING, fake, torch.enable_grad(), hooks, autocast(anatomy.captured.precision):
            run.run(*_fake_arguments(anatomy, code), enable_io_processing=False)
        self.kept = {storage_id(t) for t in saved}
        self.memory = {n: storage_id(v) for n, v in run.env.items() if isinstance(v, Tensor)}
        self.written = {m for n in run.env for t in mutated_inputs(n) for m in self.memory_of(t)}
        self._run = run  # while its tensors live, so do the numbers of their memory

    def memory_of(self, node: fx.Node) -> Iterable[int]:
        return (self.memory[node],) if node in self.memory else ()

    def nbytes(self, node: fx.Node) -> int:
        return int(self._run.env[node].untyped_storage().nbytes())

    def is_written(self, node: fx.Node) -> bool:
        """Whether the memory that it reads or makes is written in place by any operator."""
        return any(m in self.written for n in (node, *node.all_input_nodes) for m in self.memory_of(n))


def _fake_arguments(anatomy: Anatomy, code: Code) -> list[Any]:
    c = anatomy.captured
    batch = {key: n.meta["val"] for n, key in c.inputs.items()}
    buffers = {name: n.meta["val"] for n, name in c.buffer.items()}
    received = [
        torch.empty_strided(p.spec.shape, p.stride, dtype=getattr(torch, p.spec.dtype)).requires_grad_(
            p.needs_grad
        )
        for p in code.received
    ]
    leaves = [anatomy.node_of_param[name].meta["val"] for name, _ in code.leaves]
    rest = (*(batch[key] for key in code.inputs), *leaves, *(buffers[name] for name in code.buffers))
    return [*received, *rest, *((0, 0) if code.random else ())]


def part_products(graph: fx.Graph) -> None:
    """A product and the activation of it, fused, become two again: the same calls, so the same bits."""
    for node in [n for n in graph.nodes if n.target is fused.linear_gelu]:
        x, weight, bias, approximate, transposed, shape = node.args
        with graph.inserting_before(node):
            product = graph.call_function(fused.product_of, (x, weight, transposed, shape), node.kwargs)
            product.meta["val"] = node.meta["val"]
        node.target, node.args, node.kwargs = fused.gelu_of, (product, bias, approximate), {}


def _needed(dropped: Iterable[fx.Node], made: set[fx.Node]) -> set[fx.Node]:
    """What is read to make some results again, back to what is there."""
    found, todo = set[fx.Node](), [i for n in dropped for i in n.all_input_nodes]
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            todo += n.all_input_nodes if n in made else []
    return found


def _refill(
    module: fx.GraphModule, graph: fx.Graph, dropped: list[fx.Node], held: list[fx.Node], made: set[fx.Node]
) -> fx.GraphModule:
    """(arguments of forward..., held...) -> nothing; the first of `held`, `dropped`, are filled."""
    refill = fx.Graph()
    env = {n: refill.placeholder(n.name) for n in graph.find_nodes(op="placeholder")}
    handles = {n: refill.placeholder(f"held_{i}") for i, n in enumerate(held)}
    env |= {n: handle for n, handle in handles.items() if n not in dropped}
    for n in graph.nodes:
        if n.op == "get_attr" or n in made or n in dropped:
            env[n] = refill.node_copy(n, env.__getitem__)
        if n in dropped:
            refill.call_function(refilled, (handles[n], env[n]))
    refill.output(())
    return fx.GraphModule(module, refill)
