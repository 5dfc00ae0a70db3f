"""`with torch.no_grad():`, `enable_grad` and `autocast` of the user's forward, as properties of operators.

torch.export puts the body of such a region into a graph of its own:

    y = wrap_with_set_grad_enabled(False, submod_1, x)  -->  y = Within(cos, no_grad)(x)

The innermost region of each kind counts, as when the model runs. Operators outside of all of them run
as the runtime says: with gradients in training only, under the autocast of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

_REGIONS = {
    torch.ops.higher_order.wrap_with_set_grad_enabled: 1,  # arguments before the body's graph
    torch.ops.higher_order.wrap_with_autocast: 4,
}


class Region(NamedTuple):
    """grad: False inside no_grad; autocast: (device, dtype, enabled) of a region; None: as outside."""

    grad: bool | None = None
    autocast: tuple[str, torch.dtype | None, bool] | None = None

    @property
    def plain(self) -> bool:
        return self.grad is not False and self.autocast is None

    @property
    def text(self) -> str:
        """What follows the operator's name in the value of the graph; the same in every process."""
        parts = ["no_grad"] if self.grad is False else []
        if self.autocast is not None:
            _, dtype, enabled = self.autocast
            parts.append(f"autocast {dtype if enabled else 'off'}")
        return f" in {', '.join(parts)}" if parts else ""


def region_of(node: fx.Node) -> Region:
    found: Region = node.meta.get("region", Region())
    return found


class Within:
    """A call of a torch operator inside a region."""

    def __init__(self, op: Any, region: Region) -> None:
        self.op, self.region = op, region
        self.__name__ = f"within_{getattr(op, '__name__', 'op').replace('.', '_')}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if self.region.grad is False:
                stack.enter_context(torch.no_grad())
            if self.region.autocast is not None:
                device, dtype, enabled = self.region.autocast
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            result = self.op(*args, **kwargs)
        return result if self.region.grad is not False else tree_map(partial(_apart, args), result)


def _apart(args: Sequence[Any], result: Any) -> Any:
    """A view that is made without a gradient says that it needs one, and has no graph for it; a tensor that
    comes out as it went in keeps its own."""
    learns = isinstance(result, Tensor) and result.requires_grad and all(result is not x for x in args)
    return result.detach() if learns else result


_within = cache(Within)


def on_device(op: Any, kind: str) -> Any:
    """The operator of a node, for a type of device: an autocast is that of one type, and one that did nothing
    on the processor does nothing there."""
    if not isinstance(op, Within) or op.region.autocast is None:
        return op
    of, dtype, enabled = op.region.autocast
    there = (kind, dtype, enabled) if of == "cpu" else None
    return _within(op.op, op.region._replace(autocast=there))


def inline_regions(module: fx.GraphModule) -> None:
    """Takes the bodies of all regions into the graph; each of their nodes remembers its own in
    `meta["region"]`."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in _REGIONS:
            continue
        n_settings = _REGIONS[node.target]
        *settings, attribute = node.args[: n_settings + 1]
        body = getattr(module, str(attribute.target))
        inline_regions(body)
        region = Region(grad=settings[0]) if n_settings == 1 else _autocast(settings)
        _inline(module.graph, node, body.graph, node.args[n_settings + 1 :], region)
        if not attribute.users:
            module.graph.erase_node(attribute)


def _autocast(settings: list[Any]) -> Region:
    device, dtype, enabled, _ = settings
    return Region(autocast=(device, dtype, enabled))


def _inline(graph: fx.Graph, call: fx.Node, body: fx.Graph, inputs: Any, outer: Region) -> None:
    env = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(call):
        for n in body.nodes:
            if n.op in ("placeholder", "output"):
                continue
            env[n] = graph.node_copy(n, env.__getitem__)
            inner = region_of(n)
            env[n].meta["region"] = Region(
                outer.grad if inner.grad is None else inner.grad, inner.autocast or outer.autocast
            )
    results: Any = body.output_node().args[0]
    for user in list(call.users):
        if user.target is not getitem:
            raise AssertionError(f"{user} reads the result of {call} whole")
        user.replace_all_uses_with(env[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(call)


def apply_regions(graph: fx.Graph) -> None:
    """Makes operators run within their regions; last, when no pass looks at targets any more."""
    for node in graph.nodes:
        region = region_of(node)
        if node.op == "call_function" and not region.plain:
            node.meta.setdefault("torch_op", node.target)
            node.target = _within(node.target, region)
