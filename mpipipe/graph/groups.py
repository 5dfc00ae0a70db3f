"""Atomic groups: the smallest pieces that a cut keeps together.

Formed from the graph alone, on every machine alike, so that a kernel which fuses a group may be
used or not without a cut ever falling inside it. Kept together with the operator before:

    views, casts and getitem    a view is nothing to send
    activations                 linear + GELU (bias_gelu)
    dropout and what adds it    projection + dropout + residual add
    attention's reshapes        scaled_dot_product_attention + transpose + reshape
    head + loss                 the last product up to the loss: its logits are the largest tensor
    uses of one BatchNorm       its statistics are one sequence of updates
    what may become one         operators that a kernel of our own may fuse (patterns)
    illegal cut positions       tuples, overlapping views, memory written later (anatomy.legal)

The residual add and the norm that follows may be parted: between them one tensor crosses, anywhere
else in the block two, and a kernel that fuses both gives the same bits as the two operators.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, fx

from mpipipe.graph.anatomy import Anatomy, output_specs, spec_of
from mpipipe.graph.program import spec
from mpipipe.graph.rewrite import aliased_inputs, op_text, schema_name, settings_text
from mpipipe.graph.source import ModelSource
from mpipipe.values import Graph, Node, Tie

_ACTIVATIONS = {"gelu", "relu", "relu_", "silu", "silu_", "tanh", "sigmoid", "leaky_relu", "elu", "hardtanh"}
_HEADS = {
    "aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum",
    "aten::convolution", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::conv_transpose1d",
    "aten::conv_transpose2d", "aten::conv_transpose3d", "aten::scaled_dot_product_attention", "aten::lstm",
    "aten::gru", "aten::rnn_tanh", "aten::rnn_relu",
}  # fmt: skip


def _joins_previous(anatomy: Anatomy, i: int) -> bool:
    node, before = anatomy.order[i], anatomy.order[i - 1]
    op = schema_name(node).removeprefix("aten::")
    if (aliased_inputs(node) and op != "dropout") or op in _ACTIVATIONS or op == "dropout":
        return any(anatomy.index.get(a, -1) >= 0 for a in node.all_input_nodes)
    return op in ("add", "add_") and before in node.all_input_nodes


def _head_start(anatomy: Anatomy) -> int:
    """Index of the last operator with weights, or product, before the loss."""
    loss = anatomy.captured.outputs[0]
    if anatomy.captured.mode == "predict" or loss not in anatomy.index:
        return len(anatomy.order)
    for i in range(anatomy.index[loss], -1, -1):
        if schema_name(anatomy.order[i]) in _HEADS:
            return i
    return len(anatomy.order)


def _shared_statistics(anatomy: Anatomy) -> list[tuple[int, int]]:
    """First and last place of each buffer that several operators update: one stage must do it in order."""
    places: dict[str, list[int]] = {}
    for update in anatomy.captured.updates:
        places.setdefault(update.buffer, []).append(anatomy.index[update.node])
    return [(min(found), max(found)) for found in places.values() if len(found) > 1]


def _matches(anatomy: Anatomy) -> list[tuple[int, int]]:
    """First and last place of what may become one operator."""
    places = [[anatomy.index[n] for n in m.nodes] for m in anatomy.matches if m.atomic]
    return [(min(found), max(found)) for found in places]


def boundaries(anatomy: Anatomy) -> list[int]:
    """Positions in `anatomy.order` where a group starts; the first is 0."""
    crossing, head = anatomy.crossings(), _head_start(anatomy)
    spans = [*_shared_statistics(anatomy), *_matches(anatomy)]
    joined = {i for first, last in spans for i in range(first + 1, last + 1)}
    starts = [0]
    for i in range(1, len(anatomy.order)):
        if i > head or i in joined or _joins_previous(anatomy, i) or not anatomy.legal(i, crossing[i]):
            continue
        if crossing[i]:  # nothing to send: parts that do not depend on each other may be parted too
            starts.append(i)
    return starts


def group_of(anatomy: Anatomy) -> dict[fx.Node, int]:
    """Operator -> index of its group."""
    starts, groups, g = set(boundaries(anatomy)), {}, -1
    for i, node in enumerate(anatomy.order):
        g += i in starts
        groups[node] = g
    return groups


def _digest(t: Tensor) -> str:
    """Of a constant's values: they are part of the model, as its operators are."""
    kind = f"{t.dtype} {tuple(t.shape)} ".encode()
    return hashlib.sha256(kind + t.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]


def make_graph(anatomy: Anatomy, source: ModelSource) -> Graph:
    """The plain value of a captured graph, for the planner, for reports and for the hash."""
    c, groups = anatomy.captured, group_of(anatomy)
    names = {**c.name, **c.inputs, **{n: f"constant {_digest(t)}" for n, t in c.constant.items()}}
    momentum = {u.node: f" momentum {u.momentum}" for u in c.updates if u.momentum is not None}
    nodes = []
    uses: dict[str, set[int]] = {}
    for node in anatomy.operators:
        if node not in anatomy.needed:
            continue
        reads = tuple(
            c.param.get(n) or c.buffer[n] for n in node.all_input_nodes if n in c.param or n in c.buffer
        )
        group = groups.get(node, -1)
        for name in reads:
            if name in source.params and group >= 0:
                uses.setdefault(name, set()).add(group)
        inputs = tuple(names[n] for n in node.all_input_nodes if n in names)
        path = c.name[node].rsplit("/", 1)[0]
        place = {n: f"%{i}" for i, n in enumerate(node.all_input_nodes)}
        settings = settings_text(node, place.__getitem__) + momentum.get(node, "")
        specs = output_specs(node)
        nodes.append(Node(c.name[node], op_text(node), settings, inputs, specs, reads, group, path))
    first: dict[int, str] = {}
    for node, group in groups.items():
        first.setdefault(group, c.name[node])
    params = {n: spec(source.tensor(n)) for n in source.params}
    ties = tuple(Tie(n, params[n].nbytes, tuple(sorted(uses[n]))) for n in params if len(uses.get(n, ())) > 1)
    batch = {key: spec_of(n) for n, key in c.inputs.items()}
    buffers = {n: spec(source.tensor(n)) for n in source.buffers}
    return Graph(tuple(nodes), tuple(first.values()), batch, params, buffers, ties)
