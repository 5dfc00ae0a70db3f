"""Norms against their formulas in float64, and with torch's own error as the measure of ours."""

import importlib
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from compiled import instruction_sets, with_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mpipipe.ops import kernels
from mpipipe.ops.layer_norm import layer_norm, rms_norm

pytestmark = pytest.mark.kernels
module = importlib.import_module("mpipipe.ops.layer_norm")  # of that name mpipipe.ops has the function

AUTOCAST = torch.float32, torch.bfloat16  # of the stream, and of a branch that is added to it
DTYPES = [torch.float32, torch.bfloat16, AUTOCAST]
CASES = [(centred, dtype) for centred in (True, False) for dtype in DTYPES]
EPS = 1e-5
ACROSS_SETS = {torch.float32: 1e-4, torch.bfloat16: 1.6e-2}  # relative, of one result on two of them
needs_kernels = pytest.mark.skipif(kernels is None, reason="the compiled kernels are not built")


def ours(centred, x, residual, weight, bias):
    if centred:
        return layer_norm(x, weight, bias, EPS, residual)
    return rms_norm(x, weight, EPS, residual)


def plain(centred, x, residual, weight, bias):
    """Torch's own operators."""
    s = x if residual is None else x + residual
    d = s.shape[-1:]
    y = F.layer_norm(s, d, weight, bias, EPS) if centred else F.rms_norm(s, d, weight, EPS)
    return y if residual is None else (y, s)


def drawn(shape, dtype, seed, scale=1.0, shift=0.0, affine=True, residual=True):
    """x, residual, weight, bias; dtype: of all, or of all but the residual and of that."""
    dtype, of_residual = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    g = torch.Generator().manual_seed(seed)
    wide = [torch.randn(shape, generator=g) * scale + shift for _ in range(1 + residual)]
    wide += [torch.randn(shape[-1:], generator=g) + 1 for _ in range(2 * affine)]
    x, *others = (t.to(dtype) for t in wide)
    return x, wide[1].to(of_residual) if residual else None, *(others[residual:] or (None, None))


def run(function, centred, inputs, seed=0):
    """Results, then gradients, of leaves made of `inputs`."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    results = function(centred, *leaves)
    results = results if isinstance(results, tuple) else (results,)
    g = torch.Generator().manual_seed(1000 + seed)
    out = [torch.randn(r.shape, generator=g).to(torch.bfloat16).to(r.dtype) for r in results]
    wanted = [t for t in (leaves if centred else leaves[:3]) if t is not None]
    return [r.detach() for r in results] + list(torch.autograd.grad(results, wanted, out))


def bits(tensors):
    return [t.contiguous().view(torch.uint8) for t in tensors]


def assert_same_bits(a, b):
    assert all(torch.equal(p, q) for p, q in zip(bits(a), bits(b), strict=True))


def largest_term(centred, inputs):
    """Size of what cancels in y and in the gradients: |s| or |dy| (below 4) times |weight| / deviation."""
    x, residual, weight, _ = inputs
    s = x if residual is None else x + residual
    size = s.abs().max().clamp(min=4)
    s = s - s.mean(-1, keepdim=True) if centred else s
    return size * (1 if weight is None else weight.abs().max()) / (s.square().mean(-1) + EPS).sqrt().min()


def assert_as_exact_as_torch(centred, inputs):
    """The largest error at most twice torch's and two units in the last place of the largest term; of a sum
    over rows, as many units as a random walk of that length goes."""
    exactly = [None if t is None else t.double() for t in inputs]
    got, torchs, exact = run(ours, centred, inputs), run(plain, centred, inputs), run(plain, centred, exactly)
    for mine, his, true in zip(got, torchs, exact, strict=True):
        assert mine.shape == his.shape
        assert mine.dtype == his.dtype
        if inputs[0].numel():
            walk = (inputs[0].numel() / mine.numel()) ** 0.5
            unit = torch.finfo(mine.dtype).eps * torch.maximum(
                largest_term(centred, exactly), true.abs().max()
            )
            assert (mine - true).abs().max() <= 2 * ((his - true).abs().max() + walk * unit)


SHAPES = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(1, 70)),
    st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 300)),
    st.sampled_from([(1,), (7,), (1, 1), (700, 3), (130, 129), (3, 5000), (2, 1024)]),
)


@settings(max_examples=40)
@given(
    SHAPES, st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([(1.0, 0.0), (1e-3, 0.0), (1e4, 0.0), (1.0, 30.0)]), st.integers(0, 99),
)  # fmt: skip
def test_error_is_at_most_twice_that_of_torch(shape, dtype, centred, affine, residual, spread, seed):
    assert_as_exact_as_torch(centred, drawn(shape, dtype, seed, *spread, affine, residual))


@pytest.mark.parametrize(("centred", "dtype"), CASES)
def test_long_columns_and_rows(centred, dtype):
    """Sums over many rows, pieces of which are summed apart, and over long rows."""
    assert_as_exact_as_torch(centred, drawn((5000, 8), dtype, 1))
    assert_as_exact_as_torch(centred, drawn((2, 100_003), dtype, 2))


@pytest.mark.parametrize(("centred", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(33, 40), (150, 257), (70, 1023)])
def test_addition_before_the_norm_or_in_it(centred, dtype, shape):
    """A cut may fall between the two, so they agree in every bit."""

    def apart(centred, x, residual, weight, bias):
        s = x + residual
        return ours(centred, s, None, weight, bias), s

    inputs = drawn(shape, dtype, 3)
    assert_same_bits(run(ours, centred, inputs), run(apart, centred, inputs))


@pytest.mark.parametrize(("centred", "dtype"), CASES)
def test_bits_do_not_depend_on_threads(centred, dtype):
    inputs = drawn((300, 200), dtype, 4)
    found = with_threads(lambda: run(ours, centred, inputs))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@needs_kernels
def test_instruction_sets_agree(monkeypatch):
    for other in instruction_sets():
        for dtype, centred in product(DTYPES, (True, False)):
            inputs = drawn((70, 333), dtype, 5)
            expected = run(ours, centred, inputs)
            key = inputs[0].dtype, inputs[1].dtype
            kind = ("layer" if centred else "rms"), module._DTYPES[key]
            pair = tuple(getattr(other, f"{kind[0]}_norm{way}_{kind[1]}") for way in ("", "_backward"))
            with monkeypatch.context() as patch:
                patch.setitem(module._KERNELS[centred], ("cpu", key), pair)
                for a, b in zip(run(ours, centred, inputs), expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=ACROSS_SETS[a.dtype], atol=1e-4)


@pytest.mark.parametrize(("centred", "dtype"), CASES)
def test_not_a_number_stays_in_its_row(centred, dtype):
    x, residual, weight, bias = drawn((6, 33), dtype, 6)
    x[1, 4], x[3, 0] = float("nan"), float("inf")
    y, s = ours(centred, x, residual, weight, bias)
    assert y[[1]].isnan().all()
    assert y[3, 0].isnan()  # inf / inf
    assert y[[0, 2, 4, 5]].isfinite().all()
    assert torch.equal(s[[0, 2]], (x + residual)[[0, 2]])


@pytest.mark.parametrize("centred", [True, False])
def test_rows_without_spread(centred):
    """Constant rows and denormal numbers: eps decides."""
    for value in (0.0, 3.0, 1e-40):
        x = torch.full((3, 50), value)
        torch.testing.assert_close(ours(centred, x, None, None, None), plain(centred, x, None, None, None))


@pytest.mark.parametrize("centred", [True, False])
def test_strides_of_any_kind(centred):
    x, residual, weight, bias = drawn((12, 9), torch.float32, 7)
    straight = run(ours, centred, (x, residual, weight, bias))
    turned = [None if t is None else t.t().contiguous().t() for t in (x, residual)]
    strided = torch.stack([weight, weight], -1)[:, 0]
    leaves = [t.detach().requires_grad_() for t in (*turned, strided, bias)]
    y, s = ours(centred, *leaves)
    assert_same_bits([y, s], straight[:2])
    (y.sum() + s.sum()).backward()  # expanded gradients, of stride 0
    assert leaves[0].grad.shape == x.shape


def test_unused_results_and_frozen_arguments():
    x, residual, weight, bias = drawn((5, 8), torch.float32, 8)
    x.requires_grad_()
    y, s = layer_norm(x, weight, bias, EPS, residual)
    (alone,) = torch.autograd.grad(s.sum(), x, retain_graph=True)
    assert torch.equal(alone, torch.ones(5, 8))
    (alone,) = torch.autograd.grad(y.square().sum(), x)
    z = x.detach().requires_grad_()
    F.layer_norm(z + residual, (8,), weight, bias, EPS).square().sum().backward()
    torch.testing.assert_close(alone, z.grad)


@needs_kernels
@pytest.mark.parametrize("centred", [True, False])
def test_a_branch_of_another_dtype_is_added_by_the_kernel(centred, monkeypatch):
    monkeypatch.setattr(module, "_by_torch", lambda *_: pytest.fail("computed by torch"))
    inputs = drawn((5, 8), AUTOCAST, 12)
    y, s = ours(centred, *inputs)
    assert y.dtype == s.dtype == torch.float32
    _, branch, *_ = leaves = [t.requires_grad_() for t in inputs]
    y, s = ours(centred, *leaves)
    (alone,) = torch.autograd.grad((s * 1.001).sum(), branch, retain_graph=True)  # y is not used
    assert torch.equal(alone, torch.full((5, 8), 1.001).bfloat16())
    (of_x, of_branch) = torch.autograd.grad(y.sin().sum() + s.sum(), leaves[:2])
    assert_same_bits([of_branch], [of_x.bfloat16()])
    branch.requires_grad_(False)
    assert leaves[0].requires_grad
    (alone,) = torch.autograd.grad(sum(t.sin().sum() for t in ours(centred, *leaves)), leaves[0])
    assert alone.dtype == torch.float32


@pytest.mark.parametrize("centred", [True, False])
def test_gradients_of_the_plain_form(centred):
    inputs = [t.double().requires_grad_() for t in drawn((4, 7), torch.float32, 9)]
    assert torch.autograd.gradcheck(
        lambda *t: ours(centred, *t, *inputs[len(t) :]), inputs if centred else inputs[:3]
    )


@pytest.mark.parametrize("centred", [True, False])
def test_other_dtypes_take_the_way_of_torch(centred):
    x, residual, weight, bias = drawn((4, 7), torch.float32, 10)
    mixed = ours(centred, x.bfloat16(), residual, weight, bias)
    s = x.bfloat16() + residual
    assert_same_bits(mixed, (ours(centred, s, None, weight, bias), s))
    halves = [t.half() for t in (x, residual, weight, bias)]
    assert_same_bits(ours(centred, *halves), plain(centred, *halves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_arguments_are_refused(dtype):
    x = torch.ones(3, 8, dtype=dtype)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); it must have \(8,\)"):
        layer_norm(x, torch.ones(7, dtype=dtype))
    with pytest.raises(ValueError, match=r"bias has shape \(8, 1\)"):
        layer_norm(x, None, torch.ones(8, 1, dtype=dtype))
    with pytest.raises(ValueError, match=r"residual has shape \(8,\); it must have \(3, 8\)"):
        rms_norm(x, None, EPS, torch.ones(8, dtype=dtype))
    with pytest.raises(ValueError, match="int64"):
        rms_norm(torch.ones(3, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="meta"):
        layer_norm(x, torch.ones(8, device="meta", dtype=dtype))
    with pytest.raises(ValueError, match=r"\(\)"):
        layer_norm(torch.ones((), dtype=dtype))


MIXED = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # which torch then computes
@pytest.mark.parametrize("of_weight", MIXED)
@pytest.mark.parametrize("dtype", MIXED[:3])
@pytest.mark.parametrize("centred", [True, False])
def test_dtypes_that_torch_does_not_mix(centred, dtype, of_weight):
    """Both dtypes by name, and only where torch would not compute it."""
    x, weight = torch.ones(3, 8, dtype=dtype), torch.ones(8, dtype=of_weight)

    def ours():
        return layer_norm(x, weight) if centred else rms_norm(x, weight)

    try:
        theirs = F.layer_norm(x, (8,), weight) if centred else F.rms_norm(x, (8,), weight, 1e-6)
    except RuntimeError:
        with pytest.raises(ValueError, match=f"weight is {of_weight}, x is {dtype}; cast one of them"):
            ours()
    else:
        torch.testing.assert_close(ours(), theirs)


@needs_kernels
@pytest.mark.parametrize("centred", [True, False])
def test_rows_without_elements(centred):
    """With data, and without: a graph is traced by the form without."""
    x = torch.ones(3, 0)
    with FakeTensorMode() as mode:
        fake = torch.ops.mpipipe.norm(mode.from_tensor(x), None, None, None, EPS, centred)
    for got, real in zip(fake, torch.ops.mpipipe.norm(x, None, None, None, EPS, centred), strict=True):
        assert got.shape == real.shape
    assert layer_norm(x).shape == rms_norm(x).shape == (3, 0)


@needs_kernels
def test_the_raw_door_refuses_strides():
    x = torch.ones(8, 3).t()
    with pytest.raises(ValueError, match=r"x has strides \(1, 3\).*contiguous"):
        module._forward(x, None, None, None, EPS, True)
    with pytest.raises(ValueError, match=r"residual has strides \(1, 3\).*contiguous"):
        module._forward(x.contiguous(), x.bfloat16(), None, None, EPS, True)


@needs_kernels
def test_the_raw_door_refuses_a_residual_of_more_digits_than_x():
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"residual is torch\.float32, other arguments are torch\.bfloat16"):
        module._forward(x.bfloat16(), x, None, None, EPS, True)
    with pytest.raises(ValueError, match="residual is on meta"):
        module._forward(x, x.bfloat16().to("meta"), None, None, EPS, True)


@needs_kernels
@pytest.mark.parametrize(("centred", "dtype"), CASES)
def test_registered_operators(centred, dtype):
    x, residual, weight, bias = (t.requires_grad_() for t in drawn((5, 16), dtype, 11))
    bias = bias if centred else None
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for args in ((x, residual, weight, bias), (x, None, None, None)):
        torch.library.opcheck(torch.ops.mpipipe.norm, (*args, EPS, centred), test_utils=tests)


@needs_kernels
def test_who_calls_an_operator_by_its_name_is_told_what_does_not_fit():
    x, stats = torch.ones(3, 8), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"no compiled kernel takes .*float64.* on cpu; there are .*float32"):
        torch.ops.mpipipe.norm(x.double(), None, None, None, EPS, True)
    with pytest.raises(ValueError, match=r"no compiled kernel takes torch.int64"):
        torch.ops.mpipipe.swiglu(x.long(), x.long())
    for wrong, text in (
        (stats.bfloat16(), "stats is torch.bfloat16"),
        (stats[:1], r"stats has shape \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=text):
            torch.ops.mpipipe.norm_backward(x, None, x, None, wrong, True, False, False, False)


@needs_kernels
def test_export_sees_the_operator():
    class Net(torch.nn.Module):
        def forward(self, x, w):
            y, s = layer_norm(x, w, None, EPS, x * 2)
            return y + rms_norm(s, w, EPS)

    args = torch.randn(4, 8), torch.randn(8)
    exported = torch.export.export(Net(), args)
    assert [n.target for n in exported.graph.nodes].count(torch.ops.mpipipe.norm.default) == 2
    assert torch.equal(exported.module()(*args), Net()(*args))
