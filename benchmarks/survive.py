"""Kills of real ranks, again and again: does the run go on, and end with the bits that it should?

    make bench-survive ARGS="--kills 200"
                                    python -m benchmarks.survive [--kills 20] [--ranks 3] [--model gpt10m]
                                    python -m benchmarks.survive --recover mpi [--ranks 5] [--spares 2]

Jobs of a tiny GPT, or of one with 10 M parameters, on the ranks of a real mpirun. Several times per job a
random rank gets SIGKILL or SIGSTOP: at a random instant, from outside; or inside STEP, a save or a mirror,
where the rank sends it to itself, as these last too short to be aimed at. `WAYS` has the ways in which a run
can survive.

The last line is JSON, also where runs fail: kills (signals that were sent), mpi_kills (of them to ranks of a
real mpirun: all), recoveries (fewer, where a run ended instead), late (the run ended as it should before
anybody noticed, such as a frozen spare), hangs, replayed_steps_max, k (no more steps may be replayed:
`save_every`, or `mirror_every`), same_bits, recovery_s_median (from the kill to the next completed step; also
of SIGSTOP alone, which has to be noticed first), where the kills met it.
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
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.common import ROOT, environment, machine, say
from mpipipe.cluster.job import kill_all, remains
from mpipipe.report.metrics import last_step

STEPS, SAVE_EVERY, MIRROR_EVERY, PER_JOB = 60, 5, 4, 4
WATCHDOG_S = 8
HANG_S = 300.0  # without an end, or without a step after a kill
MODELS = {
    "tiny": ("layers: 3, d_model: 64, heads: 2", 32),
    "gpt10m": ("layers: 6, d_model: 384, heads: 6", 256),
}
WHERE = ("anywhere", "anywhere", "STEP", "save")
ORDER = "order.json"
CONFIG = f"""\
model: {{name: gpt, vocab: 256, SHAPE, context: CONTEXT}}
data: {{name: "aimed:data", args: {{context: CONTEXT}}}}
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
from mpipipe.state.mirrors import Mirrors

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
    def both(self, *rest, **how):
        result = function(self, *rest, **how)
        obey(where)
        return result
    return both

Interpreter._step = before(Interpreter._step, "STEP")  # of one stage: updated, while others are not
running.Run.save = before(running.Run.save, "save")

Mirrors.take = before(Mirrors.take, "mirror")

def collect(self, *rest, **how):
    obey("save")
    return kept(self, *rest, **how)

kept, running.Pipeline.begin_save = running.Pipeline.begin_save, collect

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
    """How a run survives: arguments of `mpipipe run`, the steps that may be replayed, what its output says of
    a recovery, with the steps lost, and where kills are aimed at. comes_back: a rank that was killed."""

    words: tuple[str, ...]
    k: int
    lost: str
    where: tuple[str, ...] = WHERE
    comes_back: bool = True


WAYS = {
    "restart": Way(("--restarts", "20"), SAVE_EVERY, r"mpipipe run: .* (\d+) steps? lost"),
    "mpi": Way(
        ("run.recover=mpi", f"run.mirror_every={MIRROR_EVERY}"), MIRROR_EVERY,
        r"mpipipe: lost rank (?:.* (\d+) steps? again|.* which was a spare)",
        (*WHERE, "mirror"), comes_back=False,
    ),
}  # fmt: skip


@dataclass
class Tally:
    kills: int = 0  # signals that were sent, whatever came of them
    late: int = 0  # after which the run ended as it should before anybody noticed
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

    def kill(self, at_step: int, where: str, number: signal.Signals, chance: random.Random) -> float | None:
        """Once `at_step` steps are done; the time of the kill, None where what was aimed at ended before.
        Raises TimeoutError."""
        _until(lambda: last_step(self.run_dir / "metrics.jsonl") >= at_step or self._over())
        processes, done = self._processes(), self.folder / f"{ORDER}.done"
        if not processes:
            return None
        rank = sorted(processes)[chance.randrange(len(processes))]
        if where == "anywhere":
            time.sleep(chance.random() * 0.5)
            try:
                os.kill(processes[rank], number)
            except ProcessLookupError:
                return None
            return time.time()
        done.unlink(missing_ok=True)
        (self.folder / ORDER).write_text(json.dumps([rank, where, number]))
        _until(lambda: done.exists() or self._over())
        (self.folder / ORDER).unlink(missing_ok=True)  # no other run is to find it
        return time.time() if done.exists() else None

    def recovered(self, times: int) -> tuple[int, float] | None:
        """Waits for so many recoveries in all: steps replayed at the last one, the time of its first step;
        None where the run ended instead. Raises TimeoutError."""
        _until(lambda: len(self._lost()) >= times or self._over())
        if len(self._lost()) < times:
            return None
        size = self._size()

        def grown() -> bool:  # what a restart replays is cut off first
            nonlocal size
            before, size = size, self._size()
            return size > before

        _until(lambda: grown() or self._over())
        return None if self.process.poll() else (self._lost()[-1], time.time())

    def said(self) -> str:
        return self.log.read_text()[-3000:]

    def _lost(self) -> list[int]:
        return [int(found or 0) for found in re.findall(self.way.lost, self.log.read_text())]

    def _size(self) -> int:
        return (self.run_dir / "metrics.jsonl").stat().st_size

    def _over(self) -> bool:
        return self.process.poll() is not None

    def _processes(self) -> dict[int, int]:
        """Of the ranks that are there."""
        found = {}
        for pid in remains(f"run.dir={self.run_dir}"):
            with suppress(OSError):
                if rank := re.search(
                    r"\0OMPI_COMM_WORLD_RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_text()
                ):
                    found[int(rank[1])] = pid
        return found


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
    recoveries = 0
    try:
        for i in range(kills):
            where, number = chance.choice(job.way.where), chance.choice([signal.SIGKILL, signal.SIGSTOP])
            at = job.kill((i + 1) * STEPS // (kills + 2), where, number, chance)
            if at is None:
                continue
            tally.kills += 1
            tally.where[where] += 1
            found = job.recovered(recoveries + 1)
            if found is None and job.process.wait(HANG_S) == 0:
                tally.late += 1
                break
            if found is None:
                say(f"{number.name} {where}: ends: {job.said()}")
                break
            recoveries, (lost, back) = recoveries + 1, found
            tally.replayed.append(lost)
            tally.seconds[number.name].append(back - at)
            say(f"{number.name} {where}: {lost} steps lost, {back - at:.1f} s")
        job.process.wait(HANG_S)
        tally.same_bits &= job.process.returncode == 0 and _weights(job.run_dir) == wanted
    except (TimeoutError, subprocess.TimeoutExpired):
        say(f"hangs: {job.said()}")
        tally.hangs += 1
    finally:
        job.close()


def survive(folder: Path, kills: int, ranks: int, way: Way, seed: int = 0, model: str = "tiny") -> Tally:
    shape, context = MODELS[model]
    (folder / "config.yaml").write_text(CONFIG.replace("SHAPE", shape).replace("CONTEXT", str(context)))
    (folder / "aimed.py").write_text(AIMED)
    subprocess.run(
        [sys.executable, "-m", "mpipipe.train", "config.yaml", "run.dir=undisturbed"], cwd=folder, check=True,
        env=_environment(folder), stdout=subprocess.DEVNULL, timeout=HANG_S,
    )  # fmt: skip
    wanted, tally, chance = _weights(folder / "undisturbed"), Tally(), random.Random(seed)
    number = 0
    while tally.kills < kills and not tally.hangs:
        job = SurvivingJob(folder, f"job{number}", ranks, way)
        most = PER_JOB if way.comes_back else min(PER_JOB, ranks - 1)
        before = tally.kills
        one_job(job, min(most, kills - tally.kills), wanted, tally, chance)
        if tally.kills == before and not tally.same_bits:  # it does not even begin
            break
        number += 1
    return tally


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survive")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--spares", type=int, default=0, help="of the ranks; with --recover mpi")
    parser.add_argument("--recover", choices=WAYS, default="restart")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    way = WAYS[options.recover]
    if options.spares:
        way = replace(way, words=(*way.words, f"run.spares={options.spares}"))
    with tempfile.TemporaryDirectory() as folder:
        tally = survive(Path(folder), options.kills, options.ranks, way, options.seed, options.model)
    every = [seconds for of_signal in tally.seconds.values() for seconds in of_signal]
    found = {
        "kills": tally.kills,
        "mpi_kills": tally.kills,
        "recoveries": len(tally.replayed),
        "late": tally.late,
        "hangs": tally.hangs,
        "replayed_steps_max": max(tally.replayed, default=0),
        "k": way.k,
        "same_bits": tally.same_bits,
        "recovery_s_median": statistics.median(every) if every else None,
        "recovery_s_by_signal": {name: statistics.median(s) for name, s in tally.seconds.items() if s},
        "where": dict(tally.where),
        "model": options.model,
        "recover": options.recover,
        "spares": options.spares,
        "machine": machine(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
