"""mpipipe against every stock way to train the same model, model by model: one JSON line each.

    python -m benchmarks.bench [--models gpt10m,gpt85m,vgg] [--sides 1f1b,ddp] [--rounds 3] [--steps 5]

Ours is the real command line, read from its run folder. Each peer (`benchmarks/peers/`) gets its best
setting first: the split of a pipeline, the micro-batch of the others. Then the sides take turns, each run
in fresh processes; a side's figure is the median over its rounds. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.budget import OTHER, SIZES, SLOW, Size, estimate_s
from benchmarks.case import Case
from benchmarks.common import machine
from benchmarks.peers import SCHEDULES, SIDES
from benchmarks.results import OURS, VARIANTS, Run, said_of_bars, summary
from mpipipe.cluster.routes import fastest
from mpipipe.runtime.routes import measure_routes


def compare(case: Case, size: Size, sides: Sequence[str], limit_s: float) -> dict[str, Any]:
    """One model. No round begins that would not end within the limit, but for the first."""
    start = time.monotonic()
    prepared = case.prepare()
    choices, searched = settings_of(case, size, sides, prepared)
    runs: dict[str, dict[int, Run]] = {name: {} for name in (OURS, *VARIANTS, *sides)}
    longest = 0.0
    for i in range(size.rounds):
        if i and time.monotonic() - start + longest > limit_s:
            say(f"{case.model}: no time for round {i + 1}")
            break
        began = time.monotonic()
        turn(case, i, size.steps, choices, runs)
        longest = max(longest, time.monotonic() - began)
    settings = {"steps": size.steps, "rounds": len(runs[OURS]), "ranks": case.ranks, "threads": 1}
    return {
        "model": case.model,
        "parameters": prepared["parameters"],
        **summary(runs, case.model),
        "searched": searched,
        "settings": settings | {"gemm": case.gemm, "arguments": sys.argv[1:]},
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "took_s": round(time.monotonic() - start),
    }


def settings_of(
    case: Case, size: Size, sides: Sequence[str], prepared: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """The best setting of each peer, and what each one that was tried took."""
    chosen, tried = dict[str, str](), dict[str, Any]()
    for side in sides:
        if side == "compile":  # compiled for one only: as without the compiler
            chosen[side] = chosen.get("one_process", "micro")
            continue
        options = ["micro", "whole"]
        if side in SCHEDULES:
            options = [",".join(map(str, split)) for split in prepared["splits"][side][: size.candidates]]
        chosen[side] = options[0]
        if len(options) > 1:
            found = {option: case.peer(side, option, size.search_steps) for option in options}
            tried[side] = {option: run.get("step_s", run.get("failed")) for option, run in found.items()}
            chosen[side] = min(found, key=lambda option: found[option].get("step_s", float("inf")))
            say(f"{case.model} {side}: seconds per step {tried[side]}")
    return chosen, tried


def turn(case: Case, i: int, steps: int, choices: dict[str, str], runs: dict[str, dict[int, Run]]) -> None:
    """Round i of all sides that still compete; every other round goes backwards."""
    ours = {OURS: ()} | {name: keys for name, (_, keys) in VARIANTS.items()}
    names = [*ours, *(side for side in choices if competes(side, runs))]
    for name in names if i % 2 == 0 else reversed(names):
        load = os.getloadavg()[0]
        run = case.ours(steps, ours[name]) if name in ours else case.peer(name, choices[name], steps)
        runs[name][i] = run
        said = f"{run['step_s']:.3f} s" if "step_s" in run else f"failed: {run['failed']}"
        say(f"{case.model} round {i + 1} {name}: {said} (load before: {load:.1f})")


def competes(side: str, runs: dict[str, dict[int, Run]]) -> bool:
    """Whether it is near the best peer of the first round."""
    peers = {name: rounds for name, rounds in runs.items() if name not in (OURS, *VARIANTS)}
    first = {name: rounds[0].get("step_s") for name, rounds in peers.items() if rounds}
    if side not in first:
        return True
    seconds = [s for s in first.values() if s is not None]
    return first[side] is not None and first[side] <= SLOW * min(seconds)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sizes(a: argparse.Namespace) -> dict[str, Size]:
    """What is run of each model: the defaults with what was given."""
    given = {key: getattr(a, key) for key in ("rounds", "steps", "candidates") if getattr(a, key)}
    return {m: dataclasses.replace(SIZES.get(m, OTHER), **given) for m in a.models.split(",")}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="mpipipe against every stock way to train the same model")
    parser.add_argument("--models", default=",".join(SIZES), help="names in examples/, with commas")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"peers, with commas: {', '.join(SIDES)}")
    parser.add_argument("--rounds", type=int, help="runs of each side; default: by the model")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run; the first is not counted")
    parser.add_argument("--candidates", type=int, help="splits of each schedule that are run")
    parser.add_argument("--minutes", type=float, default=45.0, help="no round beyond the first after that")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a run of a peer")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--gemm",
        choices=("auto", "mkl", "onednn"),
        default="auto",
        help="for all sides; auto: the faster one",
    )
    a = parser.parse_args(argv)
    sides = [side for side in a.sides.split(",") if side]
    if unknown := set(sides) - set(SIDES):
        parser.error(f"--sides: no peer is called {', '.join(sorted(unknown))}; known are {', '.join(SIDES)}")
    torch.set_num_threads(1)  # as the runs
    gemm = fastest(measure_routes()) if a.gemm == "auto" else a.gemm
    needs = {m: estimate_s(size, sides) for m, size in sizes(a).items()}
    say(f"about {sum(needs.values()) / 60:.0f} minutes: { {m: round(s / 60) for m, s in needs.items()} }")
    for model, size in sizes(a).items():
        with tempfile.TemporaryDirectory() as folder:
            case = Case(model, a.ranks, gemm, Path(folder), a.timeout)
            limit_s = a.minutes * 60 * needs[model] / sum(needs.values())
            found = compare(case, size, sides, limit_s)
            print(json.dumps(found), flush=True)
            for text in said_of_bars(found):
                say(f"{model} {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
