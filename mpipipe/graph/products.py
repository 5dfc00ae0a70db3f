"""The matrix products of a model: those that hold most of its operations, forward and backward.

They come from the graph, counted on fake tensors, so transposed operands and merged batches are as torch will
meet them. Layers that run as they are written show none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from mpipipe.graph.pieces import pieces
from mpipipe.graph.rates import reduced
from mpipipe.graph.source import TRACING
from mpipipe.graph.variants import Variants
from mpipipe.graph.work import Form, Tallier, Work

MOST = 9  # distinct products: the three of each of a transformer's largest linears
LEAST_FLOPS = 1e8  # of a micro-batch: with fewer, products are not what a step takes long for
_OPS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True)
class Product:
    """work: at its own size, or reduced; times: how many of it are as many operations as the model's."""

    work: Work
    times: float

    def operands(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Any:
        """(args, kwargs) of `work.op`, drawn."""

        def drawn(x: Any) -> Any:
            return _drawn(x, generator, dtype) if isinstance(x, Form) else x

        return tree_map(drawn, self.work.arguments)


def products(variants: Variants, precision: Literal["fp32", "bf16"], flops: float) -> tuple[Product, ...]:
    """Of one micro-batch, the heaviest first; none where they are less than `LEAST_FLOPS` together.
    precision: of the products, "fp32" or "bf16"; flops: above these a product is taken at a reduced size."""
    found = every_product(variants, precision)
    if sum(p.times * p.work.flops for p in found) < LEAST_FLOPS:
        return ()
    with TRACING, FakeTensorMode():
        return tuple(_smaller(p, flops) for p in found[:MOST])


def every_product(variants: Variants, precision: Literal["fp32", "bf16"]) -> tuple[Product, ...]:
    """Of one micro-batch, at their own sizes, the heaviest first."""
    parts = pieces(variants.primary, variants.graph, variants.uses)
    tallier, distinct = Tallier(variants.primary, variants.precision), {p.key: p for p in parts}
    works = {key: tallier.works(p) for key, p in distinct.items()}
    of_model = (work for p in parts for work in works[p.key])
    return _counted(of_model, torch.float32 if precision == "fp32" else torch.bfloat16)


def _counted(works: Iterable[Work], dtype: torch.dtype) -> tuple[Product, ...]:
    counts, of_key = Counter[str](), dict[str, Work]()
    for work in works:
        if work.name in _OPS and all(form.dtype == dtype for form in work.forms):
            counts[work.key] += 1
            of_key[work.key] = work
    flops = {key: counts[key] * of_key[key].flops for key in counts}
    ordered = sorted(flops, key=lambda key: (-flops[key], key))
    return tuple(Product(of_key[key], counts[key]) for key in ordered)


def _smaller(product: Product, flops: float) -> Product:
    small = reduced(product.work, flops)
    return Product(small, product.times * product.work.flops / small.flops)


def _drawn(form: Form, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    elements = 1 + sum((size - 1) * step for size, step in zip(form.shape, form.stride, strict=True))
    elements = elements if math.prod(form.shape) else 0
    return torch.randn(elements, generator=generator).to(dtype).as_strided(form.shape, form.stride)
