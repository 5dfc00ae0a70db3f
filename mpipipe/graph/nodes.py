"""Nodes of a captured graph looked at: what operator one is, its shape and dtype, and whether a piece of the
graph has the form that is looked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import fx

from mpipipe.graph.rewrite import arguments_of, schema_name

VIEWS = {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::alias", "aten::flatten"}
CAST = "aten::to"
FLOATS = (torch.float32, torch.bfloat16)


def val(node: fx.Node) -> Any:
    return node.meta["val"]


@torch.no_grad()
def evaluate(nodes: Iterable[fx.Node], given: Mapping[fx.Node, Any] | None = None) -> dict[fx.Node, Any]:
    """Values of operators that read nothing but each other and `given`, in program order."""
    real = dict(given or {})
    for n in nodes:
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), real.__getitem__)
        real[n] = n.target(*args, **kwargs)  # type: ignore[operator]
    return real


def is_op(node: Any, *names: str) -> TypeGuard[Any]:
    """An operator of one of these names."""
    return isinstance(node, fx.Node) and node.op == "call_function" and schema_name(node) in names


def dtype_of(node: fx.Node) -> str:
    return str(val(node).dtype).removeprefix("torch.")


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def times_read(node: fx.Node) -> int:
    """How often it is read; an operator may read it twice."""
    return sum(max(1, user.args.count(node)) for user in node.users)


def all_alike(*nodes: fx.Node) -> bool:
    """One shape, one floating dtype that the kernels know."""
    first = val(nodes[0])
    return first.dtype in FLOATS and all(
        val(n).shape == first.shape and val(n).dtype == first.dtype for n in nodes
    )


def same_dtype(*nodes: fx.Node | None) -> bool:
    dtypes = {val(n).dtype for n in nodes if n is not None}
    return len(dtypes) == 1 and dtypes <= set(FLOATS)


def product_of(node: Any) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """(values, weight, bias, whether the weight is (I, O)) of a linear or an addmm."""
    if not is_op(node, "aten::linear", "aten::addmm") or val(node).dtype not in FLOATS:
        return None
    g = arguments_of(node)
    if schema_name(node) == "aten::linear":
        product = g["input"], g["weight"], g["bias"], False
    elif g["beta"] == 1 and g["alpha"] == 1:
        product = g["mat1"], g["mat2"], g["self"], True
    else:
        return None
    _, weight, bias, _ = product
    fits = val(weight).dim() == 2 and (bias is None or val(bias).shape == val(node).shape[-1:])
    return product if fits else None  # else they are broadcast


class Shape:
    """A piece of a graph to look for: operators of operators; `any` is whatever stands there, the same
    wherever it is used again. mul and add take their two operands in either order."""

    def __init__(self) -> None:
        self.of: dict[int, Any] = {}
        self.seen: set[fx.Node] = set()
        self._n = 0

    def any(self) -> int:
        self._n += 1
        return -self._n

    def op(self, name: str, *args: Any) -> tuple[Any, ...]:
        return ("op", name, args)

    def cast(self, inner: Any) -> tuple[Any, ...]:
        """It, or a cast of it."""
        return ("cast", "", (inner,))

    def fits(self, *pairs: tuple[Any, Any]) -> bool:
        """Whether each (wanted, found) does; if not, all is as it was."""
        kept, seen = dict(self.of), set(self.seen)
        if all(self._fits(wanted, found) for wanted, found in pairs):
            return True
        self.of, self.seen = kept, seen
        return False

    def _fits(self, wanted: Any, found: Any) -> bool:
        if isinstance(wanted, int) and wanted < 0:
            return self.of.setdefault(wanted, found) is found
        if not isinstance(wanted, tuple):
            same_number = isinstance(wanted, float) and isinstance(found, float)
            return math.isclose(wanted, found) if same_number else bool(wanted == found)
        if not isinstance(found, fx.Node) or found.op != "call_function":
            return False
        kind, name, args = wanted
        if kind == "cast":
            if not is_op(found, CAST):
                return self._fits(args[0], found)
            self.seen.add(found)
            return self._fits(args[0], found.args[0])
        if schema_name(found) != f"aten::{name}" or found.kwargs or len(found.args) != len(args):
            return False
        self.seen.add(found)
        orders = [found.args, found.args[::-1]] if name in ("mul", "add") else [found.args]
        return any(self.fits(*zip(args, order, strict=True)) for order in orders)
