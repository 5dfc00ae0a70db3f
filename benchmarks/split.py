"""What a backward in two costs: F, I and W of a stage against its F and B, by turns in one process.

    python -m benchmarks.split [--models gpt10m,gpt85m,vgg] [--bits torch,fast] [--rounds 12]

Schedules of the zero-bubble kind gain the bubbles that W fills, and lose what a backward in two takes longer.
Each model is cut in two where the slower stage is fastest. One thread computes, so CPU seconds are counted,
and whatever else runs on the machine disturbs little.

One JSON line per model and bits: `ratio` is I + W over B of both stages together, `bar` what it should be at
most; `stages` the ratio of each stage alone; `of_work` F + I + W over F + B, the median over the rounds, with
its `quartiles`. F alone takes turns, too, and gives the former from the latter. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.bars import at_most
from benchmarks.common import machine, say
from benchmarks.kernels.harness import Call, Case, Compared, compare
from benchmarks.step import pipeline
from mpipipe import Pipeline
from mpipipe.cluster.memory import uncollected
from mpipipe.graph.cut import Code
from mpipipe.graph.program import Batch
from mpipipe.planner import partition
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.weights import StageWeights
from mpipipe.values import Cluster, Link

BAR = 1.03
MODELS, BITS = "gpt10m,gpt85m,vgg", "torch,fast"
ROUNDS = 12
WHOLE, IN_TWO = False, True


class Halves:
    """Both stages of a model, and for each what it is given: `whole` and `in_two` do a micro-batch of all of
    them, or of one."""

    def __init__(self, pipe: Pipeline) -> None:
        self.variants, self.cuts = pipe.variants, cut_in_two(pipe)
        self.stages: list[Stage] = []
        self.codes: list[dict[bool, Code]] = []
        self.given: list[tuple[list[Tensor], Batch, list[Tensor]]] = []
        received: list[Tensor] = []
        for s in range(len(self.cuts) + 1):
            received = self._add(pipe, s, received)

    def _add(self, pipe: Pipeline, s: int, received: list[Tensor]) -> list[Tensor]:
        """Makes stage s; returns what it sends."""
        v = self.variants
        codes = {split: v.training_code(v.first, self.cuts, s, split) for split in (WHOLE, IN_TWO)}
        code, owner, numerics = codes[WHOLE], v.stage_of_param(self.cuts), pipe.numerics
        weights = StageWeights(v.source, v.graph, s, owner, code.leaves, v.trained, numerics.tied)
        stage = Stage(weights, numerics.precision)
        batch = pipe.data.batch("train", 0, 0, v.rows, frozenset(code.inputs))
        sent = stage.forward(code, 0, received, batch, 0, True)
        grads = [torch.full_like(t, 0.01) for t, p in zip(sent, code.sent, strict=True) if p.needs_grad]
        stage.backward(0, grads)
        self.stages.append(stage)
        self.codes.append(codes)
        self.given.append((received, batch, grads))
        return sent

    def call(self, s: int, split: bool) -> None:
        """F and B of a micro-batch on stage s, or F, I and W."""
        stage, (received, batch, grads) = self.stages[s], self.given[s]
        stage.forward(self.codes[s][split], 0, received, batch, 0, True)
        if split:
            stage.backward_input(0, grads)
            stage.backward_weight(0)
        else:
            stage.backward(0, grads)

    def forward(self, s: int) -> None:
        """F alone. What it keeps the next one of the same micro-batch replaces."""
        stage, (received, batch, _) = self.stages[s], self.given[s]
        stage.forward(self.codes[s][WHOLE], 0, received, batch, 0, True)

    def case(self, name: str, stages: Sequence[int] = (0, 1)) -> Case:
        def of(split: bool) -> Call:
            return lambda: [self.call(s, split) for s in stages]

        def floor() -> None:
            for s in stages:
                self.forward(s)

        return Case("split", name, of(WHOLE), {"split": of(IN_TWO)}, BAR, floor=floor)


def cut_in_two(pipe: Pipeline) -> tuple[str, ...]:
    """For two equal ranks with a link that takes no time."""
    devices = pipe.costs.cluster.devices * 2
    costs = pipe.costs.but(cluster=Cluster(devices, (0, 0), {"node": Link(0.0, math.inf)}))
    numerics = pipe.numerics
    found = partition(costs, numerics.micro_batches, "1f1b", 2, tied=numerics.tied)
    return tuple(pipe.variants.graph.groups[cut] for cut in found.cuts)


def of_backward(found: Compared) -> float:
    """I + W over B: `found` has F + I + W over F + B as `ratio`, over F as `at_most`."""
    assert found.at_most is not None
    return 1.0 + (found.ratio - 1.0) / (1.0 - found.ratio / found.at_most)


def line(model: str, bits: str, gemm: str, both: Compared, alone: Sequence[Compared]) -> dict[str, Any]:
    """The figures of one line."""
    return {
        "model": model, "bits": bits, "gemm": gemm, "ratio": round(of_backward(both), 4),
        **at_most(of_backward(both), BAR), "stages": [round(of_backward(found), 4) for found in alone],
        "of_work": round(both.ratio, 4), "quartiles": [round(q, 4) for q in both.quartiles],
        "whole_cpu_s": both.ours_s, "rounds": both.rounds,
    }  # fmt: skip


def measured(models: Sequence[str], sides: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """One after the other; the sides of a model have the same products."""
    for model in models:
        gemm = "auto"
        for bits in sides:
            pipe = pipeline(model, "fp32", 1, bits, gemm=gemm)
            gemm, halves = pipe.numerics.gemm, Halves(pipe)
            gc.collect()
            with uncollected():  # of garbage: steps of a run leave so little that it is not looked for
                both = compare(halves.case(f"{model}, {bits}"), rounds, time.process_time)
                alone = [compare(halves.case(f"stage {s}", [s]), rounds, time.process_time) for s in (0, 1)]
            yield line(model, bits, gemm, both, alone)
            del pipe, halves
            gc.collect()  # a pipeline refers to itself


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="a backward in two against a whole one")
    parser.add_argument("--models", default=MODELS, help="of benchmarks/step.py, with commas")
    parser.add_argument("--bits", default=BITS, help="with commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer where a model takes long")
    a = parser.parse_args(argv)
    torch.set_num_threads(1)
    for found in measured(a.models.split(","), a.bits.split(","), a.rounds):
        print(json.dumps(found | {"machine": machine()}), flush=True)
        low, high = found["quartiles"]
        of_work = f"{found['of_work']:.3f} ({low:.3f} to {high:.3f}) of the work"
        say(f"{found['model']}, {found['bits']}: {found['ratio']:.3f} of a backward, bar {BAR}; {of_work}")


if __name__ == "__main__":
    main(sys.argv[1:])
