"""Unlike numbers of copies of the stages: which promise most, what their ranks do, what they take."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
from planner_cases import all_cuts, cluster, group, uniform

from mpipipe.errors import PlanError
from mpipipe.planner import make_plan, program_for
from mpipipe.planner.asked import Asked, copies_of
from mpipipe.planner.copies import check_copies, legal_copies, shape_of
from mpipipe.planner.joint import search
from mpipipe.planner.prediction import expect_plan
from mpipipe.planner.schedules import PLANNED, SCHEDULES, room_for, stages_on
from mpipipe.planner.search import plan_of
from mpipipe.planner.uneven import balanced, promising_shapes
from mpipipe.values import Costs, Layout, Numerics, Op, Plan, Program, StageCost, Tie


def numerics(n_micro: int, blocks: int) -> Numerics:
    return Numerics(4 * n_micro, 4, n_micro, blocks, 1, "torch", "mkl", "fp32", "per_use", {}, "2", "x", 0)


def fast(n_micro: int) -> Numerics:
    return dataclasses.replace(numerics(n_micro, 1), reduce="fast")


def names(costs: Costs) -> list[str]:
    return [g.name for g in costs.groups]


def chain(seconds: list[float], n_ranks: int, **nbytes: int) -> Costs:
    costs = uniform(len(seconds), n_ranks, **nbytes)
    groups = tuple(group(f"g{i}", s / 3, s / 3, s / 3, **nbytes) for i, s in enumerate(seconds))
    return dataclasses.replace(costs, groups=groups)


def slowest_s(seconds: list[float], cuts: tuple[int, ...], shape: tuple[int, ...]) -> float:
    edges = itertools.pairwise((0, *cuts, len(seconds)))
    return max(sum(seconds[a:b]) / n for (a, b), n in zip(edges, shape, strict=True))


@pytest.mark.parametrize("how", [numerics(8, 4), fast(8)], ids=["exact", "fast"])
@pytest.mark.slow
def test_the_best_cuts_and_copies_are_those_of_brute_force(how: Numerics) -> None:
    draw, legal = np.random.default_rng(0), legal_copies(how)
    for _ in range(40):
        seconds, n_ranks = draw.integers(1, 9, 6).tolist(), int(draw.integers(3, 7))
        costs = chain(seconds, n_ranks)
        for n_stages in (2, 3):
            shapes = [s for s in itertools.product(legal, repeat=n_stages) if sum(s) == n_ranks]
            for shape in shapes:
                best = min(slowest_s(seconds, cuts, shape) for cuts in all_cuts(6, n_stages))
                assert slowest_s(seconds, balanced(costs, shape)[0], shape) == pytest.approx(best)
                assert balanced(costs, shape)[1] == pytest.approx(best)
        found = promising_shapes(costs, how, n_ranks)
        every = [
            s for p in (2, 3, 4, 5) for s in itertools.product(legal, repeat=p)
            if sum(s) == n_ranks and len({*s}) > 1 and math.lcm(*s) <= 8
        ]  # fmt: skip

        def estimate(shape: tuple[int, ...], seconds: list[float] = seconds) -> float:
            least = min(slowest_s(seconds, cuts, shape) for cuts in all_cuts(6, len(shape)))
            return (8 + (len(shape) - 1) * math.lcm(*shape)) * least

        assert (not every) == (not found)
        if every:
            assert estimate(found[0]) == pytest.approx(min(map(estimate, every)))


def test_ranks_take_turns_between_the_copies_that_they_serve() -> None:
    costs = uniform(2, 3)
    layout = Layout(("g1",), ((0, 1), (2,)), "1f1b", 4)
    program = program_for(layout, numerics(4, 2), (), names(costs))
    texts = [" ".join(map(str, program.instrs(rank))) for rank in range(3)]
    assert texts[1] == (
        "0F2 0SEND_ACT2->r2 0F3 0SEND_ACT3->r2 0RECV_GRAD2<-r2 0B2 0RECV_GRAD3<-r2 0B3 "
        "0SEND_SHARD->r0 0RECV_SHARD<-r0 NORM 0STEP 0SEND_UPDATE->r0 0RECV_UPDATE<-r0"
    )
    assert texts[2] == (
        "1RECV_ACT0<-r0 1F0 1RECV_ACT2<-r1 1F2 1B0 1SEND_GRAD0->r0 1B2 1SEND_GRAD2->r1 "
        "1RECV_ACT1<-r0 1F1 1RECV_ACT3<-r1 1F3 1B1 1SEND_GRAD1->r0 1B3 1SEND_GRAD3->r1 NORM 1STEP"
    )
    assert [list(program.share_on(rank)) for rank in range(3)] == [[0, 1], [2, 3], [0, 1, 2, 3]]


def test_ranks_do_first_what_comes_first() -> None:
    """Ranks 0 to 2 do two micro-batches each, and ranks 3 and 4 three of those: the first of each before the
    second of any."""
    program = program_for(Layout(("g1",), ((0, 1, 2), (3, 4)), "1f1b", 4), fast(6), (), ["g0", "g1"])
    forwards = [codes[codes[:, 0] == Op.F, 2].tolist() for codes in program.codes]
    assert forwards == [[0, 1], [3, 2], [4, 5], [0, 2, 1], [4, 3, 5]]


def test_unlike_numbers_are_taken_where_they_are_faster() -> None:
    """A stage of two thirds on two ranks; three equal stages are not to be had, and three copies have
    no blocks."""
    costs = chain([8.0, 4.0], 3)
    asked = Asked(numerics(16, 2), (16,), ("1f1b",), 4, 3, uneven=True)
    found = search(asked, lambda _: costs)
    assert found.best.copies == (2, 1)
    assert found.plan.layout.ranks == ((0, 1), (2,))
    assert found.plan.prediction.step_s == pytest.approx(16 * 4.0 + 8.0)  # and how the pipeline fills
    assert found.plan.prediction.lower_bound_s <= found.plan.prediction.step_s
    assert found.bound_s <= found.best.step_s
    layout = found.plan.layout
    assert plan_of(costs, numerics(16, 2), layout).prediction == found.plan.prediction


def test_numbers_that_do_not_divide_each_other_are_taken_where_they_are_faster() -> None:
    """Stages of three and two fifths on five ranks, in six ways of five micro-batches."""
    costs = chain([6.0, 4.0], 5)
    asked = Asked(fast(30), (30,), ("1f1b",), 4, 5, uneven=True)
    found = search(asked, lambda _: costs)
    assert found.best.copies == (3, 2)
    assert found.plan.layout.n_copies == 6
    assert 30 * 2.0 < found.plan.prediction.step_s <= (30 + 6) * 2.0  # and how the pipeline fills
    assert found.bound_s <= found.best.step_s
    layout = found.plan.layout
    assert plan_of(costs, fast(30), layout).prediction == found.plan.prediction


SHAPES = [(2, 1), (1, 2), (4, 2), (1, 4, 2), (2, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.slow
def test_an_order_that_follows_from_costs_is_no_longer_than_those_by_hand(shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(1)
    for _ in range(3):
        costs = chain(draw.integers(1, 9, 6).tolist(), sum(shape), act_bytes=1, grad_bytes=1)
        how = 4, sum(shape), shape
        plan, program = make_plan(costs, numerics(16, 4), "zb-planned", *how)
        by_hand = [make_plan(costs, numerics(16, 4), name, *how)[0] for name in ("zb-h1", "zb-h2")]
        assert plan.prediction.step_s <= min(p.prediction.step_s for p in by_hand) * (1 + 1e-9)
        assert plan.prediction.lower_bound_s <= plan.prediction.step_s
        assert expect_plan(plan, costs)[0] == plan.prediction, "as read from its file"
        once_each(program)


def once_each(program: Program) -> None:
    """Each action is there once, on the rank of its way, with the backwards of a copy in order."""
    done = Counter[tuple[int, int, int]]()
    for rank, codes in enumerate(program.codes):
        for stage in {*codes[:, 1].tolist()} - {-1}:
            mine = codes[(codes[:, 1] == stage) & (codes[:, 2] >= 0)]
            for copy in program.copies_on(rank):
                share = program.share(copy)
                for op in (Op.B, Op.I, Op.W):
                    micros = [m for o, _, m in mine[:, :3].tolist() if o == op and m in share]
                    assert micros == sorted(micros)
            for op, _, micro in mine[:, :3].tolist():
                if op <= Op.W:
                    assert program.chain_of(micro)[stage] == rank
                    done[op, stage, micro] += 1
    assert set(done.values()) == {1}
    every = {*itertools.product(range(program.n_stages), range(program.n_micro))}
    assert {(s, m) for op, s, m in done if op == Op.F} == every
    assert {(s, m) for op, s, m in done if op in (Op.B, Op.W)} == every


@pytest.mark.parametrize("tied", ["per_use", "eager"])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in PLANNED])
@pytest.mark.slow
def test_unlike_numbers_of_any_kind_need_no_buffering(schedule: str, tied: str) -> None:
    """Fast, so that shares may differ by one: of ways with one micro-batch, and of those with some."""
    shapes = [(1, 2), (2, 1), (3, 2), (2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3), (2, 3, 2)]
    n_tried = 0
    for shape in shapes:
        ways, p = math.lcm(*shape), len(shape)
        for n_micro in (ways, ways + 1, 2 * ways + 1, 3 * ways - 1, p * ways):
            if schedule == "interleaved" and n_micro != p * ways:  # it goes round the ranks
                continue
            costs = uniform(stages_on(schedule, p), sum(shape))
            costs = dataclasses.replace(costs, ties=(Tie("w", 1, (0, p - 1)),))
            how = dataclasses.replace(fast(n_micro), tied=tied)
            _, program = make_plan(costs, how, schedule, 4, sum(shape), shape)  # which proves it
            once_each(program)
            n_tried += 1
    assert n_tried >= len(shapes)


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "interleaved", "v-planned", "interleaved-planned"])
def test_the_stages_of_a_rank_have_equally_many_copies(schedule: str) -> None:
    """Two of the first rank, whose stages have more work, and one of the second."""
    costs = chain([4.0, 2.0, 2.0, 4.0, 1.0, 1.0, 1.0, 1.0], 3, param_bytes=8)
    plan, program = make_plan(costs, numerics(16, 4), schedule, 4, 3, (2, 1))
    on = {"zb-v": (0, 1, 1, 0), "v-half": (0, 1, 1, 0), "v-planned": (0, 1, 1, 0)}.get(schedule, (0, 1, 0, 1))
    assert plan.layout.ranks == tuple(((0, 1), (2,))[place] for place in on)
    assert shape_of(plan.layout) == (2, 1)
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s
    assert expect_plan(plan, costs)[0] == plan.prediction
    once_each(program)


def test_a_rank_that_takes_turns_keeps_a_stash_of_each() -> None:
    """Of the memory for four stashes, an order has room for two where each is there for two ways."""
    stage = StageCost(1.0, 1.0, 1.0, 0.0, 100, 10, 0, 0, 0)
    room = partial(room_for, (0, 1), (stage, stage), 8, (140, 140), 4)
    assert room() == [4, 4]
    assert room((1, 2)) == [4, 2]
    with pytest.raises(PlanError, match=r"rank 1 has .* for one micro-batch"):
        room((1, 8))


@pytest.mark.slow
def test_an_order_of_unlike_numbers_fits_into_the_memory_that_there_is() -> None:
    costs = chain([2.0, 2.0, 2.0, 1.0], 3, stash_bytes=10)
    for memory in (90, 60, 40):
        tight = dataclasses.replace(costs, cluster=cluster([1.0] * 3, [memory] * 3))
        plan, program = make_plan(tight, numerics(16, 2), "zb-planned", 4, 3, (2, 1))
        assert max(plan.prediction.peak_bytes) <= memory
        once_each(program)


def test_memory_counts_the_gradients_that_are_added_up_apart() -> None:
    """For each byte of a weight: itself, its gradient, two of AdamW at the owner, and of two blocks another
    sum where one rank does both, as the serving rank has for its two shares. Copy 0 owns the only group."""
    costs = dataclasses.replace(
        uniform(2, 3, param_bytes=1000, stash_bytes=10), bytes_per_param_byte=6.0,
        state_bytes_per_param_byte=2.0, blocks=2,
    )  # fmt: skip
    plan = make_plan(costs, numerics(4, 2), "1f1b", 4, 3, (2, 1))[0]
    owner, other, serving = plan.prediction.peak_bytes
    assert owner == 1000 * (1 + 1 + 2) + 1000  # the other copy's gradient, while it is added
    assert other == 1000 * (1 + 1) + 2 * 10  # live micro-batches
    assert serving == 1000 * (1 + 2 + 2) + 2 * 10  # of each share one


def test_a_rank_keeps_what_each_of_its_ways_keeps() -> None:
    """Three and two share six ways: two each with two stashes, three with one. All is added up together."""
    costs = dataclasses.replace(
        uniform(2, 5, param_bytes=1000, stash_bytes=10), bytes_per_param_byte=4.0,
        state_bytes_per_param_byte=2.0,
    )  # fmt: skip
    plan, program = make_plan(costs, fast(18), "1f1b", 4, 5, (3, 2))
    held = [codes.max() for codes in simulated(costs, plan, program)]
    owner, other = 1000 * (1 + 1 + 2), 1000 * (1 + 1)  # weight, gradient, and AdamW's at the owner
    assert held == pytest.approx([owner + 40, other + 40, other + 40, owner + 30, other + 30], abs=1)


def simulated(costs: Costs, plan: Plan, program: Program) -> list[np.ndarray]:
    """By rank, what it holds during each of its actions."""
    memory = expect_plan(plan, costs)[1].memory_bytes
    return [held[codes[:, 0] <= Op.W] for held, codes in zip(memory, program.codes, strict=True)]


def test_what_does_not_fit_is_refused() -> None:
    costs = uniform(4, 3)
    with pytest.raises(PlanError, match=r"replicas 2\+2 are on 4 ranks, not 3; start 4"):
        check_copies((2, 2), 3, numerics(8, 2))
    with pytest.raises(PlanError, match=r"3 replicas with pipeline\.blocks = 2"):
        check_copies((3, 1), 4, numerics(8, 2))
    with pytest.raises(PlanError, match=r"zb-planned with 3\+2 replicas: .* 8 .* a multiple of 6;"):
        make_plan(uniform(4, 5), fast(8), "zb-planned", 4, 5, (3, 2))
    asked = Asked(numerics(8, 2), (8,), ("zb-v",), 4, 3, copies_of((2, 1), numerics(8, 2), 3))
    with pytest.raises(PlanError, match=r"4 stages, and this model can be cut into 3 parts at most"):
        search(asked, lambda _: uniform(3, 3))
    assert search(asked, lambda _: costs).best.copies == (2, 1)
    assert copies_of((2, 2), numerics(8, 2), 4) == (2,)


def test_a_rank_that_serves_many_copies_gets_the_window_that_it_needs() -> None:
    costs = dataclasses.replace(uniform(2, 9), ties=(Tie("w", 1, (0, 1)),))
    eager = dataclasses.replace(numerics(16, 8), tied="eager")
    plan = make_plan(costs, eager, "zb-h1", 4, 9, (1, 8))[0]
    assert plan.layout.receive_window > 8


def test_each_parameter_is_updated_once() -> None:
    costs = uniform(4, 4, step_s_per_byte=1.0, param_bytes=8)
    layout = Layout(("g1", "g3"), ((0, 1), (2,), (3,)), "1f1b", 4)
    plan = plan_of(costs, numerics(4, 2), layout)
    program = program_for(layout, numerics(4, 2), (), names(costs))
    steps = [np.count_nonzero(codes[:, 0] == Op.STEP) for codes in program.codes]
    assert steps == [1, 1, 1, 1]
    assert plan.prediction.step_s >= 16.0  # the update of the rank that holds two groups
