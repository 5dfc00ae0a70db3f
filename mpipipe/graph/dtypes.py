"""A tensor of the batch in a dtype that the model or the loss cannot compute with, told from what cannot be
captured at all: with another one it can. Asked where a trace has failed only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from mpipipe.errors import first_line
from mpipipe.graph.nodes import is_op, val
from mpipipe.graph.program import Specs
from mpipipe.graph.rewrite import Untraceable, arguments_of, module_of, schema_name, source_line

LOSSES = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d")
_PRODUCTS = (
    "aten::linear", "aten::matmul", "aten::mm", "aten::bmm", "aten::addmm", "aten::conv1d", "aten::conv2d",
    "aten::conv3d",
)  # fmt: skip
_LABELS = (torch.int64, torch.uint8)  # of classes; of their probabilities it is a floating one
_SAID = re.compile("dtype|scalar type", re.IGNORECASE)
_USUAL = {"int64", "float32"}  # of labels and ids, and of what is computed with


def refuse_unlike(graph: fx.Graph) -> None:
    """What torch refuses when it computes, not yet in a trace: products of unlike numbers, which autocast
    leaves as they are, and labels that are integers of another width."""
    for n in graph.nodes:
        if is_op(n, *_PRODUCTS):
            dtypes = {val(x).dtype for x in n.all_input_nodes}
            wrong = len(dtypes) > 1 and any(d == torch.float64 or not d.is_floating_point for d in dtypes)
            takes = "numbers of one dtype"
        elif is_op(n, *LOSSES):
            dtypes = {val(arguments_of(n)["target"]).dtype}
            wrong = not any(d.is_floating_point or d in _LABELS for d in dtypes)
            takes = "labels of the dtype int64"
        else:
            continue
        if wrong:
            found = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise Untraceable(
                f"{source_line(n)}\n  {schema_name(n)} takes {takes}, not {found}: convert them, such as by "
                ".long() or .float()",
                module_of(n),
            )


def wrong_dtype(error: Untraceable, specs: Specs, trace: Callable[[Specs], object]) -> str:
    """What to say where one tensor of the batch is to blame for `error`; "" where none is. trace: raises for
    what it cannot capture."""
    if not _SAID.search(str(error)):
        return ""
    place, *told = str(error).split("\n  ")
    for key, has in specs.items():
        for dtype in sorted(_USUAL - {has.dtype}):
            try:
                trace({**specs, key: replace(has, dtype=dtype)})
            except Exception:
                continue
            cause = error.__cause__
            why = told[0] if cause is None else f"{type(cause).__name__}: {first_line(cause)}"
            return (
                f"{place}\n  {key!r} of the batch is {has.text}, which cannot be computed "
                f"with here, {dtype} can: let the data give it as torch.{dtype}\n  {why}"
            )
    return ""
