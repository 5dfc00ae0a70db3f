"""The problem of `partition`: seconds and bytes of every stage that there could be, and the cuts of which the
slowest stage takes least.

    B[s, r] = min over l < r of max(B[s-1, l], time_s(l, r)),   memory_s(l, r) <= memory of rank s

Dynamic programming as in PipeDream (Narayanan et al. 2019) and Alpa (Zheng et al. 2022), with
communication, the schedule's stage-dependent memory and unequal speeds. A second sweep picks, among
all cuts with that bottleneck, the smallest sum of squared stage times: the others are even too.

Both sweeps are in numpy here, and compiled, with the same cuts: as they are (kernels/planner/sweeps.cpp), and
without recomputation, for many groups and stages, as a bisection (kernels/planner/cuts.cpp). Where that would
take more than `MOST_WORK` steps (seconds) for the second one, it leaves cuts that have the exact
bottleneck and are even, but perhaps not the evenest.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from mpipipe.planner.native import compiled
from mpipipe.planner.stages import Cuts, Ranges, blocks_ahead, bounds, crossing_s
from mpipipe.planner.sweep import Low, Swept, low_for, sweep, sweep_near
from mpipipe.values import Costs, Float64, Int64, Recompute

ENDLESS = 2**62  # bytes
MOST_WORK = 1 << 30  # (stage, first, end) that the search for least squares may look at


class Problem:
    """Times and memory of every (stage, first, end), one column at a time. kept: as of `kept_micro_batches`;
    modes: the last one needs least memory, as it keeps least."""

    def __init__(
        self, costs: Costs, ranges: Ranges, kept: Int64, modes: Sequence[Recompute] = ("none",)
    ) -> None:
        self.kept, self.modes = kept, tuple(modes)
        self.live = live = most_whole(kept)
        devices = costs.cluster.devices[: len(live)]
        self.costs, self.ranges = costs, ranges
        self.memory = np.array([device.memory_bytes - device.base_bytes for device in devices], np.int64)
        self.speed = np.array([device.speed for device in devices])
        links = [costs.cluster.link(s, s + 1) for s in range(len(live) - 1)]
        distinct = {link: row for row, link in enumerate(dict.fromkeys(links), 1)}
        no_link = np.zeros(len(costs.groups) + 1)
        self._crossing_s = np.array([no_link, *(crossing_s(costs, link) for link in distinct)])
        rows = [distinct[link] for link in links]
        self._in, self._out = np.array([0, *rows]), np.array([*rows, 0])

    def times(self, low: int, end: int) -> Float64:
        """Seconds (n_stages, end - low) of the stages [first, end); inf where one does not fit."""
        in_s, out_s = self._crossing_s[:, low:end][self._in], self._crossing_s[self._out, end, None]
        least = np.full((len(self.live), end - low), np.inf)
        for mode in self.modes:
            ending = self.ranges.ending_at(end, low, mode)
            time = ending.seconds / self.speed[:, None] + in_s + out_s
            memory = ending.memory_bytes(self.kept)
            least = np.minimum(least, np.where(memory <= self.memory[:, None], time, np.inf))
        return least

    @property
    def compilable(self) -> bool:
        """The compiled bisection knows neither recomputation nor a backward in two."""
        return compiled is not None and self.modes == ("none",) and not self.kept[..., 1].any()

    def best(self, lower_bound_s: float) -> tuple[float, Cuts] | None:
        """The bottleneck and the cuts; None where nothing fits."""
        if compiled is None or self.modes[0] != "none":
            return self.swept(lower_bound_s)
        if len(self.modes) > 1:
            return self._with_recomputation(lower_bound_s)
        found = self.searched(lower_bound_s)  # those that fit are among those whose whole stashes fit
        return found if self.compilable or found is None or self.fits(found[1]) else self.swept(lower_bound_s)

    def _with_recomputation(self, lower_bound_s: float) -> tuple[float, Cuts] | None:
        """All modes need not be looked at where memory costs no time without."""
        fastest = self._but(memory=np.full_like(self.memory, ENDLESS)).best(lower_bound_s)
        assert fastest is not None
        if self.fits(fastest[1]):
            return fastest
        plain = self._but(memory=self.memory).best(fastest[0])
        return plain if plain and plain[0] == fastest[0] else self.swept(fastest[0])

    def _but(self, memory: Int64) -> Problem:
        """Without recomputation, and with so many bytes for each stage."""
        other = copy(self)
        other.modes, other.memory = ("none",), memory
        return other

    def fits(self, cuts: Cuts) -> bool:
        """Without recomputation."""
        return all(
            self.ranges.ending_at(end, first).memory_bytes(kept)[0] <= memory
            for (first, end), kept, memory in zip(
                bounds(len(self.costs.groups), cuts), self.kept, self.memory, strict=True
            )
        )

    def nearest(self) -> tuple[int, Cuts]:
        """The cuts of which the rank that lacks most memory lacks least, and how much that is."""

        def lacking(low: int, end: int) -> Float64:
            ending = self.ranges.ending_at(end, low, self.modes[-1])
            return np.asarray(ending.memory_bytes(self.kept) - self.memory[:, None], np.float64)

        least, cuts = sweep(len(self.costs.groups), len(self.live), lacking, np.maximum)
        return int(least[-1, -1]), cuts

    def swept(self, lower_bound_s: float, in_numpy: bool = compiled is None) -> tuple[float, Cuts] | None:
        """The bottleneck and the cuts by both sweeps; None where nothing fits."""
        by = self.swept_in_numpy if in_numpy else self.swept_compiled
        fastest = self.ranges.seconds / self.speed.max()
        bottleneck = float(sweep_near(by, fastest, lower_bound_s)[0][-1, -1])
        if not np.isfinite(bottleneck):
            return None
        return bottleneck, by(low_for(fastest, bottleneck), bottleneck)[1]

    def sweep(self) -> Float64:
        """The least time of the slowest of the first s stages covering the first r groups, (S+1, N+1)."""
        return (self.swept_in_numpy if compiled is None else self.swept_compiled)(lambda _: 0)[0]

    def swept_in_numpy(self, low: Low, most_s: float | None = None) -> Swept:
        """By the slowest stage, or by the sum of the squares of stages of at most `most_s`."""

        def squares(most_s: float, before: Float64, time: Float64) -> Float64:
            sums: Float64 = before + np.where(time <= most_s, time, np.inf) ** 2
            return sums

        combine = np.maximum if most_s is None else partial(squares, most_s)
        return sweep(len(self.costs.groups), len(self.live), self.times, combine, low)

    def swept_compiled(self, low: Low, most_s: float | None = None) -> Swept:
        """Likewise."""
        ends = range(1, len(self.costs.groups) + 1)
        best, cuts = self.compiled().sweep([low(end) for end in ends], most_s)
        return best.T, tuple(cuts)

    def searched(self, lower_bound_s: float, most_work: int = MOST_WORK) -> tuple[float, Cuts] | None:
        """As `swept`, by compiled code."""
        found = self.compiled().best(lower_bound_s, most_work)
        return None if found is None else (found[0], tuple(found[1]))

    def compiled(self) -> Any:
        """What kernels/planner/cuts.h knows of it."""
        assert compiled is not None
        r = self.ranges
        ties = [(tie.groups, tie.nbytes, r.kept_rows.get(tie.param, 0)) for tie in self.costs.ties]
        return compiled.Partition(
            r.fwd_s, r.bwd_input_s, r.bwd_weight_s, r.param_bytes, r.stash_bytes, r.workspace_bytes,
            r.act_in, r.held_in, r.grad_in, self._crossing_s, self.speed, self.memory, self.live, self._in,
            self._out, ties, r.window, r.tied_window, r.tied_repeats, self.costs.held_per_param_byte,
            r.state_per_param_byte, self.costs.batch_bytes.first, self.costs.batch_bytes.of_last,
            [r.again[mode] for mode in self.modes], r.at_work_bytes, r.waiting_bytes, r.late_grads,
            r.late_received, r.at_once_bytes, r.cast_bytes,
            blocks_ahead(self.kept[..., 1].max(axis=-1), r.n_micro, r.blocks).tolist(), self.kept,
        )  # fmt: skip


def most_whole(kept: Int64) -> Int64:
    """Of `kept_micro_batches`, by stage: all that a schedule of whole backwards keeps, at its most."""
    return np.asarray(kept[..., 0].max(axis=1), np.int64)
