"""Parts of a model that cannot be traced: each is one operator of the graph, and runs as it is written.

    traced:  linear -> as_written(0, ...) -> relu -> ...     while forward is traced, a stand-in for the part
                             |
    graph:   linear -> Layer -> item ------> relu -> ...     what runs: the part itself (see layers)

A part is named as an attribute of what is traced: "model.blocks.0.experts", "loss", "metrics.accuracy".
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from mpipipe.errors import CaptureError
from mpipipe.graph.known import untraced
from mpipipe.graph.layers import Layer, Unrunnable, no_leaf
from mpipipe.graph.program import (
    Batch,
    Loss,
    Program,
    empty,
    is_list,
    layers_of,
    pair_of,
    place_of,
    register_dataclasses,
    spec,
    split,
)
from mpipipe.graph.rewrite import BufferUpdate, Untraceable, item, memory_of, mutated_inputs
from mpipipe.graph.source import ModelSource
from mpipipe.graph.steady import put_back
from mpipipe.values import TensorSpec

MODEL = "model."
_forms: list[Sequence[Tensor]] = []  # what each call in this trace returns


def _fake(call: int, inputs: list[Tensor], weights: list[Tensor], buffers: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in _forms[call]]


# an operator of traces alone: it never runs, and has a derivative so that its results are no leaves
_LIBRARY = torch.library.Library("mpipipe_traced", "DEF")
_LIBRARY.define("as_written(int call, Tensor[] inputs, Tensor[] weights, Tensor[] buffers) -> Tensor[]")
torch.library.register_fake("mpipipe_traced::as_written", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "mpipipe_traced::as_written", lambda *_: None, setup_context=lambda *_, **__: None, lib=_LIBRARY
)
_AS_WRITTEN = torch.ops.mpipipe_traced.as_written


class Written:
    """The parts of one program that run as they are written, and the calls of them that its trace meets."""

    def __init__(self, program: Program, source: ModelSource, parts: Collection[str]) -> None:
        self.program, self.source, self.parts = program, source, parts
        self.layers: list[Layer] = []  # of each call
        self.probing = False

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Inside, a call of a part is traced as one operator. What parts leave in their attributes is gone
        afterwards: each trace begins alike."""
        self.layers.clear()
        _forms.clear()
        model = self.program.model
        parts = {path: m for path, m in model.named_modules() if MODEL + path in self.parts}
        shadows = {id(m): self._shadow(path, m) for path, m in parts.items()}
        places = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent._modules.items()
            if id(child) in shadows
        ]
        with ExitStack() as stack:
            for part in parts.values():
                stack.enter_context(put_back(part))
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
        shadows = _copies(module)
        shadow = shadows[id(module)]
        first, left = _attributes(shadow), set[str]()
        for name, value in vars(shadow).items():
            if "_hooks" in name and isinstance(value, dict):
                shadow.__dict__[name] = type(value)()

        @wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.probing:  # inside of another part
                return module(*args, **kwargs)
            if given := [n for n in _changed(first, _attributes(shadow)) if n not in ("forward", *left)]:
                raise CaptureError(
                    f"sets {given[0]!r} of {path!r} before it calls it; as that part cannot be captured, it "
                    "runs as it is written, and would not see that: give it as an argument"
                )
            before = {id(m): _attributes(m) for m in module.modules()}
            layer, outputs = self._call(path, module, args, kwargs)
            for m in module.modules():
                for name in _changed(before[id(m)], _attributes(m)):
                    left.add(name)
                    shadows[id(m)].__dict__[name] = _Left(
                        f"{layer.what} leaves {name!r} behind, which is read outside of it; a part that "
                        "cannot be captured runs as it is written, and the graph would not see that: return "
                        "it as an output"
                    )
            return outputs

        shadow.forward = forward
        return shadow

    def _function(self, name: str, function: Loss) -> Loss:
        """What is called in place of the loss, or of a metric."""
        if name not in self.parts:
            return function
        if name == "loss":
            return partial(self._loss, function)
        return lambda outputs, batch: self._call(name, _Function(function, name), (outputs, batch), {})[1]

    def _loss(self, function: Loss, outputs: Any, batch: Batch) -> Any:
        """Its weight is known before there are outputs: it is taken of made-up ones, and compared later."""
        _, weight = self._call("loss.weight", _Weight(function, "loss", outputs), (batch,), {})
        part = _Total(function, "loss")
        _, total = self._call("loss", part, (outputs, batch, weight), {})
        part.compares = True
        return total, weight

    @contextmanager
    def _real(self) -> Iterator[None]:
        """Inside, parts run, and stand-ins in them are the part."""
        self.probing = True
        try:
            with untraced():
                yield
        finally:
            self.probing = False

    def _call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Layer, Any]:
        """Puts a call of a part into the trace. Raises CaptureError where it cannot be one operator."""
        register_dataclasses((args, kwargs))
        flat, inputs = split((args, kwargs), Tensor)
        layer = Layer(path, module, inputs, self.program.mode == "train", self.source.in_eval.values())
        if isinstance(module, _Function):
            layer.what = f"the {path.replace('.', ' ')}{place_of(module.function)}"
        parameters = dict(module.named_parameters(remove_duplicate=False))
        state = parameters | dict(module.named_buffers(remove_duplicate=False))
        weights, buffers = ([state[n] for n in part] for part in (layer.params, layer.buffers))
        with self._real():
            try:
                self._probe(layer, [_made_up(t) for t in flat])
            except Unrunnable:  # it may want shares, as a loss of probabilities does
                self._probe(layer, [_made_up(t, shares=True) for t in flat])
            forms = layer.room("meta")
        layer.takes_stream = not isinstance(module, _Weight)  # which is known before anything is drawn
        self.layers.append(layer)
        _forms.append(forms)
        results = _AS_WRITTEN(len(self.layers) - 1, flat, weights, buffers)
        assert layer.structure is not None
        return layer, pytree.tree_unflatten(results, layer.structure)

    def _probe(self, layer: Layer, made_up: Sequence[Tensor]) -> None:
        state = {n: self.source.alias[f"{layer.path}.{n}"] for n in [*layer.params, *layer.buffers]}
        weights = {n: _made_up(self.source.tensor(n), 0.02) for n in {state[n]: None for n in layer.params}}
        buffers = self.source.materialise(dict.fromkeys(state[n] for n in layer.buffers))
        layer.probe(
            made_up, [weights[state[n]] for n in layer.params], [buffers[state[n]] for n in layer.buffers]
        )
        alone = is_list(self.source.module) and layer.path in dict(layers_of(self.source.module))
        if layer.writes_input and not alone:
            raise CaptureError(
                f"{layer.what} writes into what it is given; as it cannot be captured, that would be lost: "
                "let it write into a copy (`x = x.clone()`) and return that"
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
        _let_results_be_new(graph)
        return updates


def _let_results_be_new(graph: fx.Graph) -> None:
    """A part may return what it was given, which no graph says. Where forward writes into the result, and
    uses what was given elsewhere, it must not."""
    for node in graph.nodes:
        for target in mutated_inputs(node):
            made = memory_of(target)
            call: Any = made.args[0] if made.target is item else made
            if isinstance(call.target, Layer):
                given = {memory_of(n) for n in call.args[0]}
                same = {n for n in graph.nodes if memory_of(n) in given}
                if any(user not in same and user is not call for n in same for user in n.users):
                    call.target.must_be_new = True


def _copies(module: nn.Module) -> dict[int, nn.Module]:
    """id of each module in it -> one with the same attributes, and copies for its modules."""
    found = {
        id(m): object.__new__(type(m)) for m in module.modules()
    }  # a copy may do more, as that of an LSTM
    for m in module.modules():
        inner = {name: child and found[id(child)] for name, child in m._modules.items()}
        found[id(m)].__dict__.update({**vars(m), "_modules": inner})
    return found


_OF_TORCH = ("_parameters", "_buffers", "_modules", "training", "_flat_weights", "_flat_weight_refs")


def _attributes(module: nn.Module) -> dict[str, Any]:
    """As they are now, containers and plain objects with what is in them."""
    own = (n for n in vars(module) if n not in _OF_TORCH and "_hooks" not in n)
    return {name: _inside(vars(module)[name], 3) for name in own}


def _inside(value: Any, depth: int) -> Any:
    kind = type(value)
    if depth == 0 or kind is _Left or isinstance(value, nn.Module | Tensor | type) or callable(value):
        return value
    if isinstance(value, dict):
        return [value, *((key, _inside(x, depth - 1)) for key, x in value.items())]
    if isinstance(value, list | tuple | set):
        return [value, *(_inside(x, depth - 1) for x in value)]
    kept = getattr(value, "__dict__", None)
    return [value, *((key, _inside(x, depth - 1)) for key, x in kept.items())] if kept else value


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, tuple | list) and type(one) is type(other) and len(one) == len(other):
            return all(map(same, one, other))
        return one is other or (
            isinstance(one, int | float | str) and type(one) is type(other) and one == other
        )

    return [name for name, value in after.items() if name not in before or not same(before[name], value)]


class _Left:
    """In place of what a part leaves in an attribute. Whoever uses it is told."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(self.text)

    def _kind(self) -> Any:
        """What `isinstance` asks; torch looks at each attribute of a module."""
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return _Left if caller.startswith(("torch.", "mpipipe.")) else self._refuse()

    __class__ = property(_kind)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(x for x in pytree.tree_leaves((args, kwargs)) if type(x) is cls)._refuse()


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul"),
    *("neg", "bool", "float", "int", "index", "len", "iter", "getitem", "getattr", "call", "contains"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
):
    setattr(_Left, f"__{_name}__", _Left._refuse)


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
        total, weight = pair_of(self.function, outputs, batch, self.name)
        return total, torch.as_tensor(weight)


class _Weight(_Function):
    """The weight that a loss gives to a batch, whatever the outputs are."""

    def __init__(self, function: Loss, name: str, outputs: Any) -> None:
        super().__init__(function, name)
        register_dataclasses(outputs)
        self.__dict__["outputs"] = pytree.tree_map_only(Tensor, spec, outputs)

    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        zeros = pytree.tree_map_only(TensorSpec, lambda s: empty(s).zero_(), self.outputs)
        with torch.no_grad():
            return super().forward(zeros, batch)[1].to(torch.float64)


class _Total(_Function):
    """The sum of a loss whose weight is known."""

    compares = False  # with made-up numbers it would be another one

    def forward(self, outputs: Any, batch: Batch, weight: Tensor) -> Tensor:  # type: ignore[override]
        total, own = super().forward(outputs, batch)
        if self.compares and float(own) != float(weight):
            raise CaptureError(
                f"the weight of the loss{place_of(self.function)} depends on the outputs of the model, or on "
                f"chance: for one batch it was {float(own)} and {float(weight)}; let it be what the batch "
                "alone says, such as how many labels count"
            )
        return total


def _made_up(like: Tensor, scale: float = 1.0, shares: bool = False) -> Tensor:
    """Normal numbers, or shares between 0 and 1, or zeros where they are integers: valid ids."""
    with untraced():
        t = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
        if t.is_floating_point():
            draw = torch.Generator().manual_seed(0)
            t = t.uniform_(generator=draw) if shares else t.normal_(0.0, scale, generator=draw)
        return no_leaf(t) if like.requires_grad else t  # a part may write what another has made


def more_parts(
    error: Untraceable, program: Program, source: ModelSource, parts: Collection[str]
) -> list[str]:
    """The innermost part in which tracing failed, of those that are traced, and modules of its class: they
    would fail likewise. Empty where it is the model itself, or most of it, which could not be cut."""
    paths = {id(vars(m)): path for path, m in source.module.named_modules() if path}  # a tracer makes proxies
    inside = [path for path in _where(error, paths) if MODEL + path not in parts]
    if not inside:
        metrics = [f"metrics.{name}" for name in program.metrics]
        functions = [*metrics, "loss"] if error.module == "" else [program.found.at]
        return [name for name in functions if name and name not in parts][:1]
    path = inside[-1]
    part = source.module.get_submodule(path)
    alike = [path]
    if not type(part).__module__.startswith("torch."):
        alike = [p for p, m in source.module.named_modules() if type(m) is type(part) and p]
    most = _size(source.module) * (1.0 if is_list(source.module) else 0.5)
    small = [p for p in alike if _size(source.module.get_submodule(p)) <= most]
    return [MODEL + p for p in small] if path in small else []


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
