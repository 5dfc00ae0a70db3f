"""The route of the fp32 products: from the model's own shapes, one for all ranks, found again later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import captured
from torch import Tensor, nn

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.cluster.routes import Route
from mpipipe.graph import products as counting
from mpipipe.graph.products import every_product, products
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.runtime import gemm
from mpipipe.runtime.gemm import Prober, Routes
from mpipipe.runtime.routes import Trial, measure
from mpipipe.runtime.setting import is_fp32, numerics_of
from mpipipe.values import Numerics, TensorSpec

ROWS, WIDTH = 12, 64


class Net(nn.Module):
    """Three products of 12 x 64 x 64: two forward, of which the second has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Reads(nn.Module):
    """A layer that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if x.flatten().tolist()[0] > 0 else 3.0)


def variants_of(model: Any = Net, precision: str = "fp32") -> Variants:
    specs = {"x": TensorSpec((ROWS, WIDTH), "float32")}
    return Variants(
        ModelSource(model, 0),
        lambda out, batch: (out.square().sum(), len(out)),
        lambda _: specs,
        ROWS,
        precision,
    )


def numerics(precision: str = "fp32", threads: int = 1) -> Numerics:
    return numerics_of(
        batch=ROWS, micro_batches=1, blocks=1, threads=threads, gemm="mkl", precision=precision,
        tied="per_use", seed=0,
    )  # fmt: skip


def made(mkl: float, other: float, name: str = "onednn", fp32: bool = True) -> Routes:
    return Route("mkl", mkl, 3e-7, True), Route(name, other, 3e-7, fp32)


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(counting, "LEAST_FLOPS", 1.0)
    yield
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # type: ignore[attr-defined]


# -- which products ----------------------------------------------------------------------------


def test_the_products_are_those_of_forward_and_backward_with_their_layouts() -> None:
    found = products(variants_of(), "fp32", 1e9)
    once = 2.0 * ROWS * WIDTH * WIDTH
    assert sum(p.times * p.work.flops for p in found) == 5 * once  # no gradient of the input
    assert {p.work.name for p in found} == {"mm", "addmm"}
    weight = next(p for p in found if p.work.name == "addmm").work.forms[2]
    assert weight.stride == (1, WIDTH), "a weight is used transposed"


def test_a_model_tells_all_its_products_at_their_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "LEAST_FLOPS", 1e18)
    monkeypatch.setattr(counting, "MOST", 1)
    found = every_product(variants_of(precision="bf16"), "bf16")
    assert sum(p.times * p.work.flops for p in found) == 5 * 2.0 * ROWS * WIDTH * WIDTH
    args, kwargs = found[0].operands(torch.Generator().manual_seed(0), torch.bfloat16)
    assert found[0].work.op(*args, **kwargs).dtype == torch.bfloat16


@pytest.mark.slow
def test_large_ones_are_reduced_and_count_for_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpipipe.graph.rates.LEAST_SIZE", 8)
    whole, small = products(variants_of(), "fp32", 1e9), products(variants_of(), "fp32", 1e4)
    assert all(p.work.flops <= 1e4 for p in small)
    total = sum(p.times * p.work.flops for p in whole)
    assert sum(p.times * p.work.flops for p in small) == pytest.approx(total)


def test_a_model_with_few_products_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "LEAST_FLOPS", 1e8)
    monkeypatch.setattr(gemm, "measure", lambda *_: pytest.fail("measured"))
    choice = Prober(None, variants_of(), numerics(), {}).choose()
    assert (choice.gemm, choice.why) == ("mkl", "MKL, as the model has few of them")
    assert Prober(None, variants_of(), numerics(), choice.found).choose() == choice


@pytest.mark.full  # a model that cannot be traced is tried in several ways
def test_layers_beside_one_that_runs_as_it_is_written_show_theirs() -> None:
    found = []
    for between in (Reads(), nn.Tanh()):
        layers = [nn.Linear(WIDTH, WIDTH), between, nn.Linear(WIDTH, WIDTH)]
        found.append(products(variants_of(nn.Sequential(*layers)), "fp32", 1e9))
    assert found[0]
    assert found[0] == found[1]


def test_of_bf16_they_are_those_that_autocast_lowers() -> None:
    variants = variants_of(precision="bf16")
    assert products(variants, "fp32", 1e9) == ()
    found = products(variants, "bf16", 1e9)
    assert sum(p.times for p in found) == 5
    args, _ = found[0].operands(torch.Generator().manual_seed(0))
    assert all(x.dtype == torch.float32 for x in args if isinstance(x, Tensor))


# -- measured ----------------------------------------------------------------------------------


def test_a_measurement_tells_rates_and_true_errors() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 96, generator=draw), torch.randn(96, 32, generator=draw)
    trial = Trial(torch.mm, (a, b), 2.0 * 64 * 96 * 32, 3.0)
    mkl, bf16 = measure([trial], ("mkl", "bf16"), 0.0)
    exact = a.double() @ b.double()
    assert mkl.error == float(((a @ b).double() - exact).norm() / exact.norm())
    assert (mkl.fp32, bf16.fp32) == (True, False)
    assert 1e-3 < bf16.error < 1e-2
    assert mkl.flops_per_s > 0


class Counted:
    """Trials of a real model as on a machine of this rate, on which each product is as large as they come: a
    call counts as `TRIAL_FLOPS`, twice in float64."""

    def __init__(self, flops_per_s: float) -> None:
        self.call_s, self.now_s, self.trials = gemm.TRIAL_FLOPS / flops_per_s, 0.0, 0

    def measure(self, trials: list[Trial], names: Any, budget_s: float, clock: object) -> Routes:
        self.trials = len(trials)
        return measure([replace(t, call=self._counting(t.call)) for t in trials], names, budget_s, self.now)

    def now(self) -> float:
        return self.now_s

    def _counting(self, call: Any) -> Any:
        def counted(*operands: Any) -> Any:
            wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in operands)
            self.now_s += self.call_s * (2 if wide else 1)
            return call(*operands)

        return counted


@pytest.mark.parametrize(("flops_per_s", "most_s"), [(1e9, 18.1), (2e10, 1.0), (1e11, 0.5), (1e13, 0.2)])
@pytest.mark.slow
def test_the_budget_bounds_what_the_choice_takes(
    monkeypatch: pytest.MonkeyPatch, flops_per_s: float, most_s: float
) -> None:
    """Of a GPT, whose linear layers have as many distinct products as are measured. From 20 Gflop/s and
    thread on it is less than a second; on a slower machine each product has its fewest rounds."""
    counted = Counted(flops_per_s)
    monkeypatch.setattr(gemm, "measure", counted.measure)
    variants = captured("gpt, no dropout", 2)
    choice = Prober(None, variants, numerics(), {}).choose()
    assert counted.trials == counting.MOST
    assert 0.0 < counted.now_s < most_s
    assert choice.seconds > 0.0
    assert Prober(None, variants, numerics(), choice.found).choose().seconds == 0.0, "it is known"


@pytest.mark.parametrize(
    ("error", "own", "fp32"),
    [(3e-7, 2e-7, True), (5e-4, 2e-7, False), (2e-3, 1e-2, False), (5e-7, 0.0, True)],
)
def test_what_is_as_exact_as_fp32(error: float, own: float, fp32: bool) -> None:
    assert is_fp32(error, own) == fp32


# -- one choice for all ------------------------------------------------------------------------


def chosen(
    size: int, measured: list[Routes], known: Any = None, monkeypatch: Any = None
) -> list[gemm.Choice]:
    """Each rank measures what is made up for it; only rank 0 knows what was found before."""
    rank = threading.local()

    def measure_here(*_: object) -> Routes:
        return measured[rank.number]

    def body(comm: Communicator) -> gemm.Choice:
        rank.number = comm.rank
        return Prober(comm, variants, numerics(), (known or {}) if comm.rank == 0 else {}).choose()

    variants = variants_of()
    _ = variants.graph
    monkeypatch.setattr(gemm, "measure", measure_here)
    return run_local(size, body)


@pytest.mark.slow
def test_all_ranks_take_what_is_best_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = chosen(2, [made(1e11, 2e11), made(2e11, 1.9e11)], monkeypatch=monkeypatch)
    assert first == second
    assert first.gemm == "onednn"
    assert first.why.startswith("oneDNN, 1.46 times as fast as MKL")
    rounds = [made(1e11, 2e11), made(1e11, 9e11, fp32=False)]
    assert {c.gemm for c in chosen(2, rounds, monkeypatch=monkeypatch)} == {"mkl"}


@pytest.mark.slow
def test_another_number_of_ranks_finds_the_same_choice_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = chosen(1, [made(1e11, 2e11)], monkeypatch=monkeypatch)
    again = chosen(3, [made(2e11, 1e11)] * 3, known=alone.found, monkeypatch=monkeypatch)
    assert {c.gemm for c in again} == {"onednn"}
    assert {c.why for c in again} == {f"{alone.why}, as before"}
    monkeypatch.setenv("MKL_DYNAMIC", "FALSE")  # with other settings it is measured anew
    assert chosen(1, [made(2e11, 1e11)], known=alone.found, monkeypatch=monkeypatch)[0].gemm == "mkl"


# -- bf16 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "precision", "rate", "said"),
    [
        ((), "bf16", 0.25e11, "take 4.0 times as long as in fp32; set train.precision=fp32"),
        ((), "bf16", 2e11, ""),
        ((), "fp32", 0.25e11, ""),
        (("avx512_bf16",), "bf16", 0.25e11, ""),
    ],
)
def test_slow_bf16_is_said_where_the_processor_has_no_units_for_it(
    monkeypatch: pytest.MonkeyPatch, units: tuple[str, ...], precision: str, rate: float, said: str
) -> None:
    monkeypatch.setattr(gemm, "bf16_units", lambda: units)
    monkeypatch.setattr(gemm, "measure", lambda *_: made(1e11, rate, "bf16", False))
    prober = Prober(None, variants_of(precision=precision), numerics(precision), {})
    text, found = prober.slow_bf16()
    assert text.endswith(said)
    assert bool(text) == bool(said)
    assert bool(found) == (not units and precision == "bf16")
