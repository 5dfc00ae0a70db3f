"""What is traced: the user's model and loss as one function from a batch to a flat tuple of tensors.

    batch --arguments--> model.forward --outputs--> loss, metrics --> (loss sum, metrics..., weight)
                                           '------> predict: its tensors, and the structure around them

Batch keys are the parameter names of `model.forward`; keys that it does not name are for the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpipipe.errors import CaptureError
from mpipipe.graph.steady import Numbers, numbers
from mpipipe.values import TensorSpec

T = TypeVar("T")
Mode = Literal["train", "eval", "predict"]
Batch = dict[str, Tensor]
Specs = dict[str, TensorSpec]  # the shapes of a batch, by key
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor | float]]
Metric = Loss  # (sum, weight) of one micro-batch, as a loss

LABELS = ("labels", "y")


def batch_names(module: nn.Module) -> list[str]:
    """Of the elements of a tuple: the parameters of forward, then the labels."""
    return [*inspect.signature(module.forward).parameters, LABELS[0]]


def spec(t: Tensor | NDArray[Any]) -> TensorSpec:
    return TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))


def empty(s: TensorSpec, device: torch.device | None = None) -> Tensor:
    """Room for it; None = in main memory."""
    return torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=device)


@dataclass
class Found:
    """What a trace finds out beside tensors."""

    weight: float | None = None  # of the loss, where it is a number
    structure: pytree.TreeSpec | None = None  # of the model's outputs
    numbers: Numbers = field(default_factory=dict)  # of the modules, behind forward
    at: str | None = None  # the loss, or "metrics.<name>", while it is called


class Program(nn.Module):
    """`found` is filled by `forward`; an object of its own, because a tracer puts attributes back. stand_in:
    "loss" or "metrics.<name>", and its function -> what is called instead."""

    stand_in: Callable[[str, Loss], Loss] = staticmethod(lambda _, function: function)

    def __init__(self, model: nn.Module, loss: Loss, metrics: Mapping[str, Metric], mode: Mode) -> None:
        super().__init__()
        self.model = model
        self.loss, self.metrics, self.mode = loss, metrics if mode == "eval" else {}, mode
        self.found = Found()

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        return self.results(call_model(self.model, batch), batch)

    def results(self, outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
        flat = self._flat(outputs, batch)
        self.found.numbers = numbers(self)
        return flat

    def _flat(self, outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
        if self.mode == "predict":
            tensors, self.found.structure = flat_outputs(outputs)
            return tensors
        total, weight = self._pair("loss", self.loss, outputs, batch, "loss")
        measured = [
            self._pair(f"metrics.{name}", m, outputs, batch, f"metric {name!r}")
            for name, m in self.metrics.items()
        ]
        flat = [t if isinstance(t, Tensor) else torch.full((), float(t)) for pair in measured for t in pair]
        if isinstance(weight, Tensor):
            return total, *flat, weight
        self.found.weight = float(weight)
        return total, *flat

    def _pair(
        self, name: str, function: Loss, outputs: Any, batch: Batch, what: str
    ) -> tuple[Tensor, Tensor | float]:
        self.found.at = name
        pair = pair_of(self.stand_in(name, function), outputs, batch, what)
        self.found.at = None
        return pair


def is_list(model: nn.Module) -> bool:
    """Whether it runs its children one after the other, and does nothing else."""
    own = "forward" in vars(model) or model._forward_hooks or model._forward_pre_hooks
    return type(model).forward is nn.Sequential.forward and not own


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of an nn.Sequential by path, those of one inside another included; one that comes twice
    twice."""
    found = []
    for name, child in model._modules.items():
        if child is None:
            continue
        inner = [(f"{name}.{path}", m) for path, m in layers_of(child)] if is_list(child) else [(name, child)]
        found += inner
    return found


def call_model(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """What `model` makes of a batch."""
    if type(model).forward is not nn.Sequential.forward:
        return model(**arguments(model, batch))
    layers = [layer for _, layer in layers_of(model)] if is_list(model) else [model]
    if not layers:
        raise CaptureError("the model is an empty list of layers; give it at least one")
    args, kwargs = first_call(layers[0], batch)
    outputs = layers[0](*args, **kwargs)
    for layer in layers[1:]:
        outputs = layer(outputs)
    return outputs


def first_call(layer: nn.Module, batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the first of a list of layers: by the names of its forward; where none of them is a
    key, as for a nn.Linear ("input"), the only key that is no label."""
    data = [key for key in batch if key not in LABELS]
    if len(data) == 1 and not set(inspect.signature(layer.forward).parameters) & set(batch):
        return (batch[data[0]],), {}
    return (), arguments(layer, batch)


def arguments(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a batch that `model.forward` takes, by parameter name.

    One with `**kwargs` takes every key; a transformers model only those it names, as it hands the rest on
    to its layers. Raises CaptureError where a parameter has no key.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {p.kind for p in parameters}
    what, keys = f"{type(model).__name__}.forward", sorted(batch)
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        raise CaptureError(
            f"{what} takes arguments without a name, and the batch has the keys {keys}; name its "
            "parameters after them"
        )
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    missing = [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in batch]
    whole = inspect.Parameter.VAR_KEYWORD in kinds and not _of_transformers(model)
    given = {k: v for k, v in batch.items() if whole or any(k == p.name for p in named)}
    if missing or not given:
        lacks = f"needs {missing}" if missing else f"takes {[p.name for p in named]}"
        raise CaptureError(
            f"{what} {lacks}, but the batch has the keys {keys}; give the data the names of forward's "
            "parameters, or give the parameter a default"
        )
    return given


def _of_transformers(model: nn.Module) -> bool:
    return any(c.__name__ == "PreTrainedModel" for c in type(model).__mro__)


def refuse_torchs_loss(function: object, what: str = "loss") -> None:
    """Of nn.CrossEntropyLoss() and the like, which take outputs and labels."""
    if str(getattr(function, "__module__", "")).startswith("torch.nn."):
        name = getattr(function, "__name__", f"{type(function).__name__}()")
        raise CaptureError(
            f"the {what} is torch's {name}; it is called as {what}(outputs, batch), and batch is a dict of "
            "tensors: give `lambda outputs, batch: ...` that calls it with batch['labels'], say, and returns "
            "(sum, weight), or in a script the mean with Pipeline(..., weight_of=lambda batch: "
            "len(batch['labels']))"
        )


def pair_of(function: Loss, outputs: Any, batch: Batch, what: str) -> tuple[Tensor, Tensor | float]:
    """(sum, weight) of a loss or a metric, which is called `what` in errors. Raises CaptureError for
    anything else."""
    refuse_torchs_loss(function, what)
    pair = function(outputs, batch)
    fits = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], Tensor)
    if not fits or not isinstance(pair[1], (Tensor, int, float)):
        found = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else _kind(pair)
        raise CaptureError(
            f"the {what}{place_of(function)} returned {found} instead of (sum, weight): return the summed "
            "loss and the weight it is divided by, for example `F.cross_entropy(..., reduction='sum'), "
            "labels.numel()`; or in a script the mean, with Pipeline(..., weight_of=lambda batch: "
            "len(batch['labels']))"
        )
    return pair[0], pair[1]


def place_of(function: Loss) -> str:
    """Where it stands, in brackets; nothing for one that Python does not have."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f' (File "{code.co_filename}", line {code.co_firstlineno})' if code else ""


def _kind(x: Any) -> str:
    return "one tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"


# -- what a model returns ------------------------------------------------------------------------------


@dataclass
class _Constant:
    """A leaf that is no tensor, as a part of the structure."""

    value: Any


pytree.register_pytree_node(_Constant, lambda c: ([], c.value), lambda _, value: value)


def flat_outputs(outputs: Any) -> tuple[tuple[Tensor, ...], pytree.TreeSpec]:
    """The tensors of a tree, and what puts them back: `tree_unflatten(tensors, structure)`.

    Dicts, tuples, lists, named tuples and dataclasses, nested in any way; other leaves are kept as they
    are. Raises CaptureError where there is no tensor at all.
    """
    register_dataclasses(outputs)
    tensors, structure = split(outputs, Tensor)
    if not tensors:
        raise CaptureError(
            f"the model returns {type(outputs).__name__} without a tensor in it; return tensors, in a tuple, "
            "a dict or a dataclass"
        )
    return tuple(tensors), structure


def register_dataclasses(tree: Any) -> None:
    """Lets torch look into those of the user."""
    for leaf in pytree.tree_leaves(tree):
        kind = type(leaf)
        if is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(kind)
            return register_dataclasses(tree)  # once more, for those inside


def split(tree: Any, kind: type[T]) -> tuple[list[T], pytree.TreeSpec]:
    """The leaves of one kind; the others become a part of the structure."""
    return pytree.tree_flatten(pytree.tree_map(lambda x: x if isinstance(x, kind) else _Constant(x), tree))
