"""`python -m mpipipe draw`: plans and runs, as text and into files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from made_run import made_plan, made_run

from mpipipe.commands.draw import main
from mpipipe.planner.schedules import SCHEDULES
from mpipipe.values import Plan, from_json, to_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


def test_a_run_is_drawn_predicted_above_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--width", "80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "idle" in line] == ["predicted", "measured"]
    assert [line[:2] for line in lines if "|" in line] == ["r0", "r1"] * 2
    assert max(map(len, lines)) == 80


def test_a_plan_is_drawn_as_it_was_edited(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cut one group earlier: rank 0 has less to do."""
    path = folder / "plan.json"
    assert main([str(path)]) == 0
    drawn = capsys.readouterr().out
    plan = made_plan()[0]
    assert plan.costs is not None
    names = [group.name for group in plan.costs.groups]
    cut = names[names.index(plan.layout.cuts[0]) - 1]
    path.write_text(to_json(replace(plan, layout=replace(plan.layout, cuts=(cut,)))))
    assert main([str(path)]) == 0
    edited = capsys.readouterr().out
    assert drawn.splitlines()[0].startswith("predicted: ")
    assert edited.splitlines()[0] != drawn.splitlines()[0]
    row = [text.splitlines()[1].count("-") for text in (drawn, edited)]
    assert row[1] < row[0]


def test_it_is_drawn_even_where_it_does_not_fit_into_memory(folder: Path) -> None:
    plan = from_json(Plan, (folder / "plan.json").read_text())
    assert plan.costs is not None
    small = tuple(replace(device, memory_bytes=1) for device in plan.costs.cluster.devices)
    costs = replace(plan.costs, cluster=replace(plan.costs.cluster, devices=small))
    (folder / "plan.json").write_text(to_json(replace(plan, costs=costs)))
    assert main([str(folder / "plan.json")]) == 0


@pytest.fixture
def own_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All forwards first."""
    code = "def order(n, m): return [' '.join([f'F{i}' for i in range(m)] + [f'B{i}' for i in range(m)])] * n"
    (tmp_path / "drawn_schedule.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "drawn_schedule:order"
    del SCHEDULES["drawn_schedule:order"]


def test_a_schedule_of_one_s_own_is_found(
    folder: Path, own_schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, drawn = made_plan()[0], []
    for schedule in ("gpipe", own_schedule, own_schedule):
        layout = replace(plan.layout, schedule=schedule)
        (folder / "plan.json").write_text(to_json(replace(plan, layout=layout)))
        assert main([str(folder / "plan.json")]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("source", ["run", "run/plan.json"])
@pytest.mark.slow
def test_into_files(folder: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib.image import imread  # here: it takes a while, and few tests draw

    picture, trace = tmp_path / "a.png", tmp_path / "a.perfetto.json"
    for output in (picture, trace):
        assert main([str(tmp_path / source), "-o", str(output)]) == 0
        assert capsys.readouterr().out == f"{output}\n"
    assert imread(picture).ndim == 3
    events = json.loads(trace.read_text())["traceEvents"]
    assert len({e["pid"] for e in events}) == (2 if source == "run" else 1)
    assert any(e.get("args", {}).get("bytes") == 1 << 20 for e in events)


def test_a_run_without_its_plan_is_drawn_without_sizes(folder: Path, tmp_path: Path) -> None:
    (folder / "plan.json").unlink()
    assert main([str(folder), "-o", str(tmp_path / "a.perfetto.json")]) == 0
    assert '"bytes"' not in (tmp_path / "a.perfetto.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.json"], "missing.json: cannot be read"),
        (["empty"], "empty: no timeline.json in it, which a run writes at its end"),
        (["no_costs.json"], "no_costs.json: has no costs"),
        (["broken.json"], "broken.json: is not JSON"),
        (["wrong.json"], "wrong.json: layout.cuts is missing"),
        (["cut.json"], "layout.cuts names 'blocks.9', which is no group of this model; did you mean"),
        (["run", "-o", "a.json"], "-o a.json: the name must end with .png"),
        (["run", "-o", "nowhere/a.png"], "-o nowhere/a.png: cannot be written"),
    ],
)
def test_what_is_wrong_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    plan = made_plan()[0]
    Path("empty").mkdir()
    Path("no_costs.json").write_text(to_json(replace(plan, costs=None)))
    Path("broken.json").write_text("{")
    wrong = json.loads(to_json(plan))
    del wrong["layout"]["cuts"]
    Path("wrong.json").write_text(json.dumps(wrong))
    Path("cut.json").write_text(to_json(replace(plan, layout=replace(plan.layout, cuts=("blocks.9",)))))
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"mpipipe: error: {says}")


def test_a_text_has_a_least_width(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--width", "3"])
    assert "at least 20 columns" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As `| head` does; more than a pipe holds is printed."""
    code = "import sys; from mpipipe.commands import run; sys.exit(run(lambda: print('text' * 100000)))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.read(4)
        job.stdout.close()
        assert job.stderr.read() == b""
    assert job.returncode == 0
