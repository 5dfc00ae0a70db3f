"""What a start finds out about this machine before it plans, each kept for the next start.

who moves messages   which library multiplies   which operators are our own   what groups cost
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mpipipe.cluster import overlap as overlapping
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.memory import Memory
from mpipipe.cluster.routes import LIBRARIES
from mpipipe.data.base import Dataset
from mpipipe.graph.variants import Variants
from mpipipe.ops import device
from mpipipe.runtime.costing import Measured, device_kind, measure
from mpipipe.runtime.gemm import Prober
from mpipipe.runtime.loading import with_loading
from mpipipe.runtime.op_table import Decision, decide, in_words, table_name
from mpipipe.runtime.optimizer import Optimizer
from mpipipe.runtime.setting import set_gemm_route
from mpipipe.state.costs import CostCache, Kept
from mpipipe.values import Cluster, Gemm, Numerics


@dataclass
class Measuring:
    """Of one rank; every method is collective. say: takes a note, for people."""

    comm: Communicator
    cache: CostCache
    say: Callable[[str], object]
    working: tuple[int, ...]  # ranks that are planned for; all are timed
    gemm_s: float = field(init=False, default=0.0)  # that choosing the route took
    cluster: Cluster = field(init=False)  # of all ranks, as they were timed last

    def _kept(self) -> Kept:
        """By earlier starts; rank 0 has it."""
        return self.cache.read() if self.comm.rank == 0 else Kept()

    def messages(self) -> str:
        """Who moves messages on while ranks compute, for people."""
        name, overlap = overlapping.choose(self.comm, self._kept().overlaps)
        if self.comm.rank == 0 and overlap.felt:
            self.cache.write(Kept(overlaps={name: overlap}))
        return overlapping.why(overlap, self.comm.transport)

    def gemm(
        self, given: Gemm | None, given_why: str, variants: Variants, numerics: Numerics
    ) -> tuple[Numerics, str]:
        """With the route of the matrix products, measured unless it is given, and why it is this one; a note
        where bf16 is slow here."""
        _ = variants.graph  # what cannot be captured is refused before ranks wait for each other
        if not device.on_host():
            return numerics, f"those of {device.name()}, in whole fp32"
        prober = Prober(self.comm, variants, numerics, self._kept().routes)
        slow, found = prober.slow_bf16()
        if slow:
            self.say(f"note: {slow}")
        reason = f"{LIBRARIES[numerics.gemm]}, {given_why}"
        if given is None:
            choice = prober.choose()
            numerics, reason = replace(numerics, gemm=choice.gemm), choice.why
            self.gemm_s = choice.seconds
            found = {**found, **choice.found}
        if self.comm.rank == 0:
            self.cache.write(Kept(routes=dict(found)))
        set_gemm_route(numerics.gemm)
        return numerics, reason

    def ops(
        self, table: Mapping[str, str] | None, variants: Variants, numerics: Numerics
    ) -> tuple[Numerics, str]:
        """With the operators that are our own: those that are faster here, unless given; and in words."""
        if numerics.bits == "torch":
            return numerics, ""
        if table is not None:
            return numerics, in_words(Decision(dict(table), {}))
        kinds = self.comm.allgather_object(device_kind(numerics.instruction_set))
        name = table_name(kinds, variants, numerics)
        decision = decide(self.comm, variants, numerics, self._kept().tables.get(name))
        if self.comm.rank == 0:
            self.cache.write(Kept(tables={name: decision.table}))
        return replace(numerics, op_table=decision.table), in_words(decision)

    def costs(
        self, optimizer: Optimizer, memory: Memory, memory_bytes: int | None, data: Dataset,
        variants: Variants, numerics: Numerics, before: Measured | None = None,
    ) -> Measured:  # fmt: skip
        """Of the groups, as far as they hold from the runs before, on the ranks that are planned for."""
        kept = self._kept()
        found = measure(
            self.comm, variants, numerics, optimizer, memory, memory_bytes, kept.samples, kept.updates, before
        )
        if self.comm.rank == 0:
            self.cache.write(Kept(samples=found.samples, updates={found.update_name: found.update_s}))
        rows = numerics.micro_batch
        costs = with_loading(found.costs, variants.graph, data, rows, self.comm, numerics.threads)
        self.cluster = costs.cluster
        return replace(found, costs=costs.but(cluster=self.cluster.in_order(self.working)))
