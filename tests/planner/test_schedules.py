"""Orders: complete, ascending, within the stash that the papers give, and drawn."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.errors import PlanError
from mpipipe.planner import SCHEDULES, check, forward_only, live_micro_batches
from mpipipe.planner.schedules import PLAIN, PLANNED, build, homes_of, register, stages_on
from mpipipe.values import Op, Schedule

STAGES, MICROS = st.integers(1, 9), st.integers(1, 12)


def text(schedule: Schedule) -> str:
    ranks = range(len(schedule.codes))
    return "\n".join(" ".join(f"{a.kind.name}{a.micro}" for a in schedule.actions(r)) for r in ranks)


def test_1f1b_looks_like_its_picture():
    assert text(SCHEDULES["1f1b"](4, 6)) == (
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5\n"
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5\n"
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5\n"
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    )


def test_gpipe_looks_like_its_picture():
    assert text(SCHEDULES["gpipe"](2, 3)) == "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2"


@pytest.mark.slow
@given(STAGES, MICROS)
def test_every_schedule_is_valid_and_keeps_its_stash_limit(n_stages, n_micro):
    for name in PLAIN:
        check(SCHEDULES[name](n_stages, n_micro))
    check(forward_only(n_stages, n_micro), train=False)
    assert live_micro_batches(SCHEDULES["gpipe"](n_stages, n_micro)) == (n_micro,) * n_stages
    assert live_micro_batches(SCHEDULES["1f1b"](n_stages, n_micro)) == tuple(
        min(n_stages - s, n_micro) for s in range(n_stages)
    )
    assert live_micro_batches(forward_only(n_stages, n_micro)) == (1,) * n_stages


@pytest.mark.parametrize("name", PLAIN)
@given(STAGES, STAGES, MICROS)
def test_the_stash_depends_on_the_stages_after_only(name, n_stages, fewer, n_micro):
    """What the partitioner's advice on the number of stages rests on."""
    short, long = sorted((n_stages, fewer))
    assert (
        live_micro_batches(SCHEDULES[name](long, n_micro))[long - short :]
        == live_micro_batches(SCHEDULES[name](short, n_micro))
    )  # fmt: skip


def broken(rows: dict[int, list[tuple[Op, int, int]]]) -> Schedule:
    """1F1B of 2 stages and 2 micro-batches with some ranks replaced."""
    good = SCHEDULES["1f1b"](2, 2)
    codes = tuple(np.array(rows.get(r, good.codes[r]), np.int32) for r in range(2))
    return dataclasses.replace(good, codes=codes)


F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({1: [(F, 1, 0), (B, 1, 0), (F, 1, 1)]}, "stage 1, micro-batch 1 has F; it needs F and B"),
        ({1: [(F, 1, 0), (F, 1, 0), (B, 1, 0)]}, "1F0 on rank 1 comes twice"),
        ({1: [(F, 0, 0)]}, "0F0 is on rank 1, its stage on rank 0"),
        ({1: [(F, 1, 2)]}, "1F2 on rank 1 is outside the 2 stages and 2 micro-batches"),
        ({1: [(F, 1, 0), (F, 1, 1), (B, 1, 1), (B, 1, 0)]}, "backward of micro-batch 0 comes after"),
        ({1: [(B, 1, 0), (F, 1, 0), (F, 1, 1), (B, 1, 1)]}, "1B0 comes before 1F0"),
        ({1: [(F, 1, 0), (W, 1, 0), (I, 1, 0), (F, 1, 1), (B, 1, 1)]}, "1W0 comes before 1I0"),
        ({1: [(F, 1, 0), (I, 1, 0), (F, 1, 1), (B, 1, 1)]}, "micro-batch 0 has F I; it needs"),
        ({1: [(F, 1, 0), (I, 1, 0), (F, 1, 1), (B, 1, 1), (W, 1, 0)]}, "backward of micro-batch 0 comes"),
        ({1: [(Op.NORM, 1, 0)]}, "is a NORM"),
    ],
)
def test_a_wrong_order_is_named(rows, words):
    with pytest.raises(PlanError, match=words):
        check(broken(rows))


def test_an_order_without_a_backward_trains_nothing():
    for order, train in ((forward_only(2, 2), True), (SCHEDULES["1f1b"](2, 2), False)):
        with pytest.raises(PlanError, match=r"stage 0, micro-batch 0 has .*; it needs F"):
            check(order, train)


def test_a_split_backward_is_valid():
    check(broken({1: [(F, 1, 0), (I, 1, 0), (F, 1, 1), (I, 1, 1), (W, 1, 0), (W, 1, 1)]}))


def test_two_stages_of_one_rank_need_their_order():
    rows = [(F, 1, 0), (F, 0, 0), (B, 1, 0), (B, 0, 0)]
    with pytest.raises(PlanError, match="1F0 comes before 0F0"):
        check(Schedule((0, 0), 1, (np.array(rows, np.int32),)))


# -- of one's own ------------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[Callable[[Callable[[int, int], Sequence[str]]], Schedule]]:
    """Registers an order, and builds it for 2 stages and 2 micro-batches."""

    def build(order):
        register("mine", order)
        return SCHEDULES["mine"](2, 2)

    yield build
    del SCHEDULES["mine"]


def test_a_registered_schedule_is_what_its_text_says(own):
    order = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    schedule = own(lambda n_stages, n_micro: order[:n_stages])
    assert text(schedule) == "\n".join(order)
    assert schedule.codes[1].tolist() == SCHEDULES["1f1b"](2, 2).codes[1].tolist()
    assert live_micro_batches(schedule) == (2, 1)


@given(STAGES, MICROS)
def test_the_text_of_any_schedule_makes_it_again(n_stages, n_micro):
    built = SCHEDULES["1f1b"](n_stages, n_micro)
    register("again", lambda stages, micros: text(SCHEDULES["1f1b"](stages, micros)).splitlines())
    try:
        again = SCHEDULES["again"](n_stages, n_micro)
    finally:
        del SCHEDULES["again"]
    assert all(np.array_equal(a, b) for a, b in zip(again.codes, built.codes, strict=True))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("F0 F1 B0 B1", r"'mine' gives 'F0 F1 B0 B1'; give a list of strings, one per rank, such as"),
        (None, r"'mine' gives None; give a list of strings"),
        ([], r"'mine' gives \[\]; give a list of strings"),
        (
            [["F0", "F1", "B0", "B1"]] * 2,
            r"'mine' gives \[\['F0', 'F1', 'B0', 'B1'\], .*\.\.\.; give a list of strings",
        ),
        (["F0 F1 B0 B1"], r"'mine' gives 1 lines for 2 stages; one line each"),
        (["F0 F1 B0 B1", "F0 X1 B0 B1"], r"'mine', stage 1: 'X1' is no action; write F or B"),
        (["F0 F1 B0 B1", "F 0 F1 B0 B1"], r"'mine', stage 1: 'F' is no action"),
        (["F0 F1 B0 B1", "F0 W0 F1 B1"], "schedule 'mine': stage 1, micro-batch 0 has F W; it needs F and B"),
        (["F0 F1 B0 B1", "B0 F0 F1 B1"], r"1B0 comes before 1F0"),
        (["F0 F1 B0 B1", "F0 F1 B0"], r"stage 1, micro-batch 1 has F; it needs F and B"),
        (["F0 F1 B0 B1", ""], r"stage 1, micro-batch 0 has nothing; it needs F and B"),
        (["F0 F1 B0 B1", "F0 F1 F1 B0 B1"], r"1F1 on rank 1 comes twice"),
        (["F0 F1 B1 B0", "F0 F1 B0 B1"], r"stage 0: the backward of micro-batch 0 comes after that of 1"),
        (["F0 F1 F2 B0 B1 B2", "F0 F1 B0 B1"], r"0F2 on rank 0 is outside the 2 stages and 2 micro-batches"),
    ],
)
def test_an_order_that_cannot_run_is_refused_with_its_place(own, lines, words):
    with pytest.raises(PlanError, match=words):
        own(lambda n_stages, n_micro: lines)


def test_what_an_order_raises_is_said_with_its_place(own):
    def order(n_stages, n_micro):
        return json.loads("F0 F1")

    line = order.__code__.co_firstlineno + 1
    place = f' (File "{__file__}", line {line})'
    with pytest.raises(PlanError, match=re.escape(place)):
        own(order)


def two_each(n_stages: int, n_micro: int) -> list[str]:
    """All forwards of a rank's first stage, of its second one, and back."""
    n_ranks = n_stages // 2
    return [
        " ".join(
            f"{stage}{kind}{micro}"
            for kind, stages in (("F", (rank, n_ranks + rank)), ("B", (n_ranks + rank, rank)))
            for stage in stages
            for micro in range(n_micro)
        )
        for rank in range(n_ranks)
    ]


@pytest.mark.parametrize("name", PLANNED)
def test_where_stages_of_a_planned_order_are_does_not_ask_for_the_order(name: str) -> None:
    for n_ranks in (1, 2, 5):
        assert homes_of(name, n_ranks) == build(name, stages_on(name, n_ranks), 5, n_ranks).rank_of_stage


def test_a_schedule_of_ones_own_has_as_many_stages_per_rank_as_it_says(own) -> None:
    own(lambda n_stages, n_micro: ["F0 F1 B0 B1"] * n_stages)
    assert stages_on("mine", 3) == 3
    register("mine", two_each, stages_per_rank=2)
    assert stages_on("mine", 3) == 6
    assert build("mine", stages_on("mine", 3), 4, 3).rank_of_stage == (0, 1, 2, 0, 1, 2)
    assert build("mine", 6, 4).rank_of_stage == (0, 1, 2, 0, 1, 2)
    with pytest.raises(PlanError, match="'mine' gives 1 lines for 2 stages on 2 ranks; one line per rank"):
        build("mine", 2, 4, 2)
    register("mine", two_each)  # which says nothing
    assert stages_on("mine", 3) == 3
    for wrong in (0, 1.5, True):
        with pytest.raises(PlanError, match=r"schedule 'mine': stages_per_rank = .*; give an integer >= 1"):
            register("mine", two_each, stages_per_rank=wrong)


def test_an_order_of_ones_own_that_fails_for_some_numbers_is_left_out_there() -> None:
    def picky(stages: int, micros: int) -> list[str]:
        raise ValueError("three stages only")

    register("picky", picky)
    try:
        with pytest.raises(PlanError, match="schedule 'picky' of 2 stages and 4 micro-batches: ValueError"):
            SCHEDULES["picky"](2, 4)
    finally:
        del SCHEDULES["picky"]
