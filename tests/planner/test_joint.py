"""The joint search against trying everything, and what it says of what it did not simulate."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import HUGE, all_cuts, cluster, group, problems, uniform

from mpipipe.errors import CaptureError, DeadlockError, PlanError
from mpipipe.planner import SCHEDULES
from mpipipe.planner.asked import Asked, counts_of, schedules_of
from mpipipe.planner.every_cut import cut_bounds_s, ways_to_cut
from mpipipe.planner.joint import search
from mpipipe.planner.prediction import LIKE, expect, norm_seconds, too_full
from mpipipe.planner.programs import program_for
from mpipipe.planner.schedules import PLAIN
from mpipipe.planner.schedules.registry import BUILT_IN
from mpipipe.planner.sizing import MOST_SIZES, costs_at, settle
from mpipipe.values import Costs, GroupCost, Layout, Link, Numerics, Plan, Schedule

BATCH = 6


def asked(n_ranks: int, batch: int = BATCH, schedules: tuple[str, ...] = ("1f1b", "gpipe")) -> Asked:
    numerics = Numerics(batch, batch, 1, 1, 1, "torch", "mkl", "fp32", "per_use", {}, "2", "x", 0)
    return Asked(numerics, counts_of(batch), schedules, 4, n_ranks)


def of_size(costs: Costs, samples: float, call_s: float = 1.0) -> Costs:
    """Groups of so many samples: `costs` are those of one, and each forward has a price of its own."""
    return dataclasses.replace(costs, groups=tuple(_sized(g, samples, call_s) for g in costs.groups))


def _sized(g: GroupCost, samples: float, call_s: float) -> GroupCost:
    seconds = {n: samples * getattr(g, n) for n in ("bwd_input_s", "bwd_weight_s")}
    held = ("stash_bytes", "workspace_bytes", "act_bytes", "grad_bytes")
    nbytes = {n: math.ceil(samples) * getattr(g, n) for n in held}
    return dataclasses.replace(g, fwd_s=call_s + samples * g.fwd_s, **seconds, **nbytes)


def steps_of_all(a: Asked, costs: Costs) -> dict[tuple[int, str, tuple[int, ...]], float]:
    """Every number, schedule and cut that fits, each simulated."""
    found = {}
    names = [g.name for g in costs.groups]
    ways = itertools.product(a.counts, a.schedules, all_cuts(len(names), a.n_ranks))
    for count, schedule, cuts in ways:
        starts, ranks = tuple(names[c] for c in cuts), tuple((r,) for r in range(a.n_ranks))
        layout, sized = Layout(starts, ranks, schedule, 4), of_size(costs, a.numerics.batch / count)
        program = program_for(layout, a.of(count), costs.ties, names)
        prediction = expect(sized, layout, program)[0]
        if too_full(prediction.peak_bytes, costs.cluster) is None:
            found[count, schedule, cuts] = prediction.step_s
    return found


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(problems(max_groups=5))
def test_it_finds_what_trying_everything_finds(problem):
    _compare(problem)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@given(problems(max_groups=6))
def test_it_finds_what_trying_everything_finds_500_times(problem):
    _compare(problem)


def _compare(problem: tuple[Costs, int, int]) -> None:
    costs, n_ranks, _ = problem
    alike = dataclasses.replace(  # of unlike ranks, plans have them in another order as well
        costs.cluster, devices=costs.cluster.devices[:1] * n_ranks, node_of_rank=(0,) * n_ranks
    )
    costs = dataclasses.replace(costs, cluster=alike)
    a = asked(n_ranks)
    everything = steps_of_all(a, costs)
    try:
        found = search(a, lambda count: of_size(costs, BATCH / count))
    except PlanError:
        assert not everything
        return
    assert found.exact
    assert min(t.step_s for t in found.tried) == pytest.approx(min(everything.values()), rel=1e-8)
    assert found.plan.prediction.step_s <= min(everything.values()) * LIKE * (1 + 1e-8)
    assert found.plan.numerics.micro_batches * found.plan.numerics.micro_batch >= BATCH
    assert found.bound_s <= found.plan.prediction.step_s
    for t in found.tried:
        steps = [
            s
            for (count, schedule, _), s in everything.items()
            if (count, schedule) == (t.micro_batches, t.schedule)
        ]
        if t.made is not None:
            assert t.step_s == pytest.approx(min(steps), rel=1e-8)
        else:
            assert not steps or t.bound_s <= min(steps) * (1 + 1e-9)
            assert not steps or min(steps) * LIKE >= found.plan.prediction.step_s * (1 - 1e-8)


@settings(max_examples=25, deadline=None)
@given(problems(memory="huge", max_groups=6), st.sampled_from(PLAIN))
@pytest.mark.slow
def test_no_step_is_below_the_bound_of_its_cut(problem, schedule):
    costs, n_ranks, n_micro = problem
    cuts = list(all_cuts(len(costs.groups), n_ranks))
    bounds = cut_bounds_s(costs, ways_to_cut(len(costs.groups), n_ranks), n_micro)
    names = [g.name for g in costs.groups]
    norm_s = norm_seconds(costs.cluster, n_ranks)
    a = asked(n_ranks, n_micro)
    for cut, bound in zip(cuts, bounds, strict=True):
        layout = Layout(tuple(names[c] for c in cut), tuple((r,) for r in range(n_ranks)), schedule, 4)
        program = program_for(layout, a.of(n_micro), costs.ties, names)
        assert expect(costs, layout, program)[0].step_s >= (bound + norm_s) * (1 - 1e-12)


def test_small_micro_batches_win_while_calls_are_free_and_large_ones_when_they_are_dear():
    costs = uniform(8, 2)
    chosen = {}
    for call_s in (0.0, 1.0, 100.0):
        found = search(asked(2, 16), lambda count, s=call_s: of_size(costs, 16 / count, s))
        chosen[call_s] = found.plan.numerics.micro_batches
    assert chosen[0.0] == 16
    assert 1 < chosen[1.0] < 16
    assert chosen[100.0] == 1


def test_a_limit_of_memory_moves_the_choice_to_smaller_micro_batches():
    costs = dataclasses.replace(uniform(4, 2, stash_bytes=100), cluster=cluster([1.0] * 2, [HUGE] * 2))
    free = search(asked(2, 16), lambda count: of_size(costs, 16 / count, 2.0)).plan
    tight = dataclasses.replace(costs, cluster=cluster([1.0] * 2, [900] * 2))
    found = search(asked(2, 16), lambda count: of_size(tight, 16 / count, 2.0))
    assert found.plan.numerics.micro_batch < free.numerics.micro_batch
    assert max(found.plan.prediction.peak_bytes) <= 900
    assert found.plan.prediction.step_s > free.prediction.step_s
    assert any("cannot hold" in t.why for t in found.tried)


def test_of_equally_fast_schedules_the_first_is_taken(monkeypatch):
    def step_of(*schedules: str) -> tuple[str, float]:
        found = search(
            asked(2, schedules=schedules), lambda count: of_size(uniform(4, 2), BATCH / count)
        ).plan
        return found.layout.schedule, found.prediction.step_s

    steps = [step_of(name)[1] for name in ("1f1b", "gpipe")]
    assert steps[0] == steps[1]
    assert step_of(*PLAIN) == ("1f1b", steps[0])
    monkeypatch.setitem(SCHEDULES, "own", SCHEDULES["1f1b"])
    assert schedules_of("auto") == (*BUILT_IN, "own")
    assert schedules_of("gpipe") == ("gpipe",)


def test_of_others_that_are_as_fast_the_one_that_needs_least_memory_is_taken(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "own", SCHEDULES["1f1b"])
    kept = uniform(4, 2, stash_bytes=100)
    found = search(asked(2, schedules=("gpipe", "own")), lambda count: of_size(kept, BATCH / count))
    gpipe, own = (
        t for t in found.tried if t.micro_batches == found.plan.numerics.micro_batches and t.made is not None
    )
    assert (gpipe.schedule, gpipe.step_s) == ("gpipe", own.step_s)
    assert own.dear < gpipe.dear
    assert found.best is own


def priced(split_s: float, call_s: float) -> str:
    """What auto takes on two ranks, of groups that take a second forward and two backward."""
    costs = uniform(8, 2)
    groups = tuple(dataclasses.replace(g, split_s=split_s) for g in costs.groups)
    costs = dataclasses.replace(costs, groups=groups, call_s=call_s)
    one = dataclasses.replace(asked(2, 8, schedules_of("auto")), counts=(8,))
    return search(one, lambda _: costs).plan.layout.schedule


@pytest.mark.slow
def test_what_a_backward_in_two_and_a_call_cost_decides_against_schedules_that_have_many():
    assert priced(0.0, 0.0) == "zb-v"
    assert priced(1.0, 0.0) == "interleaved"
    assert priced(0.0, 2.0) == "1f1b"


def test_one_rank_never_waits_so_nothing_is_compared_there():
    one = dataclasses.replace(asked(1, 8, schedules_of("auto")), counts=(8,))
    assert [t.schedule for t in search(one, lambda _: uniform(4, 1)).tried] == ["1f1b"]


@pytest.mark.parametrize(("n_ranks", "copies"), [(1, 1), (2, 2)])
def test_where_one_rank_is_left_the_first_schedule_that_has_an_order_for_it_is_taken(
    n_ranks: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def for_two(n_stages: int, n_micro: int) -> Schedule:
        if n_stages != 2:
            raise PlanError("is written for 2 ranks")
        return SCHEDULES["1f1b"](n_stages, n_micro)

    monkeypatch.setitem(SCHEDULES, "for two", for_two)
    one = dataclasses.replace(asked(n_ranks, 8, ("for two", "1f1b", "gpipe")), counts=(8,), copies=(copies,))
    one = dataclasses.replace(one, numerics=dataclasses.replace(one.numerics, blocks=2))
    found = search(one, lambda _: uniform(4, n_ranks))
    assert [t.schedule for t in found.tried] == ["1f1b"]
    with pytest.raises(PlanError, match="is written for 2 ranks"):
        search(dataclasses.replace(one, schedules=("for two",)), lambda _: uniform(4, n_ranks))


@pytest.mark.slow
def test_what_takes_long_to_make_is_not_made_only_to_be_compared(monkeypatch):
    monkeypatch.setattr("mpipipe.planner.joint.MOST_FILLED", 7)  # here 2 ranks, 8 micro-batches
    one = dataclasses.replace(asked(2, 8, schedules_of("auto")), counts=(8,))
    found = search(one, lambda _: uniform(8, 2))
    assert [t.schedule for t in found.tried if t.skipped] == ["zb-v", "v-half"]
    assert all(t.made is None and "pipeline.schedule=" in t.why for t in found.tried if t.skipped)
    assert not found.exact
    assert found.bound_s <= found.best.step_s
    alone = search(dataclasses.replace(one, schedules=("zb-v",)), lambda _: uniform(8, 2))
    assert alone.plan.layout.schedule == "zb-v", "who asks for it waits for it"


@pytest.mark.slow
def test_of_a_large_plan_orders_from_costs_are_made_for_one_cut_as_far_as_the_work_goes(monkeypatch):
    """By the cuts and ranks of the order by hand; the same ones wherever the search is made."""
    one = dataclasses.replace(asked(2, 8, schedules_of("auto")), counts=(8,))
    costs = dataclasses.replace(uniform(8, 2, act_bytes=8, grad_bytes=8),
                                cluster=cluster([1.0] * 2, [HUGE] * 2, Link(2.0, 8.0)))  # fmt: skip
    full = {t.schedule: t for t in search(one, lambda _: costs).tried}
    monkeypatch.setattr("mpipipe.planner.joint.MOST_PLANNED", 7)  # here 2 ranks, 8 micro-batches
    monkeypatch.setattr("mpipipe.planner.search.REFINE_WORK", 7)  # nor are cuts next to these looked at
    found = {t.schedule: t for t in search(one, lambda _: costs).tried}
    hands = {"zb-planned": "zb-h1", "v-planned": "zb-v", "interleaved-planned": "interleaved"}
    for name, hand in hands.items():
        made, by_hand = found[name].made, found[hand].made
        assert made is not None
        assert by_hand is not None
        assert made[0].layout.cuts == by_hand[0].layout.cuts
        assert full[name].step_s <= found[name].step_s <= found[hand].step_s
    assert found["zb-planned"].step_s < found["zb-h1"].step_s, "messages are slow"
    monkeypatch.setattr("mpipipe.planner.joint.MOST_BRIEF", 2 * 8 + 4 * 8)  # of zb-planned and v-planned
    assert [t.schedule for t in search(one, lambda _: costs).tried if t.skipped] == ["interleaved-planned"]


def test_gpipe_is_chosen_where_links_are_slow_and_memory_is_there():
    slow = dataclasses.replace(
        uniform(4, 4, act_bytes=8, grad_bytes=8), cluster=cluster([1.0] * 4, [HUGE] * 4, Link(2.0, 8.0))
    )
    found = search(asked(4, 8), lambda count: of_size(slow, 8 / count, 0.0))
    by = {(t.micro_batches, t.schedule): t.step_s for t in found.tried}
    assert by[8, "gpipe"] < by[8, "1f1b"]
    assert found.plan.layout.schedule == "gpipe"


def test_another_schedule_is_chosen_where_the_quickest_one_has_no_room():
    slow = uniform(4, 4, act_bytes=8, grad_bytes=8, stash_bytes=1 << 20)

    def chosen(room: int, *schedules: str) -> Plan:
        with_room = dataclasses.replace(slow, cluster=cluster([1.0] * 4, [room] * 4, Link(2.0, 8.0)))
        only = dataclasses.replace(asked(4, 8, schedules or ("gpipe", "1f1b")), counts=(8,))
        return search(only, lambda count: of_size(with_room, 1.0, 0.0)).plan

    assert chosen(HUGE).layout.schedule == "gpipe"
    room = max(chosen(HUGE, "1f1b").prediction.peak_bytes)
    found = chosen(room)
    assert found.layout.schedule == "1f1b"
    assert max(found.prediction.peak_bytes) <= room < max(chosen(HUGE).prediction.peak_bytes)


def test_a_schedule_that_refuses_a_number_leaves_the_others(monkeypatch):
    def picky(n_stages: int, n_micro: int) -> Schedule:
        if n_micro != 3:
            raise DeadlockError(f"not with {n_micro}")
        return SCHEDULES["1f1b"](n_stages, n_micro)

    monkeypatch.setitem(SCHEDULES, "picky", picky)
    costs = uniform(4, 2)
    found = search(asked(2, schedules=("picky",)), lambda count: of_size(costs, BATCH / count))
    assert found.plan.numerics.micro_batches == 3
    assert {t.why for t in found.tried if t.micro_batches == 2} <= {"not with 2", "ruled out by its bound"}
    only = dataclasses.replace(asked(2, schedules=("picky",)), counts=(2,))
    with pytest.raises(DeadlockError, match="not with 2"):
        search(only, lambda _: costs)


def test_where_nothing_fits_it_names_the_smallest_micro_batches():
    costs = dataclasses.replace(uniform(4, 2, param_bytes=100), cluster=cluster([1.0] * 2, [50] * 2))
    with pytest.raises(PlanError, match="no number of micro-batches will do; with 6: stage 0 of 2"):
        search(asked(2), lambda count: of_size(costs, BATCH / count))
    with pytest.raises(PlanError, match=r"^stage 0 of 2"):
        search(dataclasses.replace(asked(2), counts=(6,)), lambda count: costs)


def test_when_the_time_is_used_it_gives_what_it_has_and_how_far_that_may_be_off():
    asks = itertools.count()
    costs = uniform(8, 2)
    found = search(asked(2, 16), lambda count: of_size(costs, 16 / count), lambda: next(asks) > 1)
    whole = search(asked(2, 16), lambda count: of_size(costs, 16 / count))
    assert whole.exact
    assert not found.exact
    assert any("the time was used" in t.why for t in found.tried)
    assert found.bound_s <= whole.plan.prediction.step_s <= found.plan.prediction.step_s
    with pytest.raises(PlanError, match="before any plan was found"):
        search(asked(2), lambda _: costs, lambda: True)


@pytest.mark.parametrize(
    ("batch", "blocks", "counts"),
    [
        (16, 1, (16, 8, 6, 4, 3, 2, 1)),
        (7, 1, (7, 4, 3, 2, 1)),
        (16, 4, (16, 8, 4)),
        (16, 5, (10, 5)),
        (1, 1, (1,)),
    ],
)
def test_numbers_are_those_that_differ_in_the_size_of_a_micro_batch(batch, blocks, counts):
    assert counts_of(batch, blocks) == counts
    sizes = [math.ceil(batch / count) for count in counts]
    assert len(set(sizes)) == len(sizes)


def test_more_blocks_than_samples_are_refused():
    with pytest.raises(PlanError, match="a batch of 4 has no number of micro-batches that 5 blocks divide"):
        counts_of(4, 5)


# -- costs by size -----------------------------------------------------------------------------


def test_costs_are_those_taken_and_linear_between_them():
    costs = uniform(3, 2, stash_bytes=10)
    taken = {size: of_size(costs, size) for size in (2, 4)}
    assert costs_at(taken, 16, 8).groups == taken[2].groups
    assert costs_at(taken, 16, 4).groups == taken[4].groups
    for count in (16, 8, 6, 4, 2, 1):  # of a line, everything is exact
        wanted = of_size(costs, 16 / count).groups[0]
        found = costs_at(taken, 16, count).groups[0]
        assert found.fwd_s == pytest.approx(wanted.fwd_s)
        assert found.seconds == pytest.approx(wanted.seconds)
        assert found.stash_bytes == 10 * math.ceil(16 / count)
    alone = costs_at({2: taken[2]}, 16, 4).groups[0]
    assert (alone.fwd_s, alone.stash_bytes) == (2 * taken[2].groups[0].fwd_s, 40)


def test_noise_does_not_make_larger_micro_batches_cheaper():
    slow, fast = (dataclasses.replace(uniform(1, 1), groups=(group("g0", fwd=s),)) for s in (5.0, 4.0))
    found = costs_at({1: slow, 2: fast}, 8, 1).groups[0]
    assert found.fwd_s == 4.0


def test_a_size_is_taken_while_it_promises_more():
    """Costs with a knee: what the line promises beyond it is found out by taking it."""
    costs, taken = uniform(8, 2), []

    def take(size: int) -> Costs:
        taken.append(size)
        return of_size(costs, size if size <= 4 else 3 * size, call_s=4.0)

    found, by_size = settle(asked(2, 32), take)
    assert found is not None
    assert taken[:2] == [1, 4]
    assert len(taken) <= MOST_SIZES
    assert found.plan.numerics.micro_batch in taken
    assert set(by_size) == set(taken)
    everything = search(asked(2, 32), lambda count: take(math.ceil(32 / count)))
    assert found.plan.prediction.step_s <= 1.1 * everything.plan.prediction.step_s


def test_sizes_that_the_model_refuses_are_left_out():
    def take(size: int) -> Costs:
        if size < 2:
            raise CaptureError("two samples at least")
        return of_size(uniform(4, 2), size, 0.0)

    found, by_size = settle(asked(2, 9), take)
    assert found is not None
    assert 1 not in by_size
    assert 9 // found.plan.numerics.micro_batches >= 2, "no micro-batch has a single sample"
    with pytest.raises(CaptureError):
        settle(asked(1, 1), take)


def test_a_model_that_is_another_one_for_one_sample_is_refused():
    def take(size: int) -> Costs:
        return uniform(4 if size > 1 else 3, 2)

    with pytest.raises(
        PlanError, match="other operators for 1 samples than for 2: nothing in the place of 'g3'"
    ):
        settle(asked(2, 16), take)


def test_one_rank_decides_and_all_take():
    takes: list[int] = []
    told = iter([2, None])

    def take(size: int) -> Costs:
        takes.append(size)
        return uniform(4, 2)

    found, by_size = settle(asked(2, 16), take, share=lambda decide: next(told))
    assert (found, list(by_size), takes) == (None, [1, 2], [1, 2])
