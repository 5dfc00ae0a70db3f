"""Every form of one model that a run needs, captured when first asked for.

The training graph of a full micro-batch is the primary one: groups, costs and cuts speak of it.
Evaluation, a ragged micro-batch and prediction are variants; they follow its cut by node name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from mpipipe.graph.anatomy import Anatomy
from mpipipe.graph.capture import Captured, Loss, Mode, capture
from mpipipe.graph.cut import Code, stage_code, stage_table, weight_code
from mpipipe.graph.groups import make_graph
from mpipipe.graph.source import ModelSource
from mpipipe.values import Graph, TensorSpec


class Variants:
    """specs(rows) gives the shapes of a batch of `rows` samples; `rows` is the full micro-batch."""

    def __init__(
        self,
        source: ModelSource,
        loss: Loss,
        specs: Callable[[int], dict[str, TensorSpec]],
        rows: int,
        precision: str,
    ) -> None:
        self.source, self.loss, self.specs, self.rows, self.precision = source, loss, specs, rows, precision
        self._anatomies: dict[tuple[Mode, int], Anatomy] = {}
        self._codes: dict[tuple[Mode, int, tuple[str, ...], int], Code] = {}
        self._weights: dict[int, Code | float] = {}

    def anatomy(self, mode: Mode, rows: int) -> Anatomy:
        if (mode, rows) not in self._anatomies:
            captured = self._capture(mode, rows)
            self._anatomies[mode, rows] = Anatomy(captured)
        return self._anatomies[mode, rows]

    def _capture(self, mode: Mode, rows: int) -> Captured:
        return capture(self.source, self.loss, self.specs(rows), mode, self.precision)

    @property
    def primary(self) -> Anatomy:
        return self.anatomy("train", self.rows)

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
        used = {name for node in self.graph.nodes for name in node.params if node.group >= 0}
        return tuple(n for n, p in self.source.params.items() if p.requires_grad and n in used)

    def code(self, mode: Mode, rows: int, cuts: Sequence[str], stage: int) -> Code:
        """The code of one stage of one variant, under the cut of the plan."""
        key = mode, rows, tuple(cuts), stage
        if key not in self._codes:
            anatomy, table = self.anatomy(mode, rows), stage_table(self.graph, cuts)
            self._codes[key] = stage_code(anatomy, table, self.uses, len(cuts) + 1, stage)
        return self._codes[key]

    def weight(self, mode: Mode, rows: int) -> Code | float:
        """The loss weight of a micro-batch as a function of the batch alone."""
        if rows not in self._weights:
            self._weights[rows] = weight_code(self.anatomy(mode, rows))
        return self._weights[rows]

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
