"""Cuts for several stages per rank."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from planner_cases import cluster, uniform

from mpipipe.errors import PlanError
from mpipipe.planner.prove import prove
from mpipipe.planner.search import make_plan
from mpipipe.planner.several import evened, shared
from mpipipe.values import Numerics

NUMERICS = Numerics(12, 1, 12, 1, 1, "torch", "mkl", "fp32", "per_use", {}, "2", "x", 0)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "v-half", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_a_plan_is_made_proved_and_shorter_than_its_bound_allows(schedule, n_ranks):
    costs = uniform(12, n_ranks)
    plan, program = make_plan(costs, NUMERICS, schedule, 1, n_ranks)
    prove(program)
    assert plan.layout.n_ranks == n_ranks
    assert plan.layout.receive_window == program.receive_window >= 1
    assert plan.prediction.step_s >= plan.prediction.lower_bound_s * (1 - 1e-9)


def test_what_a_rank_has_to_do_counts_and_not_a_stage():
    """A heavy last group shares its rank with a light first stage."""
    base = uniform(12, 2)
    heavy = dataclasses.replace(base.groups[-1], fwd_s=5 * base.groups[0].fwd_s)
    costs = dataclasses.replace(base, groups=(*base.groups[:-1], heavy))
    homes = (0, 1, 1, 0)
    placed = shared(costs, homes)
    seconds = [g.seconds for g in costs.groups]

    def load(cuts):
        edges = (0, *cuts, 12)
        sums = [sum(seconds[a:b]) for a, b in itertools.pairwise(edges)]
        return max(sums[0] + sums[3], sums[1] + sums[2])

    found = evened(placed, homes, (3, 6, 9))
    assert load(found) < load((3, 6, 9))
    assert load(found) <= sum(seconds) / 2 + min(seconds)


def test_too_little_memory_is_told():
    costs = uniform(12, 2)
    small = dataclasses.replace(costs, cluster=cluster([1.0] * 2, [1] * 2))
    heavy = dataclasses.replace(
        small, groups=tuple(dataclasses.replace(g, param_bytes=100) for g in small.groups)
    )
    with pytest.raises(PlanError, match="short"):
        make_plan(heavy, NUMERICS, "zb-v", 4, 2)
