"""Pooling against torch's own, bit by bit: what is equal, what is no number, windows that overlap."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled import instruction_sets, with_threads
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mpipipe.ops import kernels, max_pool2d, native

MODULE = importlib.import_module("mpipipe.ops.max_pool2d")  # of that name mpipipe.ops has the function
pytestmark = pytest.mark.kernels
needs_kernels = pytest.mark.skipif(kernels is None, reason="the compiled kernels are not built")
SPECIAL = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan])


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, odd: float = 0.3) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw)
    some = torch.rand(shape, generator=draw) < odd
    x[some] = SPECIAL[torch.randint(len(SPECIAL), (int(some.sum()),), generator=draw)]
    return x.to(dtype)


def run(pool: Any, x: Tensor, *given: Any) -> list[Tensor]:
    """The result, and the gradient of x; of a NaN nothing but that it is one."""
    x = x.detach().requires_grad_()
    y = pool(x, *given)
    dy = drawn(tuple(y.shape), 1, y.dtype, 0.1).nan_to_num_()
    y.backward(dy)
    assert x.grad is not None
    kind = torch.int32 if x.dtype == torch.float32 else torch.int16
    return [torch.where(t.isnan(), torch.nan, t).view(kind) for t in (y.detach(), x.grad)]


def assert_bits_of_torch(x: Tensor, *given: Any) -> None:
    assert all(map(torch.equal, run(max_pool2d, x, *given), run(F.max_pool2d, x, *given)))


@st.composite
def pools(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Shape, and kernel size, stride, padding, dilation and ceil_mode. A window with dilation and padding may
    have no place on the image, for which torch writes somewhere else."""
    number, size = st.integers(1, 5), st.integers(1, 40)
    kernel = draw(number), draw(number)
    stride = draw(st.one_of(st.none(), number, st.tuples(number, number)))
    dilation, ceil = draw(st.sampled_from([1, 1, 1, 2])), draw(st.booleans())
    padding = tuple(draw(st.integers(0, k // 2 if dilation == 1 else 0)) for k in kernel)
    shape = (*draw(st.sampled_from([(2, 3), (1, 1), (3,)])), draw(size), draw(size))
    return shape, (kernel, stride, padding, dilation, ceil)


@given(pools(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_bits_of_torch(pool: tuple[Any, Any], dtype: torch.dtype, seed: int) -> None:
    shape, given_ = pool
    try:
        F.max_pool2d(torch.zeros(shape), *given_)
    except RuntimeError:  # no window fits
        assume(False)
    assert_bits_of_torch(drawn(shape, seed, dtype), *given_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan, 0.0])
def test_a_window_of_equal_numbers(value: float, dtype: torch.dtype) -> None:
    assert_bits_of_torch(torch.full((1, 2, 7, 9), value, dtype=dtype), 3, 2, 1)


@pytest.mark.parametrize(
    "given_",
    [(2,), (2, 2), (3, 2, 1), ([2],), ([3, 2], [], [1, 0]), ((1, 16), None), (2, 1), (16,), (17,),
     (2, 2, 0, 1, True)],
)  # fmt: skip
def test_ways_to_write_a_window(given_: tuple[Any, ...]) -> None:
    """The last but one has more places than a byte has numbers."""
    for shape in ((2, 3, 18, 19), (3, 18, 20)):
        assert_bits_of_torch(drawn(shape, 3), *given_)


@needs_kernels
@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_backward_keeps_a_byte_of_each_result(mode: Callable[[], Any]) -> None:
    """Without data, too: by that the bytes of a plan are counted."""
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with mode(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = max_pool2d(torch.empty(2, 3, 8, 8, requires_grad=True), 2)
    assert [(t.dtype, t.shape) for t in kept] == [(torch.uint8, y.shape)]


@needs_kernels
def test_without_a_gradient_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = list[int]()
    forward, backward = MODULE._KERNELS["cpu", torch.float32]

    def watched(x: int, y: int, which: int, *rest: Any) -> None:
        addresses.append(which)
        forward(x, y, which, *rest)

    monkeypatch.setitem(MODULE._KERNELS, ("cpu", torch.float32), (watched, backward))
    x = drawn((2, 3, 8, 8), 1, odd=0)
    assert torch.equal(max_pool2d(x, 2), F.max_pool2d(x, 2))
    with torch.no_grad():
        max_pool2d(x.requires_grad_(), 2)
    assert addresses == [0, 0]
    max_pool2d(x, 2)
    assert addresses[2]


def served(x: Tensor, *given_: Any) -> bool:
    """Whether a call keeps a byte a result, not eight."""
    node = max_pool2d(x.requires_grad_(), *given_).grad_fn
    return type(node).__name__ == "_MaxPool2dBackward"


@needs_kernels
def test_what_torch_computes() -> None:
    x = drawn((2, 3, 8, 8), 1)
    assert served(x, 2)
    assert not served(x.double(), 2)
    assert not served(x.to(memory_format=torch.channels_last), 2)
    assert not served(x, 2, 2, 0, 2)
    assert not served(drawn((1, 1, 40, 40), 1), 17)
    one_channel = x[:, :1].contiguous().to(memory_format=torch.channels_last)
    for other in (x.to(memory_format=torch.channels_last), one_channel, x[..., :1, :1]):
        assert max_pool2d(other, 1).stride() == F.max_pool2d(other, 1).stride()


@pytest.mark.parametrize(
    ("shape", "given_"),
    [((2, 3, 8), (2, 2, 2)), ((2, 3, 1, 8), (2,)), ((2, 3, 8, 8), (3, 2, 2)), ((2, 8, 8), (0,)),
     ((2, 8, 8), ((2, 2, 2),)), ((8, 8), (2,)), ((2, 3, 8, 8), (2, 2, 0, 0)), ((2, 0, 8, 8), (2,)),
     ((2, 8, 8), (2, 2, (0, 0, 0))), ((2, 8, 8), (2, 2, ())), ((2, 8, 8), (2, 0)), ((2, 8, 8), (2, (0, 2))),
     ((2, 8, 8), (np.int64(2), np.int64(1))), ((2, 3, 0, 8), (2, 2, 1)), ((2, 8, 8), (2, 2, -1))],
)  # fmt: skip
def test_what_torch_refuses_is_refused_in_its_words(shape: tuple[int, ...], given_: tuple[Any, ...]) -> None:
    found = list[str]()
    for pool in (max_pool2d, F.max_pool2d):
        try:
            pool(torch.zeros(shape), *given_)
            found.append("")
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_instruction_sets_threads_and_having_no_kernel_change_no_bits() -> None:
    x = drawn((3, 41, 33, 30), 5)
    one, *more = with_threads(lambda: run(max_pool2d, x, 3, 2, 1))
    native.use_kernels(False)
    try:
        more.append(run(max_pool2d, x, 3, 2, 1))
    finally:
        native.use_kernels(True)
    assert all(all(map(torch.equal, one, other)) for other in more)
    sizes = MODULE._sizes((33, 30), 3, 2, 1, 1, False)
    for built in instruction_sets() if kernels is not None else ():
        y, which = torch.empty(3, 41, 17, 15), torch.empty(3, 41, 17, 15, dtype=torch.uint8)
        built.max_pool2d_f32(x.data_ptr(), y.data_ptr(), which.data_ptr(), 123, sizes, 1)
        dx, dy = torch.empty_like(x), drawn(tuple(y.shape), 1, y.dtype, 0.1).nan_to_num_()
        built.max_pool2d_backward_f32(dy.data_ptr(), which.data_ptr(), dx.data_ptr(), 123, sizes, 1)
        found = [torch.where(t.isnan(), torch.nan, t).view(torch.int32) for t in (y, dx)]
        assert all(map(torch.equal, one, found))


@needs_kernels
def test_registered_operators_are_as_torch_wants_them() -> None:
    x = torch.randn(2, 3, 8, 9, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.mpipipe.max_pool2d, (x, [3, 2], [2, 2], [1, 0], True), test_utils=tests)


@needs_kernels
def test_by_its_name_it_takes_no_window_that_leaves_the_image() -> None:
    x = torch.randn(2, 3, 8, 9)
    for window in ([9, 2], [2, 2], [0, 0]), ([2, 2], [2, 2], [2, 0]), ([17, 17], [1, 1], [8, 8]):
        with pytest.raises(ValueError, match=r"max_pool2d of \(2, 3, 8, 9\) by .*the kernel takes"):
            torch.ops.mpipipe.max_pool2d(x, *window, False)
    dy, which = torch.ones(2, 3, 5, 4), torch.zeros(2, 3, 5, 4, dtype=torch.uint8)
    backward = torch.ops.mpipipe.max_pool2d_backward
    with pytest.raises(ValueError, match="dy has shape"):
        backward(dy, which, 8, 9, [2, 2], [2, 2], [0, 0], False)
    with pytest.raises(ValueError, match=r"which is torch\.int64; it must be torch\.uint8"):
        backward(dy, which.long(), 9, 8, [3, 2], [2, 2], [1, 0], False)
    dx = backward(dy, which, 9, 8, [3, 2], [2, 2], [1, 0], False)
    assert dx.sum() == dy[..., 1:, :].sum(), "of the first row the first place is padding"
