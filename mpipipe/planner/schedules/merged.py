"""Backwards in one where halves gain nothing: I and W of a micro-batch merged into B, which takes less.

PyTorch's schedules merge the two where they are neighbours (torch.distributed.pipelining, `_merge_bw`). Here
what is between them may wait, or B comes where W was, as long as the last action ends no later for it: where
the next rank has time to spare, the gradient need not leave so soon.

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


def saved_s(work: Work) -> list[float]:
    """By stage, what a backward in one saves of a micro-batch."""
    halves = zip(work.bwd_input_s, work.bwd_weight_s, work.bwd_s, strict=True)
    return [input_s + weight_s - whole_s for input_s, weight_s, whole_s in halves]


def merged(order: Schedule, work: Work, most: int) -> tuple[Schedule, float]:
    """Of an order that ends, and its seconds, no longer than before. One micro-batch of one stage after the
    other, until none can be merged, or `most` have been tried."""
    if compiled is None:
        return _merged(order, work, most)
    of = compiled_work(order.rank_of_stage, work)
    codes, end_s = compiled.merged(of, order.n_micro, list(order.codes), most)
    return Schedule(order.rank_of_stage, order.n_micro, tuple(codes)), end_s


def _merged(order: Schedule, work: Work, most: int) -> tuple[Schedule, float]:
    rows, end_s = [list(order.actions(rank)) for rank in range(len(order.codes))], seconds(order, work)
    saves, gained = [saved > 0.0 for saved in saved_s(work)], True
    while gained:
        gained = False
        for rank, row in enumerate(rows):
            for half in [action for action in row if action.kind == Op.I and saves[action.stage]]:
                if not most:
                    return by_rank(order.rank_of_stage, order.n_micro, rows), end_s
                most -= 1
                found = [(math.inf, row)]
                for way in _ways(rows[rank], half):
                    tried = by_rank(
                        order.rank_of_stage, order.n_micro, [*rows[:rank], way, *rows[rank + 1 :]]
                    )
                    found.append((seconds(tried, work), way))
                took_s, way = min(found, key=lambda of: of[0])
                if took_s <= end_s * (1.0 + _SLACK):
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
