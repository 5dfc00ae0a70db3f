"""Every form of one model that a run needs, captured when first asked for.

The training graph of a full micro-batch is the primary one: groups, costs and cuts speak of it.
Evaluation, prediction and micro-batches of other shapes are variants; they follow its cut by node name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property

import torch

from mpipipe.errors import CaptureError
from mpipipe.graph.anatomy import Anatomy, Lowering
from mpipipe.graph.capture import capture
from mpipipe.graph.cut import Code, Homes, reads_of, stage_code, stage_table, weight_code
from mpipipe.graph.groups import make_graph
from mpipipe.graph.program import Loss, Metric, Mode, Specs
from mpipipe.graph.recompute import selective
from mpipipe.graph.rewrite import reader_of, source_line
from mpipipe.graph.source import ModelSource
from mpipipe.graph.split import split
from mpipipe.graph.steady import Steady
from mpipipe.ops.device import here, on_host
from mpipipe.ops.embedding import embedding, sums_by_row
from mpipipe.values import Graph, Numerics, TensorSpec

Shapes = tuple[tuple[str, TensorSpec], ...]  # Specs, sorted


def _check_device(written: Iterable[str]) -> None:
    """Raises CaptureError for parts that run as they are written, on an accelerator: they make tensors of
    their own, in main memory, and draw from torch's generator there."""
    if written and not on_host():
        parts = ", ".join(repr(part.removeprefix("model.")) for part in written)
        raise CaptureError(
            f"pipeline.device = {here().type}: {parts} cannot be captured, and what runs as it is written "
            "does so on processors only; set pipeline.device=cpu, or let it be captured"
        )


class Variants:
    """specs(rows) gives the shapes of a batch of `rows` samples; `rows` is the full micro-batch.

    metrics   name -> (outputs, batch) -> (sum, weight), for evaluation
    lowering   which operators become our own
    max_shapes   how many shapes of micro-batches one mode may have, the number of rows aside
    during     entered, with what to call it, around what may take minutes and runs no instruction
    """

    def __init__(
        self,
        source: ModelSource,
        loss: Loss,
        specs: Callable[[int], Specs],
        rows: int,
        precision: str,
        metrics: Mapping[str, Metric] | None = None,
        max_shapes: int = 8,
        lowering: Lowering = Lowering(),  # noqa: B008 - frozen
    ) -> None:
        self.lowering = lowering
        self.source, self.loss, self.specs, self.rows, self.precision = source, loss, specs, rows, precision
        self.metrics, self.max_shapes = dict(metrics or {}), max_shapes
        self.during: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.steady = Steady(loss)
        self._anatomies: dict[Mode, dict[Shapes, Anatomy]] = {}
        self._codes: dict[tuple[Mode, Shapes, tuple[str, ...], int], Code] = {}
        self._training: dict[tuple[Shapes, tuple[str, ...], int, bool, bool], Code] = {}
        self._weights: dict[tuple[Mode, Shapes], Code | float] = {}
        self._borrowed: dict[tuple[Mode, Shapes, tuple[str, ...]], dict[int, tuple[str, ...]]] = {}

    def lowered(self, lowering: Lowering) -> Variants:
        """The same model with other operators of our own; what was captured is shared."""
        if lowering == self.lowering:
            return self
        other = copy(self)
        other.lowering, other._codes, other._training, other._weights = lowering, {}, {}, {}
        other._borrowed = {}
        other._anatomies = {
            mode: {shapes: replace(a, lowering=lowering) for shapes, a in known.items()}
            for mode, known in self._anatomies.items()
        }
        other.__dict__.pop("primary", None)
        return other

    def anatomy(self, mode: Mode, specs: Specs) -> Anatomy:
        """Raises CaptureError where a mode has more than `max_shapes` shapes."""
        known, shapes = self._anatomies.setdefault(mode, {}), _shapes(specs)
        if shapes not in known:
            kinds = {self._of_any_rows(s): s for s in [*known, shapes]}
            if len(kinds) > self.max_shapes:
                seen = "\n".join(f"    {_describe(s)}" for s in kinds.values())
                raise CaptureError(
                    f"micro-batches of {len(kinds)} shapes in mode {mode}, and each is captured on its "
                    f"own; at most capture.max_shapes = {self.max_shapes} are:\n{seen}\n"
                    "  pad the batches to a few lengths (buckets: multiples of 64, say), or raise "
                    "capture.max_shapes"
                )
            before = self.steady.values()
            primary = self._anatomies.get("train", {}).get(_shapes(self.first))
            written = primary.captured.written if primary else {}  # cuts are stated in the names there
            with self.during(_capture_of(mode)):
                captured = capture(self.source, self.loss, specs, mode, self.precision, self.metrics, written)
            _check_device(captured.written)
            known[shapes] = Anatomy(captured, self.lowering)
            self.steady.captured(before)
        return known[shapes]

    def _of_any_rows(self, shapes: Shapes) -> Shapes:
        """The shapes without the number of rows: the first dimension, where all inputs share it."""
        by_rows = all(s.shape[:1] == (self.rows,) for s in self.first.values())
        if not by_rows or len({s.shape[:1] for _, s in shapes}) > 1:
            return shapes
        return tuple((key, TensorSpec(s.shape[1:], s.dtype)) for key, s in shapes)

    @property
    def first(self) -> Specs:
        """The shapes of the primary graph."""
        return self.specs(self.rows)

    def refuse_another_loss(self) -> None:
        """Raises CaptureError where a number that the loss reads is another one than at its capture; one that
        runs as it is written reads it anew."""
        if "loss" not in self.primary.captured.written:
            self.steady.check()

    @cached_property
    def primary(self) -> Anatomy:
        return self.anatomy("train", self.first)

    @property
    def read(self) -> frozenset[str]:
        """Keys of the batch that the primary graph reads."""
        return frozenset(key for node, key in self.primary.captured.inputs.items() if node.users)

    @cached_property
    def graph(self) -> Graph:
        """The value of the primary graph: what is costed, cut and hashed."""
        return make_graph(self.primary, self.source)

    @cached_property
    def uses(self) -> dict[str, int]:
        """Node name -> group; says which use of a parameter a node is."""
        return {n.name: n.group for n in self.graph.nodes}

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Parameters that get a gradient, in canonical order: neither frozen nor unused."""
        return tuple(n for n in self.source.params if n in self.primary.learning)

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Parameters that are not frozen, but the loss does not depend on them: never read, or only under
        `no_grad` or `detach`."""
        wanted = (n for n, p in self.source.params.items() if p.requires_grad)
        return tuple(n for n in wanted if n not in self.primary.learning)

    def code(self, mode: Mode, specs: Specs, cuts: Sequence[str], stage: int) -> Code:
        """The code of one stage of one variant, under the cut of the plan."""
        key = mode, _shapes(specs), tuple(cuts), stage
        if key not in self._codes:
            with self.during(_capture_of(mode)):
                self._codes[key] = self._make_code(mode, specs, cuts, stage)
        return self._codes[key]

    def _make_code(self, mode: Mode, specs: Specs, cuts: Sequence[str], stage: int) -> Code:
        anatomy, table = self.anatomy(mode, specs), stage_table(self.graph, cuts)
        code = stage_code(anatomy, table, self.uses, len(cuts) + 1, stage, self._homes(cuts))
        self._refuse_old_copies(anatomy, code, cuts, stage)
        self.borrowed(mode, specs, cuts)  # or it has raised
        return code

    def training_code(
        self, specs: Specs, cuts: Sequence[str], stage: int, in_two: bool = False, lets_go: bool = False
    ) -> Code:
        """`code` of training; in_two: for a backward in two; lets_go: for selective recomputation."""
        key = _shapes(specs), tuple(cuts), stage, in_two, lets_go
        if key not in self._training:
            with self.during(_capture_of("train")):
                code = self.code("train", specs, cuts, stage)
                code = selective(self.anatomy("train", specs), code) if lets_go else code
                self._training[key] = split(code) if in_two else code
        return self._training[key]

    def check(self, cuts: Sequence[str], stages: Iterable[int]) -> None:
        """Raises CaptureError where a variant that was met already cannot be cut so."""
        for stage in stages:
            for mode, known in self._anatomies.items():
                for shapes in known:
                    self.code(mode, dict(shapes), cuts, stage)

    def _refuse_old_copies(self, anatomy: Anatomy, code: Code, cuts: Sequence[str], stage: int) -> None:
        """Training changes a buffer on the stage that owns it; another stage has its first values only."""
        changing, owner = {u.buffer for u in self.primary.captured.updates}, self.stage_of_param(cuts)
        for name in code.buffers:
            reader = reader_of(name, anatomy.captured.buffer)
            if reader is not None and name in changing and owner[name] != stage:
                raise CaptureError(
                    f"{source_line(reader)}\n  reads {name!r} on stage {stage} of the pipeline in mode "
                    f"{anatomy.captured.mode}, but training changes it on stage {owner[name]}: use it right "
                    "where the BatchNorm or counter is, on what goes in or comes out; or run on one rank"
                )

    def borrowed(self, mode: Mode, specs: Specs, cuts: Sequence[str]) -> dict[int, tuple[str, ...]]:
        """Stage -> parameters that it reads in this variant, and neither owns nor reads in training. Raises
        CaptureError for one that training changes: a copy of it would grow old."""
        key = mode, _shapes(specs), tuple(cuts)
        if key not in self._borrowed:
            anatomy, table = self.anatomy(mode, specs), stage_table(self.graph, cuts)
            found: dict[int, tuple[str, ...]] = {}
            if cuts and anatomy is not self.primary:
                owner, held = self.stage_of_param(cuts), reads_of(self.primary, table)
                for stage, readers in reads_of(anatomy, table, self._homes(cuts)).items():
                    new = [n for n in readers if owner[n] != stage and n not in held.get(stage, {})]
                    for name in [n for n in new if n in self.primary.learning]:
                        raise CaptureError(
                            f"{source_line(readers[name])}\n  reads {name!r} on stage {stage} of the "
                            f"pipeline in mode {mode}, but training changes it on stage {owner[name]}: use "
                            "it right where training does, or there in training, too; or run on one rank"
                        )
                    if new:
                        found[stage] = tuple(new)
            self._borrowed[key] = found
        return self._borrowed[key]

    def weight(self, mode: Mode, specs: Specs) -> Code | float:
        """The loss weight of a micro-batch as a function of the batch alone."""
        key = mode, _shapes(specs)
        if key not in self._weights:
            self._weights[key] = weight_code(self.anatomy(mode, specs))
        return self._weights[key]

    def stage_of_param(self, cuts: Sequence[str]) -> dict[str, int]:
        """Parameter or buffer -> the stage that owns it: that of its first use, else stage 0."""
        table = stage_table(self.graph, cuts)
        owner: dict[str, int] = {}
        for node in self.graph.nodes:
            for name in node.params:
                if node.group >= 0:
                    owner.setdefault(name, table[node.name])
        updates = {
            u.buffer: table.get(self.primary.captured.name[u.node], 0) for u in self.primary.captured.updates
        }
        names = [*self.graph.params, *self.graph.buffers]
        return {name: updates.get(name, owner.get(name, 0)) for name in names}

    def _homes(self, cuts: Sequence[str]) -> Homes:
        owner = self.stage_of_param(cuts)
        return {name: (name in self.primary.learning, owner[name]) for name in self.graph.params}

    def rows_bytes(self, numerics: Numerics) -> dict[str, int]:
        """Tied parameters that are a table in whose first of two uses rows are looked up, and nothing else:
        bytes of the rows, and of their numbers, that a step could keep in place of a gradient of the table's
        size (`mpipipe.planner.stages.kept_rows` says when it does)."""
        first = {(tie.param, tie.groups[0]) for tie in self.graph.ties if len(tie.groups) == 2}
        if not first or numerics.tied != "per_use" or not on_host():
            return {}
        anatomy, found = self.primary, dict[str, int]()
        param, name = anatomy.captured.param, anatomy.captured.name
        reads = Counter((p, node.group) for node in self.graph.nodes for p in node.params)
        for match in anatomy.lowered(anatomy.order):
            if match.op is embedding:
                indices, table, _ = match.args
                use = param[table], self.uses[name[match.first]]
                rows, weight = numerics.micro_batches * indices.meta["val"].numel(), table.meta["val"]
                # Its device is not asked: "meta" while another thread runs an operator in its fake mode.
                if use in first and reads[use] == 1 and sums_by_row("cpu", weight.dtype):
                    found[use[0]] = rows * (weight.shape[1] * weight.itemsize + torch.int64.itemsize)
        return found

    def parameters_by_stage(self, cuts: Sequence[str]) -> list[int]:
        """Elements of each stage; a tied parameter counts at its owner."""
        counts, owner = [0] * (len(cuts) + 1), self.stage_of_param(cuts)
        for name, spec in self.graph.params.items():
            counts[owner[name]] += math.prod(spec.shape)
        return counts


def _shapes(specs: Specs) -> Shapes:
    return tuple(sorted(specs.items()))


def _capture_of(mode: Mode) -> str:
    return f"the capture of the model for mode {mode}"


def _describe(shapes: Shapes) -> str:
    return ", ".join(f"{key} {s.text}" for key, s in shapes)
