"""Products by the kernel `gemm` against float64 and against torch's own in float32."""

from __future__ import annotations

import pytest
import torch
from compiled import instruction_sets, with_threads
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mpipipe.ops.gemm import add_gemm, gemm

pytestmark = pytest.mark.kernels
SIZES = st.one_of(st.integers(0, 20), st.integers(60, 70), st.integers(0, 400))


def matrix(rows: int, columns: int, kind: str, draw: torch.Generator) -> Tensor:
    if kind == "turned":
        return torch.randn(columns, rows, generator=draw).t()
    if kind == "gaps":
        return torch.randn(rows, columns + 3, generator=draw)[:, 1 : columns + 1]
    if kind == "sparse":  # neither rows nor columns side by side
        return torch.randn(rows, 2 * columns, generator=draw)[:, ::2]
    return torch.randn(rows, columns, generator=draw)


KINDS = st.sampled_from(["rows", "turned", "gaps", "sparse"])


@given(SIZES, SIZES, st.one_of(SIZES, st.integers(380, 900)), KINDS, KINDS, st.booleans(), st.integers(0, 99))
def test_errors_are_at_most_twice_those_of_torch(
    m: int, n: int, depth: int, of_a: str, of_b: str, biased: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    a, b = matrix(m, depth, of_a, draw), matrix(depth, n, of_b, draw)
    bias = torch.randn(n, generator=draw) if biased else None
    total = torch.randn(m, n, generator=draw)
    exact = a.double() @ b.double()
    room = 2e-7 * (a.double().abs() @ b.double().abs() + 1)  # where torch happens to be exact
    with_bias = exact if bias is None else exact + bias
    theirs = a @ b if bias is None else torch.addmm(bias, a, b)
    ours, added = gemm(a, b, bias), total.clone()
    add_gemm(added, a, b)
    assert ours.shape == (m, n)
    for got, of_torch, wanted in ((ours, theirs, with_bias), (added, total.addmm(a, b), total + exact)):
        worst = (of_torch - wanted).abs().max() if m and n else 0.0
        assert torch.all((got - wanted).abs() <= 2 * worst + room)
    out = torch.full((m, n + 2), 7.0)
    gemm(a, b, bias, out=out[:, :n])
    assert torch.equal(out[:, :n], ours)
    assert torch.all(out[:, n:] == 7.0)


@pytest.mark.parametrize(("m", "n", "depth"), [(7, 200, 500), (1100, 70, 50), (65, 3, 1000)])
def test_neither_threads_nor_what_is_beside_change_bits(m: int, n: int, depth: int) -> None:
    a, b, bias = torch.randn(m, depth), torch.randn(depth, n), torch.randn(n)

    def run() -> Tensor:
        total = torch.ones(m, n)
        add_gemm(total, a, b)
        return torch.cat([gemm(a, b, bias), total])

    one, *more = with_threads(run)
    assert all(torch.equal(one, other) for other in more)
    assert torch.equal(gemm(a[2:5], b[:, 1:3], bias[1:3]), one[2:5, 1:3])
    assert torch.equal(gemm(a.t().contiguous().t(), b.t().contiguous().t(), bias), one[:m])


def test_strides_may_be_anything() -> None:
    """Repeated rows and columns, and those of one element, whose strides say nothing."""
    row, column, long = torch.randn(1, 9), torch.randn(7, 1), torch.randn(40)
    spread = row.expand(7, 9), column.expand(7, 9), long[::4][:7, None], long[None, ::4], row[:, :1], row.t()
    for a in spread:
        for b in (torch.randn(a.shape[1], 5), torch.randn(5, a.shape[1]).t(), torch.randn(a.shape[1], 1)):
            wanted = (a.double() @ b.double()).float()
            torch.testing.assert_close(gemm(a, b), wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(gemm(b.t(), a.t()), wanted.t(), rtol=1e-5, atol=1e-5)


def test_every_instruction_set_computes_it() -> None:
    a, b, bias = torch.randn(37, 401), torch.randn(401, 90), torch.randn(90)
    wanted = torch.addmm(bias.double(), a.double(), b.double())
    for kernels in instruction_sets():
        out = torch.empty(37, 90)
        at = a.data_ptr(), 401, 1, b.data_ptr(), 90, 1, bias.data_ptr(), out.data_ptr(), 90
        kernels.gemm_f32(*at, 37, 90, 401, False, 1)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-4)


def test_what_is_no_number_stays_where_it_belongs() -> None:
    a, b = torch.randn(9, 20), torch.randn(20, 70)
    a[2, 3], a[4, 0], b[5, 66], a[7] = torch.nan, torch.inf, -torch.inf, 1e-40
    ours, theirs = gemm(a, b), a.double() @ b.double()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours, theirs.float(), equal_nan=True)


def test_other_tensors_are_computed_by_torch_or_refused() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(gemm(a.to(dtype), b.to(dtype)), a.to(dtype) @ b.to(dtype))
    for wrong, said in (
        ((a, a), r"a has shape \(3, 4\) and b \(3, 4\); they must be \(m, k\) and \(k, n\)"),
        ((a, b, a[0]), r"bias has shape \(4,\); it must have \(5,\)"),
        ((a, b.double()), "b is torch.float64, other arguments are torch.float32"),
        (
            (a, b, None, torch.empty(3, 5, dtype=torch.float64)),
            "out is torch.float64, other arguments are torch.float32",
        ),
        ((a[0], b), r"a has shape \(4,\) and b \(4, 5\)"),
    ):
        with pytest.raises(ValueError, match=said):
            gemm(*wrong)
    with pytest.raises(ValueError, match=r"out has shape \(3, 5\) and strides \(0, 1\)"):
        gemm(a, b, out=torch.empty(5).expand(3, 5))
    with pytest.raises(ValueError, match=r"out has shape \(5, 3\) and strides \(3, 1\); it must be \(3, 5\)"):
        gemm(a, b, out=torch.empty(5, 3))
    with pytest.raises(ValueError, match=r"total has shape \(2, 5\); it must have \(3, 5\)"):
        add_gemm(torch.zeros(2, 5), a, b)
    square = torch.randn(4, 4)
    with pytest.raises(ValueError, match="share or interleave no memory with a or b"):
        gemm(square, b[:, :4], out=square)
    with pytest.raises(ValueError, match="share or interleave no memory with a or b"):
        add_gemm(square, square[:, :3], square[:3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_result_over_a_factor_is_refused_where_torch_computes(dtype: torch.dtype) -> None:
    a, b = torch.randn(6, 6).to(dtype), torch.randn(6, 6).to(dtype)
    for result in (a, b):
        with pytest.raises(ValueError, match="share or interleave no memory with a or b"):
            gemm(a, b, out=result)
        with pytest.raises(ValueError, match="share or interleave no memory with a or b"):
            add_gemm(result, a, b)
