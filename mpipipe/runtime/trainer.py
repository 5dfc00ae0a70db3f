"""A planned model on this rank, ready to step: its stage built, its programs lowered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.errors import MpipipeError
from mpipipe.graph.capture import Batch, Mode
from mpipipe.graph.variants import Variants
from mpipipe.planner.lower import max_tag
from mpipipe.planner.search import program_for
from mpipipe.runtime.interpreter import Interpreter, Job, Outcome
from mpipipe.runtime.optimizer import OptimizerSettings, add_state
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.ties import Ties
from mpipipe.runtime.weights import StageWeights
from mpipipe.values import Plan, Program

Split = Literal["train", "val"]
Load = Callable[[Split, int, int, int, frozenset[str]], Batch]  # split, step, start, stop, keys
Bounds = tuple[tuple[int, int], ...]


def split_evenly(batch: int, parts: int) -> Bounds:
    """`parts` micro-batches that differ by one sample at most, larger ones first."""
    small, larger = divmod(batch, parts)
    stops = [small * (i + 1) + min(i + 1, larger) for i in range(parts)]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def split_by(batch: int, rows: int) -> Bounds:
    """Micro-batches of `rows` samples; the last one takes what is left."""
    return tuple((i, min(i + rows, batch)) for i in range(0, batch, rows))


class Trainer:
    """Collective: every rank makes one with the same arguments.

    load(split, step, start, stop, keys) gives samples [start, stop) of a batch.
    """

    def __init__(
        self, comm: Communicator, variants: Variants, plan: Plan, settings: OptimizerSettings, load: Load
    ) -> None:
        self.comm, self.variants, self.plan, self.load = comm, variants, plan, load
        numerics, layout, graph = plan.numerics, plan.layout, variants.graph
        self.bounds = split_evenly(numerics.batch, numerics.micro_batches)
        self.program = self._program(len(self.bounds), train=True)
        self._evaluations: dict[int, Program] = {}
        self.owner = variants.stage_of_param(layout.cuts)
        stages = {}
        for s in (s for s, ranks in enumerate(layout.ranks) if comm.rank in ranks):
            leaves = variants.code("train", numerics.micro_batch, layout.cuts, s).leaves
            weights = StageWeights(variants.source, graph, s, self.owner, leaves, numerics.tied)
            add_state(weights.groups, settings)
            stages[s] = Stage(weights, numerics.precision)
        ties = Ties(graph, layout.cuts, self.owner, frozenset(variants.trained))
        self.interpreter = Interpreter(comm, variants, layout.cuts, stages, ties, numerics, settings)

    def _program(self, n_micro: int, train: bool) -> Program:
        graph, plan = self.variants.graph, self.plan
        program = program_for(plan.layout, plan.numerics, graph.ties, graph.groups, train, n_micro)
        if max_tag(program) > self.comm.tag_ub:
            raise MpipipeError(
                f"the plan needs message tags up to {max_tag(program)}, this MPI allows {self.comm.tag_ub}; "
                "lower pipeline.receive_window"
            )
        return program

    def step(self, step: int, stop: bool = False) -> Outcome:
        """One optimizer step; the same outcome on every rank but for its times.

        Raises MpipipeError on every rank when the loss or a gradient is not finite.
        """
        outcome = self._run(self.program, "train", "train", step, self.bounds, stop)
        if outcome.weight == 0:
            raise MpipipeError(
                f"step {step}: the weight of the loss is 0, so it has no mean; check the labels"
            )
        if outcome.worst or not math.isfinite(outcome.loss):
            place = f"the gradient of {outcome.worst!r}" if outcome.worst else "the loss"
            where = f" (stage {self.owner[outcome.worst]})" if outcome.worst else ""
            raise MpipipeError(
                f"step {step}: {place}{where} is not finite; loss {outcome.loss / outcome.weight}. "
                "Lower train.lr, lengthen train.warmup or set train.clip"
            )
        return outcome

    def evaluate(self, batches: int, batch: int) -> float:
        """Mean validation loss over `batches` batches of `batch` samples, weighted as the loss says."""
        bounds, loss, weight = split_by(batch, self.plan.numerics.micro_batch), 0.0, 0.0
        for i in range(batches):
            outcome = self._run(self._forward_program(len(bounds)), "eval", "val", i, bounds)
            loss, weight = loss + outcome.loss, weight + outcome.weight
        loss, weight = self.comm.bcast_object((loss, weight), self.last_rank)
        return loss / weight

    def predict(self, batch: Batch, rows: int) -> list[list[Tensor]] | None:
        """The model's outputs for each micro-batch of a given batch; on the last stage's rank alone."""
        bounds = split_by(rows, self.plan.numerics.micro_batch)
        job = Job("predict", 0, bounds, lambda a, b, keys: {k: batch[k][a:b] for k in keys})
        outcome = self.interpreter.run(self._forward_program(len(bounds)), job)
        return outcome.predictions if self.comm.rank == self.last_rank else None

    @property
    def last_rank(self) -> int:
        return self.plan.layout.ranks[-1][0]

    def _forward_program(self, n_micro: int) -> Program:
        if n_micro not in self._evaluations:
            self._evaluations[n_micro] = self._program(n_micro, train=False)
        return self._evaluations[n_micro]

    def _run(
        self,
        program: Program,
        mode: Mode,
        split: Split,
        step: int,
        bounds: Sequence[tuple[int, int]],
        stop: bool = False,
    ) -> Outcome:
        def load(start: int, end: int, keys: frozenset[str]) -> Batch:
            return self.load(split, step, start, end, keys)

        return self.interpreter.run(program, Job(mode, step, bounds, load, stop))

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers that this rank owns, by canonical name."""
        stages = self.interpreter.stages.values()
        return {name: t for stage in stages for name, t in stage.weights.state_dict().items()}
