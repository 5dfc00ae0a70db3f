"""Unlike numbers of copies of the stages: which promise most, what their ranks do, what they take."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from planner_cases import all_cuts, group, uniform

from mpipipe.errors import PlanError
from mpipipe.planner import make_plan, program_for
from mpipipe.planner.asked import Asked, copies_of
from mpipipe.planner.copies import check_copies, legal_copies
from mpipipe.planner.joint import search
from mpipipe.planner.search import plan_of
from mpipipe.planner.uneven import balanced, promising_shapes
from mpipipe.values import Costs, Layout, Numerics, Op, Tie


def numerics(n_micro: int, blocks: int) -> Numerics:
    return Numerics(4 * n_micro, 4, n_micro, blocks, 1, "torch", "mkl", "fp32", "per_use", {}, "2", "x", 0)


def names(costs: Costs) -> list[str]:
    return [g.name for g in costs.groups]


def chain(seconds: list[float], n_ranks: int, **nbytes: int) -> Costs:
    costs = uniform(len(seconds), n_ranks, **nbytes)
    groups = tuple(group(f"g{i}", s / 3, s / 3, s / 3, **nbytes) for i, s in enumerate(seconds))
    return dataclasses.replace(costs, groups=groups)


def slowest_s(seconds: list[float], cuts: tuple[int, ...], shape: tuple[int, ...]) -> float:
    edges = itertools.pairwise((0, *cuts, len(seconds)))
    return max(sum(seconds[a:b]) / n for (a, b), n in zip(edges, shape, strict=True))


def test_the_best_cuts_and_copies_are_those_of_brute_force() -> None:
    draw = np.random.default_rng(0)
    for _ in range(40):
        seconds, n_ranks, blocks = draw.integers(1, 9, 6).tolist(), int(draw.integers(3, 7)), 4
        costs = chain(seconds, n_ranks)
        for n_stages in (2, 3):
            shapes = [
                s
                for s in itertools.product(legal_copies(numerics(8, blocks)), repeat=n_stages)
                if sum(s) == n_ranks
            ]
            for shape in shapes:
                best = min(slowest_s(seconds, cuts, shape) for cuts in all_cuts(6, n_stages))
                assert slowest_s(seconds, balanced(costs, shape)[0], shape) == pytest.approx(best)
                assert balanced(costs, shape)[1] == pytest.approx(best)
        found = promising_shapes(costs, numerics(8, blocks), n_ranks)
        every = [
            s for p in (2, 3, 4, 5) for s in itertools.product(legal_copies(numerics(8, blocks)), repeat=p)
            if sum(s) == n_ranks and len({*s}) > 1
        ]  # fmt: skip

        def estimate(shape: tuple[int, ...], seconds: list[float] = seconds) -> float:
            least = min(slowest_s(seconds, cuts, shape) for cuts in all_cuts(6, len(shape)))
            return (8 + (len(shape) - 1) * max(shape)) * least

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


def test_what_does_not_fit_is_refused() -> None:
    costs = uniform(4, 3)
    with pytest.raises(PlanError, match=r"replicas 2\+2 are on 4 ranks, not 3; start 4"):
        check_copies((2, 2), 3, numerics(8, 2))
    with pytest.raises(PlanError, match=r"3 replicas with pipeline\.blocks = 2"):
        check_copies((3, 1), 4, numerics(8, 2))
    with pytest.raises(PlanError, match=r"replicas 2\+1: unlike numbers need one stage on each rank"):
        make_plan(costs, numerics(8, 2), "zb-v", 4, 3, (2, 1))
    asked = Asked(numerics(8, 2), (8,), ("zb-v",), 4, 3, copies_of((2, 1), numerics(8, 2), 3))
    with pytest.raises(PlanError, match=r"replicas 2\+1: unlike numbers need one stage on each rank"):
        search(asked, lambda _: costs)
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
