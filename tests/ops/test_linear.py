"""linear against torch's, and that its weight's gradient is added where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mpipipe.ops.linear import linear


def given(dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (torch.randn(s, generator=draw) for s in ((3, 5, 7), (4, 7), (4,), (3, 5, 4)))
    weight = weight.t().contiguous() if transposed else weight
    return x.to(dtype), weight.to(dtype), bias.to(dtype), grad.to(dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_gradients_are_torch_s(transposed: bool, there: bool, biased: bool) -> None:
    x, weight, bias, grad = given(torch.float64, transposed)
    tensors = [x, weight, *([bias] if biased else [])]
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.clone().requires_grad_() for t in tensors]
    sums = torch.ones_like(weight)
    if there:
        ours[1].grad, theirs[1].grad = sums, torch.ones_like(weight)
    y = linear(*ours[:2], ours[2] if biased else None, transposed)
    wanted = functional.linear(theirs[0], theirs[1].t() if transposed else theirs[1], *theirs[2:])
    assert torch.equal(y, wanted)
    y.backward(grad)
    wanted.backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert (ours[1].grad is sums) == there


def test_a_weight_used_twice_gets_both_gradients() -> None:
    x, weight, _, grad = given(torch.float64, False)
    for there in (False, True):
        w = weight.clone().requires_grad_()
        w.grad = torch.zeros_like(w) if there else None
        (linear(x, w) + functional.linear(x, w) + linear(x, w)).backward(grad)
        torch.testing.assert_close(w.grad, 3 * torch.einsum("bto,bti->oi", grad, x))


def test_under_autocast_the_products_are_in_its_dtype_and_the_sum_is_not() -> None:
    x, weight, bias, _ = given(torch.float32, False)
    w = weight.requires_grad_()
    w.grad = torch.zeros_like(w)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, bias)
        assert torch.equal(y, functional.linear(x, w, bias))
    y.sum().backward()
    assert w.grad.dtype == torch.float32
    torch.testing.assert_close(w.grad, x.sum((0, 1)).expand(4, 7), rtol=2e-2, atol=2e-2)


def test_gradients_by_differences() -> None:
    x, weight, bias, _ = given(torch.float64, False)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(linear, tensors)


def test_shapes_that_do_not_fit_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError):
        linear(torch.ones(2, 3), torch.ones(4, 5))
