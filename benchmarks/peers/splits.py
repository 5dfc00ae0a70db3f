"""Which hand-made splits are worth a run: the schedule of each one, played through with measured times.

    layer seconds --(every split)--> stage seconds --(order of the schedule)--> seconds of a step

Messages are free here: what they cost shows when the first few splits are run. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Split = tuple[int, ...]  # layers of each stage, in order; each has at least one


class LayerTime(NamedTuple):
    """One layer and one micro-batch."""

    fwd_s: float
    bwd_input_s: float  # the gradient of its input alone
    bwd_s: float  # of input and weights


class Action(NamedTuple):
    kind: str  # F forward, B backward, I its input gradients, W its weight gradients
    stage: int
    micro: int


Order = Sequence[Sequence[Action]]  # per rank


def splits(layers: int, stages: int) -> Iterator[Split]:
    """Every way to put `layers` in order into `stages`."""
    for bars in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *bars, layers)))


def ranked(layers: Sequence[LayerTime], stages: int, order: Order) -> list[Split]:
    """All splits, that of the shortest step first."""
    return sorted(splits(len(layers), stages), key=lambda split: step_s(layers, split, order))


def step_s(layers: Sequence[LayerTime], split: Split, order: Order) -> float:
    """Seconds of a step of this split."""
    ends = itertools.accumulate(split, initial=0)
    seconds = {}
    for stage, (start, stop) in enumerate(itertools.pairwise(ends)):
        part = layers[start:stop]
        whole, inputs = sum(t.bwd_s for t in part), sum(t.bwd_input_s for t in part)
        inputs = inputs if stage else 0.0  # the first stage has none to compute: torch does all of it in W
        times = {"F": sum(t.fwd_s for t in part), "B": whole, "I": inputs, "W": whole - inputs}
        seconds |= {(kind, stage): value for kind, value in times.items()}
    return makespan(order, seconds)


def makespan(order: Order, seconds: Mapping[tuple[str, int], float]) -> float:
    """When the last rank is done. Raises ValueError for an order that waits for itself."""
    stages = 1 + max(action.stage for actions in order for action in actions)
    done: dict[tuple[str, int, int], float] = {}
    now, at = [0.0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                arrived = _arrival(action, stages, done)
                if arrived is None:
                    break
                now[rank] = max(now[rank], arrived) + seconds[action.kind, action.stage]
                if action.kind != "W":  # nobody waits for that
                    done["F" if action.kind == "F" else "B", action.stage, action.micro] = now[rank]
                at[rank] += 1
                moved = True
    if any(i < len(actions) for i, actions in zip(at, order, strict=True)):
        raise ValueError(f"the order waits for itself at positions {at}")
    return max(now)


def _arrival(action: Action, stages: int, done: Mapping[tuple[str, int, int], float]) -> float | None:
    """When what it reads has come from another stage; None: not yet."""
    kind, stage, micro = action
    if kind == "F":
        return done.get(("F", stage - 1, micro)) if stage else 0.0
    if kind == "W":
        return 0.0  # follows its I on the same rank
    own = done.get(("F", stage, micro))
    return own if stage == stages - 1 or own is None else done.get(("B", stage + 1, micro))


def gpipe(ranks: int, micros: int) -> Order:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return [[Action(kind, r, i) for kind in "FB" for i in range(micros)] for r in range(ranks)]


def one_f_one_b(ranks: int, micros: int) -> Order:
    """Few forwards ahead, then a backward after each (Narayanan et al. 2019)."""
    order = []
    for r in range(ranks):
        ahead = min(micros, ranks - r)
        steady = [a for i in range(micros - ahead) for a in (Action("B", r, i), Action("F", r, ahead + i))]
        first = [Action("F", r, i) for i in range(ahead)]
        order.append([*first, *steady, *(Action("B", r, i) for i in range(micros - ahead, micros))])
    return order
