"""The steps of one run on one rank, with its evaluations and checkpoints, and what it leaves at the end."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.ending import TIMES, TO_GO_ON, TimeLimit
from mpipipe.cluster.launch import say_past_launcher, threads_advice
from mpipipe.cluster.routes import PRODUCTS
from mpipipe.cluster.spares import listed
from mpipipe.cluster.started import started
from mpipipe.cluster.watchdog import Outside, Watchdog
from mpipipe.config import Config
from mpipipe.errors import EndOfData, MpipipeError
from mpipipe.models import Built
from mpipipe.ops import device
from mpipipe.pipeline import Pipeline, Step
from mpipipe.planner.crowded import is_crowded
from mpipipe.planner.mirrors import mirror_s
from mpipipe.planner.prediction import sizes_of_messages, too_full
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.sizes import counted, size_text
from mpipipe.planner.stages import bounds
from mpipipe.report.account import rank_reports
from mpipipe.report.draw import draw_png, draw_texts
from mpipipe.report.metrics import Metrics, cut_metrics, last_step, read_metrics
from mpipipe.report.perfetto import PERFETTO, write_perfetto
from mpipipe.report.plan import blocks_text, describe
from mpipipe.report.plan_file import plan_text
from mpipipe.report.progress import Progress, Silent
from mpipipe.report.scalars import FOLDER, Scalars
from mpipipe.report.summary import summary
from mpipipe.report.trace import TRACE, Trace, thin, write_trace
from mpipipe.report.truth import largest_miss, truths
from mpipipe.runtime.flight import InterpreterView
from mpipipe.runtime.recorder import KEPT_STEPS
from mpipipe.runtime.sample import generate
from mpipipe.runtime.slowness import WINDOW, WINDOWS, Slow, Slowness
from mpipipe.state.files import write_text, write_whole
from mpipipe.state.gather import together
from mpipipe.state.owner import Owner, check_owner, own
from mpipipe.state.resume import newest, prune, read_state, set_aside, step_folder
from mpipipe.state.rundir import CONFIG, METRICS, SUMMARY, keep_save_s, known_save_s
from mpipipe.state.verify import newest_sound
from mpipipe.survival import Recovery
from mpipipe.values import Int64, Report, Timeline, to_json

END_OF_DATA = "the end of the data"  # as a reason to stop
SAVE_BYTES_PER_S = 100e6  # of each node, to a slow file system: a guess, until a save has been measured
GUESS_SHARE = 0.1  # of the time that is left at the first step: the most that is kept free by that guess


class Run:
    """The steps of one run on one rank, and its end."""

    def __init__(
        self, config: Config, pipe: Pipeline, built: Built, run_dir: Path, log: Progress | Silent,
        watchdog: Watchdog, owner: Owner | None, limit: TimeLimit,
    ) -> None:  # fmt: skip
        """owner: of the run folder, on rank 0."""
        self.config, self.pipe, self.built, self.run_dir, self.log = config, pipe, built, run_dir, log
        self.data, self.watchdog, self.owner, self.limit = pipe.data, watchdog, owner, limit
        self._opened = ExitStack()  # what a recovery opens
        self.replayed = 0  # steps done again
        self.step_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self.first_step, self.all_steps_s = pipe.steps_done, 0.0
        self.saved = pipe.steps_done  # what it goes on from
        self.last: Step | None = None
        self.turn_s = self.save_s = 0.0  # the longest so far, also over recoveries
        self.guess_s = 0.0  # of a save, until one is measured
        self.most_guess_s = GUESS_SHARE * max(limit.left_s(), 0.0) / TIMES
        self.planned_bytes = 0  # of this rank, the most of all plans: so is what is measured
        if pipe.spares:  # ranks have other numbers from here on, and spares rest
            pipe.world.barrier()
            self._watch_anew()
        if not pipe.waits:
            self._begin()
        self.values: dict[str, float] = {}  # of the last evaluation
        self.unit = "tokens" if self.data.tokens_per_sample > 1 else "samples"

    def all(self, asked: list[str]) -> Report:
        """asked: reasons to stop, which signals add to. The same on every rank, also on spares."""
        pipe = self.pipe
        if not pipe.waits:
            self._introduce()
        try:
            return pipe.surviving(lambda: self._train(asked), lambda: self.recover(asked))
        except Exception as error:
            pipe.saver.settle()
            self._note_way_on(error)
            raise

    def _note_way_on(self, error: Exception) -> None:
        """How to go on after an error, where there is a checkpoint."""
        with suppress(OSError, MpipipeError):
            if folder := newest(self.run_dir):
                error.add_note(f"{TO_GO_ON}{read_state(folder).step}: {self._resume()}")

    def _introduce(self) -> None:
        """What is said before the first step."""
        pipe = self.pipe
        threads = threads_advice(self.comm, pipe.numerics.threads, pipe.bound.left)
        for note in (threads, device.idle() if pipe.rank == 0 else None, self._missing(), self.in_the_way):
            if note:
                self.log.say(f"note: {note}")
        took = f", measured in {pipe.gemm_s:.1f} s" if pipe.gemm_s else ""
        blocks = blocks_text(pipe.blocks_why, pipe.plan, pipe.costs)
        self.log.say(f"{PRODUCTS}{pipe.gemm_why}{took}")
        for said in filter(None, (str(pipe.bound), pipe.ops_why, pipe.messages_why, pipe.search_why, blocks)):
            self.log.say(said)
        if self.config.run.slow_rank == "replan" and pipe.size > 1:
            told = f"a rank that is slow for {WINDOW * WINDOWS} steps is planned around"
            if is_crowded(pipe.costs.cluster):
                told = "ranks share cores, so nothing can be told of a slow one"
            self.log.say(f"{told}: run.slow_rank")
        self.log.say(describe(pipe.plan, pipe.costs, pipe.planning_s, timed=pipe.timed))
        self._keep_plan()

    def _train(self, asked: list[str]) -> Report:
        self.pipe.variants.during = self.watchdog.during  # of evaluation, and of data of other shapes
        training = self.watchdog.during("the training loop", counts=True)
        with training, self._metrics() if self.pipe.rank == 0 else nullcontext() as metrics:
            last = self.loop(metrics, asked)
        with self.watchdog.during("the end of the run"):
            return self.end(last, asked)

    @property
    def comm(self) -> Communicator:
        return self.pipe.comm

    def _keep_plan(self) -> None:
        if self.pipe.mirrors_why:
            self.log.say(self.pipe.mirrors_why)
        if self.pipe.rank == 0:
            write_text(self.run_dir / "plan.json", plan_text(self.pipe.plan))

    def recover(self, asked: list[str]) -> None:
        """Goes on without the ranks that were lost, or with spares in their place; what rank 0 does falls to
        the one that has its place then."""
        pipe, notes = self.pipe, list[str]()

        def newest_whole(comm: Communicator, above: int) -> Path | None:
            folder, passed_over = newest_sound(comm, self.run_dir, above)
            together(comm, str(self.run_dir), lambda: set_aside(passed_over) if comm.rank == 0 else [])
            notes.extend(f"note: passed over {path}: {wrong}" for path, wrong in passed_over)
            return folder

        before = pipe.working
        self.watchdog.alone()
        with self.watchdog.during("a recovery"):
            found = pipe.recover(newest_whole)
        self._watch_anew()
        if pipe.waits:
            return
        if not self.all_steps_s:
            self.first_step = found.step
        before_it = max(self.comm.allgather_object(self.replayed))  # a spare knows of none
        self.replayed = before_it + found.replayed
        while END_OF_DATA in asked:  # which is met again
            asked.remove(END_OF_DATA)
        self.saved = -1
        self.step_s.clear()
        self._begin()
        if pipe.rank == 0:
            self._say_recovered(found, [rank for rank in pipe.working if rank not in before], notes)

    def _say_recovered(self, found: Recovery, new: Sequence[int], notes: Sequence[str]) -> None:
        """new: spares that took over. On rank 0, which may not have been it before."""
        pipe = self.pipe
        done = last_step(self.run_dir / METRICS)  # where all are lost, spares do not know how far they came
        self.replayed += max(0, done - found.step - found.replayed)
        again = max(found.replayed, done - found.step)
        self.owner = own(self.run_dir)
        if isinstance(self.log, Silent):
            log = Progress(
                self.config.train.steps, self.config.run.log_every, self.run_dir / "train.log", bar=False
            )
            self.log = self._opened.enter_context(log)
            pipe.say_by(self.log.say)
        cut_metrics(self.run_dir / METRICS, found.step)
        with self._metrics() as metrics:
            metrics.write(
                step=found.step,
                lost_ranks=list(found.lost),
                replayed=again,
                recovery_s=found.seconds,
            )
        ranks = ", ".join(map(str, found.lost))
        for note in notes:
            self.log.say(note)
        self.log.say(
            f"mpipipe: lost rank {ranks}; {self._left(new)}, on from step {found.step}, "
            f"{counted(again, 'step')} again, from {found.source}, after {found.seconds:.2f} s"
        )
        self._keep_plan()

    def _left(self, new: Sequence[int]) -> str:
        pipe = self.pipe
        if not (new or pipe.spares):
            return f"{counted(pipe.size, 'rank')} left"
        taken = f"rank {', '.join(map(str, new))} in its place; " if new else ""
        return f"{taken}{counted(pipe.size, 'rank')} and {listed(pipe.spares)} left"

    def _watch_anew(self) -> None:
        """Under the numbers that the ranks have now, the spares behind the others."""
        pipe = self.pipe
        self.watchdog.close(pipe.size + len(pipe.spares))
        self.watchdog = Watchdog(pipe.rank, pipe.size, self.run_dir, self.config.run.watchdog)
        self.watchdog.start()

    def _begin(self) -> None:
        """With the ranks that there are now. Collective."""
        self.slowness = self._slowness()
        self._watch()
        self._make_room()

    def _slowness(self) -> Slowness:
        return Slowness(self.pipe.comm, self.pipe.predicted, self.pipe.costs, platform.node())

    def _watch(self) -> None:
        pipe = self.pipe
        layout, longest_s = pipe.plan.layout, pipe.plan.prediction.step_s
        if layout.mirror_every:  # between two steps, where no instruction is run
            longest_s += mirror_s(pipe.costs, layout, cut_indices(layout, pipe.variants.graph.groups))
        self.watchdog.watch(InterpreterView(pipe.trainer.interpreter), longest_s)

    def _make_room(self) -> None:
        """For the copies that are written while training goes on. Collective."""
        pipe, trainer = self.pipe, self.pipe.trainer
        copies = pipe.saver.copied_bytes(trainer.state_dict(), trainer.optimizer_state())
        self.guess_s = known_save_s(self.run_dir) or self._guess_s(copies)
        self.copied_bytes, self.in_the_way = self._copies(copies)
        planned = _added(pipe.plan.prediction.peak_bytes, self.copied_bytes)
        self.planned_bytes = max(self.planned_bytes, planned[pipe.rank])
        if self.copied_bytes:
            pipe.saver.reserve(self.copied_bytes[pipe.rank])

    def _guess_s(self, copies: tuple[int, ...]) -> float:
        """Of a save of which nothing is known but what each rank writes; the nodes write at once. One that is
        too short costs a checkpoint, and the one before is there; one that is too long costs the steps."""
        of_node = Counter[int]()
        for node, nbytes in zip(self.comm.node_of_rank, copies, strict=True):
            of_node[node] += nbytes
        return min(max(of_node.values()) / SAVE_BYTES_PER_S, self.most_guess_s)

    def close(self) -> None:
        self.watchdog.close()
        self._opened.close()

    def _missing(self) -> str | None:
        """What was asked for and cannot be computed."""
        asked = self.built.metrics or "every" in self.config.eval.model_fields_set
        if self.data.val_samples != 0 or not asked:
            return None
        missing = " and no ".join(["validation loss", *self.built.metrics])
        return f"the data set has no validation part, so there is no {missing}"

    def _metrics(self) -> Metrics:
        on = self.config.run.tensorboard
        scalars = Scalars(self.run_dir / FOLDER, self.pipe.steps_done + 1) if on else None
        return Metrics(self.run_dir / METRICS, scalars)

    def loop(self, metrics: Metrics | None, asked: list[str]) -> Step:
        """Steps, evaluations and checkpoints; ends early, on every rank at the same step, when one was
        asked to, or when the time or the data has ended."""
        t, limit = self.config.train, self.limit
        if self.pipe.steps_done >= t.steps:
            return self._done_before(metrics, asked)
        while True:
            start = time.perf_counter()
            if self.pipe.rank == 0 and (end := limit.reached(self.turn_s, self._longest_save_s())):
                asked.append(end)
            try:
                step, outcome = self.pipe.timed_step(bool(asked))
            except EndOfData:
                if self.last is None:
                    raise
                asked.append(END_OF_DATA)
                return self._stop_after(self.last, metrics)
            self.last = step
            slow = self.slowness.add(outcome)
            self.step_s.append(step.seconds)
            self.all_steps_s += step.seconds
            values, done = self._values(step), step.step >= t.steps
            if self._due(self.config.eval.every, step.step) and not step.stop:  # who asked may not wait: save
                self.values = self._evaluate()
                values |= self.values
            if metrics is not None:
                metrics.write(step=step.step, **values)
            self.log.step(step.step, values)
            self.turn_s = max(self.turn_s, time.perf_counter() - start)
            if done or step.stop or self._due(t.save_every, step.step):
                self.save(background=not (done or step.stop))
            if done or step.stop:
                return step
            del outcome  # with what it refers to
            left = self._steps_left(step)
            if slow is not None:
                self._meet(slow)
            elif typical := self.pipe.shown(left):
                self._refine(typical, left)

    def _steps_left(self, step: Step) -> int:
        """Of this start: until the steps are done or the time is over. What rank 0 says counts."""
        in_time = self.limit.left_s() / max(float(np.median(self.step_s)), 1e-9)
        return int(min(self.config.train.steps - step.step, in_time))

    def _stop_after(self, last: Step, metrics: Metrics | None) -> Step:
        """What a last step has, made up for one that was not known to be the last."""
        if not self._due(self.config.eval.every, last.step):
            self._evaluate_last(last.step, metrics)
        self.save(background=False)
        return replace(last, stop=True)

    def _evaluate_last(self, step: int, metrics: Metrics | None) -> None:
        """Of a last step that has been told of without it."""
        self.values = self._evaluate()
        if self.values:
            if metrics is not None:
                metrics.write(step=step, **self.values)
            self.log.step(step, self.values)

    def _done_before(self, metrics: Metrics | None, asked: list[str]) -> Step:
        """The last step, where a start finds it done, as one that died before its summary has told of it; it
        is evaluated if it was not, and nobody waits. Collective."""
        steps, told = self.pipe.steps_done, dict[str, float]()
        if metrics is not None:
            lines = read_metrics(self.run_dir / METRICS)
            told = {k: v for line in lines if line.get("step") == steps for k, v in line.items()}
        told = self.comm.bcast_object(told)
        self.values = {name: float(value) for name, value in told.items() if name.startswith("val_")}
        if not self.values and not self._is_to_stop(asked):
            self._evaluate_last(steps, metrics)
        self.save(background=False)
        stop = self._is_to_stop(asked)
        return Step(steps, float(told.get("loss", math.nan)), None, None, math.nan, stop)

    def _is_to_stop(self, asked: list[str]) -> bool:
        """Whether some rank was asked to, or the time is over; a step tells it by itself. Collective."""
        if self.pipe.rank == 0 and not asked and (end := self.limit.reached(0.0, self._longest_save_s())):
            asked.append(end)
        return any(self.comm.allgather_object(bool(asked)))

    def _meet(self, slow: Slow) -> None:
        """Says it, and plans anew where that was asked for. Collective."""
        if self.config.run.slow_rank == "report":
            self.log.say(
                f"note: {slow}; look at its node, or plan anew: plan --refine, or run.slow_rank=replan"
            )
            return
        self.log.say(f"note: {slow}")
        said = self._change(
            "a plan around a slow rank", lambda: self.pipe.plan_around({slow.rank: slow.factor})
        )[1]
        self.log.say(f"mpipipe: {said}")

    def _refine(self, typical: Sequence[Timeline], steps_left: int) -> None:
        """Says it where another plan is taken. Collective."""
        pipe = self.pipe
        taken, said = self._change("a plan by what the steps took", lambda: pipe.refine(typical, steps_left))
        if taken:
            self.log.say(f"mpipipe: {said}\n{describe(pipe.plan, pipe.costs)}")

    def _change(self, doing: str, plan: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
        """Between two steps another layout, if `plan` takes one, and what it says. Collective."""
        pipe, predicted = self.pipe, self.pipe.predicted
        outside = Outside(pipe.rank, pipe.size)  # the other view would hold weights that are to go
        self.watchdog.watch(outside, pipe.plan.prediction.step_s)
        with self.watchdog.during(doing):
            taken, said = plan()
            if taken:
                self.step_s.clear()
                self._begin()
        if taken:
            self._keep_plan()
        else:
            if pipe.predicted is not predicted:  # by other speeds
                self.slowness = self._slowness()
            self._watch()
        return taken, said

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

    def _copies(self, copies: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        """What each rank needs to go on while a checkpoint is written, and a note where that is too much."""
        if not self.config.train.save_every:
            return (), None
        pipe = self.pipe
        short = too_full(_added(pipe.plan.prediction.peak_bytes, copies), pipe.costs.cluster)
        if short is None:
            return copies, None
        rank, nbytes = short
        return (), (
            f"training waits while a checkpoint is written: rank {rank} has no room for a copy of its state, "
            f"{size_text(copies[rank])}; {size_text(nbytes)} are missing"
        )

    def save(self, background: bool) -> None:
        """A checkpoint, unless this step has one, then fewer of the old ones. background: it may become whole
        during the next steps, where there is memory for that."""
        pipe, t = self.pipe, self.config.train
        folder = step_folder(self.run_dir, pipe.steps_done)
        with self.watchdog.during("a checkpoint"):
            if self.saved != pipe.steps_done:
                together(self.comm, str(folder), self._check_owner)  # or the save would change its files
                pipe.begin_save(
                    folder, self._export,
                    lambda: prune(self.run_dir, t.keep, t.keep_every), background and bool(self.copied_bytes),
                    config=self.config.model_dump(mode="json"),
                )  # fmt: skip
                self.saved = pipe.steps_done
            if not background:
                pipe.saver.finish()
        self._longest_save_s()

    def _longest_save_s(self) -> float:
        """In this start, for the next one too; or, while there was none, of an earlier start, or a guess."""
        if (took_s := self.pipe.saver.took_s) > self.save_s:  # less: a recovery makes another saver
            self.save_s = took_s
            if self.pipe.rank == 0:
                keep_save_s(self.run_dir, took_s)
        return self.save_s or self.guess_s

    def _export(self, folder: Path) -> Sequence[str]:
        """On rank 0, when all shards are there and the manifest is not."""
        self._check_owner()
        return self.built.export(folder)

    def _check_owner(self) -> None:
        if self.owner is not None:
            check_owner(self.run_dir, self.owner)

    def end(self, last: Step, asked: list[str]) -> Report:
        """Sample, summary and drawings."""
        comm, pipe, recorder = self.comm, self.pipe, self.pipe.recorder
        measured = recorder.median() if self.step_s else pipe.predicted
        peaks, planned = zip(*comm.allgather_object((pipe.memory.nbytes, self.planned_bytes)), strict=True)
        first = pipe.steps_done - len(recorder.highest_bytes) + 1
        highest, steps = thin(recorder.highest_bytes, range(first, pipe.steps_done + 1))
        by_rank = tuple(comm.allgather_object(highest))
        text = None
        if not last.stop:
            text = generate(pipe.trainer, self.data, self.config.sample, pipe.numerics.seed, self.log.say)
            no_tokenizer = getattr(self.config.data, "tokenizer", "") is None
            if text is None and self.config.sample.length and no_tokenizer:
                self.log.say("note: no sample of text, as data.tokenizer is null; set it, or sample.length=0")
        signals = [name for names in comm.allgather_object(asked) for name in names[:1]]
        stopped_by = signals[0] if last.stop else None
        report = comm.bcast_object(
            self._report(last, measured, peaks, planned, stopped_by) if comm.rank == 0 else None
        )
        assert report is not None
        if comm.rank == 0:
            timelines = {"predicted": pipe.predicted} | ({"measured": measured} if self.step_s else {})
            self._write(report, Trace(timelines, by_rank, steps), text)
        return report

    def _report(
        self, last: Step, measured: Timeline, peaks: tuple[int, ...], planned: tuple[int, ...],
        stopped_by: str | None,
    ) -> Report:  # fmt: skip
        pipe, (step_s, mean_s) = self.pipe, self._took_s()
        prediction = pipe.plan.prediction
        saved = pipe.saver.saved or read_state(step_folder(self.run_dir, pipe.steps_done))
        return Report(
            val_loss=self.values.get("val_loss"),
            unigram_entropy=None if _cut_short(stopped_by) else self.data.unigram_entropy,
            metrics={k.removeprefix("val_"): v for k, v in self.values.items() if k != "val_loss"},
            step_s=step_s,
            predicted_step_s=prediction.step_s,
            peak_bytes=peaks,
            predicted_peak_bytes=planned,
            bubble=measured.bubble,
            predicted_bubble=prediction.bubble,
            ranks=rank_reports(pipe.predicted, measured, *self._stages(), self._sizes()),
            per_s=self._per_second(mean_s),
            unit=self.unit,
            weights_sha256=saved.weights_sha256,
            steps=pipe.steps_done,
            final_loss=last.loss,
            plan_hash=pipe.plan.hash,
            stopped_by=stopped_by,
            exact_resume=self.data.exact,
            products=f"{PRODUCTS}{pipe.gemm_why}",
            blocks=blocks_text(pipe.blocks_why, pipe.plan, pipe.costs),
            messages=pipe.messages_why,
            kernels=pipe.ops_why,
            lost_ranks=(*pipe.world.lost, *pipe.lost_spares()),
            replayed_steps=self.replayed,
            spares=tuple(rank for rank in pipe.spares if rank not in pipe.lost_spares()),
            untimed=not self.step_s,
        )

    def _took_s(self) -> tuple[float, float]:
        """Of a step: the median, and the mean over all of this start; where it found all done, of those that
        are told of. On rank 0."""
        if self.step_s:
            mean_s = self.all_steps_s / (self.pipe.steps_done - self.first_step)
            return float(np.median(list(self.step_s)[1:] or self.step_s)), mean_s
        told = [float(line["step_s"]) for line in read_metrics(self.run_dir / METRICS) if "step_s" in line]
        return float(np.median(told[-KEPT_STEPS:] or math.nan)), float(np.mean(told or math.nan))

    def _stages(self) -> tuple[list[int], list[int]]:
        """Groups and parameters of each stage."""
        layout, variants = self.pipe.plan.layout, self.pipe.variants
        names = variants.graph.groups
        groups = [end - first for first, end in bounds(len(names), cut_indices(layout, names))]
        return groups, variants.parameters_by_stage(layout.cuts)

    def _sizes(self) -> tuple[Int64, ...]:
        pipe = self.pipe
        return sizes_of_messages(pipe.costs, pipe.plan.layout, pipe.program)

    def _write(self, report: Report, trace: Trace, text: str | None) -> None:
        timelines, sizes = trace.timelines, self._sizes()
        write_whole(self.run_dir / TRACE, lambda path: write_trace(path, trace))
        hurried = report.stopped_by == "SIGTERM"  # a launcher may kill a second later
        if not hurried:
            write_whole(self.run_dir / "timeline.png", lambda path: draw_png(timelines, path))
        write_whole(self.run_dir / PERFETTO, lambda path: write_perfetto(path, timelines, sizes))
        if text is not None:
            write_text(self.run_dir / "sample.txt", text)
        write_text(self.run_dir / SUMMARY, to_json(report))  # last
        if text is not None:
            self.log.say(f"\nsample:\n{text}\n")
        found = truths(timelines)
        missed = f"\n{largest_miss(found)}" if found else ""
        self.log.say(f"{draw_texts(timelines, width=110)}{missed}\n\n{summary(report)}")
        self.log.say(f"checkpoint, summary and timeline: {self.run_dir}")
        if _cut_short(report.stopped_by):
            way = f"to go on: {self._resume()}"
            self.log.say(way)
            if hurried:
                say_past_launcher(f"mpipipe: {counted(report.steps, 'step')}, saved; {way}")

    def _resume(self) -> str:
        """The command line that goes on from here, by the launcher of this start and on as many ranks."""
        launcher = started(self.pipe.size + self.config.run.spares, os.environ)
        place = [str(self.run_dir / CONFIG), f"run.dir={self.run_dir}"]
        return shlex.join([*launcher, sys.orig_argv[0], "-m", "mpipipe.train", *place, "--resume"])


def _cut_short(stopped_by: str | None) -> bool:
    """The time was over, or somebody waits: no more is read, and another start goes on."""
    return stopped_by not in (None, END_OF_DATA)


def _added(peaks: tuple[int, ...], copies: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(peaks, copies, fillvalue=0)))
