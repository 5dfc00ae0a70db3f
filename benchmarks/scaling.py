"""Weak scaling on paper: copies of one pipeline, from costs that were taken here; a table, and JSON lines.

    python -m benchmarks.scaling [--stages 16] [--copies 1,4,16,64] [--plan plan.json]

A GPT of 32 layers, cut into 16 stages; each copy of the pipeline does 4 micro-batches per stage, of 2,048
tokens each, so with the copies the batch grows. Ranks are eight to a node, with one link of 100 Gb/s for all
of them: while all talk, each has an eighth. Clipping's norm, the exchange of gradients and of weights are in
the step. Nothing runs on so many ranks here: the costs of the groups come from `python -m mpipipe plan`,
which times them, or their operators, on this machine; --plan takes those of a plan that is there.

efficiency: samples per second and rank, over those of one copy. busy: the share of the step in which ranks
compute, mean over ranks; of a pipeline by itself its bubble is what is missing. bar, met: of the efficiency.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bars import at_least
from benchmarks.common import config_of, machine, run, say
from mpipipe.planner import make_plan
from mpipipe.report.plan_file import read_plan
from mpipipe.report.table import text_table
from mpipipe.values import Cluster, Link, Plan

SCHEDULES = ("1f1b", "zb-planned")
BAR = 0.92  # of the efficiency
MODEL = ("model.layers=32", "model.context=2048")  # a micro-batch is one sample
RANKS_PER_NODE, MEMORY_BYTES = 8, 64 << 30
LINKS = {"node": Link(2e-6, 9e9), "switch": Link(3e-6, 11e9, contention=RANKS_PER_NODE)}
COLUMNS = ("schedule", "copies", "ranks", "micro-batches", "step s", "busy", "efficiency", "planned in s")


def costs_of(stages: int) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        out, count = Path(folder) / "plan.json", 4 * stages
        batch = f"train.batch={count}", f"pipeline.micro_batches={count}"
        command = [sys.executable, "-m", "mpipipe", "plan", config_of("gpt85m"), *MODEL, *batch]
        run([*command, "--ranks", str(stages), "-o", str(out)])
        return read_plan(out)


def planned(plan: Plan, schedule: str, stages: int, copies: int) -> dict[str, Any]:
    assert plan.costs is not None
    n_ranks, count = stages * copies, 4 * stages * copies
    device = replace(plan.costs.cluster.devices[0], memory_bytes=MEMORY_BYTES)
    nodes = tuple(rank // RANKS_PER_NODE for rank in range(n_ranks))
    costs = replace(plan.costs, cluster=Cluster((device,) * n_ranks, nodes, LINKS), blocks=copies)
    numerics = replace(plan.numerics, batch=count, micro_batches=count, micro_batch=1, blocks=copies)
    began = time.process_time()
    found = make_plan(costs, numerics, schedule, 4, n_ranks, copies)[0].prediction
    return {
        "schedule": schedule, "copies": copies, "ranks": n_ranks, "micro_batches": count,
        "step_s": found.step_s, "busy": 1.0 - found.bubble, "plan_cpu_s": time.process_time() - began,
    }  # fmt: skip


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="weak scaling of copies of a pipeline, simulated")
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument(
        "--copies", default="1,4,16,64", help="with commas; the first is what others count by"
    )
    parser.add_argument("--plan", type=Path, help="one whose costs are taken")
    a = parser.parse_args(argv)
    plan = costs_of(a.stages) if a.plan is None else read_plan(a.plan)
    rows = []
    for schedule in SCHEDULES:
        lines = [planned(plan, schedule, a.stages, int(copies)) for copies in a.copies.split(",")]
        for line in lines:
            efficiency = lines[0]["step_s"] / line["step_s"]
            line |= {"efficiency": efficiency, **at_least(efficiency, BAR), "machine": machine()}
            print(json.dumps(line), flush=True)
            counts = (f"{line[key]:,}" for key in ("copies", "ranks", "micro_batches"))
            shares = (f"{line[key]:.3f}" for key in ("busy", "efficiency"))
            rows.append((schedule, *counts, f"{line['step_s']:.4g}", *shares, f"{line['plan_cpu_s']:.1f}"))
    say(text_table(COLUMNS, rows, 110, (0,)))


if __name__ == "__main__":
    main(sys.argv[1:])
