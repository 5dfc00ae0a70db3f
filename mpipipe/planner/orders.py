"""Orders that follow from costs (zb-planned), as `Layout.actions`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

from mpipipe.errors import PlanError
from mpipipe.planner.copies import largest_share
from mpipipe.planner.partition import Wish
from mpipipe.planner.problem import ENDLESS
from mpipipe.planner.schedules import BY_HAND, PLAIN, build, to_text, zb_planned
from mpipipe.planner.stages import in_order, stage_costs
from mpipipe.values import RECOMPUTE, Costs, Layout, Numerics, Recompute, Schedule

Actions = tuple[str, ...]


class Orders:
    """For the costs of copy 0 of a layout, with these cuts, and the memory of all copies."""

    def __init__(self, costs: Costs, layout: Layout, cuts: tuple[int, ...], numerics: Numerics) -> None:
        self._placed, self._cuts = in_order(costs.but(copies=layout.n_copies), layout.order), cuts
        self._n_micro, self._window = (
            largest_share(numerics.micro_batches, layout.n_copies),
            layout.receive_window,
        )
        cluster = costs.cluster.loaded(*layout.copies)
        self._links = [cluster.link(a, b) for a, b in itertools.pairwise(layout.order)]
        room = [device.memory_bytes - device.base_bytes for device in costs.cluster.devices]
        self._room = [min(room[rank] for rank in on) for on in layout.ranks]

    def without_limit(self) -> Iterator[Actions]:
        """Whether they fit is for the simulation to say. That by hand is among them, as `zb_planned` knows
        what an action costs by itself, and bounds its memory from above."""
        yield _text(self._planned("none", [ENDLESS] * len(self._room)))
        yield _text(build(BY_HAND, len(self._room), self._n_micro))

    def within(self, wish: Wish) -> Iterator[Actions]:
        """By the room that each recomputation leaves; and whole backwards, which keep least."""
        for mode in RECOMPUTE if wish == "auto" else (wish,):
            with suppress(PlanError):  # no micro-batch fits so
                yield _text(self._planned(mode, self._room))
        yield _text(build(PLAIN[0], len(self._room), self._n_micro))

    def _planned(self, mode: Recompute, room: list[int]) -> Schedule:
        stages = stage_costs(self._placed, self._cuts, (mode,) * len(room))
        act_s = [link.seconds(s.act_bytes) for link, s in zip(self._links, stages[:-1], strict=True)]
        grad_s = [link.seconds(s.grad_bytes) for link, s in zip(self._links, stages[1:], strict=True)]
        return zb_planned(stages, self._n_micro, room, [*act_s, 0.0], [0.0, *grad_s], self._window)


def _text(schedule: Schedule) -> Actions:
    return tuple(to_text(schedule).splitlines())
