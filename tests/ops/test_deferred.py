"""Weight gradients that wait: a backward in two of a linear layer has the bits of a whole one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mpipipe.ops import fused
from mpipipe.ops.deferred import Deferred, Later, Pending
from mpipipe.ops.linear import linear, linear_later, share_casts, torch_linear_later

ATEN = torch.ops.aten.linear.default
SHAPES = ((32,), (64, 32), (1, 32), (64, 1), (0, 32), (5, 7, 32), (1, 1, 32), (2, 3, 300, 32), (4, 257, 96))
OUT = 48


def results(
    op: Callable[..., Tensor], later: Later | None, x: Tensor, weights: list[Tensor],
    rest: tuple[object, ...], bf16: bool, there: bool, in_place: bool = False, turned: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """Of two micro-batches, in two if `later` is given: the result and what x gets; then the weights'.
    there: they begin with a gradient each; turned: the gradient of the result lies so that its last dimension
    is not the innermost."""
    weights = [w.clone().requires_grad_() for w in weights]
    for w in weights if there else ():
        w.grad = torch.ones_like(w)
    share_casts(weights[0])
    found: list[Tensor | None] = []
    for scale in (1.0, 3.0):
        pending, leaf = Pending(), (x * scale).requires_grad_()
        before = [None if w.grad is None else w.grad.clone() for w in weights]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            given = [leaf * 1.0, *weights, *rest]
            call = None if later is None else Deferred(op, tuple(range(1, 1 + len(weights))), later)
            y = op(*given) if call is None else call(pending, *given)
        if in_place:
            y.relu_()
        loss = (y.transpose(0, -1).contiguous() if turned else y).float().sin().sum()
        if later is None:
            loss.backward()
        else:
            loss.backward(inputs=[leaf, pending.trigger])
            for w, b in zip(weights, before, strict=True):
                assert (w.grad is None and b is None) or torch.equal(w.grad, b)  # type: ignore[arg-type]
            pending.run()
        found += [y.detach(), leaf.grad]
    return [*found, *(w.grad for w in weights)]


def check(op: Callable[..., Tensor], later: Later, *given: Any) -> None:
    """Where torch refuses to write into the result, so does it in two."""
    try:
        whole = results(op, None, *given)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:60])):
            results(op, later, *given)
        return
    for a, b in zip(whole, results(op, later, *given), strict=True):
        assert a is not None
        assert b is not None
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["torch", "linear", "own", "transposed", "product"])
def test_the_bits_of_a_whole_backward(kind: str, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=draw), torch.randn(OUT, shape[-1], generator=draw)
    bias = torch.randn(OUT, generator=draw)
    weight = weight.t().contiguous() if kind == "transposed" else weight
    op, late = (ATEN, torch_linear_later) if kind == "torch" else (linear, linear_later)
    rest: tuple[object, ...] = () if kind in ("torch", "linear") else (kind == "transposed", kind == "own")
    if kind == "product":
        op, late, rest = fused.product_of, fused.product_of_later, (False, [*shape[:-1], 4, OUT // 4])
    for biased in (False, True) if kind != "product" else (False,):
        for bf16 in (False, True):
            for there in (False, True):
                weights = [weight, *([bias] if biased else [])]
                absent = (None,) if not biased and kind in ("own", "transposed") else ()
                for in_place in (False, True):
                    given = op, x, weights, (*absent, *rest), bf16, there, in_place
                    check(*given[:1], late, *given[1:])


@pytest.mark.parametrize(("op", "later"), [(ATEN, torch_linear_later), (linear, linear_later)])
def test_frozen_ones_get_none_and_nothing_waits_for_them(op: Callable[..., Tensor], later: Later) -> None:
    x, weight, bias = torch.randn(5, 8).requires_grad_(), torch.randn(3, 8), torch.randn(3).requires_grad_()
    pending, given = Pending(), x * 1.0
    memory = StorageWeakRef(given.untyped_storage())
    y = Deferred(op, (1, 2), later)(pending, given, weight, bias)
    del given
    assert memory.expired()
    y.sum().backward(inputs=[x, pending.trigger])
    assert bias.grad is None
    pending.run()
    assert weight.grad is None
    assert torch.equal(bias.grad, torch.full((3,), 5.0))


@pytest.mark.parametrize(
    ("weight", "bias"),
    [((8,), ()), ((8,), None), ((3, 8), (1, 3)), ((3, 8), (1,)), ((3, 8), ()), ((3, 1), (1,)),
     ((3, 8), (4, 3)), ((3, 8), (4, 1)), ((3, 8), (2, 1, 3)), ((3, 8), (2, 1, 1))],
)  # fmt: skip
def test_vectors_and_biases_that_are_repeated(weight: tuple[int, ...], bias: tuple[int, ...] | None) -> None:
    given = [torch.randn(weight), *([] if bias is None else [torch.randn(bias)])]
    for shape in ((4,), (2, 4), (2, 5, 4), (2, 300, 4), (3, 301)):
        x = torch.randn(*shape, weight[-1])
        if bias is not None and len(bias) > x.dim():
            continue  # the result would have more dimensions than x
        for there, turned in itertools.product((False, True), repeat=2):
            check(ATEN, torch_linear_later, x, given, (), False, there, False, turned)


def test_a_gradient_that_is_lent_stays_as_it_is() -> None:
    lent, weight, bias = torch.ones(1, 3), torch.randn(3, 8), torch.randn(1, 3).requires_grad_()
    for _ in range(2):
        torch_linear_later(lent, None, weight, bias)
    assert torch.equal(bias.grad, torch.full((1, 3), 2.0))  # type: ignore[arg-type]
    assert torch.equal(lent, torch.ones(1, 3))


@pytest.mark.parametrize(("needs_grad", "contiguous"), [(False, True), (True, False)])
def test_others_have_a_graph_of_their_own(needs_grad: bool, contiguous: bool) -> None:
    """Where no backward would come along, or torch makes a copy first."""

    def never(*_: object) -> None:
        raise AssertionError

    x = torch.randn(4, 6, 8).requires_grad_(needs_grad)
    given = x if contiguous else x.transpose(0, 1)
    weight, pending = torch.randn(3, 8).requires_grad_(), Pending()
    y = Deferred(ATEN, (1,), never)(pending, given, weight)
    y.sin().sum().backward(inputs=[*([x] if needs_grad else []), pending.trigger])
    pending.run()
    whole = weight.detach().clone().requires_grad_()
    ATEN(given.detach(), whole).sin().sum().backward()
    assert torch.equal(weight.grad, whole.grad)
