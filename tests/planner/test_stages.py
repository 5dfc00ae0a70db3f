"""Group costs to stage costs, against the definitions written out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import HUGE, all_cuts, cluster, group, naive_fixed_bytes, problems

from mpipipe.errors import PlanError
from mpipipe.planner import StageTie, stage_costs, stage_ties
from mpipipe.planner.stages import Ranges, walked
from mpipipe.values import RECOMPUTE, Costs, Recompute, StageCost, Tie


def test_a_tied_gpt_on_two_stages_by_hand():
    groups = (
        group(
            "wte",
            1,
            0,
            1,
            param_bytes=100,
            stash_bytes=8,
            act_bytes=32,
            grad_bytes=33,
            workspace_bytes=6,
            at_work_bytes=5,
        ),
        group("block", 2, 2, 2, param_bytes=60, stash_bytes=16, act_bytes=34, grad_bytes=35),
        group("head", 4, 4, 4, param_bytes=100, stash_bytes=64, workspace_bytes=9, at_work_bytes=7),
    )
    machine = cluster([1.0, 2.0], [HUGE] * 2)
    costs = Costs(groups, machine, (Tie("wte", 100, (0, 2)),), 4.0, 0.01, "modelled", 0.0)
    first, last = stage_costs(costs, (1,))
    assert first == StageCost(1, 0, 1, 1.0, 400, 8, 6, 32, 0, at_work_bytes=5, in_two_bytes=5)
    assert last == StageCost(
        3, 3, 3, 0.3, 640, 16 + 64 + 32, 9, 0, 33, at_work_bytes=7, waiting_bytes=80, in_two_bytes=35
    )
    assert stage_ties(costs.ties, (1,)) == (StageTie(0, (1,), 100),)
    (whole,) = stage_costs(costs, ())
    assert whole.fixed_bytes == 4 * 160 + 100  # the weight once, a gradient for each of its two uses
    assert whole.step_s == 1.6
    assert stage_ties(costs.ties, ()) == ()


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(problems(memory="huge"), st.data())
def test_against_plain_sums(problem, data):
    costs, n_stages, _ = problem
    cuts = data.draw(st.sampled_from(list(all_cuts(len(costs.groups), n_stages))))
    edges = (0, *cuts, len(costs.groups))
    stages = stage_costs(costs, cuts)
    for s, stage in enumerate(stages):
        mine, speed = costs.groups[edges[s] : edges[s + 1]], costs.cluster.devices[s].speed
        assert stage.fwd_s == sum(g.fwd_s for g in mine) / speed
        assert stage.bwd_input_s == sum(g.bwd_input_s for g in mine) / speed
        assert stage.bwd_weight_s == sum(g.bwd_weight_s for g in mine) / speed
        assert stage.fixed_bytes == naive_fixed_bytes(costs, edges[s], edges[s + 1])
        assert stage.workspace_bytes == max(g.workspace_bytes for g in mine)
        received = max(0, stages[s - 1].act_bytes - mine[0].received_bytes) if s else 0
        assert stage.stash_bytes == sum(g.stash_bytes for g in mine) + received
    updated = sum(stage.step_s * d.speed for stage, d in zip(stages, costs.cluster.devices, strict=True))
    distinct = sum(g.param_bytes for g in costs.groups)
    distinct -= sum(tie.nbytes * (len(set(tie.groups)) - 1) for tie in costs.ties)
    assert updated == distinct * costs.step_s_per_byte  # every weight is updated once, wherever the cuts


def test_a_stage_updates_each_of_its_groups():
    groups = tuple(replace(group(str(i), 1, 1, 1, param_bytes=8), update_s=2.0**i) for i in range(3))
    costs = Costs(groups, cluster([1.0, 2.0], [HUGE] * 2), (), 4.0, 0.5, "modelled", 0.0)
    assert [stage.step_s for stage in stage_costs(costs, (1,))] == [4 + 1, (8 + 2 + 4) / 2]


def test_only_the_owner_of_a_tied_parameter_has_its_state():
    groups = tuple(group(str(i), 1, 1, 1, param_bytes=8) for i in range(3))
    ties = (Tie("w", 8, (0, 2)),)
    costs = Costs(groups, cluster([1.0] * 2, [HUGE] * 2), ties, 4.0, 0.0, "modelled", 0.0, 2.0)
    assert [stage.fixed_bytes for stage in stage_costs(costs, (1,))] == [8 * 4, 8 * 4 + 8 * 2]


def test_ties_are_stages_each_once():
    ties = (Tie("a", 8, (0, 3, 4, 9)), Tie("b", 4, (3, 3)), Tie("c", 2, (4, 5)))
    assert stage_ties(ties, (3, 5, 8)) == (StageTie(0, (1, 3), 8), StageTie(1, (2,), 2))


@pytest.mark.parametrize("cuts", [(0,), (2, 2), (3,), (2, 1)])
def test_an_empty_stage_is_refused(cuts):
    costs = Costs(tuple(group(f"g{i}") for i in range(3)), cluster([1.0] * 3, [HUGE] * 3), (), 4.0, 0.0,
                  "modelled", 0.0)  # fmt: skip
    with pytest.raises(PlanError, match="is empty"):
        stage_costs(costs, cuts)


@pytest.mark.slow
@given(problems(memory="huge"), st.sampled_from(RECOMPUTE))
def test_tensors_of_a_micro_batch_at_work_are_those_of_its_heaviest_moment(
    problem: tuple[Costs, int, int], mode: Recompute
) -> None:
    """Forward adds stash group by group, backward lets it go, and I puts in its place what waits for W: a
    workspace meets only what is there."""
    costs, _, _ = problem
    n = len(costs.groups)
    groups = tuple(
        replace(
            g,
            at_work_bytes=g.workspace_bytes // 2,
            waiting_bytes=g.stash_bytes // 3 + g.grad_bytes // 2,
            waiting_grad_bytes=g.grad_bytes // 2,
        )
        for g in costs.groups
    )
    costs = replace(costs, groups=groups)
    for end in range(1, n + 1):
        ending = Ranges(costs).ending_at(end, 0, mode)
        found = ending.at_work_bytes
        for first in range(end):
            stage = costs.groups[first:end]
            stashed = list(itertools.accumulate(group.stash_bytes for group in stage))
            grads = [group.grad_bytes for group in stage[:-1]] + [0]  # those of the last are messages
            heaviest = max(
                s + group.at_work_bytes + g for s, group, g in zip(stashed, stage, grads, strict=True)
            )
            assert found[first] == max(0, heaviest - stashed[-1])
            late = [group.waiting_bytes for group in stage]
            late[-1] -= stage[-1].waiting_grad_bytes  # a message, too
            assert ending.waiting_bytes[first] == sum(late)
            heaviest = max(
                s + group.at_work_bytes + g + sum(late[i + 1 :])
                for i, (s, group, g) in enumerate(zip(stashed, stage, grads, strict=True))
            )
            assert ending.in_two_bytes[first] == max(0, heaviest - stashed[-1])


@pytest.mark.parametrize(("most", "least"), [(1000, 0), (3, 7)])
def test_a_walk_goes_where_each_step_is_better(most: int, least: int) -> None:
    target, seen = (6, 8, 10), list[tuple[int, ...]]()
    left = 12

    def nearer(cuts: tuple[int, ...]) -> bool:
        nonlocal left
        seen.append(cuts)
        away = sum(abs(a - b) for a, b in zip(cuts, target, strict=True))
        gains, left = away < left, min(left, away)
        return gains

    found = walked(12, (2, 4, 6), most, nearer)
    assert left >= least
    assert (found == target) == (most == 1000)
    assert len({*seen, (2, 4, 6)}) == len(seen) + 1 <= most + 1, "each is looked at once"
    assert all(0 < a < b < c < 12 for a, b, c in seen)
