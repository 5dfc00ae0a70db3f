"""The gradient of an embedding, added to the one that is there, without a dense one.

The rows are summed and added by torch's own `index_add_`, with the bits of the dense way. That moves six
times the bytes of the rows; the line's "at most" says how near it is to the machine's bandwidth. To add dy
itself, row by row, moves half of that and has other bits wherever a row comes twice.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.harness import Call, Case
from mpipipe.ops.embedding import row_sums


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
    name, moved = f"{tokens} rows of {entries} x {width}", 6 * 4 * tokens * width

    def ours() -> object:
        return grad.index_add_(0, *row_sums(dy, indices))

    return [
        Case("embedding", f"{name}, {way}", ours, {way: call}, bar, moved, float(tokens * width))
        for way, (bar, call) in theirs.items()
    ]
