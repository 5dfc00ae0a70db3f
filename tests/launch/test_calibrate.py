"""Real ranks measured into a file that a plan is made for, and ranks in another order that train to the same
bits (make test-mpi)."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpipipe.commands.plan import main
from mpipipe.config.cluster import load_cluster
from mpipipe.values import Plan, from_json

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [32, 32, 32, 32], classes: 4, dropout: 0.1}
data: {name: synthetic, samples: 64}
train: {steps: 4, batch: 8, warmup: 1, clip: 0.5}
eval: {every: 2, batches: 2}
pipeline: {micro_batches: 4, schedule: 1f1b}
kernels: {gemm: mkl}
"""
SLOW_FIRST = """\
devices:
- {count: 2, kind: old, threads: 1, memory: 1 GiB, flops_per_s: {fp32: 1e+6, bf16: 1e+6}, bytes_per_s: 1e+7}
- {count: 1, kind: new, threads: 1, memory: 2 GiB, flops_per_s: {fp32: 5e+6, bf16: 5e+6}, bytes_per_s: 1e+8}
node_of_rank: [0, 1, 0]
links: {node: {latency_s: 1e-6, bytes_per_s: 1e+9}, switch: {latency_s: 1e-4, bytes_per_s: 1e+5}}
"""


def plan(folder: Path, *arguments: str) -> int:
    with contextlib.chdir(folder):
        return main(["config.yaml", *arguments])


def test_two_ranks_are_measured_and_planned_for(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    job = launch(2, "-m", "mpipipe", "calibrate", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("measured: 2 ranks on 1 node") == 1
    cluster = load_cluster(tmp_path / "cluster.yaml").of(2, "fp32", 1, 0, None)
    assert cluster.node_of_rank == (0, 0)
    assert 0 < cluster.link(0, 1).latency_s < 0.1
    assert plan(tmp_path, "--ranks", "2", "--cluster", "cluster.yaml") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.full  # the message itself is in tests/commands
def test_what_cannot_be_written_ends_all_ranks_with_one_message(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, "-m", "mpipipe", "calibrate", "-o", "no/c.yaml", cwd=tmp_path)
    assert job.returncode != 0
    assert job.stderr.count("mpipipe: error: -o no/c.yaml: cannot be written") == 1


@pytest.mark.full  # tests/mpi has orders of the ranks, and tests/planner those that are planned
def test_ranks_in_the_order_of_a_plan_train_to_the_bits_of_one(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "cluster.yaml").write_text(SLOW_FIRST)
    assert plan(tmp_path, "--ranks", "3", "--cluster", "cluster.yaml", "-o", "p.json") == 0
    said = capsys.readouterr()
    assert said.err == ""
    chosen = from_json(Plan, (tmp_path / "p.json").read_text()).layout
    assert chosen.order != (0, 1, 2)
    assert f"in the order of the stages: {', '.join(map(str, chosen.order))}" in said.out
    summaries, metrics = [], []
    for ranks, name, given in ((3, "p", ["--plan", "p.json"]), (1, "one", [])):
        job = launch(ranks, "-m", "mpipipe.train", "config.yaml", f"run.dir={name}", *given, cwd=tmp_path)
        assert job.returncode == 0, job.stderr
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        metrics.append([(x["step"], x["loss"], x["grad_norm"], x.get("val_loss")) for x in lines])
    assert metrics[0] == metrics[1]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    by_rank = [rank["stages"][0] for rank in summaries[0]["ranks"]]
    assert [by_rank.index(stage) for stage in range(3)] == list(chosen.order)
