"""The partitioner against trying every cut."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_cases import FREE, HUGE, all_cuts, cluster, fitting_cuts, group, naive_stage_s, problems, uniform

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner import partition
from mpipipe.planner.bounds import step_bound_s
from mpipipe.planner.misfit import MORE_MEMORY
from mpipipe.planner.schedules import SCHEDULES
from mpipipe.values import Costs, Link

SCHEDULE = st.sampled_from(["1f1b", "gpipe"])
WINDOW = st.integers(0, 5)
TIED = st.sampled_from(["per_use", "eager"])


def memories(costs: Costs) -> list[int]:
    return [device.memory_bytes for device in costs.cluster.devices]


def stage_times(costs: Costs, cuts: tuple[int, ...]) -> list[float]:
    edges = (0, *cuts, len(costs.groups))
    return [naive_stage_s(costs, edges, s) for s in range(len(cuts) + 1)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problems(), SCHEDULE, WINDOW, TIED)
def test_is_the_optimum_of_all_cuts(problem, schedule, window, tied):
    costs, n_stages, n_micro = problem
    fitting = list(fitting_cuts(costs, schedule, n_stages, n_micro, window, tied, memories(costs)))
    if not fitting:
        with pytest.raises(PlanError, match=r"bytes? short"):
            partition(costs, n_micro, schedule, n_stages, window, tied)
        return
    found = partition(costs, n_micro, schedule, n_stages, window, tied)
    best = min(max(stage_times(costs, cuts)) for cuts in fitting)
    assert found.cuts in fitting
    assert found.bottleneck_s == best == max(stage_times(costs, found.cuts))
    optimal = [cuts for cuts in fitting if max(stage_times(costs, cuts)) == best]
    squares = min(sum(t * t for t in stage_times(costs, cuts)) for cuts in optimal)
    assert sum(t * t for t in stage_times(costs, found.cuts)) == pytest.approx(squares)
    assert found.lower_bound_s <= best * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(problems(memory="tight", max_groups=6), SCHEDULE, WINDOW, TIED)
@pytest.mark.slow
def test_the_error_names_the_smallest_number_of_stages_that_would_do(problem, schedule, window, tied):
    costs, n_stages, n_micro = problem
    size = memories(costs)[0]
    fits = [
        count
        for count in range(1, len(costs.groups) + 1)
        if list(fitting_cuts(costs, schedule, count, n_micro, window, tied, [size] * count))
    ]
    assume(n_stages not in fits)
    with pytest.raises(PlanError) as caught:
        partition(costs, n_micro, schedule, n_stages, window, tied)
    said = re.search(r"start (\d+) ranks: that is the least", str(caught.value))
    assert ([int(said[1])] if said else []) == fits[:1]


@settings(max_examples=30, deadline=None)
@given(problems(memory="tight"), SCHEDULE)
@pytest.mark.slow
def test_the_missing_bytes_are_exact(problem, schedule):
    """One byte less than said and the same stage still fails; all of them, and it does not."""
    costs, n_stages, n_micro = problem
    before = _misfit(costs, n_micro, schedule, n_stages)
    assume(before is not None)
    stage, _, short = before
    almost = _misfit(_with_more(costs, stage, short - 1), n_micro, schedule, n_stages)
    assert almost is not None
    assert (almost[0], almost[2]) == (stage, 1)
    after = _misfit(_with_more(costs, stage, short), n_micro, schedule, n_stages)
    assert after is None or after[0] > stage


@settings(max_examples=20, deadline=None)
@given(problems(memory="tight"), SCHEDULE)
@pytest.mark.slow
def test_what_every_cut_lacks_is_exact(problem, schedule):
    """With so much more on each rank some cut fits, with a byte less none."""
    costs, n_stages, n_micro = problem
    error = _refused(costs, n_micro, schedule, n_stages)
    assume(error is not None)
    said = re.search(r"every cut lacks (\d+) bytes? or more on some rank", str(error))
    assert said, error

    def with_more(nbytes: int) -> Costs:
        other = costs
        for rank in range(n_stages):
            other = _with_more(other, rank, nbytes)
        return other

    assert _refused(with_more(int(said[1])), n_micro, schedule, n_stages) is None
    assert _refused(with_more(int(said[1]) - 1), n_micro, schedule, n_stages) is not None


def _refused(costs: Costs, n_micro: int, schedule: str, n_stages: int) -> str | None:
    try:
        partition(costs, n_micro, schedule, n_stages)
    except PlanError as caught:
        return str(caught)
    return None


def _misfit(costs: Costs, n_micro: int, schedule: str, n_stages: int) -> tuple[int, str, int] | None:
    error = _refused(costs, n_micro, schedule, n_stages)
    if error is None:
        return None
    found = re.match(r"stage (\d+) .* cannot hold (.*): (\d+) bytes? short", error)
    assert found, error
    return int(found[1]), found[2], int(found[3])


def _with_more(costs: Costs, rank: int, nbytes: int) -> Costs:
    sizes = memories(costs)
    sizes[rank] += nbytes
    devices = tuple(
        dataclasses.replace(d, memory_bytes=m) for d, m in zip(costs.cluster.devices, sizes, strict=True)
    )
    return dataclasses.replace(costs, cluster=dataclasses.replace(costs.cluster, devices=devices))


def test_the_text_of_the_error():
    groups = (group("wte", stash_bytes=10), group("head", stash_bytes=60))
    costs = Costs(groups, cluster([1.0, 1.0], [50, 50]), (), 4.0, 0.0, "modelled", 0.0)
    with pytest.raises(PlanError) as caught:
        partition(costs, 8, "1f1b", 2)
    assert str(caught.value) == (
        "stage 1 of 2 (rank 1, 50 bytes) cannot hold group 1 'head': 10 bytes short with schedule '1f1b' "
        "and 8 micro-batches, and every cut lacks 10 bytes or more on some rank; set "
        "pipeline.recompute=auto; without it no number of ranks would do: give more memory (a larger "
        "pipeline.memory_bytes, where it is set), or use smaller micro-batches (a larger "
        "pipeline.micro_batches)"
    )


def test_where_fewer_stages_keep_less_the_least_number_is_not_claimed():
    """zb-h1 keeps as many stashes on each stage as there are stages."""
    groups = tuple(group(f"g{i}", param_bytes=6, stash_bytes=1) for i in range(12))
    costs = Costs(groups, cluster([1.0] * 2, [110] * 2), (), 4.0, 0.0, "modelled", 0.0)
    for schedule, said in (
        ("1f1b", "start 3 ranks: that is the least that would do, with"),
        ("zb-h1", r"start \d ranks: so many would do, and fewer may, with"),
    ):
        with pytest.raises(PlanError, match=said):
            partition(costs, 10, schedule, 2)
    few = Costs(groups, cluster([1.0] * 2, [20] * 2), (), 4.0, 0.0, "modelled", 0.0)
    with pytest.raises(PlanError, match="without it more ranks may not do: give more memory"):
        partition(few, 10, "zb-h1", 2)


def test_where_nothing_is_left_for_a_model_smaller_micro_batches_are_no_way_out():
    """The libraries alone take more."""
    costs = dataclasses.replace(uniform(2, 2), cluster=cluster([1.0, 1.0], [50, 50]))
    devices = tuple(dataclasses.replace(device, base_bytes=60) for device in costs.cluster.devices)
    costs = dataclasses.replace(costs, cluster=dataclasses.replace(costs.cluster, devices=devices))
    with pytest.raises(PlanError, match="50 bytes, of which 60 bytes are taken before any weight") as caught:
        partition(costs, 8, "1f1b", 2)
    assert str(caught.value).endswith(f"; no number of ranks would do: {MORE_MEMORY}")


def test_a_single_sample_is_not_advised_to_be_smaller():
    groups = (group("wte", stash_bytes=10), group("head", stash_bytes=60))
    costs = Costs(groups, cluster([1.0, 1.0], [50, 50]), (), 4.0, 0.0, "modelled", 0.0)
    with pytest.raises(PlanError, match=rf"would do: {re.escape(MORE_MEMORY)}$"):
        partition(costs, 8, "1f1b", 2, finest=True)


@pytest.mark.parametrize("error", [PlanError, DeadlockError])
def test_a_schedule_that_refuses_other_numbers_of_stages_hides_the_least(error, monkeypatch):
    def picky(n_stages, n_micro):
        if n_stages != 2:
            raise error("two stages alone")
        return SCHEDULES["1f1b"](n_stages, n_micro)

    monkeypatch.setitem(SCHEDULES, "picky", picky)
    costs = dataclasses.replace(uniform(6, 2, stash_bytes=100), cluster=cluster([1.0, 1.0], [150, 150]))
    with pytest.raises(PlanError, match=r"use more ranks or smaller micro-batches \(a .*, or give more"):
        partition(costs, 4, "picky", 2)


def test_counts_that_cannot_work_are_refused():
    for args, words in [
        ((8, "1f1b", 4), "4 stages, and this model can be cut into 3 parts at most"),
        ((8, "1f1b", 3), "3 stages but only 2 ranks"),
        ((0, "1f1b", 2), "0 micro-batches"),
        ((8, "1f2b", 2), "'1f2b' is not known"),
    ]:
        with pytest.raises(PlanError, match=words):
            partition(uniform(3, 2), *args)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(memory="huge"), SCHEDULE)
def test_twice_the_seconds_is_twice_the_bottleneck(problem, schedule):
    costs, n_stages, n_micro = problem
    free = dataclasses.replace(costs.cluster, links={"node": FREE, "switch": FREE})
    costs = dataclasses.replace(costs, cluster=free)
    double = dataclasses.replace(
        costs,
        groups=tuple(
            dataclasses.replace(g, fwd_s=2 * g.fwd_s, bwd_input_s=2 * g.bwd_input_s,
                                bwd_weight_s=2 * g.bwd_weight_s)
            for g in costs.groups
        ),
    )  # fmt: skip
    one, two = (partition(c, n_micro, schedule, n_stages) for c in (costs, double))
    assert two == dataclasses.replace(
        one, bottleneck_s=2 * one.bottleneck_s, lower_bound_s=2 * one.lower_bound_s
    )


def test_more_stages_are_never_slower_without_links():
    times = [partition(uniform(24, 24), 4, "1f1b", s).bottleneck_s for s in range(1, 25)]
    assert times == [3.0 * -(-24 // s) for s in range(1, 25)]


def test_a_slow_link_moves_the_cut():
    """Rank 1 to 2 crosses nodes: the cut with the small activation goes there, uneven as it is."""
    sizes = [1, 1, 1000, 1000, 1]
    groups = tuple(group(f"g{i}", act_bytes=n, grad_bytes=n) for i, n in enumerate([*sizes, 1]))
    machine = cluster([1.0] * 3, [HUGE] * 3, Link(0.0, 1e6), Link(0.0, 100.0))
    found = partition(Costs(groups, machine, (), 4.0, 0.0, "modelled", 0.0), 4, "1f1b", 3)
    assert found.cuts[1] in (2, 5)


def test_a_fast_rank_gets_more():
    costs = dataclasses.replace(uniform(9, 2), cluster=cluster([1.0, 2.0], [HUGE] * 2))
    assert partition(costs, 4, "1f1b", 2).cuts == (3,)
    assert partition(costs, 4, "1f1b", 2).bottleneck_s == partition(costs, 4, "1f1b", 2).lower_bound_s == 9.0


def test_1f1b_memory_pushes_work_to_the_end():
    """Stage 0 stashes twice as much as stage 1, and with GPipe as much: only 1F1B moves the cut."""
    costs = dataclasses.replace(uniform(6, 2, stash_bytes=10), cluster=cluster([1.0] * 2, [45, 100]))
    assert partition(costs, 8, "1f1b", 2).cuts == (2,)
    roomy = dataclasses.replace(costs, cluster=cluster([1.0] * 2, [240, 240]))
    assert partition(roomy, 8, "gpipe", 2).cuts == (3,)


@settings(max_examples=30, deadline=None)
@given(problems(memory="huge"))
def test_the_bound_of_a_step_is_its_formula_over_all_cuts(problem):
    """With equal speeds the bound is the minimum over all cuts of max_s(m c_s + sum_{j<s} c_j)."""
    costs, n_stages, n_micro = problem
    same = cluster([1.0] * n_stages, [HUGE] * n_stages)
    costs = dataclasses.replace(costs, cluster=same, step_s_per_byte=0.0)

    def reach(cuts: tuple[int, ...]) -> float:
        c = stage_times(costs, cuts)
        return max(n_micro * c[s] + sum(c[:s]) for s in range(n_stages))

    naive = min(map(reach, all_cuts(len(costs.groups), n_stages)))
    assert step_bound_s(costs, n_micro, n_stages, norm_s=0.5) == naive + 0.5


def test_a_large_model_takes_about_a_second():
    costs = uniform(400, 32, stash_bytes=1)
    found = partition(costs, 64, "1f1b", 32, 4)
    assert found.bottleneck_s == 3.0 * 13
    assert found.lower_bound_s == 3.0 * 12.5
