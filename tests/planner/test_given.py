"""A plan from elsewhere is refused at the first difference, with both values and the next move."""

from __future__ import annotations

import dataclasses

import pytest
from planner_cases import uniform

from mpipipe.errors import PlanError
from mpipipe.planner import make_plan
from mpipipe.planner.given import check_given, check_ranks
from mpipipe.values import Numerics, Plan

NOW = Numerics(16, 4, 4, 1, 1, "torch", "mkl", "fp32", "per_use", {}, "2.13", "AVX512", 0)
NAMES = ["g0", "g1", "g2", "g3"]


def plan(**layout) -> Plan:
    made, _ = make_plan(uniform(4, 2), NOW, "1f1b", 4, 2)
    return dataclasses.replace(made, layout=dataclasses.replace(made.layout, **layout))


def test_one_that_fits_is_taken_and_another_machine_is_a_note():
    assert check_given(plan(cuts=("g1",)), NOW, 2, NAMES) == []
    here = dataclasses.replace(NOW, torch="2.14", instruction_set="AVX2")
    notes = check_given(plan(), here, 2, NAMES)
    assert notes == [
        "planned with torch '2.13', this run has '2.14'",
        "planned with instruction_set 'AVX512', this run has 'AVX2'",
    ]
    fast = dataclasses.replace(NOW, kernels="2")
    made = dataclasses.replace(plan(), numerics=dataclasses.replace(NOW, kernels="1"))
    assert check_given(made, fast, 2, NAMES) == ["planned with kernels '1', this run has '2'"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            plan(ranks=((0,), (1,), (2,))),
            "p.json has 3 stages in layout.ranks, and there are 2 ranks; start 3",
        ),
        (plan(schedule="1f1c"), "layout.schedule = '1f1c'; expected one of 1f1b, gpipe.*mean '1f1b'"),
        (plan(cuts=("g33",)), "p.json: layout.cuts names 'g33', which is no group.*did you mean 'g3'"),
        (plan(cuts=("g0",)), "p.json: stage 0 is empty"),
        (plan(ranks=((1,), (1,))), r"p.json: layout.ranks is \[\[1\], \[1\]\]"),
        (plan(cuts=("g1", "g2")), "p.json: 3 stages by layout.cuts, but layout.ranks has 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(given, words):
    with pytest.raises(PlanError, match=words):
        check_given(given, NOW, 2, NAMES, "p.json")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (plan(ranks=((0,),)), "p.json has 1 stages in layout.ranks, and there are 2 ranks"),
        (plan(cuts=("g1", "g2")), "p.json: 3 stages by layout.cuts, but layout.ranks has 2"),
    ],
)
def test_stages_are_held_against_ranks_without_a_model(given, words):
    with pytest.raises(PlanError, match=words):
        check_ranks(given.layout, 2, "p.json")


@pytest.mark.parametrize(
    "now",
    [{"batch": 32}, {"micro_batches": 8}, {"blocks": 2}, {"threads": 2}, {"gemm": "onednn"},
     {"precision": "bf16"}, {"tied": "eager"}, {"seed": 7}],
)  # fmt: skip
def test_other_numerics_are_refused(now):
    (name, value), was = next(iter(now.items())), getattr(NOW, next(iter(now)))
    words = f"the plan has numerics.{name} = {was!r}, this run {value!r}; .* or plan again"
    with pytest.raises(PlanError, match=words):
        check_given(plan(), dataclasses.replace(NOW, **now), 2, NAMES)


def test_another_model_is_refused_at_the_first_group_that_differs():
    words = "a model of 4 groups, this one has 5; the first that differs is group 2: 'g2' there, 'new' here"
    with pytest.raises(PlanError, match=words):
        check_given(plan(), NOW, 2, ["g0", "g1", "new", "g2", "g3"])
    with pytest.raises(PlanError, match=r"group 3: 'g3' there, '\(none\)' here"):
        check_given(plan(), NOW, 2, ["g0", "g1", "g2"])
