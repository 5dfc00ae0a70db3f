"""From the costs of groups to the costs of stages: the only place where that sum is written.

A stage is a run of consecutive groups [first, end). Stage s runs on rank s: where a layout says
otherwise, the costs are those of `in_order`. The partitioner asks
for all runs that end at one place at once (arrays over `first`), `stage_costs` picks one of them,
so what is optimised, proved and simulated is the same number.

Memory of a stage, in bytes:

    fixed + live * stash + workspace + receive buffers          (`memory_bytes`)

`live` is the largest number of micro-batches whose stash the schedule keeps at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import PlanError
from mpipipe.values import Costs, Float64, GroupCost, StageCost, Tie

Int64 = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True)
class StageTie:
    """A tied parameter seen by stages: the owner has the first use, the users the others."""

    owner: int
    users: tuple[int, ...]  # ascending, each once, the owner not among them
    nbytes: int  # of the parameter = of its gradient = of one message


@dataclass(frozen=True)
class Ending:
    """All stages that end at one group, by their first group: arrays (end - low,). Times are those of
    a device of speed 1."""

    fwd_s: Float64
    bwd_input_s: Float64
    bwd_weight_s: Float64
    step_s: Float64
    fixed_bytes: Int64
    stash_bytes: Int64
    workspace_bytes: Int64
    receive_bytes: Int64

    @property
    def seconds(self) -> Float64:
        """Forward and backward of one micro-batch."""
        return self.fwd_s + self.bwd_input_s + self.bwd_weight_s

    def memory_bytes(self, live: NDArray[np.integer] | int) -> Int64:
        total = self.fixed_bytes + live * self.stash_bytes + self.workspace_bytes + self.receive_bytes
        return np.asarray(total, np.int64)


class Ranges:
    """Sums over every run of consecutive groups.

    `receive_window`, `n_micro` and `tied` bound the receive buffers: each of the receives posted
    ahead holds an activation or a gradient, and the owner of a tied parameter also gradients
    from its users, one per micro-batch if "eager", one per step if "per_use". A copied weight
    needs none, it lands in place.
    """

    def __init__(
        self, costs: Costs, receive_window: int = 0, n_micro: int = 1, tied: str = "per_use"
    ) -> None:
        self._costs = costs
        self._window = min(receive_window, 2 * n_micro)
        self._tied_window = receive_window
        self._tied_repeats = n_micro if tied == "eager" else 1
        g = costs.groups
        self._fwd_s = np.array([x.fwd_s for x in g], np.float64)
        self._bwd_input_s = np.array([x.bwd_input_s for x in g], np.float64)
        self._bwd_weight_s = np.array([x.bwd_weight_s for x in g], np.float64)
        self._update_s = np.array([x.update_s for x in g], np.float64)
        self._param = np.array([x.param_bytes for x in g], np.int64)
        self._stash = np.array([x.stash_bytes for x in g], np.int64)
        self._workspace = np.array([x.workspace_bytes for x in g], np.int64)
        self._act_in = np.array([0] + [x.act_bytes for x in g[:-1]], np.int64)
        self._grad_in = np.array([x.grad_bytes for x in g[:-1]] + [0], np.int64)

    def ending_at(self, end: int, low: int = 0) -> Ending:
        """Every stage [first, end), first = low .. end - 1."""
        act_in = self._act_in[:end]
        held, stepped, accumulators = self._parameters(end)
        rate = self._costs.bytes_per_param_byte
        window = self._window * np.maximum(act_in, self._grad_in[end - 1])
        return Ending(
            fwd_s=_sums(self._fwd_s, end)[low:],
            bwd_input_s=_sums(self._bwd_input_s, end)[low:],
            bwd_weight_s=_sums(self._bwd_weight_s, end)[low:],
            step_s=(stepped * self._costs.step_s_per_byte + _sums(self._update_s, end))[low:],
            fixed_bytes=(np.ceil(held * rate).astype(np.int64) + accumulators)[low:],
            stash_bytes=(_sums(self._stash, end) + act_in)[low:],
            workspace_bytes=np.maximum.accumulate(self._workspace[:end][::-1])[::-1][low:],
            receive_bytes=(window + self._tied_receives(end))[low:],
        )

    def _parameters(self, end: int) -> tuple[Int64, Int64, Int64]:
        """Bytes of the weights held (a tied one once), of those updated here (a tied one at its
        first use only), and of the further gradients of a weight with several uses here."""
        held = _sums(self._param, end)
        stepped = held.copy()
        accumulators = np.zeros_like(held)
        for tie in self._costs.ties:
            for before, use in itertools.pairwise(tie.groups):
                if use >= end:
                    continue
                accumulators[: before + 1] += tie.nbytes
                if use != before:  # two uses inside one group: its weight is counted once already
                    held[: before + 1] -= tie.nbytes
                    stepped[: use + 1] -= tie.nbytes
        return held, stepped, accumulators

    def _tied_receives(self, end: int) -> Int64:
        buffers = np.zeros(end, np.int64)
        for tie in self._costs.ties:
            owner, outside = tie.groups[0], len({use for use in tie.groups if use >= end})
            if owner < end:
                posted = min(self._tied_window, outside * self._tied_repeats)
                buffers[: owner + 1] += posted * tie.nbytes
        return buffers


def _sums(x: NDArray[Number], end: int) -> NDArray[Number]:
    """Sum of x[first:end] for every first; added up, never subtracted, so nothing cancels."""
    sums: NDArray[Number] = np.cumsum(x[:end][::-1])[::-1]
    return sums


def bounds(n_groups: int, cuts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(first, end) of each stage. Raises PlanError if a cut leaves a stage empty."""
    edges = (0, *cuts, n_groups)
    for stage, (first, end) in enumerate(itertools.pairwise(edges)):
        if first >= end:
            raise PlanError(
                f"stage {stage} is empty: it starts at group {first} and ends at {end} of {n_groups}; "
                f"cuts must ascend strictly inside 0 .. {n_groups}, got {tuple(cuts)}"
            )
    return tuple(itertools.pairwise(edges))


def in_order(costs: Costs, order: Sequence[int]) -> Costs:
    """With the ranks numbered as the stages that they hold, and links that all neighbours use at once."""
    cluster = costs.cluster.loaded(order)
    if tuple(order) != tuple(range(len(order))):
        cluster = cluster.in_order(order)
    return costs if cluster is costs.cluster else replace(costs, cluster=cluster)


def stage_costs(costs: Costs, cuts: Sequence[int]) -> tuple[StageCost, ...]:
    """Costs of each stage on its rank (stage s on rank s, seconds divided by that rank's speed).

    cuts: index of the first group of stages 1 .. S-1. `fixed_bytes` counts weight, gradient and
    optimizer state of every parameter once, plus one gradient for each further use of a tied
    parameter (an upper bound in mode "eager" and for users, which need no optimizer state).
    `stash_bytes` includes the received activation. Raises PlanError on bad cuts.
    """
    ranges, groups = Ranges(costs), costs.groups
    out = []
    for stage, (first, end) in enumerate(bounds(len(groups), cuts)):
        e, speed = ranges.ending_at(end), costs.cluster.devices[stage].speed
        out.append(
            StageCost(
                fwd_s=float(e.fwd_s[first]) / speed,
                bwd_input_s=float(e.bwd_input_s[first]) / speed,
                bwd_weight_s=float(e.bwd_weight_s[first]) / speed,
                step_s=float(e.step_s[first]) / speed,
                fixed_bytes=int(e.fixed_bytes[first]),
                stash_bytes=int(e.stash_bytes[first]),
                workspace_bytes=int(e.workspace_bytes[first]),
                act_bytes=groups[end - 1].act_bytes if end < len(groups) else 0,
                grad_bytes=groups[first - 1].grad_bytes if first else 0,
            )
        )
    return tuple(out)


def stage_ties(ties: Sequence[Tie], cuts: Sequence[int]) -> tuple[StageTie, ...]:
    """The ties that cross a cut, in the order of `ties`; the others need no message."""
    out = []
    for tie in ties:
        owner, *others = (int(np.searchsorted(cuts, group, side="right")) for group in tie.groups)
        users = tuple(sorted(set(others) - {owner}))
        if users:
            out.append(StageTie(owner, users, tie.nbytes))
    return tuple(out)


def crossing_s(costs: Costs, stage: int) -> Float64:
    """Seconds that one micro-batch (activation and gradient) spends on the link between `stage`
    and the next one, for a cut before group g: array (n_groups + 1,), zero at both ends."""
    link = costs.cluster.link(stage, stage + 1)

    def seconds(group: GroupCost) -> float:
        return link.seconds(group.act_bytes) + link.seconds(group.grad_bytes)

    return np.array([0.0, *map(seconds, costs.groups[:-1]), 0.0])
