"""The pure parts of the benchmarks, and that every stock peer computes what mpipipe does."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import made_run

from mpipipe.report.trace import read_trace
from mpipipe.values import Report, from_json

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY))  # the benchmarks are no part of the package

from benchmarks import survive  # noqa: E402
from benchmarks.bench import competes  # noqa: E402
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
from benchmarks.results import OURS, VARIANTS, summary  # noqa: E402
from benchmarks.table import README, table, written  # noqa: E402

Launch = Callable[..., Any]
seconds = st.floats(0.01, 10.0)
FULL = pytest.mark.full


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


def test_a_slow_or_failed_peer_runs_once():
    first = {name: {0: rounds[0]} for name, rounds in RUNS.items()} | {"compile": {0: run(9.0)}}
    peers = [name for name in first if name not in (OURS, *VARIANTS)]
    assert [name for name in peers if competes(name, first)] == ["1f1b", "ddp"]
    assert competes("zbv", {OURS: {}, "zbv": {}})


def test_the_default_run_takes_forty_minutes():
    assert sum(estimate_s(size, list(SIDES)) for size in SIZES.values()) < 41 * 60


def test_the_table_shows_every_side_and_where_it_was_measured():
    machine = {
        "processor": "Abacus", "cores": 2, "memory_gib": 23.6, "instruction_set": "AVX2", "torch": "2.13.0"
    }  # fmt: skip
    settings = {"steps": 5, "rounds": 2, "ranks": 2, "gemm": "mkl", "arguments": ["--rounds", "2"]}
    found = {"model": "gpt10m", "parameters": 10_800_000, "date": "2026-11-30", "machine": machine}
    text = table([{**found, "settings": settings, **summary(RUNS)}])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2:] == [
        "| gpt10m, 11 M parameters | **mpipipe** | 3 s |  | 4, 2 MiB |",
        "|  | torch pipelining, 1F1B | 4.5 s | 1.50 | 4, 2 MiB |",
        "|  | torch DDP | 2.8 s | **1.40** | 4, 2 MiB |",
        "|  | torch pipelining, ZB-V | failed: ValueError: no \\| so |  |  |",
        "|  | mpipipe, bits: fast | 2.25 s | 0.75 | 4, 2 MiB |",
    ]
    assert 'Measured on 2026-11-30 by `make bench ARGS="--rounds 2"`: 2 ranks' in text
    assert "Abacus, 2 cores" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_table_has_its_place_in_the_readme():
    before = README.read_text()
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
@pytest.mark.parametrize(
    ("model", "sides"),
    [
        pytest.param(GPT, ("zbv", "ddp", "one_process"), id="gpt, one of each kind"),
        pytest.param(GPT, [s for s in SCHEDULES if s != "zbv"], id="gpt, other schedules", marks=FULL),
        pytest.param(VGG, ("zbv", "ddp"), id="vgg", marks=FULL),
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
