"""Layout -> Program: the schedule of a layout is checked, lowered and proved to end.

`program_for` takes the layout's own receive window, `with_window` finds the least one that will do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from mpipipe.errors import DeadlockError, PlanError, did_you_mean, nearest
from mpipipe.planner.copies import check_copies, check_nodes, check_order, shape_of
from mpipipe.planner.lower import at_window, lower, tied_pairs
from mpipipe.planner.prove import prove
from mpipipe.planner.schedules import PLANNED, build, check, check_name, forward_only, from_text, in_copies
from mpipipe.planner.stages import Cuts, StageTie, bounds, stage_ties
from mpipipe.values import Layout, Numerics, Program, Schedule, Tie, share_of

Failure = PlanError | DeadlockError


def program_for(
    layout: Layout,
    numerics: Numerics,
    ties: Sequence[Tie],
    group_names: Sequence[str],
    train: bool = True,
    n_micro: int | None = None,
) -> Program:
    """The checked and proved program of a layout; `train=False`: forward only, for evaluation.

    n_micro: micro-batches, by default those of `numerics`. Raises PlanError if the layout does not
    fit the groups, DeadlockError if the program cannot run without buffering.
    """
    program = _lowered(layout, numerics, ties, group_names, train, n_micro)
    prove(program)
    return program


def with_window(
    layout: Layout,
    numerics: Numerics,
    ties: Sequence[Tie],
    group_names: Sequence[str],
    order: Schedule | None = None,
) -> tuple[Layout, Program]:
    """The layout with the least receive window, from its own on, with which the program can run, and that.
    order: of `layout.actions`, where it need not be read. Raises DeadlockError where none will do."""
    # 2p - 2 is what those by hand need without ties, and as many for each copy that a rank serves; one that
    # follows from costs, or a user's own, may do all forwards first
    most = max(
        (4 * len(layout.cuts) + 4) * max(layout.turns),
        _received(layout, numerics, stage_ties(ties, cut_indices(layout, group_names))),
    )
    lowered = _lowered(layout, numerics, ties, group_names, order=order)

    def proved(window: int) -> tuple[Layout, Program]:
        program = at_window(lowered, window)
        prove(program)
        return replace(layout, receive_window=window), program

    least = layout.receive_window
    try:
        return proved(least)
    except DeadlockError as error:
        if least >= most:
            raise
        first = alone(error)
    try:
        found = proved(most)
    except DeadlockError:
        raise first from None
    fails = least
    while found[0].receive_window - fails > 1:
        middle = (found[0].receive_window + fails) // 2
        try:
            found = proved(middle)
        except DeadlockError:
            fails = middle
    return found


def _received(layout: Layout, numerics: Numerics, ties: Sequence[StageTie]) -> int:
    """The most activations and gradients of a step that come to a rank."""
    of_ties = len(tied_pairs(ties)) if numerics.tied == "eager" else 0
    return numerics.micro_batches * (2 * max(Counter(layout.order).values()) + of_ties)


def _lowered(
    layout: Layout, numerics: Numerics, ties: Sequence[Tie], group_names: Sequence[str], train: bool = True,
    n_micro: int | None = None, order: Schedule | None = None,
) -> Program:  # fmt: skip
    """As `program_for`, without a proof."""
    cuts = cut_indices(layout, group_names)
    if train:
        check_copies(shape_of(layout), layout.n_ranks, numerics)
    check_nodes(layout, numerics)
    schedule = replace(order_of(layout, n_micro or numerics.micro_batches, train, order), nodes=layout.nodes)
    return lower(schedule, stage_ties(ties, cuts), numerics.tied, layout.receive_window, train)


def order_of(layout: Layout, n_micro: int, train: bool = True, known: Schedule | None = None) -> Schedule:
    """Its schedule, on its ranks; checked. known: of its actions. Raises PlanError where there is none."""
    check_name(layout.schedule)
    place = {rank: i for i, rank in enumerate(dict.fromkeys(layout.order))}

    def made(count: int) -> Schedule:
        if not train:
            return forward_only(layout.n_stages, count, [place[rank] for rank in layout.order])
        if layout.actions and known is None:
            return _given_actions(layout, count)
        schedule = known or built(layout.schedule, layout.n_stages, count, len(place), n_micro)
        check(schedule)
        return schedule

    shares = [len(share_of(copy, layout.n_copies, n_micro)) for copy in range(layout.n_copies)]
    of_count = {count: made(count) for count in set(shares)}
    return in_copies([of_count[count] for count in shares], layout.copies)


def built(name: str, n_stages: int, count: int, n_ranks: int, n_micro: int) -> Schedule:
    """By its name, for one replica. count: of micro-batches; n_micro: of all replicas. Raises PlanError where
    it is not for so many."""
    try:
        return build(name, n_stages, count, n_ranks)
    except PlanError as error:
        if count == n_micro:
            raise
        raise PlanError(
            f"of pipeline.micro_batches = {n_micro} a replica has {count}: {error} for each"
        ) from error


@lru_cache(maxsize=8)  # the same ones again and again, for another receive window or another tie
def _read(actions: tuple[str, ...]) -> Schedule:
    return from_text("\n".join(actions), "layout.actions")


def _given_actions(layout: Layout, n_micro: int) -> Schedule:
    if layout.schedule not in PLANNED:
        raise PlanError(
            f"layout.actions is an order of {' or '.join(PLANNED)}, and layout.schedule is "
            f"{layout.schedule!r}, whose order follows from its name; remove layout.actions"
        )
    schedule = _read(layout.actions)
    has, asked = (schedule.n_stages, schedule.n_micro), (layout.n_stages, n_micro)
    if has != asked:
        raise PlanError(
            f"layout.actions are of {has[0]} stages and {has[1]} micro-batches, the plan has {asked[0]} and "
            f"{asked[1]} in each copy; make them fit, or remove layout.actions"
        )
    return schedule


def cut_indices(layout: Layout, group_names: Sequence[str]) -> Cuts:
    """Index of the first group of stages 1 .. S-1. Raises PlanError for a name that is no group,
    cuts out of order, or as `check_order` does."""
    check_order(layout)
    place = {name: index for index, name in enumerate(group_names)}
    for name in layout.cuts:
        if name not in place:
            meant = nearest(name, group_names) or group_names[0]
            raise PlanError(
                f"layout.cuts names {name!r}, which is no group of this model{did_you_mean(meant)}"
            )
    cuts = tuple(place[name] for name in layout.cuts)
    bounds(len(group_names), cuts)
    return cuts


def alone(error: Failure) -> Failure:
    """Without the frames that it went through: kept in one of them, it would keep all that they hold, large
    programs among it, until somebody looks for circles."""
    return error.with_traceback(None)
