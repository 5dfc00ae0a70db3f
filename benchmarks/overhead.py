"""What the runtime itself costs: the share of a step that is neither F, B nor STEP nor the schedule's.

    python -m benchmarks.overhead [examples/gpt10m.yaml] [key=value ...] [--ranks 1,2,4] [--steps 12]
                                  [--schedules v-planned,1f1b,...]

A real run (`mpipipe.train`) with every instruction of every step timed. Each step is then replayed:
the same program, the measured durations of its computing instructions, messages and the norm's
collective free. That is what the schedule could reach at most with these durations: `of_replayed` =
replayed / measured, `overhead` is what is missing to 1. Two more replays say where it goes:

    norm      the collective and the norms it carries
    python    sends, and the time between instructions, before the first and after the last
    messages  what is left: transfers and wake-ups on the way of a step

And each step is simulated as a plan is, with the mean seconds that each stage took in it for F, B, I, W and
STEP: `simulated_error` is by what part of the measured step that is off. So both figures judge the rules of
time and the runtime, whatever the machine did between the timing of the costs and the steps.

Medians over steps, the first left out; `bars` has what is aimed at. Prints one JSON line for each schedule
and number of ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mpipipe.pipeline
import mpipipe.train
from benchmarks.bars import at_least, at_most
from benchmarks.common import AS_PLANNED, config_of, launch, machine
from mpipipe.cluster.mpi import connect
from mpipipe.config import load
from mpipipe.planner.refine import refined_costs
from mpipipe.planner.search import plan_of
from mpipipe.planner.walk import Ends, match, walk
from mpipipe.runtime.interpreter import Outcome
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import COMPUTE, RECVS, SENDS, Float64, Op, Plan, Program, Timeline

OF_REPLAYED, SIMULATED_ERROR = 0.97, 0.05  # what is aimed at


@dataclass(frozen=True)
class Recorded:
    """One step on one rank."""

    start_s: float
    end_s: float
    times: Float64  # (instructions, 2)


class RecordingTrainer(Trainer):
    """The product's trainer; what a step returns is kept."""

    kept: list[Recorded]
    made: list[RecordingTrainer] = []  # noqa: RUF012 - one per process

    def step(self, step: int, stop: bool = False) -> Outcome | None:
        self.made[:] = [self]
        self.kept = self.kept if step else []
        start = time.perf_counter()
        outcome = super().step(step, stop)
        if outcome is not None:
            self.kept.append(Recorded(start, time.perf_counter(), outcome.times))
        return outcome


# -- replay ----------------------------------------------------------------------------------------


class _Replay:
    """Rules of time as in `simulate`, with given seconds per instruction and free messages."""

    def __init__(self, ends: Ends, seconds: Sequence[Sequence[float]], norm_s: float) -> None:
        n = len(ends.ops)
        self.ends, self.seconds, self.norm_s = ends, seconds, norm_s
        self.at, self.now = [0] * n, [0.0] * n
        self.sent = [[0.0] * len(ops) for ops in ends.ops]

    def waits_for(self, rank: int, index: int) -> int:
        return self.ends.sender_of(rank, index, self.at)

    def passed(self, rank: int, index: int) -> None:
        op = self.ends.ops[rank][index]
        if op in RECVS:
            peer, other = self.ends.peers[rank][index], self.ends.partner[rank][index]
            self.now[rank] = max(self.now[rank], self.sent[peer][other])
        self.now[rank] += self.seconds[rank][index]
        if op in SENDS:
            self.sent[rank][index] = self.now[rank]

    def norm(self, index: list[int]) -> None:
        together = max(self.now) + self.norm_s
        self.now = [together + self.seconds[rank][i] for rank, i in enumerate(index)]


def makespan(program: Program, seconds: Sequence[Sequence[float]], norm_s: float = 0.0) -> float:
    """Seconds of a program whose instructions take these seconds, per rank and instruction."""
    replay = _Replay(match(program), seconds, norm_s)
    if not walk(replay.ends, replay, replay.at):
        raise RuntimeError("the program does not end")
    return max(replay.now)


# -- analysis --------------------------------------------------------------------------------------


def analyse(plan: Plan, program: Program, steps: Sequence[Sequence[Recorded]]) -> dict[str, Any]:
    """plan: of `program`; steps: per step, per rank."""
    rows = [_one_step(program, ranks) | _simulated(plan, program, ranks) for ranks in steps]
    median = {key: float(np.median([row[key] for row in rows])) for key in rows[0]}
    shares = [
        {key: round(float(np.median(values)), 5) for key, values in _shares(program, steps, rank).items()}
        for rank in range(len(program.codes))
    ]
    bars = {
        "of_replayed": at_least(median["of_replayed"], OF_REPLAYED),
        "simulated_error": at_most(median["simulated_error"], SIMULATED_ERROR),
    }
    return median | {"bars": bars, "share_of_step_by_rank": shares}


def _simulated(plan: Plan, program: Program, ranks: Sequence[Recorded]) -> dict[str, float]:
    """The step of the plan, predicted with what its stages took."""
    assert plan.costs is not None
    memory = tuple(np.zeros(len(r.times), np.int64) for r in ranks)  # not looked at
    costs = refined_costs(plan.costs, plan.layout, Timeline(program, tuple(r.times for r in ranks), memory))
    step_s = plan_of(costs, plan.numerics, plan.layout).prediction.step_s
    return {"simulated_step_s": step_s, "simulated_error": abs(1.0 - step_s / _seconds(ranks))}


def _seconds(ranks: Sequence[Recorded]) -> float:
    return max(r.end_s for r in ranks) - min(r.start_s for r in ranks)


def _one_step(program: Program, ranks: Sequence[Recorded]) -> dict[str, float]:
    measured = _seconds(ranks)
    compute, local = [], []
    for codes, r in zip(program.codes, ranks, strict=True):
        took = r.times[:, 1] - r.times[:, 0]
        computes = np.isin(codes[:, 0], sorted(COMPUTE))
        compute.append(np.where(computes, took, 0.0).tolist())
        gaps = np.append(r.times[1:, 0], r.end_s) - r.times[:, 1]
        gaps[0] += r.times[0, 0] - r.start_s
        local.append((np.where(computes | np.isin(codes[:, 0], sorted(SENDS)), took, 0.0) + gaps).tolist())
    norm = np.array(
        [r.times[np.flatnonzero(c[:, 0] == Op.NORM)[0]] for c, r in zip(program.codes, ranks, strict=True)]
    )
    norm_s = float(norm[:, 1].max() - norm[:, 0].max())
    ideal, with_norm = makespan(program, compute), makespan(program, compute, norm_s)
    with_python = makespan(program, local, norm_s)
    return {
        "of_replayed": ideal / measured,
        "overhead": 1.0 - ideal / measured,
        "norm": (with_norm - ideal) / measured,
        "python": (with_python - with_norm) / measured,
        "messages": 1.0 - with_python / measured,
        "step_s": measured,
        "replayed_step_s": ideal,
    }


def _shares(program: Program, steps: Sequence[Sequence[Recorded]], rank: int) -> dict[str, list[float]]:
    """Where one rank's step goes, by kind of instruction."""
    ops, out = program.codes[rank][:, 0], dict[str, list[float]]()
    for ranks in steps:
        r = ranks[rank]
        whole, took = r.end_s - r.start_s, r.times[:, 1] - r.times[:, 0]
        for op in sorted(set(ops.tolist())):
            out.setdefault(Op(op).name, []).append(float(took[ops == op].sum()) / whole)
        out.setdefault("between", []).append(1.0 - float(took.sum()) / whole)
    return out


# -- running ---------------------------------------------------------------------------------------


def rank_main(config: str, overrides: Sequence[str], out: Path) -> None:
    """One rank of the recorded run; rank 0 writes the result."""
    mpipipe.pipeline.Trainer = RecordingTrainer  # type: ignore[misc]
    comm = connect()
    report = mpipipe.train.train(comm, load(config, [AS_PLANNED, *overrides]))
    trainer = RecordingTrainer.made[0]
    offset = comm.clock_offset_s
    mine = [Recorded(r.start_s - offset, r.end_s - offset, r.times - offset) for r in trainer.kept]
    by_rank = comm.allgather_object(mine)
    if comm.rank == 0:
        steps = list(zip(*by_rank, strict=True))[1:]
        bubbles = {"bubble": report.bubble, "predicted_bubble": report.predicted_bubble}
        predicted = {"predicted_step_s": report.predicted_step_s}
        out.write_text(json.dumps(analyse(trainer.plan, trainer.program, steps) | bubbles | predicted))
    comm.close()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the runtime's overhead as a share of a step")
    parser.add_argument("config", nargs="?", default=config_of("gpt10m"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for mpipipe.train")
    parser.add_argument("--ranks", default="2", help="numbers with commas")
    parser.add_argument("--schedules", help="with commas; else that of the config")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", help=argparse.SUPPRESS)  # given: this process is a rank
    a = parser.parse_args(argv)
    if a.out:
        rank_main(a.config, a.overrides, Path(a.out))
        return
    schedules = [f"pipeline.schedule={name}" for name in a.schedules.split(",")] if a.schedules else [""]
    for ranks, schedule in itertools.product(map(int, a.ranks.split(",")), schedules):
        overrides = [*a.overrides, *filter(None, [schedule])]
        settings = {"config": Path(a.config).name, "overrides": overrides, "ranks": ranks, "steps": a.steps}
        found = one_run(a.config, overrides, ranks, a.steps)
        print(json.dumps(found | {"settings": settings, "machine": machine()}), flush=True)


def one_run(config: str, overrides: Sequence[str], ranks: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, run_dir = Path(folder) / "out.json", Path(folder) / "run"
        fixed = [f"train.steps={steps}", "pipeline.threads=1", "eval.every=0", f"run.dir={run_dir}"]
        launch(ranks, "-m", "benchmarks.overhead", config, *overrides, *fixed, "--out", str(out))
        found: dict[str, Any] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    main(sys.argv[1:])
