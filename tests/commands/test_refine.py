"""`plan --refine RUN`: what a run folder must hold, and what is said and written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_run import made_run

from mpipipe.commands import plan, refine
from mpipipe.planner.refine import Refined
from mpipipe.report.plan_file import read_plan
from mpipipe.report.trace import read_trace, write_trace
from mpipipe.values import Op


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made_run(tmp_path / "made", n_micro=8)


def slow(folder: Path, factor: float) -> None:
    """As if the forward and backward of stage 0 had taken `factor` as long."""
    trace = read_trace(folder / "timeline.json")
    measured = trace.timelines["measured"]
    first = measured.times[0].copy()
    works = np.isin(measured.program.codes[0][:, 0], [Op.F, Op.B])
    first[works, 1] += (factor - 1) * (first[works, 1] - first[works, 0])
    slower = replace(measured, times=(first, *measured.times[1:]))
    write_trace(folder / "timeline.json", replace(trace, timelines={**trace.timelines, "measured": slower}))


def test_a_stage_that_was_slow_gives_groups_away(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow(folder, 3.0)
    assert plan.main(["--refine", str(folder), "-o", str(folder / "new.json")]) == 0
    old, new = read_plan(folder / "plan.json"), read_plan(folder / "new.json")
    assert new.numerics == old.numerics
    assert new.layout.cuts < old.layout.cuts
    assert new.costs is not None
    assert new.costs.source == "measured"
    out = capsys.readouterr().out
    for words in (
        "predicted | measured in a step", "largest miss: B of stage 0", "step as it was planned: ",
        "predicted from what was measured: ", "new plan: ", f"{old.layout.cuts[0]} -> {new.layout.cuts[0]}",
        "mpipipe.train ", "in the middle half of its steps",
    ):  # fmt: skip
        assert words in out, words
    assert f"{new.prediction.step_s * 1e3:.4g} ms predicted" in out
    command = f"mpirun -n 2 python -m mpipipe.train {folder}/config.yaml run.dir={folder}-refined"
    assert out.splitlines()[-1] == f"  {command} --plan {folder}/new.json"


def metrics(folder: Path, *steps_s: float, first: int = 1) -> None:
    """Of a run that was resumed at `first`: the steps before it, and itself, take 9 s."""
    seconds = enumerate((*[9.0] * first, *steps_s), 1)
    lines = "".join(f'{{"step": {step}, "step_s": {s}}}\n' for step, s in seconds)
    (folder / "metrics.jsonl").write_text(lines)
    trace = folder / "timeline.json"
    write_trace(trace, replace(read_trace(trace), steps=tuple(range(first, first + len(steps_s) + 1))))


def test_a_cut_that_gains_less_than_steps_differ_is_not_taken(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow(folder, 3.0)
    metrics(folder, 0.2, 0.2, 0.9, 0.9)
    assert plan.main(["--refine", str(folder), "-o", str(folder / "new.json")]) == 0
    assert read_plan(folder / "new.json").layout == read_plan(folder / "plan.json").layout
    out = capsys.readouterr().out
    assert "another plan: " in out
    assert "not distinguishable from the old cut: kept; the steps of the run differ by more, 700 ms" in out


def test_steps_differ_as_those_do_since_the_run_was_resumed(folder: Path) -> None:
    metrics(folder, 0.2, 0.2, 0.3, 0.3, first=31)
    assert "(200 ms to 300 ms in the middle half of its steps)" in refine.refine_run(folder)[1]


@pytest.mark.parametrize(("held", "kept"), [((23, 32), True), ((24, 32), False), (None, False)])
def test_a_cut_that_is_shorter_in_few_draws_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[int, int] | None, kept: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    slow(folder, 3.0)
    metrics(folder, 0.2)
    monkeypatch.setattr(refine, "shorter", lambda *_: held)
    found, said = refine.refine_run(folder)
    assert (found.layout == read_plan(folder / "plan.json").layout) == kept
    assert ("kept; it is shorter in 23 of 32 draws" in said) == kept


def test_without_a_predicted_step_there_is_no_table(folder: Path) -> None:
    trace = read_trace(folder / "timeline.json")
    measured = {"measured": trace.timelines["measured"]}
    write_trace(folder / "timeline.json", replace(trace, timelines=measured))
    _, said = refine.refine_run(folder)
    lines = said.splitlines()
    assert lines[2] == "its timeline.json has no predicted step to compare stage by stage"
    assert lines[4].startswith("step as it was planned: ")


def test_a_plan_that_cannot_be_bettered_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(folder / "timeline.json")
    as_planned = dict.fromkeys(("predicted", "measured"), trace.timelines["predicted"])
    write_trace(folder / "timeline.json", replace(trace, timelines=as_planned))
    assert plan.main(["--refine", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "no better cut is found" in out
    assert re.search(r"predicted from what was measured: .* 0\.0% (above|below) the measured step", out)


def test_stages_that_change_ranks_alone_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = read_plan(folder / "plan.json")
    new = replace(old, layout=replace(old.layout, ranks=old.layout.ranks[::-1]))
    (folder / "metrics.jsonl").unlink()
    monkeypatch.setattr(refine, "shorter", lambda *_: None)
    monkeypatch.setattr(refine, "refine", lambda *_: Refined(old, new))
    assert plan.main(["--refine", str(folder)]) == 0
    assert "0.0% shorter; the same cuts; on ranks 1, 0\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("timeline.json", None, "timeline.json: is not there"),
        ("timeline.json", '{"version": 1', "is cut short"),
        ("plan.json", "{}", "plan.json: cannot be read"),
        ("summary.json", None, "the run has not come to its end"),
    ],
)
def test_a_run_without_measured_spans_says_what_is_missing(
    folder: Path, file: str, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    if file == "summary.json":
        (folder / "timeline.json").unlink()
    assert plan.main(["--refine", str(folder)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"mpipipe: error: {folder}: cannot be refined: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_torn_spans_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow(folder, 0.0)
    assert plan.main(["--refine", str(folder)]) == 1
    assert "the measured F of stage 0 take 0 s" in capsys.readouterr().err


def test_it_is_a_run_or_a_config_and_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--refine", str(folder), "--ranks", "2"], ["c.yaml", "--refine", str(folder)]):
        with pytest.raises(SystemExit):
            plan.main(words)
        assert "leave them out" in capsys.readouterr().err
    for words in (["--refine", str(folder)], ["c.yaml", "--ranks", "1,2"]):
        with pytest.raises(SystemExit):
            plan.main([*words, "--budget", "1s"])
        assert "--budget is for one number of --ranks" in capsys.readouterr().err
    for words in ([], ["c.yaml"], ["--ranks", "2"]):
        with pytest.raises(SystemExit):
            plan.main(words)
        assert "required: config, --ranks" in capsys.readouterr().err
