"""How near a pipeline comes to what the machine can do at all: one JSON line for each model.

    python -m benchmarks.ceiling [--models gpt10m,gpt85m] [--ranks 2] [--steps 6]
                                 [--micro-batches 8] [--schedules v-planned,1f1b,...]

The ceiling: so many processes of one rank each, that know nothing of each other, train the whole model at the
same time; a step of theirs, divided by their number, is what a pipeline without any bubble, message or
imbalance would take. Then the pipeline itself, with each schedule, and the first of them also without
clipping (`no_clip`), which spares the factor alone: the ranks meet for the norm all the same; and with the
default schedule on these ranks, on twice as many, which then share the cores, and on one alone. All do as
many micro-batches.

A few at a time live side by side and take turns, step by step, with the processes of the ceiling among them,
which begin each step together; after half of the turns all are started anew, in the opposite order.
to_ceiling: ceiling / step_s of the same turn; to_simulated: predicted_step_s / step_s, of what the schedule
could do with its cuts. Medians over turns; before them each side takes one step alone.
four_to_two, of two ranks: the step of twice as many over theirs. `bars` has what is aimed at, where there is
a bar. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bars import at_least, at_most
from benchmarks.common import machine, say, seconds_text
from benchmarks.joint import one_run
from benchmarks.turns import Side, apart, in_both_orders
from mpipipe.planner.sizes import counted

SCHEDULES = "v-planned,zb-planned,interleaved-planned,1f1b,gpipe,interleaved,zb-h1,zb-h2,zb-v,v-half"
NEAR, FOUR_TO_TWO = 0.97, 1.10  # of the ceiling, and of what is simulated; of the step on two ranks
AHEAD = 1  # steps of a run before its turns
AT_ONCE = 5  # sides that live beside the processes of the ceiling
OF_CEILING = "v-planned", "no_clip"  # what is to be near it: a schedule, and it without clipping


def line(model: str, a: argparse.Namespace) -> dict[str, Any]:
    names = a.schedules.split(",")
    sides = {name: (a.ranks, [f"pipeline.schedule={name}"]) for name in names}
    sides["no_clip"] = a.ranks, [*sides[names[0]][1], "train.clip=null"]
    sides |= {counted(n, "rank"): (n, list[str]()) for n in (a.ranks, 2 * a.ranks, 1)}
    figures, ceilings = dict[str, dict[str, float]](), list[float]()
    for i in range(0, len(sides), AT_ONCE):
        group = dict(list(sides.items())[i : i + AT_ONCE])
        found, ceiling_s = by_turns(model, group, a)
        figures |= found
        ceilings += ceiling_s
    return {
        "model": model, "ranks": a.ranks, "micro_batches": a.micro_batches,
        "ceiling_s": statistics.median(ceilings),
        "sides": {side: figures[side] | {"bars": _bars(side, figures[side])} for side in sides},
        **_four_to_two(figures), "machine": machine(),
    }  # fmt: skip


def by_turns(
    model: str, sides: Mapping[str, tuple[int, Sequence[str]]], a: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], list[float]]:
    """Figures of each side, and the ceiling at each step."""
    same = f"pipeline.micro_batches={a.micro_batches}"

    def side(ranks: int, settings: Sequence[str]) -> Side[dict[str, Any]]:
        def run(gate: str, steps: int) -> dict[str, Any]:
            return one_run(model, ranks, steps, same, *settings, gate=gate)[0]

        return Side(ranks, run, AHEAD)

    def ceiling(gate: str, steps: int) -> dict[str, Any]:
        return apart(a.ranks, lambda: one_run(model, 1, steps, same, gate=gate)[0])[0]

    every = [Side(a.ranks, ceiling, AHEAD)]
    every += [side(ranks, settings) for ranks, settings in sides.values()]
    beside, *found = in_both_orders(every, a.steps)
    ceiling_s = _steps_s(beside)
    for name, runs in zip(("alone", *sides), (beside, *found), strict=True):
        say(f"{model} {name}: {seconds_text(_steps_s(runs))} s a step")
    return {name: _against(ceiling_s, runs) for name, runs in zip(sides, found, strict=True)}, ceiling_s


def _steps_s(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """By turns."""
    return [step_s for run in runs for step_s in run["steps_s"][AHEAD:]]


def _against(ceiling_s: Sequence[float], runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """ceiling_s: of the same turns."""
    steps_s = _steps_s(runs)
    simulated = [run["predicted_step_s"] / step_s for run in runs for step_s in _steps_s([run])]
    return {
        "step_s": statistics.median(steps_s),
        "to_ceiling": statistics.median(c / s for c, s in zip(ceiling_s, steps_s, strict=True)),
        "to_simulated": statistics.median(simulated),
    }


def _bars(side: str, figures: Mapping[str, float]) -> dict[str, Any]:
    """By the name of the figure; of schedules alone."""
    names = ["to_simulated"] if side in SCHEDULES.split(",") else []
    names += ["to_ceiling"] if side in OF_CEILING else []
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
    parser.add_argument("--steps", type=int, default=6, help="of each side by turns")
    a = parser.parse_args(argv)
    for model in a.models.split(","):
        print(json.dumps(line(model, a)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
