"""Forward and backward of a language model's head. The weight's gradient is there, as in every
micro-batch but the first; torch's chunks are the best of those tried. Ours is as a stage runs it whose loss
this is, all of it in backward, and as it is elsewhere (`loss first`).

The memory that both take meanwhile is measured too: of torch's chunks by the smallest, which take least."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from benchmarks.kernels.harness import Call, Case
from benchmarks.kernels.memory import OURS, Memory
from benchmarks.kernels.memory import extra_bytes as extra_bytes_of
from mpipipe.ops import linear_cross_entropy

MODULE = "benchmarks.kernels.linear_cross_entropy"
WIDTH = 768
CHUNKS = (256, 512, 1024)  # tokens
SHAPES = ((1024, 32_000), (4096, 32_000), (1024, 128_000))  # tokens, entries
SPEED_BARS, MEMORY_BARS = (1.0, 1.0, None), (3.0, 3.0, None)


def cases() -> Iterator[Case | Memory]:
    """One after the other, so that the tensors of one are there at a time."""
    for (tokens, entries), bar in zip(SHAPES, SPEED_BARS, strict=True):
        yield _case(tokens, entries, bar)
        yield _case(tokens, entries, None, late=False)
    for (tokens, entries), bar in zip(SHAPES, MEMORY_BARS, strict=True):
        code = f"from {MODULE} import extra_bytes; print(extra_bytes('%s', {tokens}, {entries}))"
        yield Memory("linear_cross_entropy", f"{_name(tokens, entries)}, memory", code, _chunks()[:1], bar)


def _name(tokens: int, entries: int) -> str:
    return f"{tokens} x {WIDTH}, V {entries}"


def _chunks() -> tuple[str, ...]:
    return tuple(f"chunks of {n}" for n in CHUNKS)


def _case(tokens: int, entries: int, bar: float | None, late: bool = True) -> Case:
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = (0.02 * torch.randn(entries, WIDTH)).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    labels = torch.randint(0, entries, (tokens,))

    def step(loss: Call) -> Call:
        def run() -> None:
            x.grad = None
            loss().backward()

        return run

    def chunked(tokens_at_once: int) -> Call:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=tokens_at_once)
        return step(
            lambda: functional.linear_cross_entropy(x, weight, labels, reduction="sum", options=options)
        )

    whole = step(lambda: functional.cross_entropy(functional.linear(x, weight), labels, reduction="sum"))
    theirs = dict(zip(_chunks(), map(chunked, CHUNKS), strict=True)) | {"all logits": whole}
    return Case(
        "linear_cross_entropy",
        _name(tokens, entries) + ("" if late else ", loss first"),
        step(lambda: linear_cross_entropy(x, weight, labels, late=late)),
        theirs,
        bar,
        bytes=4 * 4 * entries * WIDTH,
        flops=6.0 * tokens * entries * WIDTH,
    )


def extra_bytes(side: str, tokens: int, entries: int) -> int:
    """Of this process during forward and backward, by a side of the case."""
    small, large = (_of(_case(*shape, None), side) for shape in ((64, 4096), (tokens, entries)))
    return extra_bytes_of(small, large)


def _of(case: Case, side: str) -> Call:
    return case.ours if side == OURS else case.theirs[side]
