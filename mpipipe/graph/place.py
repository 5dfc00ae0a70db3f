"""The code of a stage for an accelerator. It was captured on the processor, and says so wherever an operator
makes a tensor; constants lie there too.

Under autocast each type of device has operators of its own that keep fp32. What crosses a cut, and what the
planner counts, has the dtypes of the capture: so every result is given that one.
"""

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
    mixed = len({n.meta["val"].dtype for n in module.graph.nodes if _is_float(n)}) > 1
    env: dict[fx.Node, fx.Node] = {}
    for n in module.graph.nodes:
        env[n] = graph.node_copy(n, env.__getitem__)
        env[n].args = fx.node.map_aggregate(env[n].args, there)
        env[n].kwargs = fx.node.map_aggregate(env[n].kwargs, there)
        env[n].target = on_device(n.target, device.type)
        if mixed and n.op == "call_function" and _is_float(n):
            env[n] = graph.call_function(Tensor.to, (env[n], n.meta["val"].dtype))
    names = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
    held: dict[str, Any] = {name: getattr(module, name) for name in names}
    return fx.GraphModule({k: x.to(device) if isinstance(x, Tensor) else x for k, x in held.items()}, graph)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
