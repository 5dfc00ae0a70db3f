"""Copies that a plan cannot have only because its gradients are added in too few blocks.

Blocks decide bits, so nobody changes them for a run that has begun, and by default there is one: then the
pipeline is there once, however many ranks there are. What `pipeline.blocks=auto` would bring is told.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.copies import block_sums, even_blocks, legal_copies
from mpipipe.planner.partition import Wish
from mpipipe.planner.prediction import LIKE
from mpipipe.planner.schedules import BY_HAND, PLAIN
from mpipipe.planner.search import make_plan
from mpipipe.values import Costs, Plan, Prediction


@dataclass(frozen=True)
class MoreCopies:
    copies: int
    blocks: int
    schedule: str
    prediction: Prediction

    @property
    def how(self) -> str:
        return f"pipeline.blocks={self.blocks}, chosen before step 0"


def more_copies(plan: Plan, costs: Costs, recompute: Wish) -> MoreCopies | None:
    """The fewest that are as good as the best of those that the blocks of `auto` would allow beside those of
    the plan; None where the plan is as good. Quick to find: orders that follow from costs are not made."""
    numerics, layout, n_ranks = plan.numerics, plan.layout, plan.layout.n_ranks
    if numerics.reduce == "fast":  # it has no blocks
        return None
    blocks = even_blocks(numerics.micro_batches, numerics.batch, n_ranks)
    other = replace(numerics, blocks=blocks)
    sums = block_sums(blocks, 1, 1) - block_sums(costs.blocks, 1, 1)
    held = costs.but(blocks=blocks, bytes_per_param_byte=costs.bytes_per_param_byte + sums)
    schedules = dict.fromkeys((BY_HAND.get(layout.schedule, layout.schedule), PLAIN[0]))
    found: list[MoreCopies] = []
    for copies in legal_copies(other) if blocks > numerics.blocks else ():
        if copies in legal_copies(numerics) or n_ranks % copies:
            continue
        for schedule in schedules if n_ranks > copies else PLAIN[:1]:  # one rank never waits
            how = schedule, layout.receive_window, n_ranks, copies, recompute
            with suppress(PlanError, DeadlockError):
                made = make_plan(held, other, *how, quick=True)[0].prediction
                found.append(MoreCopies(copies, blocks, schedule, made))
    least_s = min((each.prediction.step_s for each in found), default=plan.prediction.step_s)
    if least_s * LIKE >= plan.prediction.step_s:
        return None
    return next(each for each in found if each.prediction.step_s <= least_s * LIKE)
