"""Which rank is called slow, on steps made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from made_run import made_costs

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.planner import SCHEDULES, lower
from mpipipe.runtime.interpreter import Outcome
from mpipipe.runtime.slowness import WINDOW, WINDOWS, Slowness
from mpipipe.values import Costs, Timeline

RANKS = 3
PROGRAM = lower(SCHEDULES["1f1b"](RANKS, 2), (), "per_use", 4)
EDGES = [np.arange(len(codes) + 1.0) for codes in PROGRAM.codes]
TIMES = tuple(np.stack([edges[:-1], edges[1:]], axis=1) for edges in EDGES)
PREDICTED = Timeline(PROGRAM, TIMES, tuple(np.zeros(len(t), np.int64) for t in TIMES))


COSTS = made_costs(RANKS)


def said(
    factors: list[list[float]], waits: bool = False, costs: Costs = COSTS, unit_s: float = 1.0
) -> list[tuple[int, str]]:
    """(window, text) of what every rank was told. factors: by window and rank; waits: what is beyond the
    prediction is waiting for samples; unit_s: what an instruction takes."""
    planned = tuple(times * unit_s for times in TIMES)

    def body(comm: Communicator) -> list[tuple[int, str]]:
        predicted = replace(PREDICTED, times=planned)
        slow, found = Slowness(comm, predicted, costs, f"n{comm.rank}"), []
        for window, by_rank in enumerate(factors):
            for _ in range(WINDOW):
                times = planned[comm.rank] * by_rank[comm.rank]
                data_s = (times - planned[comm.rank]) @ [-1.0, 1.0] * waits
                if text := slow.add(Outcome(times, np.zeros(len(times), np.int64), data_s)):
                    found.append((window, str(text)))
        return found

    by_rank = run_local(RANKS, body)
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


def test_a_rank_that_stays_slow_is_told_once_with_its_factor() -> None:
    slow = [3.0, 2.8, 6.0]  # all are slower than predicted, one even more so
    told = said([slow] * (WINDOWS + 2))
    assert [window for window, _ in told] == [WINDOWS - 1]
    assert told[0][1].startswith(
        "rank 2 (n2) has computed 2.1 times as long as the other ranks for 100 steps"
    )


def test_a_rank_that_waits_for_its_samples_is_not_slow() -> None:
    assert said([[1.0, 1.0, 6.0]] * (WINDOWS + 2), waits=True) == []


def test_where_nothing_can_be_told_of_a_rank_nothing_is() -> None:
    slow = [[1.0, 1.0, 6.0]] * (WINDOWS + 2)
    assert len(said(slow, unit_s=1e-2)) == 1
    assert said(slow, unit_s=1e-3) == [], "noise: a step of some milliseconds"
    devices = tuple(replace(device, alone=1.5) for device in COSTS.cluster.devices)
    assert said(slow, costs=COSTS.but(cluster=replace(COSTS.cluster, devices=devices))) == [], "shared cores"
    assert said(slow, costs=replace(COSTS, source="modelled")) == []


def test_what_does_not_last_is_not_told() -> None:
    even, slow = [1.0, 1.1, 1.2], [1.0, 2.0, 1.0]
    assert said([even, slow, even, slow, even]) == []
