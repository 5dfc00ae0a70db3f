"""Is forward the same each time, and the loss? A graph holds what Python computed once: neither
`self.calls += 1` nor `random.random()` happens again when it runs."""

from __future__ import annotations

import dis
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from mpipipe.errors import CaptureError

T = TypeVar("T")
Numbers = Mapping[tuple[str, str], float]  # path and attribute -> an int, a float or a bool

TIMES = 4  # that a forward is looked at again: a layer is dropped seldom


def numbers(model: nn.Module) -> Numbers:
    """The plain numbers that modules keep. Those that come twice have each name: while they are traced, the
    tracer has another object for each."""
    return {
        (path, name): value
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if _is_number(value) and name != "training"
    }


def _is_number(value: object) -> bool:
    return type(value) in (int, float, bool)


def read_by(function: object, seen: frozenset[int] = frozenset()) -> dict[str, Callable[[], object]]:
    """The plain numbers that a loss reads beside its arguments, by name -> what gives the value now.

    Attributes of the object that it is or is a method of, variables around the function and in its file; also
    those of functions that it knows from there. seen: the ids of those that were looked at.
    """
    found: dict[str, Callable[[], object]] = {}
    if id(function) in seen:
        return found
    seen |= {id(function)}
    if isinstance(function, partial):
        return read_by(function.func, seen)
    if isinstance(function, MethodType):
        return _attributes(function.__self__, function.__func__) | read_by(function.__func__, seen)
    if not isinstance(function, FunctionType):
        for part in function.modules() if isinstance(function, nn.Module) else [function]:
            call = getattr(type(part), "forward" if isinstance(part, nn.Module) else "__call__", None)
            if isinstance(call, FunctionType):
                found |= _attributes(part, call) | read_by(call, seen)
        return found
    around = function.__globals__
    for name in sorted(_names(function.__code__, "LOAD_GLOBAL")):
        value = around.get(name)
        if _is_number(value):
            found[name] = partial(around.get, name)
        elif isinstance(value, FunctionType) and value.__globals__ is around:
            found |= read_by(value, seen)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            value = cell.cell_contents
            if _is_number(value):
                found[name] = partial(getattr, cell, "cell_contents")
            elif callable(value) and not isinstance(value, type):
                found |= read_by(value, seen)
    return found


def _attributes(owner: object, function: Callable[..., Any]) -> dict[str, Callable[[], object]]:
    """Numbers of an object that one of its methods reads, itself or in methods that it calls."""
    kept, names, todo = getattr(owner, "__dict__", {}), set[str](), [function.__code__]
    while todo:
        new = _names(todo.pop(), "LOAD_ATTR", "LOAD_METHOD") - names
        names |= new
        methods = (getattr(type(owner), name, None) for name in new)
        todo += [m.__code__ for m in methods if isinstance(m, FunctionType)]
    read = (n for n in kept if n in names and n != "training" and _is_number(kept[n]))
    return {f"{type(owner).__name__}.{n}": partial(kept.get, n) for n in read}


def _names(code: CodeType, *loads: str) -> set[str]:
    """What some code loads so, and code within it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in loads}
    return found.union(*(_names(inner, *loads) for inner in code.co_consts if isinstance(inner, CodeType)))


class Steady:
    """Refuses another value of a plain number that a loss read when it was captured."""

    def __init__(self, loss: object) -> None:
        self._now = read_by(loss)
        self._first = self.values()

    def values(self) -> dict[str, object]:
        """Those that are watched, as they are now."""
        return {name: now() for name, now in self._now.items()}

    def captured(self, before: Mapping[str, object]) -> None:
        """What a capture itself has changed, such as a count of calls, may go on changing."""
        values = self.values()
        self._now = {name: now for name, now in self._now.items() if values[name] == before[name]}

    def check(self) -> None:
        """Raises CaptureError."""
        for name, now in self._now.items():
            if (value := now()) != self._first[name]:
                raise CaptureError(
                    f"{name!r}, which the loss reads, was {self._first[name]} when it was captured, and is "
                    f"{value} now; the graph keeps what it was: give it as a key of the batch, which data "
                    "with batch(step, micro) computes from the step, or make the Pipeline anew"
                )


def refuse_changes(
    what: str, model: nn.Module, run: Callable[[], tuple[T, Numbers]], same: Callable[[T, T], bool]
) -> T:
    """The first result of `run`, which gives also the numbers of `model` as they are afterwards.

    Where it has changed any of them, or a tensor that a module keeps beside its buffers, or has drawn from
    Python's or NumPy's generator, it is run again: a size or an attention map that is kept, or a draw that
    decides nothing, may stay. Raises CaptureError for another result, and for a number that goes on changing.
    """
    before, kept, state = numbers(model), _kept(model), _drawn()
    first, after = run()
    counts = {key for key, _ in after.items() - before.items()}
    changed = counts | {key for key, _ in _kept(model).items() - kept.items()}
    drawn = _drawn() != state
    if not changed and not drawn:
        return first
    with put_back(model):
        for _ in range(TIMES if drawn or counts else 1):  # what was kept shows itself at once
            _put(model, after)
            was = after
            result, after = run()
            if anew := sorted(key for key, _ in after.items() - was.items()):
                raise CaptureError(
                    f"{what} changes {_name(anew[0])} in forward, each time anew; a graph knows it as it "
                    "was once: give what forward depends on as a key of the batch, count in a buffer "
                    "(`self.count.add_(1)`), or outside of forward"
                )
            if not same(first, result):
                by = sorted(map(_name, changed))
                raise CaptureError(
                    f"{what} is another one the second time, by "
                    f"{', '.join(by) or 'random numbers of Python or NumPy'}; a graph is as it was once: "
                    "draw with torch (dropout, rand, randn, randint or bernoulli) or in the data set, and "
                    "decide what forward does when the model is made"
                )
    return first


def _kept(model: nn.Module) -> Mapping[tuple[str, str], tuple[int, int]]:
    """The tensors that modules keep as plain attributes: which ones, and how often they were written to."""
    return {
        (path, name): (id(value), 0 if value.is_inference() else value._version)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _name(key: tuple[str, str]) -> str:
    return repr(".".join(part for part in key if part).removeprefix("model."))


def _drawn() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(keys), *rest  # type: ignore[arg-type]


def _put(model: nn.Module, found: Numbers) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    for (path, name), value in found.items():
        modules[path].__dict__[name] = value


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Gives its modules the attributes back afterwards that they have now."""
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, first in before:
            attributes.clear()
            attributes.update(first)
