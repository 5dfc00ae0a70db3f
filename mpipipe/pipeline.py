"""The Python interface: any module, any data, on as many ranks as the script was started with.

    pipe = Pipeline(Net, loss, data, batch=64)     model -> graph -> costs -> plan -> program
    pipe.step(), pipe.evaluate(), pipe.predict(batch), pipe.state_dict(), pipe.save(folder)

Every rank runs the same script with the same arguments; each call is made by all of them. In a
notebook, or started without mpirun, there is one rank. `mpipipe.train` is a user of this module.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpipipe import __version__, ops
from mpipipe.checks import check_choices, check_counts, check_given, check_metrics, check_trained
from mpipipe.cluster.agree import agree, surroundings
from mpipipe.cluster.comm import Communicator, RankLost
from mpipipe.cluster.memory import give_back_freed_memory
from mpipipe.cluster.node import cache_folder
from mpipipe.cluster.spares import check_spares, first_working, listed, next_working
from mpipipe.cluster.survivors import check_tolerant
from mpipipe.config.whole import ENDLESS_BATCHES
from mpipipe.data.base import SAME_DATA, Dataset, fingerprint
from mpipipe.data.user import as_batch, from_user
from mpipipe.decided import blocks_of, gemm_of, micro_batches_of, op_table_of, threads_of
from mpipipe.errors import EndOfData, MpipipeError
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.program import Batch, Loss, Metric, batch_names, spec
from mpipipe.graph.source import Initial, Model, ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.measuring import Measuring
from mpipipe.models.losses import from_mean
from mpipipe.planner.copies import Copies, ranks_in_each, shape_of
from mpipipe.planner.given import check_given as check_given_plan
from mpipipe.planner.given import check_ranks
from mpipipe.planner.joint import Asked, Replicas, copies_of, counts_of, schedules_of, search
from mpipipe.planner.mirrors import with_mirrors
from mpipipe.planner.partition import Wish, check_stages
from mpipipe.planner.schedules import PLAIN
from mpipipe.planner.search import cut_indices, plan_of, predict, program_for
from mpipipe.planner.sizing import usual_size
from mpipipe.report.plan import chosen
from mpipipe.report.plan_file import read_plan
from mpipipe.runtime.costing import Measured, device_kind
from mpipipe.runtime.foreign import Factory, UserOptimizer
from mpipipe.runtime.interpreter import Outcome
from mpipipe.runtime.optimizer import Optimizer, OptimizerSettings, described
from mpipipe.runtime.optimizer import check_trained as check_kept
from mpipipe.runtime.process import resident_memory, world
from mpipipe.runtime.rehearsal import rehearse
from mpipipe.runtime.setting import numerics_of, set_gemm_route, set_threads
from mpipipe.runtime.settling import Settled, settle_micro_batches
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.checkpoint import Reader
from mpipipe.state.costs import CostCache
from mpipipe.state.gather import collect, together
from mpipipe.state.mirrors import Found
from mpipipe.state.parts import Beside
from mpipipe.state.resume import RunState, check_graph, check_numerics, read_state
from mpipipe.state.saving import Saver
from mpipipe.state.verify import check_read
from mpipipe.survival import Recovery, Survival, fits_still, stays_as_it_is
from mpipipe.values import RECOMPUTE, Plan, Program, from_json, to_json

Callback = Callable[["Pipeline", int, dict[str, float]], object]
Newest = Callable[[Communicator, int], Path | None]  # a checkpoint of more steps than that
T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """What one optimizer step came to; the same on every rank but for its seconds."""

    step: int  # steps done, this one included
    loss: float  # mean over the batch, by the weights of the loss
    grad_norm: float | None  # before clipping; None where nothing clips
    lr: float | None  # None where only the optimizer itself knows
    seconds: float
    stop: bool  # a rank was asked to stop


class Pipeline:
    """A model in training, cut over the ranks. Collective, as all its methods are.

    model      a module, a function that makes one (each rank then builds its own part only), or a list
               of layers
    loss       loss(outputs, batch) -> (sum, weight), both scalars; or the mean, with `weight_of`
    data       map-style (len, getitem), or with batch(step, micro), or any iterable of batches; elements
               of a tuple are named after the parameters of forward, the one left over "labels"
    optimizer  factory(named parameters) -> torch optimizer, or (optimizer, scheduler); or
               OptimizerSettings; None = OptimizerSettings(): AdamW with a constant rate
    batch      samples per step, over all micro-batches
    micro_batches  parts of a batch, or "auto": searched at the first start, and then kept by checkpoints
    bits       "torch": those of a plain torch loop; "fast": of kernels of our own, where they are faster
    gemm       library of fp32 matrix products; "auto": measured at the first start, and then kept by
               checkpoints
    blocks     equal blocks in which gradients of micro-batches are added up, or "auto": as many as ranks may
               share, decided at the first start, and then kept by checkpoints
    replicas   copies of the pipeline, or (2, 1) of each stage, which share the micro-batches and the
               optimizer's state; as the blocks allow. "auto": those whose simulated step is the shortest
    reduce     sums of replicas: "exact", with the bits of one; "fast", of any number of replicas
    schedule   "auto": the one whose simulated step is the shortest; or 1f1b, gpipe, ..., or one of your own
    recompute  what backward makes again of the forward, to keep less: "none", "selective" (what is cheap:
               norms, activations), "full" (all), or "auto": on each rank what costs least of those that fit
    val        as data, for `evaluate`, in batches of `val_batch` samples (None = batch)
    weight_of  weight_of(batch) -> number of labels, say, that a mean loss was divided by
    metrics    name -> function like the loss, for `evaluate`
    clip       largest norm of the gradient; None = that of OptimizerSettings, or no limit beside a factory
    initial    first values of the weights, such as `mpipipe.hf_model(folder).initial`
    cost_cache  keep what groups cost, in ~/.cache/mpipipe, and time them anew only where it has changed
    resume     folder of a checkpoint that `save` has written, on any number of ranks
    plan       a plan or its file, perhaps edited: its cuts, schedule and receive window are used; what
               decides the bits must be as in these arguments
    recover    "mpi": when a rank is lost, `fit` goes on without it, on an MPI started with ULFM; "restart":
               that is an error
    mirror_every  steps between two copies, on another rank, of what a rank holds, for "mpi"; "auto": as often
               as loses the least time; 0 = none, then a recovery begins at the start
    spares     so many ranks hold no stage, wait, and replace those that are lost, for "mpi"; with the others
               they make each call, and get what it comes to
    say        takes the lines that are meant for people, on rank 0

    Raises CaptureError, DataError, PlanError, CheckpointError, LaunchError.
    """

    def __init__(
        self,
        model: Model,
        loss: Callable[[Any, Batch], Any],
        data: Any,
        optimizer: Factory | OptimizerSettings | None = None,
        *,
        batch: int,
        micro_batches: int | Literal["auto"] = 8,
        val: Any = None,
        val_batch: int | None = None,
        weight_of: Callable[[Any], Tensor | float] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        varying: bool | None = None,
        schedule: str = "auto",
        precision: Literal["fp32", "bf16"] = "fp32",
        clip: float | None = None,
        threads: int | Literal["auto"] = 1,
        blocks: int | Literal["auto"] = 1,
        replicas: Replicas = "auto",
        reduce: Literal["exact", "fast"] = "exact",
        tied: Literal["per_use", "eager"] = "per_use",
        bits: Literal["torch", "fast"] = "torch",
        gemm: Literal["auto", "mkl", "onednn"] = "auto",
        seed: int = 0,
        unused: Literal["error", "keep"] = "error",
        max_shapes: int = 8,
        receive_window: int = 4,
        recompute: Wish = "auto",
        memory_bytes: int | None = None,
        cost_cache: bool = True,
        initial: Initial | None = None,
        resume: str | Path | None = None,
        new_numerics: bool = False,
        plan: str | Path | Plan | None = None,
        recover: Literal["restart", "mpi"] = "restart",
        mirror_every: int | Literal["auto"] = "auto",
        spares: int = 0,
        comm: Communicator | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.world = self.comm = comm = world() if comm is None else comm
        check_metrics(list(metrics or ()))
        check_choices(
            {
                "precision": (precision, ("fp32", "bf16")), "tied": (tied, ("per_use", "eager")),
                "gemm": (gemm, ("auto", "mkl", "onednn")), "unused": (unused, ("error", "keep")),
                "bits": (bits, ("torch", "fast")), "recover": (recover, ("restart", "mpi")),
                "recompute": (recompute, ("auto", *RECOMPUTE)), "reduce": (reduce, ("exact", "fast")),
            }
        )  # fmt: skip
        self.val_batch = val_batch or batch
        check_spares(spares, comm.size, recover)
        working, self._nodes = first_working(comm.node_of_rank, spares), comm.node_of_rank
        self.rank, self.size, self.spares = comm.rank, len(working), tuple[int, ...]()
        self.recovers, self.mirror_every = recover == "mpi", mirror_every
        if self.recovers:
            check_tolerant(comm)
        self._say = say if say is not None else print
        self.memory = resident_memory()
        folder = _one_folder(comm, resume)
        saved = None if folder is None else read_state(folder)
        given_plan = plan if isinstance(plan, Plan | None) else read_plan(plan)
        before = given_plan if saved is None else saved
        decided = None if before is None else before.numerics
        blocks = blocks_of(blocks, micro_batches, batch, self.size, decided, reduce)
        replicas = tuple(replicas) if isinstance(replicas, list) else replicas  # as YAML has it
        check_counts(batch, micro_batches, blocks, receive_window, replicas, reduce)
        count = micro_batches_of(micro_batches, batch, blocks, decided, new_numerics)
        table = op_table_of(bits, decided, new_numerics)
        self.numerics = numerics_of(
            bits=bits, op_table=table, batch=batch, micro_batches=count or blocks, blocks=blocks,
            threads=threads_of(comm, threads, saved, spares), gemm=gemm_of(gemm, decided) or "mkl",
            precision=precision, tied=tied, seed=seed, reduce=reduce,
        )  # fmt: skip
        if saved is not None and not new_numerics:
            check_numerics(saved.numerics, self.numerics)
        set_threads(self.numerics.threads)
        set_gemm_route(self.numerics.gemm)
        self.optimizer = _optimizer(optimizer, clip, bits)
        self._agree(
            schedule=schedule, replicas=replicas, receive_window=receive_window, max_shapes=max_shapes,
            val_batch=self.val_batch, shuffle=shuffle, unused=unused,
            samples=len(data) if hasattr(data, "__len__") else None, searched=count is None, gemm=gemm,
            recompute=recompute, recover=recover, mirror_every=mirror_every, spares=spares,
            checkpoint=saved and (saved.step, saved.weights_sha256), plan=given_plan and given_plan.hash,
        )  # fmt: skip
        called = str(plan) if isinstance(plan, str | Path) else "the plan"
        if given_plan is not None:
            check_ranks(given_plan.layout, self.size, called)

        weights = None if folder is None else Reader(folder, "model")
        source = self._source(model, initial, weights)
        self._names = batch_names(source.module)
        self.data: Dataset = from_user(
            data, val, batch=batch, micro_batches=count, names=self._names, collate=collate,
            shuffle=shuffle, seed=seed, varying=varying, val_batch=val_batch, comm=comm,
        )  # fmt: skip
        if self.data.exact:
            agree(comm, {"the first samples": fingerprint(self.data, self.numerics.micro_batch)}, SAME_DATA)
        full_loss: Loss = loss if weight_of is None else from_mean(loss, weight_of)

        @cache
        def variants_of(rows: int) -> Variants:
            return Variants(source, full_loss, self.data.specs, rows, precision, metrics, max_shapes)

        def lowered(rows: int) -> Variants:
            return variants_of(rows).lowered(Lowering(bits, self.numerics.op_table))

        counts = (count,) if count is not None else counts_of(batch, blocks)
        most = replace(self.numerics, micro_batches=counts[0])
        copies = (1,) if given_plan else copies_of(replicas, most, self.size)
        asked = Asked(
            self.numerics, counts, schedules_of(schedule), receive_window, self.size, copies, recompute,
            uneven=replicas == "auto",
        )  # fmt: skip
        usual = variants_of(usual_size(asked, asked.sizes[1:] or asked.sizes))
        kind = device_kind(self.numerics.instruction_set)
        here = Measuring(comm, CostCache(cache_folder() if cost_cache else None, kind, self.say), self.say)
        self.messages_why = here.messages()
        self.numerics, self.gemm_why = here.gemm(gemm_of(gemm, decided), usual, self.numerics)
        self.numerics, self.ops_why = here.ops(table, usual, self.numerics)
        asked = replace(asked, numerics=self.numerics)
        whole = partial(here.costs, self.optimizer, self.memory, memory_bytes, self.data)
        timing = partial(self._of_working, working, whole)
        settled = settle_micro_batches(comm, asked, lowered, timing) if count is None else None
        if settled is not None:
            self.numerics = settled.numerics
        self.variants = settled.variants if settled else lowered(self.numerics.micro_batch)
        check_trained(self.variants, unused)
        if saved is not None and folder is not None and not new_numerics:
            check_graph(folder, saved.graph, self.variants.graph.hash)
        if given_plan is not None:
            self._check_plan(given_plan, called)
        if given_plan is None:
            least = min(ranks_in_each(n, self.size) for n in copies)
            check_stages(least, len(self.variants.graph.groups))
        started = time.perf_counter()
        if settled is None:
            found = timing(self.variants, self.numerics)
            self.costs, self.timed = found.costs, (found.timed, found.of)
        else:
            self.costs, self.timed = settled.costs, settled.timed
        self.memory.restart()  # what the timing took has been given back
        self.plan = self._plan(asked, given_plan, settled)
        self.planning_s = time.perf_counter() - started + (settled.seconds if settled else 0.0)
        self._asked = replace(asked, numerics=self.numerics, counts=(self.numerics.micro_batches,))
        self._initial, self._resumed = source.initial, folder
        self.survival, self.steps_done = Survival(), 0
        self._has_worked = self._within = False
        self._noted: set[int] = set()  # spares that are known to be lost
        self._divide(working)
        self.saver = Saver(self.comm)
        if self.waits:
            return
        self._build()
        self._rehearse()
        if saved is not None and weights is not None:
            self._resume(weights, saved)
        self.survival.begin(self.comm, self.plan.layout.mirror_every)
        self._has_worked = True

    def _of_working(self, working: tuple[int, ...], timing: Callable[..., Measured], *what: Any) -> Measured:
        """What is timed on all ranks, with those alone that a plan is made for."""
        found = timing(*what)
        self._cluster = found.costs.cluster
        return replace(found, costs=replace(found.costs, cluster=self._cluster.in_order(working)))

    def _divide(self, working: tuple[int, ...]) -> None:
        """The ranks, by their first numbers, into those that work and spares. Collective over all."""
        names = self.world.members
        self.working, self.spares = working, tuple(rank for rank in names if rank not in working)
        part = None if working == names else self.world.part([names.index(rank) for rank in working])
        self.comm = part or self.world  # of a spare, which makes no use of it
        self.rank, self.size = (*working, *self.spares).index(names[self.world.rank]), len(working)

    def _build(self) -> None:
        """The trainer of the plan, with the weights that the source has now."""
        self.trainer = Trainer(
            self.comm, self.variants, self.plan, self.optimizer, self.data, self.memory.sample
        )
        give_back_freed_memory()  # of the first weights, which were made one by one

    def _source(self, model: Model, initial: Initial | None, weights: Reader | None) -> ModelSource:
        """The model, with the first values that it was given or those of a checkpoint. Collective."""
        source = ModelSource(model, self.numerics.seed, weights or initial)
        if weights is not None:
            weights.check({name: spec(source.tensor(name)) for name in source.persistent})
        check_given(self.comm, source)
        return source

    def _check_plan(self, given: Plan, where: str) -> None:
        for note in check_given_plan(given, self.numerics, self.size, self.variants.graph.groups, where):
            self.say(f"note: {note}")

    def _agree(self, **settings: Any) -> None:
        """All ranks prove that they were given the same numbers. Collective."""
        built_in = isinstance(self.optimizer, OptimizerSettings)
        settings |= {
            **surroundings(ops.KERNELS_VERSION),
            "threads in use": torch.get_num_threads(),
            "optimizer": self.optimizer if built_in else ("of your own", self.optimizer.clip),
        }
        numerics = {f.name: getattr(self.numerics, f.name) for f in fields(self.numerics)}
        agree(self.comm, {name: repr(value) for name, value in (numerics | settings).items()})

    def _plan(self, asked: Asked, given: Plan | None, settled: Settled | None) -> Plan:
        """Rank 0 plans, or predicts what a given plan will take; all ranks prove that they have the same
        model, plan and program."""
        graph, comm = self.variants.graph, self.comm
        text = self.mirrors_why = self.search_why = ""
        failed = None
        if comm.rank == 0:
            try:
                text = to_json(replace(self._planned(asked, given, settled), costs=None), None)
            except MpipipeError as error:
                failed = error
        text, failed = comm.bcast_object((text, failed))
        if failed is not None:
            raise failed
        plan = replace(from_json(Plan, text), costs=self.costs)  # which are everywhere
        program = program_for(plan.layout, plan.numerics, graph.ties, graph.groups)
        agree(comm, {"graph": graph.hash, "plan": plan.hash, "program": program.hash})
        return plan

    def _planned(self, asked: Asked, given: Plan | None, settled: Settled | None) -> Plan:
        """On rank 0 alone."""
        groups = self.variants.graph.groups
        if given is not None:
            plan = plan_of(self.costs, self.numerics, replace(given.layout, mirror_every=0), groups)
        else:
            joint = (settled and settled.joint) or search(asked, lambda _: self.costs)
            plan = joint.plan
            if settled is not None:
                self.say(chosen(joint, settled.sizes, settled.seconds))
            elif len(joint.tried) > 1:
                self.search_why = chosen(joint)
        if self.recovers:
            every = given.layout.mirror_every if given and given.layout.mirror_every else self.mirror_every
            cuts = cut_indices(plan.layout, groups)
            plan, self.mirrors_why = with_mirrors(plan, self.costs, cuts, every)
        return plan

    def _rehearse(self) -> None:
        """The plan as it is, predicted anew."""
        self.costs, layout, graph = rehearse(self.trainer, self.costs), self.plan.layout, self.variants.graph
        prediction, self.predicted = predict(self.costs, layout, self.program, graph.groups)
        self.plan = replace(self.plan, costs=self.costs, prediction=prediction)

    # -- training ------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The instructions of one training step."""
        return self.trainer.program

    def say(self, text: str) -> None:
        """For people: one rank speaks."""
        if self.rank == 0:
            self._say(text)

    def say_by(self, say: Callable[[str], object]) -> None:
        """What takes the lines from here on."""
        self._say = say

    @property
    def waits(self) -> bool:
        """This rank is a spare; its `rank` is `size` or more."""
        return self.rank >= self.size

    def shared(self, work: Callable[[], T]) -> T:
        """What the working ranks come to, or the error that they raise, on the spares too, which wait for it
        meanwhile: with messages of their own, so that nobody misses one that is lost. Collective over all."""
        if not self.spares or self._within:
            return work()
        if self.waits:
            found, failed, self.steps_done = self.world.recv_object(self._place(self.working[0]))
        else:
            found, failed = self._done_within(work)
            for spare in self.spares if self.rank == 0 else ():
                with suppress(RankLost):
                    self.world.send_object((found, failed, self.steps_done), self._place(spare))
        if failed is not None:
            raise failed
        return found

    def _done_within(self, work: Callable[[], T]) -> tuple[T | None, MpipipeError | None]:
        self._within = True
        try:
            return work(), None
        except MpipipeError as error:
            return None, error
        finally:
            self._within = False

    def _place(self, rank: int) -> int:
        return self.world.members.index(rank)

    def surviving(self, work: Callable[[], T], recover: Callable[[], object]) -> T:
        """As `shared`; when a rank is lost, `recover` and then the work anew, where the ranks outlive it."""
        lost = False
        while True:
            try:
                if lost:
                    recover()
                return self.shared(work)
            except RankLost:
                if not self.recovers:
                    raise
                lost = True  # and here nothing refers to what failed any more

    def lost_spares(self) -> tuple[int, ...]:
        """By their first numbers, those that are known to be lost, and that nobody has missed."""
        return tuple(rank for rank in self.world.gone() if rank in self.spares) if self.spares else ()

    def _note_lost_spares(self) -> None:
        gone = self.lost_spares()
        if new := [rank for rank in gone if rank not in self._noted]:
            self._noted.update(new)
            self.world.end_gone()
            left = listed([rank for rank in self.spares if rank not in gone])
            self.say(f"mpipipe: lost rank {', '.join(map(str, new))}, which was a spare; {left} left")

    def step(self, stop: bool = False) -> Step:
        """One optimizer step on the next batch. `stop`: this rank was asked to stop, say so to all.

        Raises MpipipeError on every rank when the loss or a gradient is not finite, EndOfData where the data
        has ended, and CheckpointError when a save in the background has failed.
        """
        return self.shared(lambda: self.timed_step(stop)[0])

    def timed_step(self, stop: bool = False) -> tuple[Step, Outcome]:
        """As `step`, with the times of this rank's instructions; of the working ranks alone."""
        self._note_lost_spares()
        self.saver.poll()
        start = time.perf_counter()
        outcome = self.trainer.step(self.steps_done, stop=stop)
        if outcome is None:
            raise EndOfData(f"the data ended after {self.steps_done} steps; give more, or fewer steps")
        self.survival.after_step(self.steps_done + 1, self.trainer)
        step = Step(
            step=self.steps_done + 1,
            loss=outcome.loss / outcome.weight,
            grad_norm=None if self.optimizer.clip is None else outcome.norm,
            lr=self.optimizer.lr_at(self.steps_done),
            seconds=time.perf_counter() - start,
            stop=bool(outcome.stop),
        )
        self.steps_done += 1
        return step, outcome

    def fit(self, steps: int, callbacks: Iterable[Callback] = (), eval_every: int = 0) -> None:
        """Trains until `steps` steps are done in all, or the data has ended.

        callbacks: each is called by every rank but spares after each step, with this pipeline, the number
        of steps done and the step's values: loss, grad_norm, lr, seconds, after an evaluation val_*.
        """
        calls = list(callbacks)

        def work() -> None:
            while self.steps_done < steps and not self._fit_step(calls, eval_every):
                pass
            self.saver.finish()

        self.surviving(work, self.recover)

    def _fit_step(self, calls: Iterable[Callback], eval_every: int) -> bool:
        """Whether it was the last one."""
        try:
            done = self.step()
        except EndOfData:
            return True
        values = {k: v for k, v in vars(done).items() if isinstance(v, float)}
        if eval_every and done.step % eval_every == 0:
            values |= {f"val_{k}": v for k, v in self.evaluate().items()}
        for call in calls:
            call(self, done.step, values)
        return done.stop

    def recover(self, checkpoint: Newest = lambda comm, above: None) -> Recovery:
        """After RankLost: this pipeline on the ranks that are left, with the bits that it would have had, and
        with spares where ranks were lost. They all call it, outside of the `except` block, so that the memory
        of what failed is free. checkpoint: the newest one of more steps than the mirrors have (-1: there are
        none); collective over the ranks that work then.

        Raises PlanError where the model does not fit the ranks that are left.
        """
        started, before, lost = time.perf_counter(), self.steps_done, self.world.lost
        abandoned = self.saver.abandon()
        while True:
            try:
                source = self._go_on(checkpoint)
                if not self.waits:
                    self.saver.discard(abandoned)
                    before = max(self.comm.allgather_object(before))  # some may have been a step further
                break
            except RankLost:  # one more
                continue
        gone = tuple(rank for rank in self.world.lost if rank not in lost)
        took_s, replayed = time.perf_counter() - started, before - self.steps_done
        return Recovery(gone, self.steps_done, replayed, source, took_s)

    def _go_on(self, checkpoint: Newest) -> str:
        vars(self).pop("trainer", None)
        gc.collect()
        self.world = self.world.survivors()
        self._divide(next_working(self.working, self.world.members, self._nodes))
        self.saver, comm = Saver(self.comm), self.comm
        if self.waits:
            return ""
        self.plan = self._plan_for_those_left()
        found, model = self.survival.find(comm), self.variants.source
        folder = checkpoint(comm, -1 if found is None else found.key.step)
        if found is not None and folder is None:
            self._take_up(found)
            source = "mirrors"
            if not self.data.exact:
                self.say("note: this recovery is not exact: the data is a plain iterable, and cannot go back")
        else:
            folder = folder or self._resumed
            weights = None if folder is None else Reader(folder, "model")
            model.begin_from(weights or self._initial)
            self._build()
            self.steps_done, source = 0, "the start"
            if folder is not None and weights is not None:
                self._resume(weights, read_state(folder))
                source = str(folder)
        self._begin_anew()
        return source

    def plan_around(self, slower: Mapping[int, float]) -> tuple[bool, str]:
        """Between two steps: another layout, with the same bits, for ranks that compute by these factors
        longer than was predicted, if it is faster. Whether it is taken, and what to say of it. Collective."""
        comm, before, by_first = self.comm, self.plan, self.comm.members
        if not self.data.exact:
            return False, "the plan stays: the data is a plain iterable, and cannot go back"
        self._cluster = self._cluster.slowed({by_first[rank]: by for rank, by in slower.items()})
        try:
            plan = self._plan_anew(self._asked.schedules, (shape_of(before.layout),))
        except MpipipeError as error:
            return False, f"the plan stays: {error}"
        stays, said = stays_as_it_is(self.costs, before, plan, self.program, self.variants.graph.groups)
        if comm.bcast_object(stays):
            return False, said
        self.saver.finish()
        self.saver = Saver(comm)  # without the copy of the state that the old one keeps
        self.survival.keep(comm, self.steps_done, self.trainer)
        found = self.survival.find(comm)
        assert found is not None, "or it has raised"
        self.trainer.close()
        del self.trainer
        gc.collect()
        self.plan = plan
        self._take_up(found)
        self._begin_anew()
        return True, said

    def _plan_for_those_left(self) -> Plan:
        """The plan as it is, where spares can do as it says; else another one. Collective."""
        comm = self.comm
        worked = comm.allgather_object(self._has_worked)
        if len(set(worked)) > 1:  # a spare that takes over knows what was planned at the start
            known = comm.bcast_object((self._cluster, self.costs, self.plan), worked.index(True))
            self._cluster, self.costs, self.plan = known
            self._has_worked = True
        self.costs = replace(self.costs, cluster=self._cluster.in_order(comm.members))
        if fits_still(self.costs, self.plan, self.variants.graph.groups):
            return self._plan(self._asked, self.plan, None)
        schedules = tuple(dict.fromkeys([*self._asked.schedules, PLAIN[0]]))  # some need a number of ranks
        return self._plan_anew(schedules, copies_of("auto", self.numerics, self.size))

    def _plan_anew(self, schedules: tuple[str, ...], copies: tuple[Copies, ...]) -> Plan:
        """For the ranks that there are, as they are. Collective."""
        self.costs = replace(self.costs, cluster=self._cluster.in_order(self.comm.members))
        asked = replace(self._asked, schedules=schedules, n_ranks=self.size, copies=copies, uneven=False)
        return self._plan(asked, None, None)

    def _take_up(self, found: Found) -> None:
        """A version of the mirrors, in the layout of the plan. Collective."""
        received = self.survival.fetch(self.comm, found, self.variants, self.plan.layout)
        self.variants.source.begin_from(received)
        self._build()
        self.trainer.resume(received, described(found.numbers))
        self.trainer.state_dict()  # reads the buffers that nothing has asked for
        self.steps_done = found.key.step

    def _begin_anew(self) -> None:
        self.variants.source.begin_from(self._initial)
        self.predicted = predict(self.costs, self.plan.layout, self.program, self.variants.graph.groups)[1]
        every = self.plan.layout.mirror_every
        self.survival.begin_anew(self.comm, every, self.steps_done, self.trainer)

    def evaluate(self, batches: int | None = None) -> dict[str, float]:
        """Mean loss and metrics over the validation data, by name; the same on every rank.

        batches: how many; None = all of them, 8 where the data has no end by itself. Dropout is off,
        BatchNorm uses its running statistics.
        """
        return self.shared(lambda: self._evaluate(batches))

    def _evaluate(self, batches: int | None) -> dict[str, float]:
        batch, samples = self.val_batch, self.data.val_samples
        if samples == 0:
            raise MpipipeError("there is no validation data; give Pipeline(..., val=...)")
        if batches is None and samples is None and self.data.exact:
            batches = ENDLESS_BATCHES
        return self.trainer.evaluate(batches, batch, samples)

    def predict(self, batch: Any) -> Any:
        """What the model returns for a batch (a dict, a tuple, or the one tensor that it takes), in the
        structure that it returns; on every rank. Tensors are joined along their first dimension."""
        return self.shared(lambda: self._predict(batch))

    def _predict(self, batch: Any) -> Any:
        given = as_batch(batch, self._names, "predict")
        found = self.trainer.predict(given)
        found = self.comm.bcast_object(found, self.trainer.last_rank) or []
        joined = [torch.cat(ts) if ts[0].dim() else torch.stack(ts) for ts in zip(*found, strict=True)]
        return pytree.tree_unflatten(joined, self.trainer.structure(given))

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self, full: bool = True) -> dict[str, Tensor]:
        """Parameters and persistent buffers under the names of the model's own state_dict.

        full: all of them on rank 0, nothing on the others; else those that this rank holds.
        """
        if self.waits:
            return {}
        mine, alias = self.trainer.state_dict(), self.variants.source.alias
        if full:
            mine = collect(self.comm, mine, self.variants.source.persistent)
        return {name: mine[canonical] for name, canonical in alias.items() if canonical in mine}

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> RunState:
        """Writes a checkpoint: weights in the Hugging Face layout, optimizer state, and where the run is.

        The folder appears whole or not at all. Raises CheckpointError on every rank.
        """

        def work() -> RunState:
            self.begin_save(folder, background=False, extra=dict(extra or {}))
            assert self.saver.saved is not None, "or it has raised"
            return self.saver.saved

        return self.shared(work)

    def begin_save(
        self, folder: str | Path, beside: Beside = lambda folder: (),
        then: Callable[[], object] = lambda: None, background: bool = True, **told: Any,
    ) -> None:  # fmt: skip
        """As `save`, of the working ranks alone, but in the background: steps may follow at once, and one of
        them raises what has failed. `saver.finish` waits for it, as the next save does, and the end of `fit`.
        After a recovery, one that was whole before its step was done again is taken as it is.

        beside, then: see `Saver.save`; told: fields of `RunState`.
        """
        trainer, plan = self.trainer, json.loads(to_json(replace(self.plan, costs=None)))
        parts = together(self.comm, str(folder), trainer.optimizer_numbers)
        facts = RunState(
            step=self.steps_done,
            numerics=self.numerics,
            graph=self.variants.graph.hash,
            optimizer=described(part for of_rank in parts for part in of_rank),
            version=__version__,
            plan={"hash": self.plan.hash, "layout": plan["layout"], "prediction": plan["prediction"]},
            **told,
        )
        if self.comm.lost and self.saver.take(Path(folder), facts, then):
            return
        self.saver.save(
            Path(folder), trainer.state_dict(), trainer.optimizer_state(), self.variants.source.persistent,
            facts, beside, then, background,
        )  # fmt: skip

    def _resume(self, weights: Reader, saved: RunState) -> None:
        kept = Reader(weights.folder, "optimizer")
        check_kept(kept, saved.optimizer, self.variants.trained)
        self.trainer.resume(kept, saved.optimizer)
        self.trainer.state_dict()  # reads the buffers that nothing has asked for
        for reader in (weights, kept):
            check_read(self.comm, reader, saved.files)
        self.steps_done = saved.step
        if not self.data.exact:
            self.say("note: this resume is not exact: the data is a plain iterable, read from its start")


# -- the parts -----------------------------------------------------------------------------------


def _one_folder(comm: Communicator, given: str | Path | None) -> Path | None:
    """The same on all ranks, though a link to it may move meanwhile. Collective."""
    if given is None:
        return None
    return comm.bcast_object(Path(given).resolve() if comm.rank == 0 else Path())


def _optimizer(
    given: Factory | OptimizerSettings | None, clip: float | None, bits: Literal["torch", "fast"]
) -> Optimizer:
    if callable(given):
        return UserOptimizer(given, clip)
    if not isinstance(given, OptimizerSettings | None):
        raise MpipipeError(
            f"optimizer is a {type(given).__name__}; give the function that makes it, since each rank has "
            "parameters of its own: lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)"
        )
    settings = replace(given or OptimizerSettings(), bits=bits)
    return settings if clip is None else replace(settings, clip=clip)
