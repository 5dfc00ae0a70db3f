"""Cuts that a search begins with: those of the smallest bottleneck, which knows neither how a pipeline fills
nor, where a rank has several stages, their sum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from mpipipe.errors import PlanError
from mpipipe.planner.copies import Order
from mpipipe.planner.partition import Partition, Wish, nearest, partition
from mpipipe.planner.schedules import PLAIN, PLANNED, is_of_file
from mpipipe.planner.several import started
from mpipipe.planner.stages import Cuts, in_order
from mpipipe.values import Costs


def starts(
    costs: Costs, order: Order, n_micro: int, schedule: str, receive_window: int, tied: str, recompute: Wish,
    explain: bool = True, finest: bool = False,
) -> list[Cuts]:  # fmt: skip
    """For stages on these ranks; arguments as for `partition`, which says what is raised where none fits. An
    order from a file is for its number of ranks alone: then those that come nearest, for the place to be
    shown where it is too much; and one that follows from costs may keep less than 1f1b does."""
    if len(set(order)) < len(order):
        return started(costs, order, n_micro, schedule, receive_window, tied, recompute)
    placed, plain = in_order(costs, order), PLAIN[0] if schedule in PLANNED else schedule
    how = placed, n_micro, plain, len(order), receive_window, tied
    may_not_fit = is_of_file(schedule) or schedule in PLANNED  # as `partition` counts memory

    def fastest(update: bool, wish: Wish) -> Partition:
        return partition(*how, update, explain and not may_not_fit, finest, recompute=wish)

    try:
        return [cuts for update in (False, True) for cuts in with_plain(partial(fastest, update), recompute)]
    except PlanError:
        if not may_not_fit:
            raise
        return [nearest(*how, recompute)]


def with_plain(fastest: Callable[[Wish], Partition], recompute: Wish) -> list[Cuts]:
    """The fastest cuts, and those without recomputation where these need it: a step may be shorter so,
    though its slowest stage is not."""
    found = fastest(recompute)
    if found.recomputes:
        with suppress(PlanError):
            return [found.cuts, fastest("none").cuts]
    return [found.cuts]
