"""Tensors beyond 2^31 numbers, or as many bytes: an index of 32 bits would go wrong.

Where rows are computed alone, the last ones have the bits that they have without the others. Most of what is
read is zeros that nobody wrote, which take no memory. Of attention, BatchNorm and dropout the forward pass is
here: gradients of that size would take twice the memory. The four buffers of `adamw` have 2^31 bytes each.
Those of `accumulate`, `norms` and `philox_words` are in their files.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpipipe.cluster.node import memory_available_bytes
from mpipipe.ops import adamw, dropout, flash_attention
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.cross_entropy import KERNELS
from mpipipe.ops.embedding import add_row_sums
from mpipipe.ops.gemm import add_gemm, gemm
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.native import workers
from mpipipe.ops.philox import philox_words
from mpipipe.ops.swiglu import swiglu

WIDTH = 1024
ROWS = (1 << 31) // WIDTH + 5
LAST = slice(-3, None)
pytestmark = [pytest.mark.full, pytest.mark.kernels]


@pytest.fixture(autouse=True)
def memory() -> None:
    """What the largest of them takes."""
    free = memory_available_bytes(os.environ) >> 30
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
    """The last ones stay where their words of the stream say so."""
    n, last = (1 << 31) + 1000, 100_000
    kept = dropout(torch.ones(n, dtype=torch.bfloat16), 0.25, 1, 2, 3)[-last:] != 0
    words = torch.from_numpy(philox_words(1, 2, 3, last, start=n - last).astype("int64"))
    assert torch.equal(kept, words >= 1 << 30)


def test_batch_norm() -> None:
    """The last image is the first one times -1, and so is its result; those between are zeros."""
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
    exact = a[LAST].double() @ b.double().t()
    found = gemm(a, b.t())
    torch.testing.assert_close(found[LAST].double(), exact, rtol=1e-6, atol=1e-6)
    add_gemm(found, a, b.t())
    torch.testing.assert_close(found[LAST].double(), 2 * exact, rtol=1e-6, atol=1e-6)


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


def test_cross_entropy() -> None:
    """Loss and gradient of logits in bfloat16, as no tile of `linear_cross_entropy` has so many."""
    forward, backward, of_loss = KERNELS["cpu", torch.bfloat16]
    last, threads, found = torch.randn(3, WIDTH).bfloat16(), workers(WEIGHT), []
    for logits in (last.clone(), zeros_but(last)):
        rows = len(logits)
        labels = torch.full((rows,), -100)
        labels[LAST] = torch.tensor([WIDTH - 1, 0, 7])
        state, log_sum, loss = torch.empty(rows, 4).double(), torch.empty(rows), torch.empty(())
        tile = logits.data_ptr(), rows, WIDTH, 0, labels.data_ptr(), 0, -100
        forward(*tile, state.data_ptr(), *threads)
        ends = log_sum.data_ptr(), loss.data_ptr()
        assert of_loss(state.data_ptr(), rows, labels.data_ptr(), WIDTH, -100, 0.0, *ends, *threads)
        backward(*tile, log_sum.data_ptr(), 1.0, 0.0, 1.0, *threads)
        found.append([loss, log_sum[LAST], logits[LAST].clone()])
    assert all(map(torch.equal, *found))
    assert not logits[:-3].any()
