"""Attention in tiles against float64, in every mask, sharing of heads, dtype and layout of memory."""

import importlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from compiled import instruction_sets, with_threads
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mpipipe.ops import flash_attention, kernels
from mpipipe.ops.library import traced

pytestmark = pytest.mark.kernels

door = importlib.import_module("mpipipe.ops.flash_attention")
needs_kernels = pytest.mark.skipif(kernels is None, reason="the compiled kernels are missing")
MASKS = ["none", "lengths", "mask"]


def problem(b=2, h=4, hk=2, t=33, s=33, e=16, dtype=torch.float32, seed=0, size=1.0):
    """q, k, v as transposed views of (B, T, H, E), as a projection gives them."""
    g = torch.Generator().manual_seed(seed)
    shapes = (b, t, h, e), (b, s, hk, e), (b, s, hk, e)
    return [(size * torch.randn(x, generator=g)).to(dtype).transpose(1, 2).requires_grad_() for x in shapes]


def hidden(kind: str, b: int, s: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    if kind == "lengths":
        return {"key_lengths": torch.randint(0, s + 1, (b,), generator=g)}
    return {"key_mask": torch.rand(b, s, generator=g) < 0.6} if kind == "mask" else {}


def results(function, inputs, d_o):
    o = function(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, d_o.to(o.dtype))]


def by_torch(causal, masks, scale):
    def run(q, k, v):
        return door._by_torch(q, k, v, masks.get("key_lengths"), masks.get("key_mask"), causal, scale)

    return run


def roundings(q, k, v, d_o, scale):
    """One rounding of the greatest term of o, dq, dk and dv: what is left where they cancel."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    dp = (d_o.double() @ v.double().mT).abs().amax() * abs(scale)
    sizes = v.abs().amax(), dp * k.abs().amax(), dp * q.abs().amax(), d_o.abs().amax()
    return [torch.finfo(q.dtype).eps * size.double() for size in sizes]


def compare(inputs, causal, masks, scale=None):
    """The error to float64 is at most twice that of torch's own attention, or a few roundings."""
    scale = inputs[0].shape[3] ** -0.5 if scale is None else scale
    d_o = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(9))
    plain = by_torch(causal, masks, scale)
    exact = results(plain, [x.detach().double().requires_grad_() for x in inputs], d_o.to(inputs[0].dtype))
    torchs = results(plain, inputs, d_o)
    ours = results(lambda *x: flash_attention(*x, causal=causal, scale=scale, **masks), inputs, d_o)
    units = roundings(*(x.detach() for x in inputs), d_o, scale)
    for got, other, true, unit in zip(ours, torchs, exact, units, strict=True):
        assert got.dtype == inputs[0].dtype
        bound = 2 * (other.double() - true).abs().max() + 4 * unit
        assert (got.double() - true).abs().max() <= bound


@given(
    st.integers(1, 3), st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)]), st.integers(1, 150),
    st.integers(1, 150), st.sampled_from([1, 7, 16, 32, 48, 64, 80, 96, 100, 128, 150]), st.booleans(),
    st.sampled_from(MASKS), st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, 0.3]),
)  # fmt: skip
@settings(max_examples=25)
@example(1, (4, 4), 1, 1, 16, False, "none", torch.float32, None)
@example(1, (1, 1), 300, 260, 64, True, "none", torch.float32, None)
@example(1, (2, 1), 65, 200, 80, True, "mask", torch.bfloat16, None)
@example(1, (2, 1), 67, 71, 97, True, "none", torch.bfloat16, None)
def test_against_float64(b, heads, t, s, e, causal, mask, dtype, scale):
    compare(problem(b, *heads, t, s, e, dtype), causal, hidden(mask, b, s), scale)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("e", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_long_against_float64(causal, e, dtype):
    compare(problem(1, 2, 1, 1111, 1024, e, dtype), causal, {})


@pytest.mark.parametrize(
    "shape", [(0, 2, 2, 5, 5, 8), (2, 0, 0, 5, 5, 8), (2, 2, 2, 0, 5, 8), (2, 2, 2, 5, 0, 8)]
)
def test_nothing_in_a_dimension(shape):
    inputs = problem(*shape)
    o = flash_attention(*inputs, causal=True)
    assert o.shape == inputs[0].shape
    assert all((x == 0).all() for x in (o, *torch.autograd.grad(o.sum(), inputs)))


@pytest.mark.parametrize(
    "masks", [{"key_lengths": torch.tensor([0, 3])}, {"key_mask": torch.eye(2, 70)[:, :70] > 1}]
)
def test_a_query_that_sees_nothing_gives_zero(masks):
    inputs = problem(t=70, s=70)
    o = flash_attention(*inputs, causal=True, **masks)
    grads = torch.autograd.grad(o.sum(), inputs)
    assert all((x[0] == 0).all() and x.isfinite().all() for x in (o, *grads))


OUT_OF_MEMORY = """
import resource, torch
from pathlib import Path
from mpipipe.ops import flash_attention

q, k = torch.randn(2, 1, 64, 64), torch.randn(2, 1, 200_000, 65)[..., :64]
for threads in (1, 2):
    torch.set_num_threads(threads)
    flash_attention(q, q, q)  # its threads are there
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (20 << 20), resource.RLIM_INFINITY))
    try:
        flash_attention(q, k, k)
    except MemoryError:
        print("said")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
o = flash_attention(q, k, k)
assert torch.allclose(o, torch.nn.functional.scaled_dot_product_attention(q, k, k), atol=1e-5)
"""


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="there is no limit of memory")
def test_want_of_memory_is_an_error():
    """Of a copy that a thread makes; not the end of the process."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["said", "said"]), done.stderr


@needs_kernels
@pytest.mark.parametrize("size", [1e-20, 1e-3, 30.0, 1e4])
def test_extreme_sizes(size):
    """Tiny values (their products are denormal), and scores of which a single one decides."""
    compare(problem(1, 2, 1, 40, 40, 32, size=size), True, {})


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1])
def test_nan_reaches_what_depends_on_it(bits):
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for which in range(3):
        inputs = [x.detach() for x in problem(1, 2, 2, 70, 70, 16)]
        inputs[which][0, 1, 20, 3] = nan
        o = flash_attention(*inputs, causal=True)
        assert o[0, 0].isfinite().all()
        assert o[0, 1, :16].isfinite().all()  # before the strip of the diagonal that the key is in
        assert o[0, 1, 20:].isnan().any(-1).all() if which else o[0, 1, 20].isnan().all()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_a_scale_that_is_not_positive(scale, dtype):
    """For which torch 2.13 gives NaN with a causal mask."""
    q, k, v = (x.detach() for x in problem(1, 2, 2, 70, 70, 33, dtype))
    scores = scale * (q.double() @ k.double().mT)
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)
    exact = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
    got = flash_attention(q, k, v, causal=True, scale=scale).double()
    assert (got - exact).abs().max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seen", [50, 51])
def test_what_lengths_hide_is_not_read(seen, dtype):
    q, k, v = problem(1, 2, 2, 40, 70, 16, dtype)
    with torch.no_grad():
        k[:, :, seen:] = v[:, :, seen:] = torch.nan
    o = flash_attention(q, k, v, key_lengths=torch.tensor([seen]))
    expected = F.scaled_dot_product_attention(q, k[:, :, :seen], v[:, :, :seen])
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=4 * torch.finfo(dtype).eps)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), (q, k, v)))


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 2, 1, 300, 300, 32), (3, 4, 4, 70, 130, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(shape, dtype):
    inputs = problem(*shape, dtype=dtype)
    d_o = torch.randn(inputs[0].shape)
    found = with_threads(lambda: results(lambda *x: flash_attention(*x, causal=True), inputs, d_o))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_layout_is_that_of_the_inputs():
    x = torch.randn(2, 9, 3, 4, 16)  # of one projection: (B, T, 3, H, E)
    q, k, v = (y.transpose(1, 2).requires_grad_() for y in x.unbind(2))
    o = flash_attention(q, k, v, causal=True)
    assert o.transpose(1, 2).is_contiguous()
    straight = [y.detach().contiguous().requires_grad_() for y in (q, k, v)]
    same = flash_attention(*straight, causal=True)
    assert same.is_contiguous()
    assert torch.equal(o, same)
    turned = [y.detach().mT.contiguous().mT.requires_grad_() for y in (q, k, v)]  # the width is not innermost
    assert torch.equal(flash_attention(*turned, causal=True), same)
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(g.stride() == q.stride() for g in grads)
    assert torch.equal(
        torch.as_strided(grads[0], x.shape, x.stride()), torch.stack(grads).permute(1, 3, 0, 2, 4)
    )
    for inputs, out in ((straight, same), (turned, flash_attention(*turned, causal=True))):
        assert all(map(torch.equal, grads, torch.autograd.grad(out.sum(), inputs)))


@pytest.mark.parametrize(
    "expanded",
    [
        lambda x: x[:, :1, :1].expand(2, 1, 4, 8),
        lambda x: x[0, 0, 0].expand(2, 2, 4, 8),
        lambda x: x[:, :1, :1].mT.contiguous().mT.expand(2, 1, 4, 8),
        lambda x: x[:, 0, 0, :, None].transpose(1, 2)[:, None].expand(2, 1, 4, 8),
        lambda x: x[:, 0, 0, :, None].transpose(1, 2)[:, :, None].expand(2, 1, 4, 8),
    ],
)
def test_inputs_that_are_expanded(expanded):
    """Of whose strides none need be that of a token's elements in what has their order."""
    x = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(3))
    given_ = [expanded(x * factor).detach().requires_grad_() for factor in (1.0, 0.5, 2.0)]
    d_o = torch.randn(given_[0].shape)
    expected = results(flash_attention, [t.detach().contiguous().requires_grad_() for t in given_], d_o)
    assert all(map(torch.equal, results(flash_attention, given_, d_o), expected))
    if kernels is not None:
        torch.library.opcheck(
            torch.ops.mpipipe.flash_attention.default, (*given_, None, None, False, 0.5),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_one_number_per_query_is_kept():
    q, k, v = problem(1, 2, 2, 256, 256, 16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        flash_attention(q, k, v, causal=True)
    assert sum(t.numel() for t in saved) <= 4 * q.numel() + 2 * 256


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_gradients_of_the_plain_form(causal, kind):
    inputs = [x.detach().double().requires_grad_() for x in problem(2, 2, 1, 4, 5, 3)]
    masks = hidden(kind, 2, 5)
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, causal=causal, **masks), inputs)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "dtype", "causal"),
    [
        *((kind, torch.float32, True) for kind in MASKS),
        ("none", torch.float32, False),
        ("none", torch.bfloat16, True),
        ("mask", torch.bfloat16, False),
    ],
)
def test_operator(kind, dtype, causal):
    inputs = [x.detach().requires_grad_() for x in problem(2, 2, 1, 6, 6, 8, dtype)]
    masks = hidden(kind, 2, 6)
    torch.library.opcheck(
        torch.ops.mpipipe.flash_attention.default,
        (*inputs, masks.get("key_lengths"), masks.get("key_mask"), causal, 0.5),
    )


@needs_kernels
def test_export_sees_one_operator():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attention(q, k, v, causal=True)

    inputs = tuple(x.detach() for x in problem())
    program = torch.export.export(Model(), inputs, strict=False)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "mpipipe.flash_attention.default" in names
    assert torch.equal(program.module()(*inputs), Model()(*inputs))


def test_planning_without_data():
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 8, requires_grad=True).transpose(1, 2)
        assert traced(q)
        o = flash_attention(q, q, q, causal=True)
        o.sum().backward()
    assert o.shape == (2, 4, 5, 8)
    assert o.stride() == q.stride()


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "of", "tolerance"), [(torch.float32, "f32", 1e-4), (torch.bfloat16, "bf16", 3.2e-2)]
)
def test_instruction_sets_agree(monkeypatch, dtype, of, tolerance):
    inputs = problem(1, 2, 1, 100, 100, 80, dtype)
    d_o = torch.randn(inputs[0].shape)
    expected = results(lambda *x: flash_attention(*x, causal=True), inputs, d_o)
    for other in instruction_sets():
        pair = getattr(other, f"flash_attention_{of}"), getattr(other, f"flash_attention_backward_{of}")
        monkeypatch.setitem(door._KERNELS, ("cpu", dtype), pair)
        for got, one in zip(
            results(lambda *x: flash_attention(*x, causal=True), inputs, d_o), expected, strict=True
        ):
            torch.testing.assert_close(got, one, rtol=tolerance, atol=tolerance / 4)


Q = torch.ones(2, 4, 5, 8)
K = torch.ones(2, 2, 6, 8)
REFUSED = {
    "4 dimensions": (Q[0], K, K, {}),
    "v is": (Q, K, K[:, :, 1:], {}),
    "batch and width": (Q[:1], K, K, {}),
    "width not 0": (Q[..., :0], K[..., :0], K[..., :0], {}),
    "4 heads of q cannot share 3": (Q, torch.ones(2, 3, 6, 8), torch.ones(2, 3, 6, 8), {}),
    r"4 heads of q cannot share 0": (Q, K[:, :0], K[:, :0], {}),
    "torch.float64": (Q, K.double(), K, {}),
    "torch.int64": (Q.long(), K.long(), K.long(), {}),
    "on meta": (Q, K.to("meta"), K, {}),
    r"key_lengths is \(2,\) torch.int32": (Q, K, K, {"key_lengths": torch.ones(2, dtype=torch.int32)}),
    r"key_mask is \(2, 5\)": (Q, K, K, {"key_mask": torch.ones(2, 5, dtype=torch.bool)}),
    "go from 1 to 7": (Q, K, K, {"key_lengths": torch.tensor([1, 7])}),
    "go from -1 to 3": (Q, K, K, {"key_lengths": torch.tensor([-1, 3])}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_wrong_arguments_are_refused(said):
    q, k, v, masks = REFUSED[said]
    with pytest.raises(ValueError, match=said):
        flash_attention(q, k, v, **masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_without_data_are_not_read(dtype):
    q, k, lengths = Q.to("meta", dtype), K.to("meta", dtype), torch.ones(2, dtype=torch.int64, device="meta")
    assert flash_attention(q, k, k, key_lengths=lengths).shape == Q.shape


MASK = torch.ones(2, 6, dtype=torch.bool)
REFUSED_BY_OPERATOR = {  # q, k, v, key_lengths, key_mask
    "batch and width": (Q, K[..., :7], K[..., :7], None, None),
    "k is .*v is": (Q, K, K[:, :, 1:], None, None),
    "v torch.bfloat16": (Q, K, K.bfloat16(), None, None),
    "float64 on cpu": (Q.double(), K.double(), K.double(), None, None),
    "q is on cpu, k on meta": (Q, K.to("meta"), K, None, None),
    r"key_mask is \(2, 5\)": (Q, K, K, None, MASK[:, 1:]),
    "go from 1 to 7": (Q, K, K, torch.tensor([1, 7]), None),
}


@needs_kernels
@pytest.mark.parametrize("said", REFUSED_BY_OPERATOR)
def test_the_registered_operators_check_what_they_are_given(said):
    """Nobody else does, and the kernels would read past the end of it."""
    given_ = REFUSED_BY_OPERATOR[said]
    with pytest.raises(ValueError, match=said):
        torch.ops.mpipipe.flash_attention(*given_, False, 0.5)
    with pytest.raises(ValueError, match=said):
        torch.ops.mpipipe.flash_attention_backward(given_[0], *given_, given_[0], Q[..., 0], False, 0.5)


@needs_kernels
@pytest.mark.parametrize("kind", ["shape", "dtype", "device"])
@pytest.mark.parametrize("name", ["d_o", "o", "lse"])
def test_the_registered_derivative_checks_what_forward_gave(name, kind):
    fitting = {"d_o": Q, "o": Q, "lse": Q[..., 0]}
    x = fitting[name]
    made = {"shape": x[:1], "dtype": x.bfloat16(), "device": x.to("meta")}
    said = {"shape": r"\(2, 4, 5", "dtype": "bfloat16, .*float32", "device": "on meta, .*on cpu"}[kind]
    wrong, operator = fitting | {name: made[kind]}, torch.ops.mpipipe.flash_attention_backward
    with pytest.raises(ValueError, match=f"{name} .*{said}"):
        operator(wrong["d_o"], Q, K, K, None, None, wrong["o"], wrong["lse"], False, 0.5)
    assert len(operator(Q, Q, K, K, None, MASK, Q, Q[..., 0], False, 0.5)) == 3


def test_bfloat16_of_a_gpu_takes_the_kernel_where_torch_has_the_plain_form_alone(monkeypatch):
    """As on a rank, whose scores would take memory; elsewhere torch's form in tiles is the faster one."""
    monkeypatch.setitem(door._KERNELS, ("cuda", torch.bfloat16), (None, None))
    tiles = torch.backends.cuda.flash_sdp_enabled()
    with FakeTensorMode():
        x, wide = (torch.empty(1, 2, 4, width, dtype=torch.bfloat16, device="cuda") for width in (128, 129))
    try:
        for on in (True, False):
            torch.backends.cuda.enable_flash_sdp(on)
            assert door._torch_is_faster(x) is on
            assert not door._torch_is_faster(x.float())
            assert not door._torch_is_faster(Q.bfloat16())
    finally:
        torch.backends.cuda.enable_flash_sdp(tiles)
    assert door._served(x)
    assert not door._served(wide)


def test_without_kernels(monkeypatch):
    inputs = problem()
    expected = flash_attention(*inputs, causal=True)
    monkeypatch.setattr(door, "_KERNELS", {})
    torch.testing.assert_close(flash_attention(*inputs, causal=True), expected)


@needs_kernels
@pytest.mark.parametrize("strides", [(1, 2, 3), [4, 3, 2, 1], (4, 3, 2, "1"), (4, 3, 2, 2**70)])
def test_the_door_takes_strides_as_tuples_of_four_integers(strides):
    def call(given):  # of no samples: nothing is read or written
        kernels.flash_attention_f32(
            0, 0, 0, given, given, given, 0, 1, 1, 2, 2, 4, False, 1.0, 0, 0, 0, given, 0, 1
        )

    call((4, 3, 2, 1))
    with pytest.raises(TypeError):
        call(strides)
