"""What other plans lose is what their own simulation says, with the reason that a person would give."""

from __future__ import annotations

import dataclasses

import pytest
from planner_cases import HUGE, cluster, group, uniform
from test_planned import drawn

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner import make_plan
from mpipipe.planner.alternatives import Alternative, alternatives
from mpipipe.planner.more_copies import more_copies
from mpipipe.planner.schedules import SCHEDULES
from mpipipe.planner.search import plan_of
from mpipipe.planner.sizes import size_text
from mpipipe.values import Cluster, Costs, Layout, Link, Numerics, Schedule


def numerics(n_micro: int) -> Numerics:
    return Numerics(4 * n_micro, 4, n_micro, 1, 1, "torch", "mkl", "fp32", "per_use", {}, "2", "x", 0)


def found(
    costs: Costs, n_ranks: int, n_micro: int, memory: int = HUGE, schedule: str = "1f1b"
) -> dict[str, Alternative]:

    def of(ranks: int) -> Cluster:
        return cluster([1.0] * ranks, [memory] * ranks)

    costs = dataclasses.replace(costs, cluster=of(n_ranks))
    plan, _ = make_plan(costs, numerics(n_micro), schedule, 4, n_ranks)
    return {a.name: a for a in alternatives(plan, costs, of)}


def test_each_is_simulated_with_the_same_costs():
    costs = uniform(8, 2)
    rows = found(costs, 2, 4)
    plan = plan_of(costs, numerics(4), Layout(("g5",), ((0,), (1,)), "1f1b", 4))
    best = 12.0 * (4 + 2 - 1)  # stages of 12 s, the bubble of one of them
    assert rows["next best cut"].step_s == plan.prediction.step_s
    assert rows["next best cut"].loss == pytest.approx(plan.prediction.step_s / best - 1)
    assert "slowest stage: 0 with 15000 ms, now 12000" in rows["next best cut"].why
    assert rows["equal numbers of groups"] == Alternative(
        "equal numbers of groups", best, 0.0, "is this plan"
    )
    assert rows["schedule gpipe"].loss == pytest.approx(0.0)


@pytest.mark.slow
def test_other_numbers_of_micro_batches_have_the_window_that_their_order_needs():
    """One that follows from costs is another order for each number."""
    plans = found(drawn(0, HUGE), 3, 4, schedule="v-planned")  # 8 need a larger one than 4
    rows = [row for name, row in plans.items() if "micro-batches" in name]
    assert rows
    assert all(row.step_s is not None and "deadlock" not in row.why for row in rows), rows


@pytest.mark.slow
def test_memory_that_differs_by_nothing_is_left_out():
    """Of groups that keep nothing, gpipe holds as much as 1f1b; where they do, more."""
    bare = uniform(8, 2)
    kept = dataclasses.replace(
        bare, groups=tuple(dataclasses.replace(g, stash_bytes=100) for g in bare.groups)
    )
    assert "memory of rank" not in found(bare, 2, 4)["schedule gpipe"].why
    assert "memory of rank 1 +1200 bytes" in found(kept, 2, 4)["schedule gpipe"].why


@pytest.mark.slow
def test_another_number_of_micro_batches_is_compared_per_sample():
    rows = found(uniform(8, 2), 2, 4)
    assert rows["8 micro-batches, batch 32"].loss == pytest.approx((8 + 1) / 8 / ((4 + 1) / 4) - 1)
    assert rows["2 micro-batches, batch 8"].loss == pytest.approx((2 + 1) / 2 / ((4 + 1) / 4) - 1)


@pytest.mark.slow
def test_other_numbers_of_ranks_are_planned_anew():
    rows = found(uniform(8, 2), 2, 4)
    assert rows["1 rank"].step_s == 8 * 3.0 * 4
    assert rows["4 ranks"].step_s == 2 * 3.0 * (4 + 3)
    assert rows["4 ranks"].why == f"{60 / 42:.2f} times as fast, bubble {3 / 7:.1%}"
    assert "16 ranks" not in found(uniform(8, 8), 8, 4), "there are 8 groups"


@pytest.mark.slow
def test_where_memory_forbids_one_it_says_by_how_much_and_on_which_rank():
    rows = found(uniform(4, 2, stash_bytes=100), 2, 8, memory=500)
    assert rows["schedule gpipe"] == Alternative(
        "schedule gpipe", None, None, "rank 1 lacks 1100 bytes of memory"
    )
    assert rows["4 micro-batches, batch 16"].step_s is not None
    assert rows["1 rank"].step_s is not None, "it keeps one micro-batch"
    heavy = found(uniform(4, 2, param_bytes=100), 2, 2, memory=900)
    assert heavy["1 rank"].why == "no cut fits; with the fastest, rank 0 lacks 700 bytes of memory"


@pytest.mark.slow
def test_equal_layers_are_those_that_a_person_would_cut():
    names = ["embed/e.0", *(f"blocks.{i}.{part}/op.0" for i in range(4) for part in "abc"), "head/h.0"]
    costs = dataclasses.replace(uniform(len(names), 2), groups=tuple(group(n) for n in names))
    even = next(a for name, a in found(costs, 2, 2).items() if "layers" in name)
    layout = Layout(("blocks.2.a/op.0",), ((0,), (1,)), "1f1b", 4)
    assert even.step_s == plan_of(costs, numerics(2), layout).prediction.step_s


@pytest.mark.slow
def test_replicas_that_one_block_forbids_are_a_row_where_they_would_be_faster() -> None:
    """By default the pipeline is there once, however many ranks there are: nothing else would say so."""
    row = found(uniform(8, 2), 2, 4)["2 replicas"]
    assert row.step_s == 8 * 3.0 * 2
    assert row.loss == pytest.approx(48 / 60 - 1)
    assert row.why == "with pipeline.blocks=2, chosen before step 0; bubble 0.0%, now 20.0%"
    assert not any("replicas" in name for name in found(uniform(8, 2), 2, 3)), (
        "3 micro-batches have one block"
    )
    even = uniform(8, 2)
    heavy = dataclasses.replace(even, step_s_per_byte=1.0, groups=tuple(
        dataclasses.replace(g, param_bytes=10) for g in even.groups
    ))  # fmt: skip
    slow = Link(0.0, 1.0)
    dear = dataclasses.replace(heavy, cluster=cluster([1.0] * 2, [HUGE] * 2, slow))
    plan, _ = make_plan(dear, numerics(4), "1f1b", 4, 2)
    rows = alternatives(plan, dear, lambda ranks: cluster([1.0] * ranks, [HUGE] * ranks, slow))
    assert not any("replicas" in row.name for row in rows), "the exchange of gradients takes longer"
    weights = dataclasses.replace(heavy, step_s_per_byte=0.0)  # 80 bytes, four times
    assert "2 replicas" in found(weights, 2, 4, memory=80 * 5)
    assert "2 replicas" not in found(weights, 2, 4, memory=80 * 4 - 1)


def test_more_copies_are_the_fewest_that_are_as_good() -> None:
    """Of four ranks: copies alone, with one micro-batch or many each."""
    costs = uniform(8, 4)
    plan, _ = make_plan(costs, numerics(128), "1f1b", 4, 4)
    found = more_copies(plan, costs, "none")
    assert found is not None
    assert (found.copies, found.schedule) == (2, "1f1b"), "four would be 1.6 % faster"
    short = uniform(8, 4)
    few, _ = make_plan(short, numerics(4), "1f1b", 4, 4)
    found = more_copies(few, short, "none")
    assert found is not None
    assert found.copies == 4
    fast = dataclasses.replace(few, numerics=dataclasses.replace(few.numerics, reduce="fast"))
    assert more_copies(fast, short, "none") is None, "it has no blocks"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (731, "731 bytes"),
        (9999, "9999 bytes"),
        (418944, "409 KiB"),
        (12 << 20, "12 MiB"),
        (5 << 28, "1.25 GiB"),
        (1500 << 30, "1500 GiB"),
    ],
)
def test_sizes_are_words_that_a_person_would_use(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.slow
@pytest.mark.parametrize("error", [PlanError, DeadlockError])
def test_one_that_cannot_be_made_is_a_row_and_the_plan_stands(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def picky(n_stages: int, n_micro: int) -> Schedule:
        if (n_stages, n_micro) != (2, 4):
            raise error(f"{n_stages} stages, {n_micro} micro-batches\n  rank 0; give 2 and 4")
        return SCHEDULES["1f1b"](n_stages, n_micro)

    def never(n_stages: int, n_micro: int) -> Schedule:
        raise error("it never does; take another")

    monkeypatch.setitem(SCHEDULES, "picky", picky)
    monkeypatch.setitem(SCHEDULES, "never", never)
    rows = found(uniform(8, 2), 2, 4, schedule="picky")
    assert rows["schedule never"] == Alternative("schedule never", None, None, "it never does")
    assert rows["8 micro-batches, batch 32"].why == "2 stages, 8 micro-batches"
    assert rows["1 rank"].why == "1 stages, 4 micro-batches"
    assert rows["next best cut"].step_s is not None


@pytest.mark.slow
def test_the_order_of_zb_planned_is_worked_out_for_the_comparison_only_where_that_is_quick(
    monkeypatch,
) -> None:
    assert found(uniform(8, 2), 2, 4)["schedule zb-planned"].step_s is not None
    monkeypatch.setattr("mpipipe.planner.joint.MOST_PLANNED", 7)  # here 2 ranks, 4 micro-batches
    assert found(uniform(8, 2), 2, 4)["schedule zb-planned"] == Alternative(
        "schedule zb-planned", None, None, "not tried here; pipeline.schedule=zb-planned"
    )
