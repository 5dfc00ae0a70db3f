"""Does the plan hold where the costs are a little wrong?

In each draw the seconds of a group are multiplied by a factor from 1 - spread to 1 + spread; groups of equal
cost were timed once, so they have one factor. Links, updates and memory stay. Under every draw the plan's
cut is held against others that fit: those with one cut moved by one group, and those with the smallest
bottleneck under some of the draws.

One walk through the program serves all cuts and draws: the end of each instruction is an array (cuts, draws).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpipipe.planner.lower import tied_pairs
from mpipipe.planner.partition import partition
from mpipipe.planner.schedules import SCHEDULES, live_micro_batches
from mpipipe.planner.search import cut_indices, norm_seconds, program_for
from mpipipe.planner.stages import Ending, Ranges, StageTie, stage_ties
from mpipipe.planner.walk import Ends, match, walk
from mpipipe.values import RECVS, SENDS, Cluster, Costs, Float64, GroupCost, Op, Plan, Value

DRAWS = 32
ASSUMED_SPREAD = 0.1  # of modelled costs, where nothing was timed more than once
WORTH = 0.001  # of a step: what another cut would gain below it is not counted
_MOST_SPREAD = 0.9  # so that no group is free
_MOST_INSTRUCTIONS = 400_000  # of a program that is walked; seconds
_MOST_CUTS = 128  # held against the plan's
_EXACT_WORK = 4096  # groups x stages up to which every draw is partitioned; else a few
_FEW = 4
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Noise(Value):
    """How the predicted step, and the choice of the cut, move with the costs."""

    draws: int
    cuts: int  # that the plan's was held against
    spread: float  # median over groups
    assumed: bool  # the spread is `ASSUMED_SPREAD`, not one of timings
    step_s: tuple[float, float]  # of the plan: the least and the most of all draws
    held: int  # draws in which no other cut gains more than `WORTH`
    gain: float  # the most that another one would gain in a draw, as a share of the plan's step


def noise(plan: Plan, costs: Costs, draws: int = DRAWS, seed: int = 0) -> Noise | None:
    """None where there is no spread, or the program is too large to be walked. The same for the same seed.
    Raises as `program_for` does."""
    names = [group.name for group in costs.groups]
    spread, assumed = spreads(costs)
    program = program_for(plan.layout, plan.numerics, costs.ties, names)
    if not spread.any() or sum(map(len, program.codes)) > _MOST_INSTRUCTIONS:
        return None
    factors = _factors(costs.groups, spread, draws, seed)
    problem = _Problem(plan, costs, factors)
    ours = cut_indices(plan.layout, names)
    others = _others(problem, ours)
    steps = problem.steps_s([ours, *others])  # (cuts, draws)
    best = steps[1:].min(axis=0, initial=np.inf)
    gains = np.maximum(0.0, 1.0 - best / steps[0])
    return Noise(
        draws=draws,
        cuts=len(others),
        spread=float(np.median(spread)),
        assumed=assumed,
        step_s=(float(steps[0].min()), float(steps[0].max())),
        held=int((gains <= WORTH).sum()),
        gain=float(gains.max()),
    )


def spreads(costs: Costs) -> tuple[Float64, bool]:
    """Of each group, (groups,): its own, else that of all; of modelled costs at least what is assumed. And
    whether all of it is assumed."""
    least = ASSUMED_SPREAD if costs.source == "modelled" else 0.0
    own = np.array([group.spread or costs.spread for group in costs.groups])
    assumed = costs.source == "modelled" and not own.any()
    return np.minimum(np.where(own > 0.0, own, least), _MOST_SPREAD), assumed


def _factors(groups: Sequence[GroupCost], spread: Float64, draws: int, seed: int) -> Float64:
    """(draws, groups): one factor for all groups of equal cost."""
    kinds = dict[tuple[float, ...], int]()
    kind = [kinds.setdefault((g.fwd_s, g.bwd_input_s, g.bwd_weight_s), len(kinds)) for g in groups]
    drawn = np.random.default_rng(seed).uniform(-1.0, 1.0, (draws, len(kinds)))
    return np.asarray(1.0 + spread * drawn[:, kind], np.float64)


def drawn_costs(costs: Costs, factors: Float64) -> Costs:
    """factors: (groups,), of the seconds of each."""
    groups = (
        replace(g, fwd_s=g.fwd_s * f, bwd_input_s=g.bwd_input_s * f, bwd_weight_s=g.bwd_weight_s * f)
        for g, f in zip(costs.groups, factors.tolist(), strict=True)
    )
    return replace(costs, groups=tuple(groups))


def _others(problem: _Problem, ours: Cuts) -> list[Cuts]:
    """Those to be held against the plan's, which are in memory; the evenest ones where there are too many."""
    costs, plan = problem.costs, problem.plan
    n_stages, n_groups = plan.layout.n_stages, len(costs.groups)
    moved = [(*ours[:i], ours[i] + d, *ours[i + 1 :]) for i in range(len(ours)) for d in (-1, 1)]
    near = [c for c in moved if all(a < b for a, b in itertools.pairwise((0, *c, n_groups)))]
    near = sorted(filter(problem.fits, near), key=problem.slowest_s)[:_MOST_CUTS]
    exact = len(problem.factors) if n_groups * n_stages <= _EXACT_WORK else _FEW
    found = [
        partition(
            drawn_costs(costs, factors), plan.numerics.micro_batches, plan.layout.schedule, n_stages,
            plan.layout.receive_window, plan.numerics.tied,
        ).cuts
        for factors in problem.factors[:exact]
    ]  # fmt: skip
    return [cuts for cuts in dict.fromkeys([*near, *found]) if cuts != ours]


class _Problem:
    """What every cut costs under every draw. factors: (draws, groups)."""

    def __init__(self, plan: Plan, costs: Costs, factors: Float64) -> None:
        layout, n_micro = plan.layout, plan.numerics.micro_batches
        self.plan, self.costs, self.factors = plan, costs, factors
        self._ranges = Ranges(costs, layout.receive_window, n_micro, plan.numerics.tied)
        self._live = live_micro_batches(SCHEDULES[layout.schedule](layout.n_stages, n_micro))
        self._endings = dict[int, Ending]()
        kinds = ("fwd_s", "bwd_input_s", "bwd_weight_s")
        seconds = np.array([[getattr(g, kind) for g in costs.groups] for kind in kinds])
        start = np.zeros((3, len(factors), 1))
        drawn = np.cumsum(seconds[:, None, :] * factors, axis=2)
        self._before_s = np.concatenate([start, drawn], axis=2)  # (kinds, draws, groups + 1)

    def steps_s(self, cuts: Sequence[Cuts]) -> Float64:
        """The simulated step, (cuts, draws)."""
        steps = np.empty((len(cuts), len(self.factors)))
        by_ties = dict[tuple[StageTie, ...], list[int]]()  # the order depends on the cuts through these alone
        for index, each in enumerate(cuts):
            by_ties.setdefault(stage_ties(self.costs.ties, each), []).append(index)
        for ties, indices in by_ties.items():
            steps[indices] = self._walked([cuts[i] for i in indices], ties)
        return steps

    def fits(self, cuts: Cuts) -> bool:
        """As `partition` takes it: into the memory of every rank."""
        devices = self.costs.cluster.devices
        return all(
            int(self._ending(end).memory_bytes(self._live[s])[first])
            <= devices[s].memory_bytes - devices[s].base_bytes
            for s, (first, end) in enumerate(self._stages(cuts))
        )

    def slowest_s(self, cuts: Cuts) -> float:
        """Forward and backward of the slowest stage."""
        devices = self.costs.cluster.devices
        stages = enumerate(self._stages(cuts))
        return max(float(self._ending(end).seconds[first]) / devices[s].speed for s, (first, end) in stages)

    def _walked(self, cuts: Sequence[Cuts], ties: Sequence[StageTie]) -> Float64:
        layout, names = self.plan.layout, [group.name for group in self.costs.groups]
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
            edges = [self._stages(each)[s] for each in cuts]
            firsts, ends = map(list, zip(*edges, strict=True))
            sums = self._before_s[:, :, ends] - self._before_s[:, :, firsts]  # (kinds, draws, cuts)
            fwd_s, into_s, weight_s = sums.transpose(0, 2, 1) / device.speed
            out[Op.F, s, -1], out[Op.B, s, -1] = fwd_s, into_s + weight_s
            out[Op.I, s, -1], out[Op.W, s, -1] = into_s, weight_s
            update_s = [float(self._ending(end).step_s[first]) / device.speed for first, end in edges]
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

    def _stages(self, cuts: Cuts) -> list[tuple[int, int]]:
        return list(itertools.pairwise((0, *cuts, len(self.costs.groups))))

    def _ending(self, end: int) -> Ending:
        if end not in self._endings:
            self._endings[end] = self._ranges.ending_at(end)
        return self._endings[end]


Key = tuple[int, int, int]  # op, stage, other stage of a message or -1


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
        if self.ends.ops[rank][index] not in RECVS:
            return -1
        peer = self.ends.peers[rank][index]
        return -1 if self.at[peer] > self.ends.partner[rank][index] else peer

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
