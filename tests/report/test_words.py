"""A run in words, and what it would take to be faster: figures that add up and that closed formulas give."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_run import made_costs, made_plan, made_run

from mpipipe.errors import PlanError, ReportError
from mpipipe.planner import make_plan
from mpipipe.report.compare import _differences, compare
from mpipipe.report.run import RunData, read_run
from mpipipe.report.summary import summary
from mpipipe.report.whatif import what_if
from mpipipe.report.words import buys_back, where, words
from mpipipe.values import Costs, Device, GroupCost, Plan


def even_plan(n_ranks: int, n_micro: int, n_groups: int, batch: int | None = None) -> Plan:
    """Equal groups of 1 + 2 seconds; links, update and memory cost nothing."""
    group = GroupCost("g", 1.0, 1.0, 1.0, 0, 0, 0, 0, 0)
    groups = tuple(replace(group, name=f"g{i}") for i in range(n_groups))
    cluster = replace(made_costs(n_ranks).cluster, devices=(Device("cpu", 1.0, 1 << 40, 1),) * n_ranks)
    costs = Costs(groups, cluster, (), 4.0, 0.0, "modelled", 0.0)
    numerics = replace(made_plan()[0].numerics, micro_batches=n_micro, batch=batch or n_micro, micro_batch=1)
    plan, _ = make_plan(costs, numerics, "1f1b", 4, n_ranks)
    return replace(plan, costs=costs)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return read_run(made_run(tmp_path_factory.mktemp("words") / "made"))


@pytest.mark.slow
def test_twice_the_micro_batches_save_half_of_the_filling() -> None:
    """(m + S - 1) c becomes (2 m + S - 1) c / 2, but for the one latency of the norm."""
    plan = even_plan(n_ranks=4, n_micro=8, n_groups=4, batch=16)
    plan = replace(plan, numerics=replace(plan.numerics, micro_batch=2))
    found = {w.change: w for w in what_if(plan)}
    finer = found["16 micro-batches instead of 8"]
    assert finer.saved_s == pytest.approx(3 * 3.0 / 2)
    assert finer.share == pytest.approx(4.5 / 33, rel=1e-4)
    assert not any("micro-batches" in w.change for w in what_if(even_plan(4, 8, 4)))  # a sample is not halved


@pytest.mark.slow
def test_one_rank_more_and_less_are_planned_anew() -> None:
    """12 groups: (m + S - 1) (12 / S) c; S = 3 needs (8 + 2) 4 c, S = 4 (8 + 3) 3 c."""
    more = {w.change: w for w in what_if(even_plan(3, 8, 12))}["one more rank like the last"]
    assert (more.step_s, more.saved_s) == pytest.approx((99.0, 21.0), rel=1e-3)
    assert more.how.startswith("mpirun -n 4,")
    alone = even_plan(2, 1, 2)  # one micro-batch: a second rank is of no use, and its messages are not free
    group = replace(alone.costs.groups[0], act_bytes=1 << 30, grad_bytes=1 << 30)  # type: ignore[union-attr]
    costs = replace(alone.costs, groups=(group, replace(group, name="g1")))  # type: ignore[type-var]
    fewer = {w.change: w for w in what_if(replace(alone, costs=costs))}
    assert fewer["one rank less"].step_s == pytest.approx(6.0)
    assert fewer["free links"].step_s == pytest.approx(6.0)


def test_a_single_rank_has_no_links_to_plan_for_another() -> None:
    plan, _ = made_plan(1)
    assert plan.costs is not None
    alone = replace(plan.costs, cluster=replace(plan.costs.cluster, links={}))
    assert not any("more rank" in w.change for w in what_if(replace(plan, costs=alone)))


@pytest.mark.slow
def test_replicas_that_more_blocks_would_allow_are_told() -> None:
    found = {w.change: w for w in what_if(even_plan(2, 4, 4))}["2 replicas instead of 1 replica"]
    assert (found.step_s, found.saved_s) == pytest.approx((24.0, 6.0), rel=1e-3)
    assert found.how.startswith("of a new run, with pipeline.blocks=2, chosen before step 0")


@pytest.mark.slow
def test_equal_stages_are_a_bound() -> None:
    """Three groups on two ranks: (4 + 1) 6 with a stage of two, (4 + 1) 4.5 if they could be halved."""
    found = {w.change: w for w in what_if(even_plan(2, 4, 3))}
    assert found["stages of equal work"].step_s == pytest.approx(22.5, rel=1e-3)
    assert "stages of equal work" not in {w.change for w in what_if(even_plan(2, 4, 4))}


@pytest.mark.slow
def test_only_what_helps_is_told_the_best_first(run: RunData) -> None:
    assert run.plan is not None
    found = what_if(run.plan)
    assert [w.saved_s for w in found] == sorted((w.saved_s for w in found), reverse=True)
    assert all(w.saved_s > 0 for w in found)
    with pytest.raises(PlanError, match="no costs"):
        what_if(replace(run.plan, costs=None))


@pytest.mark.parametrize(
    ("step", "idle", "says"),
    [
        (1.0, 0.0, "no promises"),
        (
            1.5,
            0.3,
            "no promises; the measured step is 1.50 of the predicted one, and why is not in these costs",
        ),
        (1.0, 0.3, "were for 45%, so costs are off: plan --refine takes those of this run"),
    ],
)
@pytest.mark.slow
def test_costs_that_the_run_has_refuted_are_told(run: RunData, step: float, idle: float, says: str) -> None:
    """step: measured over predicted; idle: how much more of it than predicted."""
    assert run.report is not None
    assert run.plan is not None
    seconds = step * run.plan.prediction.step_s
    report = replace(run.report, step_s=seconds, predicted_bubble=0.15, bubble=0.15 + idle)
    assert buys_back(replace(run, report=report))[1].endswith(says)


def test_the_parts_of_a_step_add_up(run: RunData) -> None:
    first, *parts, against = where(run.timelines)
    span = float(re.search(r"instruction: ([\d.]+) ms on 2 ranks", first)[1])  # type: ignore[index]
    shares = [float(re.search(r": ([\d.]+) ms", part)[1]) for part in parts]  # type: ignore[index]
    assert len(shares) == 5
    assert sum(shares) == pytest.approx(span, abs=0.2)
    changes = [float(x) for x in re.findall(r"([-+][\d.]+) ms", against)]
    step = run.timelines["measured"].makespan_s - run.timelines["predicted"].makespan_s
    assert sum(changes) == pytest.approx(step * 1e3, abs=0.3)


@pytest.mark.slow
def test_the_text_has_the_summary_the_step_and_what_would_help(run: RunData) -> None:
    text = words(run, 110)
    assert all(len(line) <= 110 for line in text.splitlines())
    for part in ("by rank", "measured: 303.3 ms", "r1 |", "where the time went:", "[mpirun -n 3,"):
        assert part in text


@pytest.mark.slow
def test_a_narrow_screen_takes_no_figure(run: RunData) -> None:
    assert run.report is not None
    ranks = tuple(replace(rank, sent_bytes=123456 << 20, exposed_s=123.4567) for rank in run.report.ranks)
    run = replace(run, report=replace(run.report, ranks=ranks, peak_bytes=(98765 << 20,) * 2))
    text = words(run, 80)
    for line in summary(run.report, 200).splitlines():
        assert line.split() in [shown.split() for shown in text.splitlines()]
    assert "…" not in text


@pytest.mark.slow
def test_a_run_that_has_gone_on_is_not_told_as_it_ended_before(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "resumed")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 61, "loss": 2.125}\n')
    found = read_run(folder)
    assert (found.report, found.trace, list(found.timelines)) == (None, None, ["predicted"])
    assert ["after 60 steps, and it has gone on to step 61" in note for note in found.notes] == [True]
    assert "step 61: loss 2.125" in words(found)


def test_a_plan_that_was_edited_in_the_folder_is_not_taken_for_the_one_that_ran(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "edited")
    plan = json.loads((folder / "plan.json").read_text())
    plan["layout"]["cuts"] = ["blocks.1"]
    (folder / "plan.json").write_text(json.dumps(plan))
    found = read_run(folder)
    assert [note.split(",")[0] for note in found.notes] == ["plan.json: is not the plan that ran"]
    assert found.plan is None
    assert found.report is not None
    assert "there is no plan to simulate" in words(found)


@pytest.mark.slow
def test_codes_that_mean_nothing_are_noted(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "made")
    trace = json.loads((folder / "timeline.json").read_text())
    trace["programs"][0]["codes"][0][0] = 77
    (folder / "timeline.json").write_text(json.dumps(trace))
    found = read_run(folder)
    assert found.trace is None
    assert "damaged: rank 0 has op 77" in found.notes[0]
    words(found)


@pytest.mark.slow
def test_what_a_run_lacks_is_said(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"is no run folder.*runs/latest"):
        read_run(tmp_path)
    going = read_run(made_run(tmp_path / "going", ended=False))
    assert (going.report, going.trace, list(going.timelines)) == (None, None, ["predicted"])
    assert "no summary.json" in words(going)
    assert "step 60: loss 2.425" in words(going)

    old = made_run(tmp_path / "old")
    summary = json.loads((old / "summary.json").read_text())
    del summary["ranks"]
    (old / "summary.json").write_text(json.dumps(summary))
    (old / "timeline.json").unlink()
    plan = json.loads((old / "plan.json").read_text())
    del plan["costs"]
    (old / "plan.json").write_text(json.dumps(plan))
    with (old / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 61, "loss": "nan"}\n{"step": 62, "lo')
    found = read_run(old)
    assert [note.split(":")[0] for note in found.notes] == ["summary.json", "timeline.json"]
    assert "at ranks: Field required" in found.notes[0]
    assert len(found.metrics) == 61
    assert math.isnan(found.metrics[-1]["loss"])
    assert "cannot be said: the plan holds no costs" in words(found)


@pytest.mark.parametrize("name", ["summary.json", "plan.json", "timeline.json", "metrics.jsonl"])
@pytest.mark.parametrize("damage", [b"", b"[1]\n", b'{"a"\n', b"\xff\xfe\n"])
@pytest.mark.slow
def test_a_damaged_file_is_left_out_with_a_note(tmp_path: Path, name: str, damage: bytes) -> None:
    folder = made_run(tmp_path / "made", steps=3)
    (folder / name).write_bytes(damage)
    found = read_run(folder)
    words(found)
    if not (name == "metrics.jsonl" and not damage):
        assert [note.split(":")[0] for note in found.notes] == [name]


def test_metrics_that_are_torn_count_up_to_there(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "made", steps=3)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('\0\0\n{"step": 4}\n')
    found = read_run(folder)
    assert len(found.metrics) == 3
    assert [note.split(";")[0] for note in found.notes] == ["metrics.jsonl: line 4 is no JSON object"]


def test_two_runs_of_the_same_bits(tmp_path: Path) -> None:
    two, four = (read_run(made_run(tmp_path / f"on{n}", n, 8)) for n in (2, 4))
    text = compare(two, four)
    assert "weights: the same to the bit" in text
    assert "training loss: the same to the bit at all 60 common steps" in text
    assert "layout.ranks" in text
    assert "defect" not in text
    row = next(line for line in text.splitlines() if line.startswith("peak memory, MiB, rank 3")).split()
    assert row[-3] == "-"


def test_of_long_orders_that_differ_the_first_place_is_shown(run: RunData) -> None:
    def ordered(*actions: str) -> RunData:
        assert run.plan is not None
        return replace(run, plan=replace(run.plan, layout=replace(run.plan.layout, actions=actions)))

    def row(other: RunData) -> list[str]:
        text = compare(order, other, 200)
        return re.split("  +", next(line for line in text.splitlines() if line.startswith("layout.actions")))

    first, second = "0F0,0B0,0F1,0B1," * 20, "1F0,1B0,1F1,1B1," * 20
    order = ordered(first, second)
    part = "1 of 2 differ, first [1][2]: "
    assert row(ordered(first, second.replace("1F1", "1W1"))) == ["layout.actions", part + "1F1", part + "1W1"]
    whole = "2 of 2 differ, first [0]: "
    begun = f"{first[:40]}…"
    assert row(ordered()) == ["layout.actions", whole + begun, whole + "-"]
    assert row(replace(run, plan=None)) == ["layout.actions", whole + begun, whole + "-"]


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        ([0.0] * 100, [0] * 100, ("100 of 100 differ, first [0]: 0.0", "100 of 100 differ, first [0]: 0")),
        (["1"] * 100, [1] * 100, ("100 of 100 differ, first [0]: '1'", "100 of 100 differ, first [0]: 1")),
        ([1] * 90, [*[1] * 90, None], ("1 of 91 differ, first [90]: -", "1 of 91 differ, first [90]: None")),
        ((1,) * 100, [1] * 100, ("a tuple", "a list")),
        (["x" * 9] * 50, 3, (f"{['x' * 9] * 50}"[:40] + "…", "3")),
        (["x" * 9] * 50, "auto", (f"{['x' * 9] * 50}"[:40] + "…", "auto")),
        (
            [list(range(100))], [[*range(99), 100]],
            ("1 of 1 differ, first [0]: …, 97, 98, 99]", "1 of 1 differ, first [0]: …, 97, 98, 100]"),
        ),
        (
            ["x" * 90 + "y" * 150], ["x" * 90 + "z" * 150],
            tuple(f"1 of 1 differ, first [0][0]: …{'x' * 10}{by * 30}…" for by in "yz"),
        ),
    ],
)  # fmt: skip
def test_of_any_two_long_lists_it_is_said_what_differs(a: Any, b: Any, shown: tuple[str, str]) -> None:
    assert list(_differences({"key": a}, {"key": b})) == [("key", *shown)]
    assert list(_differences({"key": b}, {"key": a})) == [("key", *shown[::-1])]


def test_runs_that_part_say_where(tmp_path: Path) -> None:
    one, other = (made_run(tmp_path / name) for name in ("one", "other"))
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for step, more in ((7, 1e-9), (30, 0.25)):
        lines[step - 1]["loss"] += more
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:50]))
    text = compare(read_run(one), read_run(other))
    assert "what was different:\n  nothing" in text
    assert "training loss: differs from step 7 on" in text
    assert "at 2 of 50 common steps; most at step 30: by 0.25" in text
    assert "or a defect" in text

    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("lr: 0.0003", "lr: 0.01"))
    text = compare(read_run(one), read_run(other))
    row = next(line for line in text.splitlines() if "train.lr" in line)
    assert row.split() == ["train.lr", "0.0003", "0.01"]
    assert "or a defect" not in text


def test_a_comparison_with_a_run_that_goes_on(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b", steps=10, ended=False)
    text = compare(read_run(a), read_run(b))
    assert "note: b: the run has not come to its end" in text
    assert "weights: not known, as not both" in text
    assert "at all 10 common steps" in text
    assert "validation loss: no step in common" in text
