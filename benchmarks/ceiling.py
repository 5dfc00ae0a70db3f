"""How near a pipeline comes to what the machine can do at all: one JSON line for each model.

    python -m benchmarks.ceiling [--models gpt10m,gpt85m] [--ranks 2] [--rounds 3] [--steps 5]
                                 [--micro-batches 8] [--schedules v-planned,1f1b,...]

The ceiling: so many processes of one rank each, that know nothing of each other, train the whole model at the
same time; a step of theirs, divided by their number, is what a pipeline without any bubble, message or
imbalance would take. Then the pipeline itself, with each schedule, and the first of them also without
clipping (`no_clip`), which spares the factor alone: the ranks meet for the norm all the same; and with the
default schedule on one rank alone, on these ranks and on twice as many, which then share the cores. All do as
many micro-batches, and take turns.

The processes begin together, but nothing keeps them in step: take enough steps. to_ceiling: ceiling / step_s;
to_simulated: predicted_step_s / step_s, of what the schedule could do with its cuts. Medians
over rounds. four_to_two, of two ranks: the step of twice as many over theirs. `bars` has what is aimed at,
where there is a bar. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.bars import at_least, at_most
from benchmarks.common import machine
from benchmarks.joint import one_run
from mpipipe.planner.sizes import counted

SCHEDULES = "v-planned,zb-planned,interleaved-planned,1f1b,gpipe,interleaved,zb-h1,zb-h2,zb-v,v-half"
NEAR, FOUR_TO_TWO = 0.97, 1.10  # of the ceiling, and of what is simulated; of the step on two ranks
OF_CEILING = "v-planned"  # the schedule that is to be near it


def alone_s(model: str, ranks: int, steps: int, *settings: str) -> float:
    """A step of processes that run beside each other."""
    with ThreadPoolExecutor(ranks) as pool:
        runs = [pool.submit(one_run, model, 1, steps, *settings) for _ in range(ranks)]
        return statistics.mean(float(run.result()[0]["step_s"]) for run in runs)


def line(model: str, a: argparse.Namespace) -> dict[str, Any]:
    names = a.schedules.split(",")
    sides = {name: (a.ranks, [f"pipeline.schedule={name}"]) for name in names}
    sides["no_clip"] = a.ranks, [*sides[names[0]][1], "train.clip=null"]
    sides |= {counted(n, "rank"): (n, list[str]()) for n in (1, a.ranks, 2 * a.ranks)}
    same = f"pipeline.micro_batches={a.micro_batches}"
    alone, found = list[float](), dict[str, list[dict[str, Any]]]()
    for number in range(a.rounds):
        alone.append(alone_s(model, a.ranks, a.steps, same))
        print(f"{model} round {number + 1}: alone: {alone[-1]:.4f} s a step", file=sys.stderr)
        for side, (ranks, settings) in list(sides.items())[:: -1 if number % 2 else 1]:
            figures, _ = one_run(model, ranks, a.steps, same, *settings)
            found.setdefault(side, []).append(figures)
            print(f"{model} round {number + 1}: {side}: {figures['step_s']:.4f} s a step", file=sys.stderr)
    ceiling = statistics.median(alone) / a.ranks
    figures = {side: _against(ceiling, found[side]) for side in sides}
    return {
        "model": model, "ranks": a.ranks, "micro_batches": a.micro_batches,
        "alone_s": statistics.median(alone), "ceiling_s": ceiling,
        "sides": {side: of | {"bars": _bars(side, of)} for side, of in figures.items()},
        **_four_to_two(figures), "machine": machine(),
    }  # fmt: skip


def _against(ceiling: float, rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    step_s = statistics.median(r["step_s"] for r in rounds)
    simulated = statistics.median(r["predicted_step_s"] / r["step_s"] for r in rounds)
    return {"step_s": step_s, "to_ceiling": ceiling / step_s, "to_simulated": simulated}


def _bars(side: str, figures: Mapping[str, float]) -> dict[str, Any]:
    """By the name of the figure; of schedules alone."""
    names = ["to_simulated"] if side in SCHEDULES.split(",") else []
    names += ["to_ceiling"] if side == OF_CEILING else []
    return {name: at_least(figures[name], NEAR) for name in names}


def _four_to_two(figures: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Of ranks that share two cores, over as many ranks as cores."""
    if not {"2 ranks", "4 ranks"} <= figures.keys():
        return {}
    found = figures["4 ranks"]["step_s"] / figures["2 ranks"]["step_s"]
    return {"four_to_two": {"ratio": found, **at_most(found, FOUR_TO_TWO)}}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="a pipeline against what the machine can do at all")
    parser.add_argument("--models", default="gpt10m", help="names in examples/, with commas")
    parser.add_argument("--schedules", default=SCHEDULES, help="with commas; the first also without clipping")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of a run, the first is not counted")
    a = parser.parse_args(argv)
    for model in a.models.split(","):
        print(json.dumps(line(model, a)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
