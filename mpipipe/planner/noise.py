"""Does the plan hold where the costs are a little wrong?

In each draw the seconds of a group are multiplied by a factor from 1 - spread to 1 + spread; groups of equal
cost were timed once, so they have one factor. Links, updates and memory stay. Under every draw the plan's
cut is held against others that fit: those with one cut moved by one group, and those with the smallest
bottleneck under some of the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.many import Many
from mpipipe.planner.partition import partition
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.stages import Cuts, neighbours
from mpipipe.values import Costs, Float64, GroupCost, Layout, Plan, Value

DRAWS = 32
ASSUMED_SPREAD = 0.1  # of modelled costs, where nothing was timed more than once
WORTH = 0.001  # of a step: what another cut would gain below it is not counted
_MOST_SPREAD = 0.9  # so that no group is free
# What bounds the work, to about two seconds:
_MOST_INSTRUCTIONS = 400_000  # of a program that is walked
_MOST_ENDS = 200_000_000  # instructions x cuts x draws
_PARTITIONED = {4096: 32, 100_000: 4}  # groups x stages up to which so many draws are partitioned; else none


@dataclass(frozen=True)
class Noise(Value):
    """How the predicted step, and the choice of the cut, move with the costs."""

    draws: int
    cuts: int  # that the plan's was held against
    spread: float  # median over groups
    widest: float  # of all groups, the largest
    assumed: bool  # the spread is `ASSUMED_SPREAD`, not one of timings
    step_s: tuple[float, float]  # of the plan: the least and the most of all draws
    held: int  # draws in which no other cut gains more than `WORTH`
    gain: float  # the most that another one would gain in a draw, as a share of the plan's step


def noise(plan: Plan, costs: Costs, draws: int = DRAWS, seed: int = 0) -> Noise | None:
    """None where there is no spread, the program is too large to be walked, ranks have several stages, or
    stages several copies. The same for the same seed. Raises as `program_for` does."""
    instructions = 6 * plan.layout.n_stages * plan.numerics.micro_batches  # F, B and four messages each
    spread, assumed = spreads(costs)
    if not spread.any() or instructions > _MOST_INSTRUCTIONS or not _alone(plan.layout):
        return None
    factors = _factors(costs.groups, spread, draws, seed)
    many = Many(plan, costs, factors)
    ours = cut_indices(plan.layout, costs.names)
    others = _others(many, ours, _MOST_ENDS // (instructions * draws))
    steps = many.steps_s([ours, *others])  # (cuts, draws)
    best = steps[1:].min(axis=0, initial=np.inf)
    gains = np.maximum(0.0, 1.0 - best / steps[0])
    return Noise(
        draws=draws,
        cuts=len(others),
        spread=float(np.median(spread)),
        widest=float(spread.max()),
        assumed=assumed,
        step_s=(float(steps[0].min()), float(steps[0].max())),
        held=int((gains <= WORTH).sum()),
        gain=float(gains.max()),
    )


def shorter(
    plan: Plan, other: Plan, costs: Costs, draws: int = DRAWS, seed: int = 0
) -> tuple[int, int] | None:
    """In how many of the draws the step of `plan` is more than `WORTH` shorter than that of `other`, of the
    same numerics, schedule and number of ranks; and the draws. None as for `noise`."""
    instructions = 6 * plan.layout.n_stages * plan.numerics.micro_batches
    spread, _ = spreads(costs)
    if not spread.any() or instructions > _MOST_INSTRUCTIONS or not _alone(plan.layout):
        return None
    factors = _factors(costs.groups, spread, draws, seed)
    ours_s, theirs_s = (
        Many(p, costs, factors).steps_s([cut_indices(p.layout, costs.names)])[0] for p in (plan, other)
    )
    return int((ours_s < theirs_s * (1.0 - WORTH)).sum()), draws


def _alone(layout: Layout) -> bool:
    """One stage per rank, and one rank per stage."""
    return layout.n_copies == 1 and layout.n_ranks == layout.n_stages


def spreads(costs: Costs) -> tuple[Float64, bool]:
    """Of each group, (groups,): its own, else that of all, and of a modelled one at least what is
    assumed; and whether all are assumed."""
    modelled = costs.source == "modelled"
    own = np.array([group.spread for group in costs.groups])
    rest = max(costs.spread, ASSUMED_SPREAD) if modelled else costs.spread
    return np.minimum(np.where(own > 0.0, own, rest), _MOST_SPREAD), modelled and not own.any()


def _factors(groups: Sequence[GroupCost], spread: Float64, draws: int, seed: int) -> Float64:
    """(draws, groups): one factor for all groups of equal cost."""
    kinds = dict[tuple[float, ...], int]()
    kind = [kinds.setdefault((g.fwd_s, g.bwd_input_s, g.bwd_weight_s), len(kinds)) for g in groups]
    drawn = np.random.default_rng(seed).uniform(-1.0, 1.0, (draws, len(kinds)))
    return np.asarray(1.0 + spread * drawn[:, kind], np.float64)


def drawn_costs(costs: Costs, factors: Float64) -> Costs:
    """factors: (groups,), of the seconds of each."""
    groups = (
        replace(
            g,
            fwd_s=g.fwd_s * f,
            bwd_input_s=g.bwd_input_s * f,
            bwd_weight_s=g.bwd_weight_s * f,
            split_s=g.split_s * f,
        )
        for g, f in zip(costs.groups, factors.tolist(), strict=True)
    )
    return replace(costs, groups=tuple(groups))


def _others(many: Many, ours: Cuts, most: int) -> list[Cuts]:
    """Those to be held against the plan's: neighbours that fit into memory, the evenest `most` of them; and
    those with the smallest bottleneck under some draws."""
    costs, plan = many.costs, many.plan
    n_groups, n_stages = len(costs.groups), plan.layout.n_stages
    near = list[tuple[float, Cuts]]()
    for i, cuts in neighbours(n_groups, ours):
        if many.fits(cuts, (i, i + 1)):
            near.append((many.slowest_s(cuts, (i, i + 1)), cuts))
    exact = next((few for work, few in _PARTITIONED.items() if n_groups * n_stages <= work), 0)
    drawn = (_least_bottleneck(many, factors) for factors in many.factors[:exact])
    found = [cuts for cuts in drawn if cuts is not None]
    return [c for c in dict.fromkeys([*(c for _, c in sorted(near)[:most]), *found]) if c != ours]


def _least_bottleneck(many: Many, factors: Float64) -> Cuts | None:
    """None where no cut fits by the memory of `partition`, which is a little above what is simulated, or
    where it does not with the plan's own order."""
    numerics, layout = many.plan.numerics, many.plan.layout
    try:
        cuts = partition(
            drawn_costs(many.costs, factors), numerics.micro_batches, layout.schedule, layout.n_stages,
            layout.receive_window, numerics.tied, explain=False,
            recompute="auto" if layout.recompute else "none",
        ).cuts  # fmt: skip
    except PlanError:
        return None
    return cuts if many.fits(cuts, range(layout.n_stages)) else None
