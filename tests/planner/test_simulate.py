"""Times and memory: closed formulas, drawings, and a naive second opinion."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import FREE, HUGE, all_cuts, cluster, problems

from mpipipe.errors import PlanError
from mpipipe.planner import (
    SCHEDULES,
    StageTie,
    forward_only,
    lower,
    prove,
    simulate,
    stage_costs,
    stage_ties,
)
from mpipipe.planner.schedules import PLAIN, build
from mpipipe.values import Link, Op, Schedule, StageCost, Timeline

EVEN = StageCost(1.0, 0.5, 0.5, 0.0, 1000, 10, 100, 4, 3)  # F and B one second each


def even(name: str, n_stages: int, n_micro: int, stage: StageCost = EVEN, link: Link = FREE) -> Timeline:
    program = lower(SCHEDULES[name](n_stages, n_micro), (), "per_use", 4)
    stages = _edges_free((stage,) * n_stages)
    return simulate(program, stages, cluster([1.0] * n_stages, [HUGE] * n_stages, link))


def _edges_free(stages: tuple[StageCost, ...]) -> tuple[StageCost, ...]:
    """Nothing is sent before the first stage nor after the last."""
    first, *rest = stages
    stages = (dataclasses.replace(first, grad_bytes=0), *rest)
    return (*stages[:-1], dataclasses.replace(stages[-1], act_bytes=0))


def picture(timeline: Timeline) -> str:
    """One column per second: digits are forwards, letters backwards, `.` is idle."""
    rows = []
    for rank in range(len(timeline.times)):
        row = ["."] * round(timeline.makespan_s)
        for span in timeline.spans(rank):
            for second in range(round(span.start_s), round(span.end_s)):
                if span.instr.op in (Op.F, Op.B):
                    signs = "0123456789" if span.instr.op == Op.F else "abcdefghij"
                    row[second] = signs[span.instr.micro]
        rows.append("".join(row))
    return "\n".join(rows)


def test_1f1b_drawn():
    assert picture(even("1f1b", 4, 5)) == (
        "0123...a4b.c.d.e\n"
        ".012..a3b4c.d.e.\n"
        "..01.a2b3c4d.e..\n"
        "...0a1b2c3d4e..."
    )  # fmt: skip


def test_gpipe_drawn():
    assert picture(even("gpipe", 4, 5)) == (
        "01234......abcde\n"
        ".01234....abcde.\n"
        "..01234..abcde..\n"
        "...01234abcde..."
    )  # fmt: skip


def test_a_message_delays_the_next_stage_only():
    """A link of one second each way: rank 1 starts at 2, rank 0 goes on at once."""
    assert picture(even("gpipe", 2, 3, link=Link(1.0, 1e18))) == (
        "012....abc\n"
        "..012abc.."
    )  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
@given(st.integers(1, 8), st.integers(1, 12))
@pytest.mark.slow
def test_the_bubble_is_p_minus_1_over_m_plus_p_minus_1(name, p, m):
    stage = dataclasses.replace(EVEN, bwd_input_s=1.0, bwd_weight_s=1.0)
    timeline = even(name, p, m, stage)
    assert timeline.makespan_s == 3.0 * (m + p - 1)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(1, 8), st.integers(1, 12))
@pytest.mark.slow
def test_stash_of_1f1b_is_that_of_the_stages_to_come(p, m):
    peaks = {name: even(name, p, m).peak_bytes for name in PLAIN}
    for s in range(p):
        posted, rest = min(4, m), 1000 + 100
        received = (4 * posted if s else 0) + (3 * (posted + 1) if s < p - 1 else 0)
        sent = 4 if s < p - 1 else 3 if s else 0  # the last message
        live = {"1f1b": min(p - s, m), "gpipe": m}
        for name, n in live.items():
            assert rest + 10 * n <= peaks[name][s] <= rest + 10 * n + received + sent


def test_receive_buffers_stay_for_later_messages_of_their_size():
    """Rank 1 of 1F1B receives ACT0 ACT1 GRAD0 ACT2 GRAD1 .., three posted ahead. It has four activations at
    once, when GRAD0 is taken: two that are live and two that are posted; and three gradients, when GRAD3 is:
    that, and two that are posted. Rank 0 has one at work and three gradients posted, rank 2 activations."""
    program = lower(SCHEDULES["1f1b"](3, 6), (), "per_use", 3)
    timeline = simulate(program, _edges_free((EVEN,) * 3), cluster([1.0] * 3, [HUGE] * 3))
    live = (30, 2 * (10 - 4), 10 - 4)  # beside what was received
    received, sent = (4 * 3, 4 * 4 + 3 * 3, 4 * 4), (4, 4, 3)
    assert timeline.peak_bytes == tuple(
        1100 + sum(of_rank) for of_rank in np.transpose([live, received, sent])
    )
    alike = tuple(dataclasses.replace(s, act_bytes=min(3, s.act_bytes)) for s in _edges_free((EVEN,) * 3))
    timeline = simulate(program, alike, cluster([1.0] * 3, [HUGE] * 3))
    assert timeline.peak_bytes[1] == 1000 + 100 + 2 * (10 - 3) + 3 * 6 + 3, (
        "of one size: two live, one at work"
    )


def test_memory_over_the_step():
    """Rank 1 of two: fixed 1000, 8 for two activations, 6 more of a stash from F through B, and a workspace
    of 100 while it works. Rank 0 holds two stashes of 10 at first, and gets two gradients of 3. What was sent
    last is still there."""
    timeline = even("1f1b", 2, 2)
    names = [[str(i).split("-")[0].split("<")[0] for i in timeline.program.instrs(rank)] for rank in (0, 1)]
    assert dict(zip(names[1], timeline.memory_bytes[1].tolist(), strict=True)) == {
        "1RECV_ACT0": 1008, "1F0": 1114, "1B0": 1114, "1SEND_GRAD0": 1011,
        "1RECV_ACT1": 1011, "1F1": 1117, "1B1": 1117, "1SEND_GRAD1": 1011, "NORM": 1011, "1STEP": 1011,
    }  # fmt: skip
    assert dict(zip(names[0], timeline.memory_bytes[0].tolist(), strict=True)) == {
        "0F0": 1116, "0SEND_ACT0": 1020, "0F1": 1130, "0SEND_ACT1": 1030, "0RECV_GRAD0": 1030, "0B0": 1130,
        "0RECV_GRAD1": 1020, "0B1": 1120, "NORM": 1010, "0STEP": 1010,
    }  # fmt: skip
    assert timeline.peak_bytes == (1130, 1117)


def test_a_backward_in_two_takes_what_its_split_adds_and_each_action_its_calls():
    """Stage 0 waits for a gradient, stage 1 for an activation: each F, and each I, is two calls, a W one."""
    stage = dataclasses.replace(EVEN, split_s=0.25, call_s=0.125)
    for name, seconds in (("zb-h1", {Op.F: 1.25, Op.I: 0.75, Op.W: 0.875}), ("1f1b", {Op.B: 1.25})):
        timeline = even(name, 2, 3, stage)
        for rank in range(2):
            for span in timeline.spans(rank):
                if span.instr.op in seconds:
                    assert span.end_s - span.start_s == pytest.approx(seconds[span.instr.op])


def test_forward_only_keeps_one_stash():
    program = lower(forward_only(2, 5), (), "per_use", 0, train=False)
    timeline = simulate(program, (EVEN, EVEN), cluster([1.0] * 2, [HUGE] * 2))
    assert timeline.peak_bytes == (1110 + 4, 1000 + 2 * 4 + 6 + 100), "sent before; the next one is awaited"
    assert timeline.memory_bytes[0].tolist()[:2] == [1110, 1004]  # F, SEND_ACT
    assert timeline.makespan_s == 6.0


def test_norm_waits_for_all_then_all_update():
    stages = (dataclasses.replace(EVEN, step_s=2.0), dataclasses.replace(EVEN, step_s=5.0))
    program = lower(SCHEDULES["1f1b"](2, 1), (), "per_use", 4)
    timeline = simulate(program, _edges_free(stages), cluster([1.0] * 2, [HUGE] * 2), norm_s=0.5)
    assert [span.end_s for span in timeline.spans(0)][-2:] == [4.5, 6.5]
    assert [span.end_s for span in timeline.spans(1)][-2:] == [4.5, 9.5]


def test_messages_of_one_direction_follow_each_other():
    """Tied gradient and gradient leave rank 1 at once on a link of 1 byte a second."""
    stages = _edges_free((EVEN, EVEN))
    ties = (StageTie(0, (1,), 10),)
    program = lower(SCHEDULES["1f1b"](2, 1), ties, "eager", 4)
    timeline = simulate(program, stages, cluster([1.0] * 2, [HUGE] * 2, Link(0.0, 1.0)), ties=ties)
    ends = {span.instr.op: span.end_s for span in timeline.spans(0)}
    sent = 1 + 4 + 1 + 1  # F, ACT of 4 bytes, F, B
    assert ends[Op.RECV_GRAD] == sent + 3
    assert ends[Op.RECV_TIED] == sent + 3 + 10
    copied = {span.instr.op: span.end_s for span in timeline.spans(1)}[Op.RECV_COPY]
    assert copied == ends[Op.RECV_TIED] + 1 + 10


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(problems(memory="huge"), st.sampled_from(PLAIN), st.data())
def test_against_the_recursion(problem, name, data):
    """End of each action = its seconds after the later of the action before it and its message."""
    costs, n_stages, n_micro = problem
    cuts = data.draw(st.sampled_from(list(all_cuts(len(costs.groups), n_stages))))
    stages, schedule = stage_costs(costs, cuts), SCHEDULES[name](n_stages, n_micro)
    program = lower(schedule, (), "per_use", 4)
    prove(program)
    timeline = simulate(program, stages, costs.cluster)
    naive = _naive_ends(schedule, stages, costs.cluster)
    for rank in range(n_stages):
        spans = [s for s in timeline.spans(rank) if s.instr.op in (Op.F, Op.B)]
        assert [s.end_s for s in spans] == [naive(a) for a in schedule.actions(rank)]
        assert (np.diff(timeline.times[rank].ravel()) >= 0).all()


def _naive_ends(schedule: Schedule, stages, machine):
    orders = [list(schedule.actions(r)) for r in range(schedule.n_stages)]

    @functools.cache
    def end(action) -> float:
        kind, s, m = action
        order = orders[s]
        index = order.index(action)
        ready = end(order[index - 1]) if index else 0.0
        if kind == Op.F and s:
            ready = max(ready, arrival(s - 1, s, kind, m))
        if kind == Op.B and s < schedule.n_stages - 1:
            ready = max(ready, arrival(s + 1, s, kind, m))
        stage = stages[s]
        return ready + (stage.fwd_s if kind == Op.F else stage.bwd_input_s + stage.bwd_weight_s)

    @functools.cache
    def arrival(a: int, b: int, kind, m: int) -> float:
        earlier = arrival(a, b, kind, m - 1) if m else 0.0
        nbytes = stages[a].act_bytes if kind == Op.F else stages[a].grad_bytes
        source = next(x for x in orders[a] if x.kind == kind and x.micro == m)
        return max(end(source), earlier) + machine.link(a, b).seconds(nbytes)

    return end


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(memory="huge"), st.sampled_from(["per_use", "eager"]))
def test_free_links_are_never_slower(problem, tied):
    costs, n_stages, n_micro = problem
    cuts = tuple(range(1, n_stages))
    ties = stage_ties(costs.ties, cuts)
    program = lower(SCHEDULES["1f1b"](n_stages, n_micro), ties, tied, 4)
    free = dataclasses.replace(costs.cluster, links={"node": FREE, "switch": FREE})
    slow, fast = (simulate(program, stage_costs(costs, cuts), c, ties=ties) for c in (costs.cluster, free))
    assert fast.makespan_s <= slow.makespan_s
    assert fast.peak_bytes == slow.peak_bytes


def test_many_micro_batches_approach_the_bottleneck():
    stages = _edges_free((EVEN, dataclasses.replace(EVEN, fwd_s=2.0), EVEN))
    machine = cluster([1.0] * 3, [HUGE] * 3)
    for m in (8, 64):
        program = lower(SCHEDULES["1f1b"](3, m), (), "per_use", 4)
        assert simulate(program, stages, machine).makespan_s == 3.0 * m + 3.0  # one start-up, two to the end


def test_wrong_sizes_are_refused():
    program = lower(SCHEDULES["1f1b"](2, 2), (), "per_use", 4)
    with pytest.raises(PlanError, match="2 stages on 2 ranks, but costs of 3 stages"):
        simulate(program, (EVEN,) * 3, cluster([1.0] * 3, [HUGE] * 3))
    with pytest.raises(PlanError, match="cluster of 1 ranks"):
        simulate(program, (EVEN,) * 2, cluster([1.0], [HUGE]))


def test_a_gradient_for_another_stage_of_its_rank_stays_until_that_has_read_it():
    """In a V the last rank has stages 1 and 2: from I of stage 2 to W of stage 1, as it waits for nothing."""
    program = lower(build("zb-v", 4, 5, 2), (), "per_use", 4)
    stages = _edges_free((EVEN,) * 4)
    without = (*stages[:2], dataclasses.replace(stages[2], grad_bytes=0), stages[3])
    of_two = cluster([1.0] * 2, [HUGE] * 2)
    more = (
        simulate(program, stages, of_two).memory_bytes[1] - simulate(program, without, of_two).memory_bytes[1]
    )
    there, most = set[int](), 0
    for instr, here in zip(program.instrs(1), more.tolist(), strict=True):
        assert here == 3 * len(there)
        most = max(most, len(there))
        there |= {instr.micro} if (instr.op, instr.stage) in ((Op.I, 2), (Op.B, 2)) else set()
        there -= {instr.micro} if (instr.op, instr.stage) in ((Op.W, 1), (Op.B, 1)) else set()
    assert most > 0
    assert there == set()


def test_what_is_sent_and_kept_for_backward_counts_once() -> None:
    """Of the 4 bytes of its last message stage 0 keeps 3 in its stash anyway, until the backward of that."""
    kept = dataclasses.replace(EVEN, kept_bytes=3)
    program = lower(SCHEDULES["1f1b"](2, 3), (), "per_use", 4)
    of_two = cluster([1.0] * 2, [HUGE] * 2)
    whole, less = (simulate(program, _edges_free((s, EVEN)), of_two).memory_bytes for s in (EVEN, kept))
    ops = program.codes[0][:, 0].tolist()
    first, last = ops.index(Op.SEND_ACT), len(ops) - 1 - ops[::-1].index(Op.B)
    assert (whole[0] - less[0]).tolist() == [3 * (first <= i < last) for i in range(len(ops))]
    assert (whole[1] == less[1]).all()


def test_of_what_the_stage_before_hands_over_on_one_rank_only_what_it_does_not_keep_is_added() -> None:
    """In a V the last rank has stages 1 and 2. Their first micro-batch goes through both."""
    program, of_two = lower(build("zb-v", 4, 5, 2), (), "per_use", 4), cluster([1.0] * 2, [HUGE] * 2)
    first, second, *rest = _edges_free((EVEN,) * 4)
    names = [str(i) for i in program.instrs(1)]
    held = {
        kept: simulate(
            program, (first, dataclasses.replace(second, kept_bytes=kept), *rest), of_two
        ).memory_bytes[1][names.index("2F0")]
        for kept in (0, 1, 4)
    }
    assert {kept: held[0] - b for kept, b in held.items()} == {0: 0, 1: 1, 4: 4}
