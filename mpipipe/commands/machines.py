"""For which machine a plan is made: ranks like this process, or those of a cluster file."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from mpipipe.cluster.assumed import like_this_node, ranks_per_node
from mpipipe.cluster.launch import advice_here
from mpipipe.cluster.node import cache_folder, cores_available
from mpipipe.cluster.routes import LIBRARIES
from mpipipe.config import Config
from mpipipe.config.cluster import ClusterConfig
from mpipipe.errors import PlanError
from mpipipe.graph.rates import Rates, Roofline, Trials
from mpipipe.graph.variants import Variants
from mpipipe.ops.device import find
from mpipipe.ops.native import use_kernels
from mpipipe.planner.sizes import size_text
from mpipipe.runtime.costing import Updates, device_kind, update_times
from mpipipe.runtime.gemm import Prober
from mpipipe.runtime.modelling import update_bytes
from mpipipe.runtime.op_table import table_name
from mpipipe.runtime.optimizer import Optimizer
from mpipipe.runtime.setting import instruction_set, set_threads
from mpipipe.state.costs import CostCache, Kept
from mpipipe.values import LEVELS, Cluster, Gemm, Link, Numerics


class Machine(ABC):
    """threads: per rank. timed: small groups may be timed in this process."""

    threads: int
    timed: bool
    how: str  # groups that are not timed become seconds

    @abstractmethod
    def gemm(self, variants: Callable[[], Variants], numerics: Numerics) -> tuple[Gemm, str]:
        """For kernels.gemm = auto: the route of the matrix products, and why. variants: gives the model."""

    @abstractmethod
    def table(self, variants: Variants, numerics: Numerics) -> dict[str, str]:
        """Which operators are our own where bits = fast; those that it does not have are."""

    @abstractmethod
    def rates(self, chill: Callable[[], object]) -> Rates:
        """chill: empties the caches, where something is timed."""

    @abstractmethod
    def update_s(self, optimizer: Optimizer, chill: Callable[[], object]) -> Updates:
        """Of an optimizer step."""

    @abstractmethod
    def cluster(self, n_ranks: int, base_bytes: int) -> Cluster:
        """base_bytes: taken on each rank before any weight. Raises PlanError where it has fewer ranks."""

    @abstractmethod
    def assumed(self, cluster: Cluster) -> Sequence[str]:
        """Lines for people: what nobody has measured."""


class Here(Machine):
    timed, how = True, "operators timed here, large ones at a reduced size and in proportion"

    def __init__(self, config: Config, n_ranks: int) -> None:
        if find(config.pipeline.device).type != "cpu":
            raise PlanError(
                f"pipeline.device = {config.pipeline.device}: operators are timed on this processor here, on "
                "accelerators by a run before its first step; plan with --cluster FILE, which says what "
                "they do, or start the run"
            )
        cores, asked = len(cores_available()), config.pipeline.threads
        self.threads = max(1, cores // n_ranks) if asked == "auto" else asked  # as a run on this node would
        self.used = min(self.threads, cores)
        self.limit = config.pipeline.memory_bytes
        self.cost_cache = config.pipeline.cost_cache
        set_threads(self.used)
        use_kernels(config.kernels.compiled)

    def gemm(self, variants: Callable[[], Variants], numerics: Numerics) -> tuple[Gemm, str]:
        kept = self._cache(numerics)
        choice = Prober(None, variants(), numerics, kept.read().routes).choose()
        kept.write(Kept(routes=dict(choice.found)))
        return choice.gemm, choice.why

    def table(self, variants: Variants, numerics: Numerics) -> dict[str, str]:
        """That of earlier runs here."""
        name = table_name([device_kind(numerics.instruction_set)], variants, numerics)
        return self._cache(numerics).read().tables.get(name, {})

    def _cache(self, numerics: Numerics) -> CostCache:
        kind = device_kind(numerics.instruction_set)
        busy = advice_here()
        return CostCache(cache_folder() if self.cost_cache else None, kind, print, quiet=not busy)

    def rates(self, chill: Callable[[], object]) -> Rates:
        return Trials(chill)

    def update_s(self, optimizer: Optimizer, chill: Callable[[], object]) -> Updates:
        return update_times(optimizer, time.perf_counter, chill)

    def per_node(self) -> int:
        return ranks_per_node(self.threads)

    def cluster(self, n_ranks: int, base_bytes: int) -> Cluster:
        return like_this_node(
            n_ranks, self.threads, instruction_set(), base_bytes, self.limit, self.per_node()
        )

    def assumed(self, cluster: Cluster) -> Sequence[str]:
        device = cluster.devices[0]
        fewer = (
            "" if self.used == self.threads else f", costs are those of {self.used}: give --cluster instead"
        )
        limit = "pipeline.memory_bytes" if self.limit else "what this node has left, shared out"
        return (
            f"assumed: ranks like this process, {device.kind}, threads: {self.threads}{fewer}",
            f"         ranks per node: {self.per_node()}; {size_text(device.memory_bytes)} each ({limit})",
            f"         links: {_links(cluster)} (10 Gb/s Ethernet)",
        )


class There(Machine):
    timed, how = False, "operations and bytes at the rates of the cluster file"

    def __init__(self, config: Config, cluster: ClusterConfig) -> None:
        device, asked = cluster.first, config.pipeline.threads
        self.threads = device.threads if asked == "auto" else asked
        self.file, self.precision, self.limit = cluster, config.train.precision, config.pipeline.memory_bytes
        if self.threads > device.threads:
            raise PlanError(
                f"pipeline.threads is {self.threads}, but the cluster file gives a device {device.threads}; "
                f"set pipeline.threads={device.threads}, or auto for all of them"
            )
        self.share = self.threads / device.threads  # of the device's rates

    def gemm(self, variants: Callable[[], Variants], numerics: Numerics) -> tuple[Gemm, str]:
        gemm = self.file.gemm or "mkl"
        told = "as the cluster file says" if self.file.gemm else "as the cluster file has no gemm"
        return gemm, f"{LIBRARIES[gemm]}, {told}"

    def table(self, variants: Variants, numerics: Numerics) -> dict[str, str]:
        return {}

    def rates(self, chill: Callable[[], object]) -> Rates:
        device = self.file.first
        flops = {precision: rate * self.share for precision, rate in device.flops_per_s}
        return Roofline(flops, device.bytes_per_s * self.share)

    def update_s(self, optimizer: Optimizer, chill: Callable[[], object]) -> Updates:
        return Updates(update_bytes(optimizer) / (self.file.first.bytes_per_s * self.share), 0.0, 0.0)

    def cluster(self, n_ranks: int, base_bytes: int) -> Cluster:
        return self.file.of(n_ranks, self.precision, self.threads, base_bytes, self.limit)

    def assumed(self, cluster: Cluster) -> Sequence[str]:
        device, file = cluster.devices[0], self.file
        kinds = ", ".join(dict.fromkeys(d.kind for d in cluster.devices))
        every, part = self.file.first.threads, ""
        if self.share < 1.0:
            part = f" with {self.threads}/{every} of its rates; set pipeline.threads={every} to use all"
        nodes = f"nodes: {len(set(cluster.node_of_rank))}"
        per_node = nodes if file.node_of_rank else f"ranks per node: {file.ranks_per_node}"
        return (
            f"assumed: {kinds}, threads: {self.threads}{part}",
            f"         {per_node}; {size_text(device.memory_bytes)} each",
            *([f"         links: {_links(cluster)}"] if cluster.links else []),
        )


_BETWEEN = {
    "core": "on a core",
    "numa": "in a NUMA domain",
    "node": "within a node",
    "switch": "between nodes",
}


def _links(cluster: Cluster) -> str:
    known = [level for level in LEVELS if level in cluster.links]
    return ", ".join(f"{_link(cluster.links[level])} {_BETWEEN[level]}" for level in known)


def _link(link: Link) -> str:
    return f"{link.latency_s * 1e6:.3g} us and {link.bytes_per_s / 1e9:.3g} GB/s"
