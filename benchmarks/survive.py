"""Kills of real ranks, again and again: does the run go on, and end with the bits that it should?

    make bench-survive ARGS="--kills 200"          python -m benchmarks.survive [--kills 20] [--ranks 3]

Jobs of a tiny GPT on the ranks of a real mpirun. Several times per job a random rank gets SIGKILL or SIGSTOP:
at a random instant, from outside; or inside STEP or a save, where the rank sends it to itself, as these last
too short to be aimed at. `WAYS` has the ways in which a run can survive.

The last line is JSON: kills, mpi_kills (of ranks of a real mpirun), recoveries, hangs, replayed_steps_max, k
(no more steps may be replayed: `save_every`), same_bits, recovery_s_median (from the kill to the next
completed step; also of SIGSTOP alone, which the watchdog has to notice first), where the kills met the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import ROOT, environment, machine
from mpipipe.cluster.job import kill_all, remains
from mpipipe.report.metrics import last_step

STEPS, SAVE_EVERY, PER_JOB = 60, 5, 4
WATCHDOG_S = 8
HANG_S = 300.0  # without an end, or without a step after a kill
WHERE = ("anywhere", "anywhere", "STEP", "save")
ORDER = "order.json"
CONFIG = f"""\
model: {{name: gpt, vocab: 256, layers: 3, d_model: 64, heads: 2, context: 32}}
data: {{name: "aimed:data", args: {{context: 32}}}}
train: {{steps: {STEPS}, batch: 16, warmup: 2, save_every: {SAVE_EVERY}}}
eval: {{every: 0, batches: 1}}
pipeline: {{micro_batches: 8}}
run: {{watchdog: {WATCHDOG_S}}}
sample: {{length: 0}}
"""
# imported by each rank with its data: the rank that finds an order for it obeys at that place
AIMED = f"""
import json, os, pathlib
import torch
from mpipipe import running
from mpipipe.runtime.interpreter import Interpreter

def obey(where):
    order = pathlib.Path("{ORDER}")
    try:
        rank, place, number = json.loads(order.read_text())
    except (OSError, ValueError):
        return
    if place == where and rank == int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")):
        order.rename("{ORDER}.done")
        os.kill(os.getpid(), number)

def before(function, where):
    def both(self, *rest):
        result = function(self, *rest)
        obey(where)
        return result
    return both

Interpreter._step = before(Interpreter._step, "STEP")  # of one stage: updated, while others are not
running.Run.save = before(running.Run.save, "save")

def collect(self, *rest):
    obey("save")
    return kept(self, *rest)

kept, running.Pipeline.save = running.Pipeline.save, collect

class data:
    def __init__(self, context):
        self.context = context

    def batch(self, step, micro):
        random = torch.Generator().manual_seed(1000 * step + micro)
        ids = torch.randint(256, (2, self.context + 1), generator=random)
        return {{"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}}
"""


@dataclass(frozen=True)
class Way:
    """How a run survives: arguments of `mpipipe run`, the steps that may be replayed, and what its output
    says of a recovery, with the steps lost."""

    words: tuple[str, ...]
    k: int
    lost: str


WAYS = {"restart": Way(("--restarts", "20"), SAVE_EVERY, r"mpipipe run: .* (\d+) steps? lost")}


@dataclass
class Tally:
    kills: int = 0
    hangs: int = 0
    replayed: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"SIGKILL": [], "SIGSTOP": []})
    where: Counter[str] = field(default_factory=Counter)
    same_bits: bool = True


class SurvivingJob:
    """One run under the supervisor."""

    def __init__(self, folder: Path, name: str, ranks: int, way: Way) -> None:
        self.folder, self.run_dir, self.ranks, self.way = folder, folder / name, ranks, way
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "mpipipe", "run", "config.yaml", "-n", str(ranks)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"run.dir={self.run_dir}", *way.words], cwd=folder, env=_environment(folder),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        kill_all(remains(f"run.dir={self.run_dir}"))

    def kill(self, at_step: int, where: str, number: signal.Signals, chance: random.Random) -> float:
        """Once `at_step` steps are done; the time of the kill. Raises TimeoutError."""
        _until(lambda: last_step(self.run_dir / "metrics.jsonl") >= at_step or self._over())
        rank, done = chance.randrange(self.ranks), self.folder / f"{ORDER}.done"
        if where == "anywhere":
            time.sleep(chance.random() * 0.5)
            os.kill(self._process_of(rank), number)
            return time.time()
        done.unlink(missing_ok=True)
        (self.folder / ORDER).write_text(json.dumps([rank, where, number]))
        _until(lambda: done.exists() or self._over())
        return time.time()

    def recovered(self, times: int) -> tuple[int, float]:
        """Waits for so many recoveries in all: steps replayed at the last one, the time of its first step.
        Raises TimeoutError."""
        _until(lambda: len(self._lost()) >= times or self._over())
        if len(self._lost()) < times:
            raise RuntimeError(
                f"{self.log}: the run ended without a recovery\n{self.log.read_text()[-3000:]}"
            )
        size = self._size()

        def grown() -> bool:  # what a restart replays is cut off first
            nonlocal size
            before, size = size, self._size()
            return size > before

        _until(lambda: grown() or self._over())
        return self._lost()[-1], time.time()

    def _lost(self) -> list[int]:
        return [int(found) for found in re.findall(self.way.lost, self.log.read_text())]

    def _size(self) -> int:
        return (self.run_dir / "metrics.jsonl").stat().st_size

    def _over(self) -> bool:
        return self.process.poll() is not None

    def _process_of(self, rank: int) -> int:
        for pid in remains(f"run.dir={self.run_dir}"):
            with suppress(OSError):
                if f"OMPI_COMM_WORLD_RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
                    return pid
        raise RuntimeError(f"rank {rank} of {self.run_dir} is not there")


def _until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)


def _environment(folder: Path) -> dict[str, str]:
    return environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def _weights(run_dir: Path) -> str:
    return str(json.loads((run_dir / "summary.json").read_text())["weights_sha256"])


def one_job(job: SurvivingJob, kills: int, wanted: str, tally: Tally, chance: random.Random) -> None:
    """kills: spread over its steps. wanted: the weights that it should end with."""
    try:
        for i in range(kills):
            where, number = chance.choice(WHERE), chance.choice([signal.SIGKILL, signal.SIGSTOP])
            at = job.kill((i + 1) * STEPS // (kills + 2), where, number, chance)
            lost, back = job.recovered(i + 1)
            tally.kills += 1
            tally.where[where] += 1
            tally.replayed.append(lost)
            tally.seconds[number.name].append(back - at)
            print(f"{number.name} {where}: {lost} steps lost, {back - at:.1f} s", file=sys.stderr, flush=True)
        job.process.wait(HANG_S)
        tally.same_bits &= job.process.returncode == 0 and _weights(job.run_dir) == wanted
    except (TimeoutError, subprocess.TimeoutExpired):
        print(f"hangs: {job.log.read_text()[-3000:]}", file=sys.stderr, flush=True)
        tally.hangs += 1
    finally:
        job.close()


def survive(folder: Path, kills: int, ranks: int, way: Way, seed: int = 0) -> Tally:
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "aimed.py").write_text(AIMED)
    subprocess.run(
        [sys.executable, "-m", "mpipipe.train", "config.yaml", "run.dir=undisturbed"], cwd=folder, check=True,
        env=_environment(folder), stdout=subprocess.DEVNULL, timeout=HANG_S,
    )  # fmt: skip
    wanted, tally, chance = _weights(folder / "undisturbed"), Tally(), random.Random(seed)
    number = 0
    while tally.kills < kills and not tally.hangs:
        job = SurvivingJob(folder, f"job{number}", ranks, way)
        one_job(job, min(PER_JOB, kills - tally.kills), wanted, tally, chance)
        number += 1
    return tally


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survive")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--recover", choices=WAYS, default="restart")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    way = WAYS[options.recover]
    with tempfile.TemporaryDirectory() as folder:
        tally = survive(Path(folder), options.kills, options.ranks, way, options.seed)
    every = [seconds for of_signal in tally.seconds.values() for seconds in of_signal]
    found = {
        "kills": tally.kills,
        "mpi_kills": tally.kills,
        "recoveries": len(tally.replayed),
        "hangs": tally.hangs,
        "replayed_steps_max": max(tally.replayed, default=0),
        "k": way.k,
        "same_bits": tally.same_bits,
        "recovery_s_median": statistics.median(every) if every else None,
        "recovery_s_by_signal": {name: statistics.median(s) for name, s in tally.seconds.items() if s},
        "where": dict(tally.where),
        "recover": options.recover,
        "machine": machine(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
