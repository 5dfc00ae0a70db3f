"""The proof of no deadlock against a search of every interleaving."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import TIES, on

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner import SCHEDULES, StageTie, forward_only, lower, prove
from mpipipe.planner.schedules import PLAIN, PLANNED, build, stages_on
from mpipipe.values import RECVS, SENDS, Instr, Op, Program, Schedule


def program(ranks: list[list[Instr]], window: int) -> Program:
    codes = tuple(np.array(instrs, np.int32).reshape(-1, 6) for instrs in ranks)
    return Program(tuple(range(len(ranks))), 1, window, codes)


def send(rank: int, peer: int, value: int) -> Instr:
    return Instr(Op.SEND_ACT, rank, value, peer, peer, value)


def recv(rank: int, peer: int, value: int) -> Instr:
    return Instr(Op.RECV_ACT, rank, value, peer, peer, value)


NORM = Instr(Op.NORM, -1, -1)


def ends(p: Program) -> set[tuple[int, ...]]:
    """Where the ranks can come to stand, over every interleaving; tags name values here."""
    ranks = [p.instrs(r) for r in range(len(p.codes))]

    def other_end(rank: int, i: Instr) -> int:
        return next(k for k, o in enumerate(ranks[i.peer]) if o.tag == i.tag and o.peer == rank)

    def may_pass(at: tuple[int, ...], rank: int) -> bool:
        i = ranks[rank][at[rank]]
        if i.op in RECVS:
            return at[i.peer] >= other_end(rank, i)
        if i.op in SENDS:
            there = other_end(rank, i)
            recvs = [k for k, o in enumerate(ranks[i.peer]) if o.op in RECVS and k >= at[i.peer]]
            return there <= at[i.peer] or there in recvs[: p.receive_window]
        return True

    def following(at: tuple[int, ...]) -> list[tuple[int, ...]]:
        going = [r for r in range(len(ranks)) if at[r] < len(ranks[r])]
        if len(going) == len(ranks) and all(ranks[r][at[r]].op == Op.NORM for r in going):
            return [tuple(a + 1 for a in at)]
        return [
            (*at[:r], at[r] + 1, *at[r + 1 :])
            for r in going
            if ranks[r][at[r]].op != Op.NORM and may_pass(at, r)
        ]

    seen, stack, final = set(), [(0,) * len(ranks)], set()
    while stack:
        at = stack.pop()
        if at not in seen:
            seen.add(at)
            stack += following(at)
            final |= set() if following(at) else {at}
    return final


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Random messages among three ranks, the ends in any order on each, and perhaps a NORM."""
    ways = draw(st.lists(st.sampled_from(list(itertools.permutations(range(3), 2))), max_size=6))
    ranks: list[list[Instr]] = [[], [], []]
    for value, (a, b) in enumerate(ways):
        ranks[a].append(send(a, b, value))
        ranks[b].append(recv(b, a, value))
    ranks = [list(draw(st.permutations(instrs))) for instrs in ranks]
    if draw(st.booleans()):
        for instrs in ranks:
            instrs.insert(draw(st.integers(0, len(instrs))), NORM)
    return program(ranks, draw(st.integers(0, 3)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(programs())
def test_agrees_with_every_interleaving(p):
    final = ends(p)
    assert len(final) == 1  # the order in which ranks are tried does not matter
    if final == {tuple(map(len, p.codes))}:
        prove(p)
    else:
        with pytest.raises(DeadlockError) as caught:
            prove(p)
        (stuck,) = final
        for rank, at in enumerate(stuck):
            line = f"rank {rank} at {p.instrs(rank)[at]} (instruction {at}" if at < len(p.codes[rank]) else ""
            assert line in str(caught.value)


def test_two_ranks_that_send_first():
    ranks = [[send(0, 1, 0), recv(0, 1, 1)], [send(1, 0, 1), recv(1, 0, 0)]]
    prove(program(ranks, 1))
    with pytest.raises(DeadlockError) as caught:
        prove(program(ranks, 0))
    assert str(caught.value) == (
        "deadlock: 2 of 2 ranks are blocked with receive_window 0 and no buffering\n"
        "  rank 0 at 0SEND_ACT0->r1 (instruction 0 of 2) waits for rank 1 to post its instruction 1; "
        "it is at instruction 0\n"
        "  rank 1 at 1SEND_ACT1->r0 (instruction 0 of 2) waits for rank 0 to post its instruction 1; "
        "it is at instruction 0\n"
        "  try a larger receive_window; if it stays, the order of the schedule is wrong"
    )


def test_a_window_that_is_one_too_small():
    """Rank 0 wants the second message first; both are sent before it goes on."""
    ranks = [[recv(0, 1, 1), recv(0, 1, 0)], [send(1, 0, 0), send(1, 0, 1)]]
    prove(program(ranks, 2))
    with pytest.raises(DeadlockError, match="rank 0 to post its instruction 1"):
        prove(program(ranks, 1))


def test_no_window_helps_against_a_circle_of_receives():
    ranks = [[recv(0, 1, 1), send(0, 1, 0)], [recv(1, 0, 0), send(1, 0, 1)]]
    with pytest.raises(DeadlockError, match="to reach its instruction 1"):
        prove(program(ranks, 9))


def test_what_copies_send_each_other_blocks_nothing_and_what_they_await_does():
    """Each begins another exchange first, as with unlike shares of the micro-batches."""

    def exchanged(peer: int, *order: tuple[Op, int]) -> list[Instr]:
        return [Instr(op, stage, -1, stage, peer, stage) for op, stage in order]

    to, of = Op.SEND_SHARD, Op.RECV_SHARD
    prove(program([exchanged(1, (to, 0), (to, 1), (of, 0), (of, 1)),
                   exchanged(0, (to, 1), (to, 0), (of, 0), (of, 1))], 0))  # fmt: skip
    with pytest.raises(DeadlockError, match="to reach its instruction 1"):
        prove(program([exchanged(1, (of, 1), (to, 0), (to, 1), (of, 0)),
                       exchanged(0, (of, 0), (to, 1), (to, 0), (of, 1))], 0))  # fmt: skip


def test_a_rank_that_never_comes_to_the_norm():
    with pytest.raises(DeadlockError, match=r"waits for ranks \[1\], which are not at NORM"):
        prove(program([[NORM], []], 1))


def test_1f1b_needs_receives_posted_ahead():
    """Its neighbours send to each other at once: the well-known deadlock of blocking sends."""
    for name, ok in (("1f1b", False), ("gpipe", True)):
        p = lower(SCHEDULES[name](2, 2), (), "per_use", 0)
        if ok:
            prove(p)
        else:
            with pytest.raises(DeadlockError, match=r"rank 0 at 0SEND_ACT1.*\n.*rank 1 at 1SEND_GRAD0"):
                prove(p)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.slow
def test_every_schedule_is_free_of_deadlock(name):
    for n_stages, n_micro, window in itertools.product(range(1, 8), range(1, 9), [1, 2, 4]):
        prove(lower(SCHEDULES[name](n_stages, n_micro), (), "per_use", window))
        prove(lower(forward_only(n_stages, n_micro), (), "per_use", window, train=False))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in PLAIN])
@pytest.mark.slow
def test_every_other_schedule_ends_with_some_window_and_all_larger_ones(name):
    """So that the search may find the least one by halving."""
    for n_ranks, n_micro in itertools.product(range(1, 6), range(1, 9)):
        try:
            order = build(name, stages_on(name, n_ranks), n_micro, n_ranks)
        except PlanError:  # interleaved wants a multiple of the ranks
            assert name == "interleaved"
            assert n_micro % n_ranks
            continue
        window = next(w for w in range(1, 4 * order.n_stages + 5) if proved(order, w))
        assert all(proved(order, w) for w in range(window, window + 6))
        assert window <= (4 * order.n_stages if name in PLANNED else max(2, 2 * n_ranks - 2))


def proved(order: Schedule, window: int) -> bool:
    try:
        prove(lower(order, (), "per_use", window))
    except DeadlockError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PLAIN),
    st.integers(2, 7),
    st.integers(1, 8),
    TIES,
    st.sampled_from(["per_use", "eager"]),
    st.integers(1, 4),
)
@pytest.mark.slow
def test_no_ties_lead_to_deadlock(name, n_stages, n_micro, ties, tied, window):
    prove(lower(SCHEDULES[name](n_stages, n_micro), on(n_stages, ties), tied, window))


def test_a_user_of_two_owners_serves_the_later_stage_first():
    """The first owner waits for the second one's gradient, so it must not be served first."""
    program = lower(SCHEDULES["1f1b"](3, 2), (StageTie(0, (2,), 1), StageTie(1, (2,), 1)), "eager", 1)
    owners = [i.other for i in program.instrs(2) if i.op == Op.SEND_TIED]
    assert owners == [1, 0, 1, 0]
    prove(program)


def without(p: Program, rank: int, op: Op) -> Program:
    """The program less the first instruction of that kind on that rank."""
    index = int(np.flatnonzero(p.codes[rank][:, 0] == op)[0])
    codes = list(p.codes)
    codes[rank] = np.delete(codes[rank], index, axis=0)
    return dataclasses.replace(p, codes=tuple(codes))


def test_lost_ends_are_found():
    p = lower(SCHEDULES["1f1b"](2, 1), (), "per_use", 4)
    with pytest.raises(DeadlockError, match=r"rank 0 at 0SEND_ACT0->r1 .*: rank 1 has no RECV for it"):
        prove(without(p, 1, Op.RECV_ACT))
    with pytest.raises(DeadlockError, match=r"rank 0 at 0RECV_GRAD0<-r1 .*: rank 1 has no SEND for it"):
        prove(without(p, 1, Op.SEND_GRAD))


def test_a_tag_that_names_two_values_is_found():
    p = lower(SCHEDULES["1f1b"](2, 2), (), "per_use", 4)
    codes = [c.copy() for c in p.codes]
    swap = np.flatnonzero(codes[1][:, 0] == Op.RECV_ACT)
    codes[1][swap, 2] = codes[1][swap[::-1], 2]  # micro-batches, not tags
    with pytest.raises(DeadlockError, match=r"0SEND_ACT0->r1 .* would be received as .* 1RECV_ACT1"):
        prove(dataclasses.replace(p, codes=tuple(codes)))


def test_the_proof_is_linear():
    """A chain of 200 stages with 50 micro-batches: a quadratic search would take minutes."""
    prove(lower(SCHEDULES["1f1b"](200, 50), (), "per_use", 2))
