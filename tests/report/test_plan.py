"""A plan for people: as a table, and as a file that they edit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from made_run import made_costs

from mpipipe.errors import PlanError
from mpipipe.planner import make_plan
from mpipipe.planner.alternatives import Alternative
from mpipipe.planner.noise import Noise
from mpipipe.report.plan import Row, against, describe, headline, outlook, steadiness
from mpipipe.report.plan_file import plan_text, read_plan
from mpipipe.values import Cluster, Costs, Device, GroupCost, Link, Numerics, Plan, Tie, from_json

NUMERICS = Numerics(16, 4, 4, 1, 1, "torch", "mkl", "fp32", "per_use", {}, "2", "x", 0)


def plan(n_ranks: int = 2) -> Plan:
    groups = tuple(GroupCost(f"g{i}", 0.1, 0.1, 1 / 3, 8, 4, 2, 1 << 20, 1 << 20) for i in range(2 * n_ranks))
    devices = (Device("cpu", 1.0, 1 << 30, 1),) * n_ranks
    cluster = Cluster(devices, (0,) * n_ranks, {"node": Link(1e-6, 1e9)})
    costs = Costs(groups, cluster, (Tie("w", 8, (0, 3)),), 4.0, 1e-9, "modelled", 0.0)
    return make_plan(costs, NUMERICS, "1f1b", 4, n_ranks)[0]


# -- the file ------------------------------------------------------------------------------------------


def test_a_file_is_read_back_and_has_a_line_per_group():
    made = plan()
    text = plan_text(made)
    assert from_json(Plan, text) == made
    lines = text.splitlines()
    assert [line.split('"')[1] for line in lines if line.startswith('  "')] == [
        "numerics", "layout", "prediction", "costs",
    ]  # fmt: skip
    assert sum('"name": "g' in line for line in lines) == 4
    assert '      "g2"' in lines, "a cut is a line of its own"


def test_one_line_says_what_was_decided_and_what_it_takes():
    made = plan(2)
    step_s, most = made.prediction.step_s, max(made.prediction.peak_bytes) / 2**20
    assert headline(made) == (
        "plan: 1f1b, 4 micro-batches of 4, 2 stages, cut before g2; "
        f"predicted step {step_s:.4g} s, memory {most:.0f} MiB per rank at most"
    )
    whole = dataclasses.replace(made.layout, cuts=(), ranks=((0,),))
    assert "4 micro-batches of 4, one stage; predicted" in headline(dataclasses.replace(made, layout=whole))
    assert "6 stages, cut before g2, g4, g6, 2 more; predicted" in headline(plan(6))


def test_a_line_says_which_stages_recompute_and_what_it_costs():
    made = plan(3)
    assert made.costs is not None
    assert "recomputed" not in describe(made, made.costs, 0.0)
    edited = dataclasses.replace(
        made, layout=dataclasses.replace(made.layout, recompute=("full", "full", "none"))
    )
    assert "recomputed in backward, part of F+B: stages 0..1 full (200 ms)" in describe(
        edited, made.costs, 0.0
    )
    edited = dataclasses.replace(
        made, layout=dataclasses.replace(made.layout, recompute=("none", "selective", "full"))
    )
    line = "recomputed in backward, part of F+B: stages 1 selective (0 ms), 2 full (200 ms)\n"
    assert line in describe(edited, made.costs, 0.0)


def test_an_edited_file_is_another_plan(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(plan_text(plan()).replace('      "g2"', '      "g1"'))
    assert read_plan(path).layout.cuts == ("g1",)
    assert read_plan(path).hash != plan().hash


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"1f1b"', "1f1b", "is not JSON: .* line"),
        ('"schedule"', '"shedule"', "layout.shedule is not a key of a plan|layout.schedule is missing"),
        ('"blocks": 1,', "", "numerics.blocks is missing"),
        ('"recompute": []', '"recompute": ["some"]', "layout.recompute.0 = 'some'; input should be 'none'"),
        ('"receive_window": 4', '"receive_window": 0', "layout.receive_window = 0; must be at least 1"),
        ('"batch": 16', '"batch": "many"', "numerics.batch = 'many'; input should be a valid integer"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path: Path, old: str, new: str, words: str):
    path = tmp_path / "plan.json"
    text = plan_text(plan())
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=f"plan.json: ({words})"):
        read_plan(path)


def test_a_missing_file_is_named():
    with pytest.raises(PlanError, match=r"nowhere.json: cannot be read .*; name a plan.json"):
        read_plan("nowhere.json")


def test_a_curve_is_not_taken_for_a_plan(tmp_path: Path):
    path = tmp_path / "curve.json"
    path.write_text('{"levels": [], "misfits": [], "steps": 1.0, "epoch": false, "knee": 4, "end": ""}')
    with pytest.raises(PlanError, match=r"curve.json: this is a curve of several levels of ranks, not a"):
        read_plan(path)


@pytest.mark.parametrize(
    ("widest", "words"),
    [(0.12, "up to 12%, as their"), (0.4, "up to about 12% in the middle, 40% at most, as")],
)
def test_spreads_that_differ_are_told_apart(widest: float, words: str):
    found = Noise(32, 5, 0.12, widest, False, (1.0, 2.0), 32, 0.0009)
    off, holds = steadiness(found)
    assert f"each off by {words}" in off
    assert holds == "the cut holds in 32 of 32 draws, against 5 others"


# -- the table -----------------------------------------------------------------------------------------


def rows(n: int, **first: float) -> list[Row]:
    like = Row(0, "g0", 2, 1000, 1.5, 0.25, 3 << 20, 5 << 20, 0.25)
    made = [dataclasses.replace(like, stage=s, start=f"g{s}", memory_bytes=(n - s) << 20) for s in range(n)]
    return [dataclasses.replace(made[0], **first), *made[1:]]


def test_stages_that_are_alike_are_one_row():
    text = outlook(plan(8), rows(8, compute_s=2.0), 16, "samples")
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["0", "1..7"]
    assert "7..1 " in text, "memory, from the first to the last"
    assert "1..7" not in outlook(
        plan(8), [dataclasses.replace(r, groups=r.stage) for r in rows(8)], 16, "samples"
    )


def test_of_many_stages_the_ends_the_slowest_and_the_fullest_are_shown():
    many = [dataclasses.replace(r, groups=r.stage + 1) for r in rows(64)]
    many[30] = dataclasses.replace(many[30], compute_s=9.0)
    text = outlook(dataclasses.replace(plan(), prediction=plan().prediction), many, 16, "samples")
    shown = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    assert {"0", "30", "63"} <= set(shown)
    assert len(shown) <= 24
    assert f"({64 - len(shown)} stages more" in text
    firsts = [line.split()[0] for line in text.splitlines() if line[:1].isdigit() or line[:3] == "..."]
    assert [firsts[i - 1 : i + 2] for i, first in enumerate(firsts) if first == "..."] == [
        ["10", "...", "30"], ["30", "...", "53"],
    ]  # fmt: skip


def test_much_memory_is_said_in_gib_and_a_long_step_in_seconds():
    p = dataclasses.replace(plan().prediction, step_s=664.0, peak_bytes=(318 << 30, 1 << 30))
    text = outlook(dataclasses.replace(plan(), prediction=p), rows(2), 16, "samples")
    assert "memory GiB" in text
    assert "most memory: rank 0, 318.0 GiB" in text
    assert "step 664 s: " in text


def test_micro_batches_of_two_sizes_are_said():
    made = plan()
    uneven = dataclasses.replace(made, numerics=dataclasses.replace(NUMERICS, batch=14))
    for p, words in ((made, "1f1b, 4 micro-batches of 4, "), (uneven, "1f1b, 4 micro-batches of 3 or 4, ")):
        assert words in outlook(p, rows(2), 16, "samples")
        assert words in describe(p, p.costs, 1.0)


def test_only_the_names_of_groups_are_shortened():
    text = outlook(plan(), rows(2, start="layers.10.block." + "x" * 200), 16, "samples", width=110)
    first = text.splitlines()[1]
    assert "layers.10.block" in first
    assert first.rstrip().endswith("25.0%")
    assert len(first) <= 110


def test_a_long_name_takes_no_figure_from_the_cut():
    names = [f"blocks.{'x' * 60}{i}" for i in range(8)]
    made = made_costs()
    groups = tuple(dataclasses.replace(g, name=name) for g, name in zip(made.groups, names, strict=True))
    costs = dataclasses.replace(made, groups=groups)
    text = describe(make_plan(costs, NUMERICS, "1f1b", 4, 2)[0], costs, 1.0, width=100)
    head, *cut = text.splitlines()[1:4]
    assert head.split() == ["stage", "from", "groups", "F+B", "ms", "send", "MiB", "memory", "MiB"]
    for line in cut:
        assert re.fullmatch(r"\d +blocks\.x+… +\d +\d+\.\d\d +\d+\.\d\d +\d+", line)
        assert len(line) <= 100


def test_what_a_step_takes_is_said_with_its_unit():
    p = plan().prediction
    text = outlook(plan(), rows(2), 16 * 10, "tokens")
    assert f"{160 / p.step_s:.4g} tokens/s" in text
    assert "no cut has a shorter step than" in text


def test_alternatives_that_do_not_fit_have_no_time():
    found = [Alternative("a", 1.5, 0.123, "slower"), Alternative("b", None, None, "rank 0 lacks 3 GiB")]
    lines = against(found).splitlines()
    assert lines[1].split() == ["a", "1.5", "s", "+12.3%", "slower"]
    assert lines[2].split()[:4] == ["b", "-", "-", "rank"]


def test_the_file_is_plain_json():
    assert list(json.loads(plan_text(plan()))) == ["numerics", "layout", "prediction", "costs"]
