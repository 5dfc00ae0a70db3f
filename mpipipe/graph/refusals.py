"""What is refused while a model is traced, and the words for a model that cannot be traced at all."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial, partialmethod, wraps
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from mpipipe.errors import CaptureError, first_line
from mpipipe.graph.known import masks_as_if_run
from mpipipe.graph.rewrite import Untraceable, module_of, source_line
from mpipipe.graph.source import ModelSource
from mpipipe.graph.tape import tensors

_HERE = str(Path(__file__).parent)


@contextmanager
def norms_that_fit(model: nn.Module) -> Iterator[None]:
    """Refuses a micro-batch that is too small for a BatchNorm, by its name."""

    def check(path: str, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        if norm.training and x.dim() > 1 and x.numel() == x.shape[1]:
            raise CaptureError(
                f"{path!r}, a {type(norm).__name__}, gets a micro-batch of shape {list(x.shape)}: one "
                "value for each channel has no variance. Make the smallest one larger (a larger train.batch "
                "or fewer pipeline.micro_batches: 2 rows at least), or use LayerNorm or GroupNorm"
            )

    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    hooks = [m.register_forward_pre_hook(partial(check, n)) for n, m in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def no_assignments(model: nn.Module) -> Iterator[None]:
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


_TELLING = ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")  # what torch gives up on, at length


@contextmanager
def quiet() -> Iterator[None]:
    """When the tracer gives up it prints the graph so far; our error says what matters, and layers may do.
    That an LSTM lists its weights anew in forward is of no consequence."""
    logs = [logging.getLogger(f"torch.{name}") for name in _TELLING]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        with redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*_flat_weights.* assigned during export")
            yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


@contextmanager
def as_if_run() -> Iterator[None]:
    """Lets the model do in a trace what it does when it runs.

    An export may be for other shapes than those it sees, so libraries take other ways in it: transformers
    keeps the mask of causal attention, with other bits. Here shapes are fixed. torch's own code is told the
    truth. Distributions look at the values of their parameters, only to refuse some. For what else decides
    on masks see `known`.
    """
    asked, checks = torch.compiler.is_exporting, Distribution._validate_args

    def is_exporting() -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return asked() and caller.startswith("torch.")

    torch.compiler.is_exporting = is_exporting
    Distribution.set_default_validate_args(False)
    try:
        with masks_as_if_run():
            yield
    finally:
        torch.compiler.is_exporting = asked
        Distribution.set_default_validate_args(checks)


_MANUALLY = (
    "put what does that into an nn.Module of its own: a part that cannot be captured runs as it is written"
)


_INSTEAD = (
    "say it with operators and detach (`x + (y - x).detach()` has the value of y and the gradient of x), "
    f"register an operator with torch.library.custom_op and register_autograd, or {_MANUALLY}"
)
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


@contextmanager
def no_seeds() -> Iterator[None]:
    """Refuses, while a model is traced, that it seeds torch's generator: in a graph random numbers are those
    of the run's seed, the step and the micro-batch."""
    before = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        if _get_current_dispatch_mode_stack():  # else of a part that runs as it is written
            raise Untraceable(
                "torch.manual_seed would be left out of a graph of operators, whose random numbers follow "
                f"the run's seed and the step; draw what stays in __init__, as a buffer, or {_MANUALLY}"
            )
        return before(seed)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    try:
        yield
    finally:
        torch.manual_seed = torch.random.manual_seed = before


@contextmanager
def no_own_backwards() -> Iterator[None]:
    """Refuses, while a model is traced, what it does to gradients: the tracer follows forward alone, and each
    operator that it finds there has torch's backward. For one trace of the process at a time."""
    with _no_own_functions(), _no_hooks(), _no_inference_mode():
        yield


@contextmanager
def _no_own_functions() -> Iterator[None]:
    learning = False  # whether who calls `F.apply` now has gradients on

    def look(function: type, name: str) -> Any:
        """Of F. `F.apply`, which some keep (`f = F.apply`), may be C; it asks F for what runs backward, and
        then for `forward`, which runs without gradients."""
        nonlocal learning
        found = type.__getattribute__(function, name)
        if name == "_backward_cls":
            learning = torch.is_grad_enabled()
        elif name == "forward" and learning and not torch.is_grad_enabled():
            learning = False
            return wraps(found)(partial(forward, function, found))
        return found

    def forward(function: type, found: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        again = function is CheckpointFunction
        if function.__module__.startswith("torch.") and not again:
            return found(*args, **kwargs)  # of an operator that is recorded
        if any(isinstance(x, FakeTensor) and x.requires_grad for x in (*args, *kwargs.values())):
            if again:
                raise CaptureError(
                    "torch.utils.checkpoint with use_reentrant=True cannot be captured; leave it out, as "
                    "pipeline.recompute does the same where memory asks for it, or use use_reentrant=False"
                )
            raise Untraceable(
                f"{function.__name__}, a torch.autograd.Function, has a backward of its own, which a graph "
                f"of operators would leave out; {_INSTEAD}"
            )
        # No gradient goes through it, whatever else it reads. The tracer is not told so by `apply`.
        torch.set_grad_enabled(False)
        out = found(*args, **kwargs)
        torch.set_grad_enabled(True)
        return out

    kind: Any = type(torch.autograd.Function)
    kind.__getattribute__ = look
    try:
        yield
    finally:
        del kind.__getattribute__


@contextmanager
def _no_hooks() -> Iterator[None]:
    """On gradients of tensors."""

    def hook(t: Tensor, name: str, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(t, FakeTensor):
            return before[name](t, *args, **kwargs)
        raise Untraceable(
            "registers a hook on the gradient of a tensor, which a graph of operators would leave out; "
            f"{_INSTEAD}"
        )

    before = {name: getattr(Tensor, name) for name in _HOOKS}
    for name in _HOOKS:
        setattr(Tensor, name, partialmethod(hook, name))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Tensor, name, method)


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    def enter(mode: torch.inference_mode) -> None:
        """A part that runs as it is written is run without the tracer's modes."""
        if mode.mode and torch.is_grad_enabled() and _get_current_dispatch_mode_stack():
            raise Untraceable(
                "torch.inference_mode would be left out of a graph of operators, in which all have "
                f"gradients; use torch.no_grad(), or {_MANUALLY}"
            )
        entered(mode)

    entered = torch.inference_mode.__enter__
    torch.inference_mode.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = entered  # type: ignore[method-assign]


class NoStrangeWeights(TorchFunctionMode):
    """Refuses, while a model is traced, what wants a gradient and is no parameter of it: it would be a
    constant of the graph."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__()
        self.source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(t.requires_grad for t in tensors(out)):
            for t in tensors((args, kwargs)):
                if t.requires_grad and self.source.is_strange(t):
                    raise CaptureError(strange_weight(t))
        return out


def strange_weight(t: Tensor) -> str:
    return (
        f"reads a tensor of shape {list(t.shape)} that wants a gradient, and is no parameter of the model: "
        "nothing would train it; make it one (forward may return more for the loss), or freeze it by "
        "requires_grad_(False); where forward itself makes it by x.detach().requires_grad_(), take x as it is"
    )


def refuse_backward_hooks(model: nn.Module, written: Iterable[str]) -> None:
    """Those of modules; parts that run as they are written have them."""
    for path, module in model.named_modules():
        inside = any(f"model.{path}.".startswith(f"{part}.") for part in written)
        if (module._backward_hooks or module._backward_pre_hooks) and not inside:
            raise Untraceable(
                f"{path or 'the model'!r}, a {type(module).__name__}, has a backward hook,\n  which a graph "
                f"of operators would leave out; remove it, or {_MANUALLY}",
                f"model.{path}",
            )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Gradients are added up in dense buffers here. torch adds rows one by one, the same row more than once,
    to the weight itself (SGD), or keeps state for those alone (SparseAdam): other bits, or other updates."""
    tables = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    for path, table in tables:
        if table.sparse and table.weight.requires_grad:
            raise CaptureError(
                f"{path or 'the model'!r}, a {type(table).__name__}, has sparse=True, and gradients are "
                "dense here, with which SGD has other bits and SparseAdam cannot work; make it with "
                "sparse=False, and take AdamW, say, for SparseAdam"
            )


def refuse_transforms(graph: fx.Graph) -> None:
    """torch.vmap and the like begin and end by calls that nothing refers to, and what is between has no
    gradient in the graph."""
    for node in graph.nodes:
        if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            raise Untraceable(
                f"{source_line(node)}\n  torch.func ({node.target.__name__}) cannot be captured; write it "
                f"with operators (a batched product for vmap), or {_MANUALLY}",
                module_of(node),
            )


_SLIPS = (LookupError, NameError, AttributeError, TypeError, ArithmeticError, AssertionError, ImportError)


def is_slip(error: BaseException) -> bool:
    """Whether the model's or the loss's own line raises it, and not torch's tracer because of that line."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, _SLIPS) and "/torch/" not in last and not last.startswith(_HERE)


def cannot(where: str, error: Exception, keys: Iterable[str] = ()) -> str:
    """What to say of a model that torch's tracer gives up on. keys: of the batch."""
    reason = first_line(error)
    if is_slip(error):
        has = f"; the batch has the keys {sorted(keys)}" if isinstance(error, KeyError) else ""
        return (
            f"{where}\n  {type(error).__name__}: {reason}{has}\n"
            "  the model or the loss raised this itself: mend that line"
        )
    if "data-dependent" not in reason.lower() and "DataDependent" not in type(error).__name__:
        return (
            f"{where}\n  cannot be captured: {type(error).__name__}: {reason}\n"
            f"  forward was traced with tensors that have no values; if it runs without mpipipe, {_MANUALLY}"
        )
    return (
        f"{where}\n  cannot be captured: it decides on the values of a tensor (if, while, int(), .item(), a "
        f"size), and a graph has none\n  compute with tensors instead of `.item()`, write a branch with "
        f"torch.where, or {_MANUALLY}"
    )
