"""nn.Module + loss -> a pure, named operator graph of one micro-batch.

    torch.export (non-strict, training IR, fake tensors)
      -> drop guards and assertions -> canonical names -> side effects out (rewrite)
      -> shapes and dtypes as they are under autocast (propagate)

`torch.export` (PyTorch 2) traces below modules and above autograd, so the graph is differentiated
by torch itself at run time and every operator keeps torch's own bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec

from mpipipe.cluster.memory import uncollected
from mpipipe.errors import CaptureError, MpipipeError
from mpipipe.graph.dtypes import refuse_unlike, wrong_dtype
from mpipipe.graph.layers import Unrunnable
from mpipipe.graph.means import refuse_mean
from mpipipe.graph.program import Batch as Batch
from mpipipe.graph.program import Loss, Metric, Mode, Program, Specs, place_of
from mpipipe.graph.refusals import (
    NoStrangeWeights,
    as_if_run,
    cannot,
    is_slip,
    no_assignments,
    no_own_backwards,
    no_seeds,
    norms_that_fit,
    quiet,
    refuse_backward_hooks,
    refuse_sparse_gradients,
    refuse_transforms,
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
    module_of,
    schema_name,
    source_line,
)
from mpipipe.graph.source import TRACING, ModelSource, set_mode, user_frame, users_own_frame
from mpipipe.graph.steady import Numbers, refuse_changes
from mpipipe.graph.written import Written, more_parts
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
    written: Mapping[str, str] = field(default_factory=dict)  # parts that run as they are written -> the line
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
    written: Mapping[str, str] | None = None,
) -> Captured:
    """Captures `source` for one micro-batch of the given shapes.

    written: parts of which it is known that they cannot be traced, and the line that is why; others are
    found here.
    Raises CaptureError with the user's source line where the model cannot be captured.
    """
    parts, failed = dict(written or {}), None

    def new() -> Program:
        return Program(source.module, loss, metrics or {}, mode)

    def traced(program: Program, specs: Specs) -> Captured:
        return _capture(program, source, specs, precision, parts)

    def refuse_dtypes(error: Untraceable) -> None:
        if why := wrong_dtype(error, specs, lambda other: traced(new(), other)):
            raise CaptureError(why) from error

    while True:
        program = new()
        try:
            return traced(program, specs)
        except Untraceable as error:
            more = more_parts(error, program, source, parts)
            if not more:
                refuse_dtypes(error)
                raise
            why = place_of(loss).strip(" ()") if more == ["loss"] else ""
            parts |= dict.fromkeys(more, why or str(error).split("\n  ")[0])
            failed = error
        except Unrunnable as error:
            if failed is None:
                raise
            if failed.__cause__ is not None and is_slip(failed.__cause__):
                raise failed from None
            refuse_dtypes(failed)
            raise CaptureError(f"{failed}\n  {error}") from error


def _capture(
    program: Program, source: ModelSource, specs: Specs, precision: str, parts: Mapping[str, str]
) -> Captured:
    mode = program.mode
    if mode == "train":
        refuse_sparse_gradients(source.module)
        refuse_backward_hooks(source.module, parts)
    set_mode(program, mode == "train", source.in_eval.values())
    written = Written(program, source, parts)
    with TRACING:
        with source.fake_mode:
            batch = {k: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for k, s in specs.items()}
        with norms_that_fit(source.module):
            exported = _export(program, batch, source, precision, written)
        graph = exported.graph
        refuse_transforms(graph)
        updates = written.put_in(graph)
        inputs = dict(zip(graph.find_nodes(op="placeholder"), specs, strict=True))
        _drop_checks(graph)
        copy_written_inputs(graph)
        copy_bare_outputs(graph)
        keep_lifted_tensors_apart(graph)
        param, buffer, constant = _attributes(exported, source)
        name = _canonical_names(graph)
        updates = make_buffers_functional(graph, name, buffer, updates)
        rng = make_random_ops_ours(graph, name, source.seed)
        apply_regions(graph)
        _propagate(exported, source, precision)
        refuse_unlike(graph)
    outputs, weight = _outputs(graph, program)
    return Captured(
        mode, graph, name, param, buffer, constant, inputs, rng, outputs, weight, tuple(updates),
        program.found.structure, dict(parts), precision,
    )  # fmt: skip


@cache
def warm_up_tracer() -> None:
    """Loads what torch's tracer imports at its first use (about 100 MB), so that it counts as imports. The
    collector of garbage would take a tenth of a start, and free nothing."""
    with uncollected():
        source = ModelSource(lambda: nn.Linear(1, 1), 0)
        capture(source, lambda y, batch: (y.sum(), 1.0), {"input": TensorSpec((1, 1), "float32")}, "train")


def _export(
    program: Program, batch: Batch, source: ModelSource, precision: str, written: Written
) -> fx.GraphModule:
    def run() -> tuple[fx.GraphModule, Numbers]:
        return _exported(program, batch, source, precision, written), program.found.numbers

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
    program: Program, batch: Batch, source: ModelSource, precision: str, written: Written
) -> fx.GraphModule:
    learns = no_own_backwards() if program.mode == "train" else nullcontext()
    try:
        with (
            no_assignments(source.module), learns, NoStrangeWeights(source), autocast(precision), quiet(),
            no_seeds(), as_if_run(), written.stand_ins(),
        ):  # fmt: skip
            # autocast is not recorded, but what the model asks about it is true
            exported = torch.export.export(program, (batch,), strict=False).module(check_guards=False)
    except CaptureError as error:
        if program.found.at is not None and users_own_frame(error) is None:
            raise  # of what a loss or a metric gave, which it says
        raise type(error)(f"{user_frame(error.__cause__ or error)}\n  {error}") from error  # type: ignore[arg-type]
    except MpipipeError as error:  # a model, or a loss, that refuses its input
        line = users_own_frame(error)  # those that come with mpipipe say it all, and are not to be mended
        raise CaptureError(str(error) if line is None else f"{line}\n  {error}") from error
    except Exception as error:
        raise Untraceable(cannot(user_frame(error), error, batch)) from error
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
            user, what = next(iter(node.users)), str(node.target).removeprefix("model.")
            try:
                value = source.constant(value)
            except Untraceable as error:
                raise Untraceable(f"{source_line(user)}\n  {what!r} {error}", module_of(user)) from error
            except CaptureError as error:
                raise CaptureError(f"{source_line(user)}\n  {what!r} {error}") from error
        constant[node] = value.detach()
    return param, buffer, constant


def _canonical_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Module path, operator, ordinal: "blocks.0.attn/linear.1"; the loss is the path "loss"."""
    count: dict[str, int] = {}
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        path = module_of(node)
        path = "loss" if path == "" else path.removeprefix("model").removeprefix(".")
        stem = f"{path}/{schema_name(node).removeprefix('aten::')}"
        names[node] = f"{stem}.{count.get(stem, 0)}"
        count[stem] = count.get(stem, 0) + 1
    return names


class _Propagate(fx.Interpreter):
    """Runs the graph on fake tensors and keeps each result: shape, dtype, strides, requires_grad. held: names
    of the parameters and buffers in the module, which a stage holds contiguous whatever the user's strides;
    with other strides here, what is sent over a cut would have those, and its kernels other bits."""

    def __init__(self, module: fx.GraphModule, held: Collection[str]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._held = held

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except Exception as error:
            raise Untraceable(cannot(source_line(n), error), module_of(n)) from error
        held = n.op == "get_attr" and str(n.target).removeprefix("model.") in self._held
        if held and not result.is_contiguous():
            result = result.detach().contiguous().requires_grad_(result.requires_grad)
        n.meta["val"] = result
        return result


def _propagate(module: fx.GraphModule, source: ModelSource, precision: str) -> None:
    values = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    with source.fake_mode, torch.enable_grad(), autocast(precision):
        _Propagate(module, source.alias).run(*values, enable_io_processing=False)


def _outputs(graph: fx.Graph, module: Program) -> tuple[tuple[fx.Node, ...], fx.Node | float | None]:
    """Outputs and weight; scalars, where they are sums."""
    results = tuple(graph.output_node().args[0])  # type: ignore[arg-type]
    if module.mode == "predict":
        return results, None
    weight = results[-1] if module.found.weight is None else module.found.weight
    if weight != 1.0:  # which makes the step's loss the mean of the micro-batches' means
        refuse_mean(results[0], weight, place_of(module.loss))
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
