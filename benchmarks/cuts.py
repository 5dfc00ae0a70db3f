"""Every way to cut a model by hand against the planner's cut: one JSON line for each model.

    python -m benchmarks.cuts [--models gpt85m,vgg] [--ranks 2] [--rounds 3] [--steps 2] [--near 0.03]

Each way to cut into as many stages as there are ranks, with 1f1b; the planner's cut with 1f1b (`auto_cut`);
and the plan of a run as it comes (`auto`). All are run by the same ranks, one after the other: a trainer is
made, a step is done that does not count, then those that do. In the first round that is one step; where the
first one took `SLOW` times the fastest so far it counts, and there is no other. What is predicted to be the
fastest comes first. Sides by hand that are, or were predicted to be, within `near` of the fastest go on to
further rounds, in turns.

step_s: medians of all steps that count; of many sides the fastest is also the luckiest, which is for those by
hand. ratio: the fastest by hand over `auto`, ratio_cut: over `auto_cut`; above 1, automatic is
faster. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.common import config_of, launch, machine, say
from mpipipe.cluster.mpi import connect
from mpipipe.config import load
from mpipipe.configured import optimizer_settings
from mpipipe.data import open_dataset, prepare
from mpipipe.models import build
from mpipipe.pipeline import Pipeline
from mpipipe.planner.asked import Asked
from mpipipe.planner.joint import search
from mpipipe.planner.prediction import expect
from mpipipe.planner.programs import program_for
from mpipipe.planner.schedules import PLAIN
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import Plan

AUTO, AUTO_CUT = "auto", "auto_cut"
SLOW = 1.4


def pipeline_of(model: str, folder: Path) -> Pipeline:
    """As `mpipipe.train` makes it of the example."""
    comm, config = connect(), load(config_of(model))
    prepare(config, folder, comm.rank == 0)
    comm.barrier()
    opened = open_dataset(config, folder)
    data = opened[0] if isinstance(opened, tuple) else opened
    built = build(config, data)
    return Pipeline(
        built.model, built.loss, built.data, optimizer_settings(config), batch=config.train.batch,
        micro_batches=config.pipeline.micro_batches, say=lambda line: None, comm=comm,
    )  # fmt: skip


def sides_of(pipe: Pipeline) -> tuple[dict[str, Plan], dict[str, float]]:
    """Those by hand in the order of their predictions, which come with them, then the automatic ones."""
    asked = Asked(
        pipe.numerics, (pipe.numerics.micro_batches,), PLAIN[:1], pipe.plan.layout.receive_window, pipe.size
    )
    plain, names = search(asked, lambda _: pipe.costs).plan, pipe.variants.graph.groups

    def predicted_s(plan: Plan) -> float:
        program = program_for(plan.layout, plan.numerics, pipe.costs.ties, names)
        return expect(pipe.costs, plan.layout, program)[0].step_s

    found = {}
    for cuts in combinations(range(1, len(names)), pipe.size - 1):
        layout = replace(plain.layout, cuts=tuple(names[cut] for cut in cuts), recompute=())
        found["-".join(map(str, cuts))] = replace(plain, layout=layout)
    predicted = {side: predicted_s(plan) for side, plan in found.items()}
    by_hand = {side: found[side] for side in sorted(found, key=lambda side: predicted[side])}
    return by_hand | {AUTO_CUT: plain, AUTO: pipe.plan}, predicted


class Racing:
    """The steps of each side so far."""

    def __init__(self, pipe: Pipeline, sides: dict[str, Plan]) -> None:
        self.pipe, self.sides = pipe, sides
        self.seconds: dict[str, list[float]] = {side: [] for side in sides}

    def run(self, side: str, steps: int, limit_s: float) -> None:
        """Where the first step takes longer than `limit_s`, it counts, and there is no other."""
        pipe = self.pipe
        trainer = Trainer(pipe.comm, pipe.variants, self.sides[side], pipe.optimizer, pipe.data)
        first = self._step_s(trainer, 0)
        more = [self._step_s(trainer, step) for step in range(1, 1 + steps)] if first <= limit_s else [first]
        self.seconds[side] += more
        trainer.close()
        del trainer
        gc.collect()  # before the weights of the next one are made
        if pipe.rank == 0:
            say(f"{side}: {statistics.median(more):.4f} s a step")

    def _step_s(self, trainer: Trainer, step: int) -> float:
        comm = self.pipe.comm
        comm.barrier()
        start = time.perf_counter()
        trainer.step(step)
        comm.barrier()
        return comm.bcast_object(time.perf_counter() - start)

    def by_hand(self) -> dict[str, float]:
        return {
            side: statistics.median(s)
            for side, s in self.seconds.items()
            if s and side not in (AUTO, AUTO_CUT)
        }


def rank_main(model: str, folder: Path, rounds: int, steps: int, near: float) -> None:
    """One rank; rank 0 writes what was found."""
    pipe = pipeline_of(model, folder)
    sides, predicted = sides_of(pipe)
    race = Racing(pipe, sides)
    for side in race.sides:
        race.run(side, 1, SLOW * min(race.by_hand().values(), default=float("inf")))
    first, most = race.by_hand(), 1.0 + near
    least_s, least_predicted_s = min(first.values()), min(predicted.values())
    going_on = [s for s in first if first[s] <= most * least_s or predicted[s] <= most * least_predicted_s]
    going_on += [AUTO_CUT, AUTO]
    for number in range(1, rounds):
        for side in going_on[:: -1 if number % 2 else 1]:
            race.run(side, steps, float("inf"))
    if pipe.rank == 0:
        medians = {side: statistics.median(s) for side, s in race.seconds.items()}
        best = min(
            (side for side in going_on if side not in (AUTO_CUT, AUTO)), key=lambda side: medians[side]
        )
        found = {
            "ratio": medians[best] / medians[AUTO], "ratio_cut": medians[best] / medians[AUTO_CUT],
            "best_by_hand": best, "went_on": going_on, "schedule": pipe.plan.layout.schedule,
            "step_s": {side: round(s, 4) for side, s in medians.items()},
        }  # fmt: skip
        (folder / "found.json").write_text(json.dumps(found))
    pipe.comm.barrier()
    pipe.comm.close()


def line(model: str, a: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        how = [f"--rounds={a.rounds}", f"--steps={a.steps}", f"--near={a.near}"]
        say(f"{model}: its cuts take turns")
        launch(a.ranks, "-m", "benchmarks.cuts", "--models", model, "--folder", folder, *how)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return {"model": model, "ranks": a.ranks} | found | {"machine": machine()}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="cuts by hand against the planner's")
    parser.add_argument("--models", default="gpt85m,vgg", help="names in examples/, with commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=2, help="that count, of a side in a round after the first"
    )
    parser.add_argument("--near", type=float, default=0.03, help="slower than the fastest: goes on")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # given: this process is a rank
    a = parser.parse_args(argv)
    if a.folder:
        rank_main(a.models, a.folder, a.rounds, a.steps, a.near)
        return
    for model in a.models.split(","):
        print(json.dumps(line(model, a)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
