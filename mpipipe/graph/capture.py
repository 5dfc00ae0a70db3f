"""nn.Module + loss -> a pure, named operator graph of one micro-batch.

    torch.export (non-strict, training IR, fake tensors)
      -> drop guards and assertions -> canonical names -> side effects out (rewrite)
      -> shapes and dtypes as they are under autocast (propagate)

`torch.export` (PyTorch 2) traces below modules and above autograd, so the graph is differentiated
by torch itself at run time and every operator keeps torch's own bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from mpipipe.cluster.memory import uncollected
from mpipipe.errors import CaptureError, MpipipeError
from mpipipe.graph.chain import Tail, append, chain
from mpipipe.graph.means import refuse_mean
from mpipipe.graph.program import Batch as Batch
from mpipipe.graph.program import Loss, Metric, Mode, Program, Specs, is_list
from mpipipe.graph.refusals import (
    NoStrangeWeights,
    as_if_run,
    cannot,
    no_assignments,
    no_own_backwards,
    norms_that_fit,
    quiet,
    refuse_backward_hooks,
    refuse_sparse_gradients,
    strange_weight,
)
from mpipipe.graph.regions import apply_regions, inline_regions, region_of
from mpipipe.graph.rewrite import (
    BufferUpdate,
    Untraceable,
    copy_bare_outputs,
    copy_written_inputs,
    keep_lifted_tensors_apart,
    make_buffers_functional,
    make_random_ops_ours,
    schema_name,
    source_line,
)
from mpipipe.graph.source import TRACING, ModelSource, set_mode, user_frame
from mpipipe.graph.steady import Numbers, refuse_changes
from mpipipe.values import TensorSpec


@dataclass(frozen=True)
class Captured:
    """One variant (mode and micro-batch shape) of the model.

    graph    fx graph; call_function nodes only, `meta["val"]` is the fake result under autocast
    name     node -> canonical name, for call_function nodes
    param    get_attr node -> canonical parameter name;  buffer: likewise
    constant   get_attr node -> a tensor that forward makes from Python values
    inputs   placeholder node -> batch key;  rng: the placeholders of step and global micro-batch
    outputs  train: (loss sum,);  eval: (loss sum, metric 1 sum, metric 1 weight, metric 2 sum, ...),
             scalars all;  predict: the tensors that the model returns
    weight   the loss weight: a node that depends on the batch alone, or a number
    structure   predict: tree_unflatten(outputs, structure) is what the model returns
    """

    mode: Mode
    graph: fx.Graph
    name: dict[fx.Node, str]
    param: dict[fx.Node, str]
    buffer: dict[fx.Node, str]
    constant: dict[fx.Node, Tensor]
    inputs: dict[fx.Node, str]
    rng: tuple[fx.Node, fx.Node] | None
    outputs: tuple[fx.Node, ...]
    weight: fx.Node | float | None
    updates: tuple[BufferUpdate, ...]
    structure: TreeSpec | None = None
    by_layer: bool = False  # each layer is one operator, which runs as it is written
    precision: str = "fp32"


def autocast(precision: str, device: str = "cpu") -> torch.autocast:
    """bf16 mixed precision; weights are cast at each use, so a use's bits do not depend on others. device:
    its type, where operators run."""
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def capture(
    source: ModelSource,
    loss: Loss,
    specs: Specs,
    mode: Mode,
    precision: str = "fp32",
    metrics: Mapping[str, Metric] | None = None,
    by_layer: bool | None = None,
) -> Captured:
    """Captures `source` for one micro-batch of the given shapes.

    by_layer: whether each layer of an nn.Sequential is one opaque operator; None: if nothing else does.
    Raises CaptureError with the user's source line where the model cannot be captured.
    """
    try:
        return _capture(source, loss, specs, mode, precision, metrics or {}, bool(by_layer))
    except Untraceable:
        if by_layer is not None or not is_list(source.module):
            raise
    return _capture(source, loss, specs, mode, precision, metrics or {}, True)


def _capture(
    source: ModelSource, loss: Loss, specs: Specs, mode: Mode, precision: str,
    metrics: Mapping[str, Metric], by_layer: bool,
) -> Captured:  # fmt: skip
    if mode == "train":
        refuse_sparse_gradients(source.module)
    if mode == "train" and not by_layer:
        refuse_backward_hooks(source.module)
    program = (Tail if by_layer else Program)(source.module, loss, metrics, mode)
    set_mode(program, mode == "train", source.in_eval.values())
    with TRACING:
        with source.fake_mode:
            batch = {k: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for k, s in specs.items()}
        with norms_that_fit(source.module):
            trace = _trace_layers if by_layer else _trace
            exported, updates = trace(program, source, batch, precision)
        graph = exported.graph
        inputs = dict(zip(graph.find_nodes(op="placeholder"), specs, strict=True))
        _drop_checks(graph)
        copy_written_inputs(graph)
        copy_bare_outputs(graph)
        keep_lifted_tensors_apart(graph)
        param, buffer, constant = _attributes(exported, source)
        name = _canonical_names(graph)
        updates += make_buffers_functional(graph, name, buffer)
        rng = make_random_ops_ours(graph, name, source.seed)
        apply_regions(graph)
        _propagate(exported, source, precision)
    outputs, weight = _outputs(graph, program)
    return Captured(
        mode, graph, name, param, buffer, constant, inputs, rng, outputs, weight, tuple(updates),
        program.found.structure, by_layer, precision,
    )  # fmt: skip


@cache
def warm_up_tracer() -> None:
    """Loads what torch's tracer imports at its first use (about 100 MB), so that it counts as imports. The
    collector of garbage would take a tenth of a start, and free nothing."""
    with uncollected():
        source = ModelSource(lambda: nn.Linear(1, 1), 0)
        capture(source, lambda y, batch: (y.sum(), 1.0), {"input": TensorSpec((1, 1), "float32")}, "train")


def _trace(
    program: Program, source: ModelSource, batch: Batch, precision: str
) -> tuple[fx.GraphModule, list[BufferUpdate]]:
    return _export(program, (batch,), source, precision), []


def _trace_layers(
    program: Program, source: ModelSource, batch: Batch, precision: str
) -> tuple[fx.GraphModule, list[BufferUpdate]]:
    """The layers as they are, and behind them the traced loss."""
    with autocast(precision):
        graph, outputs, structure, updates = chain(source, batch, program.mode == "train")
    given = tree_unflatten([n.meta["val"] for n in outputs], structure)
    tail = _export(program, (batch, given), source, precision)
    batch_nodes = graph.find_nodes(op="placeholder")
    append(graph, tail.graph, [*batch_nodes, *outputs])
    return fx.GraphModule(tail, graph), updates


def _export(
    program: Program, arguments: tuple[Any, ...], source: ModelSource, precision: str
) -> fx.GraphModule:
    def run() -> tuple[fx.GraphModule, Numbers]:
        return _exported(program, arguments, source, precision), program.found.numbers

    return refuse_changes("the model, or the loss,", program, run, _equal)


def _equal(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two traces say the same."""
    constants = [
        attrgetter(str(n.target))(module)
        for module in (one, other)
        for n in module.graph.nodes
        if n.op == "get_attr"
    ]
    half = len(constants) // 2
    return str(one.graph) == str(other.graph) and all(
        a is b or isinstance(a, FakeTensor) or torch.equal(a, b)
        for a, b in zip(constants[:half], constants[half:], strict=True)
    )


def _exported(
    program: Program, arguments: tuple[Any, ...], source: ModelSource, precision: str
) -> fx.GraphModule:
    learns = no_own_backwards() if program.mode == "train" else nullcontext()
    try:
        with (
            no_assignments(source.module), learns, NoStrangeWeights(source), autocast(precision), quiet(),
            as_if_run(),
        ):  # fmt: skip
            # autocast is not recorded, but what the model asks about it is true
            exported = torch.export.export(program, arguments, strict=False).module(check_guards=False)
    except CaptureError as error:
        raise type(error)(f"{user_frame(error)}\n  {error}") from error
    except MpipipeError as error:  # a model that refuses its input
        raise CaptureError(f"{user_frame(error)}\n  {error}") from error
    except Exception as error:
        raise Untraceable(cannot(user_frame(error), error, arguments[0])) from error
    inline_regions(exported)
    return exported


def _drop_checks(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        assertion = node.op == "call_function" and "assert" in schema_name(node)
        if assertion or (node.op == "call_module" and not node.users):
            graph.erase_node(node)


def _attributes(
    exported: fx.GraphModule, source: ModelSource
) -> tuple[dict[fx.Node, str], dict[fx.Node, str], dict[fx.Node, Tensor]]:
    """Parameters, buffers and constants."""
    param: dict[fx.Node, str] = {}
    buffer: dict[fx.Node, str] = {}
    constant: dict[fx.Node, Tensor] = {}
    for node in exported.graph.nodes:
        if node.op != "get_attr":
            continue
        name = source.alias.get(str(node.target).removeprefix("model."))
        if name is not None:
            (param if name in source.params else buffer)[node] = name
            continue
        value = attrgetter(str(node.target))(exported)
        # of a loss that is a module; what is no part of one has been refused
        learns = [n for n in node.users if region_of(n).grad is not False]
        if isinstance(value, nn.Parameter) and value.requires_grad and learns:
            raise CaptureError(f"{source_line(learns[0])}\n  {strange_weight(value)}")
        if isinstance(value, FakeTensor):
            try:
                value = source.constant(value)
            except CaptureError as error:
                what = str(node.target).removeprefix("model.")
                raise CaptureError(f"{source_line(next(iter(node.users)))}\n  {what!r} {error}") from error
        constant[node] = value.detach()
    return param, buffer, constant


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
            raise Untraceable(cannot(source_line(n), error)) from error
        n.meta["val"] = result
        return result


def _propagate(module: fx.GraphModule, source: ModelSource, precision: str) -> None:
    values = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    with source.fake_mode, torch.enable_grad(), autocast(precision):
        _Propagate(module, garbage_collect_values=False).run(*values, enable_io_processing=False)


def _outputs(graph: fx.Graph, module: Program) -> tuple[tuple[fx.Node, ...], fx.Node | float | None]:
    """Outputs and weight; scalars, where they are sums."""
    results = tuple(graph.output_node().args[0])  # type: ignore[arg-type]
    if module.mode == "predict":
        return results, None
    weight = results[-1] if module.found.weight is None else module.found.weight
    if weight != 1.0:  # which makes the step's loss the mean of the micro-batches' means
        refuse_mean(results[0], weight)
    outputs = results[:-1] if module.found.weight is None else results
    for what, node in zip(["loss sum", *_sums_of(module.metrics)], outputs, strict=True):
        value = node.meta["val"]
        if value.numel() != 1 or (what == "loss sum" and not value.is_floating_point()):
            raise CaptureError(
                f"{source_line(node)}\n  the {what} has shape {tuple(value.shape)} and dtype {value.dtype}, "
                "a floating-point scalar is needed; sum over tokens or samples"
            )
    return outputs, weight


def _sums_of(metrics: Mapping[str, Metric]) -> list[str]:
    return [f"{part} of the metric {name!r}" for name in metrics for part in ("sum", "weight")]
