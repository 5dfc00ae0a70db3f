"""Rows of a table, and where their gradient goes, against torch's own embedding."""

import ctypes
import importlib

import pytest
import torch
from compiled import instruction_sets, with_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from mpipipe.ops import embedding, native
from mpipipe.ops.embedding import add_row_sums, sums_by_row

MODULE = importlib.import_module("mpipipe.ops.embedding")  # of that name mpipipe.ops has the function
pytestmark = pytest.mark.kernels


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def table(entries=13, width=5, dtype=torch.float32):
    return torch.randn(entries, width, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def torchs(indices, weight, padding, dy):
    """The dense gradient, in float64."""
    w = weight.detach().double().requires_grad_()
    functional.embedding(indices, w, padding).backward(dy.double())
    return w.grad


@settings(max_examples=15)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 50), st.integers(1, 30),
    st.integers(0, 40), st.sampled_from([None, 0, -1]), st.booleans(),
    st.sampled_from([torch.int64, torch.int32]),
)  # fmt: skip
def test_gradient(dtype, n, entries, width, padding, there, kind):
    weight = table(entries, width, dtype)
    indices = torch.randint(0, entries, (n,), generator=torch.Generator().manual_seed(n), dtype=kind)
    if there:
        weight.grad = torch.zeros_like(weight)
    place = weight.grad
    rows = embedding(indices, weight, padding)
    assert torch.equal(rows, weight[indices.long()])
    dy = torch.randn(n, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows.backward(dy)
    assert not there or weight.grad is place
    plain = weight.detach().clone().requires_grad_()
    functional.embedding(indices, plain, padding).backward(dy)
    assert torch.equal(weight.grad, plain.grad)


SPECIAL = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 1e-40, 3e38, -3e38])


def bits(x: Tensor) -> Tensor:
    """Of a NaN nothing but that it is one."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def drawn(n, entries, width, seed, kind=torch.int64):
    """indices, dy and a gradient that is there: with numbers that are none, and zeros of both signs."""
    draw = torch.Generator().manual_seed(seed)
    dy, grad = torch.randn(n, width, generator=draw), torch.randn(entries, width, generator=draw)
    for x in (dy, grad):
        some = torch.rand(x.shape, generator=draw) < 0.1
        x[some] = SPECIAL[torch.randint(len(SPECIAL), (int(some.sum()),), generator=draw)]
    return torch.randint(0, entries, (n,), generator=draw, dtype=kind), dy, grad


@given(
    st.one_of(st.integers(0, 40), st.integers(0, 400)), st.integers(1, 60),
    st.one_of(st.integers(0, 70), st.integers(1020, 1030)), st.sampled_from([-1, 0, 3]),
    st.sampled_from([torch.int64, torch.int32]), st.integers(0, 99), st.sampled_from([1, 2]),
)  # fmt: skip
def test_rows_are_added_with_the_bits_of_a_dense_gradient(n, entries, width, padding, kind, seed, threads):
    indices, dy, before = drawn(n, entries, width, seed, kind)
    dense = torch.ops.aten.embedding_dense_backward(dy, indices.long(), entries, padding, False)
    grad = before.clone()
    with_threads(lambda: add_row_sums(grad, indices, dy, padding), (threads,))
    wanted, looked_up = before.clone(), indices[indices != padding].long().unique()
    wanted[looked_up] += dense[looked_up]  # to others nothing is added, which spares them a -0.0 + 0.0
    assert torch.equal(bits(grad), bits(wanted))


def test_instruction_sets_and_having_none_change_no_bits():
    indices, dy, before = drawn(3000, 700, 33, 5)

    def add():
        grad = before.clone()
        add_row_sums(grad, indices, dy, 7)
        return grad

    one, *more = with_threads(add)
    for kernels in instruction_sets():
        more.append(before.clone())
        assert kernels.embedding_backward_f32(
            dy.data_ptr(), indices.data_ptr(), *dy.shape, 7, more[-1].data_ptr(), len(before), 1
        )
    native.use_kernels(False)
    try:
        more.append(add())
    finally:
        native.use_kernels(True)
    assert all(torch.equal(bits(one), bits(other)) for other in more)


def lying(address: int, kind: type, shape: tuple[int, ...]) -> Tensor:
    """What lies at an address."""
    n = torch.Size(shape).numel()
    dtype = torch.float32 if kind is ctypes.c_float else torch.int64
    return torch.frombuffer((kind * n).from_address(address), dtype=dtype).view(shape)


def of_gpus(dy, rows, places, n, d, padding, grad, entries, *_):
    """As kernels/include/mpipipe/embedding.h says, in the memory of the processor."""
    dy, grad = lying(dy, ctypes.c_float, (n, d)), lying(grad, ctypes.c_float, (entries, d))
    rows, places = (lying(x, ctypes.c_int64, (n,)) for x in (rows, places))
    assert torch.equal(rows, rows.sort().values)
    for row in rows.unique().tolist():
        mine = places[rows == row]
        assert torch.equal(mine, mine.sort().values)
        if row != padding:
            grad[row] += sum(dy[mine], torch.zeros(d))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_a_kernel_of_gpus_gets_the_look_ups_sorted(monkeypatch, kind):
    indices, dy, before = drawn(300, 40, 33, 5, kind)
    found = [before.clone(), before.clone()]
    add_row_sums(found[0], indices, dy, 7)
    monkeypatch.setattr(MODULE, "device_type", lambda _: "cuda")
    monkeypatch.setitem(MODULE._KERNELS, ("cuda", torch.float32), (of_gpus,))
    add_row_sums(found[1], indices.view(3, 100), dy.view(3, 100, 33), 7)
    assert torch.equal(*map(bits, found))


def test_a_gpu_sums_by_row_what_it_has_a_kernel_for(monkeypatch):
    monkeypatch.delitem(MODULE._KERNELS, ("cuda", torch.float32), raising=False)
    assert not sums_by_row("cuda", torch.float32)
    monkeypatch.setitem(MODULE._KERNELS, ("cuda", torch.float32), (of_gpus,))
    assert sums_by_row("cuda", torch.float32)
    assert not sums_by_row("cuda", torch.float64)


def test_rows_outside_of_the_gradient_are_refused_before_anything_is_written():
    for outside in (13, -1, 1 << 40):
        grad = torch.zeros(13, 5)
        with pytest.raises(ValueError, match=f"from {min(outside, 2)} to {max(outside, 2)}, .* 13 entries"):
            add_row_sums(grad, torch.tensor([2, outside]), torch.ones(2, 5))
        assert not grad.any()


def test_the_gradient_of_rows_may_be_a_part_of_that_of_the_table():
    weight = table()
    weight.grad = torch.randn(13, 5)
    first, second, third = weight.grad[:3].clone()
    embedding(torch.tensor([1, 1, 0]), weight).backward(weight.grad[:3])
    assert torch.equal(weight.grad[:3], torch.stack([first + third, second + (first + second), third]))


def test_shapes_of_indices_and_strides_of_the_gradient():
    weight = table()
    weight.grad = torch.zeros_like(weight)
    indices = torch.randint(0, 13, (4, 6)).t()
    dy = torch.randn(4, 5, 6).permute(2, 0, 1)
    embedding(indices, weight).backward(dy)
    torch.testing.assert_close(weight.grad, torchs(indices, weight, None, dy).float())


@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_table_tied_to_the_head(head_first, there):
    """Its gradient has two terms, of which autograd sees one."""
    weight = table()
    if there:
        weight.grad = torch.ones_like(weight)
    indices = torch.tensor([[1, 2, 2], [7, 1, 0]])

    def loss(w, look_up):
        if head_first:
            early = (w * w).sum()
        x = look_up(indices, w)
        late = functional.linear(x.tanh(), w).square().sum() + (x * x).sum()
        return late + (early if head_first else 0)

    exact = weight.detach().double().requires_grad_()
    loss(exact, functional.embedding).backward()
    for _ in range(2):
        loss(weight, embedding).backward()
    torch.testing.assert_close(weight.grad.double(), 2 * exact.grad + there, rtol=1e-5, atol=1e-4)


def plain_gradient(weight, indices):
    w = weight.detach().clone().requires_grad_()
    functional.embedding(indices, w).square().sum().backward()
    return w.grad


INDICES = torch.tensor([3, 3, 0, 12])


def test_hooks_see_the_gradient():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        weight, seen = table(), []
        weight.grad = torch.zeros_like(weight)
        getattr(weight, register)(lambda t, seen=seen: seen.append((t if t.grad is None else t.grad).clone()))
        embedding(INDICES, weight).square().sum().backward()
        assert torch.equal(seen[0], plain_gradient(weight, INDICES))
        assert torch.equal(weight.grad, seen[0])


def test_a_hook_may_change_the_gradient():
    weight = table()
    weight.grad = torch.zeros_like(weight)
    weight.register_hook(lambda g: 2 * g)
    embedding(INDICES, weight).square().sum().backward()
    assert torch.equal(weight.grad, 2 * plain_gradient(weight, INDICES))


def test_hooks_of_the_accumulating_node_are_called():
    """As data-parallel wrappers register them: `.grad` is complete by then."""
    weight, seen = table(), []
    weight.grad = torch.zeros_like(weight)
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(weight.grad.clone()))
    embedding(INDICES, weight).square().sum().backward()
    assert torch.equal(seen[0], plain_gradient(weight, INDICES))


def test_gradients_that_are_returned_go_nowhere_else():
    weight = table()
    weight.grad = torch.zeros_like(weight)
    x = torch.ones(4, 5, requires_grad=True)
    (got,) = torch.autograd.grad(embedding(INDICES, weight).square().sum(), weight)
    assert torch.equal(got, plain_gradient(weight, INDICES))
    (embedding(INDICES, weight) * x).sum().backward(inputs=[x])
    assert not weight.grad.any()


def test_gradient_of_a_gradient():
    weight = table(dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda w: embedding(INDICES, w, 0).pow(3), weight)
    weight = table()
    weight.grad = torch.zeros_like(weight)
    embedding(INDICES, weight).square().sum().backward(create_graph=True)
    torch.testing.assert_close(weight.grad.detach(), plain_gradient(weight, INDICES))


def test_a_table_that_is_no_leaf():
    weight = table()
    weight.grad = torch.zeros_like(weight)
    embedding(INDICES, weight * 2).sum().backward()
    assert torch.equal(weight.grad.sum(1), torch.bincount(INDICES, minlength=13) * 10.0)


def test_gradients_of_another_layout_or_dtype():
    for there in (torch.zeros(5, 13).t(), torch.zeros(13, 5).to_sparse()):
        weight = table()
        weight.grad = there
        embedding(INDICES, weight).square().sum().backward()
        assert torch.equal(weight.grad.to_dense(), plain_gradient(weight, INDICES))


def test_writing_counts_as_a_change():
    weight = table()
    weight.grad = torch.zeros_like(weight)
    before = weight.grad._version
    embedding(INDICES, weight).sum().backward()
    assert weight.grad._version > before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(11, 37, 500), (3, 4096, 99), (5000, 64, 3000), (40000, 16, 60000)])
def test_bits_are_those_of_torch_with_any_number_of_threads(threads, shape, dtype):
    """Micro-batch after micro-batch, added to what is there."""
    entries, width, rows = shape
    micros = [(torch.randint(0, entries, (rows,)), torch.randn(rows, width).to(dtype)) for _ in range(3)]
    micros[1][1][3, 3], micros[1][1][5, 5] = float("nan"), float("inf")

    def summed(look_up):
        weight = table(entries, width, dtype)
        weight.grad = torch.zeros_like(weight)
        for indices, dy in micros:
            look_up(indices, weight, 2).backward(dy)
        return weight.grad.view(torch.uint8)

    torchs = summed(functional.embedding)
    for n in (1, 2, 3):
        threads(n)
        assert torch.equal(summed(embedding), torchs)


def test_padding_keeps_what_its_gradient_was():
    weight = table()
    weight.grad = torch.ones_like(weight)
    dy = torch.full((4, 5), float("nan"))
    embedding(torch.full((4,), 3), weight, 3).backward(dy)
    assert torch.equal(weight.grad, torch.ones(13, 5))


@pytest.mark.parametrize("indices", [INDICES, INDICES.view(2, 2)])
def test_gradients_in_float64(indices):
    """A table with a row that no index names, one that two name, and one that gets no gradient."""
    weight = table(dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda w: embedding(indices, w), weight)
    grad = torch.autograd.grad(embedding(indices, weight, 12).pow(2).sum(), weight)[0]
    torch.testing.assert_close(grad, torchs(indices, weight, 12, 2 * weight[indices].detach()))


@pytest.mark.slow
def test_operator():
    torch.library.opcheck(torch.ops.mpipipe.embedding.default, (INDICES, table(), 3))


def test_export():
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(table().detach())

        def forward(self, indices):
            return embedding(indices, self.weight, 3)

    captured = torch.export.export(Table(), (INDICES,), strict=False).module()
    captured.weight.grad = torch.zeros(13, 5)
    captured(INDICES).sum().backward()
    assert captured.weight.grad.sum() == 10.0  # two of the four are padding


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"from 1 to 13.*13 entries"):
        embedding(torch.tensor([1, 13]), table())
    with pytest.raises(ValueError, match=r"from -1 to 1"):
        embedding(torch.tensor([1, -1]), table())
    with pytest.raises(ValueError, match="float32"):
        embedding(torch.ones(3), table())
    with pytest.raises(ValueError, match="padding_idx=13"):
        embedding(INDICES, table(), 13)
    with pytest.raises(ValueError, match=r"\(13,\)"):
        embedding(INDICES, table()[:, 0])
