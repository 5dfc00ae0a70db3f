"""A zero-bubble schedule for real costs and a memory limit (Qi et al. 2023, section 3.1).

One stage per rank. The hand-made ones are right where F, I and W take equally long. Here the number of
forwards ahead follows from the times: a stage works until its first gradient is back, as far as its memory
goes, then takes turns of I and F, and W fills in (`filled`). Where a wait is shorter than a W it is not plain
what is better: each of `GAPS` is tried, with forwards ahead rounded down, up, and as in zb-h1, zb-h2. The
shortest of these, and of zb-h1 and zb-h2 where they fit, is the answer; that none is shorter is not claimed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from mpipipe.errors import PlanError
from mpipipe.planner.schedules.fill import Work, filled_in, seconds
from mpipipe.planner.schedules.orders import live_stages
from mpipipe.planner.schedules.zero_bubble import zb_h1, zb_h2
from mpipipe.planner.sizes import size_text
from mpipipe.values import Action, Op, Schedule, StageCost

GAPS = (0.0, 0.5, 1.0)  # of a W; a wait that is shorter is left empty


def zb_planned(
    stages: Sequence[StageCost],
    n_micro: int,
    memory_bytes: Sequence[int],
    act_s: Sequence[float] = (),
    grad_s: Sequence[float] = (),
    receive_window: int = 4,
) -> Schedule:
    """Stage s on rank s, for costs of each stage.

    memory_bytes: of each rank, for all that `StageCost` counts and the receive buffers. act_s, grad_s:
    seconds of one message from each stage to the next one, and to the one before; () = nothing. Raises
    PlanError where a rank cannot hold one micro-batch.
    """
    n_stages = len(stages)
    none = (0.0,) * n_stages
    work = Work(
        tuple(s.fwd_s for s in stages), tuple(s.bwd_input_s for s in stages),
        tuple(s.bwd_weight_s + s.split_s for s in stages), tuple(act_s) or none, tuple(grad_s) or none,
    )  # fmt: skip
    room = [min(n_micro, _room(rank, stages, memory_bytes[rank], receive_window)) for rank in range(n_stages)]
    tried = [
        filled_in(range(n_stages), n_micro, _skeleton(ahead, n_micro), room, work, gap)
        for ahead, gap in itertools.product(dict.fromkeys(_forwards_ahead(work, room)), GAPS)
    ]
    for made in (zb_h1(n_stages, n_micro), zb_h2(n_stages, n_micro)):
        if all(live <= most for live, most in zip(live_stages(made), room, strict=True)):
            tried.append((made, seconds(made, work)))
    return min(tried, key=lambda found: (found[1], sum(live_stages(found[0]))))[0]


def zb_planned_even(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """While no costs are known: F, I and W of all stages take equally long, messages nothing, and there is
    memory for as many stashes as zb-h1 keeps. Raises PlanError for several stages per rank."""
    if n_ranks not in (None, n_stages):
        raise PlanError(
            f"schedule 'zb-planned' has one stage per rank, not {n_stages} on {n_ranks}; choose zb-v"
        )
    even = StageCost(1.0, 1.0, 1.0, 0.0, 0, 1, 0, 0, 0)
    return zb_planned([even] * n_stages, n_micro, [n_stages] * n_stages)


def _room(rank: int, stages: Sequence[StageCost], memory_bytes: int, window: int) -> int:
    """Stashes that fit; each may have to hold what waits for its W, with the gradient that it was given. What
    is made again of one is there once."""
    stage, act = stages[rank], stages[rank - 1].act_bytes if rank else 0
    grad = stages[rank + 1].grad_bytes if rank + 1 < len(stages) else 0
    waiting = stage.waiting_bytes + max(0, act - stage.waiting_received_bytes)  # its receive buffer, as well
    each = max(stage.stash_bytes, waiting) + grad
    messages = window * (act + grad) + max(stage.act_bytes, stage.grad_bytes)
    in_between = max(0, stage.in_two_bytes - stage.at_work_bytes)
    once = stage.workspace_bytes + stage.remade_bytes + messages + in_between
    left = memory_bytes - stage.fixed_bytes - once
    if left < each:
        least = memory_bytes - left + each
        raise PlanError(
            f"rank {rank} has {size_text(memory_bytes)}, and needs {size_text(least)} for one micro-batch; "
            "use smaller micro-batches, or more ranks"
        )
    return left // each if each else 2 * len(stages)


def _forwards_ahead(work: Work, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """By rank, forwards before the first I; never more than on the rank before, which could not go on."""
    n = len(room)
    idle = [max(1.0, wait) for wait in _until_gradient(work)]
    for wished in (
        [n - s for s in range(n)],
        [2 * (n - s) - 1 for s in range(n)],
        [math.floor(x + 1e-9) for x in idle],
        [math.ceil(x - 1e-9) for x in idle],
    ):
        later = [max(wished[s:]) for s in range(n)]
        yield tuple(itertools.accumulate(map(min, later, room), min))


def _until_gradient(work: Work) -> Iterator[float]:
    """Forwards that a rank has time for until the first gradient is there."""
    n = len(work.fwd_s)
    for s, fwd_s in enumerate(work.fwd_s):
        there_s = sum(work.fwd_s[s:]) + sum(work.act_s[s : n - 1])
        back_s = sum(work.bwd_input_s[s + 1 :]) + sum(work.grad_s[s + 1 :])
        yield (there_s + back_s) / fwd_s if fwd_s else 1.0


def _skeleton(ahead: Sequence[int], n_micro: int) -> list[list[Action]]:
    """F and I of each rank."""
    ranks = []
    for stage, first in enumerate(ahead):
        actions = [Action(Op.F, stage, micro) for micro in range(min(first, n_micro))]
        for micro in range(n_micro):
            actions.append(Action(Op.I, stage, micro))
            actions += [Action(Op.F, stage, first + micro)] * (first + micro < n_micro)
        ranks.append(actions)
    return ranks
