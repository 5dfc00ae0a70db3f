"""Whole optimizer steps of one rank: `bits: fast` against `bits: torch`, products by the route that is set.

The floor is the products of a step by torch: forward, input gradients and weight gradients of each layer.
Attention has an operator of its own, and so is none of them. bf16 only where the processor has units for it:
elsewhere torch's products take so long (40 times as long as in fp32, with AVX2) that nothing else shows.
Where the route that is set is not that of torch as it comes, torch takes turns in both.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.harness import Case, Skipped
from benchmarks.kernels.limits import route
from benchmarks.step import Steps
from mpipipe.cluster.node import bf16_units

MODELS = ("gpt10m", "gpt85m")
BARS = {"fp32": 1.15, "bf16": 1.2}


NO_UNITS = "this processor has no units for bf16"


def cases() -> Iterator[Case | Skipped]:
    """One after the other: a model is there from the start of its case to that of the next."""
    for model in MODELS:
        for precision, bar in BARS.items():
            if precision == "fp32" or bf16_units():
                yield Steps(model, precision, route()).case(bar)
            else:
                yield Skipped("whole_step", f"{model}, {precision}", bar, NO_UNITS)
