"""`mpirun -n N python -m mpipipe.train config.yaml [key=value ...]`: the arrows, in order.

    config -> model -> graph -> costs -> plan -> program -> run -> summary

Every rank runs this file with the same arguments. Rank 0 decides (plan) and speaks; the ranks
compare what they are about to run before the first message, and an error on any of them ends all.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpipipe import ops
from mpipipe.cluster.agree import agree, code_version
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.launch import binding_advice, default_threads, launcher_on_terminal, launcher_rank
from mpipipe.cluster.memory import PeakMemory, give_back_freed_memory, keep_freed_memory
from mpipipe.cluster.mpi import SPEAK_FIRST_S, connect
from mpipipe.cluster.node import cores_available
from mpipipe.config import Config, load
from mpipipe.data import Dataset, open_dataset, prepare
from mpipipe.errors import MpipipeError
from mpipipe.graph.capture import warm_up_tracer
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import build
from mpipipe.planner.search import make_plan, predict, program_for
from mpipipe.report.draw import draw_png, draw_text
from mpipipe.report.metrics import Metrics
from mpipipe.report.plan import describe
from mpipipe.report.progress import Progress
from mpipipe.report.summary import summary
from mpipipe.runtime.costing import measure
from mpipipe.runtime.interpreter import Outcome
from mpipipe.runtime.optimizer import OptimizerSettings
from mpipipe.runtime.sample import generate
from mpipipe.runtime.setting import instruction_set, set_gemm_route, set_threads
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.files import write_text
from mpipipe.state.gather import save, weights_hash
from mpipipe.state.rundir import METRICS, create
from mpipipe.values import Costs, Numerics, Plan, Report, Timeline, from_json, to_json

KEPT_STEPS = 50  # of which the timeline is remembered


def main(argv: Sequence[str]) -> int:
    """The exit code; on an error, ends every rank of the job with a non-zero one."""
    comm: Communicator | None = None
    try:
        if not argv or argv[0].startswith("-"):
            raise MpipipeError("usage: mpirun -n N python -m mpipipe.train config.yaml [key=value ...]")
        comm = connect()
        train(comm, load(argv[0], argv[1:]))
        comm.close()
        return 0
    except BaseException as error:
        return _end(comm, error)


def _end(comm: Communicator | None, error: BaseException) -> int:
    rank = launcher_rank(os.environ) if comm is None else comm.rank
    if rank != 0:
        if comm is None:
            return 1
        time.sleep(SPEAK_FIRST_S)
    if isinstance(error, MpipipeError):
        text = f"mpipipe: error: {error}"
    else:
        text = f"mpipipe: rank {rank} failed\n" + "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    if comm is not None and comm.size > 1:
        comm.abort(1)
    return 1


def train(comm: Communicator, config: Config) -> Report:
    """Trains as configured; the report is the same on every rank. Collective."""
    settings = config.model_dump()  # first of all: later collectives depend on them
    agree(comm, {f"{s}.{k}": repr(v) for s, keys in settings.items() for k, v in keys.items()})
    keep_freed_memory()
    warm_up_tracer()
    memory = PeakMemory()
    numerics = resolve_numerics(comm, config)
    set_threads(numerics.threads)
    set_gemm_route(numerics.gemm)
    run_dir = Path(comm.bcast_object(create(config) if comm.rank == 0 else Path()))
    prepare(config, run_dir, comm.rank == 0)
    comm.barrier()
    dataset = open_dataset(config, run_dir)
    with _progress(comm, config, run_dir) as log:
        log.say(f"mpipipe: {comm.size} ranks x {numerics.threads} threads, run folder {run_dir}")
        if advice := _advice(comm, numerics.threads):
            log.say(f"note: {advice}")
        run = _Run(comm, config, numerics, dataset, run_dir, log, memory)
        return run.all()


def resolve_numerics(comm: Communicator, config: Config) -> Numerics:
    """All that decides bits, settled once. Collective."""
    p = config.pipeline
    threads = default_threads(comm, cores_available()) if p.threads == "auto" else p.threads
    return Numerics(
        batch=config.train.batch,
        micro_batch=config.micro_batch,
        micro_batches=p.micro_batches,
        blocks=p.blocks,
        threads=threads,
        bits="torch",
        gemm=config.kernels.gemm,
        precision=config.train.precision,
        tied=p.tied,
        op_table={},
        torch=torch.__version__,
        instruction_set=instruction_set(),
        seed=config.train.seed,
    )


def optimizer_settings(config: Config) -> OptimizerSettings:
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
    """One training run on one rank: plan, loop, end."""

    def __init__(
        self, comm: Communicator, config: Config, numerics: Numerics, dataset: Dataset, run_dir: Path,
        log: Progress | _Silent, memory: PeakMemory,
    ) -> None:  # fmt: skip
        self.comm, self.config, self.numerics, self.dataset = comm, config, numerics, dataset
        self.run_dir, self.log, self.memory = run_dir, log, memory
        self.settings = optimizer_settings(config)
        factory, loss = build(config, dataset)
        source = ModelSource(factory, numerics.seed)
        self.variants = Variants(source, loss, dataset.specs, numerics.micro_batch, numerics.precision)
        self.done = 0
        self.times: deque[np.ndarray[Any, Any]] = deque(maxlen=KEPT_STEPS)
        self.step_s: deque[float] = deque(maxlen=KEPT_STEPS)

    def all(self) -> Report:
        started = time.perf_counter()
        costs = measure(
            self.comm,
            self.variants,
            self.numerics,
            self.settings,
            self.memory,
            self.config.pipeline.memory_bytes,
        )
        plan, predicted = self.plan(costs)
        self.log.say(describe(plan, costs, time.perf_counter() - started))
        trainer = Trainer(self.comm, self.variants, plan, self.settings, self.dataset.batch)
        give_back_freed_memory()  # of the first weights, which were made one by one
        with _stop_signals() as asked:  # to the very end: a late signal must not kill the save
            with Metrics(self.run_dir / METRICS) if self.comm.rank == 0 else nullcontext() as metrics:
                last, val_loss = self.loop(trainer, metrics, asked)
            return self.end(trainer, plan, predicted, last, val_loss, asked)

    def plan(self, costs: Costs) -> tuple[Plan, Timeline]:
        """Rank 0 plans; all ranks prove that they hold the same plan, code and settings."""
        graph, comm, pipeline = self.variants.graph, self.comm, self.config.pipeline
        text = ""
        if comm.rank == 0:
            plan, _ = make_plan(
                costs, self.numerics, pipeline.schedule, pipeline.receive_window, graph.groups, comm.size
            )
            text = to_json(plan)
            write_text(self.run_dir / "plan.json", text)
        plan = from_json(Plan, comm.bcast_object(text))
        facts = {
            "code": code_version(ops.KERNELS_VERSION),
            "torch": self.numerics.torch,
            "instruction set": self.numerics.instruction_set,
            "threads": str(torch.get_num_threads()),
            "graph": graph.hash,
            "plan": plan.hash,
        }
        agree(comm, facts)
        program = program_for(plan.layout, plan.numerics, graph.ties, graph.groups)
        return plan, predict(costs, plan.layout, program, graph.groups)[1]

    def loop(
        self, trainer: Trainer, metrics: Metrics | None, asked: list[str]
    ) -> tuple[Outcome, float | None]:
        """Steps and evaluations; ends early, on every rank at the same step, when one was asked to."""
        c, val_loss = self.config, None
        for step in range(c.train.steps):
            start = time.perf_counter()
            outcome = trainer.step(step, stop=bool(asked))
            self.times.append(outcome.times)
            self.done = step + 1
            values = self._values(step, outcome, time.perf_counter() - start)
            due = step + 1 == c.train.steps or (c.eval.every and (step + 1) % c.eval.every == 0)
            if due and not outcome.stop:  # who asked to stop may not wait: save first
                val_loss = values["val_loss"] = trainer.evaluate(c.eval.batches, c.eval_batch)
            if metrics is not None:
                metrics.write(step=step + 1, **values)
            self.log.step(step + 1, values)
            if outcome.stop:
                break
        return outcome, val_loss

    def _values(self, step: int, outcome: Outcome, seconds: float) -> dict[str, float]:
        self.step_s.append(seconds)
        values = {"loss": outcome.loss / outcome.weight, "lr": self.settings.lr_at(step)}
        if self.settings.clip is not None:
            values["grad_norm"] = outcome.norm
        return values | {"step_s": seconds, "tokens_per_s": self._tokens_per_s(seconds)}

    def _tokens_per_s(self, step_s: float) -> float:
        return self.config.train.batch * self.dataset.tokens_per_sample / step_s

    def end(
        self,
        trainer: Trainer,
        plan: Plan,
        predicted: Timeline,
        last: Outcome,
        val_loss: float | None,
        asked: list[str],
    ) -> Report:
        """Checkpoint, sample and summary."""
        comm, order = self.comm, [*self.variants.source.params, *self.variants.source.buffers]
        state = trainer.state_dict()
        save(comm, self.run_dir / "checkpoint", state, order)
        sha = weights_hash(comm, state, order)
        measured = self._measured(trainer)
        peaks = tuple(comm.allgather_object(self.memory.nbytes))
        text = None if last.stop else generate(trainer, self.dataset, self.config.sample, self.numerics.seed)
        step_s = float(np.median(list(self.step_s)[1:] or self.step_s))
        signals = [name for names in comm.allgather_object(asked) for name in names[:1]]
        report = Report(
            val_loss=val_loss,
            unigram_entropy=comm.bcast_object(self.dataset.unigram_entropy if comm.rank == 0 else None),
            step_s=step_s,
            predicted_step_s=plan.prediction.step_s,
            peak_bytes=peaks,
            predicted_peak_bytes=plan.prediction.peak_bytes,
            bubble=measured.bubble,
            predicted_bubble=plan.prediction.bubble,
            tokens_per_s=self._tokens_per_s(step_s),
            weights_sha256=sha,
            steps=self.done,
            final_loss=last.loss / last.weight,
            plan_hash=plan.hash,
            stopped_by=signals[0] if last.stop else None,
        )
        if comm.rank == 0:
            self._write(report, predicted, measured, text)
        return report

    def _measured(self, trainer: Trainer) -> Timeline:
        """The step whose makespan is the median of those remembered, the first one left out."""
        mine = [t - self.comm.clock_offset_s for t in list(self.times)[1:] or self.times]
        by_rank = self.comm.allgather_object(mine)
        steps = [_timeline(trainer, times) for times in zip(*by_rank, strict=True)]
        return sorted(steps, key=lambda t: t.makespan_s)[len(steps) // 2]

    def _write(self, report: Report, predicted: Timeline, measured: Timeline, text: str | None) -> None:
        write_text(self.run_dir / "summary.json", to_json(report))
        draw_png({"predicted": predicted, "measured": measured}, self.run_dir / "timeline.png")
        if text is not None:
            write_text(self.run_dir / "sample.txt", text)
            self.log.say(f"\nsample:\n{text}\n")
        self.log.say(f"measured step:\n{draw_text(measured)}\n\n{summary(report)}")
        self.log.say(f"checkpoint, summary and timeline: {self.run_dir}")


def _timeline(trainer: Trainer, times: Sequence[np.ndarray[Any, Any]]) -> Timeline:
    start = min(float(t.min()) for t in times)
    return Timeline(trainer.program, tuple(t - start for t in times), ())


@contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """SIGTERM, SIGUSR1 and Ctrl-C ask for a stop after the current step; the list then holds the name.

    SIGUSR1 because it is what mpirun hands on without killing its ranks a second later.

    A second Ctrl-C interrupts at once.
    """
    asked: list[str] = []

    def ask(number: int, _: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
