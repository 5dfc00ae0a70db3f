"""Two stages per rank in a V: rank r has stage r and stage 2p-1-r, so the last stage is where the first is.
The gradient comes back to a rank that has done little else, and memory is the same on all ranks.

    zb-v     Qi et al. 2023, section 6: the memory of 1F1B, and no rank waits
    v-half   Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": about half of that memory

where F, I and W take equally long. Both are an order of F and I; W is written in by `filled`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from mpipipe.planner.schedules.fill import filled, units
from mpipipe.planner.schedules.orders import two_each, v_shaped
from mpipipe.values import Action, Op, Schedule

_PERIOD = 6  # units of one micro-batch on a rank: F, I and W of two stages


def zb_v(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """Each rank keeps 2p stashes of half a rank's layers: those of p micro-batches."""
    ranks = two_each("zb-v", n_stages, n_ranks)
    skeleton = [list(_zb_v_rank(rank, ranks, n_micro)) for rank in range(ranks)]
    return filled(v_shaped(ranks), n_micro, skeleton, [2 * ranks] * ranks, units(n_stages))


def _zb_v_rank(rank: int, n_ranks: int, n_micro: int) -> Iterator[Action]:
    """What comes first fills the rank until the first micro-batch is back from the others: down alone, then
    up and down, then up and its gradient at once. From there turns of all four, as long as there are any."""
    down, up = rank, 2 * n_ranks - 1 - rank
    left = {(kind, stage): iter(range(n_micro)) for kind in (Op.F, Op.I) for stage in (down, up)}
    steady = [(Op.F, down), (Op.I, down), (Op.F, up), (Op.I, up)]
    plan = itertools.chain(
        [(Op.F, down)] * (2 * (n_ranks - rank) - 1),
        [(Op.F, up), (Op.F, down)] * rank,
        [(Op.F, up), (Op.I, up)] * (n_ranks - rank),
        steady * n_micro,
    )
    for kind, stage in plan:
        for micro in itertools.islice(left[kind, stage], 1):
            yield Action(kind, stage, micro)


def v_half(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """Each rank keeps p + 2 stashes of half a rank's layers (p + 1 where p is odd): those of p / 2 + 1
    micro-batches.

    One micro-batch goes down the ranks two units apart and up again one unit apart, its gradient likewise;
    each following one is six units later. The turns at both ends are put off until no rank has two things to
    do in one unit, whichever micro-batches they belong to.
    """
    ranks = two_each("v-half", n_stages, n_ranks)
    times = _without_clashes(ranks)
    skeleton = [[action for _, action in sorted(_block(times, rank, n_micro))] for rank in range(ranks)]
    room = ranks + 2 - ranks % 2
    return filled(v_shaped(ranks), n_micro, skeleton, [room] * ranks, units(n_stages))


Times = list[tuple[int, int, int, int]]  # by rank: F down, F up, I of the upper stage, I of the lower one


def _without_clashes(n_ranks: int) -> Times:
    """When the first micro-batch is where."""
    down, up = range(n_ranks), range(n_ranks - 1, -1, -1)
    for waits in sorted(itertools.product(range(_PERIOD), repeat=3), key=sum):
        turn_f = 2 * (n_ranks - 1) + 1 + waits[0]
        turn_loss = turn_f + n_ranks + waits[1]
        turn_i = turn_loss + 2 * (n_ranks - 1) + 1 + waits[2]
        times = [(2 * d, turn_f + u, turn_loss + 2 * d, turn_i + u) for d, u in zip(down, up, strict=True)]
        if all(len({t % _PERIOD for t in each}) == len(each) for each in times):
            return times
    raise AssertionError("the turns can always be put off: see tests/planner/test_schedules.py")


def _block(times: Times, rank: int, n_micro: int) -> Iterator[tuple[int, Action]]:
    down, up = rank, 2 * len(times) - 1 - rank
    kinds = ((Op.F, down), (Op.F, up), (Op.I, up), (Op.I, down))
    for micro, (time, (kind, stage)) in itertools.product(
        range(n_micro), zip(times[rank], kinds, strict=True)
    ):
        yield time + _PERIOD * micro, Action(kind, stage, micro)
