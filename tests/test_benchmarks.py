"""The pure parts of the benchmarks, and that every stock peer computes what mpipipe does."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import made_run

from mpipipe.planner.schedules.registry import BUILT_IN
from mpipipe.report.trace import read_trace
from mpipipe.values import Report, from_json

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY))  # the benchmarks are no part of the package

from benchmarks import bench, ceiling, prediction, survive  # noqa: E402
from benchmarks.bars import OF_MODELS, bars_of  # noqa: E402
from benchmarks.budget import SIZES, estimate_s  # noqa: E402
from benchmarks.common import run as start  # noqa: E402
from benchmarks.hosts import told  # noqa: E402
from benchmarks.peers import SCHEDULES, SIDES  # noqa: E402
from benchmarks.peers.ranks import reason  # noqa: E402
from benchmarks.peers.splits import (  # noqa: E402
    Action,
    LayerTime,
    gpipe,
    makespan,
    one_f_one_b,
    ranked,
    splits,
    step_s,
)
from benchmarks.results import CEILINGS, GROUPS, OURS, ROWS, said_of_bars, summary  # noqa: E402
from benchmarks.table import PAGE, README, in_short, table, written  # noqa: E402
from benchmarks.turns import GATE, Side, in_both_orders, take_turns  # noqa: E402

Launch = Callable[..., Any]
seconds = st.floats(0.01, 10.0)


# -- splits ------------------------------------------------------------------------------------


def test_splits_are_all_ways_to_put_layers_into_stages():
    assert list(splits(4, 2)) == [(1, 3), (2, 2), (3, 1)]
    assert len(list(splits(8, 4))) == 35  # 7 over 3
    assert list(splits(3, 4)) == []


@given(seconds, seconds, st.integers(1, 6), st.integers(1, 12))
def test_equal_stages_take_the_closed_form(forward, backward, ranks, micros):
    times = {(k, r): t for r in range(ranks) for k, t in (("F", forward), ("B", backward))}
    for order in (gpipe(ranks, micros), one_f_one_b(ranks, micros)):
        assert makespan(order, times) == pytest.approx((micros + ranks - 1) * (forward + backward))


@given(seconds, seconds, seconds, seconds, st.integers(2, 12))
def test_two_unequal_stages_are_as_slow_as_the_slower_one(f0, b0, f1, b1, micros):
    """Of GPipe, whose forwards and backwards do not overlap."""
    times = {("F", 0): f0, ("B", 0): b0, ("F", 1): f1, ("B", 1): b1}
    expected = f0 + f1 + b0 + b1 + (micros - 1) * (max(f0, f1) + max(b0, b1))
    assert makespan(gpipe(2, micros), times) == pytest.approx(expected)


def test_no_split_is_better_than_the_first():
    layers = [LayerTime(i + 1.0, 1.0, 2.0) for i in (3, 0, 4, 1, 5)]
    order = one_f_one_b(2, 6)
    best, *others = ranked(layers, 2, order)
    assert best == (3, 2)
    assert all(step_s(layers, best, order) <= step_s(layers, other, order) for other in others)


def test_the_first_stage_has_no_gradient_of_its_input():
    layers = [LayerTime(1.0, 1.0, 3.0), LayerTime(1.0, 1.0, 3.0)]
    alone = [[Action("F", 0, 0), Action("I", 0, 0)], [Action("F", 1, 0), Action("I", 1, 0)]]
    assert step_s(layers, (1, 1), alone) == 3.0  # F0, F1, I1, and nothing in I0
    full = [[*alone[0], Action("W", 0, 0)], [*alone[1], Action("W", 1, 0)]]
    assert step_s(layers, (1, 1), full) == 6.0  # W0 is then the whole backward


def test_an_order_that_waits_for_itself_is_told():
    with pytest.raises(ValueError, match="waits for itself"):
        makespan([[Action("B", 0, 0), Action("F", 0, 0)]], {("F", 0): 1.0, ("B", 0): 1.0})


# -- results -----------------------------------------------------------------------------------


def run(step_s: float, loss: float = 2.0, **more: Any) -> dict[str, Any]:
    return {"step_s": step_s, "peak_bytes": [4 << 20, 2 << 20], "losses": [3.0, loss], **more}


RUNS = {
    OURS: {0: run(2.0), 1: run(4.0)},
    "1f1b": {0: run(3.0, split=[4, 4]), 1: run(6.0, split=[4, 4])},
    "ddp": {0: run(2.8, loss=2.002, micro_batch=2)},
    "zbv": {0: {"failed": "ValueError: no | so"}},
    "mpipipe_fast": {0: run(1.5), 1: run(3.0)},
}


def test_ratios_are_of_the_same_rounds():
    found = summary(RUNS)
    sides = found["sides"]
    assert (sides["1f1b"]["ratio"], sides["ddp"]["ratio"]) == (1.5, 1.4)
    assert (found["best_peer"], found["ratio_to_best_peer"]) == ("ddp", 1.4)
    assert sides["ddp"]["loss_error"] == pytest.approx(1e-3)
    assert sides["zbv"] == {"failed": "ValueError: no | so"}
    assert sides["1f1b"]["split"] == [4, 4]
    assert sides["mpipipe_fast"]["ratio"] == 0.75, "which is no peer"


def test_a_round_that_ours_has_not_come_to_is_not_compared() -> None:
    found = summary({OURS: {0: run(2.0)}, "1f1b": {0: run(3.0), 1: run(9.0)}})
    assert found["sides"]["1f1b"]["ratio_by_round"] == [1.5]


def test_each_row_is_compared_with_every_group_of_peers() -> None:
    rows = summary({**RUNS, "compile": {0: run(2.4)}}, "gpt85m")["rows"]
    off, on = rows["kernels_off"], rows["kernels_on"]
    assert (off["side"], on["side"]) == (OURS, "mpipipe_fast")
    assert (off["best_peer"], off["ratio_to_best_peer"]) == ("compile", 1.2)
    assert (off["best_pipeline"], off["ratio_to_best_pipeline"]) == ("1f1b", 1.5)
    assert (off["best_parallel"], off["ratio_to_best_parallel"]) == ("ddp", 1.4)
    assert (on["best_parallel"], on["ratio_to_best_parallel"]) == ("ddp", pytest.approx(2.8 / 1.5))
    assert (on["best_one_process"], on["ratio_to_best_one_process"]) == ("compile", pytest.approx(1.6))
    (bar,) = off["bars"]
    assert bar == {"group": "pipeline", "ours_over_best": 1 / 1.5, "bar": 0.97, "met": True}
    assert {b["group"]: (b["bar"], b["ours_over_best"]) for b in on["bars"]} == {
        "parallel": (0.87, pytest.approx(1.5 / 2.8)),
        "one_process": (0.97, pytest.approx(1.5 / 2.4)),
    }


def test_a_bar_is_missed_above_it_and_null_where_no_such_peer_ran() -> None:
    found = summary({OURS: {0: run(2.0)}, "mpipipe_fast": {0: run(1.9)}, "1f1b": {0: run(2.0)}}, "gpt85m")
    met = {row: {b["group"]: b["met"] for b in figures["bars"]} for row, figures in found["rows"].items()}
    assert met == {"kernels_off": {"pipeline": False}, "kernels_on": {"parallel": False, "one_process": None}}
    assert said_of_bars(found) == [
        "kernels_off: bar 0.97 of the best pipeline: 1.000 of 1f1b, MISSED",
        "kernels_off: memory of the fullest rank: 1f1b needs 1.000 times as much",
        "kernels_on: bar 0.87 of the best parallel: 0.950 of 1f1b, MISSED",
        "kernels_on: bar 0.97 of the best one process: none ran",
        "kernels_on: memory of the fullest rank: 1f1b needs 1.000 times as much",
    ]


def test_memory_is_beside_the_peer_that_needs_least() -> None:
    wide, narrow = run(9.0) | {"peak_bytes": [5 << 20]}, run(9.0) | {"peak_bytes": [3 << 20, 3 << 20]}
    row = summary({OURS: {0: run(2.0)}, "one_process": {0: wide}, "ddp": {0: narrow}})["rows"]["kernels_off"]
    assert row["peak_bytes_of_worst_rank"] == {
        "ours": 4 << 20, "least_of_peers": 3 << 20, "peer": "ddp", "ratio": 0.75, "bar": 1.0, "met": False
    }  # fmt: skip
    assert row["peak_bytes_of_all_ranks"] == {
        "ours": 6 << 20, "least_of_peers": 5 << 20, "peer": "one_process", "ratio": 5 / 6,
        "bar": 1.0, "met": False,
    }  # fmt: skip


def test_bars_are_of_models_rows_and_groups_that_there_are() -> None:
    assert OF_MODELS.keys() <= SIZES.keys()
    assert all(bars_of(model, row).keys() <= GROUPS.keys() for model in SIZES for row in ROWS)
    assert all("pipeline" in bars_of(model, "kernels_off") for model in SIZES)
    assert {row for rows in OF_MODELS.values() for row in rows} <= ROWS.keys()


def test_bars_of_the_ceiling() -> None:
    near = {"to_ceiling": 0.96, "to_simulated": 0.98}
    assert ceiling._bars("v-planned", near) == {
        "to_simulated": {"bar": 0.97, "met": True},
        "to_ceiling": {"bar": 0.97, "met": False},
    }
    assert ceiling._bars("gpipe", near) == {"to_simulated": {"bar": 0.97, "met": True}}
    assert ceiling._bars("no_clip", near) == {"to_ceiling": {"bar": 0.97, "met": False}}
    assert ceiling._bars("2 ranks", near) == {}
    assert set(ceiling.SCHEDULES.split(",")) == {*BUILT_IN}
    sides = {"2 ranks": {"step_s": 2.0}, "4 ranks": {"step_s": 2.2}}
    assert ceiling._four_to_two(sides) == {"four_to_two": {"ratio": 1.1, "bar": 1.1, "met": True}}
    assert ceiling._four_to_two({"3 ranks": sides["2 ranks"], "6 ranks": sides["4 ranks"]}) == {}


def runs_of(sides: Sequence[Side[Any]], turns: int) -> list[list[Any]]:
    """Of each side, in place of `in_both_orders`."""
    halves = turns - turns // 2, turns // 2
    return [[side.run("gate", side.ahead + half) for half in halves] for side in sides]


def test_the_line_of_the_ceiling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every run does as many micro-batches; the ceiling is a step alone over the number of ranks."""
    asked = []

    def one_run(model: str, ranks: int, steps: int, *settings: str, gate: str) -> tuple[dict[str, Any], None]:
        asked.append((ranks, settings))
        step_s = {1: 4.0, 2: 2.0 if "train.clip=null" in settings else 2.5, 4: 2.5}[ranks]
        return {"steps_s": [9.0] + [step_s] * (steps - 1), "predicted_step_s": 2.0}, None

    monkeypatch.setattr(ceiling, "one_run", one_run)
    monkeypatch.setattr(ceiling, "in_both_orders", runs_of)
    ceiling.main(["--models", "tiny", "--steps", "3", "--schedules", "v-planned"])
    line = json.loads(capsys.readouterr().out)
    assert all(settings[0] == "pipeline.micro_batches=8" for _, settings in asked)
    assert (line["micro_batches"], line["ceiling_s"]) == (8, 2.0)
    found = line["sides"]["v-planned"]
    assert (found["to_ceiling"], found["to_simulated"]) == (0.8, 0.8)
    assert [bar["met"] for bar in found["bars"].values()] == [False, False]
    assert line["sides"]["no_clip"]["to_ceiling"] == 1.0
    assert line["four_to_two"] == {"ratio": 1.0, "bar": 1.1, "met": True}


@dataclass(frozen=True)
class FakeCase:
    """gate: of a run by turns, each of which takes half as long as one alone."""

    model: str = "vgg"
    ranks: int = 2
    gemm: str = "mkl"
    gate: str = ""
    keeps: bool = False
    timeout_s: float = 1.0

    def prepare(self) -> dict[str, Any]:
        return {"parameters": 7, "splits": {"1f1b": [[1, 1]], "zbv": [[1, 1]]}}

    def ours(self, steps: int, keys: Sequence[str] = ()) -> dict[str, Any]:
        return self._run(steps, 1.0 if "train.bits=fast" in keys else 2.0)

    def apart(self, steps: int, keys: Sequence[str] = ()) -> dict[str, Any]:
        return self._run(steps, 0.8 if "train.bits=fast" in keys else 1.5)

    def peer(self, side: str, choice: str, steps: int) -> dict[str, Any]:
        assert self.keeps or not self.gate
        return self._run(steps, 2.5 if side == "1f1b" else 4.0)

    def _run(self, steps: int, step_s: float) -> dict[str, Any]:
        step_s /= 2 if self.gate else 1
        return run(step_s, steps_s=[9.0] + [step_s] * (steps - 1)) | {"losses": [2.0] * steps}


def compared(monkeypatch: pytest.MonkeyPatch, limit_s: float, ceiling: bool = False) -> dict[str, Any]:
    monkeypatch.setattr(bench, "in_both_orders", runs_of)
    return bench.compare(FakeCase(), SIZES["vgg"], ["1f1b", "zbv"], limit_s, ceiling)  # type: ignore[arg-type]


def test_the_line_of_the_bench_has_the_bars_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(monkeypatch, 60.0)
    bars = {row: figures["bars"] for row, figures in found["rows"].items()}
    assert [(bar["bar"], bar["ours_over_best"]) for bar in bars["kernels_off"]] == [(0.97, 0.8)]
    assert [(bar["bar"], bar["ours_over_best"]) for bar in bars["kernels_on"]] == [(0.95, 0.4)]
    assert json.loads(json.dumps(found)) == found


def test_sides_near_the_best_peer_take_as_many_turns_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice the first steps of ours, nine of 3 s, and of the peer, three of 2.5 s, then turns of 5.5 s."""
    found = compared(monkeypatch, 69.0 + 7.5 * 5.5)
    turns = found["settings"]["turns"]
    seconds = {name: side["step_s_by_round"] for name, side in found["sides"].items()}
    assert seconds == {
        OURS: [2.0] + [1.0] * turns, "mpipipe_1f1b": [2.0],
        "mpipipe_fast": [1.0] + [0.5] * turns, "1f1b": [2.5] + [1.25] * turns, "zbv": [4.0],
    }  # fmt: skip
    assert turns == 7
    assert compared(monkeypatch, 5.0)["settings"]["turns"] == 0


def test_a_peer_that_fails_in_one_order_is_compared_by_its_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, gated = FakeCase.peer, itertools.count()

    def fails_in_the_second(self: FakeCase, side: str, choice: str, steps: int) -> dict[str, Any]:
        return {"failed": "it"} if self.gate and next(gated) else peer(self, side, choice, steps)

    monkeypatch.setattr(FakeCase, "peer", fails_in_the_second)
    assert compared(monkeypatch, 200.0)["sides"]["1f1b"]["step_s_by_round"] == [2.5]


def test_what_ranks_could_do_at_most_is_beside_ours_and_the_best_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = compared(monkeypatch, 200.0, ceiling=True)
    off, on = found["rows"]["kernels_off"], found["rows"]["kernels_on"]
    assert (off["ratio_of_ceiling"], on["ratio_of_ceiling"]) == (0.75, 0.8)
    assert [bar["ceiling_over_best"] for bar in off["bars"]] == [pytest.approx(0.6)]
    assert [bar["ceiling_over_best"] for bar in on["bars"]] == [pytest.approx(0.32)]
    assert found["best_peer"] == "1f1b", "they are no peers"
    assert said_of_bars(found)[0].endswith("of 1f1b, met; without bubble and message 0.600")
    assert "| mpipipe, bits: fast, without bubble and message | 0.4 s | 0.40 |" in table([found])


def test_peers_that_find_no_room_beside_others_are_in_a_group_of_their_own() -> None:
    base, mine = bench.BASE_BYTES, [*ROWS.values()]
    runs = {name: {0: run(1.0, peak_bytes=[0])} for name in mine}
    runs |= {"ddp": {0: run(1.1, peak_bytes=[3 * base])}, "1f1b": {0: run(1.0, peak_bytes=[base])}}
    runs |= {"zbv": {0: run(1.05, peak_bytes=[base])}, "gpipe": {0: run(2.0)}, "compile": {0: {"failed": ""}}}
    groups = bench.groups_of(runs, (len(mine) + 4) * base)
    assert groups == [[*mine, "1f1b", "zbv"], [*mine, "ddp"]]
    assert bench.groups_of(runs, 100 * base) == [[*mine, "1f1b", "zbv", "ddp"]]
    both = [*mine, *CEILINGS.values()]
    assert bench.groups_of(runs, (len(both) + 4) * base, ceiling=True)[0] == [*both, "1f1b", "zbv"]


# a process of a side: notes when its steps begin and end; the one called "short" ends before others
STEPS = r"""
import sys, time
from benchmarks.turns import wait_for_turn
name, steps, file = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "a", buffering=1)
for step in range(steps):
    wait_for_turn()
    file.write(f"{name} begins {step}\n")
    time.sleep(0.02)
    file.write(f"{name} ends {step}\n")
"""


def stepping(file: Path, name: str, processes: int, most: int, ahead: int = 0) -> Side[int]:
    def main(gate: str, steps: int) -> int:
        command = [sys.executable, "-c", STEPS, name, str(min(steps, most)), str(file)]
        env = os.environ | {GATE: gate}
        started = [subprocess.Popen(command, cwd=REPOSITORY, env=env) for _ in range(processes)]
        return max(process.wait(60) for process in started)

    return Side(processes, main, ahead)


@pytest.mark.slow
def test_sides_take_turns_step_by_step(tmp_path: Path) -> None:
    file = tmp_path / "said"
    sides = [stepping(file, "pair", 2, 3), stepping(file, "short", 1, 2), stepping(file, "alone", 1, 3)]
    assert take_turns(sides, 3) == [0, 0, 0]
    said = [tuple(line.split()) for line in file.read_text().splitlines()]
    assert [key for key, _ in itertools.groupby((name, step) for name, _, step in said)] == [
        ("pair", "0"), ("short", "0"), ("alone", "0"),
        ("alone", "1"), ("short", "1"), ("pair", "1"),
        ("pair", "2"), ("alone", "2"),
    ]  # fmt: skip
    assert said.count(("pair", "begins", "0")) == said.count(("pair", "ends", "2")) == 2


@pytest.mark.slow
def test_sides_are_started_in_both_orders_and_go_ahead_without_turns(tmp_path: Path) -> None:
    file = tmp_path / "said"
    sides = [stepping(file, "ahead", 1, 9, ahead=1), stepping(file, "other", 1, 9)]
    assert in_both_orders(sides, 3) == [(0, 0), (0, 0)]
    begun = [tuple(line.split()[::2]) for line in file.read_text().splitlines() if "begins" in line]
    assert begun == [
        ("ahead", "0"), ("ahead", "1"), ("other", "0"), ("other", "1"), ("ahead", "2"),
        ("ahead", "0"), ("other", "0"), ("ahead", "1"),
    ]  # fmt: skip


def test_whoever_waits_for_a_turn_ends_when_another_side_fails(tmp_path: Path) -> None:
    def fails(gate: str, steps: int) -> int:
        raise SystemExit("it failed")

    ended: list[int] = []
    waits = stepping(tmp_path / "said", "waits", 1, 9)
    sides = [Side(1, lambda gate, _: ended.append(waits.run(gate, 9)) or 0), Side(1, fails)]
    with pytest.raises(SystemExit, match="it failed"):
        take_turns(sides[::-1], 1)
    assert ended == [1]


def test_the_error_of_a_prediction_is_of_what_was_measured() -> None:
    assert prediction.judged(1.25) == {"step_error": pytest.approx(0.2), "bar": 0.05, "met": False}
    assert prediction.judged(0.97) == {"step_error": pytest.approx(1 / 0.97 - 1), "bar": 0.05, "met": True}


def test_the_default_run_takes_three_quarters_of_an_hour():
    assert sum(estimate_s(size, list(SIDES)) for size in SIZES.values()) < 45 * 60


def test_the_table_shows_every_side_and_where_it_was_measured():
    machine = {
        "processor": "Abacus", "cores": 2, "memory_gib": 23.6, "instruction_set": "AVX2", "torch": "2.13.0"
    }  # fmt: skip
    settings = {"steps": 3, "turns": 12, "ranks": 2, "gemm": "mkl", "arguments": ["--turns", "12"]}
    found = {"model": "gpt10m", "parameters": 10_800_000, "date": "2026-11-30", "machine": machine}
    results = [{**found, "settings": settings, **summary(RUNS)}]
    text = table(results)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2:] == [
        "| gpt10m, 11 M parameters | **mpipipe** | 3 s |  | 4, 2 MiB |",
        "|  | torch pipelining, 1F1B | 4.5 s | 1.50 | 4, 2 MiB |",
        "|  | torch DDP | 2.8 s |  | 4, 2 MiB |",
        "|  | torch pipelining, ZB-V | failed: ValueError: no \\| so |  |  |",
        "|  | mpipipe, bits: fast | 2.25 s | 0.75 | 4, 2 MiB |",
    ]
    assert 'Measured on 2026-11-30 by `make bench ARGS="--turns 12"`: 2 ranks' in text
    assert "gpt10m: medians of 12 steps by turns." in text
    assert "Abacus, 2 cores" in text
    assert max(map(len, text.splitlines())) <= 110
    short = in_short(results)
    assert [line for line in short.splitlines() if line.startswith("|")][2:] == [
        "| gpt10m, 11 M parameters | 3 s, 4 MiB | 2.25 s (0.75), 4 MiB | 1F1B: 4.5 s (1.50), 4 MiB "
        "| 2.8 s, 4 MiB |  |"
    ]
    assert "Abacus, 2 cores, 24 GiB, AVX2, torch 2.13.0." in short.replace("\n", " ")


@pytest.mark.parametrize("page", [README, PAGE])
def test_the_tables_have_their_places(page: Path) -> None:
    before = page.read_text()
    after = written(before, "new\n")
    assert "<!-- benchmarks -->\nnew\n<!-- end of benchmarks -->" in after
    assert written(after, "again\n") == written(before, "again\n")
    with pytest.raises(ValueError, match="one <!-- benchmarks -->"):
        written("no place", "new\n")


def test_exposure_is_that_of_the_rank_with_the_most(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    found, report = told(folder), from_json(Report, (folder / "summary.json").read_text())
    span_s = read_trace(folder / "timeline.json").timelines["measured"].makespan_s
    assert found["exposed_share"] == pytest.approx(max(r.exposed_s for r in report.ranks) / span_s, rel=1e-5)
    assert 0 <= found["predicted_exposed_share"] < found["exposed_share"] < 1
    assert json.loads(json.dumps(found))["ranks"] == [0, 1]


def test_the_reason_of_a_failure_is_one_line():
    trace = "Traceback:\n  File x\ntorch.Error: first\n[rank0]: ValueError: the reason\nwarning: leaked"
    assert reason(trace) == "ValueError: the reason"
    assert reason("Killed\n") == "Killed"
    assert reason("") == "it said nothing"


def commands_of(page: str, mark: str) -> set[str]:
    """Of `make bench`, in lines that begin with the mark."""
    lines = [line for line in (REPOSITORY / page).read_text().splitlines() if line.startswith(mark)]
    return {found for line in lines for found in re.findall(r"make bench(?:-\w+)?(?: BENCH=\w+)?", line)}


def test_every_benchmark_that_make_runs_has_its_row_among_the_figures() -> None:
    known = commands_of("benchmarks/README.md", "make")
    assert known == commands_of("docs/benchmarks.md", "|")
    assert len(known) > 10


# -- every peer --------------------------------------------------------------------------------

GPT = """
model: {name: gpt, vocab: 64, layers: 4, d_model: 32, heads: 2, context: 16}
data: {name: synthetic}
"""
VGG = """
model: {name: vgg, channels: 1, size: 16, blocks: [1, 1, 2], widths: [8, 8, 16], hidden: 32}
data: {name: synthetic, samples: 64}
"""
REST = """
train: {steps: 3, batch: 8, lr: 1e-2, warmup: 0}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 4}
run: {log_every: 1}
sample: {length: 0}
"""


@pytest.mark.jobs
@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "sides"),
    [
        pytest.param(GPT, ("zbv", "ddp", "one_process"), id="gpt, one of each kind"),
        pytest.param(GPT, [s for s in SCHEDULES if s != "zbv"], id="gpt, other schedules"),
        pytest.param(VGG, ("zbv", "ddp"), id="vgg"),
    ],
)
def test_peers_have_our_losses(launch: Launch, tmp_path: Path, model: str, sides: tuple[str, ...]):
    config = tmp_path / "tiny.yaml"
    config.write_text(model + REST)
    assert launch(2, "-m", "mpipipe.train", config, f"run.dir={tmp_path}/run", timeout_s=120).returncode == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ours = [json.loads(line)["loss"] for line in lines]
    assert any(abs(a - b) > 1e-3 for a, b in itertools.pairwise(ours))
    for side in sides:
        said = start([sys.executable, "-m", "benchmarks.peers", side, str(config), "--folder", str(tmp_path)])
        found = json.loads(said.splitlines()[-1])
        assert found.get("losses") == pytest.approx(ours, rel=1e-4), (side, found)


@pytest.mark.parametrize("at", [1.0, None], ids=["after a kill", "before it"])
def test_a_run_that_ends_instead_of_recovering_is_counted(tmp_path, at: float | None) -> None:
    class Ends:
        way, run_dir = survive.WAYS["mpi"], tmp_path
        process = SimpleNamespace(wait=lambda limit_s: 1, returncode=1)

        kill = staticmethod(lambda *_: at)
        recovered = staticmethod(lambda times: None)
        said = staticmethod(lambda: "its last words")
        close = staticmethod(lambda: None)

    tally = survive.Tally()
    survive.one_job(Ends(), 2, "", tally, random.Random(0))  # type: ignore[arg-type]
    assert (tally.kills, tally.replayed, tally.hangs, tally.same_bits) == (int(bool(at)), [], 0, False)
