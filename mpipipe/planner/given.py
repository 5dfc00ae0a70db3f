"""A plan that was made or edited elsewhere: does it belong to this run?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from mpipipe.errors import PlanError, did_you_mean, nearest
from mpipipe.planner.copies import check_order
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.schedules import SCHEDULES
from mpipipe.values import Layout, Numerics, Plan

_OF_THE_MACHINE = ("torch", "instruction_set", "kernels")  # where it was planned; this run has its own


def check_ranks(layout: Layout, n_ranks: int, where: str) -> None:
    """What can be said before the model is captured. Raises PlanError where the ranks are not those of the
    layout."""
    if layout.n_stages == n_ranks:
        _check_order(layout, where)
    if layout.n_ranks != n_ranks:
        ranks = "is 1 rank" if n_ranks == 1 else f"are {n_ranks} ranks"
        on = f" on {layout.n_ranks} ranks" if layout.n_ranks != layout.n_stages else ""
        raise PlanError(
            f"{where} has {layout.n_stages} stages{on} in layout.ranks, and there {ranks}; start "
            f"{layout.n_ranks} ranks, or plan again with --ranks {n_ranks}"
        )
    _check_order(layout, where)


def _check_order(layout: Layout, where: str) -> None:
    try:
        check_order(layout)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def check_given(
    plan: Plan, numerics: Numerics, n_ranks: int, group_names: Sequence[str], where: str = "the plan"
) -> list[str]:
    """Notes for people. where: how messages call the plan.

    Raises PlanError at the first difference: number of ranks, what decides the bits, schedule, groups, cuts.
    """
    layout = plan.layout
    check_ranks(layout, n_ranks, where)
    notes = list(_differences(plan.numerics, numerics, where))
    if layout.schedule not in SCHEDULES:
        hint = did_you_mean(nearest(layout.schedule, SCHEDULES))
        raise PlanError(
            f"{where} has layout.schedule = {layout.schedule!r}; expected one of {', '.join(SCHEDULES)}{hint}"
        )
    if plan.costs is not None:
        _check_groups(plan.costs.names, group_names, where)
    try:
        cut_indices(layout, group_names)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    return notes


def _differences(planned: Numerics, now: Numerics, where: str) -> list[str]:
    notes = []
    for name in (f.name for f in fields(Numerics)):
        was, is_now = getattr(planned, name), getattr(now, name)
        if was == is_now:
            continue
        if name not in _OF_THE_MACHINE:
            raise PlanError(
                f"{where} has numerics.{name} = {was!r}, this run {is_now!r}; set what decides it in the "
                "config to that of the plan, or plan again with this config"
            )
        notes.append(f"planned with {name} {was!r}, this run has {is_now!r}")
    return notes


def _check_groups(planned: Sequence[str], names: Sequence[str], where: str) -> None:
    if list(planned) == list(names):
        return
    pairs = zip([*planned, "(none)"], [*names, "(none)"], strict=False)
    i, (was, now) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise PlanError(
        f"{where} was made for a model of {len(planned)} groups, this one has {len(names)}; the first that "
        f"differs is group {i}: {was!r} there, {now!r} here; plan again with this config"
    )
