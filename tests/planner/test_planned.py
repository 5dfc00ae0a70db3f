"""A schedule that follows from costs is in the plan, and a plan with another one is refused."""

import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from planner_cases import HUGE, cluster, group
from test_search import numerics

from mpipipe.errors import PlanError
from mpipipe.planner import StageTie, lower, make_plan, program_for, simulate
from mpipipe.planner.asked import Asked, schedules_of
from mpipipe.planner.joint import LESS, search, with_less_memory
from mpipipe.planner.orders import Orders
from mpipipe.planner.partition import Wish
from mpipipe.planner.prediction import EQUAL, FOR_MEMORY, LIKE, dear, fullest
from mpipipe.planner.programs import cut_indices, with_window
from mpipipe.planner.schedules import planned_by_room, work_of
from mpipipe.planner.search import leaner, plan_of
from mpipipe.values import Costs, Layout, Link, Op, Plan, StageCost, Tie, from_json, to_json

NAMES = [f"g{i}" for i in range(6)]
COSTS = Costs(
    tuple(group(name, 2 + i % 3, 3, 1 + i % 2, stash_bytes=10, act_bytes=8, grad_bytes=8)
          for i, name in enumerate(NAMES)),
    cluster([1.0, 0.5, 1.0], [HUGE] * 3, Link(0.5, 16.0)), (), 4.0, 0.0, "measured", 0.0,
)  # fmt: skip


def planned(schedule: str, costs: Costs = COSTS) -> Plan:
    return make_plan(costs, numerics(8), schedule, 4, 3)[0]


@pytest.mark.slow
def test_the_plan_has_the_order_in_it_and_is_no_longer_than_by_hand() -> None:
    plan = planned("zb-planned")
    assert plan.prediction.step_s <= min(planned(name).prediction.step_s for name in ("zb-h1", "zb-h2"))
    again = from_json(Plan, to_json(plan))
    assert again == plan
    assert len(again.layout.actions) == 3
    program = program_for(again.layout, again.numerics, (), NAMES)
    assert [str(i) for i in program.instrs(2) if i.peer < 0 and i.micro >= 0] == (
        again.layout.actions[2].split(",")
    )
    assert plan_of(COSTS, plan.numerics, plan.layout).prediction.step_s == plan.prediction.step_s


@pytest.mark.parametrize(
    ("schedule", "hand"), [("v-planned", "zb-v"), ("interleaved-planned", "interleaved")]
)
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.slow
def test_on_two_stages_each_it_is_no_longer_than_by_hand(schedule: str, hand: str, n_ranks: int) -> None:
    costs = replace(COSTS, cluster=cluster([1.0, 0.5, 1.0][:n_ranks], [HUGE] * n_ranks, Link(0.5, 16.0)))
    ours, theirs = (make_plan(costs, numerics(9 if n_ranks == 3 else 8), name, 4, n_ranks)[0]
                    for name in (schedule, hand))  # fmt: skip
    assert ours.prediction.step_s <= theirs.prediction.step_s
    assert plan_of(costs, ours.numerics, from_json(Plan, to_json(ours)).layout) == ours


def tied(n_ranks: int, seed: int = 0) -> Costs:
    """Of a parameter that the first group owns, and the last one uses, too; backwards in one are shorter."""
    costs = drawn(seed, HUGE, n_ranks)
    groups = tuple(replace(g, split_s=0.25) for g in costs.groups)
    machine = cluster([1.0] * n_ranks, [HUGE] * n_ranks, Link(0.25, 16.0))
    return replace(costs, groups=groups, cluster=machine, ties=(Tie("wte.weight", 1, (0, 5)),))


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("zb-planned", [0, 1]), ("zb-planned", [0, 1, 2]), ("v-planned", [0, 1, 1, 0]),
     ("interleaved-planned", [0, 1, 0, 1])],
)  # fmt: skip
def test_every_order_has_the_uses_of_a_tied_parameter_as_they_come(schedule: str, ranks: list[int]) -> None:
    """With `eager` the owner waits for its users in each micro-batch. Orders that did not know it waited in a
    circle: the owner for a weight gradient that comes behind a forward that needs what the owner does next;
    on one rank they were refused."""
    costs, n = tied(max(ranks) + 1), replace(numerics(8), tied="eager")
    cuts = {2: (3,), 3: (2, 4), 4: (1, 3, 4)}[len(ranks)]
    layout = Layout(tuple(NAMES[cut] for cut in cuts), tuple((rank,) for rank in ranks), schedule, 4)
    orders = list(Orders(costs, layout, n).shortest(cuts))
    assert len(orders) > 3
    for order in orders:
        with_window(replace(layout, actions=order.actions), n, costs.ties, NAMES)  # which proves it


def test_an_order_that_knows_of_its_ties_is_shorter() -> None:
    """Than 1f1b, which does the gradient of a head at once; those that did not were longer."""
    n = replace(numerics(8), tied="eager")
    for seed in (0, 1, 3):
        ours, theirs = (make_plan(tied(2, seed), n, name, 4, 2)[0] for name in ("zb-planned", "1f1b"))
        assert ours.prediction.step_s < theirs.prediction.step_s


@pytest.mark.parametrize("on", [(0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_an_order_takes_what_its_simulation_says(on: tuple[int, ...]) -> None:
    """With and without ties of the first stage and all others, whose messages alone take time."""
    rng, users = random.Random(len(on)), range(1, len(on))
    stages = [StageCost(*(rng.randint(1, 5) for _ in range(3)), 0.0, 0, 10, 0, 0, 0) for _ in on]
    machine = cluster([1.0] * 3, [HUGE] * 3, Link(0.5, math.inf), Link(0.5, math.inf))
    tied = [(user, 0, 0.5 * (on[user] != on[0])) for user in users]
    for ties, wires in (([], []), ([StageTie(0, tuple(users), 8)], tied)):
        found = planned_by_room(on, 6, work_of(on, stages, tied=wires), [12] * (max(on) + 1))
        assert len(found) > 3
        for order, took_s in found:
            program = lower(order, ties, "eager", 100)
            times = simulate(program, stages, machine, ties=ties).times
            ends_s = [t[c[:, 0] <= Op.W, 1].max() for c, t in zip(program.codes, times, strict=True)]
            assert max(ends_s) == took_s


@pytest.mark.parametrize(
    ("schedule", "n_ranks", "link", "call_s"),
    [("zb-planned", 3, Link(10.0, 1.0), 0.0), ("zb-planned", 3, Link(2.0, 4.0), 0.0),
     ("zb-planned", 3, None, 0.2), ("v-planned", 2, None, 0.0)],
)  # fmt: skip
@pytest.mark.slow
def test_no_other_number_of_stashes_is_shorter(
    schedule: str, n_ranks: int, link: Link | None, call_s: float
) -> None:
    """As it is simulated: with messages that wait for each other, calls, and the receive window it needs."""
    made, n = drawn(1, HUGE, n_ranks), numerics(96)
    machine = cluster([1.0] * n_ranks, [HUGE] * n_ranks, link) if link else made.cluster
    costs, names = replace(made, cluster=machine, call_s=call_s), [g.name for g in made.groups]
    plan = make_plan(costs, n, schedule, 4, n_ranks)[0]
    others = []
    for order in Orders(costs, plan.layout, n).by_room(cut_indices(plan.layout, names), math.inf):
        wished = replace(plan.layout, actions=order.actions, receive_window=4)
        layout = with_window(wished, n, (), names)[0]
        others.append(plan_of(costs, n, layout).prediction.step_s)
    assert len(others) > 3
    assert plan.prediction.step_s <= min(others)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-planned", "v-planned", "interleaved-planned"])
@pytest.mark.parametrize(
    "memory",
    [
        60,  # where bounds that are a tenth too high change every plan
        44,
        pytest.param(36, marks=pytest.mark.full),
        pytest.param(HUGE, marks=pytest.mark.full),
    ],
)
def test_what_is_ruled_out_would_not_be_taken(
    schedule: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders and cuts, by their bounds and by the times without recomputation."""

    def made(seed: int) -> Plan | None:
        costs = drawn(seed, memory, 2)
        with suppress(PlanError):
            return make_plan(costs, numerics(24), schedule, 4, 2, recompute="auto")[0]
        return None

    found = [made(seed) for seed in range(2)]
    asked = list[float]()
    monkeypatch.setattr("mpipipe.planner.search.least_of", lambda *_: asked.append(0.0) or 0.0)
    monkeypatch.setattr("mpipipe.planner.orders._ROUNDING", 0.0)
    assert [made(seed) for seed in range(2)] == found
    assert asked, "nothing was looked at twice"
    assert any(plan is not None for plan in found)


@pytest.mark.slow
def test_uneven_stages_on_a_rank_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose last group is a large one, all cuts tried: hardly one is better than that found."""

    def alike(seed: int) -> Costs:
        rng = random.Random(seed)
        groups = tuple(
            group(f"g{i}", *(rng.randint(5, 20) * (5 if i == 13 else 1) for _ in range(3)), param_bytes=1,
                  stash_bytes=8, act_bytes=1, grad_bytes=1)
            for i in range(14)
        )  # fmt: skip
        return Costs(groups, cluster([1.0] * 2, [HUGE] * 2), (), 2.0, 0.0, "modelled", 0.0)

    gains = []
    for schedule, seed in itertools.product(("v-planned", "interleaved-planned"), range(4)):
        costs = alike(seed)
        plan = make_plan(costs, numerics(8), schedule, 4, 2, like=1.0)[0]
        orders = Orders(costs, plan.layout, numerics(8))
        every = (next(orders.shortest(cuts)).least_s for cuts in itertools.combinations(range(1, 14), 3))
        assert plan.prediction.step_s <= 1.02 * min(every)
        with monkeypatch.context() as patch:
            patch.setattr("mpipipe.planner.orders._FIRST", ())
            even = make_plan(costs, numerics(8), schedule, 4, 2, like=1.0)[0]
            gains.append(even.prediction.step_s / plan.prediction.step_s)
    assert min(gains) >= 1.0
    assert max(gains) > 1.01, gains


def test_moves_of_cuts_end_when_enough_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tuple(group(f"g{i}", 1 + i % 3, 2, 1 + i % 2) for i in range(24))
    costs = Costs(groups, cluster([1.0] * 6, [HUGE] * 6), (), 4.0, 0.0, "measured", 0.0)
    tried = list[float]()
    looked = Orders._shortest_s
    monkeypatch.setattr(Orders, "_shortest_s", lambda *given: tried.append(0.0) or looked(*given))
    all_s = make_plan(costs, numerics(8), "zb-planned", 4, 6)[0].prediction.step_s
    every, most = len(tried), 20
    monkeypatch.setattr("mpipipe.planner.orders._MOST_TRIED", most * 6 * 8)
    tried.clear()
    assert make_plan(costs, numerics(8), "zb-planned", 4, 6)[0].prediction.step_s >= all_s
    assert len(tried) <= most < every


@pytest.mark.parametrize(("tied", "memory"), [("eager", 5400), ("per_use", 3700)])
def test_memory_that_messages_of_ties_take_is_left_for_them(tied: str, memory: int) -> None:
    """Little of it: a gradient of the table for each use comes into a buffer."""
    ends = tuple(
        group(name, *seconds, param_bytes=1000, stash_bytes=400, act_bytes=1, grad_bytes=1)
        for name, seconds in (("a", (1, 2, 1)), ("b", (2, 1, 2)))
    )
    tie, machine = Tie("wte.weight", 1000, (0, 1)), cluster([1.0] * 2, [memory] * 2)
    costs = Costs(ends, machine, (tie,), 2.0, 0.0, "modelled", 0.0)
    made = make_plan(costs, replace(numerics(8), tied=tied), "zb-planned", 2, 2)[0]
    assert max(made.prediction.peak_bytes) <= memory


@pytest.mark.slow
def test_as_good_is_held_against_the_shortest_of_all() -> None:
    """Not against one that was made leaner, and so longer, before."""
    for seed, n_ranks in ((8, 2), (39, 3)):
        costs = drawn(seed, HUGE, n_ranks)
        found = search(
            Asked(numerics(8), (8,), schedules_of("auto"), 4, n_ranks), lambda _, costs=costs: costs
        )
        shortest = min(
            make_plan(costs, numerics(8), name, 4, n_ranks)[0].prediction.step_s
            for name in ("interleaved-planned", "zb-planned")
        )
        assert found.best.step_s <= LIKE * shortest


@pytest.mark.parametrize(("schedule", "like"), [("v-planned", EQUAL), ("auto", LIKE)])
@pytest.mark.slow
def test_of_orders_that_are_as_good_that_with_least_memory_is_taken(schedule: str, like: float) -> None:
    less = 0
    for seed in (*range(5), *range(8, 13)):
        costs, n = drawn(seed, HUGE, 2), numerics(16)
        shortest = make_plan(costs, n, "v-planned", 4, 2)[0].prediction
        asked = Asked(n, (16,), schedules_of(schedule), 4, 2)
        taken = search(asked, lambda _, costs=costs: costs).plan.prediction
        assert taken.step_s <= like * shortest.step_s
        assert max(taken.peak_bytes) <= max(shortest.peak_bytes)
        less += max(taken.peak_bytes) < max(shortest.peak_bytes)
    assert less


@pytest.mark.slow
def test_a_search_with_less_memory_finds_what_is_less_dear() -> None:
    """With the memory that there is in the plan, and never much longer than the shortest."""
    gained = 0
    for seed in range(12):
        costs, asked = drawn(seed, HUGE, 2), Asked(numerics(8), (8,), schedules_of("auto"), 4, 2)
        before = search(asked, lambda _, costs=costs: costs)
        after = with_less_memory(before, asked)
        assert after.costs.cluster == costs.cluster
        assert after.best in after.tried
        assert after.best.step_s <= FOR_MEMORY * min(t.step_s for t in before.tried)
        if after.best is not before.best:
            assert after.best.dear < before.best.dear
            assert fullest(after.plan) <= LESS * fullest(before.plan)
            gained += 1
    assert gained


@pytest.mark.parametrize(
    ("schedule", "late", "most"), [("v-planned", 0, 128), ("auto", 1, 128), ("auto", 0, 15)]
)
@pytest.mark.slow
def test_where_no_plan_with_less_memory_is_searched(
    schedule: str, late: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a schedule that was asked for, without time, and of a large plan."""
    monkeypatch.setattr("mpipipe.planner.joint.MOST_AGAIN", most)
    for seed in range(12):
        costs, asked = drawn(seed, HUGE, 2), Asked(numerics(8), (8,), schedules_of(schedule), 4, 2)
        found = search(asked, lambda _, costs=costs: costs)
        assert with_less_memory(found, asked, lambda: late) is found


@pytest.mark.slow
def test_little_memory_gives_another_order() -> None:
    wide = planned("zb-planned")
    devices = tuple(replace(d, memory_bytes=130) for d in COSTS.cluster.devices)
    tight = planned("zb-planned", replace(COSTS, cluster=replace(COSTS.cluster, devices=devices)))
    assert tight.layout.actions != wide.layout.actions
    assert max(tight.prediction.peak_bytes) <= 130 < max(wide.prediction.peak_bytes)


def test_actions_of_another_size_are_refused() -> None:
    plan = planned("zb-planned")
    with pytest.raises(PlanError, match=r"actions are of 3 stages and 8 micro-batches, the plan has 3 and 4"):
        program_for(plan.layout, numerics(4), (), NAMES)
    with pytest.raises(PlanError, match=r"layout.actions are of 1 stages"):
        program_for(replace(plan.layout, actions=("0F0,0B0",)), numerics(8), (), NAMES)


def test_a_schedule_that_is_edited_beside_the_actions_of_another_is_refused() -> None:
    plan = planned("zb-planned")
    with pytest.raises(PlanError, match=r"and layout\.schedule is '1f1b', .*; remove layout\.actions"):
        program_for(replace(plan.layout, schedule="1f1b"), numerics(8), (), NAMES)
    without = replace(plan.layout, schedule="1f1b", actions=())
    program = program_for(plan.layout, numerics(8), (), NAMES)
    assert program_for(without, numerics(8), (), NAMES).hash != program.hash


# -- little memory, and recomputation ----------------------------------------------------------------


def step_s(costs: Costs, schedule: str, recompute: Wish = "auto") -> float:
    """Endless where no cut fits."""
    n_ranks = len(costs.cluster.devices)
    try:
        plan, _ = make_plan(costs, numerics(6), schedule, 2, n_ranks, recompute=recompute)
    except PlanError:
        return math.inf
    return plan.prediction.step_s


def drawn(seed: int, memory: int, n_ranks: int = 3) -> Costs:
    """Six groups whose stashes are most of what they take."""
    rng = random.Random(seed)
    groups = tuple(
        replace(
            group(f"g{i}", *(rng.randint(1, 5) for _ in range(3)), param_bytes=1, stash_bytes=8, act_bytes=1,
                  grad_bytes=1),
            selective_share=0.25, selective_bytes=rng.randint(0, 4), waiting_bytes=rng.randint(0, 8),
        )
        for i in range(6)
    )  # fmt: skip
    machine = cluster([1.0] * n_ranks, [memory] * n_ranks)
    return Costs(groups, machine, (), 2.0, 0.0, "modelled", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_memory_it_is_no_longer_than_zb_h1(seed: int) -> None:
    lengths = set()
    for memory in range(24, 120, 8):
        costs = drawn(seed, memory)
        planned_s = step_s(costs, "zb-planned")
        assert planned_s <= step_s(costs, "zb-h1") * (1 + 1e-9)
        lengths.add(planned_s)
    assert len(lengths) > 3


@pytest.mark.slow
def test_all_is_made_again_where_that_is_shorter_than_to_wait() -> None:
    groups = tuple(
        replace(group(f"g{i}", param_bytes=1, stash_bytes=6, act_bytes=1, grad_bytes=1), waiting_bytes=5)
        for i in range(8)
    )
    costs = Costs(groups, cluster([1.0] * 4, [27] * 4), (), 2.0, 0.0, "modelled", 0.0)
    assert step_s(costs, "zb-planned") <= step_s(costs, "1f1b", "full") < step_s(costs, "zb-planned", "none")


# -- recomputation of any schedule ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_more_memory_never_makes_a_step_longer(schedule: str) -> None:
    """Where the search is exact."""
    for seed in range(2):
        before_s = math.inf
        for memory in range(24, 120, 12):
            costs = drawn(seed, memory)
            asked = Asked(numerics(6), (6,), (schedule,), 2, 3, recompute="auto")
            try:
                joint = search(asked, lambda _, costs=costs: costs)
            except PlanError:
                assert math.isinf(before_s)
                continue
            assert joint.exact
            assert joint.plan.prediction.step_s <= before_s
            before_s = joint.plan.prediction.step_s


@pytest.mark.slow
def test_a_cut_that_fits_without_is_not_taken_where_recomputation_is_shorter() -> None:
    """Without the search over all cuts: more memory let it take slower cuts."""
    groups = tuple(
        replace(group(f"g{i}", param_bytes=1, stash_bytes=6, act_bytes=1, grad_bytes=1),
                selective_share=0.25, selective_bytes=2)
        for i in range(8)
    )  # fmt: skip
    steps = []
    for memory in (26, 32, 38, 44, 50, 56):
        costs = Costs(groups, cluster([1.0] * 4, [memory] * 4), (), 2.0, 0.0, "modelled", 0.0)
        steps.append(make_plan(costs, numerics(8), "1f1b", 2, 4, 1, "auto")[0])
    lengths = [plan.prediction.step_s for plan in steps]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.slow
def test_less_memory_is_looked_for_with_other_cuts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the step takes no longer than it may, and the plan is less dear."""
    less = 0
    for seed in range(10):
        made = make_plan(drawn(seed, HUGE, 2), numerics(8), "v-planned", 4, 2)
        most_s = LIKE * made[0].prediction.step_s
        with monkeypatch.context() as at:
            at.setattr("mpipipe.planner.search.LEAN_WORK", 0)
            there = leaner(made, most_s, 4)[0]
        assert there.layout.cuts == made[0].layout.cuts
        found, program = leaner(made, most_s, 4)
        assert found.prediction.step_s <= most_s
        assert dear(found) <= dear(there) <= dear(made[0])
        assert plan_of(found.costs or COSTS, found.numerics, found.layout).prediction == found.prediction
        assert program.receive_window == found.layout.receive_window
        less += dear(found) < dear(there)
    assert less
