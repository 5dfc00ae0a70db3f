"""The code of a stage for an accelerator. It was captured on the processor, and says so wherever an operator
makes a tensor; constants lie there too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from mpipipe.graph.cut import Code
from mpipipe.graph.regions import on_device

_placed: WeakKeyDictionary[fx.GraphModule, dict[torch.device, Code]] = WeakKeyDictionary()


def placed(code: Code, device: torch.device) -> Code:
    """The same code, whose operators make their results on `device`."""
    if device.type == "cpu":
        return code
    known = _placed.setdefault(code.forward, {})
    if device not in known:
        of = code.selective
        known[device] = replace(
            code,
            forward=_moved(code.forward, device),
            selective=of and replace(of, refill=_moved(of.refill, device)),
        )
    return known[device]


def _moved(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    def there(x: Any) -> Any:
        return device if isinstance(x, torch.device) else x

    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in module.graph.nodes:
        env[n] = graph.node_copy(n, env.__getitem__)
        env[n].args = fx.node.map_aggregate(env[n].args, there)
        env[n].kwargs = fx.node.map_aggregate(env[n].kwargs, there)
        env[n].target = on_device(n.target, device.type)
    names = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
    held: dict[str, Any] = {name: getattr(module, name) for name in names}
    return fx.GraphModule({k: x.to(device) if isinstance(x, Tensor) else x for k, x in held.items()}, graph)
