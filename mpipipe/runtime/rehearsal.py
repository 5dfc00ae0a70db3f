"""A rehearsal: before step 0 each rank runs its stage a few times, all of them at once, as in a step, and
loads its batches meanwhile.

Groups are timed one by one, and the least counts. Together they take a few per cent more: caches, memory and
clock are shared. The cut is searched with the former; what a step will take is predicted with the latter. A
rank that takes much longer than the others, also for work that is the same on all, is a slow one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from mpipipe.graph.profile import REFUSALS
from mpipipe.graph.program import Batch
from mpipipe.graph.source import TRACING
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.speeds import with_slow_ranks
from mpipipe.planner.stages import bounds, remade_s, without_remade_s
from mpipipe.runtime.costing import clock_of, same_work
from mpipipe.runtime.feed import AHEAD
from mpipipe.runtime.prefetch import Prefetch
from mpipipe.runtime.ties import take_gradients
from mpipipe.runtime.trainer import Trainer
from mpipipe.runtime.transport import Form
from mpipipe.values import Costs, GroupCost, Op

WARM_UP, MOST_ROUNDS = 1, 25
OF_STEP, LEAST_S, MOST_S = 0.5, 0.2, 5.0  # what it may take: of the predicted step, and seconds
_SAME = 4  # times a turn: some milliseconds each
_LEAST = 0.1  # of what was measured: never taken for the call


def rehearse(trainer: Trainer, costs: Costs) -> Costs:
    """Costs whose stages take what they took in the rehearsal, on ranks as slow as they were in it
    (`mpipipe.planner.speeds`): the seconds of a stage's groups are multiplied alike, forward and backward
    each (in two: I and W), what the latter makes again as the forward. As before where the data cannot be
    asked for one micro-batch alone, and of a stage whose operators take no made-up numbers. No weight,
    statistic or random stream changes. Collective."""
    if not trainer.data.exact or trainer.data.varying:
        return costs
    comm, layout, numerics = trainer.comm, trainer.plan.layout, trainer.plan.numerics
    clock, slower = clock_of(comm, numerics.threads)
    comm.barrier()
    seconds, same_s = _seconds(trainer, clock)
    mine = {s: [x * slower * numerics.fill for x in each] for s, each in seconds.items()}
    by_rank, all_same_s = zip(*comm.allgather_object((mine, same_s)), strict=True)
    edges = bounds(len(costs.groups), cut_indices(layout, costs.names))
    again_s = [
        float(remade_s(costs.columns, layout.modes[s])[slice(*edge)].sum()) for s, edge in enumerate(edges)
    ]
    planned_s = [
        sum(_planned_s(costs, edges[s], again_s[s], len(each)) for s, each in found.items()) / device.speed
        for found, device in zip(by_rank, costs.cluster.devices, strict=True)
    ]
    took_s = [sum(map(sum, found.values())) for found in by_rank]
    costs = with_slow_ranks(costs, took_s, planned_s, all_same_s)
    took: dict[int, list[float]] = {}  # F and B, or F, I and W; the copies of a stage wait for the slowest
    for found, device in zip(by_rank, costs.cluster.devices, strict=True):
        for s, each in found.items():
            own_s = [x * device.speed for x in each]
            took[s] = list(map(max, took.get(s, own_s), own_s))
    groups: list[GroupCost] = []
    for s, (first, end) in enumerate(edges):
        if s not in took:
            groups += costs.groups[first:end]
            continue
        own_s = [max(x - costs.call_s, _LEAST * x) for x in took[s]]  # what a call takes is counted apart
        groups += _as_taken(costs.groups[first:end], own_s, again_s[s])
    return replace(costs, groups=tuple(groups))


def _planned_s(costs: Costs, groups: tuple[int, int], again_s: float, calls: int) -> float:
    """Of a stage, on a device of speed 1: F and B, or F, I and W. again_s: planned of what backward makes
    again."""
    own_s = (g.seconds + (g.split_s if calls > 2 else 0.0) for g in costs.groups[slice(*groups)])
    return sum(own_s) + again_s + calls * costs.call_s


def _as_taken(groups: Sequence[GroupCost], took: Sequence[float], again_s: float) -> list[GroupCost]:
    """The groups of a stage, with sums that are what F and B, or F, I and W, took. again_s: planned of what
    backward makes again."""
    fwd = took[0] / (sum(g.fwd_s for g in groups) or 1.0)
    into_s, weight_s = sum(g.bwd_input_s for g in groups), sum(g.bwd_weight_s for g in groups)
    back_s = without_remade_s(took[1], fwd * again_s)
    if len(took) == 2:
        into = weight = back_s / (into_s + weight_s or 1.0)
    else:
        into = back_s / (into_s or 1.0)
        weight = took[2] / (weight_s + sum(g.split_s for g in groups) or 1.0)
    return [
        replace(
            g, fwd_s=g.fwd_s * fwd, bwd_input_s=g.bwd_input_s * into, bwd_weight_s=g.bwd_weight_s * weight,
            split_s=g.split_s * weight,
        )
        for g in groups
    ]  # fmt: skip


def _seconds(trainer: Trainer, clock: Callable[[], float]) -> tuple[dict[int, list[float]], float]:
    """By stage of this rank: F and B of a micro-batch, or F, I and W; and of work that is the same on all
    ranks, in between, the mean, as who shares a core has it by turns. The stages take turns, so that what
    disturbs the machine meets them all. What they add to gradients is taken back. Not of a stage whose
    operators take no made-up numbers."""
    rehearsed = {s: _Rehearsed(trainer, s) for s in trainer.interpreter.stages}
    rows = trainer.plan.numerics.micro_batch
    budget_s = min(MOST_S, max(LEAST_S, OF_STEP * trainer.plan.prediction.step_s))
    turns, same, same_s = range(WARM_UP + MOST_ROUNDS), same_work(clock), list[float]()
    began = time.perf_counter()

    def load(turn: tuple[int, int]) -> Batch:  # of the first step alone: data may have few
        return trainer.data.batch("train", 0, 0, rows, rehearsed[turn[1]].keys)

    with Prefetch(load, AHEAD) as ahead:
        ahead.expect([(turn, s) for turn in turns for s, stage in rehearsed.items() if stage.keys])
        for turn in turns:
            if time.perf_counter() - began > budget_s and all(stage.enough for stage in rehearsed.values()):
                break
            for s, stage in rehearsed.items():
                stage.once(ahead.get((turn, s)) if stage.keys else {}, clock)
            same_s.append(sum(same() for _ in range(_SAME)))
    means = {s: stage.means() for s, stage in rehearsed.items()}
    return {s: seconds for s, seconds in means.items() if seconds}, statistics.fmean(same_s)


class _Rehearsed:
    """One stage, and what it took: F and B, or F, I and W, each turn; of both that which it does oftener."""

    def __init__(self, trainer: Trainer, s: int) -> None:
        self._stage = trainer.interpreter.stages[s]
        codes, lets_go = trainer.program.codes[trainer.comm.rank], self._stage.recompute == "selective"
        kinds = codes[codes[:, 1] == s, 0]
        self._in_two = bool((kinds == Op.I).sum() > (kinds == Op.B).sum())
        code = self._code = trainer.variants.training_code(
            trainer.variants.first, trainer.plan.layout.cuts, s, self._in_two, lets_go
        )
        self.keys = frozenset(code.inputs)
        self._received = [_filled(Form.of(port)) for port in code.received]
        self._grads = [_filled(Form.of_grad(port)) for port in code.sent if port.needs_grad]
        weights = self._stage.weights
        self._copies = {update.buffer: weights.buffer(update.buffer).clone() for update in code.updates}
        self._found: list[list[float]] = []
        self._refused = False

    def once(self, batch: Batch, clock: Callable[[], float]) -> None:
        stage = self._stage
        if self._refused:
            return
        try:
            self._found.append(self._turn(batch, clock))
        except REFUSALS:  # a step has other numbers, and shows an error that is none of these
            self._refused = True
            stage.forget()
        stage.weights.forget_rows()  # which would be those of many steps
        if stage.weights.tied == "eager":  # of uses that have no accumulator
            take_gradients(stage.weights)

    def _turn(self, batch: Batch, clock: Callable[[], float]) -> list[float]:
        stage, ends = self._stage, [clock()]
        with TRACING:
            stage.forward(self._code, 0, self._received, batch, 0, True)
        ends.append(clock())
        if self._in_two:
            with TRACING:
                stage.backward_input(0, self._grads)
            ends.append(clock())
        with TRACING:
            stage.backward_weight(0) if self._in_two else stage.backward(0, self._grads)
            stage.apply_statistics(self._copies.__getitem__)  # which a step does at its end
        ends.append(clock())
        return [b - a for a, b in itertools.pairwise(ends)]

    @property
    def enough(self) -> bool:
        """Not where the only turn that counts took longer than the cold one: it was disturbed."""
        counted = len(self._found) - WARM_UP
        return self._refused or counted > 1 or (counted == 1 and sum(self._found[-1]) <= sum(self._found[0]))

    def means(self) -> list[float]:
        """As a step adds them up, without the longest fifth and of two the shorter; none of a stage that
        refused a turn. Ends the rehearsal."""
        self._stage.weights.forget()
        if self._refused:
            return []
        counted = [sorted(column) for column in zip(*self._found[WARM_UP:], strict=True)]
        return [statistics.mean(column[: max(1, 4 * len(column) // 5)]) for column in counted]


def _filled(form: Form) -> Tensor:
    t = form.empty()
    return t.fill_(0.01) if t.dtype.is_floating_point else t.zero_()
