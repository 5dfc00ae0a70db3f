"""A plan made without MPI, edited by hand, trained by ranks (make test-mpi)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipipe.commands.plan import main
from mpipipe.report.trace import read_trace, write_trace
from mpipipe.values import Op, Plan, from_json

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4, dropout: 0.1}
data: {name: synthetic, samples: 64}
train: {steps: 3, batch: 8, warmup: 1}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 4, schedule: 1f1b}
"""
PLANS = (
    "import sys; sys.modules['mpi4py'] = None; from mpipipe.__main__ import main; "
    "sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture(scope="module")
def folder(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the config and a run as the ranks planned it, `first`."""
    path = tmp_path_factory.mktemp("plans")
    (path / "config.yaml").write_text(CONFIG)
    job = launch(2, "-m", "mpipipe.train", "config.yaml", "run.dir=first", cwd=path)
    assert job.returncode == 0, job.stderr
    return path


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def test_an_edited_plan_trains_to_the_same_weights_with_its_own_cuts(launch: Launch, folder: Path) -> None:
    plan = [sys.executable, "-c", PLANS, "plan", "config.yaml", "--ranks", "2", "-o", "p.json"]
    made = subprocess.run(plan, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (made.returncode, made.stderr) == (0, ""), made.stderr
    value = json.loads((folder / "p.json").read_text())
    groups = [group["name"] for group in value["costs"]["groups"]]
    (cut,) = value["layout"]["cuts"]
    other = next(name for name in groups[1:] if name != cut)
    text = (folder / "p.json").read_text().replace(f'      "{cut}"', f'      "{other}"')
    (folder / "p.json").write_text(text)

    job = launch(2, "-m", "mpipipe.train", "config.yaml", "run.dir=edited", "--plan", "p.json", cwd=folder)
    assert job.returncode == 0, job.stderr
    first, edited = summary(folder / "first"), summary(folder / "edited")
    assert first["weights_sha256"] == edited["weights_sha256"]
    ran = from_json(Plan, (folder / "edited" / "plan.json").read_text())
    assert ran.layout.cuts == (other,)
    assert ran.costs is not None
    assert ran.hash == edited["plan_hash"]


def test_a_refined_plan_trains_to_the_same_weights(
    launch: Launch, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measured step is made to say that a stage with several groups was slow, so that the cut moves."""
    plan = from_json(Plan, (folder / "first" / "plan.json").read_text())
    assert plan.costs is not None
    stage = int([group.name for group in plan.costs.groups].index(plan.layout.cuts[0]) == 1)
    ((slow,), (other,)) = plan.layout.ranks[stage], plan.layout.ranks[1 - stage]
    trace = read_trace(folder / "first" / "timeline.json")
    measured = trace.timelines["measured"]
    works = np.isin(measured.program.codes[slow][:, 0], [Op.F, Op.B])
    times = measured.times[slow].copy()
    times[works, 1] += 20 * (times[works, 1] - times[works, 0]) + 0.01
    by_rank = {slow: times, other: measured.times[other]}
    slower = replace(measured, times=(by_rank[0], by_rank[1]))
    write_trace(
        folder / "first" / "timeline.json",
        replace(trace, timelines={**trace.timelines, "measured": slower}),
    )

    monkeypatch.chdir(folder)
    assert main(["--refine", "first", "-o", "refined.json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "new plan: " in said.out
    given = ["--plan", "refined.json", "run.dir=second"]
    job = launch(2, "-m", "mpipipe.train", "config.yaml", *given, cwd=folder)
    assert job.returncode == 0, job.stderr
    first, second = summary(folder / "first"), summary(folder / "second")
    assert first["weights_sha256"] == second["weights_sha256"]
    ran, planned = (from_json(Plan, (folder / d / "plan.json").read_text()) for d in ("second", "first"))
    refined = from_json(Plan, (folder / "refined.json").read_text())
    assert ran.layout == refined.layout != planned.layout
