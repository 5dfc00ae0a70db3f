"""What checkpoints and mirrors cost the training, and how fast a checkpoint is verified: one JSON line.

    python -m benchmarks.checkpoint [--model gpt85m] [--ranks 2] [--saves 3] [--folder /scratch]

step_s       median step with no save under way
saving       the step that saves over `step_s`, median: names are exchanged, the state is copied
writing      a step in which the ranks still write over `step_s`, median: they hash and write beside it
waiting      a save that training waits for over `step_s`
mirror       what two steps take longer in which a mirror is copied, sent and committed, over `step_s`
mirror_every steps from one mirror to the next, as a plan chooses them; mirror_share: of a step, so often
verify_ratio bytes/s of `checkpoint verify` over those of reading the same files, neither of them in the page
             cache (as far as the system drops them from it)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import launch, machine

STEPS = 6  # from one save to the next
PIECE_BYTES = 8 << 20


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="what a checkpoint costs the training, and verifying one")
    parser.add_argument("--model", default="gpt85m", help="of benchmarks/step.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", help="where checkpoints are written; default: that of temporary files")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # what each rank is started with
    a = parser.parse_args(argv)
    if a.rank:
        return train(a.model, a.saves, a.rank)
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        again = "-m", "benchmarks.checkpoint", "--model", a.model, "--saves", str(a.saves), "--rank", folder
        text = launch(a.ranks, *again)
        found: dict[str, Any] = json.loads(text.strip().splitlines()[-1]) | verified(Path(folder) / "waited")
    print(json.dumps({"model": a.model, "ranks": a.ranks, **found, "machine": machine()}))


def train(model: str, saves: int, folder: Path) -> None:
    """The steps of one rank; rank 0 prints what they took."""
    from benchmarks.step import pipeline  # torch
    from mpipipe.graph.program import spec
    from mpipipe.planner.mirrors import with_mirrors
    from mpipipe.state.mirrors import Mirrors
    from mpipipe.state.snapshot import needed_bytes

    pipe = pipeline(model, "fp32", 1, "torch")
    state = pipe.trainer.tensors()
    pipe.saver.reserve(needed_bytes({name: spec(t) for name, t in state.items()}))

    def turn(then: Callable[[], object]) -> float:
        start = time.perf_counter()
        pipe.step()
        then()
        return time.perf_counter() - start

    alone, saving, writing, waiting = [], [], [], []
    turn(lambda: None)
    for i in range(saves):
        alone += [turn(lambda: None) for _ in range(STEPS)]
        saving.append(turn(lambda i=i: pipe.begin_save(folder / f"{i}")))  # type: ignore[misc]
        while pipe.saver.under_way:
            writing.append(turn(lambda: None))
    start = time.perf_counter()
    pipe.save(folder / "waited")
    waiting.append(time.perf_counter() - start)
    step_s = float(np.median(alone))
    ratios = {"saving": saving, "writing": writing, "waiting": waiting}
    figures = {name: round(float(np.median(seconds)) / step_s, 3) for name, seconds in ratios.items()}
    mirrors, mirroring = Mirrors(pipe.comm, 1), list[float]()
    for i in range(saves + 1):

        def take(i: int = i) -> None:
            mirrors.take(i, pipe.trainer.tensors(), pipe.trainer.optimizer_numbers())

        mirroring.append((turn(take) + turn(mirrors.commit)) / step_s - 2.0)
    every = with_mirrors(pipe.plan, pipe.costs, "auto")[0].layout.mirror_every
    mirror = float(np.median(mirroring[1:]))  # the first one takes the memory
    figures |= {
        "mirror": round(mirror, 3),
        "mirror_every": every,
        "mirror_share": round(mirror / every, 5) if every else 0.0,
    }
    if pipe.rank == 0:
        print(json.dumps({"step_s": round(step_s, 4), **figures, "writing_steps": len(writing) / saves}))


def verified(folder: Path) -> dict[str, Any]:
    from mpipipe.state.resume import read_state
    from mpipipe.state.verify import flaw

    files = read_state(folder).files
    paths = [folder / name for name in files]
    nbytes = sum(path.stat().st_size for path in paths)
    threads = len(os.sched_getaffinity(0))

    def rate(work: Callable[[], object]) -> float:
        for path in paths:
            forget(path)
        start = time.perf_counter()
        work()
        return nbytes / (time.perf_counter() - start)

    rounds = [
        (rate(lambda: [read(p) for p in paths]), rate(lambda: flaw(folder, files, threads))) for _ in range(3)
    ]
    disk, verify = (float(np.median(rates)) for rates in zip(*rounds, strict=True))
    return {
        "checkpoint_bytes": nbytes,
        "disk_bytes_per_s": round(disk),
        "verify_bytes_per_s": round(verify),
        "verify_ratio": round(verify / disk, 3),
    }


def forget(path: Path) -> None:
    """Drops a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> None:
    buffer = bytearray(PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
