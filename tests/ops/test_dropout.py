"""Dropout against its definition, in every dtype, layout of memory and direction."""

import pytest
import torch
import torch.nn.functional as F
from compiled import instruction_sets, with_threads
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mpipipe.ops import dropout, philox_words, stream_key
from mpipipe.ops.dropout import Stream, _Dropout, _masked_by_torch, _signed
from mpipipe.ops.philox import threshold

KEY = stream_key(11, "blocks.0.mlp/dropout.0")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of x: tells +0 from -0. All NaN are one: torch itself makes several when it rounds."""
    return torch.where(x.isnan(), torch.nan, x).to(x.dtype).contiguous().view(-1).view(torch.uint8)


def kept(n: int, p: float, step: int = 1, micro: int = 2) -> torch.Tensor:
    return torch.from_numpy(philox_words(KEY, step, micro, n).astype("int64")) >= round(p * 2**32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 4, 255, 256, 257, 1023, 4099])
def test_definition(dtype, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.where(
        kept(n, 0.3), (x.to(wide) * torch.tensor(1 / (1 - 0.3), dtype=wide)).to(dtype), 0.0
    )
    got = dropout(x, 0.3, KEY, 1, 2)
    assert got.dtype == dtype
    assert torch.equal(bits(got), bits(expected.to(dtype)))


@given(st.sampled_from(DTYPES), st.integers(0, 2000), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_kernel_and_torch_paths_give_the_same_bits(dtype, n, p, step):
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3.3e38, -7.0])
    x = torch.cat([torch.randn(n, generator=torch.Generator().manual_seed(n)), special]).to(dtype)
    scale = 1 / (1 - p) if p < 1 else 0.0
    by_torch = x if p == 0 else _masked_by_torch(x, threshold(p), scale, Stream(KEY, step, 3))
    assert torch.equal(bits(dropout(x, p, KEY, step, 3)), bits(by_torch))


def test_elements_count_in_contiguous_order():
    x = torch.randn(6, 10, 7)
    straight = dropout(x, 0.4, KEY, 1, 2)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)  # equal values, other strides
    assert not turned.is_contiguous()
    assert torch.equal(dropout(turned, 0.4, KEY, 1, 2), straight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # of the kernel and of torch
@pytest.mark.parametrize(
    "turned",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x[:, 1:3].transpose(0, 2),
        lambda x: x[:1].expand(3, 4, 5),
        lambda x: x[:, :, None].to(memory_format=torch.channels_last),
        lambda x: x[:, :1].mT,
    ],
)
def test_the_result_lies_as_torchs_does(dtype, turned):
    x = turned(torch.randn(3, 4, 5).to(dtype))
    y = dropout(x, 0.4, KEY, 1, 2)
    assert y.stride() == F.dropout(x, 0.4).stride()
    assert torch.equal(y, dropout(x.contiguous(), 0.4, KEY, 1, 2))
    torch.library.opcheck(
        torch.ops.mpipipe.dropout.default, (x, threshold(0.4), 1 / 0.6, _signed(KEY), 1, 2),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_replays_the_mask(dtype):
    x = torch.randn(37, 5, dtype=torch.float32).to(dtype).requires_grad_()
    y = dropout(x, 0.25, KEY, 1, 2)
    dy = torch.randn(5, 37).to(dtype).t()  # not contiguous
    y.backward(dy)
    assert torch.equal(bits(x.grad), bits(dropout(dy.detach(), 0.25, KEY, 1, 2)))
    assert torch.equal(x.grad.view(-1) != 0, kept(185, 0.25))


def test_gradients_of_both_orders():
    x = torch.randn(13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout(t * t, 0.5, KEY, 1, 2), x)
    assert torch.autograd.gradgradcheck(lambda t: dropout(t * t * t, 0.5, KEY, 1, 2), x)


def test_without_a_gradient_no_graph_is_made_and_the_bits_are_the_same(monkeypatch):
    """An autograd.Function that only makes its result takes microseconds of every call."""
    x = torch.randn(5, 7)
    recorded = dropout(x.clone().requires_grad_(), 0.4, KEY, 1, 2)
    monkeypatch.setattr(_Dropout, "apply", None)
    assert torch.equal(dropout(x, 0.4, KEY, 1, 2), recorded)
    with torch.no_grad():
        assert torch.equal(dropout(x.requires_grad_(), 0.4, KEY, 1, 2), recorded)


def test_nothing_is_kept_for_backward():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(torch.randn(100, requires_grad=True), 0.5, KEY, 1, 2)
    assert saved == []


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_mean(p):
    n = 1 << 17
    y = dropout(torch.ones(n), p, KEY, 5, 6)
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs((y == 0).double().mean().item() - p) < 5 * sigma
    assert abs(y.double().mean().item() - 1) < 5 * sigma / (1 - p)


def test_ends_of_the_rate():
    x = torch.tensor([1.0, float("inf"), float("nan"), -2.0])
    assert dropout(x, 0.0, KEY, 1, 2) is x
    assert torch.equal(bits(dropout(x, 1.0, KEY, 1, 2)), bits(torch.zeros(4)))


def test_the_default_generator_is_not_read():
    before = torch.get_rng_state()
    dropout(torch.ones(100), 0.5, KEY, 1, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_planning_without_data():
    assert dropout(torch.empty(3, 4, device="meta"), 0.5, KEY, 1, 2).shape == (3, 4)
    with FakeTensorMode():
        y = dropout(torch.empty(3, 4, requires_grad=True), 0.5, KEY, 1, 2)
        y.sum().backward()
        assert y.shape == (3, 4)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_threads_and_instruction_sets_do_not_change_bits(dtype):
    n = 50_001  # several pieces, the last one ragged
    x = torch.randn(n).to(dtype)
    one, *more = with_threads(lambda: dropout(x, 0.3, KEY, 1, 2))
    assert all(torch.equal(one, other) for other in more)
    short = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}[dtype]
    for kernels in instruction_sets():
        y = torch.empty_like(x)
        run = getattr(kernels, f"dropout_{short}")
        run(KEY, 1, 2, threshold(0.3), 1 / (1 - 0.3), x.data_ptr(), y.data_ptr(), n, 1)
        assert torch.equal(y, one)


@pytest.mark.parametrize("key", [KEY, 2**64 - 1])
@pytest.mark.slow
def test_the_registered_operator(key):
    how = (threshold(0.25), 1 / 0.75, _signed(key), 1, 2)
    x = torch.randn(9, 4, requires_grad=True)
    assert torch.equal(torch.ops.mpipipe.dropout(x, *how), dropout(x, 0.25, key, 1, 2))
    if key == KEY:
        torch.library.opcheck(torch.ops.mpipipe.dropout.default, (x, *how))


def test_export_sees_one_operator():
    class Drop(torch.nn.Module):
        def forward(self, x):
            return dropout(x, 0.25, KEY, 1, 2)

    x = torch.randn(4, 3)
    program = torch.export.export(Drop(), (x,))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called == ["mpipipe.dropout.default"]
    assert torch.equal(program.module()(x), dropout(x, 0.25, KEY, 1, 2))


def test_wrong_arguments_are_refused():
    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"p=1\.5"):
        dropout(x, 1.5, KEY, 1, 2)
    with pytest.raises(ValueError, match="micro"):
        dropout(x, 0.5, KEY, 1, -1)
    with pytest.raises(ValueError, match="int64"):
        dropout(torch.ones(4, dtype=torch.int64), 0.5, KEY, 1, 2)
