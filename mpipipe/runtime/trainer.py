"""A planned model on this rank, ready to step: its stage built, its programs lowered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, groupby
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from mpipipe.cluster.comm import Communicator, gathered
from mpipipe.errors import MpipipeError
from mpipipe.graph.cut import Code
from mpipipe.graph.program import Batch, Mode, Specs
from mpipipe.graph.variants import Variants
from mpipipe.ops.device import here
from mpipipe.planner.lower import max_tag
from mpipipe.planner.programs import program_for
from mpipipe.planner.stages import kept_rows
from mpipipe.runtime.blame import blame
from mpipipe.runtime.feed import Data, Feed, Given, rows_of, slices, specs_of, split_by, split_evenly
from mpipipe.runtime.interpreter import Interpreter, Job, Outcome, added
from mpipipe.runtime.optimizer import Optimizer, Saved
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.ties import Ties
from mpipipe.runtime.weights import StageWeights
from mpipipe.values import Plan, Program, share_of


def check_tags(comm: Communicator, program: Program) -> None:
    """Raises MpipipeError where this MPI has too few."""
    if max_tag(program) >= comm.tag_ub:  # the last one is that of the mirrors
        raise MpipipeError(
            f"the plan needs message tags up to {max_tag(program)}, this MPI allows {comm.tag_ub - 1}; lower "
            "pipeline.receive_window"
        )


class Trainer:
    """Collective: every rank makes one with the same arguments. `resident_bytes`: see `Interpreter`;
    `during`: see `Feed`."""

    def __init__(
        self,
        comm: Communicator,
        variants: Variants,
        plan: Plan,
        optimizer: Optimizer,
        data: Data,
        resident_bytes: Callable[[], int] = int,
        during: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.comm, self.variants, self.plan, self.data = comm, variants, plan, data
        numerics, layout, graph = plan.numerics, plan.layout, variants.graph
        self.bounds = split_evenly(numerics.batch, numerics.micro_batches)
        if data.exact and not data.varying:  # what cannot be captured is refused now, not within a step
            for rows in {stop - start for start, stop in self.bounds}:
                variants.anatomy("train", data.specs(rows))
        self._programs: dict[tuple[int, bool], Program] = {}
        self.program = self._program(len(self.bounds), train=True)
        self.owner, self.copy = variants.stage_of_param(layout.cuts), self.program.copy_on(comm.rank)
        self._lent: set[tuple[int, str]] = set()  # (stage, parameter)
        n_shares = 1 if numerics.reduce == "fast" else len(self.program.copies_on(comm.rank))
        as_rows = kept_rows(graph.ties, variants.rows_bytes(numerics), numerics.blocks, layout.n_copies)
        stages: dict[int, Stage] = {}
        for s in layout.stages_on(comm.rank):
            leaves = variants.code("train", variants.first, layout.cuts, s).leaves
            there = [stage.weights for stage in stages.values()]
            weights = StageWeights(
                variants.source, graph, s, self.owner, leaves, variants.trained, numerics.tied, there,
                self.copy, len(layout.ranks[s]), n_shares, as_rows,
            )  # fmt: skip
            stages[s] = Stage(weights, numerics.precision, layout.modes[s])
        ties = Ties(graph, layout.cuts, self.owner, frozenset(variants.trained))
        self.interpreter = Interpreter(
            comm, variants, layout.cuts, stages, ties, numerics, optimizer, resident_bytes
        )
        self.feed = Feed(comm, data, self._reads, variants.first, during)

    def _reads(
        self, mode: Mode, specs: Specs, rank: int, micro: int, n_micro: int
    ) -> tuple[frozenset[str], tuple[frozenset[str], ...]]:
        """The batch keys of a micro-batch that a rank reads before the step, for the loss weight, and at the
        forward of each of its stages."""
        layout, cuts = self.plan.layout, self.plan.layout.cuts
        copy, stages = self.program.copy_on(rank), layout.stages_on(rank)
        if micro not in share_of(copy, len(layout.ranks[stages[0]]), n_micro):
            return frozenset(), ()
        codes = [self.variants.code(mode, specs, cuts, stage) for stage in stages]
        last = rank in layout.ranks[-1]
        weight = self.variants.weight(mode, specs) if last and mode != "predict" else 0.0
        before = weight.inputs if isinstance(weight, Code) else ()
        return frozenset(before), tuple(frozenset(code.inputs) for code in codes)

    def _program(self, n_micro: int, train: bool) -> Program:
        if (n_micro, train) not in self._programs:
            graph, plan = self.variants.graph, self.plan
            program = program_for(plan.layout, plan.numerics, graph.ties, graph.groups, train, n_micro)
            check_tags(self.comm, program)
            self._programs[n_micro, train] = program
        return self._programs[n_micro, train]

    def _lend(self, mode: Mode, every: Sequence[Specs]) -> None:
        """To each stage the parameters that it reads in these variants alone, from their owners, once:
        training leaves them as they are. Where the first values lay may be gone. Collective."""
        if len(self.variants.trained) == len(self.variants.source.params):
            return  # without a look at variants that other replicas run
        for specs in every:
            for stage, names in self.variants.borrowed(mode, specs, self.plan.layout.cuts).items():
                for name in names:
                    if (stage, name) not in self._lent:
                        self._lent.add((stage, name))
                        self._lend_one(stage, name)

    def _lend_one(self, stage: int, name: str) -> None:
        stages, owner = self.interpreter.stages, self.owner[name]
        own = stages[owner].weights.data[name] if owner in stages else None
        sent = None if own is None else own.to("cpu")
        found = self.comm.bcast_object(sent, self.plan.layout.ranks[owner][0])
        assert found is not None, "its owner has it"
        if stage in stages:
            stages[stage].weights.data[name] = found.to(here()) if own is None else own

    def step(self, step: int, stop: bool = False) -> Outcome | None:
        """One optimizer step; the same outcome on every rank but for its times. None: the data has ended.

        Raises MpipipeError on every rank when the loss or a gradient is not finite. Where anything is raised,
        what is loaded ahead is loaded again: the data may be mended before the step is tried again.
        """
        try:
            return self._step(step, stop)
        except BaseException:
            self.feed.forget()
            raise

    def _step(self, step: int, stop: bool) -> Outcome | None:
        source = self.feed.begin("train", "train", step, self.bounds)
        if source is None:
            return None
        self._lend("train", source.specs)
        outcome = self.interpreter.run(self.program, Job("train", step, source, stop))
        if outcome.weight == 0:
            raise MpipipeError(
                f"step {step}: the weight of the loss is 0, so it has no mean; check the labels"
            )
        if not 0 < outcome.weight < math.inf:
            raise MpipipeError(
                f"step {step}: the weight of the loss is {outcome.weight:g}; give a finite one above 0, "
                "counted in float32 or int64: float16 ends at 65504"
            )
        if not outcome.sound:
            why = blame(self.comm, self.interpreter, source, outcome)
            raise MpipipeError(
                f"step {step}: {why}\n  no weight was updated; the newest checkpoint is as it was"
            )
        return outcome

    def evaluate(self, batches: int | None, batch: int, samples: int | None = None) -> dict[str, float]:
        """Mean loss and metrics over validation batches, each weighted as it says; on every rank.

        batches: how many, of `batch` samples each; None = all that there are. samples: there are no more, the
        last batch ends there.
        """
        if samples is not None:
            batches = min(batches or samples, -(-samples // batch))
        found: dict[tuple[int, int], list[float]] = {}  # by batch and micro-batch: loss, weight, metrics
        for i in count() if batches is None else range(batches):
            rows = batch if samples is None else min(batch, samples - i * batch)
            bounds = split_by(rows, self.plan.numerics.micro_batch)
            source = self.feed.begin("eval", "val", i, bounds)
            if source is None:
                break
            self._lend("eval", source.specs)
            program = self._program(len(source.specs), train=False)
            o = self.interpreter.run(program, Job("eval", i, source))
            found |= {(i, m): [loss, o.weights[m], *rest] for m, (loss, *rest) in o.values.items()}
        found = gathered(self.comm, found)
        totals = [0.0] * 2 * (1 + len(self.variants.metrics))
        for _, of_batch in groupby(sorted(found.items()), lambda item: item[0][0]):
            sums = map(added, zip(*(row for _, row in of_batch), strict=True))
            totals = [a + b for a, b in zip(totals, sums, strict=True)]
        pairs = zip(["loss", *self.variants.metrics], totals[::2], totals[1::2], strict=True)
        return {
            name: total / weight if 0 < abs(weight) < math.inf else math.nan for name, total, weight in pairs
        }

    def predict(self, batch: Batch) -> list[list[Tensor]] | None:
        """The tensors that the model returns for each micro-batch of a given batch, on `last_rank` alone.
        `structure` says what they were in."""
        micros = slices(batch, split_by(rows_of(batch), self.plan.numerics.micro_batch))
        source = Given(micros, [specs_of(m) for m in micros])
        self._lend("predict", source.specs)
        outcome = self.interpreter.run(self._program(len(micros), train=False), Job("predict", 0, source))
        if self.plan.layout.n_copies == 1:
            return list(outcome.predictions.values()) if self.comm.rank == self.last_rank else None
        found = gathered(self.comm, outcome.predictions)
        return [found[micro] for micro in range(len(micros))] if self.comm.rank == self.last_rank else None

    def structure(self, batch: Batch) -> pytree.TreeSpec:
        """Of the model's outputs for the first micro-batch of a batch."""
        first = slices(batch, split_by(rows_of(batch), self.plan.numerics.micro_batch))[0]
        structure = self.variants.anatomy("predict", specs_of(first)).captured.structure
        assert structure is not None, "prediction has one"
        return structure

    def close(self) -> None:
        """Ends the loading of data ahead."""
        self.feed.ahead.close()

    @property
    def last_rank(self) -> int:
        """Of the last stage, in copy 0."""
        return self.plan.layout.ranks[-1][0]

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers that this rank owns, by canonical name."""
        stages = self.interpreter.stages.values()
        return {name: t for stage in stages for name, t in stage.weights.state_dict().items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """What the optimizer keeps for the parameters that this rank owns, as "parameter/name"."""
        return {name: t for u in self.interpreter.updaters.values() for name, t in u.state().items()}

    def tensors(self) -> dict[str, Tensor]:
        """All that a copy of this rank's state holds: both of these together, and the statistics that no
        checkpoint has."""
        statistics = {
            update.buffer: self.interpreter.stages[s].weights.buffer(update.buffer)
            for s, updates in self.interpreter.updates.items()
            for update in updates
        }
        return {**statistics, **self.state_dict(), **self.optimizer_state()}

    def optimizer_numbers(self) -> list[tuple[str, dict[str, Any]]]:
        """Kind and numbers of each stage's optimizer. Raises CheckpointError for what cannot be kept."""
        return [(u.kind, u.numbers()) for u in self.interpreter.updaters.values()]

    def resume(self, saved: Saved, optimizer: Mapping[str, Any]) -> None:
        """Takes up the optimizer's tensors in `saved` and its numbers; weights come with the source."""
        for updater in self.interpreter.updaters.values():
            updater.load(saved, optimizer)
