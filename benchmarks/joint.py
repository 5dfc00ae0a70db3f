"""What is chosen by hand against what is chosen automatically, measured: one JSON line for each model.

    python -m benchmarks.joint [--models gpt10m,vgg] [--ranks 2] [--rounds 3] [--steps 4]

Every number of micro-batches that the search looks at, and `pipeline.micro_batches=auto`. Cuts by hand are in
`benchmarks.cuts`.

The sides take turns in one run, every other round backwards, each a run of its own in fresh processes.
step_s: medians over rounds of a run's median step without its first; wall_s: of the whole run, the search
included. ratio: the best side by hand over the automatic one; above 1, automatic is faster. Progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import AS_PLANNED, config_of, machine, say, steps_of, train
from mpipipe.config import load
from mpipipe.planner.asked import counts_of
from mpipipe.report.plan_file import read_plan
from mpipipe.values import Plan

AUTO = "auto"
SAME = "eval.every=0", "pipeline.threads=1", "run.log_every=1"


def one_run(model: str, ranks: int, steps: int, *more: str, gate: str = "") -> tuple[dict[str, Any], Plan]:
    """The figures of a run, and its plan. gate: where it waits for its turns."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = [f"train.steps={steps}", f"run.dir={run_dir}", *SAME]
        started = time.time()
        train(ranks, config_of(model), AS_PLANNED, *settings, *more, gate=gate)
        summary = json.loads((run_dir / "summary.json").read_text())
        found = {key: summary[key] for key in ("step_s", "predicted_step_s", "peak_bytes")}
        found |= {"steps_s": [step["step_s"] for step in steps_of(run_dir)]}
        return found | {"wall_s": time.time() - started}, read_plan(run_dir / "plan.json")


def _counts(model: str, numbers: str) -> dict[str, list[str]]:
    """By the name of a side: its arguments. numbers: those to run, with commas; empty: all."""
    config = load(config_of(model))
    every = counts_of(config.train.batch, config.pipeline.blocks)
    counts = [int(number) for number in numbers.split(",")] if numbers else every
    named = {str(count): [f"pipeline.micro_batches={count}"] for count in counts}
    return named | {AUTO: ["pipeline.micro_batches=auto", "pipeline.schedule=auto"]}


def line(model: str, a: argparse.Namespace) -> dict[str, Any]:
    sides = _counts(model, a.numbers)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    took = []
    for number in range(a.rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            figures, plan = one_run(model, a.ranks, a.steps, *sides[side])
            figures.pop("steps_s")
            found[side].append(figures)
            if side == AUTO:
                n = plan.numerics
                took.append(
                    f"{n.micro_batches} of {n.micro_batch}, {plan.layout.schedule}, {plan.layout.cuts}"
                )
            step_s = figures["step_s"]
            say(f"{model} round {number + 1}: {side}: {step_s:.4f} s a step")
    by_side = {side: _medians(rounds) for side, rounds in found.items()}
    best = min((side for side in sides if side != AUTO), key=lambda side: by_side[side]["step_s"])
    ratio = by_side[best]["step_s"] / by_side[AUTO]["step_s"]
    return {
        "model": model, "ranks": a.ranks, "ratio": round(ratio, 4), "best_by_hand": best,
        "took": took, "sides": by_side, "machine": machine(),
    }  # fmt: skip


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: statistics.median(r[key] for r in rounds)
        if isinstance(rounds[0][key], float)
        else rounds[-1][key]
        for key in rounds[0]
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="chosen by hand against chosen automatically")
    parser.add_argument("--models", default="gpt10m,vgg", help="names in examples/, with commas")
    parser.add_argument("--numbers", default="", help="of micro-batches, with commas; empty: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run, the first is not counted")
    a = parser.parse_args(argv)
    for model in filter(None, a.models.split(",")):
        print(json.dumps(line(model, a)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
