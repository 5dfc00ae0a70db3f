"""Norms of the parameters in one buffer against float64, and the same bits in every arrangement."""

from __future__ import annotations

import math

import pytest
import torch
from compiled import instruction_sets, with_threads
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.ops import norms

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
COUNTS = st.lists(st.one_of(st.integers(0, 40), st.integers(32_000, 70_000)), max_size=4)


def laid_out(counts: list[int], gap: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = torch.tensor(counts, dtype=torch.int64)
    return (sizes + gap).cumsum(0) - sizes, sizes


@pytest.mark.parametrize("dtype", DTYPES)
@given(COUNTS, st.sampled_from([1e-30, 1.0, 1e30]))
def test_norms_are_those_of_float64(dtype, counts, size):
    offsets, sizes = laid_out(counts, gap=3)
    x = (torch.randn(sum(counts) + 3 * len(counts)) * size).to(dtype)
    found = norms(x, offsets, sizes)
    assert found.dtype == torch.float64
    assert found.shape == (len(counts),)
    for norm, at, n in zip(found.tolist(), offsets.tolist(), counts, strict=True):
        assert norm == pytest.approx(math.hypot(*x[at : at + n].double().tolist()), rel=1e-12, abs=0)


@given(COUNTS, st.integers(0, 20))
def test_a_norm_depends_on_its_own_elements_alone(counts, gap):
    parts = [torch.randn(n) for n in counts]
    alone = [norms(p, *laid_out([len(p)])).item() for p in parts]
    x = torch.cat([torch.cat([torch.full((gap,), torch.nan), p]) for p in parts]) if parts else torch.empty(0)
    assert norms(x, *laid_out(counts, gap)).tolist() == alone


def test_threads_and_instruction_sets_do_not_change_bits():
    offsets, counts = laid_out([100_001, 7, 33_000])
    x = torch.randn(133_008)
    one, *more = with_threads(lambda: norms(x, offsets, counts))
    assert all(torch.equal(one, other) for other in more)
    for kernels in instruction_sets():
        out = torch.empty(3, dtype=torch.float64)
        kernels.norms_f32(x.data_ptr(), offsets.data_ptr(), counts.data_ptr(), 3, out.data_ptr(), 1)
        assert torch.equal(out, one)


def test_what_is_not_finite_stays_so():
    x = torch.tensor([1.0, torch.nan, 2.0, torch.inf, 3.0, 3e38, 3e38])
    found = norms(x, torch.tensor([0, 2, 4]), torch.tensor([2, 2, 3])).tolist()
    assert math.isnan(found[0])
    assert found[1] == math.inf
    assert found[2] == pytest.approx(math.sqrt(2) * 3e38, rel=1e-6)


def test_other_layouts_are_refused():
    x, at, n = torch.zeros(8), torch.tensor([0]), torch.tensor([8])
    wrong = [
        ((x.view(2, 4), at, n), r"x is \(2, 4\)"),
        ((x[::2], at, n), "with strides"),
        ((x.int(), at, n), "torch.int32"),
        ((x, at.int(), n), r"offsets is \(1,\) of torch.int32"),
        ((x, at, torch.tensor([4, 4])), r"counts is \(2,\)"),
        ((x, at + 1, n), "ends up to 9.*in the 8 elements"),
        ((x, at - 1, n), "offsets from -1"),
    ]
    for arguments, message in wrong:
        for call in (norms, torch.ops.mpipipe.norms):
            with pytest.raises(ValueError, match=message):
                call(*arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_registered_operator(dtype):
    x, (offsets, counts) = torch.randn(100).to(dtype).requires_grad_(), laid_out([40, 0, 60])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.mpipipe.norms, (x.detach(), offsets, counts))
    torch.library.opcheck(torch.ops.mpipipe.norms, (x, offsets, counts), test_utils=tests[:3])
    found = torch.ops.mpipipe.norms(x, offsets, counts)
    assert torch.equal(found, norms(x.detach(), offsets, counts))
    with pytest.raises(RuntimeError, match="norms has no derivative"):
        found.sum().backward()


def test_without_data_there_is_a_shape():
    found = norms(torch.empty(8, device="meta"), *laid_out([3, 5]))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float64, (2,))


@pytest.mark.full
def test_beyond_two_to_the_31_elements():
    """4.3 GB, of which nearly all is never written."""
    n = (1 << 31) + 1000
    x = torch.zeros(n, dtype=torch.bfloat16)
    x[5], x[-3:] = 2.0, 3.0
    found = norms(x, torch.tensor([0, n - 10]), torch.tensor([n - 10, 10]))
    torch.testing.assert_close(found, torch.tensor([2.0, 27**0.5], dtype=torch.float64))
