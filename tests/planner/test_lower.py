"""What `lower` writes, drawn, and what must hold of every program."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import TIES, on

from mpipipe.errors import PlanError
from mpipipe.planner import SCHEDULES, StageTie, forward_only, lower, max_tag
from mpipipe.planner.lower import at_window
from mpipipe.planner.schedules import PLAIN, in_copies
from mpipipe.values import RECVS, SENDS, Op, Program, Schedule

TIE = (StageTie(0, (2,), 100),)


def text(program: Program) -> str:
    ranks = range(len(program.codes))
    return "\n".join(" ".join(map(str, program.instrs(r))) for r in ranks)


def test_per_use_looks_like_this():
    program = lower(SCHEDULES["1f1b"](3, 2), TIE, "per_use", 4)
    assert text(program).splitlines() == [
        "0F0 0SEND_ACT0->r1 0F1 0SEND_ACT1->r1 0RECV_GRAD0<-r1 0B0 0RECV_GRAD1<-r1 0B1 "
        "0RECV_TIED<-r2 NORM 0STEP 0SEND_COPY->r2",
        "1RECV_ACT0<-r0 1F0 1SEND_ACT0->r2 1RECV_ACT1<-r0 1F1 1SEND_ACT1->r2 1RECV_GRAD0<-r2 1B0 "
        "1SEND_GRAD0->r0 1RECV_GRAD1<-r2 1B1 1SEND_GRAD1->r0 NORM 1STEP",
        "2RECV_ACT0<-r1 2F0 2B0 2SEND_GRAD0->r1 2RECV_ACT1<-r1 2F1 2B1 2SEND_GRAD1->r1 "
        "2SEND_TIED->r0 NORM 2STEP 2RECV_COPY<-r0",
    ]


def test_eager_looks_like_this():
    program = lower(SCHEDULES["gpipe"](3, 2), TIE, "eager", 4)
    first, _, last = text(program).splitlines()
    assert first == (
        "0F0 0SEND_ACT0->r1 0F1 0SEND_ACT1->r1 0RECV_GRAD0<-r1 0RECV_TIED0<-r2 0B0 "
        "0RECV_GRAD1<-r1 0RECV_TIED1<-r2 0B1 NORM 0STEP 0SEND_COPY->r2"
    )
    assert last == (
        "2RECV_ACT0<-r1 2F0 2RECV_ACT1<-r1 2F1 2B0 2SEND_GRAD0->r1 2SEND_TIED0->r0 "
        "2B1 2SEND_GRAD1->r1 2SEND_TIED1->r0 NORM 2STEP 2RECV_COPY<-r0"
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["1f1b", "zb-h1"]), st.integers(1, 4), st.integers(1, 6), st.integers(0, 7),
    st.integers(0, 7), st.data(),
)  # fmt: skip
def test_another_window_is_as_if_lowered_with_it(schedule, p, m, window, other, data):
    ties, tied = on(p, data.draw(TIES)), data.draw(st.sampled_from(["per_use", "eager"]))
    two = in_copies([SCHEDULES[schedule](p, m)] * 2, [range(p), range(p, 2 * p)])
    found, wished = at_window(lower(two, ties, tied, window), other), lower(two, ties, tied, other)
    assert found.hash == wished.hash
    assert found.eager == wished.eager


def test_a_split_backward_sends_its_gradient_before_its_weights():
    F, I, W = Op.F, Op.I, Op.W  # noqa: E741
    rows = [np.array([(k, s, 0) for k in (F, I, W)], np.int32) for s in range(2)]
    program = lower(Schedule((0, 1), 1, tuple(rows)), (StageTie(0, (1,), 8),), "eager", 1)
    assert text(program).splitlines() == [
        "0F0 0SEND_ACT0->r1 0RECV_GRAD0<-r1 0I0 0RECV_TIED0<-r1 0W0 NORM 0STEP 0SEND_COPY->r1",
        "1RECV_ACT0<-r0 1F0 1I0 1SEND_GRAD0->r0 1W0 1SEND_TIED0->r0 NORM 1STEP 1RECV_COPY<-r0",
    ]


def test_evaluation_has_neither_norm_nor_ties():
    program = lower(forward_only(2, 2), TIE, "eager", 4, train=False)
    assert text(program).splitlines() == [
        "0F0 0SEND_ACT0->r1 0F1 0SEND_ACT1->r1",
        "1RECV_ACT0<-r0 1F0 1RECV_ACT1<-r0 1F1",
    ]


def test_one_rank_sends_nothing():
    program = lower(SCHEDULES["1f1b"](1, 2), (), "per_use", 4)
    assert text(program) == "0F0 0B0 0F1 0B1 NORM 0STEP"
    assert max_tag(program) == -1


def test_stages_of_one_rank_send_nothing_to_each_other():
    rows = np.array([(k, s, 0) for k, s in [(Op.F, 0), (Op.F, 1), (Op.B, 1), (Op.B, 0)]], np.int32)
    program = lower(Schedule((0, 0), 1, (rows,)), (StageTie(0, (1,), 8),), "eager", 4)
    assert text(program) == "0F0 1F0 1B0 0B0 NORM 0STEP 1STEP"


def test_ties_between_the_same_stages_share_a_message():
    ties = (StageTie(0, (2,), 100), StageTie(0, (1, 2), 10))
    program = lower(SCHEDULES["1f1b"](3, 1), ties, "per_use", 4)
    assert text(program).count("RECV_TIED") == 2
    assert text(program).count("SEND_COPY") == 2


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(PLAIN), st.integers(1, 7), st.integers(1, 8), TIES,
    st.sampled_from(["per_use", "eager"]), st.integers(1, 5),
)  # fmt: skip
def test_of_every_program(name, n_stages, n_micro, ties, tied, window):
    schedule = SCHEDULES[name](n_stages, n_micro)
    program = lower(schedule, on(n_stages, ties), tied, window)
    messages = {}
    for rank in range(n_stages):
        instrs = program.instrs(rank)
        assert [i[:3] for i in instrs if i.op in (Op.F, Op.B)] == [tuple(a) for a in schedule.actions(rank)]
        assert [i.op for i in instrs].count(Op.NORM) == 1
        recvs = [(i.peer, i.tag) for i in instrs if i.op in RECVS]
        for posted in zip(*(recvs[k:] for k in range(window)), strict=False):
            assert len(set(posted)) == window  # all receives posted at once can be told apart
        for i in instrs:
            if i.op in SENDS or i.op in RECVS:
                ends = (rank, i.peer) if i.op in SENDS else (i.peer, rank)
                messages.setdefault((ends, i.tag, i.micro), []).append(i.op)
    for ops in messages.values():
        assert sorted(op in SENDS for op in ops) == [False, True]


def test_tags_stay_small():
    ties = (StageTie(0, tuple(range(1, 64)), 1),)
    assert max_tag(lower(SCHEDULES["1f1b"](64, 40), ties, "eager", 8)) < 2**15


def test_wrong_arguments_are_refused():
    with pytest.raises(PlanError, match="'lazy'"):
        lower(SCHEDULES["1f1b"](2, 2), (), "lazy", 4)
    with pytest.raises(PlanError, match="-1 is negative"):
        lower(SCHEDULES["1f1b"](2, 2), (), "eager", -1)
