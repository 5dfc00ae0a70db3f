"""BatchNorm in training against its formula in float64, and with torch's own error as the measure of ours."""

import importlib

import pytest
import torch
from compiled import instruction_sets, with_threads
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.ops import kernels
from mpipipe.ops.batch_norm import batch_norm, batch_norm_with_statistics

pytestmark = pytest.mark.kernels
module = importlib.import_module("mpipipe.ops.batch_norm")  # of that name mpipipe.ops has the function

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
WAYS = [(relu, add) for relu in (False, True) for add in (False, True)]
needs_kernels = pytest.mark.skipif(kernels is None, reason="the compiled kernels are not built")


def ours(x, residual, weight, bias, relu):
    return batch_norm(x, weight, bias, EPS, relu, residual)


def plain(x, residual, weight, bias, relu):
    """Torch's own operators."""
    y, mean, variance = batch_norm_with_statistics(x, weight, bias, EPS)
    y = y if residual is None else y + residual
    return torch.relu(y) if relu else y, mean, variance


def drawn(shape, dtype, seed, scale=1.0, shift=0.0, affine=True, add=True):
    """x, residual, weight, bias."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=g) * scale + shift).to(dtype)
    residual = torch.randn(shape, generator=g).to(dtype) if add else None
    weights = [torch.randn(shape[1], generator=g) + 1 for _ in range(2 * affine)] or [None, None]
    return x, residual, *weights


def run(function, inputs, relu, seed=0):
    """y and the statistics, then gradients, of leaves made of `inputs`."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    results = function(*leaves, relu)
    g = torch.Generator().manual_seed(1000 + seed)
    dy = torch.randn(results[0].shape, generator=g).to(torch.bfloat16).to(results[0].dtype)
    grads = torch.autograd.grad(results[0], [t for t in leaves if t is not None], dy)
    assert not results[1].requires_grad
    assert not results[2].requires_grad
    return [r.detach() for r in results] + list(grads)


def bits(tensors):
    return [t.contiguous().view(torch.uint8) for t in tensors]


def assert_same_bits(a, b):
    assert all(torch.equal(p, q) for p, q in zip(bits(a), bits(b), strict=True))


def assert_as_exact_as_torch(inputs):
    """Without the ReLU, which only chooses. The largest error at most twice torch's and two units in the last
    place of the largest number that the result is a difference of; of a sum over the batch, as many units as
    a random walk of that length goes."""
    wide = [None if t is None else t.double() for t in inputs]
    got, torchs, exact = run(ours, inputs, False), run(plain, inputs, False), run(plain, wide, False)
    x, _, weight, _ = wide
    spread = x.var((0, *range(2, x.dim())), unbiased=False).add(EPS).sqrt().min()
    size, walk = float(x.abs().max()), (x.numel() / x.shape[1]) ** 0.5
    of_tensors = max(size, 4.0) * float((1 if weight is None else weight.abs().max()) / spread)
    of_sums = 4.0 * walk * max(1.0, size / float(spread))  # of dy, and of dy with (x - mean) / spread
    of_leaves = [of_tensors] * sum(t is not None for t in wide[:2]) + [of_sums] * 2
    sizes = [of_tensors, size, 0.0, *of_leaves]
    for i, (mine, his, true) in enumerate(zip(got, torchs, exact, strict=True)):
        assert mine.shape == his.shape
        assert mine.dtype == his.dtype
        largest = true.abs().max().clamp(min=sizes[i])
        allowed = 2 * ((his - true).abs().max() + torch.finfo(mine.dtype).eps * largest)
        assert (mine - true).abs().max() <= allowed, i


SHAPES = st.one_of(
    st.tuples(st.integers(2, 9), st.integers(1, 9), st.integers(1, 70)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 9), st.integers(2, 40)),
    st.sampled_from([(2, 1, 1), (3, 700, 2), (2, 3, 70, 71), (64, 5), (1, 2, 5000)]),
)


@settings(max_examples=60)
@given(
    SHAPES, st.sampled_from(DTYPES), st.booleans(), st.booleans(),
    st.sampled_from([(1.0, 0.0), (1e-2, 0.0), (1e4, 0.0), (1.0, 30.0)]), st.integers(0, 99),
)  # fmt: skip
def test_error_is_at_most_twice_that_of_torch(shape, dtype, affine, add, spread, seed):
    assert_as_exact_as_torch(drawn(shape, dtype, seed, *spread, affine, add))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("relu", "add"), WAYS)
@pytest.mark.parametrize("shape", [(5, 7, 3, 11), (3, 16, 4, 4), (4, 3, 40, 33)])
def test_addition_and_relu_after_the_norm_or_in_it(shape, relu, add, dtype):
    """A cut may fall between them, so they agree in every bit."""

    def apart(x, residual, weight, bias, relu):
        y, mean, variance = batch_norm(x, weight, bias, EPS)
        y = y if residual is None else y + residual
        return torch.relu(y) if relu else y, mean, variance

    inputs = drawn(shape, dtype, 3, add=add)
    assert_same_bits(run(ours, inputs, relu), run(apart, inputs, relu))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("relu", "add"), WAYS)
def test_bits_do_not_depend_on_threads(relu, add, dtype):
    inputs = drawn((4, 13, 20, 21), dtype, 4, add=add)
    found = with_threads(lambda: run(ours, inputs, relu))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree(monkeypatch, dtype):
    inputs, close = drawn((4, 6, 9, 11), dtype, 5), {torch.float32: 1e-4, torch.bfloat16: 1.6e-2}[dtype]
    expected, kind = run(ours, inputs, False), {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    for other in instruction_sets():
        pair = tuple(getattr(other, f"batch_norm{way}_{kind}") for way in ("", "_backward"))
        with monkeypatch.context() as patch:
            patch.setitem(module._KERNELS, ("cpu", dtype), pair)
            for a, b in zip(run(ours, inputs, False), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=close, atol=close)


@pytest.mark.parametrize("relu", [False, True])
def test_not_a_number_stays_in_its_channel(relu):
    inputs = drawn((3, 5, 4, 4), torch.float32, 6)
    inputs[0][1, 2, 0, 0] = float("nan")
    y, mean, variance = ours(*inputs, relu)
    others = [0, 1, 3, 4]
    assert y[:, 2].isnan().all()
    assert mean[2].isnan()
    assert variance[2].isnan()
    assert all(t.isfinite().all() for t in (y[:, others], mean[others], variance[others]))


def test_channels_without_spread():
    """Constant ones and denormal numbers: eps decides."""
    for value in (0.0, 3.0, 1e-40):
        x = torch.full((3, 2, 50), value)
        for a, b in zip(ours(x, None, None, None, True), plain(x, None, None, None, True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)  # torch's is off by a rounding / sqrt(eps)


def test_other_strides_and_dtypes_take_the_way_of_torch():
    x, residual, weight, bias = drawn((3, 4, 5, 6), torch.float32, 7)
    last = x.to(memory_format=torch.channels_last)
    y = ours(last, residual, weight, bias, True)[0]
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_same_bits([y], [plain(last, residual, weight, bias, True)[0]])
    halves = [t.bfloat16() for t in (x, residual, weight, bias)]
    assert_same_bits(ours(*halves, True), plain(*halves, True))


def test_frozen_arguments_and_expanded_gradients():
    x, residual, weight, bias = drawn((3, 4, 5), torch.float32, 8)
    for leaf in (x, residual, weight):
        leaf.requires_grad_()
        y = ours(x, residual, weight, bias, True)[0]
        (found,) = torch.autograd.grad(y.sum(), leaf)
        (expected,) = torch.autograd.grad(plain(x, residual, weight, bias, True)[0].sum(), leaf)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        leaf.requires_grad_(False)


def test_gradients_of_the_plain_form():
    inputs = [t.double().requires_grad_() for t in drawn((4, 3, 7), torch.float32, 9)]
    assert torch.autograd.gradcheck(lambda *t: ours(*t, False)[0], inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_arguments_are_refused(dtype):
    x = torch.ones(3, 8, 2, dtype=dtype)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); it must have \(8,\)"):
        batch_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match=r"residual has shape \(8,\); it must have \(3, 8, 2\)"):
        batch_norm(x, residual=torch.ones(8, dtype=dtype))
    with pytest.raises(ValueError, match="int64"):
        batch_norm(torch.ones(3, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(1, 8, 1\): one value a channel"):
        batch_norm(torch.ones(1, 8, 1, dtype=dtype))
    with pytest.raises(ValueError, match="meta"):
        batch_norm(x, torch.ones(8, device="meta"))


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_that_torch_does_not_mix(dtype, of_weight):
    """Both dtypes by name, and only where torch would not compute it."""
    x, weight = torch.randn(3, 8, 2).to(dtype), torch.ones(8, dtype=of_weight)
    try:
        theirs = batch_norm_with_statistics(x, weight, None, EPS)[0]
    except RuntimeError:
        with pytest.raises(ValueError, match=f"weight is {of_weight}, x is {dtype}; cast one of them"):
            batch_norm(x, weight)
    else:
        torch.testing.assert_close(batch_norm(x, weight)[0], theirs)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("relu", "add"), WAYS)
def test_registered_operator(relu, add, dtype):
    x, residual, weight, bias = drawn((5, 4, 6), dtype, 11, add=add)
    leaves = [None if t is None else t.requires_grad_() for t in (x, residual, weight, bias)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for args in (leaves, (leaves[0], None, None, None)):
        torch.library.opcheck(torch.ops.mpipipe.batch_norm, (*args, EPS, relu), test_utils=tests)


@needs_kernels
@pytest.mark.parametrize("name", ["mean", "rstd"])
def test_the_registered_derivative_checks_the_statistics(name):
    x, fitting = torch.ones(3, 8, 2), {"mean": torch.ones(8), "rstd": torch.ones(8)}
    for wrong, text in [
        (torch.ones(7), r"\(7,\); it must have \(8,\)"),
        (torch.ones(8).bfloat16(), "bfloat16"),
    ]:
        given_ = (fitting | {name: wrong}).values()
        with pytest.raises(ValueError, match=f"{name} .*{text}"):
            torch.ops.mpipipe.batch_norm_backward(x, x, None, None, None, *given_, False, False)


@needs_kernels
def test_export_sees_the_operator():
    class Net(torch.nn.Module):
        def forward(self, x, w):
            return batch_norm(x, w, None, EPS, True, x * 2)[0]

    args = torch.randn(4, 8, 3), torch.randn(8)
    exported = torch.export.export(Net(), args)
    assert [n.target for n in exported.graph.nodes].count(torch.ops.mpipipe.batch_norm.default) == 1
    assert torch.equal(exported.module()(*args), Net()(*args))


def test_a_gradient_that_is_none_stays_none():
    """As what comes after may hand back: there is nothing to differentiate."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x = torch.randn(4, 2, 3, requires_grad=True)
    Nothing.apply(batch_norm(x)[0]).sum().backward()
    assert x.grad is None or not x.grad.any()
