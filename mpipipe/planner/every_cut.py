"""Where there are few ways to cut: all of them, each with a bound, simulated unless that rules it out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.bounds import work_bound_s
from mpipipe.planner.copies import Order
from mpipipe.planner.partition import Wish
from mpipipe.planner.placing import any_order_bound_s
from mpipipe.planner.prediction import norm_seconds, predict_with
from mpipipe.planner.programs import with_window
from mpipipe.planner.schedules import PLAIN, PLANNED, stages_on
from mpipipe.planner.stages import Cuts, StageTie, crossing_s, in_order, own_bytes, stage_ties
from mpipipe.values import Costs, Float64, Int64, Layout, Numerics, Plan, Program

FEW_CUTS = 1 << 14  # ways to cut up to which all are looked at
FEW_ACTIONS = 1 << 13  # simulated for it: ways x stages x micro-batches
ROUNDING = 1.0 - 1e-9  # of sums that are taken in another order
Made = tuple[Plan, Program]


def step_s(made: Made | None) -> float:
    return math.inf if made is None else made[0].prediction.step_s


class EveryCut:
    """Of one number of micro-batches and one schedule."""

    def __init__(
        self, costs: Costs, numerics: Numerics, schedule: str, receive_window: int, n_ranks: int,
        recompute: Wish = "none",
    ) -> None:  # fmt: skip
        self.costs, self.numerics, self.schedule = costs, numerics, schedule
        self.receive_window, self.n_ranks, self.recompute = receive_window, n_ranks, recompute
        self.names = costs.names
        self.ways = math.comb(len(self.names) - 1, n_ranks - 1)
        self._programs: dict[tuple[StageTie, ...], tuple[Layout, Program]] = {}
        self.whole = schedule in PLAIN

    def best(self, made: Made | None, late: Callable[[], bool]) -> tuple[Made | None, bool]:
        """`made`, or what has a shorter step than it; and whether nothing has a shorter one, with the stages
        on the ranks that `made` has them on."""
        count, n_ranks = self.numerics.micro_batches, self.n_ranks
        several = stages_on(self.schedule, n_ranks) > n_ranks
        planned = self.schedule in PLANNED  # for each cut another order
        if several or planned or not 1 <= self.ways <= FEW_CUTS or n_ranks > len(self.costs.cluster.devices):
            return made, False
        norm_s = norm_seconds(self.costs.cluster, n_ranks)
        cuts = ways_to_cut(len(self.names), n_ranks)
        order = made[0].layout.order if made else tuple(range(n_ranks))
        bounds = cut_bounds_s(in_order(self.costs, order), cuts, count, self.whole) + norm_s
        least_s = any_order_bound_s if self.whole else work_bound_s
        bound_s = least_s(self.costs, count, n_ranks, norm_s)
        left = FEW_ACTIONS // (n_ranks * count)
        for i in np.argsort(bounds, kind="stable").tolist():
            if bounds[i] >= step_s(made) * ROUNDING:
                break
            if not left or late():
                return made, False
            left -= 1
            try:
                other = self._made(tuple(cuts[i].tolist()), order, bound_s)
            except (PlanError, DeadlockError):
                continue
            if step_s(other) < step_s(made) * ROUNDING:
                made = other
        return made, True

    def _made(self, cuts: Cuts, order: Order, bound_s: float) -> Made:
        ranks = tuple((rank,) for rank in order)
        starts = tuple(self.names[cut] for cut in cuts)
        layout = Layout(starts, ranks, self.schedule, self.receive_window)
        ties = stage_ties(self.costs.ties, cuts)  # by them alone the order depends on cuts
        if ties not in self._programs:
            self._programs[ties] = with_window(layout, self.numerics, self.costs.ties, self.names)
        known, program = self._programs[ties]
        layout = replace(layout, receive_window=known.receive_window)
        layout, prediction = predict_with(self.recompute, self.costs, layout, program, bound_s)
        return Plan(self.numerics, layout, prediction, self.costs), program


def ways_to_cut(n_groups: int, n_stages: int) -> Int64:
    """First groups of the stages 1, 2, ...: array (ways, n_stages - 1)."""
    ways = list(itertools.combinations(range(1, n_groups), n_stages - 1))
    return np.array(ways, np.int64).reshape(len(ways), n_stages - 1)


def cut_bounds_s(costs: Costs, cuts: Int64, n_micro: int, whole: bool = True) -> Float64:
    """For each row of `cuts`, as `ways_to_cut` gives them: no order of F and full B makes its step shorter,
    without the norm; whole=False: none of F, I and W either. As `step_bound_s`, with the messages that fill
    the pipeline and the slowest update. Array (ways,)."""
    edges = np.pad(cuts, ((0, 0), (1, 1)))  # (ways, stages + 1)
    edges[:, -1] = len(costs.groups)
    speed = np.array([device.speed for device in costs.cluster.devices[: edges.shape[1] - 1]])
    work = np.diff(_before([g.seconds for g in costs.groups])[edges], axis=1) / speed  # of one micro-batch
    update = np.diff(_before(_update_s(costs))[edges], axis=1) / speed
    ways = [costs.cluster.link(stage, stage + 1) for stage in range(cuts.shape[1])]
    before = work  # what the first micro-batch does on a stage before the next one can begin
    if not whole:  # W may come when all else has ended, and messages of gradients meanwhile
        before = np.diff(_before([g.fwd_s for g in costs.groups])[edges], axis=1) / speed
    links = [crossing_s(costs, link)[cuts[:, stage]] * whole for stage, link in enumerate(ways)]
    first = np.cumsum(
        np.stack([np.zeros(len(cuts)), *(before[:, s] + x for s, x in enumerate(links))]), axis=0
    )
    return np.asarray((n_micro * work + first.T).max(axis=1) + update.max(axis=1), np.float64)


def _update_s(costs: Costs) -> Float64:
    """Of each group."""
    return np.asarray(own_bytes(costs) * costs.step_s_per_byte + costs.columns["update_s"], np.float64)


def _before(seconds: Sequence[float] | Float64) -> Float64:
    return np.concatenate([[0.0], np.cumsum(seconds)])
