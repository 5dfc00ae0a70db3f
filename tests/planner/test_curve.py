"""What more ranks bring: closed formulas, the knee, and levels that do not fit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from made_run import made_plan
from planner_cases import HUGE, cluster, uniform

from mpipipe.errors import PlanError
from mpipipe.planner import make_plan
from mpipipe.planner.curve import Curve, Level, Misfit, knee_of, resource_curve
from mpipipe.values import Cluster, Numerics, Prediction, from_json, to_json

BATCH, MICRO = 16, 8


def numerics() -> Numerics:
    return replace(made_plan()[0].numerics, batch=BATCH, micro_batch=2, micro_batches=MICRO)


def curve(ranks: tuple[int, ...], memory: int = HUGE, samples: int | None = None, **nbytes: int) -> Curve:
    """Sixteen equal groups of 3 s; two ranks to a node, twelve at most."""
    costs = uniform(16, 1, **nbytes)

    def machine(n: int) -> Cluster:
        if n > 12:
            raise PlanError(f"{n} ranks, but there are 12; add some")
        return cluster([1.0] * n, [memory] * n)

    def planned(cluster: Cluster) -> Prediction:
        on, n = replace(costs, cluster=cluster), len(cluster.devices)
        return make_plan(on, numerics(), "1f1b", 4, n)[0].prediction

    return resource_curve(planned, BATCH, ranks, machine, samples)


def step_s(n: int) -> float:
    """(m + n - 1) stages of 16 / n groups."""
    return (MICRO + n - 1) * 3.0 * 16 / n


def test_each_level_is_the_closed_formula() -> None:
    found = curve((1, 2, 4, 8), samples=160)
    assert [level.ranks for level in found.levels] == [1, 2, 4, 8]
    assert [level.nodes for level in found.levels] == [1, 1, 2, 4]
    assert (found.steps, found.epoch, found.misfits) == (10.0, True, ())
    for level in found.levels:
        n = level.ranks
        assert level.step_s == pytest.approx(step_s(n))
        assert level.samples_per_s == pytest.approx(BATCH / step_s(n))
        assert level.efficiency == pytest.approx(MICRO / (MICRO + n - 1))
        assert level.bubble == pytest.approx((n - 1) / (MICRO + n - 1))
        assert level.node_hours == pytest.approx(level.nodes * step_s(n) * 10 / 3600)
    assert from_json(Curve, to_json(found)) == found
    assert found.end == ""


def test_where_the_cluster_ends_is_known() -> None:
    assert curve((1, 12)).end == "13 ranks, but there are 12"


def test_data_without_an_end_are_counted_by_a_thousand_steps() -> None:
    found = curve((2,))
    assert (found.steps, found.epoch) == (1000.0, False)
    assert found.levels[0].node_hours == pytest.approx(step_s(2) * 1000 / 3600)


def test_what_does_not_fit_is_named_and_efficiency_begins_where_it_does() -> None:
    """A group of 100 bytes takes 400; its 16 together 6400."""
    found = curve((1, 2, 4, 16), memory=2000, param_bytes=100)
    assert [level.ranks for level in found.levels] == [4]
    assert found.levels[0].efficiency == 1.0
    assert found.misfits == (
        Misfit(1, "no cut fits; with the fastest, rank 0 lacks 4400 bytes of memory"),
        Misfit(2, "no cut fits; with the fastest, rank 1 lacks 1200 bytes of memory"),
        Misfit(16, "16 ranks, but there are 12"),
    )


def test_where_nothing_fits_the_last_level_says_what_would() -> None:
    with pytest.raises(PlanError, match=r"stage 1 of 2 .* short .* start 4 ranks"):
        curve((1, 2), memory=2000, param_bytes=100)


def level(ranks: int, seconds: float) -> Level:
    return Level(ranks, ranks, seconds, 1 / seconds, 1 / (seconds * ranks), 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("faster", "knee"), [([2, 2, 2], 8), ([1.9, 1.42, 1.4], 4), ([1.41, 1.41, 1.41], 1), ([1.3, 1.9, 1], 4)]
)
def test_a_doubling_must_bring_the_square_root_of_two(faster: list[float], knee: int) -> None:
    seconds = [1 / math.prod(faster[:i]) for i in range(4)]
    assert knee_of([level(1 << i, s) for i, s in enumerate(seconds)]) == knee


def test_of_equal_levels_the_smaller_is_the_knee() -> None:
    assert knee_of([level(1, 2.0), level(4, 1.0)]) == 1
