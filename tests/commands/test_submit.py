"""Runs of batch jobs: resumed, finished, planned for an allocation, submitted. Slurm is small scripts."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
from made_run import made_plan, made_report

from mpipipe.commands import allocation, launch, submit
from mpipipe.commands.job import run_of_job
from mpipipe.config import Config, load, to_yaml
from mpipipe.errors import ConfigError, PlanError
from mpipipe.planner.per_node import by_ranks_per_node
from mpipipe.state import rundir
from mpipipe.values import Prediction, to_json

CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [8, 8, 8], classes: 4, dropout: 0.0}
data: {name: synthetic, samples: 64}
train: {steps: 7200, batch: 8}
pipeline: {micro_batches: 4, cost_cache: false}
"""


CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster.yaml"
REPORT = made_report(*made_plan(), steps=20)


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a job on two nodes, in the folder that it was submitted from."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    given = {
        "SLURM_JOB_ID": "12", "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_NTASKS": "4", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin").mkdir()
    return given


def arguments(*overrides: str, resume: bool = False) -> argparse.Namespace:
    return argparse.Namespace(
        config="c.yaml", overrides=list(overrides), resume=resume, new_numerics=False, plan=None
    )


def test_a_job_resumes_its_own_run_and_one_of_the_same_config_and_no_other(job: dict[str, str]) -> None:
    first = run_of_job(arguments(), job)
    assert first.arguments == ("c.yaml", "run.dir=runs/slurm-12")
    assert not first.resume

    first.folder.mkdir(parents=True)
    (first.folder / "config.yaml").write_text(to_yaml(first.config))
    same = run_of_job(arguments(), job)
    assert same.arguments == ("c.yaml", "run.dir=runs/slurm-12", "--resume")
    other = arguments("train.lr=0.5")
    assert not run_of_job(other, job).resume
    assert run_of_job(other, {**job, "SLURM_RESTART_COUNT": "1"}).resume
    named = run_of_job(arguments("run.dir=mine", resume=True), job)
    assert named.arguments == ("c.yaml", "run.dir=mine", "--resume")


def test_a_job_does_not_resume_whatever_run_is_the_latest(
    job: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/theirs").mkdir(parents=True)
    Path("runs/theirs/config.yaml").write_text(to_yaml(load("c.yaml")))
    Path("runs/latest").symlink_to("theirs")
    with pytest.raises(ConfigError, match=r"give run\.dir=FOLDER"):
        run_of_job(arguments(resume=True), job)
    assert launch.main(["c.yaml", "--resume", "--assignment", "a.json"]) == 1
    assert "runs/latest may be another run" in capsys.readouterr().err
    assert run_of_job(arguments(resume=True), {}).folder == Path("runs/theirs"), "in no job"


@pytest.mark.parametrize(
    ("stopped_by", "steps", "time_limit", "again"),
    [
        ("SIGUSR1", 20, "null", True), ("the time limit", 20, "null", True),
        ("the time limit", 20, "60.0", False), ("SIGTERM", 20, "null", False),
        ("SIGUSR1", 7200, "null", False), ("the end of the data", 20, "null", False),
        (None, 20, "null", False),
    ],
)  # fmt: skip
def test_a_job_starts_again_where_its_time_was_over_before_its_run(
    stopped_by: str | None, steps: int, time_limit: str, again: bool, job: dict[str, str]
) -> None:
    Path("run").mkdir()
    report = replace(REPORT, stopped_by=stopped_by, steps=steps)
    Path("run/summary.json").write_text(to_json(report))
    given = arguments("run.dir=run", f"run.time_limit={time_limit}")
    assert run_of_job(given, job).is_to_go_on() == again
    assert run_of_job(given, job).is_to_go_on(asked=True) == again
    flags = ["c.yaml", "run.dir=run", f"run.time_limit={time_limit}", "--unfinished"]
    assert launch.main(flags) == (0 if again else 1)


def test_a_job_that_failed_when_it_was_asked_to_stop_starts_again_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal may meet ranks that are just beginning, and die of it."""
    flags = ["c.yaml", "run.dir=run", "--asked", "--unfinished"]
    Path("run").mkdir()
    assert launch.main(flags) == 1, "from nothing, it would do the same again"
    monkeypatch.setattr("mpipipe.commands.job.newest", lambda folder: folder / "checkpoints" / "step-3")
    assert launch.main(flags) == 0
    flags.remove("--asked")
    assert launch.main(flags) == 1, "it failed by itself"


def test_a_finished_run_that_is_started_again_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(to_yaml(load("c.yaml", ["run.dir=run"])))
    Path("run/summary.json").write_text(to_json(replace(REPORT, stopped_by=None, steps=7200)))
    assert launch.main(["c.yaml", "run.dir=run"]) == 0
    out, err = capsys.readouterr()
    assert out == "true\n"
    assert "run: the run is finished; for more, raise train.steps" in err


def test_the_line_has_the_assignment_and_the_arguments_of_train(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert allocation.main(["c.yaml", "train.lr=0.5", "-o", "a.json"]) == 0
    assert "ranks: 4, 2(x2) by node, the tasks of the job" in capsys.readouterr().out
    assert launch.main(["c.yaml", "train.lr=0.5", "--new-numerics", "--assignment", "a.json"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("env 'SLURM_TASKS_PER_NODE=2(x2)' ")
    arguments = "c.yaml train.lr=0.5 run.dir=runs/slurm-12 --new-numerics"
    assert f" -m mpipipe run {arguments} -n 4 -- " in out
    assert err.startswith("launcher: ")
    monkeypatch.setenv("MPIPIPE_CONTAINER", "a.sif")
    assert launch.main(["c.yaml", "train.lr=0.5", "--new-numerics", "--assignment", "a.json"]) == 0
    contained = capsys.readouterr().out
    assert "' srun --mpi=" in contained
    assert contained.endswith(f" -n 4 apptainer exec a.sif python3 -m mpipipe.train {arguments}\n")
    assert launch.main(["c.yaml", "--assignment", "none.json"]) == 1
    assert "write one by python -m mpipipe plan config.yaml --from-allocation" in capsys.readouterr().err


def test_without_tasks_the_ranks_are_those_of_the_shortest_predicted_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_NTASKS")
    monkeypatch.setattr(allocation, "cores_per_node", lambda given, here: 4)
    prediction = made_plan()[0].prediction

    class Planned:
        def __init__(self, config: Config, ranks: int) -> None:
            assert (config.pipeline.threads, ranks) == (1, 2)

        def by_ranks_per_node(self, nodes: int, most: int) -> dict[int, Prediction]:
            def planned(cluster: int) -> Prediction:
                if cluster == 4:
                    raise PlanError("8 stages but only 4 groups")
                return replace(prediction, step_s=1.0 / cluster)

            assert (nodes, most) == (2, 4)
            return by_ranks_per_node(planned, lambda per_node: per_node, most)  # type: ignore[arg-type]

    monkeypatch.setattr("mpipipe.commands.nodes.Planned", Planned)
    assert allocation.main(["c.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "nodes: 2, with 4 cores each",
        "ranks: 4, 2(x2) by node, the shortest predicted step: 1 per node 1 s, 2 per node 0.5 s",
        "threads: 1 per rank, as pipeline.threads says",
    ]


@pytest.mark.slow
def test_submit_writes_a_script_that_is_complete_and_hands_it_to_sbatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"sinfo": 'echo "main*|3|2|1|4000|1:00"', "sbatch": 'echo "$*" >sent; echo 31'}.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    assert submit.main(["c.yaml", "run.dir=my run", "train.lr=0.5", "--time", "90", "--nodes", "1-8"]) == 0
    out = capsys.readouterr().out
    assert "predicted: 7,200 steps of " in out or "predicted: 7200 steps of " in out
    assert "node-hours" in out
    assert out.endswith("job 31 is submitted; its output: my run/slurm-31.out\n")
    assert (tmp_path / "sent").read_text() == "--parsable my run/submit.sh\n"
    lines = (tmp_path / "my run" / "submit.sh").read_text().splitlines()
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert {
        "time=1:30:00",
        "job-name=mlp",
        "exclusive --requeue --open-mode=append --signal=B:USR1@180",
    } <= set(options)
    assert f'output="{tmp_path}/my run/slurm-%j.out"' in options
    assert sum(option.startswith("nodes=") for option in options) == 1
    assert f"set -- {tmp_path}/c.yaml 'run.dir=my run' train.lr=0.5 'run.dir={tmp_path}/my run'" in lines


def test_submit_without_slurm_says_where_to_go_and_still_writes_the_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert submit.main(["c.yaml"]) == 1
    assert "there is no sbatch on the PATH: submit on a login node" in capsys.readouterr().err
    given = ["c.yaml", "run.dir=r", "--nodes", "1", "--dry-run", "--cluster", str(CLUSTER)]
    assert submit.main([*given, "pipeline.threads=auto"]) == 0
    assert capsys.readouterr().out.endswith("not submitted; to submit it: sbatch r/submit.sh\n")
    script = Path("r/submit.sh").read_text()
    assert "#SBATCH --nodes=1\n" in script
    assert "#SBATCH --cpus-per-task=96\n" in script  # as the cluster file has them
    with pytest.raises(SystemExit):
        submit.main(["c.yaml", "--nodes", "4-1"])


@pytest.mark.slow
def test_two_submits_within_a_second_have_a_folder_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Noon:
            return cls(2026, 1, 2, 12, 0, 5, tzinfo=tz)

    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(rundir, "datetime", Noon)
    for name in ("20260102-120005-mlp", "20260102-120005-mlp-2"):
        assert submit.main(["c.yaml", "--nodes", "1", "--dry-run", "--cluster", str(CLUSTER)]) == 0
        assert f"run.dir={Path.cwd()}/runs/{name}\n" in Path("runs", name, "submit.sh").read_text()


@pytest.mark.slow
def test_spares_count_as_ranks_of_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    given = ["c.yaml", "run.dir=r", "--nodes", "2", "--dry-run", "--cluster", str(CLUSTER)]
    assert submit.main([*given, "run.recover=mpi", "run.spares=1"]) == 0
    assert "on each node; 1 of them all in reserve (run.spares)" in capsys.readouterr().out
    script = Path("r/submit.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script
    assert "run.recover=mpi run.spares=1 " in script
