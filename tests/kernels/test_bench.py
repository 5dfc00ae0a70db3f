"""The benchmark of the kernels: what it divides by what, and that every case computes."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmarks are no part of the package

from benchmarks import split, step
from benchmarks.kernels import gpu, linear_cross_entropy, whole_step
from benchmarks.kernels.chosen import add_kernels, chosen, groups, modules
from benchmarks.kernels.harness import Case, Skipped, compare
from benchmarks.kernels.limits import Limits, Seen, by_route, has_bars, route, true_routes
from benchmarks.kernels.lines import lines, of_memory, of_skipped, said
from benchmarks.kernels.memory import Memory, Taken, taken
from benchmarks.kernels.table import MARKED, PAGE, table
from mpipipe.runtime.setting import use_gemm_route


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


def routed(t: Time) -> Case:
    """A whole step whose products go by a faster route than that of torch as it comes."""
    floor, stock = t.takes(4.0), t.takes(9.0)
    theirs = {"torch": t.takes(6.0)}
    return Case("whole_step", "tiny", t.takes(5.0), theirs, 1.15, floor=floor, stock=stock)


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
    (line,) = json.loads(json.dumps(lines(of_step, found, 1, Limits(40.0, 200.0), True)))
    assert (line["achieved"], line["limit"], line["rounds"]) == ({"ratio": 1.2}, {"ratio": 1.5}, 3)
    assert said(line) == (
        "whole_step, tiny, 1 thread: x1.20 (1.20 to 1.20) faster than torch, bar 1.15: met; 5e+03 ms, "
        "at most 1.50, as the products alone take 67 % of torch's seconds"
    )


@pytest.mark.parametrize(
    ("barred", "bar", "met", "text"),
    [(True, 2.0, True, "bar 2.00: met"), (False, None, None, "torch, aim 2.00;")],
)
def test_a_line_has_the_figures(barred: bool, bar: float | None, met: bool | None, text: str) -> None:
    t = Time()
    c = case(t.takes(1.0), torch=t.takes(2.0))
    (line,) = json.loads(json.dumps(lines(c, compare(c, 3, t), 2, Limits(40.0, 200.0), barred)))
    assert {"kernel", "case", "ratio", "bar", "threads", "limit", "achieved"} <= set(line)
    assert (line["bar"], line["met"], line["threads"]) == (bar, met, 2)
    assert line["achieved"] == {"gb_s": 4.0, "gf_s": 8.0}
    assert line["limit"] == {"gb_s": 40.0, "gf_s": 200.0}
    assert text in said(line)


@pytest.mark.parametrize(
    ("ours_s", "text"),
    [
        (1.0, "small, 1 thread: x2.00 (2.00 to 2.00) faster than torch (add, norm), aim"),
        (2.001, "small, 1 thread: x1.00 (1.00 to 1.00), as fast as torch (add, norm), aim"),
        (2.5, "small, 1 thread: x0.80 (0.80 to 0.80): torch (add, norm) is faster, aim"),
    ],
)
def test_the_faster_side_is_named(ours_s: float, text: str) -> None:
    t = Time()
    c = case(t.takes(ours_s), **{"add, norm": t.takes(2.0)})
    (line,) = lines(c, compare(c, 3, t), 1, Limits(40.0, 200.0), False)
    assert text in said(line)


def test_what_takes_less_memory_is_named() -> None:
    case = Memory("head", "tiny", "", ("a",), None)
    assert "x0.50: torch (a) takes less; 8 MB against 4" in said(
        of_memory(case, Taken(8_000_000, {"a": 4_000_000}, "a", 0.5), 1)
    )


def whole_step_of(t: Time) -> Case:
    """The route alone gains 1.5, the kernels 1.2 on top of it."""
    sides = t.takes(5.0), {"torch": t.takes(6.0)}
    return Case("whole_step", "tiny", *sides, 1.15, floor=t.takes(4.0), stock=t.takes(9.0))


def test_torch_as_it_comes_has_a_line_of_its_own() -> None:
    t = Time()
    c = whole_step_of(t)
    by_us, stock = json.loads(json.dumps(lines(c, compare(c, 3, t), 1, Limits(40.0, 200.0), True)))
    assert (by_us["ratio"], by_us["best"], by_us["ratios"]) == (1.2, "torch", {"torch": 1.2})
    assert stock["case"] == "tiny, over torch as it comes"
    assert (stock["ratio"], stock["routing"], stock["limit"]) == (1.8, 1.5, {"ratio": 2.25})
    assert stock["bar"] == pytest.approx(1.15 * 1.5)
    assert stock["met"]
    assert "x1.80 (1.80 to 1.80) faster than torch as it comes, bar 1.72: met" in said(stock)
    assert said(stock).endswith(
        "at most 2.25, as the products alone take 44 % of torch as it comes's seconds, "
        "1.50 times by the route alone"
    )
    assert lines(c, compare(c, 3, t), 1, Limits(40.0, 200.0), False)[1]["bar"] is None


def test_whole_steps_over_torch_as_it_comes_are_measured_where_its_route_is_another() -> None:
    def stock(precision: str, gemm: str) -> bool:
        return step.Steps("gpt10m", precision, gemm).case().stock is not None

    assert stock("fp32", "onednn")
    assert not stock("fp32", "mkl")
    assert not stock("bf16", "onednn"), "bf16 has one route"


def test_a_call_has_its_route_and_no_other_has() -> None:
    before = route()
    assert [by_route(name, route)() for name in ("mkl", "onednn")] == ["mkl", "onednn"]
    assert route() == before


def test_what_cannot_be_measured_says_why() -> None:
    line = json.loads(json.dumps(of_skipped(Skipped("whole_step", "tiny, bf16", 1.2, "no units"), 2, True)))
    assert (line["ratio"], line["bar"], line["met"]) == (None, 1.2, None)
    assert said(line) == "whole_step, tiny, bf16, 2 threads: not measured: no units"


def test_calls_are_held_to_microseconds() -> None:
    t = Time()
    c = Case("calls", "norm, forward", t.takes(8e-6), {"torch": t.takes(4e-6)}, 10.0, call=True)
    (line,) = lines(c, compare(c, 3, t), 1, Limits(40.0, 200.0), True)
    assert (line["us"], line["torch_us"], line["met"]) == pytest.approx((8.0, 4.0, True))
    assert said(line) == (
        "calls, norm, forward, 1 thread: 8.0 us a call, bar 10.00 us: met; torch 4.0 us, "
        "x0.50 (0.50 to 0.50): torch is faster"
    )


def test_limits_are_the_most_that_was_seen() -> None:
    """A look that other work disturbs lowers nothing; what a kernel achieves asks for another one."""
    looks = [Limits(30.0, 100.0, 150.0), Limits(40.0, 90.0), Limits(20.0, 80.0), Limits(35.0, 210.0)]
    looks += [Limits(44.0, 90.0), Limits(46.0, 90.0), Limits(45.0, 90.0), Limits(45.0, 90.0)]
    seen = Seen(lambda: looks.pop(0))
    before = torch.get_num_threads()
    assert seen.again(before) == Limits(30.0, 100.0, 150.0)
    assert seen.again(before) == Limits(40.0, 100.0, 150.0)
    assert seen.at_least(before, Limits(0.0, 140.0), bf16=True).of(True) == {"gb_s": 40.0, "gf_s": 150.0}
    assert len(looks) == 6, "not asked again"
    assert seen.at_least(before, Limits(0.0, 200.0), bf16=False).of(False) == {"gb_s": 40.0, "gf_s": 210.0}
    assert seen.at_least(before, Limits(45.5, 0.0), bf16=False).of(False) == {"gb_s": 46.0, "gf_s": 210.0}
    assert len(looks) == 2
    assert seen.at_least(before, Limits(90.0, 0.0), bf16=False, looks=2).gb_s == 46.0
    assert not looks, "nor for ever"


def test_memory_is_that_of_processes_of_their_own() -> None:
    case = Memory("head", "tiny, memory", "print({'ours': 2, 'a': 9, 'b': 8}['%s'] * 10**6)", ("a", "b"), 3.0)
    found = taken(case)
    assert found == Taken(2_000_000, {"a": 9_000_000, "b": 8_000_000}, "b", 4.0)
    line = json.loads(json.dumps(of_memory(case, found, 1)))
    assert (line["ratio"], line["bar"], line["met"]) == (4.0, 3.0, True)
    assert said(line) == (
        "head, tiny, memory, 1 thread: x4.00 less memory than torch (b), bar 3.00: met; 2 MB against 8"
    )


@pytest.mark.kernels
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a process takes")
def test_the_head_takes_a_third_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small one, where the gradient of the weight is most of what torch takes."""
    monkeypatch.setattr(linear_cross_entropy, "SHAPES", ((256, 16_000),))
    monkeypatch.setattr(linear_cross_entropy, "SPEED_BARS", (None,))
    monkeypatch.setattr(linear_cross_entropy, "MEMORY_BARS", (3.0,))
    *_, memory = linear_cross_entropy.cases()
    assert isinstance(memory, Memory)
    assert taken(memory).ratio > 3


def test_bars_are_for_the_processors_that_they_were_set_on() -> None:
    assert has_bars("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n")
    assert not has_bars("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 26\n"), "a Zen 4"
    assert not has_bars("vendor_id\t: GenuineIntel\ncpu family\t: 6\n")


def test_the_table_has_a_row_for_each_case() -> None:
    t = Time()
    c = case(t.takes(1.0), torch=t.takes(1.5))
    common = {"gemm": "mkl", "kernels": "v3", "date": "2026-01-02"}
    common |= {"machine": {"processor": "Abacus", "cores": 2, "torch": "2.13.0"}}
    whole = Case("whole_step", "tiny", t.takes(5.0), {"torch": t.takes(5.5)}, 1.15, floor=t.takes(5.0))
    runs = [(c, 3, 1), (c, 3, 2), (c, 3, 1), (whole, 5, 1), (whole, 5, 2)]
    found = [lines(x, compare(x, n, t), of, Limits(40.0, 80.0), True)[0] | common for x, n, of in runs]
    found[-1]["limit"] = {"ratio": 1.23}
    found[-2]["rounds"] = 5
    assert table(found).splitlines() == [
        "| kernel | case | 1 thread | 2 threads | aim | at most |",
        "| --- | --- | ---: | ---: | ---: | --- |",
        "| norm | small | 1.50 (missed) | 1.50 (missed) | 2.0 | 4 of 40 GB/s |",
        "| whole_step | tiny | 1.10 (missed) | 1.10 (missed) | 1.15 | 1.10, 1.23 |",
        "",
        "Measured on 2026-01-02 by `make bench-kernels`: Abacus, 2 cores, kernels for v3, torch 2.13.0, "
        "GEMMs by mkl, medians of 3 to 5 rounds.",
    ]


def test_the_table_has_rows_of_each_kind() -> None:
    t = Time()
    common = {"gemm": "mkl", "kernels": "v3", "date": "2026-01-02"}
    common |= {"machine": {"processor": "Abacus", "cores": 2, "torch": "2.13.0"}}
    stock = whole_step_of(t)
    call = Case("calls", "norm", t.takes(12e-6), {"torch": t.takes(4e-6)}, 10.0, call=True)
    found = [line for x in (stock, call) for line in lines(x, compare(x, 3, t), 1, Limits(4.0, 8.0), True)]
    found.append(of_skipped(Skipped("whole_step", "tiny, bf16", 1.2, "no units"), 1, True))
    found.append(
        of_memory(Memory("head", "memory", "", ("a",), 3.0), Taken(10**7, {"a": 10**8}, "a", 10.0), 1)
    )
    assert table([line | common for line in found]).splitlines()[2:-2] == [
        "| whole_step | tiny | 1.20 | 1.15 | 1.50 |",
        "| whole_step | tiny, over torch as it comes | 1.80 | 1.15 x the route's "
        "| 2.25; the route alone 1.50 |",
        "| calls | norm | 12.0 us (missed) | 10.0 us | PyTorch 4.0 us |",
        "| whole_step | tiny, bf16 | not measured | 1.2 | no units |",
        "| head | memory | 10.00 | 3.0 | 10 of 100 MB |",
    ]


@pytest.mark.kernels
def test_lines_of_a_gpu_are_rows_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor in its place, whose clock and cases are the same."""
    names = [name for name in modules() if name not in gpu.ON_CPU_ALONE]
    assert names == sorted(["accumulate", "adamw", "batch_norm", "dropout", "embedding", "flash_attention",
                            "gates", "layer_norm", "linear_cross_entropy", "norms"])  # fmt: skip
    common = {"gemm": "cublas", "kernels": "cuda", "date": "2026-01-02"}
    common |= {"machine": {"processor": "Abacus", "cores": 2, "torch": "2.13.0"}}
    found = list(gpu.measured(["norms"], 1, "cpu", time.perf_counter, Limits(4000.0, 60_000.0)))
    assert all(line["bar"] is None for line in found)
    assert "| norms | 3 layers of GPT-85M |" in table([line | common for line in found])


def test_the_page_has_one_place_for_the_table() -> None:
    assert len(MARKED.findall(PAGE.read_text())) == 1


@pytest.mark.kernels
@pytest.mark.parametrize("module", modules())
def test_the_table_of_the_page_has_rows_of_each_kernel(module: str) -> None:
    with torch.device("meta"):  # cases are made, nothing is computed
        kernels = {case.kernel for case in modules()[module].cases()}
    assert {groups()[kernel] for kernel in kernels} == {module}
    (found,) = MARKED.findall(PAGE.read_text())
    assert kernels <= {row.split(" | ")[0].removeprefix("| ") for row in found.splitlines()}


def asked(*names: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_kernels(parser)
    kernels: list[str] = parser.parse_args(names).kernels
    return kernels


def test_every_name_in_the_table_of_operators_can_be_asked_for() -> None:
    rows = re.findall(r"^\| (.+) \| .+ \| (`.+`) \|$", (PAGE.parent / "kernels.md").read_text(), re.MULTILINE)
    names = {name for row in rows for cell in row for name in re.findall(r"`(\w+)`", cell)}
    assert {"adamw", "philox_words", "rms_norm", "swiglu"} <= names
    assert asked(*names) == [*names]
    assert asked() == []


def test_another_name_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked("swigl")
    said = " ".join(capsys.readouterr().err.split())
    assert "argument kernel: 'swigl' is none; choose from accumulate, adamw, " in said
    assert "[" not in said.partition("argument kernel")[2]


@pytest.mark.kernels
def test_a_kernel_is_found_in_its_group() -> None:
    def found(*names: str) -> list[list[str]]:
        with torch.device("meta"):
            return [[*dict.fromkeys(case.kernel for case in cases)] for cases in chosen(names)]

    assert found("swiglu") == [["swiglu"]]
    assert found("rms_norm", "swiglu", "bias_gelu") == [["rms_norm"], ["bias_gelu", "swiglu"]]
    assert found("gates", "swiglu") == [["bias_gelu", "swiglu"]]
    assert found("layer_norm") == [["layer_norm", "rms_norm"]], "the file has that name"
    assert found("philox_words", "dropout") == [["dropout"]]


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", [name for name in modules() if name != "whole_step"])
def test_a_case_of_each_kernel_runs(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "SHAPES", ((256, 4096),) * 3)  # a real head takes half a minute
    first = next(iter(modules()[kernel].cases()))
    assert compare(first, 1).ratio > 0


@pytest.mark.kernels
def test_every_call_runs() -> None:
    for each in modules()["calls"].cases():
        each.ours()
        each.theirs["torch"]()


@pytest.mark.parametrize("units", [(), ("avx512_bf16",)])
def test_whole_steps_have_bars_and_bf16_wants_units(
    monkeypatch: pytest.MonkeyPatch, units: tuple[str, ...]
) -> None:
    monkeypatch.setattr(whole_step, "bf16_units", lambda: units)
    found = {c.case: (c.bar, isinstance(c, Skipped)) for c in whole_step.cases()}
    assert found == {
        "gpt10m, fp32": (1.15, False),
        "gpt10m, bf16": (1.2, not units),
        "gpt85m, fp32": (1.15, False),
        "gpt85m, bf16": (1.2, not units),
    }


@pytest.mark.kernels
def test_torch_as_it_comes_takes_turns_with_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By MKL, while the other sides keep the route that is set."""
    if "onednn" not in true_routes():
        pytest.skip("oneDNN rounds to bf16 on this processor")
    monkeypatch.setitem(step.SIZES, "gpt10m", ((64, 1, 32, 2, 16), 8, 2))
    steps, routes = step.Steps("gpt10m", "fp32", "onednn"), list[str]()
    case = steps.case(1.15)
    case.prepare()  # type: ignore[misc]
    monkeypatch.setattr(steps.sides["torch"], "step", lambda: routes.append(route()))
    for call in (case.theirs["torch"], case.stock, case.theirs["torch"]):
        call()  # type: ignore[misc]
    assert routes == ["onednn", "mkl", "onednn"]
    use_gemm_route("mkl")


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
    assert found.at_most > 0, "by how much is for the benchmark to say"
    assert {bits: pipe.numerics.bits for bits, pipe in steps.sides.items()} == {
        "torch": "torch",
        "fast": "fast",
    }
    assert [pipe.numerics.gemm for pipe in steps.sides.values()] == ["mkl", "mkl"]
    assert steps.sides["torch"].numerics.micro_batches == steps.case().floor_times == micro_batches
    of_linear, of_attention = 3 * (4 * layers + 1), 7 * layers
    assert len(steps.products) == of_linear + of_attention, "forward and gradients"
    flops = [2 * call.args[0].numel() * call.args[1].shape[-1] for call in steps.products[of_linear:]]
    assert flops == [2 * (8 // micro_batches) * 16 * (16 // 2) * 32] * of_attention, "half is masked"


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
    case = Case("split", "tiny", t.takes(1.0), {"split": t.takes(1.25)}, split.BAR, floor=t.takes(0.5))
    both = compare(case, 3, t)
    line = json.loads(json.dumps(split.line("gpt10m", bits, "mkl", both, [both, both])))
    assert (line["ratio"], line["stages"], line["bar"], line["met"]) == (1.5, [1.5, 1.5], 1.03, False)
    assert line["of_work"] == 1.25, "half of it is forward's"
