"""A plan made without MPI, edited by hand, trained by ranks (make test-mpi)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpipipe.report.trace import read_trace, write_trace
from mpipipe.values import Op, Plan, from_json

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4, dropout: 0.1}
data: {name: synthetic, samples: 64}
train: {steps: 3, batch: 8, warmup: 1}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 4}
"""
PLANS = (
    "import sys; sys.modules['mpi4py'] = None; from mpipipe.__main__ import main; "
    "sys.exit(main(sys.argv[1:]))"
)


def test_an_edited_plan_trains_to_the_same_weights_with_its_own_cuts(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    plan = [sys.executable, "-c", PLANS, "plan", "config.yaml", "--ranks", "2", "-o", "p.json"]
    made = subprocess.run(plan, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (made.returncode, made.stderr) == (0, ""), made.stderr
    value = json.loads((tmp_path / "p.json").read_text())
    groups = [group["name"] for group in value["costs"]["groups"]]
    (cut,) = value["layout"]["cuts"]
    other = next(name for name in groups[1:] if name != cut)
    text = (tmp_path / "p.json").read_text().replace(f'      "{cut}"', f'      "{other}"')
    (tmp_path / "p.json").write_text(text)

    summaries = []
    for run in ("planned", "edited"):
        given = ["--plan", "p.json"] if run == "edited" else []
        job = launch(2, "-m", "mpipipe.train", "config.yaml", f"run.dir={run}", *given, cwd=tmp_path)
        assert job.returncode == 0, job.stderr
        summaries.append(json.loads((tmp_path / run / "summary.json").read_text()))
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    ran = from_json(Plan, (tmp_path / "edited" / "plan.json").read_text())
    assert ran.layout.cuts == (other,)
    assert ran.costs is not None
    assert ran.hash == summaries[1]["plan_hash"]


def test_a_refined_plan_trains_to_the_same_weights(launch: Launch, tmp_path: Path) -> None:
    """The measured step is made to say that a stage with several groups was slow, so that the cut moves."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    plain = "pipeline.schedule=1f1b"
    job = launch(2, "-m", "mpipipe.train", "config.yaml", "run.dir=first", plain, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    plan = from_json(Plan, (tmp_path / "first" / "plan.json").read_text())
    assert plan.costs is not None
    stage = int([group.name for group in plan.costs.groups].index(plan.layout.cuts[0]) == 1)
    ((slow,), (other,)) = plan.layout.ranks[stage], plan.layout.ranks[1 - stage]
    trace = read_trace(tmp_path / "first" / "timeline.json")
    measured = trace.timelines["measured"]
    works = np.isin(measured.program.codes[slow][:, 0], [Op.F, Op.B])
    times = measured.times[slow].copy()
    times[works, 1] += 20 * (times[works, 1] - times[works, 0]) + 0.01
    by_rank = {slow: times, other: measured.times[other]}
    slower = replace(measured, times=(by_rank[0], by_rank[1]))
    write_trace(
        tmp_path / "first" / "timeline.json",
        replace(trace, timelines={**trace.timelines, "measured": slower}),
    )

    refine = [sys.executable, "-c", PLANS, "plan", "--refine", "first", "-o", "refined.json"]
    made = subprocess.run(refine, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (made.returncode, made.stderr) == (0, ""), made.stderr
    assert "new plan: " in made.stdout
    given = ["--plan", "refined.json", "run.dir=second", plain]
    job = launch(2, "-m", "mpipipe.train", "config.yaml", *given, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    first, second = (json.loads((tmp_path / d / "summary.json").read_text()) for d in ("first", "second"))
    assert first["weights_sha256"] == second["weights_sha256"]
    ran, planned = (from_json(Plan, (tmp_path / d / "plan.json").read_text()) for d in ("second", "first"))
    refined = from_json(Plan, (tmp_path / "refined.json").read_text())
    assert ran.layout == refined.layout != planned.layout
