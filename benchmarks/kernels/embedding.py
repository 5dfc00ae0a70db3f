"""The gradient of an embedding, added to the one that is there, without a dense one.

The rows are summed and added by torch's own `index_add_`, with the bits of the dense way. That moves six
times the bytes of the rows; the line's "at most" says how near it is to the machine's bandwidth."""

from __future__ import annotations

import torch

from benchmarks.kernels.harness import Case
from mpipipe.ops.embedding import row_sums


def cases() -> list[Case]:
    return [_case(*shape) for shape in ((32_000, 768, 1024), (50_257, 768, 4096), (100_000, 64, 8192))]


def _case(entries: int, width: int, tokens: int) -> Case:
    indices, dy = torch.randint(0, entries, (tokens,)), torch.randn(tokens, width)
    grad = torch.zeros(entries, width)
    backward = torch.ops.aten.embedding_dense_backward
    return Case(
        "embedding",
        f"{tokens} rows of {entries} x {width}",
        lambda: grad.index_add_(0, *row_sums(dy, indices)),
        {"dense + add": lambda: grad.add_(backward(dy, indices, entries, -1, False))},
        30.0,
        bytes=6 * 4 * tokens * width,
        flops=float(tokens * width),
    )
