"""The code of a stage for a backward in two: the weight gradients of the dear operators wait.

Those are products, convolutions and look-ups of rows, of a weight that nothing else on the stage reads. All
other weights have their gradients with those of the inputs: norms and biases alone are cheap, and where one
weight has several uses, autograd adds these in its own order.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mpipipe.graph.cut import Code
from mpipipe.graph.recompute import part_products
from mpipipe.graph.regions import region_of
from mpipipe.graph.rewrite import schema_name
from mpipipe.ops import fused
from mpipipe.ops.convolution import CONVOLUTION_LATER, TRANSPOSED_LATER
from mpipipe.ops.deferred import Deferred, Later
from mpipipe.ops.embedding import embedding
from mpipipe.ops.linear import LINEAR_LATER, TORCH_LINEAR_LATER, linear

_DEFERRED = {
    f"aten::{name}"
    for name in (
        "linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "embedding", "convolution",
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    )
}  # fmt: skip
_OWN = (linear, embedding, fused.product_of)
_ATEN = torch.ops.aten
LATERS: dict[Any, Later] = {
    _ATEN.linear.default: TORCH_LINEAR_LATER,
    linear: LINEAR_LATER,
    fused.product_of: fused.PRODUCT_LATER,
    _ATEN.conv1d.default: CONVOLUTION_LATER,
    _ATEN.conv2d.default: CONVOLUTION_LATER,
    _ATEN.conv3d.default: CONVOLUTION_LATER,
    _ATEN.conv_transpose1d.default: TRANSPOSED_LATER,
    _ATEN.conv_transpose2d.input: TRANSPOSED_LATER,
    _ATEN.conv_transpose3d.input: TRANSPOSED_LATER,
}


def split(code: Code) -> Code:
    """With `code.deferred`: the leaves whose gradients wait. The last argument of `forward` is the `Pending`
    of the micro-batch."""
    graph = deepcopy(code.forward.graph)
    part_products(graph)
    arguments = graph.find_nodes(op="placeholder")
    before = len(code.received) + len(code.inputs)
    weights = dict(zip(arguments[before : before + len(code.leaves)], code.leaves, strict=False))
    body = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(body):
        pending = graph.placeholder("pending")
    waiting = set()
    for node in list(graph.nodes):
        if positions := _positions(node, weights):
            waiting |= {weights[node.args[i]] for i in positions}
            node.target = Deferred(node.target, positions, _later_of(node, positions))
            node.args = (pending, *node.args)
    return replace(code, forward=fx.GraphModule(code.forward, graph), deferred=frozenset(waiting))


def _positions(node: fx.Node, weights: dict[fx.Node, tuple[str, int]]) -> tuple[int, ...]:
    """Of the weights among the arguments; none where their gradients cannot wait."""
    plain = node.op == "call_function" and region_of(node).plain
    if not plain or (schema_name(node) not in _DEFERRED and node.target not in _OWN):
        return ()
    reads = Counter(n for n in (*node.args, *node.kwargs.values()) if isinstance(n, fx.Node) and n in weights)
    once = all(count == 1 and len(n.users) == 1 for n, count in reads.items())
    places = tuple(i for i, n in enumerate(node.args) if isinstance(n, fx.Node) and n in weights)
    return places if once and len(places) == len(reads) else ()


def _later_of(node: fx.Node, positions: tuple[int, ...]) -> Later | None:
    """How its weight gradients are made without a graph; None where a bias is computed, say."""
    tensors = [i for i, n in enumerate(node.args) if isinstance(n, fx.Node)]
    alone = tensors == [0, *positions] and len(tensors) == len(node.all_input_nodes)
    return LATERS.get(node.target) if alone else None
