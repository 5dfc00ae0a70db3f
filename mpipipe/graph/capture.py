"""nn.Module + loss -> a pure, named operator graph of one micro-batch.

    torch.export (non-strict, training IR, fake tensors)
      -> drop guards and assertions -> canonical names -> side effects out (rewrite)
      -> shapes and dtypes as they are under autocast (propagate)

`torch.export` (PyTorch 2) traces below modules and above autograd, so the graph is differentiated
by torch itself at run time and every operator keeps torch's own bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from mpipipe.errors import CaptureError
from mpipipe.graph.rewrite import (
    BufferUpdate,
    copy_written_inputs,
    make_buffers_functional,
    make_random_ops_ours,
    schema_name,
    source_line,
)
from mpipipe.graph.source import TRACING, ModelSource, user_frame
from mpipipe.values import TensorSpec

Mode = Literal["train", "eval", "predict"]
Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class Captured:
    """One variant (mode and micro-batch shape) of the model.

    graph    fx graph; call_function nodes only, `meta["val"]` is the fake result under autocast
    name     node -> canonical name, for call_function nodes
    param    get_attr node -> canonical parameter name;  buffer: likewise
    inputs   placeholder node -> batch key;  rng: the placeholders of step and global micro-batch
    outputs  train, eval: (loss sum,);  predict: the tensors that the model returns
    weight   the loss weight: a node that depends on the batch alone, or a number
    """

    mode: Mode
    graph: fx.Graph
    name: dict[fx.Node, str]
    param: dict[fx.Node, str]
    buffer: dict[fx.Node, str]
    inputs: dict[fx.Node, str]
    rng: tuple[fx.Node, fx.Node] | None
    outputs: tuple[fx.Node, ...]
    weight: fx.Node | float | None
    updates: tuple[BufferUpdate, ...]


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Batch) -> Any:
        wanted = inspect.signature(self.model.forward).parameters
        outputs = self.model(**{k: v for k, v in batch.items() if k in wanted})
        return outputs if self.loss is None else self.loss(outputs, batch)


def autocast(precision: str) -> torch.autocast:
    """bf16 mixed precision; weights are cast at each use, so a use's bits do not depend on others."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def capture(
    source: ModelSource, loss: Loss, specs: dict[str, TensorSpec], mode: Mode, precision: str = "fp32"
) -> Captured:
    """Captures `source` for one micro-batch of the given shapes.

    Raises CaptureError with the user's source line where the model cannot be captured.
    """
    module = _WithLoss(source.module, None if mode == "predict" else loss)
    module.train(mode == "train")
    exported = _export(module, source, specs)
    graph = exported.graph
    inputs = dict(zip([n for n in graph.nodes if n.op == "placeholder"], specs, strict=True))
    _drop_checks(graph)
    copy_written_inputs(graph)
    param, buffer = _attributes(graph, source)
    name = _canonical_names(graph)
    updates = make_buffers_functional(graph, name, buffer)
    rng = make_random_ops_ours(graph, name, source.seed)
    _propagate(exported, source, precision)
    outputs, weight = _outputs(graph, mode)
    return Captured(mode, graph, name, param, buffer, inputs, rng, outputs, weight, tuple(updates))


def warm_up_tracer() -> None:
    """Loads what torch's tracer imports at its first use (about 100 MB), so that it counts as imports."""
    source = ModelSource(lambda: nn.Linear(1, 1), 0)
    capture(source, lambda y, batch: (y.sum(), 1.0), {"input": TensorSpec((1, 1), "float32")}, "train")


def _export(module: nn.Module, source: ModelSource, specs: dict[str, TensorSpec]) -> fx.GraphModule:
    try:
        with TRACING, source.fake_mode, _no_assignments(source.module):
            batch = {k: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for k, s in specs.items()}
            program = torch.export.export(module, (batch,), strict=False)
        return program.module(check_guards=False)
    except CaptureError as error:
        raise CaptureError(f"{user_frame(error)}\n  {error}") from error
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CaptureError(
            f"{user_frame(error)}\n  cannot be captured: {type(error).__name__}: {reason}\n"
            "  if it branches on the values of a tensor, write the branch with torch.where, or make it a "
            "constant of the model"
        ) from error


@contextmanager
def _no_assignments(model: nn.Module) -> Iterator[None]:
    """Refuses `self.buffer = value` in forward: torch's tracer drops it, for any module but the outermost."""
    modules = {id(m) for m in model.modules()}

    def check(module: nn.Module, name: str, value: Tensor) -> None:
        if id(module) in modules and value is not module._buffers.get(name, value):
            raise CaptureError(
                f"assigns the buffer {name!r} of {type(module).__name__}; only BatchNorm statistics and "
                "counters (`buffer.add_(1)`) are supported: return it as an output, or keep it outside of "
                "forward"
            )

    hook = nn.modules.module.register_module_buffer_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _drop_checks(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        assertion = node.op == "call_function" and "assert" in schema_name(node)
        if assertion or (node.op == "call_module" and not node.users):
            graph.erase_node(node)


def _attributes(graph: fx.Graph, source: ModelSource) -> tuple[dict[fx.Node, str], dict[fx.Node, str]]:
    param: dict[fx.Node, str] = {}
    buffer: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        name = source.alias.get(str(node.target).removeprefix("model."))
        if name is None:
            raise CaptureError(
                f"{source_line(next(iter(node.users)))}\n  uses a tensor made in forward from Python values "
                f"({node.target}); register it as a buffer of the module"
            )
        (param if name in source.params else buffer)[node] = name
    return param, buffer


def _canonical_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Module path, operator, ordinal: "blocks.0.attn/linear.1"; the loss is the path "loss"."""
    count: dict[str, int] = {}
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        path = "loss" if path == "" else path.removeprefix("model").removeprefix(".")
        stem = f"{path}/{schema_name(node).removeprefix('aten::')}"
        names[node] = f"{stem}.{count.get(stem, 0)}"
        count[stem] = count.get(stem, 0) + 1
    return names


class _Propagate(fx.Interpreter):
    """Runs the graph on fake tensors and keeps each result: shape, dtype, strides, requires_grad."""

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise CaptureError(
                f"{source_line(n)}\n  cannot be captured: {n.target} needs the values of a tensor, or does "
                f"not fit its inputs ({type(error).__name__}: {reason}); compute with tensors instead of "
                "`.item()`"
            ) from error
        n.meta["val"] = result
        return result


def _propagate(module: fx.GraphModule, source: ModelSource, precision: str) -> None:
    values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with TRACING, source.fake_mode, torch.enable_grad(), autocast(precision):
        _Propagate(module, garbage_collect_values=False).run(*values, enable_io_processing=False)


def _outputs(graph: fx.Graph, mode: Mode) -> tuple[tuple[fx.Node, ...], fx.Node | float | None]:
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    if mode == "predict":
        flat = [n for n in torch.utils._pytree.tree_leaves(result) if isinstance(n, fx.Node)]
        return tuple(flat), None
    pair = result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], fx.Node):
        raise CaptureError(
            "the loss returned something else than (sum, weight): return the summed loss and the weight it "
            "is divided by, for example `F.cross_entropy(..., reduction='sum'), labels.numel()`"
        )
    total, weight = pair
    value = total.meta["val"]
    if value.numel() != 1 or not value.is_floating_point():
        raise CaptureError(
            f"{source_line(total)}\n  the loss sum has shape {tuple(value.shape)} and dtype {value.dtype}, "
            "a floating-point scalar is needed; sum over tokens or samples"
        )
    return (total,), weight if isinstance(weight, fx.Node) else float(weight)
