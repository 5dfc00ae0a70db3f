"""Backwards in one where halves gain nothing: I and W of a micro-batch merged into B, which takes less.

PyTorch's schedules merge the two where they are neighbours (torch.distributed.pipelining, `_merge_bw`). Here
what is between them may wait, or B comes where W was: where the next rank has time to spare, the gradient
need not leave so soon. But only if the last action ends sooner for it: what the next rank has to spare also
makes up for actions that take longer than planned.

Compiled where it can be (kernels/planner/merged.h), with the same results; what is here is what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpipipe.planner.native import compiled
from mpipipe.planner.schedules.fill import Work, seconds
from mpipipe.planner.schedules.listed import compiled_work
from mpipipe.planner.schedules.orders import by_rank
from mpipipe.values import Action, Op, Schedule

_SLACK = 1e-12  # relative: of sums that are taken in another order
_LEAST = 1e-9  # of a backward: what saves less saves nothing


def saved_s(work: Work) -> list[float]:
    """By stage, what a backward in one saves of a micro-batch."""
    halves = zip(work.bwd_input_s, work.bwd_weight_s, work.bwd_s, strict=True)
    saved = ((input_s + weight_s - whole_s, whole_s) for input_s, weight_s, whole_s in halves)
    return [of_one_s if of_one_s > _LEAST * whole_s else 0.0 for of_one_s, whole_s in saved]


def merged(order: Schedule, work: Work, most: int) -> tuple[Schedule, float]:
    """Of an order that ends, and its seconds. One micro-batch of one stage after the other, as long as each
    makes it shorter, or `most` have been tried; none where each cannot be tried once."""
    if compiled is None:
        return _merged(order, work, most)
    of = compiled_work(order.rank_of_stage, work)
    codes, end_s = compiled.merged(of, order.n_micro, list(order.codes), most)
    return Schedule(order.rank_of_stage, order.n_micro, tuple(codes)), end_s


def _merged(order: Schedule, work: Work, most: int) -> tuple[Schedule, float]:
    rows, end_s = [list(order.actions(rank)) for rank in range(len(order.codes))], seconds(order, work)
    saved = saved_s(work)

    def halves(row: list[Action]) -> list[Action]:
        return [action for action in row if action.kind == Op.I and saved[action.stage] > 0.0]

    def ends_s(rank: int, row: list[Action]) -> float:
        every = [*rows[:rank], row, *rows[rank + 1 :]]
        return seconds(by_rank(order.rank_of_stage, order.n_micro, every), work)

    gained = sum(len(halves(row)) for row in rows) <= most
    while gained:
        gained = False
        for rank in range(len(rows)):
            for half in halves(rows[rank]):
                if not most:
                    return by_rank(order.rank_of_stage, order.n_micro, rows), end_s
                most -= 1
                found = [(ends_s(rank, way), way) for way in _ways(rows[rank], half)]
                took_s, way = min(found, key=lambda of: of[0], default=(math.inf, []))
                if took_s < end_s * (1.0 - _SLACK):
                    rows[rank], end_s, gained = way, took_s, True
    return by_rank(order.rank_of_stage, order.n_micro, rows), end_s


def _ways(row: list[Action], half: Action) -> Iterator[list[Action]]:
    """The backward in one where its first half was, and where its second was; if those of the stage ascend,
    and their weight gradients, as the order of addition decides the bits."""
    weight, whole = half._replace(kind=Op.W), half._replace(kind=Op.B)
    first, last = row.index(half), row.index(weight)
    before, between, after = row[:first], row[first + 1 : last], row[last + 1 :]
    if weight._replace(micro=half.micro - 1) not in between:
        yield [*before, whole, *between, *after]
    if half._replace(micro=half.micro + 1) not in between:
        yield [*before, *between, whole, *after]
