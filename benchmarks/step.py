"""Whole steps of one rank with `bits: fast` and with `bits: torch`, by turns in one process.

    python -m benchmarks.step [gpt10m|gpt85m|vgg|resnet|unet] [fp32|bf16] [threads]

Both sides have the same route of the matrix products. Prints seconds and the median of the ratios.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpipipe import OptimizerSettings, Pipeline
from mpipipe.config import parse
from mpipipe.data import open_dataset
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.models import GPT, build, cross_entropy

# those of examples/: vocabulary, layers, width, heads, context; samples in a step, micro-batches
SIZES = {"gpt10m": ((256, 6, 384, 6, 256), 16, 8), "gpt85m": ((32000, 12, 768, 12, 256), 8, 8)}
# networks with BatchNorm, which see 16 images in a step, in 2 micro-batches
IMAGES = {
    "vgg": "size: 64, blocks: [2, 2, 3, 3, 3], widths: [64, 128, 256, 512, 512], hidden: 1024",
    "resnet": "size: 112, blocks: [2, 2, 2, 2], widths: [64, 128, 256, 512], stem: imagenet",
    "unet": "size: 64, width: 16, depth: 3",
}
ROUNDS = {"gpt85m": 3}


def pipeline(
    name: str, precision: str, threads: int, bits: str, say: Callable[[str], object] = lambda line: None
) -> Pipeline:
    model, loss, data, batch, micro_batches = _images(name) if name in IMAGES else _text(name)
    return Pipeline(
        model, loss, data, OptimizerSettings(), batch=batch, micro_batches=micro_batches,
        precision=precision, threads=threads, bits=bits, say=say,  # type: ignore[arg-type]
    )  # fmt: skip


def _images(name: str) -> Any:
    config = parse(
        f"model: {{name: {name}, {IMAGES[name]}}}\ndata: {{name: synthetic}}\ntrain: {{batch: 16}}"
    )
    data = open_dataset(config, ".")
    built = build(config, data)
    return built.model, built.loss, data, 16, 2


def _text(name: str) -> Any:
    shape, batch, micro_batches = SIZES[name]
    model = partial(GPT, *shape, True, 0.0)
    return model, cross_entropy, SyntheticTokens(shape[0], shape[-1], 0), batch, micro_batches


def main(name: str = "gpt10m", precision: str = "fp32", threads: str = "1") -> None:
    sides = {bits: pipeline(name, precision, int(threads), bits) for bits in ("torch", "fast")}
    fast = sides["fast"]
    count = 1 + ROUNDS.get(name, 12)
    rounds = [{bits: pipe.step().seconds for bits, pipe in sides.items()} for _ in range(count)]
    seconds = {bits: np.array([r[bits] for r in rounds[1:]]) for bits in sides}
    ratio = np.median(seconds["torch"] / seconds["fast"])
    medians = "  ".join(f"{bits} {np.median(s):.3f} s" for bits, s in seconds.items())
    slower = [form for form, kind in fast.numerics.op_table.items() if kind == "torch"]
    print(f"{name} {precision} {threads} threads, {fast.numerics.gemm}: {medians}, {ratio:.2f} x")
    print(f"  predicted {fast.plan.prediction.step_s:.3f} s; left to torch: {', '.join(slower) or 'nothing'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
