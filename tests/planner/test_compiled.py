"""The compiled loops against what they mean in Python: the same cuts, partners and times, to the bit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_cases import HUGE, TIES, cluster, group, on, problems

from mpipipe.errors import DeadlockError
from mpipipe.planner import SCHEDULES, live_micro_batches, lower, simulate
from mpipipe.planner.bounds import bottleneck_bound_s, step_bound_s
from mpipipe.planner.misfit import least_stages, misfit
from mpipipe.planner.native import compiled
from mpipipe.planner.problem import Problem
from mpipipe.planner.prove import NoBuffering, prove
from mpipipe.planner.schedules import build, check, fill, in_copies, kept_micro_batches, policies
from mpipipe.planner.schedules.fill import Work
from mpipipe.planner.schedules.listed import _Lister, listed, listed_seconds, listed_shortest
from mpipipe.planner.schedules.merged import _merged, merged
from mpipipe.planner.schedules.orders import v_shaped, wrapped
from mpipipe.planner.simulate import instruction_seconds, message_bytes, walked
from mpipipe.planner.stages import Ranges
from mpipipe.planner.sweep import low_for, sweep, sweep_near
from mpipipe.planner.walk import match, matched, walk
from mpipipe.values import RECOMPUTE, Costs, Float64, Link, Op, Program, Recompute, StageCost, Tie

SCHEDULE = st.sampled_from(["1f1b", "gpipe"])
SEVERAL_STAGES = st.sampled_from(["interleaved", "zb-v", "v-half"])
FEW_SECONDS = st.sampled_from([0.0, 0.25, 1.0, 1.5, 3.0])
TIED = st.sampled_from(["per_use", "eager"])


def test_the_planner_is_built():
    assert compiled is not None, "run `make setup`: the extension mpipipe._planner is part of the package"


def problem_of(
    costs: Costs, n_stages: int, n_micro: int, schedule: str, window: int, tied: str, update: bool,
    modes: tuple[Recompute, ...] = ("none",),
) -> Problem:  # fmt: skip
    kept = kept_micro_batches(SCHEDULES[schedule](n_stages, n_micro))
    return Problem(costs, Ranges(costs, window, n_micro, tied, update), kept, modes)


def large(seed: int) -> Problem:
    """Layers that repeat, of any seconds, on more stages than a word has bits; with ties, some with unequal
    speeds, memories and links."""
    rng = random.Random(seed)
    n_groups = rng.randint(80, 160)
    n_stages, layer = rng.randint(65, n_groups), rng.randint(1, 30)
    kinds = [
        ([rng.lognormvariate(0, 1) for _ in range(3)], [rng.randint(0, 9) for _ in range(7)])
        for _ in range(layer)
    ]
    names = (
        *("param_bytes", "stash_bytes", "workspace_bytes", "act_bytes", "grad_bytes", "received_bytes"),
        "cast_bytes",
    )
    groups = [
        group(f"g{i}", *kinds[i % layer][0], **dict(zip(names, kinds[i % layer][1], strict=True)))
        for i in range(n_groups)
    ]
    tie = Tie("w", 5, (0, n_groups // 2, n_groups - 1))
    groups = [
        dataclasses.replace(g, param_bytes=g.param_bytes + 5 * (i in tie.groups))
        for i, g in enumerate(groups)
    ]
    speeds = rng.choice([[1.0], [0.5, 1.0, 2.0], [rng.uniform(0.5, 2.0) for _ in range(n_stages)]])
    memories = rng.choice([[HUGE], [rng.randint(40, 200)], [HUGE, rng.randint(60, 300)]])
    machine = cluster(
        [rng.choice(speeds) for _ in range(n_stages)],
        [rng.choice(memories) for _ in range(n_stages)],
        Link(0.01, 80.0),
        Link(0.25, 8.0),
    )
    costs = Costs(tuple(groups), machine, (tie,), 3.3, 0.125, "modelled", 0.0)
    return problem_of(costs, n_stages, rng.randint(1, 8), "1f1b", 4, "eager", rng.random() < 0.5)


def same_cuts(problem: Problem) -> bool:
    """Whether there are any."""
    guess = bottleneck_bound_s(problem.ranges.seconds, problem.speed)
    swept, searched = problem.swept(guess, in_numpy=True), problem.searched(guess)
    assert searched == swept
    if swept is None:
        assert problem.compiled().misfit() == misfit(problem)
        return False
    even = problem.searched(guess, most_work=0)  # no search for the least squares
    assert even is not None
    assert even[0] == swept[0]
    edges = [0, *even[1], len(problem.costs.groups)]
    times = [problem.times(first, end)[s, 0] for s, (first, end) in enumerate(itertools.pairwise(edges))]
    assert max(times) == swept[0]
    return True


@settings(max_examples=50, deadline=None)
@given(problems(), SCHEDULE, st.integers(0, 5), TIED, st.booleans())
@pytest.mark.slow
def test_the_cuts_are_those_of_the_sweeps(problem, schedule, window, tied, update):
    costs, n_stages, n_micro = problem
    same_cuts(problem_of(costs, n_stages, n_micro, schedule, window, tied, update))


@settings(max_examples=100, deadline=None)
@given(
    problems(memory="tight", remakes=True), st.sampled_from(["1f1b", "zb-h1", "zb-h2"]), st.integers(0, 5),
    TIED, st.booleans(), st.sampled_from([RECOMPUTE, *((mode,) for mode in RECOMPUTE)]),
)  # fmt: skip
@pytest.mark.slow
def test_sweeps_with_recomputation_and_backwards_in_two_are_the_same(
    problem, schedule, window, tied, update, modes
):
    costs, n_stages, n_micro = problem
    p = problem_of(costs, n_stages, n_micro, schedule, window, tied, update, modes)
    guess = bottleneck_bound_s(p.ranges.seconds, p.speed)
    assert p.swept(guess, in_numpy=False) == p.swept(guess, in_numpy=True)
    whole = p.swept_compiled(lambda _: 0)[0]
    assert np.array_equal(whole, p.swept_in_numpy(lambda _: 0)[0])
    near = low_for(p.ranges.seconds / p.speed.max(), 1.5 * guess)
    assert np.array_equal(p.swept_compiled(near, 1.5 * guess)[0], p.swept_in_numpy(near, 1.5 * guess)[0])


@pytest.mark.slow
def test_more_stages_than_a_word_has_bits():
    assert {same_cuts(large(seed)) for seed in range(10)} == {False, True}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(problems(memory="tight"), SCHEDULE, TIED)
def test_the_least_number_of_stages(problem, schedule, tied):
    costs, n_stages, n_micro = problem
    p, memory = (
        problem_of(costs, n_stages, n_micro, schedule, 2, tied, False),
        costs.cluster.devices[0].memory_bytes,
    )
    order = SCHEDULES[schedule](len(costs.groups), n_micro)
    expected = least_stages(p, kept_micro_batches(order)[::-1], memory)
    assert p.compiled().least_stages(live_micro_batches(order)[::-1], memory) == expected


@settings(max_examples=25, deadline=None)
@given(problems(memory="huge"))
def test_the_bound_is_that_of_a_sweep_also_with_unequal_speeds(problem):
    costs, n_stages, n_micro = problem
    ranges, speed = Ranges(costs), np.array([device.speed for device in costs.cluster.devices])
    before_s = np.concatenate([[0.0], np.cumsum(ranges.seconds)]) / speed.max()

    def reach(low: int, end: int) -> Float64:
        work_s = n_micro * ranges.ending_at(end, low).seconds / speed[:, None]
        return np.asarray(work_s + before_s[low:end])

    n_groups, fastest = len(costs.groups), n_micro * ranges.seconds / speed.max()
    best, _ = sweep_near(
        lambda low: sweep(n_groups, n_stages, reach, np.maximum, low),
        fastest,
        n_micro * bottleneck_bound_s(ranges.seconds, speed),
    )
    update_s = float(ranges.ending_at(n_groups).step_s[0]) / speed.sum()
    assert step_bound_s(costs, n_micro, n_stages) == pytest.approx(
        best[n_stages, n_groups] + update_s, rel=1e-12
    )


# -- programs ----------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, tuple]:
    n_stages = draw(st.integers(1, 7))
    ties = on(n_stages, draw(TIES))
    one = SCHEDULES[draw(SCHEDULE)](n_stages, draw(st.integers(1, 9)))
    n_copies = draw(st.integers(1, 3))
    copies = [range(copy * n_stages, (copy + 1) * n_stages) for copy in range(n_copies)]
    schedule = in_copies([one] * n_copies, copies)
    return lower(schedule, ties, draw(TIED), draw(st.integers(0, 4))), ties


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(programs())
def test_partners_and_proofs_are_the_same(made):
    program, _ = made
    ends = match(program)
    assert all(np.array_equal(a, b) for a, b in zip(ends.partners, matched(program), strict=True))
    rules = NoBuffering(ends)
    ended, at = compiled.prove(program.codes, ends.partners, program.receive_window)
    assert (ended, list(at)) == (walk(ends, rules, rules.at), rules.at)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_times_are_the_same_to_the_bit(made, rng):
    program, ties = made
    stages = [StageCost(*(rng.random() for _ in range(4)), *(rng.randint(0, 99) for _ in range(6)))
              for _ in program.codes]  # fmt: skip
    machine = cluster([1.0] * 21, [HUGE] * 21, Link(0.01, 80.0), Link(0.1, 9.0))
    seconds = instruction_seconds(program, stages, message_bytes(program, stages, ties), machine)
    reference = walked(match(program), seconds, 0.3)
    assert reference is not None
    times = simulate(program, stages, machine, 0.3, ties).times
    assert all(np.array_equal(a, b) for a, b in zip(times, reference, strict=True))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(SEVERAL_STAGES, st.integers(3, 6), st.randoms(use_true_random=False))
def test_times_of_rounds_that_may_begin_early_are_the_same_to_the_bit(name, n_copies, rng):
    """Of copies of four stages on two ranks."""
    one = build(name, 4, 4, 2)
    copies = [[rank + 2 * copy for rank in one.rank_of_stage] for copy in range(n_copies)]
    program = lower(in_copies([one] * n_copies, copies), (), "per_use", 16)
    stages = [StageCost(*(rng.random() for _ in range(4)), *(rng.randint(0, 99) for _ in range(5)), 9)
              for _ in range(4 * n_copies)]  # fmt: skip
    machine = cluster([1.0] * 12, [HUGE] * 12, Link(0.01, 80.0), Link(0.1, 9.0))
    seconds = instruction_seconds(program, stages, message_bytes(program, stages, ()), machine)
    reference = walked(match(program), seconds, 0.3)
    assert reference is not None
    times = simulate(program, stages, machine, 0.3).times
    assert all(np.array_equal(a, b) for a, b in zip(times, reference, strict=True))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_the_same_fault_is_found(made, rng):
    """One field of one message changed, or one message lost."""
    program, _ = made
    places = [(rank, i) for rank, codes in enumerate(program.codes) for i in np.flatnonzero(codes[:, 4] >= 0)]
    assume(places)
    codes = [c.copy() for c in program.codes]
    rank, index = rng.choice(places)
    if rng.random() < 0.3:
        codes[rank] = np.delete(codes[rank], index, axis=0)
    else:
        codes[rank][index, rng.randint(1, 5)] += rng.choice([-1, 1, 40])
    wrong = dataclasses.replace(program, codes=tuple(codes))
    with pytest.raises(DeadlockError) as expected:
        matched(wrong)
    with pytest.raises(DeadlockError) as found:
        prove(wrong)
    assert str(found.value) == str(expected.value)


# -- orders from costs -------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.sampled_from(["one", "v", "wrapped"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 9),
    st.data(),
)
@settings(max_examples=20)
def test_lists_are_the_same(placed, p, m, most, data):
    on = {"one": range(p), "v": v_shaped(p), "wrapped": wrapped(2 * p, p)}[placed]
    seconds = [tuple(data.draw(FEW_SECONDS) for _ in on) for _ in range(6)]
    pairs = list(itertools.combinations(range(len(on)), 2))
    ties = data.draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)) if pairs else []
    work = Work(*seconds, tuple((user, owner, data.draw(FEW_SECONDS)) for owner, user in ties))
    tried = list(policies(on, m, [most + rank % 2 for rank in range(p)]))
    every_s = listed_seconds(on, m, work, tried)
    shortest = every_s.index(min(every_s))
    assert listed_shortest(on, m, work, tried) == (shortest, every_s[shortest])
    assert listed_shortest(on, m, work, tried, every_s[shortest])[1] == every_s[shortest]
    assert listed_shortest(on, m, work, tried, every_s[shortest] - 0.125)[1] == math.inf
    for policy in tried:
        order, took_s = _Lister(on, m, work, policy).run()
        assert listed_seconds(on, m, work, [policy]) == [took_s]
        if math.isfinite(took_s):
            again = listed(on, m, work, policy)
            assert [list(again.actions(rank)) for rank in range(p)] == order


@pytest.mark.slow
@given(
    st.sampled_from(["one", "v", "wrapped"]), st.integers(1, 4), st.integers(1, 6), st.integers(0, 60),
    st.data(),
)  # fmt: skip
@settings(max_examples=20)
def test_backwards_are_merged_alike(placed, p, m, most, data):
    """And into orders that end sooner, with the bits of the others: `check` looks at what must ascend."""
    on = {"one": tuple(range(p)), "v": v_shaped(p), "wrapped": wrapped(2 * p, p)}[placed]
    seconds = [tuple(data.draw(FEW_SECONDS) for _ in on) for _ in range(6)]
    work = Work(*seconds, ((len(on) - 1, 0, data.draw(FEW_SECONDS)),) if len(on) > 1 else ())
    tried = list(policies(on, m, [2 * m] * p))
    for policy in (tried[i] for i in {0, len(tried) // 2, len(tried) - 1}):
        order = listed(on, m, work, policy)
        ours, took_s = merged(order, work, most)
        theirs, also_s = _merged(order, work, most)
        assert [*map(list, map(ours.actions, range(p)))] == [*map(list, map(theirs.actions, range(p)))]
        check(ours)
        assert took_s == also_s == fill.seconds(ours, work)
        whole, before = (sum((code[:, 0] == Op.B).sum() for code in of.codes) for of in (ours, order))
        assert 0 <= whole - before <= most
        assert took_s == fill.seconds(order, work) if whole == before else took_s < fill.seconds(order, work)
