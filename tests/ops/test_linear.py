"""linear against torch's, and that its weight's gradient is added where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mpipipe.ops.linear import casts_of, linear, share_casts


def given(dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (torch.randn(s, generator=draw) for s in ((3, 5, 7), (4, 7), (4,), (3, 5, 4)))
    weight = weight.t().contiguous() if transposed else weight
    return x.to(dtype), weight.to(dtype), bias.to(dtype), grad.to(dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_the_gradients_are_torch_s(transposed: bool, there: bool, biased: bool, own: bool) -> None:
    x, weight, bias, grad = given(torch.float32 if own else torch.float64, transposed)
    tensors = [x, weight, *([bias] if biased else [])]
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.clone().requires_grad_() for t in tensors]
    sums = torch.ones_like(weight)
    if there:
        ours[1].grad, theirs[1].grad = sums, torch.ones_like(weight)
    y = linear(*ours[:2], ours[2] if biased else None, transposed, own)
    wanted = functional.linear(theirs[0], theirs[1].t() if transposed else theirs[1], *theirs[2:])
    torch.testing.assert_close(y, wanted)
    assert own or torch.equal(y, wanted)
    y.backward(grad)
    wanted.backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert (ours[1].grad is sums) == there


@pytest.mark.parametrize("shape", [(7,), (0, 7), (2, 0, 7), (5, 7), (2, 3, 7)])
def test_products_of_our_own_take_any_shape(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(4, 7, generator=draw), torch.randn(4, generator=draw)
    x = torch.randn(shape, generator=draw).requires_grad_()
    y = linear(x, weight, bias, own=True)
    torch.testing.assert_close(y, functional.linear(x, weight, bias))
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(shape))


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


@pytest.mark.parametrize("transposed", [False, True])
def test_products_share_one_copy_of_a_weight_with_the_same_bits(transposed: bool) -> None:
    x, weight, bias, grad = given(torch.float32, transposed)
    results = []
    for shared in (True, False):
        w = weight.clone().requires_grad_()
        w.grad = torch.zeros_like(w)
        if shared:
            share_casts(w)
        with torch.autocast("cpu", torch.bfloat16):
            y = [linear(x + i, w, bias, transposed) for i in range(3)]
        assert len({each.grad_fn.saved_tensors[1].data_ptr() for each in y}) == (1 if shared else 3)
        assert len(casts_of(w)) == shared
        for each in y:
            each.backward(grad.to(each.dtype))
        results.append([w.grad, *y])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_copy_that_is_forgotten_is_made_anew() -> None:
    x, weight, _, _ = given(torch.float32, False)
    w = weight.requires_grad_()
    casts = share_casts(w)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, w)
        with torch.no_grad():
            w += 1.0
        casts.forget()
        assert torch.equal(linear(x, w), functional.linear(x, w))


def test_without_asking_no_copy_outlives_its_product() -> None:
    """However the weight is written."""
    x, weight, _, _ = given(torch.float32, False)
    w = weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, w)
        w.data.numpy()[:] = 1.0
        assert torch.equal(linear(x, w), functional.linear(x, w))
    assert casts_of(w) == []


def test_nothing_is_kept_without_gradients_or_in_the_weight_s_own_dtype() -> None:
    x, weight, _, _ = given(torch.float32, False)
    w = weight.requires_grad_()
    share_casts(w)
    linear(x, w)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        linear(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x.bfloat16(), w.detach().bfloat16())
    assert casts_of(w) == []


def test_gradients_by_differences() -> None:
    x, weight, bias, _ = given(torch.float64, False)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(linear, tensors)


def test_shapes_that_do_not_fit_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError):
        linear(torch.ones(2, 3), torch.ones(4, 5))
