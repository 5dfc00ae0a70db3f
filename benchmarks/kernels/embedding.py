"""The gradient of an embedding, added to the one that is there."""

from __future__ import annotations

import torch
from benchmarks.kernels.harness import Case

from mpipipe.ops.embedding import add_rows


def cases() -> list[Case]:
    shapes = ((32_000, 768, 1024), (50_257, 768, 4096), (100_000, 64, 8192))
    return [_case(*shape, dense) for shape in shapes for dense in (False, True)]


def _case(entries: int, width: int, tokens: int, dense: bool) -> Case:
    indices, dy = torch.randint(0, entries, (tokens,)), torch.randn(tokens, width)
    grad = torch.zeros(entries, width)
    backward = torch.ops.aten.embedding_dense_backward
    return Case(
        "embedding",
        f"{tokens} rows of {entries} x {width}, " + ("dense" if dense else "rows"),
        lambda: add_rows(dy, indices, -1, grad),
        {"dense + add": lambda: grad.add_(backward(dy, indices, entries, -1, False))}
        if dense
        else {"index_add_": lambda: grad.index_add_(0, indices, dy)},
        30.0 if dense else 2.0,
        bytes=3 * 4 * tokens * width,
        flops=float(tokens * width),
    )
