"""What has a first derivative, a second one, or none."""

import pytest
import torch

from mpipipe.ops import (
    batch_norm,
    bias_gelu,
    dropout,
    embedding,
    flash_attention,
    gemm,
    kernels,
    layer_norm,
    linear_cross_entropy,
    max_pool2d,
    rms_norm,
    swiglu,
)
from mpipipe.ops.gemm import add_gemm

pytestmark = pytest.mark.kernels
needs_kernels = pytest.mark.skipif(kernels is None, reason="the compiled kernels are not built")
LABELS = torch.tensor([1, 0, 3, 2])
registered = torch.ops.mpipipe

ONCE = {  # name -> a function of x (4, 8)
    "batch_norm": lambda x: batch_norm(x)[0],
    "bias_gelu": lambda x: bias_gelu(x, x[0]),
    "flash_attention": lambda x: flash_attention(*[x.view(1, 2, 4, 4)] * 3),
    "layer_norm": lambda x: layer_norm(x, residual=x)[0] ** 3,
    "linear_cross_entropy": lambda x: linear_cross_entropy(x, x, LABELS),
    "max_pool2d": lambda x: max_pool2d(x.view(1, 4, 8), 2),
    "rms_norm": rms_norm,
    "swiglu": lambda x: swiglu(x, x),
    "registered bias_gelu": lambda x: registered.bias_gelu(x, x[0], False),
    "registered linear_cross_entropy": lambda x: registered.linear_cross_entropy(
        x, x, LABELS, None, -100, 0.0, False
    )[0],
    "registered swiglu": lambda x: registered.swiglu(x, x),
}


@needs_kernels
@pytest.mark.parametrize("function", ONCE.values(), ids=ONCE)
def test_a_graph_of_gradients_is_refused(function) -> None:
    """Also of a sum, whose own gradient has none, and where x reaches the result another way: torch's mark
    leaves such terms out without a word."""
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(function(x).sum() + x.sum(), x, create_graph=True)
    (first,) = torch.autograd.grad(function(x).sum(), x)
    assert not first.requires_grad


TWICE = {  # name -> ours and torch's
    "dropout": (lambda x: dropout(x, 0.5, 7, 0, 0), lambda x: x * (dropout(torch.ones(4, 8), 0.5, 7, 0, 0))),
    "embedding": (lambda x: embedding(LABELS, x), lambda x: torch.nn.functional.embedding(LABELS, x)),
}


@pytest.mark.parametrize(("ours", "plain"), TWICE.values(), ids=TWICE)
def test_what_is_linear_has_a_second_derivative(ours, plain) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for function in (ours, plain):
        (first,) = torch.autograd.grad((function(x) ** 3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert found[0].any()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_refuse_to_be_cut_from_a_graph(dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 4, dtype=dtype, requires_grad=True), torch.randn(4, 2, dtype=dtype)
    total = torch.zeros(3, 2, dtype=dtype)
    for call in (lambda: gemm(a, b), lambda: add_gemm(total, a, b)):
        with pytest.raises(ValueError, match=r"no derivative.*take torch\.mm"):
            call()
        with torch.no_grad():
            call()
    assert torch.equal(total, gemm(a.detach(), b))
