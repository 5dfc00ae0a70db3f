"""Parts of a model that cannot be traced: each is one operator of the graph, and runs as it is written.

    traced:  linear -> as_written(0, ...) -> relu -> ...     while forward is traced, a stand-in for the part
                             |
    graph:   linear -> Layer -> item ------> relu -> ...     what runs: the part itself (see layers)

A part is named as an attribute of what is traced: "model.blocks.0.experts", "loss", "metrics.accuracy".
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from mpipipe.errors import CaptureError
from mpipipe.graph.known import untraced
from mpipipe.graph.layers import Layer
from mpipipe.graph.program import (
    Batch,
    Loss,
    Program,
    empty,
    is_list,
    pair_of,
    place_of,
    register_dataclasses,
    spec,
    split,
)
from mpipipe.graph.rewrite import BufferUpdate, Untraceable, item
from mpipipe.graph.source import ModelSource
from mpipipe.graph.steady import numbers
from mpipipe.ops.library import define, differentiate
from mpipipe.values import TensorSpec

MODEL = "model."
_forms: list[Sequence[Tensor]] = []  # what each call in this trace returns


def _never(*_: Any) -> Any:
    raise AssertionError("it stands in a trace alone")


def _fake(call: int, inputs: list[Tensor], weights: list[Tensor], buffers: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in _forms[call]]


_AS_WRITTEN = define(
    "as_written(int call, Tensor[] inputs, Tensor[] weights, Tensor[] buffers) -> Tensor[]", _never, _fake
)
differentiate("as_written", _never, lambda ctx, inputs, output: None)  # so that results are no leaves


class Written:
    """The parts of one program that run as they are written, and the calls of them that its trace meets."""

    def __init__(self, program: Program, source: ModelSource, parts: Collection[str]) -> None:
        self.program, self.source, self.parts = program, source, parts
        self.layers: list[Layer] = []  # of each call
        self.probing = False

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Inside, a call of a part is traced as one operator."""
        self.layers.clear()
        _forms.clear()
        shadows = {
            id(module): self._shadow(path, module)
            for path, module in self.program.model.named_modules()
            if MODEL + path in self.parts
        }
        places = [
            (parent, name, child)
            for parent in self.program.model.modules()
            for name, child in parent._modules.items()
            if id(child) in shadows
        ]
        for parent, name, child in places:
            parent._modules[name] = shadows[id(child)]
        self.program.stand_in = self._function
        try:
            yield
        finally:
            del self.program.stand_in
            for parent, name, child in places:
                parent._modules[name] = child

    def _shadow(self, path: str, module: nn.Module) -> nn.Module:
        """A module with the same attributes that calls the operator; the hooks are run by the part."""
        shadow = object.__new__(type(module))  # a copy may do more, such as that of an LSTM
        for name, value in vars(module).items():
            hooks = "_hooks" in name and isinstance(value, dict)
            shadow.__dict__[name] = type(value)() if hooks else value

        @wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.probing:  # inside of another part
                return module(*args, **kwargs)
            outputs = self._call(path, module, args, kwargs)
            vars(shadow).update({n: number for (part, n), number in numbers(module).items() if not part})
            return outputs

        shadow.forward = forward
        return shadow

    def _function(self, name: str, function: Loss) -> Loss:
        """What is called in place of the loss, or of a metric."""
        if name not in self.parts:
            return function

        def call(outputs: Any, batch: Batch) -> Any:
            total, weight = self._call(name, _Function(function, name), (outputs, batch), {})
            if name == "loss" and isinstance(weight, Tensor):
                of_batch = _Weight(function, name, outputs)
                self._refuse_weight_of_outputs(of_batch, outputs, batch)
                weight = self._call("loss.weight", of_batch, (batch,), {})
            return total, weight

        return call

    def _refuse_weight_of_outputs(self, of_batch: _Weight, outputs: Any, batch: Batch) -> None:
        made_up, given = (pytree.tree_map_only(Tensor, _made_up, tree) for tree in (outputs, batch))
        with self._real(), torch.no_grad():
            one = float(of_batch(given))
            other = float(pair_of(of_batch.function, made_up, given, "loss")[1])
        if one != other:
            raise CaptureError(
                f"the weight of the loss{place_of(of_batch.function)} depends on the outputs of the model: "
                f"for one batch it was {one} and {other}; let it be what the batch alone says, such as how "
                "many labels count"
            )

    @contextmanager
    def _real(self) -> Iterator[None]:
        """Inside, parts run, and stand-ins in them are the part."""
        self.probing = True
        try:
            with untraced():
                yield
        finally:
            self.probing = False

    def _call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Puts a call of a part into the trace. Raises CaptureError where it cannot be one operator."""
        register_dataclasses((args, kwargs))
        flat, inputs = split((args, kwargs), Tensor)
        layer = Layer(path, module, inputs, self.program.mode == "train", self.source.in_eval.values())
        parameters = dict(module.named_parameters(remove_duplicate=False))
        state = parameters | dict(module.named_buffers(remove_duplicate=False))
        weights, buffers = ([state[n] for n in part] for part in (layer.params, layer.buffers))
        with self._real():
            self._probe(layer, [_made_up(t) for t in flat])
            forms = [
                torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                for shape, dtype, stride in layer.forms
            ]
        layer.takes_stream = not isinstance(module, _Weight)  # which is known before anything is drawn
        self.layers.append(layer)
        _forms.append(forms)
        results = _AS_WRITTEN(len(self.layers) - 1, flat, weights, buffers)
        assert layer.structure is not None
        return pytree.tree_unflatten(results, layer.structure)

    def _probe(self, layer: Layer, made_up: Sequence[Tensor]) -> None:
        names = [
            [self.source.alias[f"{layer.path}.{n}"] for n in part] for part in (layer.params, layer.buffers)
        ]
        first = self.source.materialise(dict.fromkeys(n for part in names for n in part))
        for name, t in first.items():
            t.requires_grad_(self.source.tensor(name).requires_grad)
        layer.probe(made_up, *([first[n] for n in part] for part in names))
        if layer.writes_input and not is_list(self.source.module):
            raise CaptureError(
                f"{layer.what} writes into what it is given; as it cannot be traced, that would be lost: let "
                "it write into a copy (`x = x.clone()`) and return that"
            )

    def put_in(self, graph: fx.Graph) -> list[BufferUpdate]:
        """The parts themselves in place of the operator; what their BatchNorms leave."""
        updates: list[BufferUpdate] = []
        for node in graph.find_nodes(op="call_function", target=_AS_WRITTEN.default):
            call, *node.args = node.args
            node.args = tuple(node.args)
            node.target = layer = self.layers[call]
            with self.source.fake_mode:
                node.meta["val"] = layer.fakes()
            for user in node.users:
                assert user.target is getitem
                user.target = item
            statistics = []
            for i in range(len(layer.forms), len(node.meta["val"])):
                with graph.inserting_before(next(iter(node.users), node.next)):
                    statistics.append(graph.call_function(item, (node, i)))
                statistics[-1].meta = {**node.meta, "val": node.meta["val"][i]}
            updates += layer.updates(self.source.alias, node, statistics)
        return updates


class _Function(nn.Module):
    """A loss or a metric as a part of the model, without weights."""

    function: Loss
    name: str

    def __init__(self, function: Loss, name: str) -> None:
        super().__init__()
        # a loss that is a module is no part of it
        self.__dict__ |= {"function": function, "name": name}

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def forward(self, outputs: Any, batch: Batch) -> Any:
        return pair_of(self.function, outputs, batch, self.name)


class _Weight(_Function):
    """The weight that a loss gives to a batch, whatever the outputs are."""

    def __init__(self, function: Loss, name: str, outputs: Any) -> None:
        super().__init__(function, name)
        self.__dict__["outputs"] = pytree.tree_map_only(Tensor, spec, outputs)

    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        zeros = pytree.tree_map_only(TensorSpec, lambda s: empty(s).zero_(), self.outputs)
        with torch.no_grad():
            return torch.as_tensor(pair_of(self.function, zeros, batch, self.name)[1])


def _made_up(like: Tensor) -> Tensor:
    """Normal numbers, or zeros where they are integers: valid ids."""
    with untraced():
        t = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
        if t.is_floating_point():
            t.normal_(generator=torch.Generator().manual_seed(0))
        return t.requires_grad_(like.requires_grad).clone()  # a part may write what another has made, no leaf


def more_parts(
    error: Untraceable, program: Program, source: ModelSource, parts: Collection[str]
) -> list[str]:
    """The innermost part in which tracing failed, of those that are traced, and modules of its class: they
    would fail likewise. Empty where it is the model itself, or most of it, which could not be cut."""
    paths = {id(vars(m)): path for path, m in source.module.named_modules() if path}  # a tracer makes proxies
    inside = [path for path in _where(error, paths) if MODEL + path not in parts]
    if not inside:
        function = "loss" if error.module == "" else program.found.at
        return [function] if function and function not in parts else []
    path = inside[-1]
    part = source.module.get_submodule(path)
    if not is_list(source.module) and 2 * _size(part) > _size(source.module):
        return []
    if type(part).__module__.startswith("torch."):
        return [MODEL + path]
    return [MODEL + p for p, m in source.module.named_modules() if type(m) is type(part) and p]


def _where(error: Untraceable, paths: dict[int, str]) -> list[str]:
    """The modules in which it was raised, from the outermost. paths: id of the attributes of each -> path."""
    if error.module is not None:
        names = error.module.removeprefix("model").removeprefix(".").split(".")
        found = [".".join(names[: i + 1]) for i in range(len(names))]
        return [path for path in found if path in paths.values()]
    frames = traceback.walk_tb((error.__cause__ or error).__traceback__)
    owners = (frame.f_locals.get("self") for frame, _ in frames)
    return [paths[id(vars(m))] for m in owners if isinstance(m, nn.Module) and id(vars(m)) in paths]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
