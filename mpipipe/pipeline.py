"""The Python interface: any module, any data, on as many ranks as the script was started with.

    pipe = Pipeline(Net, loss, data, batch=64)     model -> graph -> costs -> plan -> program
    pipe.step(), pipe.evaluate(), pipe.predict(batch), pipe.state_dict(), pipe.save(folder)

Every rank runs the same script with the same arguments; each call is made by all of them. In a
notebook, or started without mpirun, there is one rank. `mpipipe.train` is a user of this module.
"""

from __future__ import annotations

import json
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpipipe import __version__, ops
from mpipipe.checks import (
    check_arguments,
    check_choices,
    check_given,
    check_kernels,
    check_limit,
    check_max_ranks,
    check_metrics,
    check_named,
    check_replicas,
    check_samples,
    check_trained,
    check_whole,
    notes_of_keys,
    notes_of_parts,
)
from mpipipe.cluster.agree import agree, from_root, surroundings
from mpipipe.cluster.binding import bind_ranks
from mpipipe.cluster.calls import CallsWatchdog, Limit, Unwatched
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.launch import local_rank, others_here
from mpipipe.cluster.memory import give_back_freed_memory
from mpipipe.cluster.node import cache_folder
from mpipipe.cluster.node import load as load_average
from mpipipe.cluster.spares import SharedWork
from mpipipe.cluster.watchdog import Outside
from mpipipe.config.whole import ENDLESS_BATCHES
from mpipipe.data.base import Dataset
from mpipipe.data.user import as_batch, from_user, length
from mpipipe.decided import Before, Decided, decide
from mpipipe.errors import DataError, EndOfData, MpipipeError
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.program import Batch, Loss, Metric, batch_names, spec
from mpipipe.graph.source import Initial, Model, ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.measuring import Measuring
from mpipipe.models.losses import from_mean
from mpipipe.ops.device import find as find_device
from mpipipe.ops.device import on_host
from mpipipe.ops.device import use as use_device
from mpipipe.ops.native import use_kernels
from mpipipe.own_schedules import make_known
from mpipipe.planner.asked import Asked, Replicas, check_groups, copies_of, counts_of, schedules_of
from mpipipe.planner.crowded import is_crowded
from mpipipe.planner.joint import search, with_less_memory
from mpipipe.planner.mirrors import with_mirrors
from mpipipe.planner.partition import Wish
from mpipipe.planner.prediction import expect_plan, predict
from mpipipe.planner.programs import program_for
from mpipipe.planner.search import plan_of
from mpipipe.planner.sizing import usual_size
from mpipipe.report.plan import chosen, headline
from mpipipe.runtime.costing import Measured, device_kind
from mpipipe.runtime.feed import rows_of, split_by
from mpipipe.runtime.flight import ViewOfNow
from mpipipe.runtime.foreign import Factory, optimizer_of
from mpipipe.runtime.interpreter import Interpreter, Outcome
from mpipipe.runtime.optimizer import OptimizerSettings, described
from mpipipe.runtime.optimizer import check_trained as check_kept
from mpipipe.runtime.process import calls_of_script, memory_in_use, world
from mpipipe.runtime.recorder import Recorder
from mpipipe.runtime.rehearsal import rehearse
from mpipipe.runtime.setting import compute_as, set_gemm_route, set_threads
from mpipipe.runtime.settling import Settled, settle_micro_batches
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.checkpoint import Reader
from mpipipe.state.costs import CostCache
from mpipipe.state.gather import collect, together
from mpipipe.state.parts import Beside
from mpipipe.state.resume import RunState
from mpipipe.state.saving import Saver
from mpipipe.state.verify import check_read
from mpipipe.state.writing import check_storable
from mpipipe.survival import Newest, Recovery, Survival
from mpipipe.values import Cluster, Plan, Program, Timeline, from_json, to_json

Callback = Callable[["Pipeline", int, dict[str, float]], object]
P = ParamSpec("P")


def _in_a_call(init: Callable[P, None]) -> Callable[P, None]:
    """To make a pipeline is a call of all ranks, as its methods are. Those of a run, which gives its `comm`,
    are watched by the run; those that outlive ranks do not make the same calls after a loss. Whole numbers of
    NumPy become those of Python."""

    @wraps(init)
    def made(*args: P.args, **given: P.kwargs) -> None:
        pipe: Any = args[0]
        watches = given.get("comm") is None and given.get("recover", "restart") == "restart"
        limit: Any = given.get("watchdog", "auto")
        check_limit(limit)
        pipe.calls = calls_of_script(limit) if watches else Unwatched()
        whole: Any = {name: v.item() if isinstance(v, np.integer) else v for name, v in given.items()}
        with pipe.calls.made("Pipeline"):
            check_arguments("Pipeline", init, *args, **whole)
            init(*args, **whole)

    return made


@dataclass(frozen=True)
class Step:
    """What one optimizer step came to; the same on every rank but for its seconds."""

    step: int  # steps done, this one included
    loss: float  # mean over the batch, by the weights of the loss
    grad_norm: float | None  # before clipping; None where nothing clips
    lr: float | None  # None where only the optimizer itself knows
    seconds: float
    stop: bool  # a rank was asked to stop


class Pipeline(SharedWork):
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
    bind       "auto": each rank to cores of its own, once, where the launcher left all ranks of a node the
               same ones; "none": ranks stay as they are
    device     "cpu", or an accelerator such as "cuda", of which each rank of a node takes one; "auto": where
               there is one
    gemm       library of fp32 matrix products; "auto": measured at the first start, and then kept by
               checkpoints
    kernels    whether operators call the compiled kernels; False: torch and NumPy alone, with the same bits
    blocks     equal blocks in which gradients of micro-batches are added up, or "auto": as many as
               `max_ranks` may share, decided at the first start, and then kept by checkpoints
    max_ranks  how many ranks may ever come, for blocks="auto"; None = as many as there are at the first start
    replicas   copies of the pipeline, or (2, 1) of the stages of each rank, which share the micro-batches and
               the optimizer's state; as the blocks allow. "auto": those whose simulated step is the shortest
    reduce     sums of replicas: "exact", with the bits of one; "fast", of any number of replicas
    schedule   "auto": the one whose simulated step is the shortest; or 1f1b, gpipe, ..., or one of your own:
               its name, `package.module:function` or a file `orders.csv`
    recompute  what backward makes again of the forward, to keep less: "none", "selective" (what is cheap:
               norms, activations), "full" (all), or "auto": on each rank what costs least of those that fit
    val        as data, for `evaluate`, in batches of `val_batch` samples (None = batch)
    weight_of  weight_of(batch) -> number of labels, say, that a mean loss was divided by
    metrics    name -> function like the loss, for `evaluate`
    clip       largest norm of the gradient; None = that of OptimizerSettings, or no limit beside a factory
    initial    first values of the weights, such as `mpipipe.hf_model(folder).initial`
    cost_cache  keep what groups cost, in ~/.cache/mpipipe, and time them anew only where it has changed
    resume     folder of a checkpoint that `save` has written, on any number of ranks
    new_numerics  resume although what decides the bits has changed
    new_data   resume on other data than those that the checkpoint was trained on
    plan       a plan or its file, perhaps edited: its cuts, schedule and receive window are used; what
               decides the bits must be as in these arguments
    recover    "mpi": when a rank is lost, `fit` goes on without it, on an MPI started with ULFM; "restart":
               that is an error
    mirror_every  steps between two copies, on another rank, of what a rank holds, for "mpi"; "auto": as often
               as loses the least time; 0 = none, then a recovery begins at the start
    spares     so many ranks hold no stage, wait, and replace those that are lost, for "mpi"; with the others
               they make each call, and get what it comes to
    refine     plan anew from what the first steps took, in `fit` and `mpipipe.train`, where that pays off;
               when not: docs/planning.md
    watchdog   seconds without progress within a call that end a script; "auto": 60, or 10 predicted steps. It
               also ends one whose ranks make different calls. "off": neither. The first pipeline decides, and
               is to be made by all ranks; one that is given `comm` is not watched
    say        takes the lines that are meant for people, on rank 0: None = print; lambda text: None = silence

    Raises CaptureError, DataError, PlanError, CheckpointError, LaunchError.
    """

    calls: CallsWatchdog | Unwatched = Unwatched()

    @_in_a_call
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
        bind: Literal["auto", "none"] = "auto",
        device: str = "cpu",
        blocks: int | Literal["auto"] = 1,
        max_ranks: int | None = None,
        replicas: Replicas = "auto",
        reduce: Literal["exact", "fast"] = "exact",
        tied: Literal["per_use", "eager"] = "per_use",
        bits: Literal["torch", "fast"] = "torch",
        gemm: Literal["auto", "mkl", "onednn"] = "auto",
        kernels: bool = True,
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
        new_data: bool = False,
        plan: str | Path | Plan | None = None,
        recover: Literal["restart", "mpi"] = "restart",
        mirror_every: int | Literal["auto"] = "auto",
        spares: int = 0,
        refine: bool = True,
        watchdog: Limit = "auto",
        comm: Communicator | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        comm = world() if comm is None else comm
        check_metrics(list(metrics or ()))
        check_choices(
            precision=precision, tied=tied, gemm=gemm, unused=unused, bits=bits, recover=recover,
            recompute=recompute, reduce=reduce, bind=bind,
        )  # fmt: skip
        check_kernels(kernels, bits)
        replicas = tuple(replicas) if isinstance(replicas, list) else replicas  # as YAML has it
        check_replicas(replicas)
        check_whole(batch=batch, receive_window=receive_window, max_shapes=max_shapes, seed=seed)
        check_whole(
            "auto", micro_batches=micro_batches, blocks=blocks, threads=threads, mirror_every=mirror_every
        )
        check_whole(None, max_ranks=max_ranks, val_batch=val_batch, memory_bytes=memory_bytes)
        check_max_ranks(max_ranks, blocks)
        use_kernels(kernels)
        self.kernels = kernels
        super().__init__(comm, spares, recover, print if say is None else say)
        self._device = find_device(device, local_rank(comm))
        use_device(self._device)
        self.val_batch, self.mirror_every, self.memory = val_batch or batch, mirror_every, memory_in_use()
        self._said: Plan | None = None
        self.search_s = self.build_s = 0.0  # what the newest plan took, and its trainer

        # what decides the bits
        before = Before.given(comm, resume, plan, new_numerics)
        decided = decide(
            comm, before, batch=batch, micro_batches=micro_batches, blocks=blocks, max_ranks=max_ranks,
            threads=threads, spares=spares, gemm=gemm, bits=bits, reduce=reduce, precision=precision,
            tied=tied, seed=seed,
        )  # fmt: skip
        count, self.numerics, self.blocks_why = decided.count, decided.numerics, decided.blocks_why
        # before OpenMP has threads and training has memory; which cores an accelerator is near, nobody knows
        self.bound = bind_ranks(comm, self.numerics.threads, spares, bind == "auto" and on_host())
        set_threads(self.numerics.threads)
        set_gemm_route(self.numerics.gemm)
        self.optimizer = optimizer_of(optimizer, clip, bits)
        make_known("schedule", schedule)
        self._agree(
            schedule=schedule, replicas=replicas, receive_window=receive_window, max_shapes=max_shapes,
            val_batch=self.val_batch, shuffle=shuffle, unused=unused,
            samples=length(data), searched=count is None, gemm=gemm,
            kernels=kernels, recompute=recompute, recover=recover, mirror_every=mirror_every, spares=spares,
            refine=refine, bind=bind,
            checkpoint=before.saved and (before.saved.step, before.saved.weights_sha256),
            plan=before.plan and before.plan.hash,
        )  # fmt: skip
        before.check_ranks(self.size)

        # model and data -> graphs, by the samples of a micro-batch
        source = self._source(model, initial, before.weights)
        self._names = batch_names(source.module)
        self.data: Dataset = from_user(
            data, val, batch=batch, micro_batches=count, names=self._names, collate=collate,
            shuffle=shuffle, seed=seed, varying=varying, val_batch=val_batch, comm=comm,
        )  # fmt: skip
        self.known_data = check_samples(comm, self.data, self.numerics.micro_batch)
        if not new_data:
            before.check_data(self.known_data)
        full_loss: Loss = loss if weight_of is None else from_mean(loss, weight_of)

        @cache
        def captured(rows: int) -> Variants:
            return Variants(source, full_loss, self.data.specs, rows, precision, metrics, max_shapes)

        def lowered(rows: int) -> Variants:
            return captured(rows).lowered(Lowering(bits, self.numerics.op_table))

        # graphs -> costs
        asked = self._asked(count, schedule, receive_window, replicas, recompute, before.plan)
        here = self._measure(captured(usual_size(asked)), decided, cost_cache)
        asked = replace(asked, numerics=self.numerics)
        timing = partial(here.costs, self.optimizer, self.memory, memory_bytes, self.data)
        settled = settle_micro_batches(comm, asked, lowered, timing) if count is None else None
        if settled is None:
            self.variants = lowered(self.numerics.micro_batch)
        else:
            self.numerics, self.variants = settled.numerics, settled.variants
            self.known_data = check_samples(comm, self.data, self.numerics.micro_batch)
        self._check_model(before, asked, unused)

        # costs -> plan -> program, on the ranks that work
        self._plan_at_first(asked, before.plan, settled, timing)
        asked = replace(asked, numerics=self.numerics, counts=(self.numerics.micro_batches,))
        self.survival = Survival(asked, here.cluster, source.initial, before.folder)
        self.divide()
        if not self._may_refine() or not refine or before.plan is not None:
            self.survival.looks.clear()
        self.saver = Saver(self.comm)
        if not self.waits:
            self._begin(before)

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

    def _source(self, model: Model, initial: Initial | None, weights: Reader | None) -> ModelSource:
        """The model, with the first values that it was given or those of a checkpoint. Collective."""
        source = ModelSource(model, self.numerics.seed, weights or initial)
        specs = {name: spec(source.tensor(name)) for name in source.persistent}
        check_storable(specs, "the model")
        if weights is not None:
            weights.check(specs)
            weights.keep(name for name in specs if name in source.buffers)  # captures to come ask for them
        check_given(self.comm, source)
        return source

    def _asked(
        self, count: int | None, schedule: str, receive_window: int, replicas: Replicas, recompute: Wish,
        given: Plan | None,
    ) -> Asked:  # fmt: skip
        """What the plan is searched among. count: of micro-batches; None = that, too."""
        counts = counts_of(self.numerics.batch, self.numerics.blocks) if count is None else (count,)
        most = replace(self.numerics, micro_batches=counts[0])
        copies = (1,) if given else copies_of(replicas, most, self.size)
        return Asked(
            self.numerics, counts, schedules_of(schedule), receive_window, self.size, copies, recompute,
            uneven=replicas == "auto",
        )  # fmt: skip

    def _measure(self, usual: Variants, decided: Decided, cost_cache: bool) -> Measuring:
        """Who moves messages on, and by which library and operators this model is computed; what measures
        its costs next. Collective."""
        check_named(usual, self.numerics.bits)
        kind = device_kind(self.numerics.instruction_set)
        quiet = not others_here(self.comm, load_average())
        known = CostCache(cache_folder() if cost_cache else None, kind, self.say, quiet)
        here = Measuring(self.comm, known, self.say, self.working)
        self.messages_why = here.messages()
        self.numerics, self.gemm_why = here.gemm(decided.gemm, decided.gemm_why, usual, self.numerics)
        self.gemm_s = here.gemm_s
        self.numerics, ours = here.ops(decided.op_table, usual, self.numerics)
        self.ops_why = ours if self.kernels else "kernels: off"
        return here

    def _check_model(self, before: Before, asked: Asked, unused: str) -> None:
        """What can be refused before anything is timed for a plan."""
        check_trained(self.variants, unused)
        for note in before.check_graph(self.variants.graph, self.numerics, self.size):
            self.say(f"note: {note}")
        parts = notes_of_parts(self.variants.source, self.variants.primary.captured.written)
        for note in [*parts, *notes_of_keys(self.variants)]:
            self.say(f"note: {note}")
        if before.plan is None:
            check_groups(asked, len(self.variants.graph.groups))

    def _plan_at_first(
        self, asked: Asked, given: Plan | None, settled: Settled | None, timing: Callable[..., Measured]
    ) -> None:
        """Costs, those of the search where there was one, and the plan. Collective."""
        started = time.perf_counter()
        if settled is None:
            found = timing(self.variants, self.numerics)
            self.costs, self.timed = found.costs, (found.timed, found.of)
        else:
            self.costs, self.timed = settled.costs, settled.timed
        self.memory.restart()  # what the timing took has been given back
        self.plan = self.plan_for(asked, given, settled, first=True)
        self.planning_s = time.perf_counter() - started + (settled.seconds if settled else 0.0)
        self.search_s += settled.seconds if settled else 0.0

    def plan_for(
        self, asked: Asked, given: Plan | None = None, settled: Settled | None = None, first: bool = False
    ) -> Plan:
        """Rank 0 plans, or predicts what a given plan will take; all ranks prove that they have the same
        model, plan and program. first: there is none to compare it with. Collective."""
        graph, comm, started = self.variants.graph, self.comm, time.perf_counter()
        self.mirrors_why = self.search_why = ""
        text = from_root(
            comm, lambda: to_json(replace(self._planned(asked, given, settled, first), costs=None), None)
        )
        self.search_s = time.perf_counter() - started
        plan = replace(from_json(Plan, text), costs=self.costs)  # which are everywhere
        program = program_for(plan.layout, plan.numerics, graph.ties, graph.groups)
        agree(comm, {"graph": graph.hash, "plan": plan.hash, "program": program.hash})
        return plan

    def _planned(self, asked: Asked, given: Plan | None, settled: Settled | None, first: bool) -> Plan:
        """On rank 0 alone."""
        if given is not None:
            plan = plan_of(self.costs, self.numerics, replace(given.layout, mirror_every=0))
        else:
            joint = (settled and settled.joint) or search(asked, lambda _: self.costs)
            if first:
                joint = with_less_memory(joint, asked)
            plan = joint.plan
            if is_crowded(self.costs.cluster):  # which the search leaves out
                plan = replace(plan, prediction=expect_plan(plan, self.costs)[0])
            if settled is not None:
                self.say(chosen(joint, settled.sizes, settled.seconds))
            elif len(joint.tried) > 1:
                self.search_why = chosen(joint)
        if self.recovers:
            every = given.layout.mirror_every if given and given.layout.mirror_every else self.mirror_every
            plan, self.mirrors_why = with_mirrors(plan, self.costs, every)
        return plan

    def _may_refine(self) -> bool:
        """Whether steps can show a better layout, and a run can go over to it. Collective over all ranks."""
        shared = any(self.world.allgather_object(self.comm.oversubscribed))  # on one node, perhaps
        own, fast = not isinstance(self.optimizer, OptimizerSettings), self.numerics.reduce == "fast"
        return not (self.size == 1 or shared or own or fast)

    def _begin(self, before: Before) -> None:
        """What stands before the first step, on ranks that work. Collective."""
        self.variants.during = self.calls.during
        self.build()
        self._rehearse()
        if before.saved is not None and before.weights is not None:
            self.resume(before.weights, before.saved)
        self.survival.begin(self.comm, self.plan)

    def build(self) -> None:
        """The trainer of the plan, with the weights that the source has now. Of the working ranks alone."""
        started = time.perf_counter()
        self.trainer = Trainer(
            self.comm, self.variants, self.plan, self.optimizer, self.data, self.memory.sample,
            self.calls.during,
        )  # fmt: skip
        self.recorder = Recorder(self.comm, self.program)
        give_back_freed_memory()  # of the first weights, which were made one by one
        self.build_s = time.perf_counter() - started

    def _rehearse(self) -> None:
        """The plan as it is, predicted anew."""
        before, self.costs = self.costs.cluster, rehearse(self.trainer, self.costs)
        self.survival.take_speeds(self.comm, self.costs.cluster)
        self._say_slow(before)
        finest = self.plan.numerics.micro_batch == 1
        prediction, self.predicted = predict(self.costs, self.plan.layout, self.program, finest=finest)
        self.plan = replace(self.plan, costs=self.costs, prediction=prediction)

    def _say_slow(self, before: Cluster) -> None:
        """Of ranks that the rehearsal has shown to be slow. Collective."""
        hosts, devices = self.comm.allgather_object(platform.node()), self.costs.cluster.devices
        for rank, (was, now) in enumerate(zip(before.devices, devices, strict=True)):
            if now.speed < was.speed:
                by = was.speed / now.speed
                self.say(
                    f"note: rank {rank} ({hosts[rank]}) computes {by:.1f} times as long as others for equal "
                    "work: look for what else uses its cores, or whether they are throttled"
                )

    # -- training ------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The instructions of one training step."""
        return self.trainer.program

    def step(self, stop: bool = False) -> Step:
        """One optimizer step on the next batch. The first one says the plan in a line. `stop`: this rank was
        asked to stop, say so to all.

        Raises MpipipeError on every rank when the loss or a gradient is not finite, EndOfData where the data
        has ended, CaptureError where a number that the loss reads has changed, and CheckpointError when a
        save in the background has failed.
        """

        def work() -> Step:
            if self.plan is not self._said:  # at first, and where another one was made since
                self._said = self.plan
                self.say(headline(self.plan))
            return self.timed_step(stop)[0]

        with self._call("step", counts=True):
            return self.shared(work)

    def _call(self, name: str, counts: bool = False) -> AbstractContextManager[None]:
        """Around a method that all ranks call. counts: it runs instructions all the time."""
        compute_as(self.numerics, self.kernels, self._device)
        me = weakref.ref(self)

        def find() -> Interpreter | None:
            trainer = getattr(me(), "trainer", None)
            return None if trainer is None else trainer.interpreter

        view = ViewOfNow(find, Outside(self.rank, self.size))
        return self.calls.made(f"Pipeline.{name}", view, self.plan.prediction.step_s, counts)

    def timed_step(self, stop: bool = False) -> tuple[Step, Outcome]:
        """As `step`, with the times of this rank's instructions; of the working ranks alone."""
        self.note_lost_spares()
        self.saver.poll()
        self.variants.refuse_another_loss()
        start = time.perf_counter()
        outcome = self.trainer.step(self.steps_done, stop=stop)
        if outcome is None:
            raise EndOfData(f"the data ended after {self.steps_done} steps; give more, or fewer steps")
        self.recorder.add(outcome)
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
        if self.steps_done >= steps:
            self.say(f"note: {self.steps_done} steps are done; for more, give fit a larger number of steps")

        def work() -> None:
            while self.steps_done < steps and not self._fit_step(calls, eval_every):
                if typical := self.shown(steps - self.steps_done):
                    taken, said = self.refine(typical, steps - self.steps_done)
                    if taken:
                        self.say(f"mpipipe: {said}")  # the next step says the plan
            self.saver.finish()

        with self._call("fit"):
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
            with self.calls.outside():
                call(self, done.step, values)
        return done.stop

    def recover(self, checkpoint: Newest = lambda comm, above: None) -> Recovery:
        """After RankLost: this pipeline on the ranks that are left, with the bits that it would have had, and
        with spares where ranks were lost. They all call it, outside of the `except` block, so that the memory
        of what failed is free. checkpoint: the newest one of more steps than the mirrors have (-1: there are
        none); collective over the ranks that work then.

        Raises PlanError where the model does not fit the ranks that are left.
        """
        return self.survival.recover(self, checkpoint)

    def plan_around(self, slower: Mapping[int, float]) -> tuple[bool, str]:
        """Between two steps: another layout, with the same bits, for ranks that compute by these factors
        longer than was predicted, if it is faster. Whether it is taken, and what to say of it. Collective."""
        return self.survival.plan_around(self, slower)

    def shown(self, steps_left: int) -> list[Timeline]:
        """After a step: what those of this layout took (`Recorder.typical`), where these are enough for a
        look at another one, and the search would be nothing beside those that are left; else nothing."""
        return self.survival.shown(self, steps_left)

    def refine(self, typical: Sequence[Timeline], steps_left: int) -> tuple[bool, str]:
        """Between two steps: another layout, with the same bits, by what the steps of this one took, if that
        pays off in those that are left. As `plan_around`."""
        return self.survival.refine(self, typical, steps_left)

    def evaluate(self, batches: int | None = None) -> dict[str, float]:
        """Mean loss and metrics over the validation data, by name; the same on every rank.

        batches: how many; None = all of them, 8 where the data has no end by itself. Dropout is off,
        BatchNorm uses its running statistics.
        """
        with self._call("evaluate"):
            return self.shared(lambda: self._evaluate(batches))

    def _evaluate(self, batches: int | None) -> dict[str, float]:
        check_whole(None, batches=batches)
        batch, samples = self.val_batch, self.data.val_samples
        if samples == 0:
            raise MpipipeError("there is no validation data; give Pipeline(..., val=...)")
        if batches is None and samples is None and self.data.exact:
            batches = ENDLESS_BATCHES
        return self.trainer.evaluate(batches, batch, samples)

    def predict(self, batch: Any) -> Any:
        """What the model returns for a batch (a dict, a tuple, or the one tensor that it takes), in the
        structure that it returns; on every rank. Tensors of several micro-batches are joined along their
        first dimension, that of the samples, and numbers stand in a row. Raises DataError where it is not."""
        with self._call("predict"):
            return self.shared(lambda: self._predict(batch))

    def _predict(self, batch: Any) -> Any:
        given = as_batch(batch, self._names, "predict")
        found = self.trainer.predict(given)
        found = self.comm.bcast_object(found, self.trainer.last_rank) or []
        rows = [stop - start for start, stop in split_by(rows_of(given), self.numerics.micro_batch)]
        for i, ts in enumerate(zip(*found, strict=True)):
            if len(ts) > 1 and any(t.dim() and len(t) != n for t, n in zip(ts, rows, strict=True)):
                raise DataError(
                    f"predict: tensor {i} that the model returns has the shape {list(ts[0].shape)} for a "
                    f"micro-batch of {rows[0]} samples, so those of {len(rows)} cannot be joined: return it "
                    f"with the samples first, or predict {self.numerics.micro_batch} samples at a time"
                )
        joined = [torch.cat(ts) if ts[0].dim() else torch.stack(ts) for ts in zip(*found, strict=True)]
        return pytree.tree_unflatten(joined, self.trainer.structure(given))

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self, full: bool = True) -> dict[str, Tensor]:
        """Parameters and persistent buffers under the names of the model's own state_dict.

        full: copies of all of them on rank 0, nothing on the others; else the tensors of this rank, as they
        lie now. `fit` may go over to another plan (`refine`, `recover`): ask anew then.
        """
        if self.waits:
            return {}
        mine, alias = self.trainer.state_dict(), self.variants.source.alias
        if full:
            with self._call("state_dict"):
                mine = collect(self.comm, mine, self.variants.source.persistent)
        return {name: mine[canonical] for name, canonical in alias.items() if canonical in mine}

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> RunState:
        """Writes a checkpoint: weights in the Hugging Face layout, optimizer state, and where the run is.

        The folder appears whole or not at all. Raises CheckpointError on every rank.
        """

        def work() -> RunState:
            self._begin_save(Path(folder), lambda _: (), lambda: None, False, {"extra": dict(extra or {})})
            assert self.saver.saved is not None, "or it has raised"
            return self.saver.saved

        with self._call("save"):
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
        with self._call("begin_save"):
            self._begin_save(Path(folder), beside, then, background, told)

    def _begin_save(
        self, folder: Path, beside: Beside, then: Callable[[], object], background: bool, told: dict[str, Any]
    ) -> None:
        trainer, plan = self.trainer, json.loads(to_json(replace(self.plan, costs=None)))
        trainer.interpreter.check_whole()
        parts = together(self.comm, str(folder), trainer.optimizer_numbers)
        facts = RunState(
            step=self.steps_done,
            numerics=self.numerics,
            graph=self.variants.graph.hash,
            optimizer=described(part for of_rank in parts for part in of_rank),
            data=self.known_data,
            version=__version__,
            plan={"hash": self.plan.hash, "layout": plan["layout"], "prediction": plan["prediction"]},
            **told,
        )
        if self.comm.lost and self.saver.take(folder, facts, then):
            return
        self.saver.save(
            folder, trainer.state_dict(), trainer.optimizer_state(), self.variants.source.persistent,
            facts, beside, then, background,
        )  # fmt: skip

    def resume(self, weights: Reader, saved: RunState) -> None:
        """The trainer that was built goes on from a checkpoint. Collective."""
        kept = Reader(weights.folder, "optimizer")
        check_kept(kept, saved.optimizer, self.variants.trained)
        self.trainer.resume(kept, saved.optimizer)
        self.trainer.state_dict()  # reads the buffers that nothing has asked for
        for reader in (weights, kept):
            check_read(self.comm, reader, saved.files)
        self.steps_done = saved.step
        if not self.data.exact:
            self.say("note: this resume is not exact: the data is a plain iterable, read from its start")
