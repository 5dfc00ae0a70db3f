"""The end of the data, on a pipeline whose steps are made up; captures under the eyes of the watchdog."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpipipe.cluster import watchdog
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.ending import TIME_OF_JOB, TimeLimit
from mpipipe.cluster.local import LocalCommunicator, run_local
from mpipipe.cluster.watchdog import STOOD_STILL, Watchdog, explained
from mpipipe.config import parse
from mpipipe.errors import EndOfData, MpipipeError
from mpipipe.graph import variants
from mpipipe.pipeline import Pipeline, Step
from mpipipe.report.plan_file import read_plan
from mpipipe.report.run import read_run
from mpipipe.report.words import words
from mpipipe.running import Run
from mpipipe.runtime.recorder import Recorder
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.rundir import how_ended
from mpipipe.train import train
from mpipipe.values import Cluster, Device, Report, Timeline


class Ends:
    """Two steps; every evaluation is noted."""

    rank = steps_done = 0

    def __init__(self) -> None:
        self.evaluated: list[int] = []
        self.step = 0
        self.saver = SimpleNamespace(took_s=0.0)

    def timed_step(self, stop: bool) -> tuple[Step, None]:
        if self.step == 2:
            raise EndOfData("the data ended after 2 steps")
        self.step += 1
        return Step(self.step, 2.0, None, None, 0.1, stop), None

    def shown(self, steps_left: int) -> list[Timeline]:
        return []

    def evaluate(self, batches: int) -> dict[str, float]:
        self.evaluated.append(self.step)
        return {"loss": 1.5}


def with_made_up_steps(every: int) -> Any:
    """A run whose steps are those of `Ends`. every: steps between evaluations."""
    run: Any = Run.__new__(Run)
    run.config = SimpleNamespace(
        train=SimpleNamespace(steps=9, save_every=0, batch=4),
        eval=SimpleNamespace(every=every, batches=1),
    )
    run.pipe, run.data = Ends(), SimpleNamespace(val_samples=8, tokens_per_sample=1)
    run.step_s, run.values, run.unit = [], {}, "samples"
    run.slowness = SimpleNamespace(add=lambda _: None)
    run.watchdog, run.limit = Watchdog(0, 1, Path(), "off"), TimeLimit(None, {})
    run.last, run.all_steps_s, run.save = None, 0.0, lambda background: None
    run.turn_s = run.save_s = run.guess_s = 0.0
    run.run_dir = Path("nowhere")
    run.log = SimpleNamespace(step=lambda step, values: None)
    return run


@pytest.mark.parametrize(
    ("every", "rows"), [(0, [(1, False), (2, False), (2, True)]), (2, [(1, False), (2, True)])]
)
def test_the_last_evaluation_is_written_also_where_the_data_ends(
    every: int, rows: list[tuple[int, bool]]
) -> None:
    run = with_made_up_steps(every)
    written: list[tuple[int, bool]] = []
    shown: list[tuple[int, bool]] = []
    run.log = SimpleNamespace(step=lambda step, values: shown.append((step, "val_loss" in values)))
    metrics: Any = SimpleNamespace(write=lambda step, **values: written.append((step, "val_loss" in values)))
    asked: list[str] = []
    assert run.loop(metrics, asked).stop
    assert asked == ["the end of the data"]
    assert run.pipe.evaluated == [2]
    assert written == shown == rows
    assert run.all_steps_s == pytest.approx(0.2), "the time of both"


def test_a_run_ends_after_the_step_that_its_time_limit_leaves() -> None:
    run, asked = with_made_up_steps(0), list[str]()
    run.limit = TimeLimit(1.0, {}, lambda: 1000.0 + 60.0 * run.pipe.step)
    last = run.loop(None, asked)
    assert (last.step, last.stop, asked) == (2, True, ["the time limit"])
    run, asked = with_made_up_steps(0), []
    run.limit = TimeLimit(9.0, {"SLURM_JOB_END_TIME": "1060"}, lambda: 1000.0)
    run.loop(None, asked)
    assert asked == ["the time of the job"]


def test_time_is_left_for_the_longest_save_and_for_a_guess_only_until_there_was_one() -> None:
    run, left_for = with_made_up_steps(0), list[float]()
    run.limit = SimpleNamespace(
        reached=lambda step_s, save_s: left_for.append(save_s), left_s=lambda: math.inf
    )
    run.guess_s = 600.0
    run.loop(None, [])
    assert left_for == [600.0] * 3, "before each step, and before the one that found no data"
    for took_s, longest_s in ((20.0, 20.0), (30.0, 30.0), (0.0, 30.0)):
        run.pipe = Ends()
        run.pipe.saver.took_s = took_s  # 0: of the saver that a recovery makes
        left_for.clear()
        run.loop(None, [])
        assert left_for == [longest_s] * 3


def begun(
    run_dir: Path, limit: TimeLimit, copies: tuple[int, ...], nodes: tuple[int, ...], rank: int = 0
) -> Any:
    """A start of a run before its first step. copies: bytes that each rank writes."""
    pipe: Any = SimpleNamespace(
        data=SimpleNamespace(tokens_per_sample=1), steps_done=0, spares=(), waits=True, rank=rank,
        comm=SimpleNamespace(node_of_rank=nodes),
        trainer=SimpleNamespace(state_dict=dict, optimizer_state=dict),
        plan=SimpleNamespace(prediction=SimpleNamespace(peak_bytes=copies)),
        saver=SimpleNamespace(copied_bytes=lambda *_: copies, took_s=0.0),
    )  # fmt: skip
    other: Any = None
    run: Any = Run(parse(""), pipe, other, run_dir, other, other, other, limit)
    run._make_room()
    return run


def test_a_save_is_guessed_by_the_node_that_writes_most_and_takes_a_tenth_of_the_time_at_most(
    tmp_path: Path,
) -> None:
    now, end_s = [600.0], 3600.0
    limit = TimeLimit(None, {"SLURM_JOB_END_TIME": f"{end_s:.0f}"}, lambda: now[0])
    for nodes, guess_s in (((0, 1, 2, 3), 20.0), ((0, 0, 0, 1), 60.0)):
        assert begun(tmp_path, limit, (2 * 10**9,) * 4, nodes)._longest_save_s() == guess_s
    run = begun(tmp_path, limit, (39 * 10**9,) * 4, (0,) * 4)  # 13 billion parameters with AdamW
    kept_s = 0.1 * limit.left_s()
    now[0] = end_s - kept_s - 1
    assert limit.reached(0.0, run._longest_save_s()) is None
    run._make_room()  # as after another plan: what was the first step's stays
    now[0] += 2
    assert limit.reached(0.0, run._longest_save_s())
    late = begun(tmp_path, TimeLimit(1.0, {}, lambda: 1000.0, began=0.0), (39 * 10**9,), (0,))
    assert late._longest_save_s() == 0.0
    assert begun(tmp_path, TimeLimit(None, {}), (39 * 10**9,), (0,))._longest_save_s() == 390.0


def test_a_start_goes_by_what_the_start_before_has_measured_until_it_has_saved_itself(tmp_path: Path) -> None:
    limit = TimeLimit(None, {"SLURM_JOB_END_TIME": "3600"}, lambda: 0.0)

    def start(rank: int = 0) -> Any:
        return begun(tmp_path, limit, (10**9,) * 2, (0, 0), rank)

    def saves(run: Any, *seconds: float) -> list[float]:
        found = []
        for took_s in seconds:
            run.pipe.saver.took_s = took_s
            found.append(run._longest_save_s())
        return found

    assert saves(start(1), 7.0, 8.0) == [7.0, 8.0]
    assert saves(start(), 0.0) == [20.0], "rank 0 writes for all, so nothing is known"
    assert saves(start(), 900.0) == [900.0]
    run = start(1)
    assert saves(run, 0.0, 30.0, 40.0, 0.0) == [900.0, 30.0, 40.0, 40.0], "also beyond what a guess may take"
    assert saves(start(), 30.0, 40.0, 0.0) == [30.0, 40.0, 40.0]
    assert saves(start(), 0.0) == [40.0], "one stall of the file system is not for ever"
    for text in ("", '{"longest_s": -1}', '{"longest_s": Infinity}'):
        (tmp_path / "saves.json").write_text(text)
        assert saves(start(), 0.0) == [20.0]


def test_the_steps_that_are_left_are_those_that_the_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked_with = with_made_up_steps(0), list[int]()
    monkeypatch.setattr(run.pipe, "shown", lambda left: asked_with.append(left) or [])
    run.loop(None, [])
    run.pipe.step, run.limit = 0, TimeLimit(2.0, {}, lambda: 1000.0, began=892.45)
    monkeypatch.setattr(run.limit, "reached", lambda *_: None)
    run.loop(None, [])
    assert asked_with == [8, 7, 4, 4], "of nine; of the half second that is left, at 0.1 s each"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "says"), [("{path: nowhere}", "nowhere'"), ("{path: text}", "does not fit|memory")]
)
def test_a_start_that_fails_leaves_no_folder_that_it_named_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("0123456789" * 20)
    text = f"data: {data}\nmodel: {{layers: 1, d_model: 8, heads: 1, context: 4}}\n"
    text += "pipeline: {memory_bytes: 1000}\n"
    for given, left in (("null", 0), ("runs/named", 1)):
        config = parse(f"{text}run: {{dir: {given}}}\n")
        with pytest.raises(MpipipeError, match=says):
            run_local(2, lambda comm, config=config: train(comm, config))
        assert len(list((tmp_path / "runs").iterdir())) == left


@pytest.mark.slow
@pytest.mark.parametrize("asked", [None, TIME_OF_JOB])
@pytest.mark.usefixtures("made_up_times")
def test_a_run_that_is_stopped_reads_no_data_for_its_summary(tmp_path: Path, asked: str | None) -> None:
    """Its time is nearly over."""
    (tmp_path / "text").write_text("0123456789" * 20)
    config = parse(
        f"data: {{path: {tmp_path / 'text'}}}\nmodel: {{layers: 1, d_model: 8, heads: 1, context: 4}}\n"
        f"train: {{steps: 2, batch: 4}}\nrun: {{dir: {tmp_path / 'run'}}}\nkernels: {{gemm: mkl}}\n"
        "pipeline: {cost_cache: false, micro_batches: 2}"
    )
    report = run_local(1, lambda comm: train(comm, config, asked=[asked] if asked else []))[0]
    assert (report.steps, report.stopped_by) == ((1, asked) if asked else (2, None))
    assert (report.unigram_entropy is None) == (asked is not None)


@pytest.mark.parametrize(
    ("config", "metrics", "val_samples", "says"),
    [
        ("", {}, 0, None),
        ("", {"top5": None}, 8, None),
        ("", {"top5": None}, None, None),
        ("", {"top5": None}, 0, "no validation part, so there is no validation loss and no top5"),
        ("eval: {every: 5}", {}, 0, "no validation part, so there is no validation loss"),
    ],
)
def test_what_is_asked_for_and_cannot_be_evaluated_is_said(
    config: str, metrics: dict[str, None], val_samples: int | None, says: str | None
) -> None:
    run: Any = Run.__new__(Run)
    run.config, run.built = parse(config), SimpleNamespace(metrics=metrics)
    run.data = SimpleNamespace(val_samples=val_samples)
    found = run._missing()
    assert found is None if says is None else found.endswith(says)


def test_training_waits_for_saves_where_a_copy_does_not_fit() -> None:
    run: Any = Run.__new__(Run)
    run.config = parse("train: {save_every: 5}")
    devices = tuple(Device("cpu", 1.0, memory_bytes, 1) for memory_bytes in (200, 155))
    run.pipe = SimpleNamespace(
        plan=SimpleNamespace(prediction=SimpleNamespace(peak_bytes=(100, 100))),
        costs=SimpleNamespace(cluster=Cluster(devices, (0, 0), {})),
    )
    assert run._copies((100, 55)) == ((100, 55), None)
    copies, note = run._copies((100, 60))
    assert copies == ()
    assert note.endswith("rank 1 has no room for a copy of its state, 60 bytes; 5 bytes are missing")
    run.config = parse("")
    assert run._copies((100, 60)) == ((), None), "there is one save only, at the end"


@pytest.mark.slow
@pytest.mark.usefixtures("made_up_times")
@pytest.mark.parametrize("told", [True, False], ids=["evaluated", "not told of its last step"])
def test_a_run_that_died_before_its_summary_comes_to_its_end_when_it_is_resumed(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever asks then, a supervisor or the next start of a job, is told that it is finished."""

    def run(name: str, resume: bool = False, asked: str = "") -> Report:
        config = parse(
            "model: {name: mlp, hidden: [16, 16]}\ndata: {name: synthetic, samples: 64}\n"
            "train: {steps: 3, batch: 8}\npipeline: {micro_batches: 4, cost_cache: false, schedule: 1f1b}\n"
            f"run: {{dir: {tmp_path / name}}}"
        )
        reasons = [asked] if asked else []
        report = run_local(2, lambda comm: train(comm, config, resume, asked=reasons[comm.rank :]))[0]
        assert how_ended(config, tmp_path / name) == "finished"
        return report

    def dies(*_: object) -> None:
        raise RuntimeError("the node is lost")

    whole, folder = run("whole"), tmp_path / "died"
    with monkeypatch.context() as during:
        during.setattr("mpipipe.running.generate", dies)
        with pytest.raises(RuntimeError, match="the node is lost"):
            run("died")
    assert not (folder / "summary.json").exists()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    if not told:
        (folder / "metrics.jsonl").write_text("".join(lines[:2]))
        hurried = run("died", resume=True, asked="SIGUSR1")
        assert (hurried.stopped_by, hurried.val_loss) == ("SIGUSR1", None), (
            "who asked waits for no evaluation"
        )
        (folder / "summary.json").unlink()
    found = run("died", resume=True)
    same = ("steps", "val_loss", "metrics", "weights_sha256", "stopped_by")
    assert [getattr(found, name) for name in same] == [getattr(whole, name) for name in same]
    assert (found.final_loss == whole.final_loss) == told
    assert (found.untimed, whole.untimed) == (True, False)
    took_s = [json.loads(line)["step_s"] for line in lines[: 2 + told]]
    assert found.step_s == pytest.approx(np.median(took_s))
    now = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert now == lines if told else "val_loss" in json.loads(now[2])
    assert "no step was timed since the run went on here" in (folder / "train.log").read_text()
    assert "predicted" in words(read_run(folder))
    again = run("died", resume=True)  # as a chain of jobs may do
    assert (again.steps, again.weights_sha256) == (3, whole.weights_sha256)
    assert "3 steps: the run is finished; for more, raise train.steps (now 3)" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_text().splitlines(keepends=True) == now
    (folder / "summary.json").unlink()  # a start that has evaluated may die before it as well
    assert run("died", resume=True).val_loss == whole.val_loss
    assert (folder / "metrics.jsonl").read_text().splitlines(keepends=True) == now


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs.shape[0]


@pytest.mark.parametrize(
    ("hangs", "in_capture", "codes"),
    [(False, True, []), (True, True, [STOOD_STILL]), (True, False, [STOOD_STILL])],
    ids=["a capture that computes", "a capture that hangs", "an evaluation that hangs"],
)
@pytest.mark.slow
@pytest.mark.usefixtures("made_up_times")
def test_a_long_capture_within_training_is_no_standstill(
    hangs: bool, in_capture: bool, codes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation is captured when it is first asked for."""
    limit_s, left = 0.5, list[int]()
    monkeypatch.setattr(watchdog, "GATHER_S", 0.1)
    monkeypatch.setattr(watchdog, "OTHER_S", limit_s)  # so that only who computes goes on
    monkeypatch.setattr(watchdog, "WORK_S", limit_s / 10)
    monkeypatch.setattr(watchdog, "waiting", lambda stack: None)  # a local rank is within a carrier always

    def slow(of: Callable[..., Any], *args: Any) -> Any:
        end = time.monotonic() + 4 * limit_s
        while time.monotonic() < end and not left:
            if hangs:
                time.sleep(limit_s / 10)
        return of(*args)

    def body(comm: Communicator) -> None:
        data = [{"x": x} for x in torch.ones(8, 4)]
        how: Any = {"batch": 4, "micro_batches": 2, "gemm": "mkl", "say": lambda _: None}
        pipe = Pipeline(Single, squares, data, val=data, comm=comm, **how)
        owner, name = (variants, "capture") if in_capture else (Trainer, "evaluate")
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: slow(original, *args))
        run: Any = Run.__new__(Run)
        run.pipe, run.watchdog = pipe, Watchdog(0, 1, tmp_path, limit_s, get_ident(), left.append)
        run._metrics = nullcontext
        run.loop = lambda metrics, asked: pipe.evaluate()
        run.end = lambda last, asked: last
        with closing(run.watchdog):
            run.watchdog.start()
            assert run._train([]).keys() == {"loss"}

    run_local(1, body)
    assert left == codes
    if codes:
        place = "the capture of the model for mode eval" if in_capture else "the training loop"
        assert place in explained(tmp_path)


@pytest.fixture
def rank_1_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the steps of a run each of its instructions takes ten times as long as one of rank 0, and another
    plan always pays off."""
    typical = Recorder.typical

    def of_a_slow_rank(recorder: Recorder, planned: Timeline) -> list[Timeline]:
        found = typical(recorder, planned)
        for timeline in found:
            for times, seconds in zip(timeline.times, (0.1, 1.0), strict=True):
                times[:, 1] = times[:, 0] + seconds
        return found

    monkeypatch.setattr(Recorder, "typical", of_a_slow_rank)
    monkeypatch.setattr(
        LocalCommunicator, "oversubscribed", property(lambda _: False, lambda *_: None), raising=False
    )  # or no plan is made anew
    monkeypatch.setattr("mpipipe.survival.MOST", 1e9)
    monkeypatch.setattr("mpipipe.planner.change.LASTING", 0.2)
    monkeypatch.setattr(Pipeline, "build_s", property(lambda _: 0.0, lambda *_: None), raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("made_up_times", "rank_1_is_slow")
def test_a_run_goes_over_to_what_its_first_steps_have_shown(tmp_path: Path) -> None:
    """With the bits of the run that keeps its plan."""
    reports = dict[bool, Report]()
    for refine in (False, True):
        config = parse(
            "model: {name: mlp, hidden: [64, 64, 64]}\ndata: {name: synthetic, samples: 64}\n"
            "train: {steps: 12, batch: 8}\npipeline: {micro_batches: 4, cost_cache: false, schedule: 1f1b}\n"
            f"run: {{dir: {tmp_path / str(refine)}, refine: {str(refine).lower()}, log_every: 100}}"
        )
        reports[refine] = run_local(2, lambda comm, config=config: train(comm, config))[0]
    kept, refined = (reports[refine] for refine in (False, True))
    assert (refined.steps, refined.final_loss) == (kept.steps, kept.final_loss)
    assert refined.weights_sha256 == kept.weights_sha256
    assert refined.plan_hash != kept.plan_hash
    log = (tmp_path / "True" / "train.log").read_text()
    assert "mpipipe: after 4 steps planned anew: a step is predicted to take" in log
    assert "planned anew" not in (tmp_path / "False" / "train.log").read_text()
    assert read_plan(tmp_path / "True" / "plan.json").hash == refined.plan_hash
    steps = (tmp_path / "True" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == list(range(1, 13))


@pytest.mark.usefixtures("made_up_times", "rank_1_is_slow")
@pytest.mark.slow
def test_fit_goes_over_to_what_its_first_steps_have_shown() -> None:
    def body(comm: Communicator, refine: bool) -> tuple[str, dict[str, Tensor]]:
        data = [(torch.full((8,), float(i)), i) for i in range(32)]
        pipe = Pipeline(
            lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), squares, data, batch=8,
            micro_batches=4, schedule="1f1b", gemm="mkl", cost_cache=False, refine=refine, comm=comm,
            say=lambda _: None,
        )  # fmt: skip
        pipe.fit(8)
        return pipe.plan.hash, pipe.state_dict()

    (kept, expected), *_ = run_local(2, lambda comm: body(comm, False))
    (taken, found), *_ = run_local(2, lambda comm: body(comm, True))
    assert taken != kept
    assert all(torch.equal(found[name], t) for name, t in expected.items())
