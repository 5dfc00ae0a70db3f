"""`mpirun -n N python -m mpipipe.train config.yaml [key=value ...] [--resume]`: a whole run.

    config -> model, data -> Pipeline -> steps, evaluations, checkpoints -> summary

Every rank runs this file with the same arguments. Rank 0 decides and speaks; an error on any rank
ends all.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe.cluster.agree import agree
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.ending import TimeLimit, end, stop_signals
from mpipipe.cluster.launch import binding_advice, launcher_on_terminal
from mpipipe.cluster.mpi import connect
from mpipipe.cluster.node import cores_available
from mpipipe.config import Config, load
from mpipipe.config.dotted import resolve
from mpipipe.data import open_dataset, prepare
from mpipipe.errors import CheckpointError, EndOfData, MpipipeError
from mpipipe.models import Built, build
from mpipipe.pipeline import Pipeline, Step
from mpipipe.planner.schedules import register
from mpipipe.report.draw import draw_png, draw_text
from mpipipe.report.metrics import Metrics, cut_metrics
from mpipipe.report.plan import describe
from mpipipe.report.progress import Progress
from mpipipe.report.summary import summary
from mpipipe.runtime.optimizer import OptimizerSettings
from mpipipe.runtime.process import resident_memory
from mpipipe.runtime.sample import generate
from mpipipe.state.files import write_text
from mpipipe.state.resume import newest, prune, read_state, set_aside, step_folder, survey, unreadable
from mpipipe.state.rundir import CONFIG, METRICS, create, make_latest, renew, reopen
from mpipipe.values import Report, Timeline, to_json

KEPT_STEPS = 50  # of which the timeline is remembered
SAVE_BYTES_PER_S = 100e6  # of a slow file system: what a save is taken to need before the first one
USAGE = """usage: mpirun -n N python -m mpipipe.train config.yaml [key=value ...] [--resume] [--new-numerics]

  key=value        any key of the config, such as train.steps=50; docs/guide.md lists them all
  --resume         go on from the newest checkpoint of the run in run.dir, or of runs/latest
  --new-numerics   with --resume: also where what decides the bits (batch, seed, threads, ...) has changed"""


def main(argv: Sequence[str]) -> int:
    """The exit code; on an error, ends every rank of the job with a non-zero one."""
    comm: Communicator | None = None
    try:
        flags = {a for a in argv if a.startswith("-")}
        given = [a for a in argv if a not in flags]
        if flags & {"-h", "--help"}:
            print(USAGE)
            return 0
        if not given or flags - {"--resume", "--new-numerics"}:
            raise MpipipeError(USAGE)
        comm = connect()
        train(comm, load(given[0], given[1:]), "--resume" in flags, "--new-numerics" in flags)
        comm.close()
        return 0
    except BaseException as error:
        return end(comm, error)


def train(comm: Communicator, config: Config, resume: bool = False, new_numerics: bool = False) -> Report:
    """Trains as configured; the report is the same on every rank. Collective.

    resume: goes on from the newest whole checkpoint of the run in `run.dir`, or of the latest run.
    """
    settings = {**config.model_dump(), "command": {"--resume": resume, "--new-numerics": new_numerics}}
    agree(comm, {f"{s}.{k}": repr(v) for s, keys in settings.items() for k, v in keys.items()})
    resident_memory()  # from here on it counts
    place = comm.bcast_object(_place(config, resume) if comm.rank == 0 else None)
    assert place is not None
    run_dir, checkpoint, said, resumed, new_data = place
    if not resumed or new_data:  # else the corpus is there, and must stay as it was
        prepare(config, run_dir, comm.rank == 0)
    comm.barrier()
    opened = open_dataset(config, run_dir)
    data, val = opened if isinstance(opened, tuple) else (opened, None)
    built = build(config, data)
    with _progress(comm, config, run_dir) as log:
        for line in said:
            log.say(line)
        c, t, p = config, config.train, config.pipeline
        pipe = Pipeline(
            built.model, built.loss, built.data, _optimizer(config), batch=t.batch, val=val,
            val_batch=c.eval_batch, micro_batches=p.micro_batches, metrics=built.metrics,
            schedule=_schedule(config), precision=t.precision, threads=p.threads, blocks=p.blocks,
            tied=p.tied, gemm=c.kernels.gemm, seed=t.seed, unused=t.unused,
            max_shapes=c.capture.max_shapes, receive_window=p.receive_window, memory_bytes=p.memory_bytes,
            initial=built.initial, resume=checkpoint, new_numerics=new_numerics, comm=comm, say=log.say,
        )  # fmt: skip
        if resumed and comm.rank == 0:
            set_aside(run_dir)
            renew(run_dir, config, pipe.steps_done)
            cut_metrics(run_dir / METRICS, pipe.steps_done)
        if comm.rank == 0:
            make_latest(config, run_dir)
        return _Run(config, pipe, built, run_dir, log).all()


def _place(config: Config, resume: bool) -> tuple[Path, Path | None, list[str], bool, bool]:
    """(run folder, checkpoint to go on from, what to say of it, whether it was there, whether its data was
    another); on one rank."""
    run_dir = reopen(config) if resume else None
    if run_dir is None:
        run_dir = create(config)
        said = ["note: there is no run to resume, a new one begins"] if resume else []
        return run_dir, None, said, False, False
    passed_over = [f"note: passed over {folder}: {wrong}" for folder, wrong in survey(run_dir) if wrong]
    checkpoint = newest(run_dir)
    if checkpoint is None and (unread := unreadable(run_dir)):
        raise CheckpointError(
            "\n".join([f"{run_dir}: no checkpoint can be read", *(f"  {wrong}" for _, wrong in unread)])
            + "\n  mend one, or start anew in another folder"
        )
    step = 0 if checkpoint is None else read_state(checkpoint).step
    if step >= config.train.steps:
        raise CheckpointError(
            f"{checkpoint}: all of the {config.train.steps} steps are done; raise train.steps to go on"
        )
    new_data = step == 0 or load(run_dir / CONFIG).data != config.data
    going_on = (
        f"resuming {run_dir} after {step} steps" if step else f"no checkpoint in {run_dir}, it begins anew"
    )
    said = [*passed_over, f"mpipipe: {going_on}"]
    return run_dir, checkpoint, said, True, new_data


def _schedule(config: Config) -> str:
    """The name of the schedule; one of the user's own is made known under its dotted path."""
    name = config.pipeline.schedule
    if ":" in name:
        register(name, resolve("pipeline.schedule", name))
    return name


def _optimizer(config: Config) -> OptimizerSettings:
    t = config.train
    return OptimizerSettings(
        kind=t.optimizer, lr=t.lr, betas=t.betas, eps=t.eps, momentum=t.momentum, weight_decay=t.weight_decay,
        warmup=t.warmup, min_lr_ratio=t.min_lr_ratio, steps=t.steps, clip=t.clip,
    )  # fmt: skip


def _advice(comm: Communicator, threads: int) -> str | None:
    """About threads and cores of the first node. Collective."""
    cores = comm.allgather_object(cores_available())
    on_first = [c for c, node in zip(cores, comm.node_of_rank, strict=True) if node == 0]
    return binding_advice(len(frozenset().union(*on_first)), len(on_first), threads, len(cores[0]))


def _progress(comm: Communicator, config: Config, run_dir: Path) -> Progress | _Silent:
    if comm.rank != 0:
        return _Silent()
    bar = launcher_on_terminal()
    return Progress(config.train.steps, config.run.log_every, run_dir / "train.log", bar=bar)


class _Silent:
    """The progress of a rank that does not speak."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None: ...

    def step(self, step: int, values: dict[str, float]) -> None: ...


class _Run:
    """The steps of one run on one rank, and its end."""

    def __init__(
        self, config: Config, pipe: Pipeline, built: Built, run_dir: Path, log: Progress | _Silent
    ) -> None:
        self.config, self.pipe, self.built, self.run_dir, self.log = config, pipe, built, run_dir, log
        self.data, self.comm = pipe.data, pipe.comm
        self.times: deque[np.ndarray[Any, Any]] = deque(maxlen=KEPT_STEPS)
        self.step_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self.saved, self.sha = -1, ""
        state = {**pipe.trainer.state_dict(), **pipe.trainer.optimizer_state()}
        nbytes = pipe.size * sum(t.nbytes for t in state.values())
        self.turn_s, self.save_s = 0.0, nbytes / SAVE_BYTES_PER_S  # the longest so far
        self.values: dict[str, float] = {}  # of the last evaluation
        self.unit = "tokens" if self.data.tokens_per_sample > 1 else "samples"

    def all(self) -> Report:
        pipe, threads = self.pipe, self.pipe.numerics.threads
        self.log.say(f"mpipipe: {pipe.size} ranks x {threads} threads, run folder {self.run_dir}")
        if advice := _advice(self.comm, threads):
            self.log.say(f"note: {advice}")
        self.log.say(describe(pipe.plan, pipe.costs, pipe.planning_s))
        if pipe.rank == 0:
            write_text(self.run_dir / "plan.json", to_json(pipe.plan))
        with stop_signals() as asked:  # to the very end: a late signal must not kill the save
            with Metrics(self.run_dir / METRICS) if pipe.rank == 0 else nullcontext() as metrics:
                last = self.loop(metrics, asked)
            return self.end(last, asked)

    def loop(self, metrics: Metrics | None, asked: list[str]) -> Step:
        """Steps, evaluations and checkpoints; ends early, on every rank at the same step, when one was
        asked to, or when the time or the data has ended."""
        t, limit = self.config.train, TimeLimit(self.config.run.time_limit, os.environ)
        last: Step | None = None
        while True:
            start = time.perf_counter()
            if self.pipe.rank == 0 and limit.reached(self.turn_s, self.save_s):
                asked.append("the time limit")
            try:
                step, outcome = self.pipe.timed_step(bool(asked))
            except EndOfData:
                if last is None:
                    raise
                asked.append("the end of the data")
                self.values = self._evaluate()
                self.save()
                return replace(last, stop=True)
            last = step
            self.times.append(outcome.times)
            self.step_s.append(step.seconds)
            values, done = self._values(step), step.step >= t.steps
            if self._due(self.config.eval.every, step.step) and not step.stop:  # who asked may not wait: save
                self.values = self._evaluate()
                values |= self.values
            if metrics is not None:
                metrics.write(step=step.step, **values)
            self.log.step(step.step, values)
            self.turn_s = max(self.turn_s, time.perf_counter() - start)
            if done or step.stop or self._due(t.save_every, step.step):
                self.save()
            if done or step.stop:
                return step

    def _due(self, every: int, step: int) -> bool:
        return step >= self.config.train.steps or bool(every and step % every == 0)

    def _values(self, step: Step) -> dict[str, float]:
        values = {"loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm, "step_s": step.seconds}
        found = {name: value for name, value in values.items() if value is not None}
        return found | {f"{self.unit}_per_s": self._per_second(step.seconds)}

    def _per_second(self, step_s: float) -> float:
        return self.config.train.batch * self.data.tokens_per_sample / step_s

    def _evaluate(self) -> dict[str, float]:
        c = self.config
        if self.data.val_samples == 0:
            return {}
        found = self.pipe.evaluate(c.eval.batches)
        return {f"val_{name}": value for name, value in found.items()}

    def save(self) -> None:
        """A checkpoint, unless this step has one, then fewer of the old ones."""
        if self.saved == self.pipe.steps_done:
            return
        start, folder = time.perf_counter(), step_folder(self.run_dir, self.pipe.steps_done)
        if self.pipe.rank == 0:
            self.built.export(folder)
        self.sha = self.pipe.save(folder).weights_sha256
        self.saved = self.pipe.steps_done
        if self.pipe.rank == 0:
            prune(self.run_dir, self.config.train.keep)
        self.save_s = max(self.save_s, time.perf_counter() - start)

    def end(self, last: Step, asked: list[str]) -> Report:
        """Sample and summary."""
        comm, pipe = self.comm, self.pipe
        measured = self._measured()
        peaks = tuple(comm.allgather_object(pipe.memory.nbytes))
        text = None
        if not last.stop:
            text = generate(pipe.trainer, self.data, self.config.sample, pipe.numerics.seed)
        step_s = float(np.median(list(self.step_s)[1:] or self.step_s))
        signals = [name for names in comm.allgather_object(asked) for name in names[:1]]
        prediction = pipe.plan.prediction
        report = Report(
            val_loss=self.values.get("val_loss"),
            unigram_entropy=comm.bcast_object(self.data.unigram_entropy if comm.rank == 0 else None),
            metrics={k.removeprefix("val_"): v for k, v in self.values.items() if k != "val_loss"},
            step_s=step_s,
            predicted_step_s=prediction.step_s,
            peak_bytes=peaks,
            predicted_peak_bytes=prediction.peak_bytes,
            bubble=measured.bubble,
            predicted_bubble=prediction.bubble,
            per_s=self._per_second(step_s),
            unit=self.unit,
            weights_sha256=self.sha,
            steps=pipe.steps_done,
            final_loss=last.loss,
            plan_hash=pipe.plan.hash,
            stopped_by=signals[0] if last.stop else None,
            exact_resume=self.data.exact,
        )
        if comm.rank == 0:
            self._write(report, measured, text)
        return report

    def _measured(self) -> Timeline:
        """The step whose makespan is the median of those remembered, the first one left out."""
        mine = [t - self.comm.clock_offset_s for t in list(self.times)[1:] or self.times]
        by_rank = self.comm.allgather_object(mine)
        steps = [self._timeline(times) for times in zip(*by_rank, strict=True)]
        return sorted(steps, key=lambda t: t.makespan_s)[len(steps) // 2]

    def _timeline(self, times: Sequence[np.ndarray[Any, Any]]) -> Timeline:
        start = min(float(t.min()) for t in times)
        return Timeline(self.pipe.program, tuple(t - start for t in times), ())

    def _write(self, report: Report, measured: Timeline, text: str | None) -> None:
        write_text(self.run_dir / "summary.json", to_json(report))
        draw_png({"predicted": self.pipe.predicted, "measured": measured}, self.run_dir / "timeline.png")
        if text is not None:
            write_text(self.run_dir / "sample.txt", text)
            self.log.say(f"\nsample:\n{text}\n")
        self.log.say(f"measured step:\n{draw_text(measured)}\n\n{summary(report)}")
        self.log.say(f"checkpoint, summary and timeline: {self.run_dir}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
