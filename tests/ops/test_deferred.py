"""Weight gradients that wait: a backward in two has the bits of a whole one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mpipipe.graph.split import LATERS
from mpipipe.ops import fused
from mpipipe.ops.deferred import Deferred, Later, Pending
from mpipipe.ops.gradients import add_to
from mpipipe.ops.linear import linear, share_casts, torch_linear_later

ATEN, CONV = torch.ops.aten.linear.default, torch.ops.aten.conv2d.default
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


def check(op: Callable[..., Tensor], *given: Any, may_refuse: bool = False, calls: int = 2) -> None:
    """may_refuse: torch may refuse it, such as to write into the result; so does it in two then.
    calls: how often a weight gradient is made without a graph of its own."""
    seen = list[Tensor]()

    def add(grad: Tensor, *args: Any, **kwargs: Any) -> None:
        seen.append(grad)
        LATERS[op].add(grad, *args, **kwargs)

    later = LATERS[op]._replace(add=add)
    try:
        whole = results(op, None, *given)
    except RuntimeError as error:
        if not may_refuse:
            raise
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:60])):
            results(op, later, *given)
        return
    for a, b in zip(whole, results(op, later, *given), strict=True):
        assert a is not None
        assert b is not None
        assert (a.dtype, steps(a)) == (b.dtype, steps(b))
        assert torch.equal(a, b)
    assert len(seen) == calls


def steps(t: Tensor) -> list[int]:
    """How it lies in memory; along a dimension of one it lies in any way."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1 and t.numel()]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["torch", "linear", "own", "transposed", "product"])
def test_the_bits_of_a_whole_backward(kind: str, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=draw), torch.randn(OUT, shape[-1], generator=draw)
    bias = torch.randn(OUT, generator=draw)
    weight = weight.t().contiguous() if kind == "transposed" else weight
    op = ATEN if kind == "torch" else linear
    rest: tuple[object, ...] = () if kind in ("torch", "linear") else (kind == "transposed", kind == "own")
    if kind == "product":
        op, rest = fused.product_of, (False, [*shape[:-1], 4, OUT // 4])
    for biased in (False, True) if kind != "product" else (False,):
        for bf16 in (False, True):
            for there in (False, True):
                weights = [weight, *([bias] if biased else [])]
                absent = (None,) if not biased and kind in ("own", "transposed") else ()
                for in_place in (False, True):
                    check(op, x, weights, (*absent, *rest), bf16, there, in_place, may_refuse=in_place)


@pytest.mark.parametrize("op", [ATEN, linear])
def test_frozen_ones_get_none_and_nothing_waits_for_them(op: Callable[..., Tensor]) -> None:
    x, weight, bias = torch.randn(5, 8).requires_grad_(), torch.randn(3, 8), torch.randn(3).requires_grad_()
    pending, given = Pending(), x * 1.0
    memory = StorageWeakRef(given.untyped_storage())
    y = Deferred(op, (1, 2), LATERS[op])(pending, given, weight, bias)
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
            calls = 2 if len(weight) == 2 else 0
            check(ATEN, x, given, (), False, there, False, turned, may_refuse=True, calls=calls)


def test_a_gradient_that_is_lent_stays_as_it_is() -> None:
    lent, weight, bias = torch.ones(1, 3), torch.randn(3, 8), torch.randn(1, 3).requires_grad_()
    for _ in range(2):
        torch_linear_later(lent, None, weight, bias)
    assert torch.equal(bias.grad, torch.full((1, 3), 2.0))  # type: ignore[arg-type]
    assert torch.equal(lent, torch.ones(1, 3))


CONVOLUTIONS: list[tuple[Any, tuple[int, ...], tuple[int, ...], tuple[object, ...]]] = [
    (torch.ops.aten.conv1d.default, (3, 4, 17), (6, 4, 3), ()),
    (torch.ops.aten.conv1d.default, (3, 4, 17), (6, 2, 3), ([2], [1], [2], 2)),
    (CONV, (3, 16, 12, 12), (32, 16, 3, 3), ([1], [1])),
    (CONV, (3, 16, 12, 9), (32, 16, 1, 1), ([2, 1],)),
    (CONV, (2, 8, 12, 9), (16, 1, 3, 2), ([1, 2], [2, 1], [1, 1], 8)),
    (CONV, (0, 4, 6, 6), (8, 4, 3, 3), ()),
    (torch.ops.aten.conv3d.default, (2, 4, 5, 6, 7), (6, 2, 3, 2, 1), ([1], [1, 0, 1], [1], 2)),
    (torch.ops.aten.conv_transpose1d.default, (3, 4, 9), (4, 6, 3), ([2], [1], [1])),
    (torch.ops.aten.conv_transpose2d.input, (2, 8, 6, 5), (8, 3, 3, 2), ([2], [0], [1], 2)),
    (torch.ops.aten.conv_transpose2d.input, (2, 8, 6, 5), (8, 6, 3, 3), ()),
    (torch.ops.aten.conv_transpose3d.input, (2, 4, 3, 4, 5), (4, 6, 2, 2, 2), ([1], [0], [0], 1, [2])),
]


@pytest.mark.parametrize("op", [op for op in LATERS if isinstance(op, torch._ops.OpOverload)])
def test_they_take_what_the_operator_takes(op: torch._ops.OpOverload) -> None:
    """By place and by name; a convolution is a transposed one where it is given more."""
    taken = list(signature(LATERS[op].add).parameters)[2:]
    names = [argument.name for argument in op._schema.arguments[1:]]
    assert taken == names or taken == [*names, "output_padding"]
    assert op is ATEN or op in {case[0] for case in CONVOLUTIONS}


@pytest.mark.slow
@pytest.mark.parametrize(("op", "shape", "kernel", "rest"), CONVOLUTIONS)
def test_convolutions(
    op: Callable[..., Tensor], shape: tuple[int, ...], kernel: tuple[int, ...], rest: tuple[object, ...]
) -> None:
    """However input and kernel lie in memory."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=draw), torch.randn(kernel, generator=draw)
    channels = op(x, weight, None, *rest).shape[1]
    bias, last = torch.randn(channels, generator=draw), {4: torch.channels_last, 5: torch.channels_last_3d}
    laid = [(x, weight), (x.transpose(0, 1).contiguous().transpose(0, 1), weight)]
    if x.dim() in last:
        x_last, weight_last = (t.contiguous(memory_format=last[x.dim()]) for t in (x, weight))
        laid += [(x_last, weight), (x, weight_last), (x_last, weight_last)]
    for given, kernels in laid:
        for weights, others in (([kernels, bias], rest), ([kernels], (None, *rest))):
            for flags in itertools.product((False, True), repeat=4):
                check(op, given, weights, others, *flags)


def gradients(
    op: Callable[..., Tensor], later: Later | None, given: list[Tensor], **more: object
) -> list[Tensor | None]:
    """Of an input, a weight and perhaps a bias, by the sum of the result; in two if `later` is given."""
    given = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    pending, weights = Pending(), tuple(range(1, len(given)))
    y = op(*given, **more) if later is None else Deferred(op, weights, later)(pending, *given, **more)
    loss = (torch.view_as_real(y) if y.is_complex() else y).sum()
    loss.backward(
        inputs=None if later is None else [*(t for t in given[:1] if t.requires_grad), pending.trigger]
    )
    pending.run()
    return [t.grad for t in given]


def drawn(
    *shapes: tuple[int, ...], frozen: int | None = None, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_(i != frozen) for i, shape in enumerate(shapes)]


def alike(found: list[Tensor | None], whole: list[Tensor | None]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(found, whole, strict=True))  # type: ignore[arg-type]


OTHERS = {
    "an input without a gradient": (ATEN, drawn((4, 6, 8), (3, 8), frozen=0)),
    "an input with gaps": (ATEN, [drawn((4, 6, 8))[0].transpose(0, 1), *drawn((3, 8))]),
    "a product of complex numbers": (ATEN, drawn((4, 8), (3, 8), dtype=torch.complex64)),
    "a convolution of complex numbers": (CONV, drawn((2, 4, 9, 9), (6, 4, 3, 3), dtype=torch.complex64)),
    "a convolution of one sample": (CONV, drawn((4, 9, 9), (6, 4, 3, 3), (6,))),
    "a frozen kernel, whose bias learns": (CONV, drawn((2, 4, 9, 9), (6, 4, 3, 3), (6,), frozen=1)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_have_a_graph_of_their_own(case: str) -> None:
    """Where no backward would come along, or torch does something else before."""

    def never(*_: object) -> None:
        raise AssertionError

    op, given = OTHERS[case]
    assert alike(gradients(op, LATERS[op]._replace(add=never), given), gradients(op, None, given))


@pytest.mark.parametrize("frozen", [None, 2])
def test_a_convolution_with_arguments_by_name_whose_gradient_is_expanded(frozen: int | None) -> None:
    given, named = drawn((2, 4, 9, 9), (6, 2, 3, 3), (6,), frozen=frozen), {"stride": [2], "groups": 2}
    assert alike(gradients(CONV, LATERS[CONV], given, **named), gradients(CONV, None, given, **named))


def test_a_gradient_is_rounded_to_the_dtype_of_its_leaf_before_it_is_added() -> None:
    """Of a weight in float16 that a product takes in bfloat16: what does not fit in it is infinite."""
    gradient, found = torch.tensor([1e5, 3.0], dtype=torch.bfloat16), []
    for whole in (True, False):
        leaf = torch.ones(2, dtype=torch.float16, requires_grad=True)
        leaf.grad = torch.full((2,), -5e4, dtype=torch.float16)
        if whole:
            leaf.to(torch.bfloat16).backward(gradient)
        else:
            with torch.no_grad():
                add_to(leaf, gradient)
        found.append(leaf.grad)
    assert torch.equal(*found)
    assert found[0].isinf().tolist() == [True, False]


@pytest.mark.parametrize(("op", "x", "weight"), [(ATEN, (9, 8), (5, 8)), (CONV, (2, 4, 9, 9), (6, 4, 3, 3))])
def test_an_input_that_is_written_meanwhile_is_refused(
    op: Callable[..., Tensor], x: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    pending, leaf = Pending(), torch.randn(x).requires_grad_()
    given = leaf * 1.0
    y = Deferred(op, (1,), LATERS[op])(pending, given, torch.randn(weight).requires_grad_())
    given.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward(inputs=[leaf, pending.trigger])
