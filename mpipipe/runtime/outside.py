"""Integers of a batch for which a table or a loss has no entry: said with their sample, where an operator has
refused them. Asked on the way out only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from mpipipe.graph.capture import Captured
from mpipipe.graph.nodes import VIEWS, is_op, val
from mpipipe.graph.rewrite import arguments_of

_KEPT = {  # operators whose results have values of their input and no others
    *VIEWS, "aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::detach", "aten::slice",
    "aten::select", "aten::narrow", "aten::transpose", "aten::permute", "aten::t", "aten::unsqueeze",
    "aten::squeeze", "aten::expand",
}  # fmt: skip
_LOSSES = {"aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d"}


class _LookUp(NamedTuple):
    """Of the integers of a key of the batch: which are right."""

    key: str
    entries: int
    ignored: int | None
    where: str


def outside(
    captured: Captured, batch: Mapping[str, Tensor], first: Mapping[str, int], name_of: Callable[[int], str]
) -> str:
    """What to say of the first integer of a micro-batch that has no entry; "" where each has one. first: by
    key, samples of the step before this micro-batch; name_of: a sample of the step."""
    for look in _look_ups(captured):
        if (found := batch.get(look.key)) is None:
            continue
        wrong = (found < 0) | (found >= look.entries)
        if look.ignored is not None:
            wrong &= found != look.ignored
        if not wrong.any():
            continue
        place = wrong.nonzero()[0].tolist()
        sample = first[look.key] + place[0]
        ignored = "" if look.ignored is None else f", or {look.ignored} to be ignored"
        called = name_of(sample)
        return (
            f"the input {look.key!r} holds {int(found[tuple(place)])} in sample {sample} of the batch"
            f"{called and f', {called}'}, but {look.where} has {look.entries} entries: it must be in [0, "
            f"{look.entries}){ignored}; mend that sample, or the number of entries of the model"
        )
    return ""


def _look_ups(captured: Captured) -> Iterator[_LookUp]:
    for n in captured.graph.nodes:
        if is_op(n, "aten::embedding", "mpipipe::embedding"):
            given = arguments_of(n)
            indices, table, ignored = given["indices"], given["weight"], None
            where, entries = f"the table {captured.param.get(table, str(table))!r}", val(table).shape[0]
        elif is_op(n, "mpipipe::linear_cross_entropy"):
            given = arguments_of(n)
            indices, ignored, entries = given["labels"], given["ignore_index"], val(given["weight"]).shape[0]
            where = "the loss"
        elif is_op(n, *_LOSSES):
            given = arguments_of(n)
            indices, ignored, scores = given["target"], given["ignore_index"], val(given["self"])
            where, entries = "the loss", scores.shape[min(1, scores.dim() - 1)]
        else:
            continue
        while is_op(indices, *_KEPT):
            indices = indices.args[0]
        if indices in captured.inputs and not val(indices).is_floating_point():
            yield _LookUp(captured.inputs[indices], entries, ignored, where)
