"""Whole steps of one rank with `bits: fast` and with `bits: torch`, by turns in one process.

    python -m benchmarks.step [gpt10m|gpt85m] [fp32|bf16] [threads]

Both sides have the same route of the matrix products. Prints seconds and the median of the ratios.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
from torch import nn

from mpipipe import OptimizerSettings, Pipeline
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.models import GPT, cross_entropy

# those of examples/: vocabulary, layers, width, heads, context; samples in a step, micro-batches
SIZES = {"gpt10m": ((256, 6, 384, 6, 256), 16, 8), "gpt85m": ((32000, 12, 768, 12, 256), 8, 8)}
ROUNDS = {"gpt10m": 12, "gpt85m": 3}


def pipeline(
    name: str, precision: str, threads: int, bits: str, say: Callable[[str], object] = lambda line: None
) -> Pipeline:
    shape, batch, micro_batches = SIZES[name]
    model: partial[nn.Module] = partial(GPT, *shape, True, 0.0)
    data = SyntheticTokens(shape[0], shape[-1], 0)
    return Pipeline(
        model, cross_entropy, data, OptimizerSettings(), batch=batch, micro_batches=micro_batches,
        precision=precision, threads=threads, bits=bits, say=say,  # type: ignore[arg-type]
    )  # fmt: skip


def main(name: str = "gpt10m", precision: str = "fp32", threads: str = "1") -> None:
    sides = {bits: pipeline(name, precision, int(threads), bits) for bits in ("torch", "fast")}
    fast = sides["fast"]
    rounds = [{bits: pipe.step().seconds for bits, pipe in sides.items()} for _ in range(1 + ROUNDS[name])]
    seconds = {bits: np.array([r[bits] for r in rounds[1:]]) for bits in sides}
    ratio = np.median(seconds["torch"] / seconds["fast"])
    medians = "  ".join(f"{bits} {np.median(s):.3f} s" for bits, s in seconds.items())
    slower = [form for form, kind in fast.numerics.op_table.items() if kind == "torch"]
    print(f"{name} {precision} {threads} threads, {fast.numerics.gemm}: {medians}, {ratio:.2f} x")
    print(f"  predicted {fast.plan.prediction.step_s:.3f} s; left to torch: {', '.join(slower) or 'nothing'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
