"""Where the time went: closed answers, and the parts add up."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.planner import SCHEDULES, StageTie, lower, simulate
from mpipipe.planner.schedules import PLAIN, build, in_copies
from mpipipe.report.account import Account, account, exposed_s, rank_reports
from mpipipe.values import Cluster, Device, Link, Op, StageCost, Timeline

SECONDS = st.floats(0.0, 4.0)


def simulated(
    name: str, costs: list[tuple[float, ...]], n_micro: int, link: Link, norm_s: float, tied: bool
) -> Timeline:
    """costs: F, I, W and STEP seconds of each stage."""
    n = len(costs)
    ties = (StageTie(0, (n - 1,), 5),) if tied and n > 1 else ()
    program = lower(SCHEDULES[name](n, n_micro), ties, "eager", 3)
    stages = [StageCost(*seconds, 1000, 10, 100, 4, 3) for seconds in costs]
    ranks = tuple(Device("cpu", 1.0, 1 << 40, 1) for _ in costs)
    machine = Cluster(ranks, (0,) * n, {"node": link})
    return simulate(program, stages, machine, norm_s, ties)


@settings(max_examples=50)
@given(
    st.sampled_from(PLAIN),
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([Link(0.0, np.inf), Link(0.5, 8.0)]),
    SECONDS,
    st.booleans(),
)
@pytest.mark.slow
def test_the_parts_add_up_to_the_makespan(name, costs, n_micro, link, norm_s, tied) -> None:
    timeline = simulated(name, costs, n_micro, link, norm_s, tied)
    found = account(timeline)
    for rank, of_rank in enumerate(found):
        assert min(astuple(of_rank)) >= -1e-9
        assert sum(astuple(of_rank)) == pytest.approx(timeline.makespan_s)
        assert of_rank.compute_s == timeline.busy_s(rank)
        assert of_rank.norm_s == pytest.approx(norm_s)
        assert of_rank.other_s == pytest.approx(0.0)
    if link.latency_s == 0:
        assert [of_rank.exposed_s for of_rank in found] == pytest.approx([0.0] * len(costs))
    mean = sum(of_rank.compute_s for of_rank in found) / len(found)
    assert timeline.bubble == pytest.approx(1 - mean / timeline.makespan_s if timeline.makespan_s else 0.0)


def test_the_parts_add_up_where_sends_are_begun_before_their_turn() -> None:
    """Four replicas of four stages on two ranks, and slow links."""
    one, n = build("interleaved", 4, 4, 2), 4
    copies = [[rank + 2 * copy for rank in one.rank_of_stage] for copy in range(n)]
    program = lower(in_copies([one] * n, copies), (), "per_use", 16)
    stages = [StageCost(1.0, 1.0, 1.0, 0.5, 1000, 10, 100, 4, 3, 20)] * (4 * n)
    ranks = (Device("cpu", 1.0, 1 << 40, 1),) * (2 * n)
    machine = Cluster(ranks, (0,) * len(ranks), {"node": Link(0.125, 64.0)})
    timeline = simulate(program, stages, machine, 0.25)
    assert any((np.diff(times[:, 0]) < 0).any() for times in timeline.times)
    for rank, of_rank in enumerate(account(timeline)):
        assert min(astuple(of_rank)) >= -1e-9
        assert sum(astuple(of_rank)) == pytest.approx(timeline.makespan_s)
        assert of_rank.compute_s == timeline.busy_s(rank)
        assert of_rank.other_s == pytest.approx(0.0)


def test_two_ranks_and_a_slow_link() -> None:
    """F 1 s, B 2 s, messages of 4 and 3 bytes at 2 bytes a second, the norm 0.25 s.

    r0  F [waits 5.5: F of r1 and B of r1 before the gradient leaves, then its 1.5] B  NORM STEP
    """
    costs = [(1.0, 1.0, 1.0, 0.5)] * 2
    first, last = account(simulated("1f1b", costs, 1, Link(0.0, 2.0), 0.25, tied=False))
    assert first == Account(compute_s=3.5, exposed_s=1.5, bubble_s=5.0, norm_s=0.25, other_s=0.0)
    # it waits 1 s for the F of rank 0 and 2 s for the message; 3.5 s at the norm
    assert last == Account(compute_s=3.5, exposed_s=2.0, bubble_s=4.5, norm_s=0.25, other_s=0.0)


def test_sends_gaps_and_both_ends() -> None:
    program = lower(SCHEDULES["1f1b"](2, 1), (), "per_use", 4)
    #         F       SEND_ACT  RECV_GRAD B         NORM      STEP
    zero = [(0, 2), (2, 2.5), (3, 8), (8, 10), (10, 11), (11, 12)]
    #         RECV_ACT F        B        SEND_GRAD   NORM       STEP
    one = [(1, 3), (3, 5), (5, 7), (7.5, 7.75), (8, 11), (11, 11.5)]
    times = tuple(np.array(rows, float) for rows in (zero, one))
    timeline = Timeline(program, times, (np.zeros(6, np.int64),) * 2)
    assert [s.instr.op.name for s in timeline.spans(1)] == [
        "RECV_ACT", "F", "B", "SEND_GRAD", "NORM", "STEP",
    ]  # fmt: skip
    first, last = account(timeline)
    assert first == Account(compute_s=5.0, exposed_s=0.5, bubble_s=4.5, norm_s=1.0, other_s=1.0)
    # starts 1 s late, waits 1 s before the send and 1 s after; 2 s at the norm; ends 0.5 s early
    assert last == Account(compute_s=4.5, exposed_s=1.0, bubble_s=4.5, norm_s=1.0, other_s=1.0)
    assert [row[row > 0].tolist() for row in exposed_s(timeline)] == [[0.5], [1.0]]


def test_a_clock_that_is_ahead_makes_no_time() -> None:
    """The send seems to begin after its receive has ended: all of the wait is bubble."""
    program = lower(SCHEDULES["1f1b"](2, 1), (), "per_use", 4)
    zero = [(5, 6), (6, 6), (6, 7), (7, 8), (8, 9), (9, 9)]
    one = [(0, 1), (1, 2), (2, 3), (3, 3), (3, 9), (9, 9)]
    timeline = Timeline(program, tuple(np.array(rows, float) for rows in (zero, one)), ())
    last = account(timeline)[1]
    assert (last.exposed_s, sum(astuple(last))) == (0.0, 9.0)


def test_the_report_of_each_rank() -> None:
    costs = [(1.0, 1.0, 1.0, 0.5)] * 2
    fast, slow = (simulated("1f1b", costs, 2, Link(0.0, rate), 0.0, tied=False) for rate in (np.inf, 1.0))
    codes = fast.program.codes
    sizes = tuple(
        np.where(np.isin(c[:, 0], [Op.SEND_ACT, Op.SEND_GRAD]), 4 - r, 7) for r, c in enumerate(codes)
    )
    first, last = rank_reports(fast, slow, (3, 4), (100, 200), sizes)
    assert (first.stages, first.groups, first.parameters, first.sent_bytes) == ((0,), 3, 100, 8)
    assert (last.stages, last.groups, last.parameters, last.sent_bytes) == ((1,), 4, 200, 6)
    assert (last.predicted_compute_s, last.compute_s) == (6.5, 6.5)
    assert (last.predicted_bubble, last.bubble) == (1 - 6.5 / fast.makespan_s, 1 - 6.5 / slow.makespan_s)
    assert first.exposed_s == account(slow)[0].exposed_s > 0
