"""Forward and backward of a language model's head. The weight's gradient is there, as in every
micro-batch but the first; torch's chunks are the best of those tried."""

from __future__ import annotations

import torch
from benchmarks.kernels.harness import Call, Case
from torch.nn import functional

from mpipipe.ops import linear_cross_entropy

WIDTH = 768
CHUNKS = (256, 512, 1024)  # tokens


def cases() -> list[Case]:
    return [_case(1024, 32_000, 1.0), _case(4096, 32_000, 1.0), _case(1024, 128_000, None)]


def _case(tokens: int, entries: int, bar: float | None) -> Case:
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
    theirs = {f"chunks of {n}": chunked(n) for n in CHUNKS} | {"all logits": whole}
    return Case(
        "linear_cross_entropy",
        f"{tokens} x {WIDTH}, V {entries}",
        step(lambda: linear_cross_entropy(x, weight, labels)),
        theirs,
        bar,
        bytes=4 * 4 * entries * WIDTH,
        flops=6.0 * tokens * entries * WIDTH,
    )
