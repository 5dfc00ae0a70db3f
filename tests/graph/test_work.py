"""Counted work is that of torch, and what it is worth in seconds is in proportion."""

from __future__ import annotations

import math
from dataclasses import replace

import built_in_tiny
import pytest
import torch
from tiny import MODELS, captured, full_but
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.pieces import Parts, Piece, Waiting, pieces
from mpipipe.graph.profile import Profiler
from mpipipe.graph.rates import TRIAL_BYTES, TRIAL_FLOPS, Roofline, Trials, sample_of
from mpipipe.graph.source import TRACING, ModelSource
from mpipipe.graph.split import split
from mpipipe.graph.variants import Variants
from mpipipe.graph.work import Form, Tallier, Tally, Work, _made_bytes, counted, made
from mpipipe.values import TensorSpec

aten = torch.ops.aten


def distinct(variants: Variants) -> list[Piece]:
    found = pieces(variants.primary, variants.graph, variants.uses)
    return list({p.key: p for p in found}.values())


def of_model(name: str, precision: str) -> Variants:
    if name.endswith(", fast"):
        return of_model(name.removesuffix(", fast"), precision).lowered(Lowering("fast"))
    if name in MODELS:
        return captured(name, 2, precision)
    return built_in_tiny.variants(*built_in_tiny.made(name, built_in_tiny.TINY[name]), 2, precision)


class Timeless(Profiler):
    """Finds what is kept, in real memory."""

    def kept(self, piece: Piece) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        with TRACING:
            specs = [(p.spec, p.stride) for p in piece.code.received]
            received = [made(Form(s.shape, stride, getattr(torch, s.dtype))) for s, stride in specs]
            return self._saved(piece, received, self._rest(piece.code))

    def returns(self, piece: Piece) -> tuple[Parts, ...]:
        with TRACING:
            return self._at_work(piece, *self._arguments(piece.code), (0, (), ()))[1]

    def waits(self, piece: Piece) -> Waiting:
        with TRACING:
            received, rest = self._arguments(piece.code)
            self._saved(piece, received, rest)  # by which casts of weights are there, as in a sample
            return self._waiting(split(piece.code), received, rest)


@pytest.mark.parametrize(
    "model",
    full_but(
        ["conv and norm", "llama", "llama, fast", "gpt, no dropout, fast"],
        ["gpt", "conv and norm", "skips", "traps", "llama", "llama, fast", "gpt, no dropout, fast"],
    ),
)
@pytest.mark.slow
def test_what_backward_keeps_is_found_without_memory(model: str) -> None:
    variants = of_model(model, "fp32")
    counted, real = Tallier(variants.primary, "fp32"), Timeless(variants.primary, "fp32")
    for piece in distinct(variants):
        t = counted.tally(piece)
        assert (t.saved_bytes, t.saved_received, t.saved_sent) == real.kept(piece), piece.name
        assert t.waiting == real.waits(piece), piece.name


@pytest.mark.parametrize("model", ["parts", "skips"])
@pytest.mark.slow
def test_gradients_that_are_parts_of_something_larger_are_found_without_memory(model: str) -> None:
    variants = of_model(model, "fp32")
    counted, real = Tallier(variants.primary, "fp32"), Timeless(variants.primary, "fp32")
    both = [(counted.tally(piece).returned, real.returns(piece)) for piece in distinct(variants)]
    assert all(there == found for there, found in both)
    assert any(there for there, _ in both)


@pytest.mark.slow
def test_what_waits_for_weight_gradients_of_kernels_in_bf16() -> None:
    variants = of_model("gpt, no dropout, fast", "bf16")
    counted, real = Tallier(variants.primary, "bf16"), Timeless(variants.primary, "bf16")
    both = [(counted.tally(piece).waiting, real.waits(piece)) for piece in distinct(variants)]
    assert all(there == found for there, found in both)
    assert any(there.own_bytes for there, _ in both)


@pytest.mark.slow
def test_in_bf16_but_for_the_statistics_of_norms() -> None:
    """A mean and a variance per channel, whose dtype fake tensors do not tell."""
    variants = of_model("conv and norm", "bf16")
    counted, real = Tallier(variants.primary, "bf16"), Timeless(variants.primary, "bf16")
    both = [(counted.tally(piece), real.kept(piece)) for piece in distinct(variants)]
    assert all((t.saved_received, t.saved_sent) == kept[1:] for t, kept in both)
    assert sum(t.saved_bytes for t, _ in both) == pytest.approx(sum(kept[0] for _, kept in both), rel=0.05)


@pytest.mark.slow
def test_what_an_lstm_keeps_is_near() -> None:
    """oneDNN keeps a buffer that only it knows."""
    lstm = built_in_tiny.made("lstm", "vocab: 32, layers: 1, width: 64, hidden: 128, context: 32")
    variants = built_in_tiny.variants(*lstm, 2, "fp32")
    counted, real = Tallier(variants.primary, "fp32"), Timeless(variants.primary, "fp32")
    for piece in distinct(variants):
        assert counted.tally(piece).saved_bytes == pytest.approx(real.kept(piece)[0], rel=0.1), piece.name


# -- operations and bytes --------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def tallies(model: type[nn.Module], x: tuple[int, ...]) -> list[Tally]:
    def specs(rows: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((rows, *x), "float32")}

    v = Variants(ModelSource(model, 0), lambda y, _: (y.square().sum(), 1.0), specs, 8, "fp32")
    return [Tallier(v.primary, "fp32").tally(p) for p in pieces(v.primary, v.graph, v.uses)]


def test_backward_does_what_autograd_does() -> None:
    """The first layer needs no gradient of its input."""
    first, second = tallies(Net, (32,))
    flops = [
        sum(w.flops for w in works) for t in (first, second) for works in (t.forward, t.backward, t.into)
    ]
    a, b = 2 * 8 * 32 * 64, 2 * 8 * 64 * 16
    assert flops == [a, a, 0, b, 2 * b, b]


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class LooksBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return Looks()(x * self.scale)


def test_attention_is_counted_and_a_causal_one_is_half() -> None:
    works = [w for t in tallies(LooksBack, (2, 32, 16)) for w in (*t.forward, *t.backward) if w.flops]
    product = 2 * (8 * 2) * 32 * 32 * 16
    assert [w.flops for w in works] == [2 * product / 2, 5 * product / 2]


def works_of(variants: Variants) -> list[Work]:
    tallier = Tallier(variants.primary, "fp32")
    return [w for p in pieces(variants.primary, variants.graph, variants.uses) for w in tallier.works(p)]


@pytest.mark.slow
def test_our_operators_count_as_those_of_torch() -> None:
    """But for the logits that are made twice; and the gradients of embedding and head are no tensors."""
    plain = of_model("gpt, no dropout", "fp32")
    theirs, ours = works_of(plain), works_of(plain.lowered(Lowering("fast")))
    names = {w.name for w in ours}
    assert {"flash_attention", "linear_cross_entropy", "bias_gelu", "addmm_", "index_add_"} <= names
    assert not names & {"embedding_dense_backward", "_scaled_dot_product_flash_attention_for_cpu"}
    assert sum(w.flops for w in ours) == pytest.approx(sum(w.flops for w in theirs))  # of one tile
    assert sum(w.nbytes for w in ours) < sum(w.nbytes for w in theirs)


def test_the_logits_of_large_vocabularies_are_made_twice_unless_late() -> None:
    op, labels = torch.ops.mpipipe, Form((4096,), (1,), torch.int64)
    args = (form(4096, 64), form(32768, 64), labels, None, -100, 0.0)
    with FakeTensorMode():
        forward = counted(op.linear_cross_entropy.default, (args, {}))
        rest = (form(4096), -100, 0.0, [True, True, False])
        backward = counted(op.linear_cross_entropy_backward.default, ((form(), *args[:4], *rest), {}))
        late = counted(op.linear_cross_entropy.default, ((*args, True), {}))
        then = counted(op.linear_cross_entropy_backward.default, ((form(), *args[:4], None, *rest[1:]), {}))
    product = 2.0 * 4096 * 64 * 32768
    assert forward.flops == product
    assert 2.9 * product < backward.flops < 3.0 * product
    assert (late.flops, late.nbytes, then.flops) == (0, 0, 3 * product)


def form(*shape: int) -> Form:
    return Form(shape, tuple(torch.empty(shape, device="meta").stride()), torch.float32)


def test_a_gradient_of_short_terms_has_its_sum_in_memory() -> None:
    """Of a head in bfloat16, late or with more tokens than a tile has."""
    op = torch.ops.mpipipe.linear_cross_entropy_backward.default

    def bytes_of(tokens: int, dtype: torch.dtype, late: bool) -> int:
        x, weight = (replace(form(n, 64), dtype=dtype) for n in (tokens, 32768))
        labels, log_sum = Form((tokens,), (1,), torch.int64), None if late else form(tokens)
        args = (form(), x, weight, labels, None, log_sum, -100, 0.0, [True, True, False])
        with FakeTensorMode():
            return _made_bytes(counted(op, (args, {})))

    total = 4 * 32768 * 64
    assert bytes_of(4096, torch.float32, False) == bytes_of(4096, torch.bfloat16, False) == 0
    assert bytes_of(8192, torch.bfloat16, False) == total
    assert bytes_of(4096, torch.bfloat16, True) == total + bytes_of(4096, torch.float32, True) // 2


def test_an_expanded_dimension_takes_no_bytes() -> None:
    assert form(4, 8).nbytes == 128
    assert Form((4, 8), (0, 1), torch.float32).nbytes == 32


# -- seconds ---------------------------------------------------------------------------------------------


def test_a_roofline_is_bound_by_the_slower_of_both() -> None:
    rates = Roofline({"fp32": 100.0, "bf16": 400.0}, 10.0)
    half = Form((2,), (1,), torch.bfloat16)
    assert rates.seconds(Work(aten.mm.default, ((form(2),), {}), 1000.0, 20)) == 10.0
    assert rates.seconds(Work(aten.mm.default, ((half,), {}), 1000.0, 20)) == 2.5
    assert rates.seconds(Work(aten.add.Tensor, ((form(2),), {}), 0.0, 20)) == 2.0


def trials(monkeypatch: pytest.MonkeyPatch, fails: str = "-") -> tuple[Trials, list[Work]]:
    """Ten operations or ten bytes a second, and what was run."""
    run: list[Work] = []

    def timed(self: Trials, work: Work) -> float:
        run.append(work)
        return math.inf if work.name == fails else (work.flops or work.nbytes) / 10.0

    monkeypatch.setattr(Trials, "_timed", timed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return Trials(lambda: None), run


def matrices(m: int, k: int, n: int) -> Work:
    args = (form(m, k), form(k, n)), {}
    return Work(aten.mm.default, args, 2.0 * m * k * n, 4 * (m * k + k * n + m * n))


def test_a_small_operator_is_run_as_it_is_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, run = trials(monkeypatch)
    assert [rates.seconds(matrices(8, 16, 4)) for _ in range(2)] == [2 * 8 * 16 * 4 / 10.0] * 2
    assert len(run) == 1


def test_a_large_one_is_reduced_and_taken_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, run = trials(monkeypatch)
    work = matrices(4096, 8192, 28672)
    assert rates.seconds(work) == pytest.approx(work.flops / 10.0)
    (small,) = run
    assert small.flops <= TRIAL_FLOPS
    assert small.nbytes <= TRIAL_BYTES
    assert min(size for f in small.forms for size in f.shape) >= 128
    assert small.forms[0].shape[1] == small.forms[1].shape[0], "it is a product still"


def test_memory_that_is_too_large_is_reduced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, run = trials(monkeypatch)
    line = form(1 << 16, 1 << 12)
    work = Work(aten.mul.Tensor, ((line, line), {}), 0.0, 3 * line.nbytes)
    assert rates.seconds(work) == pytest.approx(work.nbytes / 10.0)
    assert run[0].nbytes <= TRIAL_BYTES


def test_what_cannot_be_run_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, run = trials(monkeypatch, fails="gelu")
    line = form(1000)
    work = Work(aten.gelu.default, ((line,), {}), 0.0, 2 * line.nbytes)
    assert rates.seconds(work) == pytest.approx(work.nbytes / 10.0)
    assert [w.name for w in run] == ["gelu", "mul"]


def test_a_trial_on_this_machine_takes_time() -> None:
    rates = Trials(lambda: None)
    small, large = matrices(8, 8, 8), matrices(256, 256, 256)
    assert 0.0 < rates.seconds(small) < rates.seconds(large) < math.inf


def test_a_sample_has_the_parts_of_a_measured_one() -> None:
    second = tallies(Net, (32,))[1]
    s = sample_of(second, Roofline({"fp32": 1.0, "bf16": 1.0}, math.inf))
    b = 2 * 8 * 64 * 16
    assert (s.fwd_s, s.bwd_input_s, s.bwd_weight_s) == (b, b, b)
