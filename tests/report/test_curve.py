"""The table and the sentence of levels of ranks."""

from __future__ import annotations

from dataclasses import replace

from mpipipe.planner.curve import Curve, Level, Misfit
from mpipipe.planner.per_node import Split
from mpipipe.report.curve import advice, beyond_proportion, curve_table, splits_table

CURVE = Curve(
    levels=(
        Level(2, 1, 4.0, 4.0, 1.0, 0.1, 3 << 30, 20.0),
        Level(4, 2, 2.5, 6.4, 0.8, 0.25, 2 << 30, 25.0),
        Level(8, 4, 2.0, 8.0, 0.5, 0.5, 1 << 30, 40.0),
    ),
    misfits=(Misfit(1, "no cut fits; with the fastest, rank 0 lacks 1 GiB of memory"),),
    steps=1000.0, epoch=False, knee=4, end="",
)  # fmt: skip


def test_a_row_for_each_level_those_that_do_not_fit_included() -> None:
    rows = [line.split() for line in curve_table(CURVE).splitlines()]
    assert rows[0] == ["ranks", "nodes", "samples/s", "efficiency", "bubble", "memory", "node-hours"]
    assert rows[1][:7] == ["1", *"------"]
    assert " ".join(rows[1][7:]).endswith("rank 0 lacks 1 GiB of memory")
    assert rows[2] == ["2", "1", "4", "100.0%", "10.0%", "3", "GiB", "20"]
    assert rows[3] == ["4", "2", "6.4", "80.0%", "25.0%", "2", "GiB", "25", "<", "knee"]
    assert rows[4] == ["8", "4", "8", "50.0%", "50.0%", "1", "GiB", "40"]


def test_of_the_ways_to_share_out_cores_the_fastest_and_the_next_are_told() -> None:
    """Two nodes: 4 ranks of the curve with two on each, or 2 with one."""
    slower = replace(CURVE, levels=(Level(2, 2, 2.52, 6.3, 1.0, 0.0, 1 << 30, 1.0),), knee=2)
    rows = splits_table({Split(1, 8): slower, Split(2, 4): CURVE}, [1, 2, 4]).splitlines()
    assert rows[0].split() == ["nodes", "1", "x", "8", "2", "x", "4", "next", "best"]
    assert rows[1].split() == ["1", "-", "<", "4000"]
    assert rows[2].split() == ["2", "2520", "<", "2500", "1", "x", "8", "is", "as", "good"]
    assert rows[3].split() == ["4", "-", "<", "2000"]
    slow = replace(slower, levels=(replace(slower.levels[0], step_s=5.0),))
    (_, row) = splits_table({Split(1, 8): slow, Split(3, 2): CURVE}, [2], spares=2).splitlines()
    assert row.split() == ["2", "-", "<", "2500"], "4 of 6 ranks work"
    (_, row) = splits_table({Split(1, 8): slow, Split(2, 4): CURVE}, [2]).splitlines()
    assert row.endswith("1 x 8 takes 100% longer")


def test_it_says_how_many_nodes_to_ask_for() -> None:
    assert advice(CURVE) == (
        "ask for 2 nodes (4 ranks): 6.4 samples/s at 80% efficiency and 25 node-hours per 1,000 steps; "
        "4 nodes (8 ranks) would be 1.25 times as fast for 1.60 times the node-hours"
    )
    last = advice(replace(CURVE, knee=8, epoch=True))
    assert last.startswith(
        "ask for 4 nodes (8 ranks): 8 samples/s at 50% efficiency and 40 node-hours per epoch;"
    )
    assert last.endswith("the largest level that was planned, and larger ones may be worth it as well")


def test_what_could_not_be_planned_is_not_said_to_be_worth_it() -> None:
    last = replace(CURVE, knee=8)
    few = replace(last, misfits=(*CURVE.misfits, Misfit(16, "16 stages but only 9 groups"), Misfit(32, "no")))
    assert advice(few).endswith("; larger levels could not be planned: 16 stages but only 9 groups")
    ended = replace(last, end="9 ranks, but the cluster file counts 8 devices")
    assert advice(ended).endswith("; larger levels could not be planned: " + ended.end)


def test_a_reason_is_told_once() -> None:
    why = "of {} ranks, 0 and 2 are on two nodes, but links.switch is missing"
    misfits = (*(Misfit(n, why.format(n)) for n in (16, 32, 64)), Misfit(128, "another"))
    rows = curve_table(replace(CURVE, misfits=misfits), width=200).splitlines()[4:]
    assert rows[0].endswith(why.format(16))
    assert [row.split("-  ")[-1].strip() for row in rows[1:]] == ["as with 16 ranks"] * 2 + ["another"]


def test_an_efficiency_above_all_is_explained() -> None:
    assert beyond_proportion(CURVE) == []
    more = replace(CURVE, levels=(CURVE.levels[0], replace(CURVE.levels[1], efficiency=1.2)))
    (said,) = beyond_proportion(more)
    assert said.startswith("efficiency above 100%: it is relative to 2 ranks, the smallest level that fits")
