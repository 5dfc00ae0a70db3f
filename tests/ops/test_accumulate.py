"""bfloat16 added to float32 against torch's own sum: the same bits."""

from functools import partial

import pytest
import torch
from compiled import instruction_sets, with_threads
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.ops import accumulate

pytestmark = pytest.mark.kernels

SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, -3e38])


@given(st.one_of(st.integers(0, 40), st.integers(0, 30_000)), st.booleans())
def test_bits_are_those_of_torch(n, zero):
    total = torch.cat([torch.randn(n), SPECIAL, torch.zeros(8)])
    x = torch.cat([torch.randn(n), SPECIAL.flip(0), SPECIAL]).bfloat16()
    wanted, left = total + x, torch.zeros_like(x) if zero else x.clone()
    accumulate(total, x, zero=zero)
    assert torch.equal(total.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(total.isnan(), wanted.isnan())
    assert torch.equal(x.nan_to_num(7.0), left.nan_to_num(7.0))


@pytest.mark.parametrize("zero", [False, True])
def test_threads_and_instruction_sets_do_not_change_bits(zero):
    total, x = torch.randn(20_001), torch.randn(20_001).bfloat16()

    def run() -> torch.Tensor:
        own = total.clone()
        accumulate(own, x.clone(), zero=zero)
        return own

    one, *more = with_threads(run)
    assert all(torch.equal(one, other) for other in more)
    for kernels in instruction_sets():
        own, given_x = total.clone(), x.clone()
        kernels.accumulate_bf16(own.data_ptr(), given_x.data_ptr(), 20_001, zero, 1)
        assert torch.equal(own, one)


def test_other_tensors_are_refused():
    total, x = torch.zeros(4, 2), torch.zeros(4, 2).bfloat16()
    wrong = [
        (total.double(), x, "torch.bfloat16 is added to torch.float64"),
        (total, x.float(), "torch.float32 is added to torch.float32"),
        (total, x[:3], r"x is \(3, 2\) on cpu, the sum \(4, 2\)"),
        (total.t(), x.t(), r"strides \(1, 2\) and \(1, 2\)"),
        (total, total.view(torch.bfloat16).view(-1)[:8].view(4, 2), "share memory"),
    ]
    for a, b, message in wrong:
        for call in (accumulate, partial(torch.ops.mpipipe.accumulate, zero=False)):
            with pytest.raises(ValueError, match=message):
                call(a, b)


@pytest.mark.parametrize("zero", [False, True])
def test_registered_operator(zero):
    total, x = torch.randn(4, 3), torch.randn(4, 3).bfloat16()
    torch.library.opcheck(torch.ops.mpipipe.accumulate, (total.clone(), x.clone(), zero))
    versions = total._version, x._version
    torch.ops.mpipipe.accumulate(total, x, zero)
    assert (total._version, x._version) == (versions[0] + 1, versions[1] + zero)


@pytest.mark.full
def test_beyond_two_to_the_31_bytes():
    """2.1 GB of sum, and a gradient of 1.1 GB that is nearly never written."""
    n = (1 << 29) + 1000
    total, x = torch.zeros(n), torch.zeros(n, dtype=torch.bfloat16)
    total[-1], x[5], x[-3:] = 1.0, 2.0, 3.0
    accumulate(total, x, zero=True)
    assert (total[5], total[-3], total[-1]) == (2.0, 3.0, 4.0)
    assert torch.count_nonzero(total) == 4
    assert not x[5]
    assert not x[-3:].any()


def test_autograd_sees_that_the_sum_has_changed():
    factor, x = torch.ones(8), torch.rand(8, requires_grad=True)
    y = (factor * x).sum()
    accumulate(factor, torch.ones(8, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
