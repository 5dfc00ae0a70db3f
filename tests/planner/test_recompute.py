"""Recomputation of each stage: its seconds and bytes by hand, and the planner's choice against all others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_cases import HUGE, all_cuts, cluster, group, problems

from mpipipe.errors import PlanError
from mpipipe.planner import lower, make_plan, partition, predict, program_for, simulate, stage_costs
from mpipipe.planner.asked import Asked
from mpipipe.planner.joint import search
from mpipipe.planner.misfit import MORE_MEMORY, SMALLER
from mpipipe.planner.partition import Wish
from mpipipe.planner.problem import Problem
from mpipipe.planner.recompute import with_least
from mpipipe.planner.schedules import SCHEDULES, build, kept_micro_batches, to_lines
from mpipipe.planner.schedules.orders import by_rank
from mpipipe.planner.stages import Ranges, bounds
from mpipipe.values import (
    RECOMPUTE,
    Action,
    Costs,
    Layout,
    Numerics,
    Op,
    Recompute,
    Schedule,
    from_json,
    to_json,
)


def chain(memory: int, n_ranks: int = 2) -> Costs:
    """Six groups of 100 bytes of stash, of which 40 are cheap to make again: a quarter of the forward. 70
    wait for W, 20 of them gradients of what the group sends, and 9 of what it receives."""
    groups = tuple(
        replace(
            group(f"g{i}", 1, 1, 1, param_bytes=10, stash_bytes=100, act_bytes=10, grad_bytes=10),
            selective_share=0.25,
            selective_bytes=40,
            waiting_bytes=70,
            waiting_received_bytes=9,
            waiting_grad_bytes=20,
        )
        for i in range(6)
    )
    return Costs(groups, cluster([1.0] * n_ranks, [memory] * n_ranks), (), 2.0, 0.0, "modelled", 0.0)


def numerics(count: int) -> Numerics:
    return Numerics(count, 1, count, 1, 1, "torch", "mkl", "fp32", "per_use", {}, "", "", 0)


def test_a_stage_by_hand():
    kept, some, full = (stage_costs(chain(HUGE), (3,), (mode,) * 2)[1] for mode in RECOMPUTE)
    assert (kept.bwd_input_s, kept.stash_bytes, kept.remade_bytes) == (3, 310, 0)
    assert (some.bwd_input_s, some.stash_bytes, some.remade_bytes) == (3.75, 190, 120)
    assert (full.bwd_input_s, full.stash_bytes, full.remade_bytes) == (6, 10, 300)
    assert {(s.fwd_s, s.bwd_weight_s, s.fixed_bytes) for s in (kept, some, full)} == {(3, 3, 60)}


def test_what_a_stage_receives_and_keeps_counts_once() -> None:
    """And is not made again. Selective recomputation may count it with what it makes: there, twice."""
    costs = chain(HUGE)
    groups = tuple(replace(g, received_bytes=4, kept_bytes=6) for g in costs.groups)
    kept, some, full = (stage_costs(replace(costs, groups=groups), (3,), (mode,) * 2) for mode in RECOMPUTE)
    assert [(s.stash_bytes, s.remade_bytes) for s in (kept[1], some[1], full[1])] == [
        (310 - 4, 0), (190, 120), (10, 300 - 4),
    ]  # fmt: skip
    assert [s.kept_bytes for s in (kept[0], some[0], full[0])] == [6, 0, 0], "what is let go is not kept"
    assert kept[1].kept_bytes == 0, "nothing is sent"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_the_memory_of_a_step_by_hand(schedule: str):
    """What is let go is there in F and B, or I; else only what was received. From I to W what waits is."""
    costs, names, modes = chain(HUGE), [f"g{i}" for i in range(6)], ("full", "selective")
    layout = Layout(("g3",), ((0,), (1,)), schedule, 4, recompute=modes)
    program = program_for(layout, numerics(4), (), names)
    timeline = predict(costs, layout, program)[1]
    stages = stage_costs(costs, (3,), modes)
    for rank, (codes, stage) in enumerate(zip(program.codes, stages, strict=True)):
        received = 4 * 10  # buffers for all that come, where an activation stays that is live
        stash = stage.stash_bytes - 10 * rank
        live = late = sent = 0
        for (op, *_), held in zip(codes.tolist(), timeline.memory_bytes[rank].tolist(), strict=True):
            live += op == Op.F
            sent = 10 if op in (Op.SEND_ACT, Op.SEND_GRAD) else sent  # the last message is still there
            here = stage.remade_bytes * (op in (Op.F, Op.B, Op.I)) + stage.in_two_bytes * (op == Op.I)
            assert held == 60 + received + sent + live * stash + late * (3 * 70 - 20 - 9 * rank) + here
            live -= op in (Op.B, Op.I)
            late += (op == Op.I) - (op == Op.W)


def test_a_backward_is_longer_by_what_it_makes_again():
    costs, names = chain(HUGE), [f"g{i}" for i in range(6)]
    program = program_for(Layout(("g3",), ((0,), (1,)), "1f1b", 4), numerics(4), (), names)
    for mode, seconds in zip(RECOMPUTE, (6, 6.75, 9), strict=True):
        timeline = simulate(program, stage_costs(costs, (3,), (mode, mode)), costs.cluster)
        backwards = timeline.times[0][program.codes[0][:, 0] == Op.B]
        assert {end - start for start, end in backwards.tolist()} == {seconds}


@st.composite
def cheap_problems(draw: st.DrawFn) -> tuple[Costs, int, int]:
    costs, n_stages, n_micro = draw(problems(memory="tight", max_groups=5).filter(lambda found: found[1] < 4))
    eighths = st.integers(0, 8)
    groups = tuple(
        replace(g, selective_share=draw(eighths) / 8, selective_bytes=g.stash_bytes * draw(eighths) // 8)
        for g in costs.groups
    )
    return replace(costs, groups=groups), n_stages, n_micro


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(cheap_problems(), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_the_bottleneck_is_the_least_of_all_cuts_and_modes(found: tuple[Costs, int, int], schedule: str):
    costs, n_stages, n_micro = found
    order = SCHEDULES[schedule](n_stages, n_micro)
    kept = kept_micro_batches(order)
    ranges = Ranges(costs, 2, n_micro)
    none = Problem(costs, ranges, kept)

    def least_s(cuts: tuple[int, ...], modes: tuple[Recompute, ...]) -> float:
        most = 0.0
        for s, (first, end) in enumerate(bounds(len(costs.groups), cuts)):
            ending, device = ranges.ending_at(end, first, modes[s]), costs.cluster.devices[s]
            if int(ending.memory_bytes(kept[s])[0]) > device.memory_bytes:
                return math.inf
            plain = ranges.ending_at(end, first)
            links_s = none.times(first, end)[s, 0] - float(plain.seconds[0]) / device.speed
            if math.isinf(links_s):  # it does not fit without: then the links alone, from endless memory
                free = replace(device, memory_bytes=HUGE)
                devices = tuple(free if i == s else d for i, d in enumerate(costs.cluster.devices))
                roomy = replace(costs, cluster=replace(costs.cluster, devices=devices))
                endless = Problem(roomy, ranges, kept)
                links_s = endless.times(first, end)[s, 0] - float(plain.seconds[0]) / device.speed
            most = max(most, float(ending.seconds[0]) / device.speed + links_s)
        return most

    every = list(all_cuts(len(costs.groups), n_stages))
    best = min(least_s(c, m) for c in every for m in itertools.product(RECOMPUTE, repeat=n_stages))
    if math.isinf(best):
        with pytest.raises(PlanError, match="even with full recomputation"):
            partition(costs, n_micro, schedule, n_stages, 2, recompute="auto")
        return
    assert partition(costs, n_micro, schedule, n_stages, 2, recompute="auto").bottleneck_s == best


def one_after_the_other(n_stages: int, n_micro: int) -> Schedule:
    """All forwards, then all I, then all W."""
    ranks = ([Action(op, s, i) for op in (Op.F, Op.I, Op.W) for i in range(n_micro)] for s in range(n_stages))
    return by_rank(range(n_stages), n_micro, ranks)


@given(
    problems(memory="huge"),
    st.sampled_from([*(SCHEDULES[name] for name in ("1f1b", "zb-h1", "zb-h2")), one_after_the_other]),
    st.sampled_from(RECOMPUTE),
    st.integers(1, 14),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
@pytest.mark.slow
def test_the_partitioner_counts_no_less_than_the_simulation(
    found: tuple[Costs, int, int],
    build: Callable[[int, int], Schedule],
    mode: Recompute,
    n_micro: int,
    window: int,
    data: st.DataObject,
) -> None:
    costs, n_stages, _ = found
    size, groups = st.sampled_from([0, 1, 10, 100]), []
    for g in costs.groups:
        stash, act, grad, waiting, given, at_once = (data.draw(size) for _ in range(6))
        groups.append(
            replace(
                g,
                stash_bytes=stash,
                act_bytes=act,
                grad_bytes=grad,
                received_bytes=0,
                selective_bytes=stash * data.draw(st.integers(0, 8)) // 8,
                at_work_bytes=g.workspace_bytes,
                waiting_bytes=waiting + given,
                waiting_received_bytes=waiting // 2,
                waiting_grad_bytes=given,
                at_once_bytes=at_once,
            )
        )
    blocks = data.draw(st.sampled_from([n for n in range(1, n_micro + 1) if n_micro % n == 0]))
    costs = replace(costs, groups=tuple(groups), ties=(), rows_bytes={}, blocks=blocks)
    order, ranges = build(n_stages, n_micro), Ranges(costs, window, n_micro)
    cuts = data.draw(st.sampled_from(list(all_cuts(len(groups), n_stages))))
    program = lower(order, (), "per_use", window)
    peaks = simulate(program, stage_costs(costs, cuts, (mode,) * n_stages), costs.cluster).peak_bytes
    for s, (first, end) in enumerate(bounds(len(groups), cuts)):
        counted = int(ranges.ending_at(end, first, mode).memory_bytes(kept_micro_batches(order)[s])[0])
        assert counted >= peaks[s]


@settings(max_examples=8, deadline=None)
@given(cheap_problems(), st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.data())
@pytest.mark.slow
def test_for_given_cuts_no_other_modes_have_a_shorter_step(
    found: tuple[Costs, int, int], schedule: str, data: st.DataObject
):
    costs, n_stages, n_micro = found
    names = [g.name for g in costs.groups]
    cuts = data.draw(st.sampled_from(list(all_cuts(len(names), n_stages))))
    ranks = tuple((rank,) for rank in range(n_stages))
    layout = Layout(tuple(names[c] for c in cuts), ranks, schedule, 4)
    program = program_for(layout, numerics(n_micro), costs.ties, names)

    def step_s(modes: tuple[Recompute, ...]) -> float:
        try:
            return predict(costs, replace(layout, recompute=modes), program)[0].step_s
        except PlanError:
            return math.inf

    best = min(map(step_s, itertools.product(RECOMPUTE, repeat=n_stages)))
    chosen = with_least(costs, layout, cuts, program)
    assert step_s(chosen.recompute) == best
    if step_s(()) < math.inf:
        assert chosen.recompute == ()
    assume(best < math.inf)


# -- in the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.4, 0.47, 0.85])
def test_of_many_stages_on_a_rank_none_alone_could_make_less_again(share: float) -> None:
    """Eight on each of two ranks, of which not all combinations are looked at."""
    groups = tuple(
        replace(group(f"g{i}", stash_bytes=1000), selective_share=0.1, selective_bytes=100) for i in range(16)
    )
    ranks = tuple((stage % 2,) for stage in range(16))
    actions = to_lines(build("interleaved", 16, 4, 2))
    layout = Layout(tuple(f"g{i}" for i in range(1, 16)), ranks, "interleaved-planned", 4, actions=actions)

    def fits(memory: int, modes: Sequence[Recompute]) -> bool:
        peaks = predict(costs(HUGE), replace(layout, recompute=tuple(modes)), program)[0].peak_bytes
        return max(peaks) <= memory

    def costs(memory: int) -> Costs:
        return Costs(groups, cluster([1.0] * 2, [memory] * 2), (), 4.0, 0.0, "modelled", 0.0)

    program = program_for(layout, numerics(4), (), costs(HUGE).names)
    memory = int(share * max(predict(costs(HUGE), layout, program)[0].peak_bytes))
    found = with_least(costs(memory), layout, range(1, 16), program).modes
    assert fits(memory, found)
    assert "none" in found
    for stage, mode in enumerate(found):
        for less in RECOMPUTE[: RECOMPUTE.index(mode)]:
            assert not fits(memory, [*found[:stage], less, *found[stage + 1 :]])


def test_stages_are_recomputed_where_memory_asks_for_it():

    def modes(memory: int, recompute: str) -> tuple[Recompute, ...]:
        plan, _ = make_plan(chain(memory), numerics(4), "1f1b", 4, 2, recompute=recompute)
        return plan.layout.recompute

    assert modes(HUGE, "auto") == modes(HUGE, "none") == ()
    assert modes(600, "auto") == ("selective", "none")  # 60 + 40 + 2 x 300, and one of them once
    assert modes(450, "auto") == ("full", "none")
    assert modes(HUGE, "selective") == ("selective", "selective")
    with pytest.raises(PlanError, match=r"short with schedule '1f1b'.*start 4 ranks"):
        modes(500, "none")
    with pytest.raises(PlanError, match=r"short even with full recomputation with .* start 6 ranks"):
        modes(260, "auto")


TRIED = "even with full recomputation (none and selective were tried, too)"


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("auto", f" short {TRIED}; use more ranks, or {MORE_MEMORY}\n"),
        ("full", f" short even with full recomputation; use more ranks, or {MORE_MEMORY}\n"),
        ("none", f" short; set pipeline.recompute=auto, use more ranks, or {MORE_MEMORY}\n"),
    ],
)
@pytest.mark.parametrize("schedule", ["zb-planned", "zb-v", "v-half", "interleaved"])
def test_where_a_simulation_finds_too_little_memory_it_says_what_was_tried(
    schedule: str, wish: Wish, said: str
) -> None:
    """A micro-batch is one sample: no smaller one is a way out."""
    with pytest.raises(PlanError) as caught:
        make_plan(chain(100), numerics(4), schedule, 4, 2, recompute=wish)
    assert said in str(caught.value)


@pytest.mark.slow
def test_ways_out_of_too_little_memory_are_those_that_there_are() -> None:
    def said(costs: Costs, numbers: Numerics, copies: int | tuple[int, ...] = 1) -> str:
        with pytest.raises(PlanError) as caught:
            make_plan(costs, numbers, "zb-planned" if copies in (1, 2) else "1f1b", 4,
                      len(costs.cluster.devices), copies, "auto")  # fmt: skip
        return str(caught.value).split("\n")[0].split("too); ")[1]

    larger = replace(numerics(4), batch=8, micro_batch=2)
    blocks = replace(numerics(4), blocks=2)
    assert said(chain(100), larger) == f"use {SMALLER}, use more ranks, or {MORE_MEMORY}"
    assert said(chain(100, 6), numerics(4)) == MORE_MEMORY, "no group can be cut"
    assert said(chain(100, 4), blocks, 2) == f"use more ranks, fewer replicas, or {MORE_MEMORY}"
    assert said(chain(100, 3), blocks, (2, 1)) == f"give pipeline.replicas more numbers, or {MORE_MEMORY}"
    tight = chain(100)
    taken = tuple(replace(device, base_bytes=101) for device in tight.cluster.devices)
    assert said(replace(tight, cluster=replace(tight.cluster, devices=taken)), larger) == MORE_MEMORY


def test_the_joint_search_weighs_recomputation_against_smaller_micro_batches():
    """Two micro-batches of two samples with recomputation, or four of one without."""

    def costs_of(count: int) -> Costs:
        size, costs = 4 // count, chain(700)
        groups = (replace(g, stash_bytes=100 * size, selective_bytes=40 * size) for g in costs.groups)
        return replace(costs, groups=tuple(groups))  # as fast whatever their size

    asked = Asked(numerics(4), (4, 2), ("1f1b",), 4, 2, recompute="auto")
    joint = search(asked, costs_of)
    assert (joint.best.micro_batches, joint.plan.layout.recompute) == (2, ("full", "none"))
    without = search(replace(asked, recompute="none"), costs_of)
    assert (without.best.micro_batches, without.plan.layout.recompute) == (4, ())
    assert joint.plan.prediction.step_s < without.plan.prediction.step_s


def test_a_layout_says_a_mode_for_each_stage_or_none():
    layout = Layout(("g3",), ((0,), (1,)), "1f1b", 4, recompute=("full",))
    with pytest.raises(PlanError, match=r"2 stages by layout.cuts, but layout.recompute has 1"):
        program_for(layout, numerics(4), (), [f"g{i}" for i in range(6)])
    assert from_json(Layout, to_json(replace(layout, recompute=("full", "none")))).modes == ("full", "none")
    assert replace(layout, recompute=()).modes == ("none", "none")
