"""The gradient of an embedding, added to the one that is there, without a dense one.

For n tokens, d numbers each, and V entries, in float32, bytes that must be moved:

    ours                12 n d             dy is read, the rows of the gradient are read and written
    index_add_ of dy    12 n d             the same, with other bits wherever a row comes twice
    dense + add         (16 V + 12 n) d    zeros are written, rows added to them, and all of it is added

So at equal rates the ratios are 1 and 1 + 4 V / 3 n: 43, 17 and 17 of the shapes here. The line's "at most"
says how near ours is to the machine's bandwidth.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.harness import Call, Case
from mpipipe.ops.embedding import add_row_sums


def cases() -> list[Case]:
    return [
        case
        for shape in ((32_000, 768, 1024), (50_257, 768, 4096), (100_000, 64, 8192))
        for case in _of(*shape)
    ]


def _of(entries: int, width: int, tokens: int) -> list[Case]:
    indices, dy = torch.randint(0, entries, (tokens,)), torch.randn(tokens, width)
    grad = torch.zeros(entries, width)
    backward = torch.ops.aten.embedding_dense_backward
    theirs: dict[str, tuple[float, Call]] = {
        "dense + add": (30.0, lambda: grad.add_(backward(dy, indices, entries, -1, False))),
        "index_add_ of dy": (2.0, lambda: grad.index_add_(0, indices, dy)),
    }
    name, moved = f"{tokens} rows of {entries} x {width}", 3 * 4 * tokens * width

    def ours() -> object:
        return add_row_sums(grad, indices, dy)

    return [
        Case("embedding", f"{name}, {way}", ours, {way: call}, bar, moved, float(tokens * width))
        for way, (bar, call) in theirs.items()
    ]
