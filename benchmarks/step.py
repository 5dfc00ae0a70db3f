"""Whole steps of one rank with `bits: fast` and with `bits: torch`, by turns in one process.

    python -m benchmarks.step [gpt10m|gpt85m|vgg|resnet|unet] [fp32|bf16] [threads]

Both sides have the same route of the matrix products. For people: seconds, the median of the ratios, what it
could be at most, and what is left to torch. Those of the GPTs are in `make bench-kernels`, as JSON lines.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.harness import Call, Case, compare
from benchmarks.kernels.limits import by_route
from mpipipe import OptimizerSettings, Pipeline
from mpipipe.config import parse
from mpipipe.data import open_dataset
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.graph.products import every_product
from mpipipe.models import GPT, build, cross_entropy

# those of examples/: vocabulary, layers, width, heads, context; samples in a step, micro-batches
SIZES = {"gpt10m": ((256, 6, 384, 6, 256), 16, 8), "gpt85m": ((32000, 12, 768, 12, 256), 8, 8)}
# networks with BatchNorm, which see 16 images in a step, in 2 micro-batches
IMAGES = {
    "vgg": "size: 64, blocks: [2, 2, 3, 3, 3], widths: [64, 128, 256, 512, 512], hidden: 1024",
    "resnet": "size: 112, blocks: [2, 2, 2, 2], widths: [64, 128, 256, 512], stem: imagenet",
    "unet": "size: 64, width: 16, depth: 3",
}
ROUNDS = 12


class Steps:
    """Both sides of one model, which `prepare` makes for as many threads as torch has then; those for another
    number are gone before."""

    def __init__(self, name: str, precision: str, gemm: str = "auto") -> None:
        self.name, self.precision, self.gemm = name, precision, gemm
        self.sides: dict[str, Pipeline] = {}
        self.products: list[Call] = []

    def case(self, bar: float | None = None) -> Case:
        images = self.name in IMAGES  # convolutions for the most part: their few products say nothing
        return Case(
            "whole_step", f"{self.name}, {self.precision}", lambda: self.sides["fast"].step(),
            {"torch": lambda: self.sides["torch"].step()}, bar, prepare=self.prepare,
            floor=None if images else self.multiply, floor_times=1 if images else SIZES[self.name][2],
            stock=by_route("mkl", lambda: self.sides["torch"].step()) if self._routed() else None,
        )  # fmt: skip

    def _routed(self) -> bool:
        """Whether torch as it comes makes its products in another way."""
        return self.precision == "fp32" and self.gemm not in ("auto", "mkl")

    def prepare(self) -> None:
        self.sides, self.products, gemm = {}, [], self.gemm
        gc.collect()  # a pipeline refers to itself
        for bits in ("torch", "fast"):
            self.sides[bits] = pipeline(self.name, self.precision, torch.get_num_threads(), bits, gemm=gemm)
            gemm = self.sides[bits].numerics.gemm
        if self.name not in IMAGES:
            self.products = products(self.sides["torch"]) + attention_products(self.name, self.precision)

    @torch.no_grad()
    def multiply(self) -> None:
        """The products of one micro-batch, those of attention among them."""
        for call in self.products:
            call()


def products(pipe: Pipeline) -> list[Call]:
    """Each product of a micro-batch, forward and backward, on its own shapes. Equal ones share operands and
    follow each other as far apart as in layers."""
    draw, rounds = torch.Generator().manual_seed(0), dict[int, list[Call]]()
    precision = pipe.numerics.precision
    for product in every_product(pipe.variants, precision):
        args, kwargs = product.operands(draw, torch.bfloat16 if precision == "bf16" else torch.float32)
        for i in range(int(product.times)):
            rounds.setdefault(i, []).append(partial(product.work.op, *args, **kwargs))
    return [call for i in sorted(rounds) for call in rounds[i]]


def attention_products(name: str, precision: str) -> list[Call]:
    """Of the causal attention of a micro-batch, which is one operator in its graph: seven for each layer, of
    the half that is not masked, as if no tile lay on the diagonal. Forward makes q k^T and p v, backward
    q k^T again, do v^T, and the gradients of q, k and v (Dao et al. 2022)."""
    (_, layers, width, heads, tokens), batch, micro_batches = SIZES[name]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    draw, half, per_head = torch.Generator().manual_seed(0), tokens // 2, width // heads
    q, kt, p, v = (
        torch.randn(batch // micro_batches * heads, *shape, generator=draw).to(dtype)
        for shape in ((tokens, per_head), (per_head, half), (tokens, half), (half, per_head))
    )
    layer: list[Call] = [partial(torch.bmm, q, kt)] * 3 + [partial(torch.bmm, p, v)] * 4
    return layer * layers


def pipeline(
    name: str, precision: str, threads: int, bits: str, gemm: str = "auto"
) -> Pipeline:  # fmt: skip
    model, loss, data, batch, micro_batches = _images(name) if name in IMAGES else _text(name)
    return Pipeline(
        model, loss, data, OptimizerSettings(), batch=batch, micro_batches=micro_batches,
        precision=precision, threads=threads, bits=bits, gemm=gemm, say=lambda line: None,  # type: ignore[arg-type]
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
    torch.set_num_threads(int(threads))
    steps = Steps(name, precision)
    found, fast = compare(steps.case(), ROUNDS), steps.sides["fast"]
    most = "" if found.at_most is None else f", at most {found.at_most:.2f}"
    slower = [form for form, kind in fast.numerics.op_table.items() if kind == "torch"]
    print(
        f"{name} {precision} {threads} threads, {fast.numerics.gemm}: fast {found.ours_s:.3f} s, "
        f"{found.ratio:.2f} x torch{most}"
    )
    print(f"  predicted {fast.plan.prediction.step_s:.3f} s; left to torch: {', '.join(slower) or 'nothing'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
