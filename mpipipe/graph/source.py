"""The model as its author wrote it, without its weights.

The factory runs once under fake tensors while a tape records every operator of the initialisation.
Nothing is allocated, so a model of any size is captured and planned on a laptop; later each rank
replays the slice of the tape that leads to its own parameters, and only that.

    factory() --fake--> module + tape          (every rank, no memory)
    instance  --twin--> module + its tensors   (the user's own object is left alone)
                          |
       values on disk ----+-- materialise(["blocks.3.mlp.weight", ...])  (own stage only)

Invariant: a parameter's first bits are a function of (seed, canonical name), never of the cut or
of what else is built. Each random operator of the tape draws from a generator of its own, seeded
by the first parameter (in canonical order) that depends on it and its ordinal there. What the user
made (an instance) or what lies on disk (`initial`) are its values as they are.
"""

from __future__ import annotations

import copy
import dis
import hashlib
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from mpipipe.errors import CaptureError, MpipipeError
from mpipipe.graph.rewrite import Untraceable
from mpipipe.graph.tape import Tape, storage_id

# torch's tracer has process-wide state and, while it runs, turns oneDNN off for the whole process: one
# thread traces at a time, and none computes meanwhile (ranks are threads in the in-process carrier)
TRACING = threading.RLock()
_APPLY = "_apply"  # of a module: what .half(), .to(...), .cpu() and the like are made of
_LAZY = "has no shape yet (a lazy layer); give its layer the number of input features"

Layers = Sequence[nn.Module]
Model = nn.Module | Layers | Callable[[], nn.Module | Layers]


class Initial(Protocol):
    """First values that lie elsewhere, for example on disk."""

    @property
    def names(self) -> Collection[str]:
        """The parameters and buffers that it has, by any of their names."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Fills `out` with the values of one of `names`."""
        ...


def user_frame(error: Exception) -> str:
    """The innermost line of the traceback that is neither torch's, Python's nor of the capture."""
    return _line(error, Path(__file__).parent) or "the model"


def users_own_frame(error: Exception) -> str | None:
    """As `user_frame`, but of no model and no loss that comes with mpipipe; None: there is no other."""
    return _line(error, Path(__file__).parents[1])


def _line(error: Exception, ours: Path) -> str | None:
    """ours: a folder whose lines do not count."""
    python = sysconfig.get_path("stdlib")
    user = [
        f for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and not f.filename.startswith((str(ours), python, "<"))
    ]  # fmt: skip
    return f'File "{user[-1].filename}", line {user[-1].lineno}: {user[-1].line}' if user else None


class ModelSource:
    """A model under fake tensors, with the recipe of its weights.

    model            a callable that makes a module or a list of layers (run as nn.Sequential); or such an
                     object itself: then its own tensors are the first values, and it is never changed
    initial          first values that replace those of the model, for the names that it has
    params, buffers  canonical name -> fake tensor, in order of registration
    alias            every name of a parameter or buffer -> its canonical name
    in_eval          parts that stay in eval mode in training, by path, as after `model.bn.eval()`

    Raises CaptureError when what is made is no model, or cannot be made without values.
    """

    def __init__(self, model: Model, seed: int, initial: Initial | None = None) -> None:
        self.seed = seed
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._tape = Tape()
        made = self._made(model)
        _refuse_shared_memory(made)
        self.module, self._real = _twin(made, self.fake_mode)
        # a model that is in eval mode itself, as a pretrained one that was just opened, says nothing of parts
        root = self.module.training
        self.in_eval = {n: m for n, m in self.module.named_modules() if root and not m.training}
        self.params = dict(self.module.named_parameters())
        self.buffers = dict(self.module.named_buffers())
        canonical = {id(t): n for n, t in [*self.params.items(), *self.buffers.items()]}
        self.alias = {
            name: canonical[id(t)]
            for name, t in [
                *self.module.named_parameters(remove_duplicate=False),
                *self.module.named_buffers(remove_duplicate=False),
            ]
        }
        self._seed_of: dict[int, int] | None = None
        self.begin_from(initial)

    def begin_from(self, initial: Initial | None) -> None:
        """Takes the values of what is made from here on from there."""
        self.initial = initial
        found = () if initial is None else initial.names
        self._initial_name = {self.alias[name]: name for name in found if name in self.alias}

    def _made(self, model: Model) -> nn.Module:
        if isinstance(model, nn.Module) or not callable(model):
            return _checked(model)
        try:
            with warnings.catch_warnings():
                # a constructor that copies layers, as nn.TransformerEncoder does, is told of a bug of its own
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                with TRACING, self.fake_mode, self._tape, self._tape.whole_initialisers():
                    with _new_parameters() as share:
                        made = _checked(model())
                    share(made)
                    return made
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(
                f"{user_frame(error)}\n  reads the values of random weights while the model is made, and "
                "they have none yet; draw them without a look at the result, or give the model itself, not "
                "the function that makes it"
            ) from error
        except MpipipeError:
            raise
        except Exception as error:
            if "UninitializedParameter" in str(error):
                raise CaptureError(f"{user_frame(error)}\n  a weight {_LAZY}") from error
            raise CaptureError(
                f"{user_frame(error)}\n  {type(error).__name__}: {error}\n"
                "  while the model is made, with tensors that have no values yet; where that is the reason, "
                "as for a file of weights, load it before, give the model itself, or give its values as "
                "`initial`"
            ) from error

    @property
    def given(self) -> dict[str, Tensor]:
        """Of a model that was given as it is: its first values, by canonical name."""
        names = [*self.params, *self.buffers]
        return {n: self._real[id(self.tensor(n))] for n in names if id(self.tensor(n)) in self._real}

    @property
    def persistent(self) -> tuple[str, ...]:
        """Parameters, then persistent buffers: what a state dict and a checkpoint hold."""
        kept = {
            self.alias[f"{path}.{name}".removeprefix(".")]
            for path, module in self.module.named_modules(remove_duplicate=False)
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        return (*self.params, *(n for n in self.buffers if n in kept))

    def tensor(self, name: str) -> Tensor:
        """The fake parameter or buffer of a canonical name."""
        return self.params[name] if name in self.params else self.buffers[name]

    def is_strange(self, t: Tensor) -> bool:
        """Whether a tensor in a trace was there before, and is none of the module's own, which the tracer
        puts others in place of."""
        return not isinstance(t, FakeTensor) or self._tape.wrote(t)

    def constant(self, fake: Tensor) -> Tensor:
        """The values of a tensor that the model holds beside its parameters and buffers. Raises CaptureError
        when it was drawn at random: it has no name that could seed it."""
        if self._tape.draws(fake):
            raise CaptureError(
                "is drawn at random when the model is made, and is neither parameter nor buffer; register it "
                "by self.register_buffer(name, tensor)"
            )
        if not self._tape.wrote(fake):
            raise Untraceable(
                "is a tensor of forward that no operator makes in the graph, as `x.data` is; use "
                "`x.detach()`, and write a result by `=` instead of `out=`"
            )
        with TRACING, unset_fake_temporarily(), torch.no_grad():
            return self._tape.replay(fake, {})

    def _seeds(self) -> dict[int, int]:
        """Tape index of each random operator -> the seed of its generator."""
        if self._seed_of is None:
            self._seed_of = {}
            for name in [*self.params, *self.buffers]:
                for ordinal, i in enumerate(self._tape.draws(self.tensor(name))):
                    key = hashlib.blake2b(f"{self.seed}/{name}/{ordinal}".encode(), digest_size=8)
                    self._seed_of.setdefault(i, int.from_bytes(key.digest(), "little") >> 1)
        return self._seed_of

    @torch.no_grad()
    def materialise(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Real, initialised tensors of the named parameters and buffers, and of nothing else."""
        out: dict[str, Tensor] = {}
        for name in names:
            fake = self.tensor(name)
            if name in self._initial_name:
                out[name] = torch.empty(fake.shape, dtype=fake.dtype)
                self.fill(name, out[name])
            elif id(fake) in self._real:
                out[name] = self._real[id(fake)].detach().to("cpu", copy=True).contiguous()
            else:
                with TRACING:  # it computes, and reads fake tensors that ranks in one process may share
                    real = self._tape.replay(fake, self._seeds())
                out[name] = real if real.is_contiguous() else real.contiguous()
        return out

    @torch.no_grad()
    def fill(self, name: str, out: Tensor) -> None:
        """Writes the first values of one parameter or buffer into `out`, of its shape and dtype; those on
        disk are read straight into it. Raises what `initial` raises."""
        if name in self._initial_name and self.initial is not None:
            self.initial.read(self._initial_name[name], out)
        else:
            out.copy_(self.materialise([name])[name])


def set_mode(model: nn.Module, train: bool, in_eval: Iterable[nn.Module]) -> None:
    """Puts a model, or a part of it, into training or eval mode."""
    model.train(train)
    for part in in_eval:
        part.training = False


@contextmanager
def _new_parameters() -> Iterator[Callable[[nn.Module], None]]:
    """Inside, `.half()`, `.to(...)` and the like give a module new parameters: torch would swap a fake tensor
    with what becomes of it, and cannot, as the tape refers to both. Yields what lets every layer of a model
    that shared a parameter have the newest of it."""
    apply, newer = nn.Module._apply, dict[int, tuple[Tensor, Tensor]]()

    def newest(tensor: Tensor) -> Tensor:
        while id(tensor) in newer:
            tensor = newer[id(tensor)][1]
        return tensor

    def converted(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = [*module._parameters.values(), *module._buffers.values()]
        if not any(isinstance(t, FakeTensor) for t in own):
            return apply(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        for name, param in module._parameters.items():
            if param is not None and not nn.parameter.is_lazy(param):
                old = newest(param)
                with torch.no_grad():
                    new = fn(old)
                if new is not old:  # the old one stays, so that no other has its id
                    newer[id(old)] = old, nn.Parameter(new, old.requires_grad)
                module._parameters[name] = newest(old)  # type: ignore[assignment]
        module._buffers.update({name: b if b is None else fn(b) for name, b in module._buffers.items()})
        return module

    def share(model: nn.Module) -> None:
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None and id(param) in newer:
                    setattr(module, name, newest(param))  # an LSTM has a list of them beside

    setattr(nn.Module, _APPLY, converted)
    try:
        yield share
    finally:
        setattr(nn.Module, _APPLY, apply)


def _checked(made: Any) -> nn.Module:
    listed = isinstance(made, list | tuple)
    layers = list(made) if listed else [made]
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            place = f"layer {i} of the list of layers" if listed else "the model, or what makes it,"
            raise CaptureError(
                f"{place} is of type {type(layer).__name__}, not a torch.nn.Module; give the module itself, "
                "a list of modules, or a function that returns either"
            )
        _refuse_compiled(layer, listed)
        for name, t in [*layer.named_parameters(), *layer.named_buffers()]:
            if nn.parameter.is_lazy(t):
                raise CaptureError(f"{name!r} {_LAZY}")
            if t.device.type != "cpu":
                raise CaptureError(
                    f"{name!r} is on the device {t.device}, not on the CPU; give the function that makes the "
                    "model, without a device, or move the model by .to('cpu')"
                )
            if t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None):
                raise CaptureError(
                    f"the weight {name!r} has a hook on its gradient, which nothing here would call; do the "
                    "same in forward (`weight * mask` for a mask) or in the optimizer, and remove the hook"
                )
    if not listed:
        return layers[0]
    model = nn.Sequential(*layers)
    model.training = any(layer.training for layer in layers)
    return model


def _refuse_compiled(layer: nn.Module, listed: bool) -> None:
    """What forward says of its arguments is lost by torch.compile, and operators by torch.jit."""
    if type(layer).__name__ == "OptimizedModule" and not listed:
        raise CaptureError(
            "the model is what torch.compile made of one; give the module itself, before torch.compile: its "
            "operators are planned here one by one"
        )
    for path, part in layer.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'!r} was made by torch.jit.script or torch.jit.trace, which cannot be "
                "captured; give the module itself, before torch.jit"
            )


def _refuse_shared_memory(module: nn.Module) -> None:
    """Of tensors that are two: here each would have memory of its own, and the change of one be lost on the
    other. What nothing trains may share: it does not change."""
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        if t.layout is not torch.strided or not t.numel():
            continue
        others = found.setdefault(storage_id(t), [])
        for other, o in others:
            if (t.requires_grad or o.requires_grad) and _overlap(t, o):
                raise CaptureError(
                    f"{other!r} and {name!r} are two tensors that share memory, so that in PyTorch an "
                    "update of one changes both; let both be one parameter (`b.weight = a.weight`), make one "
                    "from the other in forward (`linear(x, a.weight.t())`), or give it memory of its own by "
                    ".clone()"
                )
        others.append((name, t))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage have an element in common."""
    (first, last), (other_first, other_last) = _ends(a), _ends(b)
    if last <= other_first or other_last <= first:
        return False
    if a.element_size() != b.element_size():
        return True
    start = min(first, other_first)
    taken = np.zeros((max(last, other_last) - start) // a.element_size(), bool)  # NumPy: they may be fake

    def view(t: Tensor) -> np.ndarray:
        return as_strided(taken[(_ends(t)[0] - start) // t.element_size() :], t.shape, t.stride())

    view(a)[...] = True
    return bool(view(b).any())


def _ends(t: Tensor) -> tuple[int, int]:
    """The first byte of its storage that it has, and the one behind its last."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    first = int(t.storage_offset())
    return first * t.element_size(), (first + reach) * t.element_size()


def _twin(module: nn.Module, fake_mode: FakeTensorMode) -> tuple[nn.Module, dict[int, Tensor]]:
    """The module with fake tensors in place of real ones, shared where they were, a copy where it has any;
    and id of each such fake tensor -> the real one."""
    tensors = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    real = {key: t for key, t in tensors.items() if not isinstance(t, FakeTensor)}
    if not real:
        return module, {}
    fakes = {key: fake_mode.from_tensor(t) for key, t in real.items()}
    memo: dict[int, Any] = {**tensors, **fakes}
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"the model, a {type(module).__name__}, cannot be copied ({type(error).__name__}: {error}); give "
            "the function that makes it instead"
        ) from error
    _refuse_functions_of(module, memo)
    return twin, {id(fake): real[key] for key, fake in fakes.items()}


def _refuse_functions_of(module: nn.Module, copies: dict[int, Any]) -> None:
    """A function is not copied with the object that has it: what it knows from where it was made, as `self`
    in a hook made by `__init__`, is the original. copies: id of an original -> its copy."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            found = () if name in ("_modules", "_parameters", "_buffers") else _functions(value)
            for function, variable, known in ((f, *pair) for f in found for pair in _knows(f)):
                if copies.get(id(known), known) is known:
                    continue
                attribute, code = repr(f"{path}.{name}".removeprefix(".")), function.__code__
                place = f"a hook of {path or 'the model'!r}" if "_hooks" in name else attribute
                raise CaptureError(
                    f'File "{code.co_filename}", line {code.co_firstlineno}\n  {place} is or has the '
                    f"function {function.__qualname__}, which knows {variable!r}, a {type(known).__name__} "
                    "of the model that was given; what runs is a copy, which it would not see: give the "
                    "function that makes the model instead"
                )


def _functions(value: Any) -> Iterator[FunctionType]:
    """Those that are the value, or in a container of it."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType | partial):
        yield from _functions(getattr(value, "func", getattr(value, "__func__", None)))
    elif isinstance(value, dict | list | tuple | set):
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from _functions(inner)


def _knows(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of a function that are not its own, with their values and what is in these."""
    known = dict(function.__kwdefaults__ or {})
    defaults = function.__defaults__ or ()
    if defaults:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        known |= zip(names[-len(defaults) :], defaults, strict=True)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            known[name] = cell.cell_contents
    for i in dis.get_instructions(function):
        if i.opname == "LOAD_GLOBAL" and i.argval in function.__globals__:
            known[i.argval] = function.__globals__[i.argval]
    for name, value in known.items():
        yield name, value
        if isinstance(value, MethodType):
            yield name, value.__self__
        elif isinstance(value, list | tuple):
            yield from ((name, inner) for inner in value)
        elif isinstance(value, dict):
            yield from ((name, inner) for inner in value.values())
