"""Our operators as torch knows its own: `torch.ops.mpipipe.<name>`, for torch.export and torch.compile.

An operator has two doors to the same functions:

    eager     a `Function`, some microseconds a call
    tracing   the registered operator, with a fake form and its derivative; `traced` says when
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

_FUNCTION: Any = torch.autograd.Function
_TWICE = (
    "this operator of mpipipe has no second derivative (create_graph=True): take torch's own function instead"
)
_LIBRARY = torch.library.Library("mpipipe", "DEF")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers `function` for CPU and GPU, and `fake`, whose results have no data. Returns the operator.

    schema: `name(Tensor x, float eps) -> Tensor`; what `function` writes into is a `Tensor(a!)`, and it says
    so to `written`. One whose name ends in `_backward` has no derivative, and says so."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"mpipipe::{name}", fake, lib=_LIBRARY)
    if name.endswith("_backward"):
        differentiate(name, _refuse, _refuse)
    return getattr(torch.ops.mpipipe, name)


def differentiate(name: str, backward: Callable[..., Any], setup: Callable[..., None] | None = None) -> None:
    """The derivative of a defined operator, by torch.library.register_autograd."""
    torch.library.register_autograd(f"mpipipe::{name}", backward, setup_context=setup, lib=_LIBRARY)


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError(_TWICE)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For a backward that makes no graph: where one is asked for, it raises RuntimeError. torch's waits until
    the graph is used, and so leaves terms out without a word where torch.autograd.grad goes around it."""

    @wraps(backward)
    def once(ctx: Any, *args: Any) -> Any:
        if is_grad_enabled():
            _refuse()
        return backward(ctx, *args)

    return once


class Function(torch.autograd.Function):
    """torch's, without the two microseconds in which each call looks for arguments that a transform of
    torch.func left behind; under one, torch says as ever that it cannot be."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(_FUNCTION, cls).apply(*args)


def written(*tensors: Tensor | None) -> None:
    """A kernel has written into these: autograd refuses to use what it has kept of them."""
    increment_version([t for t in tensors if t is not None and not t.is_inference()])


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether an eager call on these records anything: else it need not pass a Function."""
    if is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return forward_ad._current_level >= 0  # which a Function refuses, as ours have no forward mode


def traced(*tensors: Tensor | None) -> bool:
    """Whether a call on these goes into a graph or has no data: then the registered operator is called."""
    if torch.compiler.is_compiling():
        return True
    for t in tensors:  # every eager call passes here, and a generator takes twice the time
        if t is not None and (t.is_meta or (type(t) is not Tensor and isinstance(t, FakeTensor))):
            return True
    return False
