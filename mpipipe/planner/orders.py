"""Orders that follow from costs, as `Layout.actions`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.copies import largest_share, sums_apart_bytes
from mpipipe.planner.lower import tied_pairs
from mpipipe.planner.schedules import BY_HAND, build, planned_by_room, policies, room_for, to_lines, work_of
from mpipipe.planner.schedules.fill import Use, Work
from mpipipe.planner.schedules.listed import Policy, listed_seconds, listed_shortest
from mpipipe.planner.stages import Cuts, in_order, stage_costs, stage_ties, walked
from mpipipe.values import Costs, Layout, Numerics, Recompute, Schedule, StageCost

Actions = tuple[str, ...]
# Seconds by stage, to the next one and to the one before; and those of tied parameters.
Messages = tuple[list[float], list[float], list[Use]]
_FEW = 12  # policies, for each stage of a rank, by which cuts are compared: the best ones of the first cuts
_FIRST = 0.25, 0.5, 0.8, 1.2, 1.5  # beside an even share: where cuts are looked for
_MOST_MOVES = 1 << 16  # of cuts on the way from there, stages squared times groups: some seconds
_MOST_TRIED = 1 << 21  # of cuts on the way, times stages and micro-batches: some ten seconds
_ROUNDING = 1.0 - 1e-9  # of sums that are taken in another order
_LEAST = {"zb-planned": "1f1b", "v-planned": "v-half", "interleaved-planned": "interleaved"}  # of memory


class Order(NamedTuple):
    """actions: of it, as `Layout.actions`. least_s: no step with it is shorter."""

    actions: Actions
    schedule: Schedule
    least_s: float = 0.0


class Orders:
    """For the costs of copy 0 of a layout, whatever its cuts, and the memory of all copies. with_hand: those
    by hand among them; of many actions, to play these through takes longer than to make the others.

    One order is for all copies of the pipeline. A rank that is in several does each action for all of these
    in turn: it is planned as if it took so many times as long, and kept as many stashes. So what is sent for
    the first of them comes sooner than planned, and only the simulation says what a step takes."""

    def __init__(self, costs: Costs, layout: Layout, numerics: Numerics, with_hand: bool = True) -> None:
        self._with_hand = with_hand
        self._costs, self._layout, self._turns = costs, layout, layout.turns
        counts = {len(on) for on in layout.ranks}
        self._placed = {n: in_order(costs.but(copies=n), layout.order) for n in counts}
        self._n_micro = largest_share(numerics.micro_batches, layout.n_copies)
        self._window = layout.receive_window
        cluster = costs.cluster.loaded(*layout.copies)
        self._links = [cluster.link(a, b) for a, b in itertools.pairwise(layout.order)]
        place = {rank: i for i, rank in enumerate(dict.fromkeys(layout.order))}
        self._on, self._schedule = tuple(place[rank] for rank in layout.order), layout.schedule
        room = [device.memory_bytes - device.base_bytes for device in costs.cluster.devices]
        of_rank = {self._on[s]: min(room[rank] for rank in on) for s, on in enumerate(layout.ranks)}
        self._room = [of_rank[rank] for rank in range(len(place))]
        self._each = max(Counter(self._on).values())  # stages of a rank
        self._endless = [len(self._on) * self._n_micro] * len(place)  # stashes
        self._cluster, self._order = cluster, layout.order
        self._ties = costs.ties if numerics.tied == "eager" else ()  # which meet in each micro-batch

    def shortest(self, cuts: Cuts) -> Iterator[Order]:
        """Of each number of stashes, those first that should take least; without recomputation. Whether they
        fit, and how long they take, is for the simulation to say."""
        yield from self._by_seconds(cuts, "none", self._endless)

    def within(self, cuts: Cuts, mode: Recompute) -> Iterator[Order]:
        """Likewise, of the numbers that this recomputation leaves room for."""
        stages, _ = self._stages(cuts, mode)
        try:
            room = room_for(self._on, stages, self._n_micro, self._room, self._window, self._turns)
        except PlanError:  # it may fit all the same
            room = [self._on.count(rank) for rank in range(len(self._room))]
        yield from self._by_seconds(cuts, mode, room)

    def by_hand(self) -> Iterator[Order]:
        yield from self._built(BY_HAND[self._schedule])

    def leanest(self) -> Iterator[Order]:
        """One by hand that keeps little."""
        yield from self._built(_LEAST[self._schedule])

    def by_room(self, cuts: Cuts, most_s: float) -> Iterator[Order]:
        """The shortest for each number of stashes, ascending, without recomputation, of those that may do
        with so many seconds."""
        update_s = self._update_s(self._stages(cuts, "none")[0])
        for schedule, took_s in self._found(cuts, "none", self._endless):
            if took_s + update_s <= most_s or not self._layout.is_even:
                yield Order(to_lines(schedule), schedule)

    def near(self, starts: Sequence[Cuts]) -> tuple[Cuts, ...]:
        """From the best of these cuts on, one moved by a group or two at a time, those whose order and update
        take least; and likewise from some on with uneven stages on a rank, if that is shorter. Memory is not
        looked at."""
        every = list(policies(self._on, self._n_micro, self._endless))
        all_s = {cuts: self._seconds(cuts, every) for cuts in starts}
        best = min(starts, key=lambda cuts: min(all_s[cuts]))
        least_s, cuts = self._moved(best, all_s[best], every)
        uneven = {cuts: self._seconds(cuts, every) for cuts in self._uneven()}
        other_s, other = min((self._moved(*of, every) for of in uneven.items()), default=(math.inf, ()))
        return (cuts, other) if other_s < least_s else (cuts,)

    def _uneven(self) -> list[Cuts]:
        """With which each rank does its part of the work, but `_FIRST` times an even share of it in the first
        of its stages: the smaller that is the sooner the next rank has something to do, the larger the longer
        this one has, until the first micro-batch comes to its next stage."""
        n_groups, devices = len(self._costs.groups), self._costs.cluster.devices
        if self._each == 1 or len(self._on) ** 2 * n_groups > _MOST_MOVES:
            return []
        work_s = np.cumsum([group.seconds for group in self._costs.groups])
        speeds = [devices[rank].speed / n for rank, n in zip(self._layout.order, self._turns, strict=True)]
        nth = [self._on[:stage].count(rank) for stage, rank in enumerate(self._on)]
        found = list[Cuts]()
        for first in _FIRST:
            last = 2.0 - first
            shares = [speed * (first + (last - first) * i / (self._each - 1))
                      for speed, i in zip(speeds, nth, strict=True)]  # fmt: skip
            ends_s = np.cumsum(shares)[:-1] * (work_s[-1] / sum(shares))
            cuts = np.abs(work_s[:, None] - ends_s).argmin(axis=0) + 1
            cuts = np.maximum.accumulate(cuts - range(len(cuts))) + range(len(cuts))  # no stage is empty
            cuts = np.minimum(cuts, n_groups - len(cuts) + np.arange(len(cuts)))
            found.append(tuple(cuts.tolist()))
        return found

    def _moved(self, cuts: Cuts, first_s: Sequence[float], every: Sequence[Policy]) -> tuple[float, Cuts]:
        """As `near`, from these on, whose seconds by each policy are `first_s`."""
        best = sorted(range(len(every)), key=first_s.__getitem__)[: _FEW * self._each]
        tried, least_s = [every[i] for i in best], min(first_s)

        def shorter(other: Cuts) -> bool:
            nonlocal least_s
            took_s = self._shortest_s(other, tried, least_s)
            gains = took_s < least_s * (1.0 - 1e-9)
            least_s = took_s if gains else least_s
            return gains

        most = _MOST_TRIED // (len(self._on) * self._n_micro)
        cuts = walked(len(self._costs.groups), cuts, most, shorter)
        return least_s, cuts

    def _seconds(self, cuts: Cuts, tried: Sequence[Policy]) -> list[float]:
        """Of the order by each policy, and the update."""
        stages, messages = self._stages(cuts, "none")
        took_s = listed_seconds(self._on, self._n_micro, self._work(stages, messages), tried)
        update_s = self._update_s(stages)
        return [seconds + update_s for seconds in took_s]

    def _shortest_s(self, cuts: Cuts, tried: Sequence[Policy], most_s: float) -> float:
        """The least of `_seconds`; endless where that is more than `most_s`."""
        stages, messages = self._stages(cuts, "none")
        if self._least_s(stages, messages[0]) >= most_s:
            return math.inf
        update_s = self._update_s(stages)
        work = self._work(stages, messages)
        return listed_shortest(self._on, self._n_micro, work, tried, most_s - update_s)[1] + update_s

    def _least_s(self, stages: Sequence[StageCost], act_s: Sequence[float]) -> float:
        """No order of these takes less: a rank waits for its first input, then does its work."""
        comes_s = itertools.accumulate(
            (stage.fwd_s + sent_s for stage, sent_s in zip(stages, act_s, strict=True)), initial=0.0
        )
        ends_s = dict[int, float]()
        for stage, rank, start_s, n in zip(stages, self._on, comes_s, self._turns, strict=False):
            ends_s[rank] = ends_s.get(rank, start_s) + n * self._n_micro * stage.seconds
        return max(ends_s.values()) + self._update_s(stages)

    def _update_s(self, stages: Sequence[StageCost]) -> float:
        """Of the rank that takes longest for it."""
        each = [0.0] * len(self._room)
        for stage, rank in zip(stages, self._on, strict=True):
            each[rank] += stage.step_s
        return max(each)

    def _work(self, stages: Sequence[StageCost], messages: Messages) -> Work:
        return work_of(self._on, stages, *messages).in_turn(self._turns)

    def _stages(self, cuts: Cuts, mode: Recompute) -> tuple[tuple[StageCost, ...], Messages]:
        modes = (mode,) * len(self._on)
        of_count = {n: stage_costs(placed, cuts, modes) for n, placed in self._placed.items()}
        stages = tuple(of_count[len(on)][s] for s, on in enumerate(self._layout.ranks))
        if not self._layout.is_even:
            apart = sums_apart_bytes(self._costs, self._layout, cuts)
            stages = tuple(
                replace(stage, fixed_bytes=stage.fixed_bytes + more)
                for stage, more in zip(stages, apart, strict=True)
            )
        act_s = [link.seconds(s.act_bytes) for link, s in zip(self._links, stages[:-1], strict=True)]
        grad_s = [link.seconds(s.grad_bytes) for link, s in zip(self._links, stages[1:], strict=True)]
        tied = [
            (user, owner, self._cluster.link(self._order[user], self._order[owner]).seconds(nbytes))
            for (user, owner), nbytes in tied_pairs(stage_ties(self._ties, cuts)).items()
        ]
        return stages, ([*act_s, 0.0], [0.0, *grad_s], tied)

    def _built(self, name: str) -> Iterator[Order]:
        with suppress(PlanError):  # not for so many micro-batches
            made = build(name, len(self._on), self._n_micro, len(self._room))
            yield Order(to_lines(made), made)

    def _by_seconds(self, cuts: Cuts, mode: Recompute, most: Sequence[int]) -> Iterator[Order]:
        seen, (stages, messages) = set[Actions](), self._stages(cuts, "none")
        update_s, least_s = self._update_s(stages), self._least_s(stages, messages[0])
        for schedule, took_s in sorted(self._found(cuts, mode, most), key=lambda found: found[1]):
            actions = to_lines(schedule)  # written where it is asked for: often one will do
            if actions not in seen:
                seen.add(actions)
                of_order_s = took_s + update_s if self._layout.is_even else least_s
                # Some of its stages may recompute less than `mode`: then its seconds are no bound.
                yield Order(actions, schedule, of_order_s * _ROUNDING if mode == "none" else 0.0)

    def _found(self, cuts: Cuts, mode: Recompute, most: Sequence[int]) -> list[tuple[Schedule, float]]:
        """most: stashes of each rank."""
        work = self._work(*self._stages(cuts, mode))
        return planned_by_room(self._on, self._n_micro, work, most, self._with_hand)
