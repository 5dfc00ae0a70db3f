"""A layer that torch.export cannot trace, of any size: one operator that runs as it is written.

What a layer does with values (loops, `if`, `.item()`) is its own business. What it must keep:

    outputs   their number, shapes, dtypes and strides follow from the shapes of its inputs
    buffers   it changes none but BatchNorm's, whose statistics leave as outputs (see rewrite); and
              nothing else reads these in training
    random    torch's generator is seeded by (key of the layer, step, micro-batch) while it runs

So its bits do not depend on the layout. Shapes are found by running each layer once, its weights alone in
memory, on made-up numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mpipipe.errors import CaptureError, MpipipeError
from mpipipe.graph.program import flat_outputs, spec, split
from mpipipe.graph.refusals import strange_weight
from mpipipe.graph.rewrite import BufferUpdate
from mpipipe.graph.source import set_mode
from mpipipe.graph.steady import Numbers, numbers, refuse_changes
from mpipipe.graph.tape import storage_id, tensors
from mpipipe.ops.generators import seeded
from mpipipe.values import TensorSpec

_Form = tuple[TensorSpec, tuple[int, ...]]  # and its strides


def _form(t: Tensor) -> _Form:
    return spec(t), t.stride()


def _forms(tree: Any) -> list[_Form]:
    return [_form(t) for t in tensors(tree)]


class Unrunnable(CaptureError):
    """A layer that fails on made-up numbers."""


class Layer:
    """One layer as a pure function

        (input tensors, weights, buffers, key, step, micro) -> (output tensors..., statistics...)

    weights, buffers: in the order of their names within the layer. Raises CaptureError when it does not
    keep what the head of this file says.
    """

    takes_stream = True

    def __init__(
        self, path: str, module: nn.Module, inputs: pytree.TreeSpec, train: bool,
        in_eval: Iterable[nn.Module],
    ) -> None:  # fmt: skip
        self.path, self.module, self.inputs, self.train = path, module, inputs, train
        self.params, self.buffers = _names(module, "_parameters"), _names(module, "_buffers")
        kind = type(module).__name__
        self.__name__ = re.sub(r"\W", "_", kind)
        stays = set(in_eval)
        self.in_eval = {n: m for n, m in module.named_modules() if m in stays}
        set_mode(module, train, self.in_eval.values())
        modes = f" in eval: {sorted(self.in_eval)}" if self.in_eval else ""
        settings = (re.sub(r"0x[0-9a-f]+", "", repr(module)) + modes).encode()
        self.text = f"{kind} {hashlib.sha256(settings).hexdigest()[:8]}"  # equal for equal work
        self.norms = [(n, m) for n, m in module.named_modules() if m.training and _has_statistics(m)]
        self.what = f"layer {path} ({kind})"
        self.writes_input, self.must_be_new = False, False  # must_be_new: see written
        self.structure: pytree.TreeSpec | None = None  # of the outputs, found by `probe`
        self.forms: list[_Form] = []
        self.counted: list[str] = []  # norms that ran
        self.learns = False

    def probe(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Finds what the outputs are; the numbers of the inputs do not matter."""
        versions = [t._version for t in inputs]
        first = [t.clone() for t in inputs]

        def run() -> tuple[tuple[Any, dict[str, tuple[Tensor, Tensor]]], Numbers]:
            given = inputs if versions == [t._version for t in inputs] else [t.clone() for t in first]
            with _seeded(0, 0, 0):
                return self._run(given, weights, buffers), numbers(self.module)

        def same(one: Any, other: Any) -> bool:
            return _forms(one) == _forms(other) and all(map(torch.equal, tensors(one), tensors(other)))

        try:
            outputs, statistics = refuse_changes(self.what, self.module, run, same)
        except MpipipeError:
            raise
        except _ReadsStatistics as error:
            raise CaptureError(
                f"{self.what} reads the statistics of a BatchNorm in training; they "
                "are changed at the end of a step: compute what is needed from the inputs (`x.mean(0)`), or "
                "read a buffer that nothing changes"
            ) from error
        except Exception as error:
            made = ", ".join(spec(t).text for t in inputs)
            raise Unrunnable(
                f"{self.what} cannot be run as it is written on made-up numbers, {made}: "
                f"{type(error).__name__}: {error}; check the dtypes and shapes that the data gives"
            ) from error
        self.writes_input = versions != [t._version for t in inputs]
        flat, self.structure = flat_outputs(outputs)
        self.forms = [_form(t) for t in flat]
        self.counted = list(statistics)
        self.learns = any(t.requires_grad for t in [*inputs, *weights])
        _refuse_strange(flat, inputs, weights)

    def __call__(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], buffers: Sequence[Tensor],
        key: int = 0, step: int = 0, micro: int = 0,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if any(isinstance(t, FakeTensor) for t in [*inputs, *weights, *buffers]):
            return self.fakes()
        if self.writes_input:
            inputs = [t.clone() for t in inputs]
        versions = [t._version for t in inputs]
        with _seeded(key, step, micro):
            outputs, statistics = self._run(inputs, weights, buffers)
        if not self.writes_input and versions != [t._version for t in inputs]:
            raise CaptureError(
                f"{self.what} writes into what it is given, and at capture it did not; what others read must "
                "not depend on that: let it write into a copy (`x = x.clone()`)"
            )
        flat, structure = flat_outputs(outputs)
        found = [_form(t) for t in flat]
        if found != self.forms or structure != self.structure:
            same = _words(found) == _words(self.forms)
            rest = ", with other strides or values that are no tensors" if same else ""
            raise CaptureError(
                f"{self.what} returned {_words(found)}, at capture {_words(self.forms)}{rest}; what "
                "crosses a cut is planned: outputs must follow from the shapes of the inputs alone (pad, or "
                "use a mask)"
            )
        if list(statistics) != self.counted:
            raise CaptureError(
                f"{self.what} ran the BatchNorms {list(statistics)}, at capture {self.counted}; a layer must "
                "run each in every micro-batch"
            )
        return (*self._same_gradient(flat), *(t for pair in statistics.values() for t in pair))

    def _same_gradient(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Whether an output needs a gradient is planned too; where this time it has none, it passes none. No
        leaf, as what follows may write into it."""
        wanted = self.learns and torch.is_grad_enabled()
        return [
            no_leaf(t) if wanted and t.is_floating_point() and not t.requires_grad else t for t in tensors
        ]

    def fakes(self) -> tuple[Tensor, ...]:
        """Results without values, inside a fake mode."""
        learns = self.learns and torch.is_grad_enabled()
        outputs = [no_leaf(t) if learns and t.is_floating_point() else t for t in self.room()]
        of_norm = dict(self.norms)
        statistics = [torch.empty(of_norm[n].num_features) for n in self.counted for _ in range(2)]
        return (*outputs, *statistics)

    def room(self, device: str | None = None) -> list[Tensor]:
        """For its outputs, without values. None = in main memory."""
        return [
            torch.empty_strided(s.shape, stride, dtype=getattr(torch, s.dtype), device=device)
            for s, stride in self.forms
        ]

    def _run(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
        """Outputs, and mean and variance of each BatchNorm that ran, by name."""
        set_mode(self.module, self.train, self.in_eval.values())
        state = dict(zip(self.params, weights, strict=True))
        state |= {n: t.clone() for n, t in zip(self.buffers, buffers, strict=True)}
        for norm, _ in self.norms:
            state.update((n, torch.zeros_like(state[n])) for n in _statistics(norm))
        before = {n: t._version for n, t in state.items()}
        args, kwargs = pytree.tree_unflatten(list(inputs), self.inputs)
        own = {n for norm, _ in self.norms for n in _statistics(norm)}
        first = own and self.structure is None  # not later: under such a mode torch may take other kernels
        with (
            _momentum_one([m for _, m in self.norms]),
            _Guard(state[n] for n in own) if first else nullcontext(),
        ):
            outputs = functional_call(self.module, state, args, kwargs, tie_weights=False)
        if changed := [n for n, t in state.items() if n not in own and t._version != before[n]]:
            raise CaptureError(
                f"{self.what} changes {changed} in place; only BatchNorm statistics are supported: return "
                "it as an output, or keep it outside of forward"
            )
        again, structure = split((args, kwargs), Tensor)
        if structure != self.inputs or any(a is not b for a, b in zip(again, inputs, strict=True)):
            raise CaptureError(
                f"{self.what} changes a list or dict that it is given; as it cannot be captured, that would "
                "be lost: return what it makes"
            )
        given = {storage_id(t) for t in [*inputs, *state.values()]}
        if self.must_be_new and any(storage_id(t) in given for t in tensors(outputs)):
            raise CaptureError(
                f"{self.what} returned what it was given, or a part of it, into which forward writes then: "
                "return a copy (`x.clone()`)"
            )
        # what follows may write into it, and a stage into what it has received
        outputs = pytree.tree_map_only(Tensor, lambda t: t.clone() if storage_id(t) in given else t, outputs)
        return outputs, self._counted(state)

    def _counted(self, state: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for norm, _ in self.norms:
            mean, var, count = (state[n] for n in _statistics(norm))
            if count > 1:
                raise CaptureError(
                    f"{self.what} runs the BatchNorm {norm!r} {int(count)} times; its statistics of one "
                    "micro-batch would have no meaning: make one BatchNorm for each place"
                )
            if count:
                found[norm] = mean, var
        return found

    def updates(self, alias: dict[str, str], node: fx.Node, items: Sequence[fx.Node]) -> list[BufferUpdate]:
        """items: the nodes of the statistics. alias: a name within the model -> its canonical name."""
        found = []
        for i, norm in enumerate(self.counted):
            mean, var, count = (alias[f"{self.path}.{n}"] for n in _statistics(norm))
            momentum = dict(self.norms)[norm].momentum
            assert momentum is not None
            found += [
                BufferUpdate(mean, momentum, items[2 * i], node),
                BufferUpdate(var, momentum, items[2 * i + 1], node),
                BufferUpdate(count, None, None, node),
            ]
        return found


def no_leaf(like: Tensor) -> Tensor:
    """The same values and strides, with a gradient that goes nowhere: forward may write into it."""
    with torch.enable_grad():
        room = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        return room.copy_(like.detach().requires_grad_())


def _refuse_strange(outputs: Iterable[Tensor], inputs: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
    """Raises CaptureError where a gradient would reach a leaf that is neither."""
    known = {id(t) for t in weights}
    seen = {t.grad_fn for t in [*inputs, *weights] if t.grad_fn is not None}
    todo = [t.grad_fn for t in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise CaptureError(strange_weight(leaf))
        todo += [n for n, _ in node.next_functions]


def _names(module: nn.Module, kind: str) -> list[str]:
    """Of its parameters or buffers: one for each module that has it, also where the module has several."""
    return [
        f"{path}.{name}".removeprefix(".")
        for path, part in module.named_modules()
        for name, tensor in getattr(part, kind).items()
        if tensor is not None
    ]


class _ReadsStatistics(Exception):
    pass


class _Guard(TorchDispatchMode):
    """Raises where anything but a BatchNorm in training reads some tensors, a counter's `add_` aside."""

    def __init__(self, statistics: Iterable[Tensor]) -> None:
        super().__init__()
        self.memory = {storage_id(t) for t in statistics}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = func is torch.ops.aten.add_.Tensor
        normalises = "batch_norm" in func.__name__ and args[5]
        if not counts and not normalises and self.memory & {storage_id(t) for t in tensors((args, kwargs))}:
            raise _ReadsStatistics(func.__name__)
        return func(*args, **(kwargs or {}))


def _has_statistics(module: nn.Module) -> bool:
    found = isinstance(module, _BatchNorm) and module.running_mean is not None
    if found and module.momentum is None:
        raise CaptureError(
            "a BatchNorm has momentum=None (a plain average over all batches), which depends on how often it "
            "ran; give it a number"
        )
    return found


def _statistics(norm: str) -> tuple[str, str, str]:
    names = ("running_mean", "running_var", "num_batches_tracked")
    return tuple(f"{norm}.{n}".removeprefix(".") for n in names)  # type: ignore[return-value]


@contextmanager
def _momentum_one(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Makes BatchNorm write its plain statistics."""
    before = [m.momentum for m in norms]
    for m in norms:
        m.momentum = 1.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, momentum in zip(norms, before, strict=True):
            m.momentum = momentum


def _seeded(key: int, step: int, micro: int) -> AbstractContextManager[None]:
    seed = hashlib.blake2b(f"{key}/{step}/{micro}".encode(), digest_size=8).digest()
    return seeded(int.from_bytes(seed, "little") >> 1)


def _words(forms: Sequence[_Form]) -> list[str]:
    return [s.text for s, _ in forms]
