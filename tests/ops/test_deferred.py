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
from mpipipe.ops.convolution import conv_later, conv_transpose_later, of_a_batch
from mpipipe.ops.deferred import Deferred, Later, Pending
from mpipipe.ops.linear import linear, linear_later, of_a_matrix, share_casts, torch_linear_later

ATEN = torch.ops.aten.linear.default
TORCH = Later(of_a_matrix, torch_linear_later)
OURS = Later(of_a_matrix, linear_later)
PRODUCT = Later(of_a_matrix, fused.product_of_later)
CONV, CONV_TRANSPOSE = Later(of_a_batch, conv_later), Later(of_a_batch, conv_transpose_later)
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


def steps(t: Tensor) -> list[int]:
    """How it lies in memory; along a dimension of one it lies in any way."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1 and t.numel()]


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
        assert (a.dtype, steps(a)) == (b.dtype, steps(b))
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["torch", "linear", "own", "transposed", "product"])
def test_the_bits_of_a_whole_backward(kind: str, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=draw), torch.randn(OUT, shape[-1], generator=draw)
    bias = torch.randn(OUT, generator=draw)
    weight = weight.t().contiguous() if kind == "transposed" else weight
    op, late = (ATEN, TORCH) if kind == "torch" else (linear, OURS)
    rest: tuple[object, ...] = () if kind in ("torch", "linear") else (kind == "transposed", kind == "own")
    if kind == "product":
        op, late, rest = fused.product_of, PRODUCT, (False, [*shape[:-1], 4, OUT // 4])
    for biased in (False, True) if kind != "product" else (False,):
        for bf16 in (False, True):
            for there in (False, True):
                weights = [weight, *([bias] if biased else [])]
                absent = (None,) if not biased and kind in ("own", "transposed") else ()
                for in_place in (False, True):
                    given = op, x, weights, (*absent, *rest), bf16, there, in_place
                    check(*given[:1], late, *given[1:])


@pytest.mark.parametrize(("op", "later"), [(ATEN, TORCH), (linear, OURS)])
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
            check(ATEN, TORCH, x, given, (), False, there, False, turned)


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
    y = Deferred(ATEN, (1,), Later(of_a_matrix, never))(pending, given, weight)
    y.sin().sum().backward(inputs=[*([x] if needs_grad else []), pending.trigger])
    pending.run()
    whole = weight.detach().clone().requires_grad_()
    ATEN(given.detach(), whole).sin().sum().backward()
    assert torch.equal(weight.grad, whole.grad)


CONVOLUTIONS: list[tuple[Any, Later, tuple[int, ...], tuple[int, ...], tuple[object, ...]]] = [
    (torch.ops.aten.conv1d.default, CONV, (3, 4, 17), (6, 4, 3), ()),
    (torch.ops.aten.conv1d.default, CONV, (3, 4, 17), (6, 2, 3), ([2], [1], [2], 2)),
    (torch.ops.aten.conv2d.default, CONV, (3, 16, 12, 12), (32, 16, 3, 3), ([1], [1])),
    (torch.ops.aten.conv2d.default, CONV, (3, 16, 12, 9), (32, 16, 1, 1), ([2, 1],)),
    (torch.ops.aten.conv2d.default, CONV, (2, 8, 12, 9), (16, 1, 3, 2), ([1, 2], [2, 1], [1, 1], 8)),
    (torch.ops.aten.conv2d.default, CONV, (0, 4, 6, 6), (8, 4, 3, 3), ()),
    (torch.ops.aten.conv3d.default, CONV, (2, 4, 5, 6, 7), (6, 2, 3, 2, 1), ([1], [1, 0, 1], [1], 2)),
    (torch.ops.aten.conv_transpose1d.default, CONV_TRANSPOSE, (3, 4, 9), (4, 6, 3), ([2], [1], [1])),
    (torch.ops.aten.conv_transpose2d.input, CONV_TRANSPOSE, (2, 8, 6, 5), (8, 3, 3, 2), ([2], [0], [1], 2)),
    (torch.ops.aten.conv_transpose2d.input, CONV_TRANSPOSE, (2, 8, 6, 5), (8, 6, 3, 3), ()),
    (torch.ops.aten.conv_transpose3d.input, CONV_TRANSPOSE, (2, 4, 3, 4, 5), (4, 6, 2, 2, 2),
     ([1], [0], [0], 1, [2])),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("op", "later", "shape", "kernel", "rest"), CONVOLUTIONS)
def test_convolutions_have_the_bits_of_a_whole_backward(
    op: Callable[..., Tensor], later: Later, shape: tuple[int, ...], kernel: tuple[int, ...],
    rest: tuple[object, ...],
) -> None:  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=draw), torch.randn(kernel, generator=draw)
    groups = rest[3] if len(rest) > 3 else 1
    assert isinstance(groups, int)
    bias = torch.randn(kernel[1] * groups if later is CONV_TRANSPOSE else kernel[0], generator=draw)
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    calls: list[bool] = []

    def serves(*given: Tensor) -> bool:
        calls.append(later.serves(*given))
        return calls[-1]

    counted = later._replace(serves=serves)
    turned = [] if channels_last is None else [
        (x.contiguous(memory_format=channels_last), weight),
        (x, weight.contiguous(memory_format=channels_last)),
    ]  # fmt: skip
    for given, kernels in [(x, weight), (x.transpose(0, 1).contiguous().transpose(0, 1), weight), *turned]:
        for weights, others in (([kernels, bias], rest), ([kernels], (None, *rest))):
            for bf16, there, in_place in itertools.product((False, True), repeat=3):
                check(op, counted, given, weights, others, bf16, there, in_place)
    assert calls
    assert all(calls), "none has a graph of its own"


def test_what_torch_does_not_convolve_as_it_is_has_a_graph_of_its_own() -> None:
    """A single sample, complex numbers, and a frozen kernel whose bias learns."""

    def never(*_: object) -> None:
        raise AssertionError

    for dtype, shape, frozen in (
        (torch.float32, (4, 9, 9), False), (torch.complex64, (2, 4, 9, 9), False),
        (torch.float32, (2, 4, 9, 9), True),
    ):  # fmt: skip
        pending, x = Pending(), torch.randn(shape, dtype=dtype).requires_grad_()
        weight, bias = torch.randn(6, 4, 3, 3, dtype=dtype), torch.randn(6, dtype=dtype)
        leaves = [weight.clone().requires_grad_(not frozen), bias.clone().requires_grad_()]
        conv = torch.ops.aten.conv2d.default
        y = Deferred(conv, (1, 2), Later(of_a_batch, never))(pending, x * 1.0, *leaves)
        y.abs().sum().backward(inputs=[x, pending.trigger])
        pending.run()
        whole = [weight.clone().requires_grad_(not frozen), bias.clone().requires_grad_()]
        conv(x.detach(), *whole).abs().sum().backward()
        for a, b in zip(leaves, whole, strict=True):
            assert a.grad is b.grad is None or torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_a_product_of_complex_numbers_has_the_gradient_of_a_whole_backward() -> None:
    pending, x = Pending(), torch.randn(4, 6, dtype=torch.complex64).requires_grad_()
    weight = torch.randn(3, 6, dtype=torch.complex64).requires_grad_()
    y = Deferred(ATEN, (1,), TORCH)(pending, x * 1.0, weight)
    y.abs().sum().backward(inputs=[x, pending.trigger])
    pending.run()
    whole = weight.detach().clone().requires_grad_()
    ATEN(x.detach(), whole).abs().sum().backward()
    assert torch.equal(weight.grad, whole.grad)
