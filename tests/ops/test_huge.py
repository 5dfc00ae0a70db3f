"""Tensors beyond 2^31 numbers, or as many bytes: an index of 32 bits would go wrong.

Where rows are computed alone, the last ones have the bits that they have without the others. Most of what is
read is zeros that nobody wrote, which take no memory. Those of `accumulate` and `norms` are in their files.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpipipe.ops import adamw, dropout, flash_attention
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.embedding import add_row_sums
from mpipipe.ops.gemm import gemm
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.linear_cross_entropy import linear_cross_entropy
from mpipipe.ops.swiglu import swiglu

WIDTH = 1024
ROWS = (1 << 31) // WIDTH + 5
LAST = slice(-3, None)
pytestmark = [pytest.mark.full, pytest.mark.kernels]


@pytest.fixture(autouse=True)
def memory() -> None:
    """What the largest of them takes."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    if free < 14:
        pytest.skip(f"14 GiB of free memory are needed, there are {free}")


def zeros_but(last: Tensor) -> Tensor:
    """(ROWS, WIDTH), with these rows at the end."""
    x = torch.zeros(ROWS, WIDTH, dtype=last.dtype)
    x[LAST] = last
    return x


WEIGHT, BIAS = torch.randn(WIDTH), torch.randn(WIDTH)
OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: layer_norm(x, WEIGHT.bfloat16(), BIAS.bfloat16()),
    "rms_norm": lambda x: rms_norm(x, WEIGHT.bfloat16()),
    "bias_gelu": lambda x: bias_gelu(x, BIAS.bfloat16()),
    "swiglu": lambda x: swiglu(x, x),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_operators_of_rows(name: str) -> None:
    last, dy = (torch.randn(3, WIDTH).bfloat16() for _ in range(2))
    found = []
    for x, grad in ((last, dy), (zeros_but(last), zeros_but(dy))):
        x.requires_grad_()
        y = OF_ROWS[name](x)
        end = y[LAST].detach().clone()
        node = y.grad_fn
        del y  # 4 GiB
        assert node is not None
        torch.autograd.backward([torch.autograd.graph.GradientEdge(node, 0)], [grad])
        assert x.grad is not None
        found.append((end, x.grad[LAST].clone()))
    assert all(map(torch.equal, *found))


def test_dropout() -> None:
    """Of ones: as many of the last hundred thousand stay as should."""
    x = torch.ones((1 << 31) + 1000, dtype=torch.bfloat16)
    kept = dropout(x, 0.25, 1, 2, 3)[-100_000:] != 0
    assert abs(kept.float().mean() - 0.75) < 0.01


def test_batch_norm() -> None:
    """Of the second of two images, which is the first one times -1."""
    half = torch.zeros(2, 1024, 1024, dtype=torch.bfloat16)
    half[:, -1, -3:] = 8.0
    x = torch.zeros(1025, 2, 1024, 1024, dtype=torch.bfloat16)
    x[0], x[-1] = half, -half
    y = batch_norm(x, torch.ones(2), torch.zeros(2))[0]
    torch.testing.assert_close(y[-1], -y[0])
    assert y[-1].count_nonzero() == 6


def test_attention() -> None:
    """2^31 numbers of queries and of the result; the keys are there once."""
    n = (1 << 31) // 64 + 3
    query, last = torch.zeros(1, 1, n, 64, dtype=torch.bfloat16), torch.randn(1, 1, 3, 64).bfloat16()
    key, value = torch.randn(2, 1, 1, 2, 64).bfloat16()
    query[:, :, LAST] = last
    found = flash_attention(query, key, value)[:, :, LAST]
    exact = (t.double() for t in (last, key, value))
    want = torch.nn.functional.scaled_dot_product_attention(*exact)
    torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=2e-2)


def test_gemm() -> None:
    a, b = torch.randn(ROWS, 2), torch.randn(WIDTH, 2)
    found = gemm(a, b.t())
    torch.testing.assert_close(found[LAST].double(), a[LAST].double() @ b.double().t(), rtol=1e-6, atol=1e-6)


def test_embedding() -> None:
    grad, dy = torch.zeros(ROWS, WIDTH), torch.randn(3, WIDTH)
    add_row_sums(grad, torch.tensor([ROWS - 1, 0, ROWS - 1]), dy)
    assert torch.equal(grad[-1], dy[0] + dy[2])
    assert torch.equal(grad[0], dy[1])
    assert not grad[-2].any()


def test_adamw() -> None:
    """2.1 GB of each: a number of the last part as it is alone."""
    n, found = (1 << 29) + 1000, []
    for size in (7, n):
        buffers = [torch.zeros(size) for _ in range(4)]
        for i, buffer in enumerate(buffers):
            buffer[-7:] = torch.arange(1.0, 8.0) + i
        adamw(*buffers, step=5, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        found.append([buffer[-7:].clone() for buffer in buffers])
    assert all(map(torch.equal, *found))


def test_linear_cross_entropy() -> None:
    """A weight of 2^31 numbers in bfloat16, whose last rows are the labels."""
    weight = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    weight[LAST], x = torch.randn(3, WIDTH).bfloat16(), torch.randn(2, WIDTH).bfloat16()
    labels = torch.tensor([ROWS - 1, ROWS - 2])
    logits = x.double() @ weight[LAST].double().t()
    rest = torch.full((2, 1), ROWS - 3.0, dtype=torch.float64).log()
    sums = torch.cat([logits, rest], 1).logsumexp(1)
    want = (sums - torch.stack([logits[0, 2], logits[1, 1]])).sum()
    with torch.no_grad():
        found = linear_cross_entropy(x, weight, labels)
    torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=0)
