"""The schedules beside 1F1B and GPipe: the papers' figures at unit costs, and what holds for all of them."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from planner_cases import FREE, HUGE, cluster

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner import SCHEDULES, StageTie, check, forward_only, lower, prove, simulate
from mpipipe.planner.schedules import (
    PLANNED,
    build,
    check_ends,
    in_copies,
    live_micro_batches,
    live_stages,
    stages_on,
    zb_planned,
)
from mpipipe.planner.schedules.fill import Work, filled, seconds, units
from mpipipe.planner.schedules.orders import v_shaped, wrapped
from mpipipe.planner.schedules.v_shape import _without_clashes
from mpipipe.values import RECVS, SENDS, Action, Op, Schedule, StageCost, Timeline

RANKS, MICROS = st.integers(1, 6), st.integers(1, 16)
PER_RANK = {
    "1f1b": 1,
    "gpipe": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-planned": 1,
    "zb-v": 2,
    "v-half": 2,
    "v-planned": 2,
    "interleaved-planned": 2,
}
ENOUGH = 64  # receives posted ahead, more than any of these sizes needs


def made(name: str, n_ranks: int, n_micro: int) -> Schedule:
    if name == "interleaved":
        n_micro = n_ranks * -(-n_micro // n_ranks)
    return SCHEDULES[name](PER_RANK[name] * n_ranks, n_micro)


def timed(schedule: Schedule, costs: tuple[StageCost, ...] | None = None) -> Timeline:
    """At unit costs, of F, B, I and W alone: the update would make all wait for the last rank."""
    n_ranks = len(schedule.codes)
    stages = costs or (StageCost(1.0, 1.0, 1.0, 0.0, 0, 1, 0, 0, 0),) * schedule.n_stages
    program = lower(schedule, (), "per_use", 4, train=False)
    return simulate(program, stages, cluster([1.0] * n_ranks, [HUGE] * n_ranks, FREE))


def text(schedule: Schedule) -> str:
    ranks = range(len(schedule.codes))
    return "\n".join(" ".join(map(str, schedule.actions(rank))) for rank in ranks)


def in_two(action: Action) -> list[Action]:
    whole = action.kind == Op.B and action.stage == 0
    return [action._replace(kind=kind) for kind in (Op.I, Op.W)] if whole else [action]


@pytest.mark.parametrize("name", SCHEDULES)
@given(RANKS, MICROS)
@settings(max_examples=10)
def test_every_action_is_there_once_in_an_order_that_ends(name, n_ranks, n_micro):
    schedule = made(name, n_ranks, n_micro)
    check(schedule)
    check_ends(schedule)
    prove(lower(schedule, (), "per_use", ENOUGH))
    found = [action for rank in range(n_ranks) for action in schedule.actions(rank)]
    if name in PLANNED:  # of the first stage, backwards are in one where they may be
        found = [other for action in found for other in in_two(action)]
    kinds = "FB" if name in ("1f1b", "gpipe", "interleaved") else "FIW"
    wanted = {
        Action(Op[k], s, m) for k in kinds for s in range(schedule.n_stages) for m in range(schedule.n_micro)
    }
    assert len(found) == len(wanted)
    assert set(found) == wanted


@given(RANKS, MICROS)
@pytest.mark.slow
def test_zb_h1_has_a_third_of_the_idle_time_of_1f1b(p, m):
    idle = {
        name: timed(made(name, p, m + p - 1)).makespan_s - 3 * (m + p - 1) for name in ("1f1b", "zb-h1")
    }  # from as many micro-batches as ranks on
    assert idle == {"1f1b": 3 * (p - 1), "zb-h1": p - 1}
    assert live_micro_batches(made("zb-h1", p, m)) == (min(p, m),) * p


@pytest.mark.slow
@given(RANKS, MICROS)
def test_zb_h2_leaves_no_rank_waiting(p, m):
    m += 2 * p - 2  # from 2 p - 1 micro-batches on
    timeline = timed(made("zb-h2", p, m))
    assert timeline.bubble_rank == pytest.approx(0.0, abs=1e-12)
    assert timeline.makespan_s == 3 * m + p - 1
    assert live_micro_batches(made("zb-h2", p, m)) == (2 * p - 1,) * p


def most_waiting(schedule: Schedule) -> list[int]:
    """By rank, of how many inputs' gradients the weights' ones wait at most."""
    orders = map(schedule.actions, range(len(schedule.codes)))
    steps = [[(a.kind == Op.I) - (a.kind == Op.W) for a in order] for order in orders]
    return [max(itertools.accumulate(of_rank)) for of_rank in steps]


@given(RANKS, MICROS)
@settings(max_examples=10)
def test_weight_gradients_that_wait_are_bounded_whatever_the_number_of_micro_batches(p, m):
    assert most_waiting(made("zb-h1", p, m)) == [min(s + 1, m) for s in range(p)]
    assert most_waiting(made("zb-h2", p, m)) == [min(2 * s + 1, m) for s in range(p)]
    for name in ("zb-v", "v-half", *PLANNED):
        assert max(most_waiting(made(name, p, m + 32))) <= 2 * p


@given(RANKS, MICROS)
@settings(max_examples=10)
def test_zb_v_leaves_no_rank_waiting_with_the_memory_of_1f1b(p, m):
    few = made("zb-v", p, m)
    assert max(live_stages(few)) == 2 * min(p, m)  # of half a rank's layers each
    m += 2 * p - 2  # from 2 p - 1 micro-batches on
    timeline = timed(made("zb-v", p, m))
    assert timeline.bubble_rank == pytest.approx(0.0, abs=1e-12)
    assert timeline.makespan_s == 6 * m + p - 1


@given(st.integers(3, 9), MICROS)
@settings(max_examples=10)
def test_v_half_keeps_half_of_1f1b_and_waits_half_as_long(p, m):
    m += p
    schedule = made("v-half", p, m)
    assert live_stages(schedule) == (p + 2 - p % 2,) * p  # 1f1b: 2 p of half a rank's layers
    assert timed(schedule).makespan_s == 6 * m + 3 * p - 4  # 1f1b: 6 m + 6 (p - 1)


def test_the_turns_of_v_half_can_be_put_off_for_any_number_of_ranks():
    assert all(len(_without_clashes(p)) == p for p in range(1, 60))


@pytest.mark.slow
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(p, v, rounds):
    m = p * rounds
    schedule = build("interleaved", v * p, m, p)
    check(schedule)
    timeline = timed(schedule)
    assert timeline.makespan_s == 3 * (v * m + p - 1)
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert live_stages(schedule) == tuple(min(2 * (p - 1 - r) + (v - 1) * p + 1, v * m) for r in range(p))


def test_interleaved_with_one_stage_per_rank_takes_as_long_as_1f1b():
    assert timed(build("interleaved", 4, 8, 4)).makespan_s == timed(made("1f1b", 4, 8)).makespan_s


@given(RANKS, MICROS)
@settings(max_examples=10)
def test_forwards_alone_wait_for_the_first_one_only(p, m):
    stages = (StageCost(1.0, 1.0, 1.0, 0.0, 0, 1, 0, 0, 0),) * p
    program = lower(forward_only(p, m), (), "per_use", ENOUGH, train=False)
    timeline = simulate(program, stages, cluster([1.0] * p, [HUGE] * p, FREE))
    assert timeline.makespan_s == m + p - 1
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@given(RANKS, MICROS)
@settings(max_examples=10)
def test_backwards_in_two_shorten_the_interleaved_order(p, m):
    m = p * -(-m // p)
    in_two, whole = (timed(made(name, p, m)).makespan_s for name in ("interleaved-planned", "interleaved"))
    assert 6 * m + p - 1 <= in_two <= whole


def test_they_look_like_their_pictures():
    assert text(made("zb-h1", 2, 3)) == (
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n"
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    )  # fmt: skip
    assert text(made("interleaved", 2, 2)) == (
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n"
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )  # fmt: skip
    assert text(made("zb-v", 2, 3)) == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2\n"
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("1f1b", (4, 8, 2), "'1f1b' has one stage per rank, not 4 stages on 2 ranks"),
        ("zb-h1", (4, 8, 2), "'zb-h1' has one stage per rank"),
        ("zb-v", (3, 8), "'zb-v' has two stages per rank, not 3 stages; use 4"),
        ("v-half", (8, 8, 2), "'v-half' has two stages per rank, not 8 stages on 2 ranks; use 4"),
        ("interleaved", (4, 7, 2), "7 micro-batches on 2 ranks; .* use 8"),
        ("interleaved", (5, 8, 2), "5 stages on 2 ranks; give each rank equally many, such as 6"),
        ("zb-3", (4, 8), "'zb-3' is not known; choose one of 1f1b"),
    ],
)
def test_numbers_that_do_not_go_are_refused(name, numbers, words):
    with pytest.raises(PlanError, match=words):
        build(name, *numbers)


# -- several stages per rank through the rest of the planner ---------------------------------------


@given(st.sampled_from(["interleaved", "zb-h1", "zb-v", "v-half"]), st.integers(2, 4), st.integers(1, 6))
@settings(max_examples=10)
def test_messages_pass_between_ranks_alone_and_the_memory_adds_up(name, p, m):
    schedule = made(name, p, m)
    program = lower(schedule, (StageTie(0, (schedule.n_stages - 1,), 5),), "per_use", ENOUGH)
    prove(program)
    home, peaks = schedule.rank_of_stage, []
    for rank in range(p):
        instrs = program.instrs(rank)
        assert all(i.peer != rank == home[i.stage] for i in instrs if i.op in SENDS or i.op in RECVS)
        done = [i[:3] for i in instrs if i.op <= Op.W]
        assert done == [tuple(action) for action in schedule.actions(rank)]
        live = late = most = most_bytes = 0
        for kind, _, _ in done:
            live += kind == Op.F
            most = max(most, live)
            most_bytes = max(most_bytes, 10 * (live - late) + 4 * late)
            live -= kind in (Op.B, Op.W)
            late += (kind == Op.I) - (kind == Op.W)
        peaks.append((most, most_bytes))
    crossing = sum(a != b for a, b in itertools.pairwise(home))
    sent = sum(i.op in (Op.SEND_ACT, Op.SEND_GRAD) for r in range(p) for i in program.instrs(r))
    assert sent == 2 * crossing * schedule.n_micro
    stages = (StageCost(1.0, 1.0, 1.0, 0.0, 1000, 10, 100, 0, 0, waiting_bytes=4),) * schedule.n_stages
    timeline = simulate(program, stages, cluster([1.0] * p, [HUGE] * p))
    own = schedule.n_stages // p
    assert list(timeline.peak_bytes) == [1000 * own + 100 + most_bytes for _, most_bytes in peaks]
    assert live_stages(schedule) == tuple(most for most, _ in peaks)


@given(st.sampled_from(list(PER_RANK)), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
@example("v-planned", 3, 4, 0)  # has backwards of both kinds
@settings(max_examples=10)
def test_the_simulation_is_the_longest_path(name, p, m, seed):
    schedule, rng = made(name, p, m), random.Random(seed)
    stages = tuple(
        StageCost(rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4), 0.0, 0, 0, 0, 0, 0)
        for _ in range(schedule.n_stages)
    )
    ends: dict[Action, float] = {}
    last = [0.0] * p
    rows = [list(schedule.actions(rank)) for rank in range(p)]
    whole = {action for row in rows for action in row if action.kind == Op.B}
    while any(rows):  # again and again over all ranks
        left = sum(map(len, rows))
        for rank, row in enumerate(rows):
            while row:
                kind, s, micro = row[0]
                before = [Action(Op.F, s - 1, micro)] if kind == Op.F and s else []
                if kind in (Op.B, Op.I) and s + 1 < schedule.n_stages:
                    after = Action(Op.B, s + 1, micro)
                    before.append(after if after in whole else after._replace(kind=Op.I))
                if any(action not in ends for action in before):
                    break
                cost = stages[s]
                took = {Op.F: cost.fwd_s, Op.I: cost.bwd_input_s, Op.W: cost.bwd_weight_s}
                took[Op.B] = cost.bwd_input_s + cost.bwd_weight_s
                ends[row.pop(0)] = last[rank] = max([last[rank], *(ends[a] for a in before)]) + took[kind]
        assert sum(map(len, rows)) < left, "none can go on"
    assert timed(schedule, stages).makespan_s == max(last)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_forward_only_with_several_stages_per_rank(p, v, m, is_v):
    homes = v_shaped(p) if is_v else wrapped(v * p, p)
    schedule = forward_only(len(homes), m, homes)
    check(schedule, train=False)
    prove(lower(schedule, (), "per_use", 2, train=False))


def test_stages_go_where_a_layout_has_them():
    schedule = made("zb-v", 2, 4)
    moved = in_copies([schedule], [(1, 0, 0, 1)])
    check(moved)
    assert np.array_equal(moved.codes[1], schedule.codes[0])
    with pytest.raises(PlanError, match="the same stages must be together"):
        in_copies([schedule], [(0, 1, 0, 1)])


# -- planned -----------------------------------------------------------------------------------------

SECONDS = st.integers(1, 5).map(float)
COSTS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=5)


def of_costs(costs: list[tuple[float, float, float]]) -> list[StageCost]:
    return [StageCost(f, i, w, 0.0, 100, 10, 5, 0, 0) for f, i, w in costs]


@given(COSTS, st.integers(1, 10), st.data())
@settings(max_examples=30)
@pytest.mark.slow
def test_the_planned_one_keeps_to_its_memory_and_is_no_longer_than_those_made_by_hand(costs, m, data):
    p, stages = len(costs), of_costs(costs)
    room = [data.draw(st.integers(1, 2 * p)) for _ in range(p)]
    planned = zb_planned(stages, m, [105 + 10 * most for most in room])
    check(planned)
    prove(lower(planned, (), "per_use", ENOUGH))
    assert all(live <= most for live, most in zip(live_stages(planned), room, strict=True))
    roomy = zb_planned(stages, m, [105 + 20 * p] * p)
    by_hand = [timed(made(name, p, m), tuple(stages)).makespan_s for name in ("zb-h1", "zb-h2")]
    assert timed(roomy, tuple(stages)).makespan_s <= min(by_hand)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"memory_bytes": [1300]}, "memory_bytes of 1 ranks for 2"),
        ({"rank_of_stage": [0, -1]}, r"rank_of_stage = \[0, -1\] for 2 stages"),
        ({"rank_of_stage": [0, 1, 1]}, "for 2 stages; give each a rank"),
        ({"act_s": [1.0]}, "act_s of 1 stages for 2"),
        ({"tied": [(7, 0, 0.0)]}, "tied: stages 7 and 0 of 2"),
        ({"n_micro": 0}, "2 stages and 0 micro-batches"),
    ],
)
def test_what_does_not_fit_each_other_is_refused_before_compiled_code_reads_it(how, words):
    with pytest.raises(PlanError, match=words):
        zb_planned(of_costs([(1.0, 1.0, 1.0)] * 2), **{"n_micro": 4, "memory_bytes": [1300, 1300], **how})


BYTES = st.sampled_from([0, 1, 10, 100])


PLACED = {"one": lambda n: range(n), "v": lambda n: v_shaped(n // 2), "wrapped": lambda n: wrapped(n, n // 2)}


@pytest.mark.slow
@pytest.mark.parametrize("placed", PLACED)
@given(
    st.lists(st.tuples(BYTES, BYTES, BYTES, BYTES, BYTES), min_size=2, max_size=6), MICROS,
    st.integers(500, 2500), st.sampled_from([1, 4]), BYTES, st.sampled_from([1, 2, 8]),
)  # fmt: skip
@example(
    [(100, 10, 0, 100, 0)] * 6, 16, 1100, 1, 0, 1
)  # a receive buffer that waits, though nothing needs it
@settings(max_examples=30)
def test_the_planned_one_fits_into_the_memory_that_the_simulation_counts(
    placed, sizes, m, limit, window, at_once, blocks
):
    """Whatever is received, whatever waits for its W, and whatever I begins of a later block."""
    sizes = sizes[: len(sizes) // 2 * 2]
    n, acts = len(sizes), [act for act, *_ in sizes[:-1]]
    on = tuple(PLACED[placed](n))
    p = max(on) + 1
    stages = []
    for s, (_, grad, stash, waiting, received) in enumerate(sizes):
        act_in = acts[s - 1] if s else 0
        of_act = min(received, act_in)  # of what waits
        stages.append(
            StageCost(
                1.0, 1.0, 1.0, 0.0, 100, act_in + stash, 5, [*acts, 0][s], grad if s else 0,
                waiting_bytes=waiting + of_act, waiting_received_bytes=of_act, in_two_bytes=waiting,
                at_once_bytes=at_once, blocks=blocks,
            )
        )  # fmt: skip
    try:
        planned = zb_planned(stages, m, [limit] * p, receive_window=window, rank_of_stage=on)
    except PlanError:
        assume(False)
    check(planned)
    timeline = simulate(lower(planned, (), "per_use", window), stages, cluster([1.0] * p, [HUGE] * p))
    assert max(timeline.peak_bytes) <= limit


@given(RANKS, MICROS)
@settings(max_examples=10)
def test_at_unit_costs_the_planned_one_has_the_idle_time_of_the_papers(p, m):
    m += 2 * p - 2
    stages = of_costs([(1.0, 1.0, 1.0)] * p)
    for most in (p, 2 * p - 1):
        planned = zb_planned(stages, m, [105 + 10 * most] * p)
        assert timed(planned, tuple(stages)).makespan_s == 3 * m + p - 1


@pytest.mark.slow
@pytest.mark.parametrize("placed", ["v", "wrapped"])
@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=2, max_size=8), st.integers(1, 10),
    st.integers(2, 20), st.sampled_from([0.0, 0.3]),
)  # fmt: skip
@settings(max_examples=20)
def test_two_stages_on_each_rank_keep_to_their_room_and_end(placed, costs, m, most, split):
    stages = [dataclasses.replace(stage, split_s=split) for stage in of_costs(costs[: len(costs) // 2 * 2])]
    on = tuple(PLACED[placed](len(stages)))
    p = max(on) + 1
    planned = zb_planned(stages, m, [205 + 10 * most] * p, rank_of_stage=on)
    check(planned)
    check_ends(planned)
    assert planned.rank_of_stage == on
    assert max(live_stages(planned)) <= most
    work = np.bincount(on, [sum(seconds) for seconds in costs[: len(on)]])
    assert timed(planned, tuple(stages)).makespan_s >= m * max(work) - 1e-9


@pytest.mark.slow
@given(RANKS, MICROS)
@example(5, 6)  # by hand it is shorter than by any policy
@settings(max_examples=10)
def test_at_unit_costs_the_v_is_as_long_as_by_hand_with_its_memory(p, m):
    planned = made("v-planned", p, m)
    assert max(live_stages(planned)) <= 2 * p
    assert timed(planned).makespan_s <= timed(made("zb-v", p, m)).makespan_s


def test_the_planned_one_counts_messages_and_refuses_what_holds_no_micro_batch():
    stages = of_costs([(1.0, 1.0, 1.0)] * 2)
    far = zb_planned(stages, 8, [1000, 1000], act_s=[3.0, 0.0], grad_s=[0.0, 3.0])
    kinds = [action.kind for action in far.actions(0)]
    assert kinds[:8] == [Op.F] * 8  # 1 + 3 + 1 + 1 + 3 units until the first gradient is there
    with pytest.raises(PlanError, match="rank 1 has 114 bytes, and needs 115 bytes for one micro-batch"):
        zb_planned(stages, 8, [1000, 114])


def test_the_planned_one_is_for_any_placement_and_counts_no_message_that_is_not():
    stages = [dataclasses.replace(stage, act_bytes=50, grad_bytes=50) for stage in of_costs([(1.0,) * 3] * 4)]
    for on in ((0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 0, 0)):
        check_ends(zb_planned(stages, 1, [10_000] * 2, rank_of_stage=on))
    roomy = [dataclasses.replace(stage, stash_bytes=0, act_bytes=0, grad_bytes=0) for stage in stages[:2]]
    far = zb_planned(roomy, 64, [1000, 1000], act_s=[30.0, 0.0], grad_s=[0.0, 30.0])
    assert live_stages(far)[0] >= 62  # those on their way there and back: no bytes are no limit
    one = zb_planned(stages[:2], 1, [105 + 10 + 200] * 2)  # a buffer for one message, not for four
    check_ends(one)


def test_seconds_are_those_of_the_simulation():
    schedule = made("zb-v", 3, 5)
    assert seconds(schedule, units(6)) == timed(schedule).makespan_s


def test_filling_needs_room_for_the_order():
    skeleton = [[Action(Op.F, 0, 0), Action(Op.F, 0, 1), Action(Op.I, 0, 0), Action(Op.I, 0, 1)]]
    with pytest.raises(PlanError, match="rank 0 has room for 1 stashes, which is too little"):
        filled((0,), 2, skeleton, [1], Work((1.0,), (1.0,), (1.0,), (2.0,), (0.0,), (0.0,)))


# -- how many stages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PER_RANK)
def test_a_schedule_knows_how_many_stages_it_has_on_some_ranks(name):
    for n_ranks in (1, 2, 5):
        n_stages = stages_on(name, n_ranks)
        assert n_stages == PER_RANK[name] * n_ranks
        assert len(build(name, n_stages, 2 * n_ranks, n_ranks).codes) == n_ranks


def test_a_circle_of_waits_is_shown():
    good = made("1f1b", 2, 2)
    rows = [(Op.F, 0, 0), (Op.B, 0, 0), (Op.F, 0, 1), (Op.B, 0, 1)]
    late = [(Op.F, 1, 0), (Op.F, 1, 1), (Op.B, 1, 0), (Op.B, 1, 1)]
    codes = (np.array(rows, np.int32), np.array(late, np.int32))
    circle = dataclasses.replace(good, codes=codes)
    check(circle)
    with pytest.raises(DeadlockError, match="rank 0 for 1B0, rank 1 for 0F1") as caught:
        check_ends(circle)
    assert "rank 0   0F0  [0B0]  0F1   0B1   <-- here" in str(caught.value)
    assert "rank 1   1F0  [1F1]  1B0   1B1   <-- here" in str(caught.value)
