"""How much of each model is run, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers import SCHEDULES
from benchmarks.results import ROWS, VARIANTS

START_S, COMPILE_S = 5.0, 60.0  # of a run before its first step; of the compiler, whose cache is then filled
SLOW = 1.2  # a peer that is this much slower than the best one when alone gets no turns
SETTLED = 9  # first steps of ours, that are not counted: within them it plans anew from what they took
WARM = 3  # of all others, whose second step is still up to a fifth longer
CONTENDERS = 3  # of the peers, as a guess: those that are


@dataclass(frozen=True)
class Size:
    turns: int  # steps of each side by turns, at most
    steps: int  # optimizer steps of a run alone; the first is not counted
    search_steps: int  # of each run that finds a peer's best setting; the second may be slow, too
    candidates: int  # splits of a schedule that are run; 1: the best by the layers' times, without a run
    step_s: float  # a step on two cores at about 100 GF/s each; for the estimate alone


SIZES = {
    "gpt10m": Size(turns=10, steps=3, search_steps=3, candidates=2, step_s=2.4),
    "gpt85m": Size(turns=4, steps=2, search_steps=4, candidates=1, step_s=9.0),
    "vgg": Size(turns=8, steps=3, search_steps=3, candidates=2, step_s=2.8),
}
OTHER = Size(turns=12, steps=3, search_steps=3, candidates=2, step_s=3.0)  # any other example


def estimate_s(size: Size, sides: Sequence[str]) -> float:
    """Seconds for a model with these peers."""
    schedules = len(set(sides) & set(SCHEDULES))
    choosing = len(set(sides) & {"ddp", "one_process"})  # each of two sizes of micro-batches
    searched = 2 * choosing + (schedules * size.candidates if size.candidates > 1 else 0)
    ours = 1 + len(VARIANTS)
    peers = min(len(sides), CONTENDERS)
    prepare_s = START_S + 3 * size.step_s  # each layer eight times for one micro-batch, and the updates
    search_s = searched * (START_S + size.search_steps * size.step_s)
    alone_s = (ours + len(sides)) * (START_S + size.steps * size.step_s)
    starts_s = 2 * (len(ROWS) + peers) * START_S  # each is started in both orders
    steps = 2 * (len(ROWS) * SETTLED + peers * WARM) + (len(ROWS) + peers) * size.turns
    turns_s = starts_s + steps * size.step_s
    return prepare_s + search_s + alone_s + turns_s + COMPILE_S * ("compile" in sides)


def ahead(name: str) -> int:
    """Steps of a side before its turns, in each of its two runs."""
    return SETTLED if name in ROWS.values() else WARM
