"""The steps of many cuts under many costs: one walk through the program serves all of them.

The end of each instruction is an array (cuts, draws), where a draw is a factor for each group's seconds. In
numpy, that costs hardly more than the walk of `simulate`, whose rules of time these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mpipipe.planner.lower import tied_pairs
from mpipipe.planner.prediction import norm_seconds
from mpipipe.planner.programs import order_of, program_for
from mpipipe.planner.schedules import kept_micro_batches
from mpipipe.planner.stages import Cuts, Ending, Ranges, StageTie, calls, in_order, remade_s, stage_ties
from mpipipe.planner.walk import Ends, match, walk
from mpipipe.values import RECVS, SENDS, Cluster, Costs, Float64, Op, Plan, Recompute

Key = tuple[int, int, int]  # op, stage, other stage of a message or -1


class Many:
    """What every cut costs under every draw, with the ranks of the plan, numbered as its stages are.
    factors: (draws, groups)."""

    def __init__(self, plan: Plan, costs: Costs, factors: Float64) -> None:
        layout, n_micro = plan.layout, plan.numerics.micro_batches
        ranks = tuple((stage,) for stage in range(layout.n_stages))
        self.plan = replace(plan, layout=replace(layout, ranks=ranks, nodes=()))
        self.costs, self.factors = in_order(costs, layout.order), factors
        self._ranges = Ranges(costs, layout.receive_window, n_micro, plan.numerics.tied)
        self._kept = kept_micro_batches(order_of(self.plan.layout, n_micro))
        self._endings = dict[tuple[int, Recompute], Ending]()
        kinds = ("fwd_s", "bwd_input_s", "bwd_weight_s", "split_s")
        seconds = np.array([costs.columns[kind] for kind in kinds])
        start = np.zeros((len(kinds), len(factors), 1))
        self._before_s = dict[Recompute, Float64]()  # (kinds, draws, groups + 1)
        for mode in set(layout.modes):
            more = np.outer([0.0, 1.0, 0.0, 0.0], remade_s(costs.columns, mode))
            drawn = np.cumsum((seconds + more)[:, None, :] * factors, axis=2)
            self._before_s[mode] = np.concatenate([start, drawn], axis=2)

    def steps_s(self, cuts: Sequence[Cuts]) -> Float64:
        """The simulated step, (cuts, draws)."""
        steps = np.empty((len(cuts), len(self.factors)))
        by_ties = dict[tuple[StageTie, ...], list[int]]()  # the order depends on the cuts through these alone
        for index, each in enumerate(cuts):
            by_ties.setdefault(stage_ties(self.costs.ties, each), []).append(index)
        for ties, indices in by_ties.items():
            steps[indices] = self._walked([cuts[i] for i in indices], ties)
        return steps

    def fits(self, cuts: Cuts, stages: Sequence[int]) -> bool:
        """Whether these of its stages do, as `partition` takes it, into the memory of their ranks, with the
        plan's recomputation."""
        devices, edges = self.costs.cluster.devices, (0, *cuts, len(self.costs.groups))
        return all(
            int(self._ending(edges[s + 1], s).memory_bytes(self._kept[s])[edges[s]])
            <= devices[s].memory_bytes - devices[s].base_bytes
            for s in stages
        )

    def slowest_s(self, cuts: Cuts, stages: Sequence[int]) -> float:
        """Forward and backward of the slowest of these of its stages."""
        devices, edges = self.costs.cluster.devices, (0, *cuts, len(self.costs.groups))
        return max(float(self._ending(edges[s + 1], s).seconds[edges[s]]) / devices[s].speed for s in stages)

    def _walked(self, cuts: Sequence[Cuts], ties: Sequence[StageTie]) -> Float64:
        layout, names = self.plan.layout, self.costs.names
        layout = replace(layout, cuts=tuple(names[c] for c in cuts[0]))
        ends = match(program_for(layout, self.plan.numerics, self.costs.ties, names))
        norm_s = norm_seconds(self.costs.cluster, layout.n_stages)
        seconds = self._compute_s(cuts) | dict(self._message_s(cuts, ties))
        clocks = _Clocks(ends, seconds, norm_s, np.zeros((len(cuts), len(self.factors))))
        walk(ends, clocks, clocks.at)
        return np.asarray(np.maximum.reduce(clocks.now), np.float64)

    def _compute_s(self, cuts: Sequence[Cuts]) -> dict[Key, Float64]:
        out = dict[Key, Float64]()
        for s, device in enumerate(self.costs.cluster.devices[: len(cuts[0]) + 1]):
            edges = [(0, *each, len(self.costs.groups))[s : s + 2] for each in cuts]
            firsts, ends = map(list, zip(*edges, strict=True))
            before_s = self._before_s[self.plan.layout.modes[s]]
            sums = before_s[:, :, ends] - before_s[:, :, firsts]  # (kinds, draws, cuts)
            fwd_s, into_s, weight_s, split_s = sums.transpose(0, 2, 1) / device.speed
            once_s = self.costs.call_s / device.speed
            calls_s = calls(range(len(cuts[0]) + 1))[s] * once_s
            out[Op.F, s, -1], out[Op.B, s, -1] = fwd_s + calls_s, into_s + calls_s + weight_s
            out[Op.I, s, -1], out[Op.W, s, -1] = into_s + calls_s, weight_s + split_s + once_s
            update_s = [float(self._ending(end, s).step_s[first]) / device.speed for first, end in edges]
            out[Op.STEP, s, -1] = np.array(update_s)[:, None]
        return out

    def _message_s(self, cuts: Sequence[Cuts], ties: Sequence[StageTie]) -> Iterator[tuple[Key, Float64]]:
        groups, cluster = self.costs.groups, self.costs.cluster
        for s in range(len(cuts[0])):
            before = [groups[each[s] - 1] for each in cuts]
            yield (Op.SEND_ACT, s, s + 1), _link_s(cluster, s, s + 1, [g.act_bytes for g in before])
            yield (Op.SEND_GRAD, s + 1, s), _link_s(cluster, s + 1, s, [g.grad_bytes for g in before])
        for (user, owner), nbytes in tied_pairs(ties).items():
            yield (Op.SEND_TIED, user, owner), _link_s(cluster, user, owner, [nbytes])
            yield (Op.SEND_COPY, owner, user), _link_s(cluster, owner, user, [nbytes])

    def _ending(self, end: int, stage: int) -> Ending:
        mode = self.plan.layout.modes[stage]
        if (end, mode) not in self._endings:
            self._endings[end, mode] = self._ranges.ending_at(end, mode=mode)
        return self._endings[end, mode]


def _link_s(cluster: Cluster, a: int, b: int, nbytes: Sequence[int]) -> Float64:
    """(cuts, 1)"""
    link = cluster.link(a, b)
    return np.array([[link.seconds(n)] for n in nbytes])


class _Clocks:
    """The rules of time of `simulate`, for a walk of many costs at once. zero: of the shape (cuts, draws)."""

    def __init__(self, ends: Ends, seconds: dict[Key, Float64], norm_s: float, zero: Float64) -> None:
        self.ends, self.at, self._norm_s = ends, [0] * len(ends.ops), norm_s
        rows = (codes[:, [0, 1, 3]].tolist() for codes in ends.program.codes)
        self._seconds = [
            [seconds.get((op, stage, other if op in SENDS else -1), zero) for op, stage, other in rank]
            for rank in rows
        ]
        self.now = [zero] * len(ends.ops)
        self._arrives = dict[tuple[int, int], Float64]()
        self._link_free = dict[tuple[int, int], Float64]()

    def waits_for(self, rank: int, index: int) -> int:
        return self.ends.sender_of(rank, index, self.at)

    def passed(self, rank: int, index: int) -> None:
        op, peer, now = self.ends.ops[rank][index], self.ends.peers[rank][index], self.now[rank]
        if op in RECVS:
            self.now[rank] = np.maximum(now, self._arrives.pop((peer, self.ends.partner[rank][index])))
        elif op in SENDS:
            free = self._link_free.get((rank, peer))
            starts = now if free is None else np.maximum(now, free)
            self._arrives[rank, index] = self._link_free[rank, peer] = starts + self._seconds[rank][index]
        else:
            self.now[rank] = now + self._seconds[rank][index]

    def norm(self, index: list[int]) -> None:
        self.now = [np.maximum.reduce(self.now) + self._norm_s] * len(index)
