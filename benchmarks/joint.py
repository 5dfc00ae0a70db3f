"""What is chosen by hand against what is chosen automatically, measured: one JSON line for each model.

    python -m benchmarks.joint [--models gpt10m,vgg] [--ranks 2] [--rounds 3] [--steps 4]
    python -m benchmarks.joint --cuts [--models gpt10m,gpt85m] [--most 9] [--near 0.05]

Without --cuts: every number of micro-batches that the search looks at, and `pipeline.micro_batches=auto`.
With --cuts: every way to cut into that many ranks by hand, or `--most` of them evenly spread, with 1f1b; the
cut that is chosen automatically with 1f1b; and the plan of a run as it comes. The number of micro-batches is
that of the example.
--near: after a first round of all, only sides this near to the fastest by hand go on (0.05: 5 % slower).

The sides take turns in one run, every other round backwards, each a run of its own in fresh processes.
step_s: medians over rounds of a run's median step without its first; wall_s: of the whole run, the search
included. ratio: the best side by hand over the automatic one; above 1, automatic is faster. Progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.common import config_of, launch, machine
from mpipipe.config import load
from mpipipe.planner.joint import counts_of
from mpipipe.report.plan_file import plan_text, read_plan
from mpipipe.values import Plan

AUTO, AUTO_CUT = "auto", "auto_cut"
PLAIN = "pipeline.schedule=1f1b"


def one_run(model: str, ranks: int, steps: int, *more: str) -> tuple[dict[str, Any], Plan]:
    """The figures of a run, and its plan."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = [f"train.steps={steps}", f"run.dir={run_dir}", "eval.every=0", "pipeline.threads=1"]
        started = time.time()
        launch(ranks, "-m", "mpipipe.train", config_of(model), *settings, *more)
        summary = json.loads((run_dir / "summary.json").read_text())
        found = {key: summary[key] for key in ("step_s", "predicted_step_s", "peak_bytes")}
        return found | {"wall_s": time.time() - started}, read_plan(run_dir / "plan.json")


def _counts(model: str, numbers: str) -> dict[str, list[str]]:
    """By the name of a side: its arguments. numbers: those to run, with commas; empty: all."""
    config = load(config_of(model))
    every = counts_of(config.train.batch, config.pipeline.blocks)
    counts = [int(number) for number in numbers.split(",")] if numbers else every
    named = {str(count): [f"pipeline.micro_batches={count}"] for count in counts}
    return named | {AUTO: ["pipeline.micro_batches=auto", "pipeline.schedule=auto"]}


def _cuts(model: str, ranks: int, most: int, folder: Path) -> dict[str, list[str]]:
    plan = one_run(model, ranks, 2, PLAIN)[1]
    assert plan.costs is not None
    names = [group.name for group in plan.costs.groups]
    ways = list(combinations(range(1, len(names)), ranks - 1))
    most = min(most or len(ways), len(ways))
    step = len(ways) / most
    sides = {}
    for i in range(most):
        cut = ways[int((i + 0.5) * step)]
        path = folder / f"{'-'.join(map(str, cut))}.json"
        layout = replace(plan.layout, cuts=tuple(names[c] for c in cut))
        path.write_text(plan_text(replace(plan, layout=layout)))
        sides[path.stem] = ["--plan", str(path)]
    return sides | {AUTO_CUT: [PLAIN], AUTO: []}


def line(model: str, a: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sides = _cuts(model, a.ranks, a.most, Path(folder)) if a.cuts else _counts(model, a.numbers)
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        took, racing = [], list(sides)
        for number in range(a.rounds):
            for side in racing[:: -1 if number % 2 else 1]:
                figures, plan = one_run(model, a.ranks, a.steps, *sides[side])
                found[side].append(figures)
                if side == AUTO:
                    n = plan.numerics
                    took.append(
                        f"{n.micro_batches} of {n.micro_batch}, {plan.layout.schedule}, {plan.layout.cuts}"
                    )
                step_s = figures["step_s"]
                print(f"{model} round {number + 1}: {side}: {step_s:.4f} s a step", file=sys.stderr)
            racing = _near(found, a.near)
    by_side = {side: _medians(rounds) | {"rounds": len(rounds)} for side, rounds in found.items()}
    best = min((side for side in racing if side not in (AUTO, AUTO_CUT)), key=lambda s: by_side[s]["step_s"])
    ratio = by_side[best]["step_s"] / by_side[AUTO]["step_s"]
    what = "cuts" if a.cuts else "micro_batches"
    return {
        "model": model, "ranks": a.ranks, "what": what, "ratio": round(ratio, 4), "best_by_hand": best,
        "took": took, "sides": by_side, "machine": machine(),
    }  # fmt: skip


def _near(found: dict[str, list[dict[str, Any]]], near: float) -> list[str]:
    """The sides that go on: the automatic ones, and by hand those near the fastest in the first round."""
    first, ours = {side: rounds[0]["step_s"] for side, rounds in found.items()}, (AUTO, AUTO_CUT)
    limit = (1.0 + near) * min(step_s for side, step_s in first.items() if side not in ours)
    return [side for side, step_s in first.items() if side in ours or step_s <= limit]


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
    parser.add_argument("--cuts", action="store_true", help="cuts instead of numbers of micro-batches")
    parser.add_argument("--most", type=int, default=9, help="cuts that are run by hand; 0: all")
    parser.add_argument("--near", type=float, default=math.inf, help="slower than the best: goes on; all do")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run, the first is not counted")
    a = parser.parse_args(argv)
    for model in filter(None, a.models.split(",")):
        print(json.dumps(line(model, a)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
