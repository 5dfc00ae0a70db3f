"""What the runtime itself costs: the share of a step that is neither F, B nor STEP nor the schedule's.

    python -m benchmarks.overhead [examples/gpt10m.yaml] [key=value ...] [--ranks 2] [--steps 12]

A real run (`mpipipe.train`) with every instruction of every step timed. Each step is then replayed:
the same program, the measured durations of its computing instructions, messages and the norm's
collective free. overhead = 1 - replayed / measured; medians over steps, the first left out. Two more
replays say where it goes:

    norm      the collective and the norms it carries
    python    sends, and the time between instructions, before the first and after the last
    messages  what is left: transfers and wake-ups on the way of a step

Prints one JSON line.
"""

from __future__ import annotations

import argparse
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
from benchmarks.common import config_of, launch, machine
from mpipipe.cluster.mpi import connect
from mpipipe.config import load
from mpipipe.planner.walk import Ends, match, walk
from mpipipe.runtime.interpreter import Outcome
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import COMPUTE, RECVS, SENDS, Float64, Op, Program


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


def analyse(program: Program, steps: Sequence[Sequence[Recorded]]) -> dict[str, Any]:
    """steps: per step, per rank."""
    rows = [_one_step(program, ranks) for ranks in steps]
    median = {key: float(np.median([row[key] for row in rows])) for key in rows[0]}
    shares = [
        {key: round(float(np.median(values)), 5) for key, values in _shares(program, steps, rank).items()}
        for rank in range(len(program.codes))
    ]
    return median | {"share_of_step_by_rank": shares}


def _one_step(program: Program, ranks: Sequence[Recorded]) -> dict[str, float]:
    measured = max(r.end_s for r in ranks) - min(r.start_s for r in ranks)
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
        "overhead": 1.0 - ideal / measured,
        "norm": (with_norm - ideal) / measured,
        "python": (with_python - with_norm) / measured,
        "messages": 1.0 - with_python / measured,
        "step_s": measured,
        "ideal_step_s": ideal,
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
    report = mpipipe.train.train(comm, load(config, overrides))
    trainer = RecordingTrainer.made[0]
    offset = comm.clock_offset_s
    mine = [Recorded(r.start_s - offset, r.end_s - offset, r.times - offset) for r in trainer.kept]
    by_rank = comm.allgather_object(mine)
    if comm.rank == 0:
        steps = list(zip(*by_rank, strict=True))[1:]
        bubbles = {"bubble": report.bubble, "predicted_bubble": report.predicted_bubble}
        predicted = {"predicted_step_s": report.predicted_step_s}
        out.write_text(json.dumps(analyse(trainer.program, steps) | bubbles | predicted))
    comm.close()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="the runtime's overhead as a share of a step")
    parser.add_argument("config", nargs="?", default=config_of("gpt10m"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for mpipipe.train")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", help=argparse.SUPPRESS)  # given: this process is a rank
    a = parser.parse_args(argv)
    if a.out:
        rank_main(a.config, a.overrides, Path(a.out))
        return
    with tempfile.TemporaryDirectory() as folder:
        out, run_dir = Path(folder) / "out.json", Path(folder) / "run"
        fixed = [f"train.steps={a.steps}", "pipeline.threads=1", "eval.every=0", f"run.dir={run_dir}"]
        launch(a.ranks, "-m", "benchmarks.overhead", a.config, *a.overrides, *fixed, "--out", str(out))
        found = json.loads(out.read_text())
    settings = {"config": Path(a.config).name, "overrides": a.overrides, "ranks": a.ranks, "steps": a.steps}
    print(json.dumps(found | {"settings": settings, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
