"""Costs for a plan without ranks, of micro-batches of any size, taken where the search asks for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal

from mpipipe.checks import check_named, check_trained
from mpipipe.cluster.routes import LIBRARIES, PRODUCTS
from mpipipe.commands.machines import Machine
from mpipipe.config import Config
from mpipipe.configured import optimizer_settings, schedule_name
from mpipipe.decided import blocks_of, gemm_of
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.variants import Variants
from mpipipe.graph.work import Tallier
from mpipipe.planner.asked import Asked, copies_of, counts_of, schedules_of
from mpipipe.planner.joint import Joint, with_less_memory
from mpipipe.planner.sizing import settle, usual_size
from mpipipe.runtime.costing import Found, Updates, bytes_per_param_byte, costs_of, saved_bytes
from mpipipe.runtime.modelling import find
from mpipipe.runtime.op_table import Decision, in_words
from mpipipe.runtime.process import resident_memory
from mpipipe.runtime.setting import numerics_of, set_gemm_route
from mpipipe.values import BatchBytes, Cluster, Costs, Gemm, Prediction


class Costing:
    """at: by the size of a micro-batch, the model and its samples; base_bytes: taken on each rank before any
    weight; seconds: of taking costs; asked: for the ranks that were named first, but for copies; max_ranks:
    that may come, for plans from now on."""

    def __init__(
        self, config: Config, machine: Machine, n_ranks: int, variants_of: Callable[[int], Variants]
    ) -> None:
        p, t = config.pipeline, config.train
        self._pipeline = p
        self.max_ranks, self._spares = p.max_ranks, config.run.spares
        blocks, self.counts, self.blocks_why = self._blocks_on(n_ranks, t.batch)
        asked = config.kernels.gemm
        numerics = numerics_of(
            batch=t.batch, micro_batches=self.counts[0], blocks=blocks, threads=machine.threads,
            gemm="mkl" if asked == "auto" else asked, precision=t.precision, tied=p.tied, bits=t.bits,
            seed=t.seed, reduce=p.reduce,
        )  # fmt: skip
        schedules = schedules_of(schedule_name(config))
        self.asked = Asked(numerics, self.counts, schedules, p.receive_window, n_ranks, recompute=p.recompute)
        self._variants_of = cache(variants_of)
        self.choices = [PRODUCTS + self._settle_gemm(machine, asked)]  # of libraries and kernels, for people
        if t.bits == "fast":
            self.choices.append(self._settle_ops(machine))
        self.at: dict[int, tuple[Variants, Found]] = {}
        self._kept: dict[int, Costs] = {}
        self.base_bytes, self.seconds = 0, 0.0
        self._machine, self._unused = machine, t.unused
        self._optimizer, self._memory = optimizer_settings(config), resident_memory()
        self._on_processors = config.pipeline.device == "cpu"  # there may be an accelerator for `auto`
        self._update_s = Updates(0.0, 0.0, 0.0)

    def _blocks_on(self, n_ranks: int, batch: int) -> tuple[int, tuple[int, ...], str]:
        """Blocks of additions, the numbers of micro-batches to choose from, and why so many blocks."""
        p, spares = self._pipeline, self._spares
        blocks, why = blocks_of(
            p.blocks, p.micro_batches, batch, n_ranks + spares, self.max_ranks, None, p.reduce, spares=spares
        )
        return blocks, counts_of(batch, blocks) if p.micro_batches == "auto" else (p.micro_batches,), why

    def asked_on(self, n_ranks: int) -> Asked:
        """What is searched for so many ranks, by which blocks and copies are settled. Raises PlanError where
        `pipeline.replicas` does not fit them."""
        blocks, counts, _ = self._blocks_on(n_ranks, self.asked.numerics.batch)
        asked = replace(self.asked, counts=counts, n_ranks=n_ranks)
        numerics = replace(asked.of(counts[0]), blocks=blocks)
        copies = copies_of(self._pipeline.replicas, numerics, n_ranks)
        uneven = self._pipeline.replicas == "auto"
        return replace(asked, numerics=numerics, copies=copies, uneven=uneven)

    def _settle_gemm(self, machine: Machine, asked: Literal["auto"] | Gemm) -> str:
        """The route of the matrix products, and why it is this one."""
        if asked == "auto":
            gemm, why = machine.gemm(self._usual, self.asked.numerics)
            self.asked = replace(self.asked, numerics=replace(self.asked.numerics, gemm=gemm))
        else:
            gemm, why = asked, f"{LIBRARIES[asked]}, {gemm_of(asked, None)[1]}"
        if machine.timed:
            set_gemm_route(gemm)
        return why

    def _settle_ops(self, machine: Machine) -> str:
        """Which operators are our own, in words."""
        numerics, captured = self.asked.numerics, self._variants_of
        table = machine.table(self._usual(), numerics)
        self.asked = replace(self.asked, numerics=replace(numerics, op_table=table))
        self._variants_of = cache(lambda rows: captured(rows).lowered(Lowering(numerics.bits, table)))
        said = in_words(Decision(table, {}))
        return said if table else f"{said}, as long as no run has chosen on this machine"

    def _usual(self) -> Variants:
        return self._variants_of(usual_size(self.asked))

    def search(self, budget_s: float = math.inf) -> Joint:
        """The best plan, or the best so far when the time is used. Raises PlanError."""
        end = time.perf_counter() + budget_s
        asked, late = self.asked_on(self.asked.n_ranks), lambda: time.perf_counter() > end
        joint, _ = settle(asked, self._take, late)
        assert joint is not None
        return with_less_memory(joint, asked, late)

    def usual(self) -> Costs:
        """Of micro-batches of a usual size, and of the ranks that were named first."""
        return self._kept_or_taken(usual_size(self.asked))

    def prediction_on(self, cluster: Cluster) -> Prediction:
        """Of the best plan for all ranks of a cluster. Costs are taken once for all clusters. Raises as
        `search` does."""
        asked = self.asked_on(len(cluster.devices))
        per_byte = bytes_per_param_byte(self._optimizer, asked.numerics)

        def taken(rows: int) -> Costs:
            return replace(
                self._kept_or_taken(rows), cluster=cluster, blocks=asked.numerics.blocks,
                bytes_per_param_byte=per_byte,
            )  # fmt: skip

        joint, _ = settle(asked, taken)
        assert joint is not None
        return joint.plan.prediction

    def _kept_or_taken(self, rows: int) -> Costs:
        if rows not in self._kept:
            self._kept[rows] = self._take(rows)
        return self._kept[rows]

    def _take(self, rows: int) -> Costs:
        variants = self._variants_of(rows)
        check_named(variants, self.asked.numerics.bits)
        check_trained(variants, self._unused)
        started, n_ranks = time.perf_counter(), self.asked.n_ranks
        one = replace(self.asked.numerics, batch=rows, micro_batch=rows, micro_batches=1)
        tallier = Tallier(variants.primary, one.precision, ranks=n_ranks)
        found = find(variants, tallier, self._machine.rates(tallier.chill), self._machine.timed)
        if not self.at:
            self._update_s = self._machine.update_s(self._optimizer, tallier.chill)
        del tallier  # and the memory that it empties the caches with
        if not self.at:
            saved = saved_bytes(variants.graph, self._optimizer)
            self.base_bytes = self._memory.base_bytes(saved)  # of a process that has captured the model
        cluster = self._machine.cluster(n_ranks, self.base_bytes)
        costs = costs_of(found, variants, one, self._optimizer, cluster, self._update_s)
        if not self._on_processors:
            costs = costs.but(rows_bytes={}, batch_bytes=BatchBytes())
        self.at[rows] = variants, found
        self.seconds += time.perf_counter() - started
        return costs
