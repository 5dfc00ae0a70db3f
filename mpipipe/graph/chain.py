"""The graph of a list of layers, each of which is one operator (see layers), and of the loss behind them.

batch -> [Layer 0] -> item, item -> [Layer 1] -> item -> ... -> outputs -> the traced Tail
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mpipipe.graph.layers import Layer
from mpipipe.graph.program import Batch, Program, first_call, layers_of, split
from mpipipe.graph.rewrite import BufferUpdate, item
from mpipipe.graph.source import ModelSource


class Tail(Program):
    """Loss and metrics of a model whose outputs are given."""

    def forward(self, batch: Batch, outputs: Any = None) -> tuple[Tensor, ...]:
        return self.results(outputs, batch)


def chain(
    source: ModelSource, batch: Batch, train: bool
) -> tuple[fx.Graph, list[fx.Node], pytree.TreeSpec, list[BufferUpdate]]:
    """The layers as a graph: its placeholders are the batch. Returns also the nodes of the model's outputs
    and their structure.

    batch: fake tensors. Raises CaptureError where a layer cannot be run on made-up numbers.
    """
    graph, updates = fx.Graph(), []
    nodes = {key: graph.placeholder(key) for key in batch}
    of_tensor = {n: graph.get_attr(f"model.{n}") for n in [*source.params, *source.buffers]}
    for key, node in nodes.items():
        node.meta["val"] = batch[key]
    for name, node in of_tensor.items():
        node.meta["val"] = source.tensor(name)
    layers = layers_of(source.module)
    given = first_call(layers[0][1], nodes)
    for path, module in layers:
        flat, inputs = split(given, fx.Node)
        layer = Layer(path, module, inputs, train, source.in_eval.values())
        items = _call(graph, source, layer, flat, of_tensor)
        n_outputs = len(layer.forms)
        updates += layer.updates(source.alias, items[0].args[0], items[n_outputs:])  # type: ignore[arg-type]
        assert layer.structure is not None
        outputs = items[:n_outputs], layer.structure
        given = (pytree.tree_unflatten(*outputs),), {}
    return graph, *outputs, updates


def _call(
    graph: fx.Graph, source: ModelSource, layer: Layer, flat: Sequence[fx.Node], of_tensor: dict[str, fx.Node]
) -> list[fx.Node]:
    """Probes a layer and puts a call of it into the graph; the nodes of its results."""
    names = [[source.alias[f"{layer.path}.{n}"] for n in part] for part in (layer.params, layer.buffers)]
    first = source.materialise(dict.fromkeys(n for part in names for n in part))
    for name, t in first.items():
        t.requires_grad_(source.tensor(name).requires_grad)
    with torch.enable_grad():
        layer.probe([_made_up(n.meta["val"]) for n in flat], *([first[n] for n in part] for part in names))
    weights, buffers = ([of_tensor[n] for n in part] for part in names)
    node = graph.call_function(layer, (flat, weights, buffers))
    with source.fake_mode:
        node.meta["val"] = layer.fakes()
    node.meta["nn_module_stack"] = {layer.path: (f"model.{layer.path}", type(layer.module))}
    items = [graph.call_function(item, (node, i)) for i in range(len(node.meta["val"]))]
    for i, n in enumerate(items):
        n.meta = {**node.meta, "val": node.meta["val"][i]}
    return items


def _made_up(like: Tensor) -> Tensor:
    """Normal numbers, or zeros where they are integers: valid ids."""
    t = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
    if t.is_floating_point():
        t.normal_(generator=torch.Generator().manual_seed(0))
    return t.requires_grad_(like.requires_grad).clone()  # a layer may write what another has made, no leaf


def append(graph: fx.Graph, tail: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    """Puts the graph of the loss behind; inputs: what its placeholders are."""
    env = dict(zip(tail.find_nodes(op="placeholder"), inputs, strict=True))
    for n in tail.nodes:
        if n.op == "output":
            graph.output(fx.node.map_arg(n.args[0], env.__getitem__))
        elif n.op != "placeholder":
            env[n] = graph.node_copy(n, env.__getitem__)
