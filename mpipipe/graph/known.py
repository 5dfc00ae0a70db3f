"""The values of a tensor in a trace, where no input and no weight has a part in them: positions, a mask of
ones.

A trace has no values, so transformers does not look at positions and masks in one. It makes a mask of
attention for whatever they may be (several sequences in a row, padding), where a model that runs leaves a
plain causal one to `is_causal`, with other bits. What is the same in each run is computed here, and decides
as it would there. Where values come with the batch, the mask stays: it is right for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from mpipipe.graph.nodes import evaluate, val
from mpipipe.graph.rewrite import memory_of, mutated_inputs

_aten = torch.ops.aten
# what these make follows from the shape of their first argument
_OF_A_SHAPE = (
    *(_aten.ones_like, _aten.zeros_like, _aten.full_like),
    *(_aten.new_ones, _aten.new_zeros, _aten.new_full),
)
_MASKS = "transformers.masking_utils"
_LOOK = ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


class _Unknown(Exception):
    pass


def _value(t: Tensor) -> Tensor:
    """Raises _Unknown where it depends on the batch, on a weight or buffer, or on chance."""
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(t, mode.tracer, None)
    if slot is None:
        raise _Unknown
    order = _leading_to(slot.proxy.node)
    with untraced():
        shapes = {m: _shape_alone(m) for n in order for m in n.all_input_nodes if m not in order}
        value: Tensor = evaluate(order, shapes)[order[-1]]
    return value


def _leading_to(node: fx.Node) -> list[fx.Node]:
    """The operators that its values follow from, in order. Raises _Unknown where there is more to them."""
    todo, needed = [node], set[fx.Node]()
    while todo:
        n = todo.pop()
        if n in needed:
            continue
        op = n.target
        if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded in op.tags:
            raise _Unknown
        needed.add(n)
        if op.overloadpacket not in _OF_A_SHAPE:
            todo += n.all_input_nodes
    written = {memory_of(target) for n in node.graph.nodes for target in mutated_inputs(n)}
    if not written.isdisjoint(map(memory_of, needed)):
        raise _Unknown
    return [n for n in node.graph.nodes if n in needed]


def _shape_alone(node: fx.Node) -> Tensor:
    like = val(node)
    return torch.empty((), dtype=like.dtype).expand(like.shape)  # of any size, without its memory


@contextmanager
def untraced() -> Iterator[None]:
    """Inside, operators run, as if nothing was traced."""
    asked = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: False
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield
    finally:
        torch.compiler.is_compiling = asked


@contextmanager
def masks_as_if_run() -> Iterator[None]:
    """Lets transformers leave out masks in a trace where it does when the model runs."""
    module = sys.modules.get(_MASKS)
    before = {name: getattr(module, name) for name in _LOOK if hasattr(module, name)}
    for name, look in before.items():
        setattr(module, name, partial(_as_if_run, look))
    try:
        yield
    finally:
        for name, look in before.items():
            setattr(module, name, look)


def _as_if_run(look: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `look` says of the values, where they are known; else, or where it makes tensors of them, what it
    does in a trace."""
    try:
        given, named = tree_map_only(FakeTensor, _value, (args, kwargs))
    except _Unknown:
        return look(*args, **kwargs)
    with untraced():
        said = look(*given, **named)
    return look(*args, **kwargs) if isinstance(said, Tensor) else said
