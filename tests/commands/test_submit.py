"""Runs of batch jobs: resumed, finished, planned for an allocation, submitted. Slurm is small scripts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import torch
from made_run import made_plan, made_report

from mpipipe.cluster.partition import Partition
from mpipipe.cluster.starter import Starter
from mpipipe.commands import allocation, launch, submit
from mpipipe.commands.asking import Asking
from mpipipe.commands.job import run_of_job
from mpipipe.commands.supervise import Supervisor, _parser
from mpipipe.config import Config, load, to_yaml
from mpipipe.errors import ConfigError, PlanError
from mpipipe.graph.profile import Profiler
from mpipipe.planner.per_node import Split, by_ranks_per_node
from mpipipe.state import rundir
from mpipipe.values import Prediction, to_json

CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [8, 8, 8], classes: 4, dropout: 0.0}
data: {name: synthetic, samples: 64}
train: {steps: 7200, batch: 8}
pipeline: {micro_batches: 4, cost_cache: false, schedule: 1f1b}
"""
pytestmark = pytest.mark.usefixtures("captured_once")


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
    assert not run_of_job(arguments(), job).resume, "before its first step there is nothing to go on with"
    (first.folder / "metrics.jsonl").touch()
    same = run_of_job(arguments(), job)
    assert same.arguments == ("c.yaml", "run.dir=runs/slurm-12", "--resume")
    other = arguments("train.lr=0.5")
    assert not run_of_job(other, job).resume
    assert run_of_job(other, {**job, "SLURM_RESTART_COUNT": "1"}).resume
    named = run_of_job(arguments("run.dir=mine", resume=True), job)
    assert named.arguments == ("c.yaml", "run.dir=mine", "--resume")


def test_a_job_that_is_submitted_again_goes_on_with_what_the_supervisor_has_begun(
    job: dict[str, str],
) -> None:
    """It gives its ranks the absolute path of the folder, and fewer spares where hosts are lost."""
    keys = ("run.dir=mine", "run.recover=mpi", "run.spares=2")
    given = run_of_job(arguments(*keys), job).arguments
    options, srun = _parser().parse_args([*given, "-n", "6"]), Starter(("srun",), "srun", True)
    supervisor = Supervisor(options, srun, {}, Asking())
    supervisor.ranks = 5
    _, _, _, config, *asked = supervisor._program(again=False)
    made = rundir.create(load(config, asked))  # as rank 0 does
    (made / "metrics.jsonl").touch()
    text = (made / "config.yaml").read_text()
    assert f"dir: {Path('mine').absolute()}" in text
    assert "spares: 1" in text
    assert run_of_job(arguments(*keys), job).arguments == ("c.yaml", *keys, "--resume")
    assert not run_of_job(arguments(*keys, "train.lr=0.5"), job).resume
    (made / "config.yaml").write_text("of: another version")
    assert not run_of_job(arguments(*keys), job).resume
    assert run_of_job(arguments(*keys), {**job, "SLURM_RESTART_COUNT": "1"}).resume


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
        ("SIGUSR1", 20, "null", True), ("the time of the job", 20, "null", True),
        ("the time of the job", 20, "60.0", True), ("the time limit", 20, "60.0", False),
        ("SIGTERM", 20, "null", False),
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
    Path("run/summary.json").write_text(to_json(replace(REPORT, stopped_by="SIGTERM", steps=20)))
    assert launch.main(flags) == 0, "as Slurm says it to who is preempted"
    flags.remove("--asked")
    assert launch.main(flags) == 1, "who cancels a job wants it to end"
    Path("run/summary.json").unlink()
    assert launch.main(flags) == 1, "it failed by itself"


def test_a_finished_run_that_is_started_again_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(to_yaml(load("c.yaml", ["run.dir=run"])))
    Path("run/metrics.jsonl").touch()
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
            def planned(per_node: int) -> Prediction:
                if per_node == 4:
                    raise PlanError("8 stages but only 4 groups")
                return replace(prediction, step_s=1.0 / per_node)

            assert (nodes, most) == (2, 4)
            return by_ranks_per_node(planned, most)

    monkeypatch.setattr("mpipipe.commands.nodes.Planned", Planned)
    assert allocation.main(["c.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "nodes: 2, with 4 cores each",
        "ranks: 4, 2(x2) by node, the shortest predicted step: 1 per node 1 s, 2 per node 0.5 s",
        "threads: 1 per rank, as pipeline.threads says",
    ]


def test_without_tasks_and_threads_an_allocation_weighs_ranks_x_threads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_NTASKS")
    monkeypatch.setattr(allocation, "cores_per_node", lambda given, here: 4)
    monkeypatch.setattr(allocation, "domains_here", lambda here: 1)
    seconds, prediction = {1: 0.5, 2: 0.8, 4: 0.0}, made_plan()[0].prediction

    class Planned:
        def prediction(self, nodes: int, per_node: int) -> Prediction:
            if per_node == 4:
                raise PlanError("8 stages but only 4 groups")
            assert nodes == 2
            return replace(prediction, step_s=seconds[per_node])

    def by_split(config: Config, found: list[Split], ranks: int) -> Iterator[tuple[Split, Planned]]:
        assert ranks == 2
        yield from ((split, Planned()) for split in found)

    monkeypatch.setattr("mpipipe.commands.nodes.by_split", by_split)
    assert allocation.main(["c.yaml", "pipeline.threads=auto"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "ranks: 2, 1(x2) by node, with their threads all cores of a node",
        "threads: 4 per rank, one rank with all cores of a node is best; predicted steps: 1 rank x 4 threads "
        "0.5 s, 2 ranks x 2 threads 0.8 s (pipeline.threads=auto)",
    ]
    seconds[2] = 0.4
    assert allocation.main(["c.yaml", "pipeline.threads=auto"]) == 0
    assert "\nranks: 4, 2(x2) by node" in (out := capsys.readouterr().out)
    assert "\nthreads: 2 per rank, predicted steps: " in out


def test_ranks_and_threads_of_a_given_plan_are_those_it_was_made_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_NTASKS")
    monkeypatch.setattr(allocation, "cores_per_node", lambda given, here: 4)
    plan = made_plan()[0]
    Path("p.json").write_text(to_json(replace(plan, numerics=replace(plan.numerics, threads=3))))
    assert allocation.main(["c.yaml", "pipeline.threads=auto", "--plan", "p.json"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "ranks: 2, 1(x2) by node, as p.json has them",
        "threads: 3 per rank, as p.json has them (pipeline.threads=auto)",
    ]


@pytest.mark.slow
def test_of_ways_that_are_measured_submit_takes_the_fastest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on a node, as calibrated, or one whose threads are half as fast together."""
    monkeypatch.setenv("PATH", "/nonexistent")
    text = CLUSTER.read_text()
    one = text.replace("ranks_per_node: 2", "ranks_per_node: 1").replace("threads: 96\n", "threads: 192\n")
    Path("two.yaml").write_text(text)
    Path("one.yaml").write_text(one)
    Path("same.yaml").write_text(text)
    given = ["c.yaml", "run.dir=r", "--dry-run", "pipeline.threads=auto", "--nodes", "1"]
    assert submit.main([*given, "--cluster", "two.yaml", "--cluster", "one.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("c.yaml: ")
    heads = out.split("by ranks x threads on a node:\n")[1].partition("\n")[0]
    assert heads.split("  ") == ["nodes", "2 x 96", " 1 x 192", "next best"]
    best = 1 if "c.yaml: 1 rank x 192 threads on each node" in out else 2
    assert ("one rank with all 192 threads is best for the cores of a node" in out) == (best == 1)
    script = Path("r/submit.sh").read_text()
    assert f"#SBATCH --ntasks-per-node={best}\n#SBATCH --cpus-per-task={192 // best}\n" in script
    assert submit.main([*given, "--cluster", "two.yaml", "--cluster", "same.yaml"]) == 1
    err = capsys.readouterr().err
    assert "same.yaml: 2 ranks x 96 threads on each node, as in two.yaml; leave one" in err


@pytest.mark.parametrize(("nodes", "blocks", "more"), [("1-4", "auto", 8), ("1", "auto", 0), ("1-4", "1", 0)])
@pytest.mark.slow
def test_the_most_nodes_that_submit_is_told_are_the_ranks_that_may_come(
    nodes: str, blocks: str, more: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    given = ["c.yaml", "run.dir=r", "--dry-run", f"pipeline.blocks={blocks}", "--cluster", str(CLUSTER)]
    assert submit.main([*given, "--nodes", nodes]) == 0
    script = Path("r/submit.sh").read_text()
    assert ("pipeline.max_ranks=8 " in script) == bool(more)
    assert ("blocks: for the 8 ranks that may come" in capsys.readouterr().out) == bool(more)


@pytest.mark.slow
def test_a_run_that_is_begun_keeps_its_threads_and_the_ranks_that_may_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    Path("r").mkdir()
    Path("r/config.yaml").write_text(
        to_yaml(load("c.yaml", ["run.dir=r", "pipeline.blocks=auto", "pipeline.max_ranks=6"]))
    )
    state = argparse.Namespace(numerics=replace(made_plan()[0].numerics, threads=48, blocks=2))
    monkeypatch.setattr(submit, "newest", lambda folder: folder / "checkpoint")
    monkeypatch.setattr(submit, "read_state", lambda folder: state)
    given = ["c.yaml", "run.dir=r", "--dry-run", "pipeline.blocks=auto", "pipeline.threads=auto"]
    assert submit.main([*given, "--cluster", str(CLUSTER), "--nodes", "1-4"]) == 0
    assert "threads: those of the run, as they decide its bits\n" in capsys.readouterr().out
    script = Path("r/submit.sh").read_text()
    assert "#SBATCH --cpus-per-task=48\n" in script
    assert " pipeline.max_ranks=6 " in script


def test_threads_that_cannot_be_timed_here_are_not_weighed_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submit, "Planned", lambda config, *_: config)
    monkeypatch.setattr(submit, "by_split", lambda config, found, *_: iter([(s, config) for s in found]))
    monkeypatch.setattr(submit, "_per_node", lambda planned, numbers, most: most)
    monkeypatch.setattr(submit, "cores_here", lambda here: 8)
    monkeypatch.setattr(submit, "domains_here", lambda here: 2)
    auto, asked = load("c.yaml", ["pipeline.threads=auto"]), argparse.Namespace(cluster=[])

    def ways(config: Config, cores: int) -> tuple[str, list[Split]]:
        why, found = submit._ways(asked, config, Partition("main", 4, cores, 1 << 40, 1e9), [1], None)
        return why, [split for split, _ in found]

    monkeypatch.setattr(submit, "advice_here", lambda: None)
    timed = "each number was timed here (pipeline.threads=auto)"
    assert ways(auto, 8) == (timed, [Split(1, 8), Split(2, 4), Split(4, 2), Split(8, 1)])
    monkeypatch.setattr(submit, "advice_here", lambda: "others use this machine too")
    assert ways(auto, 8)[0] == f"{timed}. Note: others use this machine too"
    why, found = ways(auto, 96)
    assert found == [Split(2, 48)]
    assert "were not weighed, as those nodes have 96 cores, and this one 8: submit from one of them" in why
    why, found = ways(load("c.yaml", ["pipeline.threads=3"]), 96)
    assert (why, found) == ("pipeline.threads=3; auto weighs ranks x threads", [Split(32, 3)])


@pytest.mark.usefixtures("made_up_times")
@pytest.mark.slow
def test_submit_times_each_number_of_threads_of_a_node_like_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two threads are four times as fast as one here, and then a tenth faster."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(submit, "cores_here", lambda here: 2)
    monkeypatch.setattr(submit, "domains_here", lambda here: 1)
    monkeypatch.setattr("mpipipe.commands.machines.cores_available", lambda: frozenset((0, 1)))
    faster = {1: 1.0, 2: 4.0}
    monkeypatch.setattr(
        Profiler, "_once", lambda *_: (1e-1 / faster[n := torch.get_num_threads()], 2e-1 / faster[n])
    )
    given = ["c.yaml", "run.dir=r", "--dry-run", "--nodes", "1", "pipeline.threads=auto"]
    assert submit.main(given) == 0
    out = capsys.readouterr().out
    assert "1 rank x 2 threads on each node" in out
    assert "2 x 1 takes " in out
    assert "one rank with all 2 threads is best for the cores of a node" in out
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=2\n" in Path("r/submit.sh").read_text()
    faster[2] = 1.1
    assert submit.main(given) == 0
    assert "2 ranks x 1 thread on each node" in (out := capsys.readouterr().out)
    assert "1 x 2 takes " in out
    assert "#SBATCH --ntasks-per-node=2\n#SBATCH --cpus-per-task=1\n" in Path("r/submit.sh").read_text()


def programs(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


@pytest.mark.slow
def test_what_was_decided_wins_over_the_environment_of_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["c.yaml", "run.dir=r", "--nodes", "1", "--time", "90", "--cluster", str(CLUSTER)]
    programs(tmp_path, sinfo='echo "gpu|3|2|1|2|4000|1:00"', sbatch='printf "%s\\n" "$@" >sent; echo 31')
    assert submit.main(given) == 1, "no partition is the default one"
    for name in ("SBATCH_TIMELIMIT", "SBATCH_MEM_PER_CPU", "SBATCH_JOB_NAME", "SBATCH_OUTPUT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert submit.main(given) == 0
    said = f"--job-name=mlp --time=1:30:00 --partition=gpu --output={tmp_path}/r/slurm-%j.out --mem=0"
    assert (tmp_path / "sent").read_text().split("\n")[:-1] == ["--parsable", *said.split(), "r/submit.sh"]
    script = Path("r/submit.sh").read_text()
    assert "\n#SBATCH --mem=0\n#SBATCH --time=1:30:00\n#SBATCH --partition=gpu\n#SBATCH --output=/" in script
    capsys.readouterr()
    assert submit.main([*given, "--dry-run"]) == 0
    assert f"not submitted; to submit it: sbatch {said} r/submit.sh\n" in capsys.readouterr().out


@pytest.mark.slow
def test_an_argument_of_two_lines_leaves_the_script_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["c.yaml", "run.dir=r", "sample.prompt=Once\nupon", "--nodes", "1", "--dry-run"]
    monkeypatch.setenv("PATH", "/nonexistent")
    assert submit.main([*words, "--cluster", str(CLUSTER)]) == 0
    script = Path("r/submit.sh").read_text()
    head, _, rest = script.rpartition("\n#SBATCH")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "'sample.prompt=Once\nupon'" in rest


@pytest.mark.slow
def test_an_sbatch_that_does_not_answer_may_have_submitted_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(tmp_path, sinfo='echo "main*|3|2|1|2|4000|1:00"', sbatch="exec sleep 60")
    monkeypatch.setattr("mpipipe.cluster.partition.ASK_S", 0.5)
    assert submit.main(["c.yaml", "run.dir=r", "--nodes", "1", "--cluster", str(CLUSTER)]) == 1
    said = "sbatch --parsable r/submit.sh: no answer within 0.5 s; it may be submitted all the same: look at"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_submit_writes_a_script_that_is_complete_and_hands_it_to_sbatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(tmp_path, sinfo='echo "main*|3|2|1|2|4000|1:00"', sbatch='echo "$*" >sent; echo 31')
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


@pytest.mark.slow
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
