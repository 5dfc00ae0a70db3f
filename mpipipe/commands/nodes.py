"""Plans for several nodes that nobody has started ranks on, with any number of ranks on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from mpipipe.cluster.assumed import like_this_node
from mpipipe.commands.costing import Costing
from mpipipe.commands.inputs import model_of
from mpipipe.commands.machines import Here, Machine, There
from mpipipe.config import Config
from mpipipe.config.cluster import ClusterConfig
from mpipipe.data.base import Dataset
from mpipipe.graph.variants import Variants
from mpipipe.planner.per_node import Split, by_ranks_per_node
from mpipipe.runtime.setting import instruction_set
from mpipipe.values import Cluster, Prediction


class Nodes(Here):
    """Nodes with processors like this one's. ranks_on_each: changes as numbers are tried; node_bytes: memory
    of a node, None = what this one has left."""

    def __init__(self, config: Config, node_bytes: int | None) -> None:
        super().__init__(config, 1)
        self.ranks_on_each, self.node_bytes = 1, node_bytes

    def per_node(self) -> int:
        return self.ranks_on_each

    def cluster(self, n_ranks: int, base_bytes: int) -> Cluster:
        share = None if self.node_bytes is None else self.node_bytes // self.ranks_on_each
        return like_this_node(
            n_ranks, self.threads, instruction_set(), base_bytes, self.limit or share, self.ranks_on_each
        )


class Planned:
    """A config whose pipeline.threads is a number, until another one is made: threads are those of the
    process. ranks: for about which costs are taken; file: of the nodes, None = they are like this one;
    max_nodes: that may come, where pipeline.max_ranks does not say so; model: of `model_of`, taken once."""

    def __init__(
        self, config: Config, ranks: int, node_bytes: int | None = None, file: ClusterConfig | None = None,
        max_nodes: int | None = None, model: tuple[Callable[[int], Variants], Dataset] | None = None,
    ) -> None:  # fmt: skip
        variants_of, self.data = model or model_of(config)
        self.machine: Machine = There(config, file) if file else Nodes(config, node_bytes)
        self.costing = Costing(config, self.machine, ranks, variants_of)
        self.costing.usual()  # and the memory of a process that has captured the model
        self._spares = config.run.spares
        self._max_nodes = max_nodes if config.pipeline.max_ranks is None else None

    def prediction(self, nodes: int, per_node: int) -> Prediction:
        """Of the best plan, but for spares. Raises PlanError, DeadlockError."""
        cluster_of = self.cluster_with(per_node)
        return self.costing.prediction_on(cluster_of(max(1, per_node * nodes - self._spares)))

    def by_ranks_per_node(self, nodes: int, most: int) -> dict[int, Prediction]:
        """See `planner.per_node`."""
        return by_ranks_per_node(lambda per_node: self.prediction(nodes, per_node), most)

    def cluster_with(self, per_node: int) -> Callable[[int], Cluster]:
        """Of a number of ranks."""
        if isinstance(self.machine, Nodes):
            self.machine.ranks_on_each = per_node
        if self._max_nodes:
            self.costing.max_ranks = self._max_nodes * per_node
        return lambda n_ranks: self.machine.cluster(n_ranks, self.costing.base_bytes)


def by_split(
    config: Config, found: Sequence[Split], ranks: int, node_bytes: int | None = None,
    max_nodes: int | None = None,
) -> Iterator[tuple[Split, Planned]]:  # fmt: skip
    """On costs of each number of threads, timed here; each `Planned`, see there, until the next one."""
    variants_of, data = model_of(config)
    model = cache(variants_of), data
    for split in found:
        own = config.with_pipeline(threads=split.threads)
        yield split, Planned(own, ranks, node_bytes, None, max_nodes, model)


def fastest(predictions: Mapping[int, Prediction]) -> int:
    """Ranks per node; of equal ones the fewest."""
    return min(predictions, key=lambda n: (predictions[n].step_s, n))
