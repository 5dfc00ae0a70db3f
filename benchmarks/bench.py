"""mpipipe against every stock way to train the same model, model by model: one JSON line each.

    python -m benchmarks.bench [--models gpt10m,gpt85m,vgg] [--sides 1f1b,ddp] [--turns 10] [--steps 3]
                               [--ceiling] [--ours key=value]

Ours is the real command line, read from its run folder. Each peer (`benchmarks/peers/`) gets its best
setting first: the split of a pipeline, the micro-batch of the others. Then each side runs alone, which is
round 0. Those near the best live side by side and take turns, step by step (`benchmarks/turns.py`); each
turn is a round. A side's figure is the median over its rounds. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.budget import OTHER, SIZES, SLOW, Size, ahead, estimate_s
from benchmarks.case import Case
from benchmarks.common import TIMEOUT_S, machine, say, seconds_text
from benchmarks.peers import ALONE, SCHEDULES, SIDES
from benchmarks.results import CEILINGS, OURS, ROWS, VARIANTS, Run, said_of_bars, summary
from benchmarks.turns import Side, in_both_orders
from mpipipe.cluster.node import memory_available_bytes
from mpipipe.cluster.routes import fastest
from mpipipe.runtime.routes import measure_routes

LEAST_TURNS = 2  # fewer say nothing
OF_CEILINGS = {ceiling: side for side, ceiling in CEILINGS.items()}
BASE_BYTES = 300 << 20  # of a process below its peak: what imports take, but for libraries, which are shared


def compare(
    case: Case, size: Size, sides: Sequence[str], limit_s: float, ceiling: bool = False
) -> dict[str, Any]:
    """One model. Turns are as many as end within the limit. ceiling: with the sides of `CEILINGS`, too."""
    start = time.monotonic()
    prepared = case.prepare()
    choices, searched = settings_of(case, size, sides, prepared)
    runs: dict[str, dict[int, Run]] = {}
    began = time.monotonic()
    for name in (OURS, *VARIANTS, *sides):
        runs[name] = {0: alone(case, name, choices, size.steps)}
    start_s = max(0.0, (time.monotonic() - began) / len(runs) - size.steps * mean_step_s(runs))
    groups = groups_of(runs, memory_available_bytes(os.environ), ceiling)
    each_s = {name: turn_s(runs, name, case.ranks) for names in groups for name in names}
    turns_s = sum(each_s[name] for names in groups for name in names)
    ahead_s = sum(start_s + ahead(name) * each_s[name] for names in groups for name in names)
    left_s = limit_s - (time.monotonic() - start) - 2 * ahead_s
    turns = min(size.turns, int(left_s / turns_s)) if groups else 0
    if turns < LEAST_TURNS:
        lacks = math.ceil((LEAST_TURNS * turns_s - left_s) / 60)
        why = f"they need {lacks} more of --minutes" if groups else "no peer has run"
        say(f"{case.model}: no turns; {why}")
        turns, groups = 0, []
    for i, names in enumerate(groups):
        by_turns(case, names, choices, turns, 1 + i * turns, runs)
    settings = {"steps": size.steps, "turns": turns, "ranks": case.ranks, "threads": 1}
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
    """The best setting of each peer, and what each one that was tried took, as by turns."""
    chosen, tried = dict[str, str](), dict[str, Any]()
    case = replace(case, keeps=True)
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


def run_of(case: Case, name: str, choices: dict[str, str], steps: int) -> Run:
    ours = {OURS: ()} | {name: keys for name, (_, keys) in VARIANTS.items()}
    if name in OF_CEILINGS:
        return case.apart(steps, ours[OF_CEILINGS[name]])
    return case.ours(steps, ours[name]) if name in ours else case.peer(name, choices[name], steps)


def alone(case: Case, name: str, choices: dict[str, str], steps: int) -> Run:
    load = os.getloadavg()[0]
    run = run_of(case, name, choices, steps)
    said = f"{run['step_s']:.3f} s" if "step_s" in run else f"failed: {run['failed']}"
    say(f"{case.model} {name}: {said} (load before: {load:.1f})")
    return run


def by_turns(
    case: Case, names: Sequence[str], choices: dict[str, str], turns: int, first: int,
    runs: dict[str, dict[int, Run]],
) -> None:  # fmt: skip
    """Each turn is a round, from round `first` on. A side counts where it comes to its end in both orders, a
    peer with the memory that it needs alone, where glibc gives back what is freed."""

    def side(name: str) -> Side[Run]:
        def run(gate: str, steps: int) -> Run:
            return run_of(replace(case, gate=gate, keeps=True, timeout_s=TIMEOUT_S), name, choices, steps)

        return Side(1 if name in ALONE else case.ranks, run, ahead(name))

    found = in_both_orders([side(name) for name in names], turns)
    for name, (there, back) in zip(names, found, strict=True):
        if failed := there.get("failed") or back.get("failed"):
            say(f"{case.model} {name}: by turns failed: {failed}")
            continue
        rounds = runs.setdefault(name, {})
        memory = {"peak_bytes": rounds[0]["peak_bytes"]} if name in SIDES else {}
        each = [(run, step_s) for run in (there, back) for step_s in run["steps_s"][ahead(name) :]]
        rounds |= {first + i: run | memory | {"step_s": step_s} for i, (run, step_s) in enumerate(each)}
        say(f"{case.model} {name}: by turns {seconds_text([step_s for _, step_s in each])}")


def groups_of(runs: dict[str, dict[int, Run]], most_bytes: int, ceiling: bool = False) -> list[list[str]]:
    """Peers that are near the best one, so many at a time as find room beside ours, the best ones first.
    ceiling: beside the sides of `CEILINGS`, too."""

    def needs(name: str) -> int:
        peaks: list[int] = runs[OF_CEILINGS.get(name, name)][0]["peak_bytes"]
        ranks = len(peaks)
        return sum(peaks) * (ranks if name in OF_CEILINGS else 1) + ranks * BASE_BYTES

    ours = [*ROWS.values(), *(CEILINGS.values() if ceiling else ())]
    step_s = {name: rounds[0]["step_s"] for name, rounds in runs.items() if "step_s" in rounds[0]}
    peers = sorted(step_s.keys() - {OURS, *VARIANTS}, key=lambda name: step_s[name])
    near = [name for name in peers if step_s[name] <= SLOW * step_s[peers[0]]]
    left = most_bytes - sum(map(needs, ours))
    groups: list[list[str]] = []
    for name in near:
        for group in groups:
            if sum(map(needs, [*group, name])) <= left:
                group.append(name)
                break
        else:
            groups.append([name])
    return [[*ours, *group] for group in groups]


def turn_s(runs: dict[str, dict[int, Run]], name: str, ranks: int) -> float:
    """Of a side of `CEILINGS` as a guess: each of its processes does the whole step."""
    return ranks * runs[OF_CEILINGS[name]][0]["step_s"] if name in OF_CEILINGS else runs[name][0]["step_s"]


def mean_step_s(runs: dict[str, dict[int, Run]]) -> float:
    return statistics.mean(run.get("step_s", 0.0) for rounds in runs.values() for run in rounds.values())


def sizes(a: argparse.Namespace) -> dict[str, Size]:
    """What is run of each model: the defaults with what was given."""
    given = {key: getattr(a, key) for key in ("turns", "steps", "candidates") if getattr(a, key) is not None}
    return {m: replace(SIZES.get(m, OTHER), **given) for m in a.models.split(",")}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="mpipipe against every stock way to train the same model")
    parser.add_argument("--models", default=",".join(SIZES), help="names in examples/, with commas")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"peers, with commas: {', '.join(SIDES)}")
    parser.add_argument("--turns", type=int, help="steps of each side by turns; default: by the model")
    parser.add_argument("--steps", type=int, help="of a run alone; the first is not counted")
    parser.add_argument("--candidates", type=int, help="splits of each schedule that are run")
    parser.add_argument(
        "--ceiling", action="store_true", help="by turns also with processes that know nothing of each other"
    )
    parser.add_argument("--minutes", type=float, default=45.0, help="so many turns as end within that")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a run alone")
    parser.add_argument(
        "--ours", action="append", default=[], metavar="key=value", help="for all sides of ours, as for train"
    )
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
            case = Case(model, a.ranks, gemm, Path(folder), a.timeout, of_ours=tuple(a.ours))
            limit_s = a.minutes * 60 * needs[model] / sum(needs.values())
            found = compare(case, size, sides, limit_s, a.ceiling)
            print(json.dumps(found), flush=True)
            for text in said_of_bars(found):
                say(f"{model} {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
