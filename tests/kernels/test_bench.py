"""The benchmark of the kernels: what it divides by what, and that every case computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmarks are no part of the package

from benchmarks import split, step
from benchmarks.kernels import whole_step
from benchmarks.kernels.__main__ import modules, result, said
from benchmarks.kernels.harness import Case, compare
from benchmarks.kernels.limits import Limits, has_bars
from benchmarks.kernels.table import MARKED, PAGE, table


class Time:
    """A clock that only calls move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def takes(self, *seconds: float) -> Callable[[], None]:
        """A call that takes these one after the other, then the last one for ever."""
        left = list(seconds)

        def call() -> None:
            self.now_s += left.pop(0) if len(left) > 1 else left[0]

        return call


def refused() -> None:
    raise RuntimeError("no such operator\nand a long story")


def case(ours: Callable[[], Any], **theirs: Callable[[], Any]) -> Case:
    return Case("norm", "small", ours, theirs, 2.0, 4_000_000_000, 8e9)


def test_the_best_way_of_torch_is_compared() -> None:
    t = Time()
    found = compare(
        case(t.takes(1.0), loop=t.takes(2.5), fused=t.takes(2.0), slow=t.takes(9.0), no=refused), 4, t
    )
    assert (found.best, found.ratio, found.ours_s) == ("fused", 2.0, 1.0)
    assert found.ratios == {"loop": 2.5, "fused": 2.0}
    assert found.unmeasured == {"no": "no such operator", "slow": "4.5 times the best one in the warm-up"}


def test_a_disturbance_of_one_round_does_not_count() -> None:
    t = Time()
    slow_once = t.takes(1.0, 1.0, 1.0, 1.0, 50.0, 1.0)
    found = compare(case(t.takes(1.0), torch=slow_once), 5, t)
    assert found.ratio == 1.0
    assert found.quartiles == (1.0, 1.0)


def test_short_calls_are_repeated() -> None:
    t = Time()
    found = compare(case(t.takes(1e-4), torch=t.takes(3e-4)), 3, t)
    assert found.ratio == pytest.approx(3.0)
    assert found.ours_s == pytest.approx(1e-4)


def test_nothing_to_compare_with_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"norm, small: none of \['torch'\] runs: .*no such operator"):
        compare(case(lambda: None, torch=refused), 3)


def test_what_no_kernel_replaces_limits_the_ratio() -> None:
    t, threads = Time(), list[int]()
    of_step = Case(
        "whole_step", "tiny", t.takes(5.0), {"torch": t.takes(6.0)}, 1.15,
        prepare=lambda: threads.append(torch.get_num_threads()), floor=t.takes(0.5), floor_times=8,
    )  # fmt: skip
    found = compare(of_step, 15, t)
    assert threads == [torch.get_num_threads()]
    assert (found.ratio, found.at_most, found.ratios) == (1.2, 1.5, {"torch": 1.2})
    assert found.rounds == 3, "of 11.5 s each"
    line = json.loads(json.dumps(result(of_step, found, 1, Limits(40.0, 200.0), True)))
    assert (line["achieved"], line["limit"], line["rounds"]) == ({"ratio": 1.2}, {"ratio": 1.5}, 3)
    assert said(line) == (
        "whole_step, tiny, 1 thread: 1.20 (1.20 to 1.20) times torch, bar 1.15: met; 5e+03 ms, at most 1.50, "
        "as the products alone take 67 % of torch's seconds"
    )


@pytest.mark.parametrize(
    ("barred", "bar", "met", "text"), [(True, 2.0, True, "bar 2.00: met"), (False, None, None, "torch;")]
)
def test_a_line_has_the_figures(barred: bool, bar: float | None, met: bool | None, text: str) -> None:
    t = Time()
    c = case(t.takes(1.0), torch=t.takes(2.0))
    line = json.loads(json.dumps(result(c, compare(c, 3, t), 2, Limits(40.0, 200.0), barred)))
    assert {"kernel", "case", "ratio", "bar", "threads", "limit", "achieved"} <= set(line)
    assert (line["bar"], line["met"], line["threads"]) == (bar, met, 2)
    assert line["achieved"] == {"gb_s": 4.0, "gf_s": 8.0}
    assert line["limit"] == {"gb_s": 40.0, "gf_s": 200.0}
    assert text in said(line)


def test_bars_are_for_the_processors_that_they_were_set_on() -> None:
    assert has_bars("vendor_id : AuthenticAMD\nflags : avx2 avx512f\n")
    assert not has_bars("vendor_id : AuthenticAMD\nflags : avx2\n")
    assert not has_bars("vendor_id : GenuineIntel\nflags : avx512f\n")


def test_the_table_has_a_row_for_each_case() -> None:
    t = Time()
    c = case(t.takes(1.0), torch=t.takes(1.5))
    common = {"gemm": "mkl", "kernels": "v3", "date": "2026-01-02"}
    common |= {"machine": {"processor": "Abacus", "cores": 2, "torch": "2.13.0"}}
    whole = Case("whole_step", "tiny", t.takes(5.0), {"torch": t.takes(5.5)}, 1.15, floor=t.takes(5.0))
    runs = [(c, 3, 1), (c, 3, 2), (c, 3, 1), (whole, 5, 1), (whole, 5, 2)]
    lines = [result(x, compare(x, n, t), of, Limits(40.0, 80.0), True) | common for x, n, of in runs]
    lines[-1]["limit"] = {"ratio": 1.23}
    lines[-2]["rounds"] = 5
    assert table(lines).splitlines() == [
        "| kernel | case | 1 thread | 2 threads | bar | at most |",
        "| --- | --- | ---: | ---: | ---: | --- |",
        "| norm | small | 1.50 (missed) | 1.50 (missed) | 2.0 | 4 of 40 GB/s |",
        "| whole_step | tiny | 1.10 (missed) | 1.10 (missed) | 1.15 | 1.10, 1.23 |",
        "",
        "Measured on 2026-01-02 by `make bench-kernels`: Abacus, 2 cores, kernels for v3, torch 2.13.0, "
        "GEMMs by mkl, medians of 3 to 5 rounds.",
    ]


def test_the_page_has_one_place_for_the_table() -> None:
    assert len(MARKED.findall(PAGE.read_text())) == 1


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", [name for name in modules() if name != "whole_step"])
def test_a_case_of_each_kernel_runs(kernel: str) -> None:
    first = modules()[kernel].cases()[0]
    assert compare(first, 1).ratio > 0


@pytest.mark.parametrize("units", [(), ("avx512_bf16",)])
def test_whole_steps_have_bars_and_bf16_where_there_are_units(
    monkeypatch: pytest.MonkeyPatch, units: tuple[str, ...]
) -> None:
    monkeypatch.setattr(whole_step, "bf16_units", lambda: units)
    found = {c.case: c.bar for c in whole_step.cases()}
    fp32 = {"gpt10m, fp32": 1.15, "gpt85m, fp32": 1.15}
    assert found == fp32 | ({"gpt10m, bf16": 1.2, "gpt85m, bf16": 1.2} if units else {})


@pytest.mark.kernels
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_whole_step_is_limited_by_the_products_of_all_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    layers, micro_batches = 2, 4
    monkeypatch.setitem(step.SIZES, "gpt10m", ((64, layers, 32, 2, 16), 8, micro_batches))
    steps = step.Steps("gpt10m", precision, "mkl")
    found = compare(steps.case(), 1)
    assert found.ratio > 0
    assert found.at_most is not None
    assert found.at_most > 1
    assert {bits: pipe.numerics.bits for bits, pipe in steps.sides.items()} == {
        "torch": "torch",
        "fast": "fast",
    }
    assert [pipe.numerics.gemm for pipe in steps.sides.values()] == ["mkl", "mkl"]
    assert steps.sides["torch"].numerics.micro_batches == steps.case().floor_times == micro_batches
    assert len(steps.products) == 3 * (4 * layers + 1), "forward and two gradients of each linear layer"


@pytest.mark.kernels
@pytest.mark.parametrize("bits", ["torch", "fast"])
def test_a_backward_in_two_is_compared_with_a_whole_one(monkeypatch: pytest.MonkeyPatch, bits: str) -> None:
    monkeypatch.setitem(step.SIZES, "gpt10m", ((64, 2, 32, 2, 16), 8, 4))
    halves = split.Halves(step.pipeline("gpt10m", "fp32", 1, bits, gemm="mkl"))
    assert [c[split.WHOLE].deferred for c in halves.codes] == [None, None]
    assert all(c[split.IN_TWO].deferred for c in halves.codes)
    gradients = []
    for way in (split.WHOLE, split.IN_TWO):
        for s, stage in enumerate(halves.stages):
            stage.weights.forget()
            halves.call(s, way)
        gradients.append([g.clone() for stage in halves.stages for g in stage.weights.accumulators()])
    assert any(g.any() for g in gradients[0])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), "the same work"
    t = Time()
    both = compare(Case("split", "tiny", t.takes(1.0), {"split": t.takes(1.25)}, split.BAR), 3, t)
    line = json.loads(json.dumps(split.line("gpt10m", bits, "mkl", both, [both, both])))
    assert (line["ratio"], line["stages"], line["bar"], line["met"]) == (1.25, [1.25, 1.25], 1.03, False)
