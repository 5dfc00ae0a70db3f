"""A loss that promises (sum, weight) and returns a mean: the step would divide by the weight twice."""

from __future__ import annotations

from torch import fx

from mpipipe.errors import CaptureError
from mpipipe.graph.rewrite import aliased_inputs, arguments_of, schema_name, schema_of, source_line

_MEAN = 1  # of torch's losses: 0 none, 1 mean, 2 sum
_SUMS = {"aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::rsub", "aten::neg", "aten::stack"}
_COUNT = 16  # the least number that is taken for one of samples or tokens
_QUOTIENTS = {"aten::div", "aten::div_", "aten::true_divide"}
_CASTS = {"aten::to", "aten::_to_copy", "aten::clone", "aten::squeeze", "aten::sum"}


def refuse_mean(total: fx.Node, weight: fx.Node | float | None, place: str = "") -> None:
    """Raises CaptureError where a mean, or what is divided by the weight itself, reaches the loss sum with
    nothing but views, casts, + and - between.

    A mean times a weight is a sum; so is a sum of means over something that is no sample (`mean(-1).sum()`).
    place: of the loss, in brackets.
    """
    todo, seen = [total], set()
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        divided = schema_name(node) in _QUOTIENTS and _is_weight(node.args[1], weight)
        if divided or _is_mean(node):
            does = "divides by that weight" if divided else "takes a mean"
            raise CaptureError(
                f"{source_line(node)}\n  the loss{place} promises a sum and its weight, but "
                f"{schema_name(node)} {does}: return the sum (reduction='sum'), or in a script the mean "
                "alone, with Pipeline(..., weight_of=lambda batch: len(batch['labels']))"
            )
        if schema_name(node) in _SUMS:
            todo += node.all_input_nodes
        elif schema_name(node) in _CASTS or aliased_inputs(node):
            todo += node.all_input_nodes[:1]


def _is_weight(divisor: object, weight: object) -> bool:
    """Whether both are one tensor, or one number: no small one, which may be meant otherwise."""
    if isinstance(divisor, int | float):
        return divisor == weight and divisor >= _COUNT
    return equal(divisor, weight)


def equal(a: object, b: object) -> bool:
    """The same node, number or list; or the same operator on equal ones."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        same = a.op == b.op == "call_function" and (a.target, a.kwargs) == (b.target, b.kwargs)
        return a is b or (same and equal(a.args, b.args))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def _is_mean(node: fx.Node) -> bool:
    """Over every dimension: one number."""
    schema = schema_of(node)
    if schema is None:
        return False
    given = arguments_of(node)
    if schema.name == "aten::mean":
        return len(given.get("dim") or ()) in (0, node.args[0].meta["val"].dim())  # type: ignore[union-attr]
    return given.get("reduction") == _MEAN
