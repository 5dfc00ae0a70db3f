"""Integers of a batch for which a table or a loss has no entry: said with their sample, where an operator has
refused them. Asked on the way out only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from mpipipe.graph.capture import Captured
from mpipipe.graph.dtypes import LOSSES
from mpipipe.graph.nodes import VIEWS, is_op, val
from mpipipe.graph.rewrite import arguments_of, schema_name, source_line

_KEPT = {  # operators whose results have values of their input and no others
    *VIEWS, "aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::detach", "aten::slice",
    "aten::select", "aten::narrow", "aten::transpose", "aten::permute", "aten::t", "aten::unsqueeze",
    "aten::squeeze", "aten::expand", "aten::pad", "aten::constant_pad_nd",
}  # fmt: skip
_TABLES = ("aten::embedding", "aten::embedding_bag", "mpipipe::embedding")
_HEAD_LOSS = "mpipipe::linear_cross_entropy"
_PICKS = ("aten::gather", "aten::index_select")
_INDEX = "aten::index"  # which counts from the end, too


class _LookUp(NamedTuple):
    """Where integers look up: which are right."""

    indices: Any
    where: str
    entries: int
    least: int = 0
    ignored: int | None = None


def outside(
    captured: Captured, batch: Mapping[str, Tensor], first: Mapping[str, int], name_of: Callable[[int], str]
) -> str:
    """What to say of the first integer of a micro-batch that has no entry; "" where each has one. first: by
    key, samples of the step before this micro-batch; name_of: a sample of the step."""
    for look in _look_ups(captured):
        key = _key(captured, look.indices)
        if key not in batch:
            continue
        found = batch[key]
        wrong = (found < look.least) | (found >= look.entries)
        if look.ignored is not None:
            wrong &= found != look.ignored
        if not wrong.any():
            continue
        place = wrong.nonzero()[0].tolist()
        sample = first[key] + place[0]
        ignored = "" if look.ignored is None else f", or {look.ignored} to be ignored"
        called = name_of(sample)
        return (
            f"the input {key!r} holds {int(found[tuple(place)])} in sample {sample} of the batch"
            f"{called and f', {called}'}, but {look.where} has {look.entries} entries: it must be in "
            f"[{look.least}, {look.entries}){ignored}; mend that sample, or the number of entries of the "
            "model"
        )
    return ""


def _key(captured: Captured, indices: Any) -> str:
    """Of the batch, whose integers these are; "" where they are computed."""
    while is_op(indices, *_KEPT):
        indices = indices.args[0]
    known = indices in captured.inputs and not val(indices).is_floating_point()
    return captured.inputs[indices] if known else ""


def _look_ups(captured: Captured) -> Iterator[_LookUp]:
    for n in captured.graph.nodes:
        given = arguments_of(n) if is_op(n, *_TABLES, *LOSSES, *_PICKS, _HEAD_LOSS, _INDEX) else {}
        if is_op(n, *_TABLES):
            table = given["weight"]
            name = captured.param.get(table, str(table))
            yield _LookUp(given["indices"], f"the table {name!r}", val(table).shape[0])
        elif is_op(n, _HEAD_LOSS):
            yield _LookUp(
                given["labels"], "the loss", val(given["weight"]).shape[0], 0, given["ignore_index"]
            )
        elif is_op(n, *LOSSES):
            scores = val(given["self"])
            classes = scores.shape[min(1, scores.dim() - 1)]
            yield _LookUp(given["target"], "the loss", classes, 0, given["ignore_index"])
        elif is_op(n, *_PICKS):
            yield _LookUp(given["index"], _reader(n), val(given["self"]).shape[given["dim"]])
        elif is_op(n, _INDEX):
            for entries, indices in zip(val(given["self"]).shape, given["indices"], strict=False):
                if isinstance(indices, fx.Node) and val(indices).dtype != torch.bool:
                    yield _LookUp(indices, _reader(n), entries, -entries)


def _reader(n: fx.Node) -> str:
    return f"what {schema_name(n)} reads ({source_line(n)})"
