"""bias_gelu and swiglu against their formulas in float64, with torch's own error as the measure of ours."""

import importlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled import instruction_sets, with_threads
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.ops import kernels
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.swiglu import swiglu

pytestmark = pytest.mark.kernels
gelu_module = importlib.import_module("mpipipe.ops.bias_gelu")
swiglu_module = importlib.import_module("mpipipe.ops.swiglu")  # of that name mpipipe.ops has the function

DTYPES = [torch.float32, torch.bfloat16]
ACROSS_SETS = {torch.float32: 1e-4, torch.bfloat16: 1.6e-2}  # relative, of one result on two of them
needs_kernels = pytest.mark.skipif(kernels is None, reason="the compiled kernels are not built")

FORMS = {  # name -> ours, torch's
    "none": (bias_gelu, lambda x, b: F.gelu(x + b)),
    "tanh": (
        lambda x, b: bias_gelu(x, b, approximate="tanh"),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
    ),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up),
}


def normal_cdf(x):
    return torch.special.erfc(-x * 0.5**0.5) / 2


SHAPES = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(0, 70)),
    st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 300)),
    st.sampled_from([(1,), (7,), (1, 1), (900, 3), (130, 129), (3, 5000)]),
)


def drawn(form, shape, dtype, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    second = shape if form == "swiglu" else shape[-1:]
    return [(torch.randn(s, generator=g) * scale).to(dtype) for s in (shape, second)]


def run(function, inputs):
    """The result and the gradients of both inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1000)).to(torch.bfloat16).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_same_bits(a, b):
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p.contiguous().view(torch.uint8), q.contiguous().view(torch.uint8))


def assert_as_exact_as_torch(form, inputs):
    """The largest error at most twice torch's and two units in the last place of the largest value: of a few
    values torch's may all be rounded well."""
    ours, torchs = FORMS[form]
    exact = run(torchs, [t.double() for t in inputs])
    for mine, his, true in zip(run(ours, inputs), run(torchs, inputs), exact, strict=True):
        assert mine.shape == his.shape
        assert mine.dtype == his.dtype
        if inputs[0].numel():
            walk = (inputs[0].numel() / mine.numel()) ** 0.5  # of a sum over rows
            unit = torch.finfo(mine.dtype).eps * true.abs().max().clamp(min=1e-3)
            assert (mine - true).abs().max() <= 2 * ((his - true).abs().max() + walk * unit)


@settings(max_examples=30)
@given(
    st.sampled_from(list(FORMS)), SHAPES, st.sampled_from(DTYPES), st.sampled_from([1e-2, 1.0, 6.0, 300.0]),
    st.integers(0, 99),
)  # fmt: skip
def test_error_is_at_most_twice_that_of_torch(form, shape, dtype, scale, seed):
    assert_as_exact_as_torch(form, drawn(form, shape, dtype, seed, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_long_columns(form, dtype):
    assert_as_exact_as_torch(form, drawn(form, (5000, 8), dtype, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_threads(form, dtype):
    inputs = drawn(form, (300, 200), dtype, 2)
    found = with_threads(lambda: run(FORMS[form][0], inputs))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@pytest.mark.parametrize("form", FORMS)
def test_extreme_values(form):
    """Far out the results are the limits, and only NaN and what torch makes of infinity are not numbers."""
    ours, torchs = FORMS[form]
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4, 3e30, float("nan"), 1.0])
    other = torch.zeros(13) if form != "swiglu" else torch.ones(13)
    got, expected = run(ours, [x, other]), run(torchs, [x, other])
    for mine, his in zip(got, expected, strict=True):
        torch.testing.assert_close(mine[:10], his[:10], rtol=1e-5, atol=1e-6)
        assert mine[11].isnan()
        torch.testing.assert_close(mine[12], his[12])
    assert got[0][10] == x[10]


def test_the_left_tail_of_the_exact_form_keeps_its_digits():
    x = torch.linspace(-12, -1, 500)
    exact = x.double() * normal_cdf(x.double())
    assert ((bias_gelu(x, torch.zeros(500)) - exact) / exact).abs().max() < 1e-5


@needs_kernels
def test_instruction_sets_agree(monkeypatch):
    for other in instruction_sets():
        short = {torch.float32: "f32", torch.bfloat16: "bf16"}
        for form in FORMS:
            for dtype in DTYPES:
                inputs = drawn(form, (70, 333), dtype, 5)
                expected = run(FORMS[form][0], inputs)
                module, kernel = (swiglu_module, "swiglu") if form == "swiglu" else (gelu_module, "bias_gelu")
                key = dtype if form == "swiglu" else (dtype, dtype)
                pair = tuple(getattr(other, f"{kernel}{way}_{short[dtype]}") for way in ("", "_backward"))
                with monkeypatch.context() as patch:
                    patch.setitem(module._KERNELS, ("cpu", key), pair)
                    got = run(FORMS[form][0], inputs)
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=ACROSS_SETS[dtype], atol=1e-4)


def test_a_float32_bias_beside_bfloat16():
    """As under autocast: the bias is a parameter, its gradient is not rounded to bfloat16."""
    x, bias = drawn("none", (50, 33), torch.float32, 6)
    y, dx, dbias = run(bias_gelu, [x.bfloat16(), bias])
    exact = run(FORMS["none"][1], [x.bfloat16().double(), bias.double()])
    assert (y.dtype, dx.dtype, dbias.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(dbias.double(), exact[2], rtol=1e-5, atol=1e-4)
    assert bias_gelu(x.bfloat16(), bias.double()).dtype == torch.bfloat16


def test_no_bias():
    x, _ = drawn("none", (5, 8), torch.float32, 7)
    assert torch.equal(bias_gelu(x, None), bias_gelu(x, torch.zeros(8)))
    z = x.clone().requires_grad_()
    bias_gelu(z, None).sum().backward()
    y = x.clone().requires_grad_()
    F.gelu(y).sum().backward()
    torch.testing.assert_close(z.grad, y.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_one_tensor(dtype):
    both = torch.randn(3, 4, 34, generator=torch.Generator().manual_seed(8)).to(dtype)
    gate, up = both.chunk(2, -1)
    assert swiglu_module._with_rows(gate) is gate
    assert_same_bits(run(swiglu, [gate, up]), run(swiglu, [gate.contiguous(), up.contiguous()]))
    leaf = both.requires_grad_()
    y = swiglu(*leaf.chunk(2, -1))
    assert torch.equal(y, swiglu(gate.contiguous(), up.contiguous()))
    y.sum().backward()
    assert leaf.grad.shape == both.shape


@pytest.mark.parametrize("form", FORMS)
def test_strides_of_any_kind(form):
    x, other = drawn(form, (12, 9), torch.float32, 9)
    straight = FORMS[form][0](x, other)
    other = other.t().contiguous().t() if form == "swiglu" else torch.stack([other, other], -1)[:, 0]
    assert_same_bits([FORMS[form][0](x.t().contiguous().t(), other)], [straight])


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x.view(4, 1, 5, 18)[:, :, :3],
        lambda x: x.view(4, 1, 5, 18)[..., :7],
        lambda x: x.view(4, 5, 1, 1, 18)[:, :3],
        lambda x: x.view(20, 1, 18)[:3, :, 2:],
        lambda x: x.view(20, 18).t()[:, None, :1],
        lambda x: x.view(20, 18)[:1].t()[None],
    ],
)
def test_dimensions_of_one_element(part):
    """Whose stride says nothing of where the rows are."""
    gate, up = (part(t) for t in drawn("swiglu", (360,), torch.float32, 13))
    assert_same_bits(run(swiglu, [gate, up]), run(swiglu, [gate.contiguous(), up.contiguous()]))
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_the_plain_form(form):
    inputs = [t.double().requires_grad_() for t in drawn(form, (4, 7), torch.float32, 10)]
    assert torch.autograd.gradcheck(FORMS[form][0], inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_arguments_are_refused(dtype):
    x = torch.ones(3, 8, dtype=dtype)
    with pytest.raises(ValueError, match=r"bias has shape \(7,\); it must have \(8,\)"):
        bias_gelu(x, torch.ones(7, dtype=dtype))
    with pytest.raises(ValueError, match="'tan'"):
        bias_gelu(x, None, "tan")
    with pytest.raises(ValueError, match=r"up has shape \(8,\); it must have \(3, 8\)"):
        swiglu(x, torch.ones(8, dtype=dtype))
    with pytest.raises(ValueError, match="meta"):
        swiglu(x, torch.ones(3, 8, dtype=dtype, device="meta"))
    with pytest.raises(ValueError, match="int64"):
        swiglu(x.long(), x.long())
    for call in (lambda t: swiglu(t, t), lambda t: bias_gelu(t, None)):
        with pytest.raises(ValueError, match=r"\(\)"):
            call(torch.ones((), dtype=dtype))


@needs_kernels
def test_the_raw_doors_refuse_strides():
    x = torch.ones(8, 3).t()
    with pytest.raises(ValueError, match=r"x has strides \(1, 3\).*contiguous"):
        gelu_module._forward(x, None, False)
    with pytest.raises(ValueError, match=r"gate has strides \(1, 3\).*contiguous"):
        swiglu_module._forward(x, x)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_registered_operators(dtype):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, bias = (t.requires_grad_() for t in drawn("none", (5, 16), dtype, 11))
    torch.library.opcheck(torch.ops.mpipipe.bias_gelu, (x, bias, False), test_utils=tests)
    torch.library.opcheck(torch.ops.mpipipe.bias_gelu, (x, None, True), test_utils=tests)
    torch.library.opcheck(torch.ops.mpipipe.swiglu, (x, x.detach() + 1), test_utils=tests)


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_export_sees_one_operator(form):
    class Model(torch.nn.Module):
        def forward(self, x, other):
            return FORMS[form][0](x, other)

    inputs = tuple(drawn(form, (5, 16), torch.float32, 12))
    program = torch.export.export(Model(), inputs, strict=False)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names == [f"mpipipe.{'swiglu' if form == 'swiglu' else 'bias_gelu'}.default"]
    assert_same_bits(run(program.module(), inputs), run(FORMS[form][0], inputs))


@needs_kernels
@pytest.mark.parametrize(
    ("kernel", "exact", "bound"),
    [
        ("math_exp", torch.exp, 2e-7),
        ("math_sigmoid", torch.sigmoid, 2e-7),
        ("math_normal_cdf", normal_cdf, 5e-7),
    ],
)
def test_functions_of_math_h(kernel, exact, bound):
    """Relative error where the result is normal; the ends of the range. In the tail of the normal
    distribution the square of x is rounded before the exponential: the bound is for -x up to 2.5."""
    x = torch.linspace(-86.5, 87, 100_001)
    if kernel == "math_normal_cdf":
        x = torch.linspace(-2.5, 9, 100_001)
    ends = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 200.0, -200.0])
    got = [torch.empty_like(x), torch.empty_like(ends)]
    for given_, out in zip((x, ends), got, strict=True):
        getattr(kernels, kernel)(given_.data_ptr(), out.data_ptr(), len(out))
    expected = exact(x.double())
    assert ((got[0] - expected) / expected).abs().max() < bound
    np.testing.assert_allclose(got[1], exact(ends), rtol=1e-6)
