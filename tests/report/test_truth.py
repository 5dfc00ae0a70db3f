"""Predicted and measured by stage and kind: figures that a hand can check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_run import made_plan, made_run

from mpipipe.planner import lower, simulate
from mpipipe.planner.refine import stage_seconds
from mpipipe.planner.schedules import build, in_copies
from mpipipe.report.account import account
from mpipipe.report.run import read_run
from mpipipe.report.truth import Truth, largest_miss, truth_table, truths
from mpipipe.report.words import words
from mpipipe.values import Cluster, Device, Link, StageCost, Timeline

FOUND = (
    Truth(0, "F", 0.1, 0.11), Truth(0, "update", 0.0, 0.002),
    Truth(1, "F", 0.2, 0.15), Truth(1, "update", 0.001, 0.2 + 0.001),
)  # fmt: skip


def test_seconds_of_a_step_by_stage_and_kind(timeline: Timeline) -> None:
    """Of the small drawing: two forwards of a second each; a split backward beside a whole one."""
    seconds = {op.name: each.tolist() for op, each in stage_seconds(timeline).items()}
    assert seconds == {"F": [2.0, 2.0], "B": [4.0, 2.0], "I": [0.0, 1.0], "W": [0.0, 1.0], "STEP": [1.0, 1.0]}


def test_without_both_steps_of_one_program_there_is_nothing_to_compare() -> None:
    _, timelines = made_plan()
    assert truths({"predicted": timelines["predicted"]}) == ()
    assert truths({**timelines, "measured": made_plan(n_micro=6)[1]["measured"]}) == ()


def test_one_row_for_each_stage_and_the_largest_miss_in_words() -> None:
    head, *lines = truth_table(FOUND).splitlines()
    assert head == "predicted | measured in a step, ms, and their ratio:"
    assert [line.split() for line in lines] == [
        ["stage", "F", "update"],
        ["0", "100", "|", "110", "1.10", "0", "|", "2", "-"],
        ["1", "200", "|", "150", "0.75", "1", "|", "201", ">99"],
    ]
    assert largest_miss(FOUND) == (
        "largest miss: update of stage 1, 1 ms predicted and 201 ms measured (+200.0 ms, 201.00 of it)"
    )
    assert largest_miss(FOUND[:2]).endswith("100 ms predicted and 110 ms measured (+10.0 ms, 1.10 of it)")


def test_of_many_stages_those_are_shown_that_are_farthest_off() -> None:
    found = [Truth(s, "F", 1.0, 1.0 + 0.01 * (s * 7 % 40)) for s in range(40)]
    lines = truth_table(found).splitlines()
    shown = [int(line.split()[0]) for line in lines[2:-1]]
    assert len(shown) == 12
    assert shown == sorted(sorted(range(40), key=lambda s: -(s * 7 % 40))[:12])
    assert lines[-1] == "(28 stages more, which are less far off)"


@pytest.mark.slow
def test_the_report_of_a_run_has_them(tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "made"))
    text = words(run)
    assert truth_table(truths(run.timelines)) in text
    assert "largest miss: F of stage 1" in text
    assert max(map(len, truth_table(truths(run.timelines)).splitlines())) <= 110
    assert "largest miss" not in words(read_run(made_run(tmp_path / "going", ended=False)))


def test_copies_of_the_pipeline_are_shown_by_their_mean() -> None:
    """Of two copies of one stage, which do two micro-batches each, the other one takes twice as long."""
    one = StageCost(1.0, 2.0, 0.0, 0.5, 0, 0, 0, 0, 0, shard_bytes=100)
    schedule = in_copies([build("1f1b", 1, 2, 1)] * 2, [[0], [1]])
    device, links = Device("any", 1.0, 1 << 40, 1), {"node": Link(0.0, 100.0)}
    program, cluster = lower(schedule, (), "per_use", 4), Cluster((device,) * 2, (0, 0), links)
    twice = replace(one, fwd_s=2.0, bwd_input_s=4.0)
    alike, slower = (simulate(program, (one, other), cluster, 0.25) for other in (one, twice))
    found = {t.kind: (t.predicted_s, t.measured_s) for t in truths({"predicted": alike, "measured": slower})}
    waits = [[a.exposed_s for a in account(timeline)] for timeline in (alike, slower)]
    assert waits[1][0] != waits[1][1]
    assert found == {
        "F": (2.0, 3.0), "B": (4.0, 6.0), "update": (0.75, 0.75),
        "messages": tuple(pytest.approx(sum(each) / 2) for each in waits),
    }  # fmt: skip


def test_stages_of_one_rank_share_its_norm() -> None:
    one = StageCost(1.0, 2.0, 0.0, 0.5, 0, 0, 0, 0, 0)
    device, links = Device("any", 1.0, 1 << 40, 1), {"node": Link(0.0, 100.0)}
    program = lower(build("interleaved", 4, 4, 2), (), "per_use", 4)
    timeline = simulate(program, (one,) * 4, Cluster((device,) * 2, (0, 0), links), 0.25)
    found = truths({"predicted": timeline, "measured": timeline})
    assert [t.measured_s for t in found if t.kind == "update"] == [0.625] * 4


def test_the_parts_are_those_of_the_step() -> None:
    _, timelines = made_plan(4, 6, 16)
    found, of_rank = truths(timelines), account(timelines["measured"])
    for rank in range(4):
        mine = [t.measured_s for t in found if t.stage == rank and t.kind != "messages"]
        assert sum(mine) == pytest.approx(timelines["measured"].busy_s(rank) + of_rank[rank].norm_s)
    assert np.all([t.measured_s >= 0 for t in found])
