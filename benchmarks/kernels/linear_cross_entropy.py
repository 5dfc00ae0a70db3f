"""Forward and backward of a language model's head. The weight's gradient is there, as in every
micro-batch but the first; torch's chunks are the best of those tried.

    python -m benchmarks.kernels.linear_cross_entropy     the memory that each side takes meanwhile (Linux)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.kernels.harness import Call, Case
from mpipipe.ops import linear_cross_entropy

MODULE = "benchmarks.kernels.linear_cross_entropy"
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


def extra_bytes(side: str, tokens: int) -> int:
    """Growth of this process's resident memory during a call, at most; `side` of the case, or "" for ours.
    A call on a small case comes first, so that libraries are not counted."""
    for shape in ((64, 4096), (tokens, 32_000)):
        case = _case(*shape, None)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest size so far
        before = _resident_bytes("VmRSS")
        (case.theirs[side] if side else case.ours)()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> None:
    """A process for each side: what one frees the next one would find."""
    for tokens in (1024, 4096):
        for side in ("", *(f"chunks of {n}" for n in CHUNKS)):
            code = f"from {MODULE} import extra_bytes; print(extra_bytes({side!r}, {tokens}))"
            run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
            print(f"{tokens} tokens, {side or 'ours'}: {int(run.stdout) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
