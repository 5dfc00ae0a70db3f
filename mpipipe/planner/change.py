"""Whether a run keeps its plan: on ranks that are others now, or slow, or by what its steps have shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpipipe.planner.mirrors import mirror_s, state_bytes
from mpipipe.planner.prediction import dear, expect_plan, too_full
from mpipipe.planner.programs import cut_indices
from mpipipe.values import Costs, Plan, Prediction

WORTH = 0.03  # of a step, that a plan around a slow rank must gain
LASTING = 0.01  # of a step, that one by what the steps took must gain, whichever of them are looked at


def fits_still(costs: Costs, plan: Plan) -> bool:
    """Whether a plan may stay though some of its ranks are others now, those of `costs`: they are as many, it
    fits into their memory, and they are as fast."""
    if plan.layout.n_ranks != len(costs.cluster.devices):
        return False
    now = expect_plan(plan, costs)[0]
    return (
        not too_full(now.peak_bytes, costs.cluster) and now.step_s <= (1.0 + WORTH) * plan.prediction.step_s
    )


def stays_as_it_is(costs: Costs, before: Plan, after: Plan) -> tuple[bool, str]:
    """Of two plans, the second one made for ranks as slow as in `costs`: whether the first one stays, and
    what to say."""
    now = expect_plan(before, costs)[0]
    if after.prediction.step_s > (1.0 - WORTH) * now.step_s:
        return True, f"the plan stays: no other is more than {WORTH:.0%} faster while that rank is so slow"
    return _where_there_is_room(costs, before, after, now)


def pays_off(
    before: Plan, after: Plan, parts: Sequence[Costs], steps_left: int, build_s: float
) -> tuple[bool, str]:
    """Of two plans with the costs that all steps have shown: whether the first one stays, and what to say of
    it. parts: costs that some of the steps have shown, others each; build_s: what making a trainer takes."""
    costs, none = after.costs, f"no other is more than {LASTING:.0%} faster, whichever steps count"
    assert costs is not None
    if after.layout == before.layout:
        return True, f"the plan stays: {none}"
    each = [(expect_plan(before, on)[0], expect_plan(after, on)[0]) for on in (costs, *parts)]
    if min(1.0 - new.step_s / now.step_s for now, new in each) <= LASTING:
        return True, f"the plan stays: {none}"
    now, new = each[0]
    if dear(after) >= dear(replace(before, costs=costs, prediction=now)):
        return True, "the plan stays: what another one gains is not worth the memory that it needs"
    sent_s = mirror_s(costs, after.layout, cut_indices(after.layout, costs.names))  # of all that a rank has
    if (now.step_s - new.step_s) * steps_left <= build_s + sent_s:
        return True, "the plan stays: too few steps are left for another one to pay off"
    return _where_there_is_room(costs, before, after, now)


def _where_there_is_room(costs: Costs, before: Plan, after: Plan, now: Prediction) -> tuple[bool, str]:
    """now: of the plan before, with these costs."""
    held = state_bytes(costs, before.layout, cut_indices(before.layout, costs.names))
    on_the_way = [int(sum(of)) for of in zip(after.prediction.peak_bytes, held, strict=True)]
    # what it has, beside what it will be: that has no gradients then, but new weights beside those that came
    if too_full(on_the_way, costs.cluster):
        return True, "the plan stays: there is no room for what moves from rank to rank"
    new_s = after.prediction.step_s
    return False, f"planned anew: a step is predicted to take {new_s:.3g} s; as it was, {now.step_s:.3g} s"
