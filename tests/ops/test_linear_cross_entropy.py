"""Linear layer and cross entropy in one against torch in float64, whatever the tiles are."""

import importlib
import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from mpipipe import native
from mpipipe.ops import cross_entropy, linear_cross_entropy
from mpipipe.ops.linear_cross_entropy import _by_torch
from mpipipe.ops.native import kernels

pytestmark = pytest.mark.kernels

needs_kernels = pytest.mark.skipif(kernels is None, reason="the kernels are not built")
SETS = [
    name
    for name, needs in native.SETS.get(platform.machine(), {"base": frozenset()}).items()
    if needs <= native.flags()
]


def case(tokens, entries, width=8, bias=True, dtype=torch.float32, spread=3.0, seed=0):
    """x, weight, labels (a third of them ignored), bias."""
    g = torch.Generator().manual_seed(seed)
    x = (spread * torch.randn(tokens, width, generator=g)).to(dtype).requires_grad_()
    weight = torch.randn(entries, width, generator=g).to(dtype).requires_grad_()
    labels = torch.randint(0, entries, (tokens,), generator=g)
    labels[::3] = -100
    b = torch.randn(entries, generator=g).to(dtype).requires_grad_() if bias else None
    return x, weight, labels, b


def by_torch(x, weight, labels, bias, smoothing=0.0, dtype=torch.float64, scale=1.0):
    """Loss and gradients of x, weight and bias, computed in `dtype`."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
    logits = functional.linear(*leaves)
    wide = logits if dtype == torch.float64 else logits.float()
    loss = functional.cross_entropy(wide, labels, label_smoothing=smoothing, reduction="sum")
    (scale * loss).backward()
    return [loss.detach(), *(t.grad for t in leaves if t is not None)]


def by_us(x, weight, labels, bias, smoothing=0.0, scale=1.0, late=False, own=False):
    loss = linear_cross_entropy(x, weight, labels, bias=bias, label_smoothing=smoothing, late=late, own=own)
    (scale * loss).backward()
    got = [loss.detach(), *(t.grad for t in (x, weight, bias) if t is not None)]
    for t in (x, weight, bias):
        if t is not None:
            t.grad = None
    return got


def worst(got, exact):
    return [
        (g.double() - e).abs().max().item() if e.numel() else 0.0 for g, e in zip(got, exact, strict=True)
    ]


def split(patch):
    """Several tiles of tokens and of entries also of small cases."""
    for name, value in (("_ALWAYS", 64), ("_COLUMNS", 64), ("_ROWS", 16), ("_FEWEST", 16)):
        patch.setattr(cross_entropy, name, value)


@pytest.fixture
def small_tiles(monkeypatch):
    split(monkeypatch)


@settings(max_examples=12)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 40), st.integers(1, 700), st.booleans(),
    st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.1, 3.0, 100.0]), st.booleans(), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_error_at_most_twice_torchs(dtype, tokens, entries, bias, smoothing, spread, tiled, late, own):
    with pytest.MonkeyPatch.context() as patch:
        if tiled:
            split(patch)
        given_ = case(tokens, entries, bias=bias, dtype=dtype, spread=spread)
        exact = by_torch(*given_, smoothing, scale=0.25)
        got = by_us(*given_, smoothing, scale=0.25, late=late, own=own)
    torchs = worst(by_torch(*given_, smoothing, dtype=dtype, scale=0.25), exact)
    # a logit is rounded, by chance in another direction: that moves a loss, and a gradient times x or weight
    x, weight = (t.detach().double() for t in given_[:2])
    chance = torch.finfo(dtype).eps * max((x @ weight.t()).abs().amax().item() if tokens else 0.0, 1.0)
    sizes = [tokens, *(m.abs().max().item() if m.numel() else 0.0 for m in (weight, x)), 1.0]
    for ours, theirs, size in zip(worst(got, exact), torchs, sizes, strict=False):
        assert ours <= 2 * theirs + chance * size


def test_a_gradient_that_is_there_is_added_to(small_tiles):
    x, weight, labels, bias = case(50, 300)
    exact = by_torch(x, weight, labels, bias)
    weight.grad = torch.ones_like(weight)
    place = weight.grad.data_ptr()
    for _ in range(2):
        linear_cross_entropy(x, weight, labels, bias=bias).backward()
    assert weight.grad.data_ptr() == place
    torch.testing.assert_close(weight.grad.double(), 1 + 2 * exact[2], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), 2 * exact[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_the_gradient_of_a_bfloat16_weight_is_rounded_once(small_tiles, late, into):
    """Not after each of a hundred tiles of tokens: their sum leaves the range of what is added."""
    x, weight, labels, _ = case(1600, 70, bias=False, spread=0.1)
    x, weight = ((t.detach() + 0.5).bfloat16().requires_grad_() for t in (x, weight))
    exact = by_torch(x, weight, labels, None)[2]
    rounded = by_torch(x, weight, labels, None, dtype=torch.bfloat16)[2]
    if into:
        weight.grad = torch.zeros_like(weight)
        place = weight.grad.data_ptr()
    linear_cross_entropy(x, weight, labels, late=late).backward()
    assert weight.grad.dtype == torch.bfloat16
    assert not into or weight.grad.data_ptr() == place
    assert (weight.grad - exact).norm() <= 2 * (rounded - exact).norm()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor(0.0), torch.tensor(-2.0).double()])
def test_what_the_sum_is_multiplied_by(small_tiles, late, scale):
    """Loss and gradients, whether it is made in forward, in backward, traced or without gradients."""
    x, weight, labels, bias = case(50, 300)
    total, *gradients = (float(scale) * t for t in by_torch(x, weight, labels, bias))
    loss = linear_cross_entropy(x, weight, labels, bias=bias, late=late, scale=scale)
    got = torch.autograd.grad(2.0 * loss, [x, weight, bias])
    for g, exact in zip(got, gradients, strict=True):
        torch.testing.assert_close(g.double(), 2.0 * exact, rtol=1e-5, atol=1e-5)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach().double(), total, rtol=1e-6, atol=0)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, labels, bias=bias, scale=scale), loss.detach())
    wide = linear_cross_entropy(*(t.double() for t in (x, weight)), labels, bias=bias.double(), scale=scale)
    torch.testing.assert_close(wide.detach(), total, rtol=1e-12, atol=0)


@needs_kernels
def test_late_it_is_backward_that_makes_the_loss(small_tiles):
    x, weight, labels, bias = case(50, 300)
    early, *gradients = by_us(x, weight, labels, bias)
    loss = linear_cross_entropy(x, weight, labels, bias=bias, late=True)
    shown = loss.detach()
    assert shown.isnan()
    (loss * 0.5).backward()
    assert torch.equal(shown, early)
    for t, whole in zip((x, weight, bias), gradients, strict=True):
        torch.testing.assert_close(t.grad, 0.5 * whole)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, labels, bias=bias, late=True), early)


def test_backward_again_through_the_same_graph(small_tiles):
    x, weight, labels, bias = case(50, 300)
    loss = linear_cross_entropy(x, weight, labels, bias=bias)
    first = torch.autograd.grad(loss, [x, weight, bias], retain_graph=True)
    second = torch.autograd.grad(loss, [x, weight, bias], retain_graph=True)
    (only_x,) = torch.autograd.grad(loss, x)
    for again in (second, (only_x,)):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=False))


def test_gradients_in_two_steps(small_tiles):
    """As a schedule that splits the backward: first of x, later of the weights."""
    x, weight, labels, bias = case(50, 300)
    expected = by_us(x, weight, labels, bias)
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    loss = linear_cross_entropy(x, weight, labels, bias=bias)
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert not weight.grad.any()
    loss.backward(inputs=[weight, bias])
    assert x.grad is None
    for got, wish in zip([dx, weight.grad, bias.grad], expected[1:], strict=True):
        torch.testing.assert_close(got, wish)


def test_autocast(small_tiles):
    """Products in bfloat16, the softmax in float32: as torch's two operators, within bfloat16."""
    x, weight, labels, bias = case(50, 300, spread=1.0)
    exact = by_torch(x, weight, labels, bias)
    torchs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        logits = functional.linear(*torchs)
        theirs = functional.cross_entropy(logits, labels, reduction="sum")
        ours = linear_cross_entropy(x, weight, labels, bias=bias)
    theirs.backward()
    ours.backward()
    assert ours.dtype == torch.float32
    errors = worst([ours.detach(), x.grad, weight.grad, bias.grad], exact)
    bounds = worst([theirs.detach(), *(t.grad for t in torchs)], exact)
    assert all(e <= 2 * b for e, b in zip(errors, bounds, strict=True))


def test_without_gradients_none_are_made():
    x, weight, labels, bias = case(50, 300)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, labels, bias=bias)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.double(), by_torch(x, weight, labels, bias)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(small_tiles, value):
    x, weight, labels, bias = case(20, 300)
    with torch.no_grad():
        x[4] = value
        x[3] = value  # its label is ignored: it counts nowhere
    loss, dx, _, _ = by_us(x, weight, labels, bias)
    assert loss.isnan()
    assert dx[4].isnan().all()
    assert not dx[3].any()


def test_masked_entries(small_tiles):
    """Entries of logit -infinity, whole tiles of them first: no probability, no gradient."""
    x, weight, labels, bias = case(20, 300)
    with torch.no_grad():
        bias[:200] = -torch.inf
        labels[labels >= 0] = 250
    exact = by_torch(x, weight, labels, bias)
    got = by_us(x, weight, labels, bias)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        bias[:] = -torch.inf
    assert by_us(x, weight, labels, bias)[0].isnan()


@needs_kernels
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", SETS)
def test_each_instruction_set_against_the_reference(name, dtype):
    module = importlib.import_module(f"mpipipe._kernels_{name}")
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    rows, columns = 7, 2077
    logits = (5 * torch.randn(rows, columns)).to(kind)
    logits[1, 3], logits[2, 5], logits[4] = float("nan"), float("inf"), -torch.inf
    bias, labels = torch.randn(columns), torch.tensor([100, 101, 2176, 1500, 99, -1, 3000])
    results = []
    for prefix, threads in [("reference_", 1), ("", 1), ("", 2), ("", 3)]:
        state = torch.tensor([-torch.inf, 0, 0, 0], dtype=torch.float64).repeat(rows, 1)
        g, log_sum = logits.clone(), torch.full((rows,), 12.5)
        start = (rows, columns, bias.data_ptr(), labels.data_ptr(), 100, -1)
        forward = getattr(module, f"{prefix}cross_entropy_forward_{dtype}")
        backward = getattr(module, f"{prefix}cross_entropy_backward_{dtype}")
        forward(g.data_ptr(), *start, state.data_ptr(), threads)
        backward(g.data_ptr(), *start, log_sum.data_ptr(), 0.9, 1e-4, 0.5, threads)
        results.append((state, g))
    (reference, gradient), one, *others = results
    finite = [0, 3, 4, 5, 6]
    torch.testing.assert_close(one[0][finite], reference[finite], rtol=1e-6, atol=1e-2)
    assert one[0][[1, 2], 1].isnan().all()
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if dtype == "bf16" else {"rtol": 2e-6, "atol": 1e-6}
    torch.testing.assert_close(one[1], gradient, equal_nan=True, **tolerance)
    for state, g in others:
        assert torch.equal(state.view(torch.int64), one[0].view(torch.int64))
        assert torch.equal(g.view(torch.uint8), one[1].view(torch.uint8))


@needs_kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", SETS)
def test_the_loss_of_each_instruction_set(name, smoothing):
    """Of what forward leaves of each token: against float64, for any number of threads."""
    module = importlib.import_module(f"mpipipe._kernels_{name}")
    rows, entries = 5000, 33
    logits = 5 * torch.randn(rows, entries, dtype=torch.float64)
    labels = torch.randint(0, entries, (rows,))
    labels[::3] = -100

    def loss(threads=1):
        most, of_label = logits.amax(1), logits.gather(1, labels.clamp(0, entries - 1)[:, None])[:, 0]
        sums = (logits - most[:, None]).exp().sum(1)
        state = torch.stack([most, sums, of_label, logits.sum(1)], 1)
        state[labels == -100] = torch.nan  # nobody reads it
        log_sum, total = torch.full((rows,), -1.0), torch.tensor(-1.0)
        given = state.data_ptr(), rows, labels.data_ptr(), entries, -100, smoothing
        right = module.cross_entropy_loss(*given, log_sum.data_ptr(), total.data_ptr(), threads)
        return right, log_sum, total

    right, log_sum, total = loss()
    assert right
    seen = labels != -100
    torch.testing.assert_close(log_sum[seen], logits.logsumexp(1)[seen].float(), rtol=2e-7, atol=0)
    assert not log_sum[~seen].any()
    exact = functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(total, exact.float(), rtol=2e-7, atol=0)
    assert all(map(torch.equal, loss(threads=2)[1:], (log_sum, total)))
    logits[1, 3] = torch.nan
    assert loss()[2].isnan()
    for wrong in (-1, entries):
        labels[-1] = wrong
        assert not loss()[0]
    labels[:] = -100
    right, log_sum, total = loss()
    assert right
    assert total == 0
    assert not log_sum.any()


@pytest.mark.parametrize("late", [False, True])
def test_labels_that_are_all_ignored(late):
    x, weight, labels, bias = case(20, 300)
    labels[:] = -100
    assert not any(t.any() for t in by_us(x, weight, labels, bias, 0.1, late=late))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradcheck_of_the_way_without_kernels(smoothing):
    x, weight, labels, bias = case(5, 7, width=3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *t: _by_torch(t[0], t[1], labels, t[2], -100, smoothing), (x, weight, bias)
    )
    torch.testing.assert_close(
        linear_cross_entropy(x, weight, labels, bias=bias).detach(), by_torch(x, weight, labels, bias)[0]
    )


@pytest.mark.slow
@needs_kernels
def test_operator():
    x, weight, labels, bias = case(6, 11)
    for b, late in ((bias, False), (None, True)):
        torch.library.opcheck(
            torch.ops.mpipipe.linear_cross_entropy.default, (x, weight, labels, b, -100, 0.1, late)
        )


def test_export():
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(11, 4))

        def forward(self, x, labels):
            return linear_cross_entropy(x, self.weight, labels)

    head, x, labels = Head(), torch.randn(6, 4), torch.arange(6)
    captured = torch.export.export(head, (x, labels), strict=False).module()
    loss = captured(x, labels)
    assert torch.equal(loss, head(x, labels))
    captured.weight.grad = torch.zeros(11, 4)
    loss.backward()
    torch.testing.assert_close(
        captured.weight.grad.double(), by_torch(x, head.weight, labels, None)[2], rtol=1e-5, atol=1e-5
    )


def test_wrong_arguments_are_refused():
    x, weight, labels, bias = case(6, 11)
    wrong = [
        ("label 11 with a vocabulary of 11", (x, weight, torch.full((6,), 11)), {}),
        ("label -1 with a vocabulary of 11", (x, weight, torch.full((6,), -1)), {}),
        (r"\(6, 8\).*\(11, 7\)", (x, weight[:, :7], labels), {}),
        (r"\(5,\).*\(6, 8\)", (x, weight, labels[:5]), {}),
        ("int32", (x, weight, labels.int()), {}),
        ("float64", (x, weight.double(), labels), {}),
        (r"bias is \(3,\).*\(11, 8\)", (x, weight, labels), {"bias": bias[:3]}),
        ("bias is on meta, x on cpu", (x, weight, labels), {"bias": bias.to("meta")}),
        ("label_smoothing=2", (x, weight, labels), {"label_smoothing": 2.0}),
        (r"scale is \(1,\)", (x, weight, labels), {"scale": torch.ones(1)}),
        ("scale is .*int64", (x, weight, labels), {"scale": torch.tensor(2)}),
        ("requires_grad=True", (x, weight, labels), {"scale": torch.ones((), requires_grad=True)}),
    ]
    for text, args, options in wrong:
        with pytest.raises(ValueError, match=text):
            linear_cross_entropy(*args, **options)


@needs_kernels
@pytest.mark.parametrize("backward", [False, True])
def test_the_registered_operators_check_what_they_are_given(backward):
    """Nobody else does, and the kernels would read past the end of it."""
    fitting = [t.detach() for t in case(6, 11)]
    log_sum, grad = torch.ones(6), torch.ones(())

    def call(given_, log_sum=log_sum, grad=grad):
        if backward:
            wanted = [True, True, True]
            return torch.ops.mpipipe.linear_cross_entropy_backward(grad, *given_, log_sum, -100, 0.0, wanted)
        return torch.ops.mpipipe.linear_cross_entropy(*given_, -100, 0.0)

    x, weight, labels, bias = fitting
    wrong = [
        (r"\(6, 8\).*\(11, 7\)", (x, weight[:, :7], labels, bias)),
        (r"labels are \(5,\).*\(6, 8\)", (x, weight, labels[:5], bias)),
        ("labels are .*int32", (x, weight, labels.int(), bias)),
        (r"bias is \(3,\).*\(11, 8\)", (x, weight, labels, bias[:3])),
        ("x is torch.float64 on cpu", (x.double(), weight, labels, bias)),
        ("weight on meta, labels on cpu", (x, weight.to("meta"), labels, bias)),
        ("bias is on meta, x on cpu", (x, weight, labels, bias.to("meta"))),
    ]
    for text, given_ in wrong:
        with pytest.raises(ValueError, match=text):
            call(given_)
    assert all(t.isfinite().all() for t in call(fitting)[: 3 if backward else 1])
    if backward:
        for text, others in [
            (r"log_sum has shape \(5,\); it must have \(6,\)", {"log_sum": log_sum[:5]}),
            ("log_sum is on meta, .*on cpu", {"log_sum": log_sum.to("meta")}),
            ("log_sum is torch.bfloat16, .*float32", {"log_sum": log_sum.bfloat16()}),
            (r"grad has shape \(6,\); it must have \(\)", {"grad": log_sum}),
        ]:
            with pytest.raises(ValueError, match=text):
                call(fitting, **others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_262144_entries(dtype):
    """In tiles, as large as they come, with labels in the last one and ignored ones."""
    entries = 1 << 18
    x, weight, labels, bias = case(10, entries, dtype=dtype, spread=1.0)
    labels[4], labels[5] = entries - 1, 0
    exact = by_torch(x, weight, labels, bias, 0.1)
    torchs = worst(by_torch(x, weight, labels, bias, 0.1, dtype=dtype), exact)
    sizes = [e.abs().max().item() for e in exact]
    for ours, theirs, size in zip(
        worst(by_us(x, weight, labels, bias, 0.1), exact), torchs, sizes, strict=True
    ):
        assert ours <= 2 * theirs + torch.finfo(dtype).eps * size


@pytest.mark.parametrize(("spread", "scale"), [(1e-30, 1.0), (1.0, 1e-38)])
def test_denormals(small_tiles, spread, scale):
    """Logits that are denormal, and gradients that are: neither is taken for 0."""
    x, weight, labels, bias = case(20, 300, spread=spread)
    with torch.no_grad():
        if scale == 1.0:
            weight *= 1e-10
        bias.zero_()
    exact = by_torch(x, weight, labels, bias, 0.1, scale=scale)
    torchs = worst(by_torch(x, weight, labels, bias, 0.1, dtype=torch.float32, scale=scale), exact)
    got = by_us(x, weight, labels, bias, 0.1, scale=scale)
    smallest = 300 * 2.0**-149  # one for each term of a sum
    for ours, theirs, true in zip(worst(got, exact), torchs, exact, strict=True):
        assert ours <= 2 * theirs + torch.finfo(torch.float32).eps * true.abs().max().item() + smallest
    assert all(g.any() for g in got[1:])
