"""One very long dimension against float64: sums that lose no digits, counts beyond those that float32 holds.

Above 2^24, a sum in float32 no longer grows by ones. Tensors beyond 2^31 numbers are not looked at here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpipipe.ops import flash_attention
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.embedding import embedding
from mpipipe.ops.gemm import gemm
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.linear_cross_entropy import linear_cross_entropy
from mpipipe.ops.norms import norms
from mpipipe.ops.swiglu import swiglu

LONG = 10_000_019
ROWS = (1 << 24) + 1001
pytestmark = [pytest.mark.full, pytest.mark.kernels]


class Case(NamedTuple):
    """Inputs in [0, 1), so that no sum over the long dimension cancels; `exact` means the same as `ours`."""

    ours: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    shapes: list[tuple[int, ...]]


def spread(x: Tensor) -> Tensor:
    """Rows of which a norm makes numbers of one sign by column: the gradient of its weight adds up."""
    return x + torch.tensor([0.0, 3.0, 4.0], dtype=x.dtype)


LABELS = torch.tensor([LONG // 4 - 1, 3])
CASES = {
    "layer_norm of one row": Case(
        layer_norm, lambda x, w, b: F.layer_norm(x, (LONG,), w, b), [(1, LONG), (LONG,), (LONG,)]
    ),
    "layer_norm of many rows": Case(
        lambda x, w, b: layer_norm(spread(x), w, b),
        lambda x, w, b: F.layer_norm(spread(x), (3,), w, b),
        [(ROWS, 3), (3,), (3,)],
    ),
    "rms_norm of one row": Case(rms_norm, lambda x, w: F.rms_norm(x, (LONG,), w, 1e-6), [(1, LONG), (LONG,)]),
    "rms_norm of many rows": Case(rms_norm, lambda x, w: F.rms_norm(x, (1,), w, 1e-6), [(ROWS, 1), (1,)]),
    "batch_norm of many images": Case(
        lambda x, w, b: batch_norm(x, w, b)[0],
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        [(ROWS, 1), (1,), (1,)],
    ),
    "batch_norm of one image": Case(
        lambda x, w, b: batch_norm(x, w, b)[0],
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        [(1, 2, LONG), (2,), (2,)],
    ),
    "bias_gelu of one row": Case(bias_gelu, lambda x, b: F.gelu(x + b), [(1, LONG), (LONG,)]),
    "bias_gelu of many rows": Case(bias_gelu, lambda x, b: F.gelu(x + b), [(ROWS, 1), (1,)]),
    "swiglu of one row": Case(swiglu, lambda x, y: F.silu(x) * y, [(1, LONG), (1, LONG)]),
    "swiglu of many rows": Case(swiglu, lambda x, y: F.silu(x) * y, [(ROWS, 1), (ROWS, 1)]),
    "flash_attention to many keys": Case(
        # Values around zero that go with the keys: of others the gradient of the query is what is left
        # where a million large numbers cancel: roundings.
        lambda q, k, v: flash_attention(q, k, k - v),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, k - v),
        [(1, 1, 2, 16), (1, 1, (1 << 20) + 3, 16), (1, 1, (1 << 20) + 3, 16)],
    ),
    "linear_cross_entropy of many classes": Case(
        lambda x, w: linear_cross_entropy(x, w, LABELS),
        lambda x, w: F.cross_entropy(x @ w.t(), LABELS, reduction="sum"),
        [(2, 8), (LONG // 4, 8)],
    ),
}


def found(f: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of the inputs."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    y = f(*leaves)
    # Larger at one end: of a gradient that is the same everywhere, a norm would pass nothing on.
    dy = torch.linspace(0, 1, y.numel(), dtype=torch.float64).to(dtype).view_as(y) if y.dim() else None
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def parts(x: Tensor) -> list[Tensor]:
    """Of the gradient of many classes, those of the labels, which are a million times the others."""
    if x.shape[:1] != (LONG // 4,):
        return [x]
    others = torch.ones(len(x), dtype=torch.bool)
    others[LABELS] = False
    return [x[LABELS], x[others]]


def error(x: Tensor, exact: Tensor) -> float:
    """The largest one, over the largest number."""
    return float((x.double() - exact).abs_().max() / exact.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    """An error of at most twice torch's own, or of a few roundings."""
    case = CASES[name]
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.rand(shape, generator=draw) for shape in case.shapes]
    exact, plain, ours = (
        [part for t in found(f, inputs, dtype) for part in parts(t)]
        for f, dtype in (
            (case.exact, torch.float64),
            (case.exact, torch.float32),
            (case.ours, torch.float32),
        )
    )
    bounds = [max(2 * error(x, y), 1e-5) for x, y in zip(plain, exact, strict=True)]
    errors = [error(x, y) for x, y in zip(ours, exact, strict=True)]
    assert all(e <= bound for e, bound in zip(errors, bounds, strict=True)), (errors, bounds)


def test_gemm() -> None:
    a, b = torch.rand(3, LONG), torch.rand(2, LONG)
    exact = a.double() @ b.double().t()
    assert error(gemm(a, b.t()), exact) <= max(2 * error(a @ b.t(), exact), 1e-5)


def test_embedding() -> None:
    """A table of many rows of one number, all looked up once."""
    rows, weight = torch.randperm(ROWS), torch.rand(ROWS, 1, requires_grad=True)
    y, dy = embedding(rows, weight), torch.rand(ROWS, 1)
    assert torch.equal(y, weight[rows])
    (grad,) = torch.autograd.grad(y, weight, dy)
    assert torch.equal(grad[rows], dy)


def test_norms() -> None:
    """Of ones: the square root of how many."""
    n = 100_000_007
    got = norms(torch.ones(n), torch.tensor([0]), torch.tensor([n]))
    torch.testing.assert_close(got, torch.tensor([n**0.5], dtype=torch.float64), rtol=1e-12, atol=0)
