"""How many ranks to put on each node, of nodes whose processor is that of this one."""

from __future__ import annotations

from mpipipe.cluster.assumed import like_this_node
from mpipipe.commands.costing import Costing
from mpipipe.commands.inputs import model_of
from mpipipe.commands.machines import Here
from mpipipe.config import Config
from mpipipe.planner.per_node import by_ranks_per_node
from mpipipe.runtime.setting import instruction_set
from mpipipe.values import Cluster, Prediction


class Nodes(Here):
    """ranks_on_each: changes as numbers are tried. node_bytes: memory of a node, None = what this one has
    left."""

    def __init__(self, config: Config, node_bytes: int | None = None) -> None:
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
    """A config whose pipeline.threads is a number, planned for several nodes."""

    def __init__(self, config: Config, nodes: int, node_bytes: int | None = None) -> None:
        variants_of, self.data = model_of(config)
        self.nodes, self.machine = nodes, Nodes(config, node_bytes)
        self.costing = Costing(config, self.machine, nodes, variants_of)

    def by_ranks_per_node(self, most: int) -> dict[int, Prediction]:
        """See `planner.per_node`."""
        self.costing.usual()  # and the memory of a process that has captured the model
        return by_ranks_per_node(self.costing.prediction_on, self._with, most)

    def _with(self, per_node: int) -> Cluster:
        self.machine.ranks_on_each = per_node
        return self.machine.cluster(self.nodes * per_node, self.costing.base_bytes)
