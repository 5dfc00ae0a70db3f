"""What loading costs: time where all cores are at work, as the thread that loads shares them with the step,
and memory on the ranks of the first stage and the last."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.launch import default_threads
from mpipipe.cluster.node import cores_available
from mpipipe.graph.cut import Code
from mpipipe.graph.variants import Variants
from mpipipe.ops.device import on_host
from mpipipe.runtime.feed import AHEAD, Data
from mpipipe.values import BatchBytes, Costs, Graph

_TIMES, _BUDGET_S = 3, 0.05
_STEPS = 2  # this one and the next: of those loaded before the forwards


def with_loading(
    costs: Costs, graph: Graph, data: Data, rows: int, comm: Communicator, threads: int
) -> Costs:
    """Adds what loading takes to the forward of the first group that reads the batch, and of the last: they
    are on the first stage and the last. Seconds of their keys, for `rows` samples. Not where a core is left
    for it, nor for data that cannot be asked for one micro-batch alone. Collective."""
    reads = _keys_of_groups(graph)
    if a_core_is_left(comm, threads) or not reads or not data.exact or data.varying:
        return costs
    first, last = min(reads), max(reads)
    if comm.size == 1 or first == last:
        reads = {first: frozenset().union(*reads.values())}
    groups = list(costs.groups)
    for group in {first, last} & reads.keys():
        loaded_s = min(comm.allgather_object(_seconds(data, rows, reads[group])))
        groups[group] = replace(groups[group], fwd_s=groups[group].fwd_s + loaded_s)
    return replace(costs, groups=tuple(groups))


def batch_bytes(variants: Variants, n_micro: int) -> BatchBytes:
    """Of steps of so many micro-batches. In main memory: nothing on an accelerator."""
    graph, inputs = variants.graph, variants.graph.inputs
    if not on_host():
        return BatchBytes()

    def nbytes(keys: Collection[str]) -> int:
        return sum(inputs[key].nbytes for key in keys)

    weight, reads = variants.weight("train", variants.first), _keys_of_groups(graph)
    before = frozenset(weight.inputs if isinstance(weight, Code) else ())
    last = reads.pop(len(graph.groups) - 1, frozenset()) - before
    first = frozenset().union(*reads.values()) | (inputs.keys() - last - before)
    return BatchBytes(
        (AHEAD + 1) * nbytes(first), (AHEAD + 1) * nbytes(last), _STEPS * n_micro * nbytes(before)
    )


def a_core_is_left(comm: Communicator, threads: int) -> bool:
    """For the loading thread of each rank, on every node. Collective."""
    own = cores_available()
    fewest = min(comm.allgather_object(len(own)))  # of a rank that is bound
    return min(default_threads(comm, own), fewest) > threads


def _keys_of_groups(graph: Graph) -> dict[int, frozenset[str]]:
    """The batch keys that each group reads; groups that read none are left out."""
    found: dict[int, frozenset[str]] = {}
    for node in graph.nodes:
        keys = graph.inputs.keys() & node.inputs
        if keys and node.group >= 0:
            found[node.group] = found.get(node.group, frozenset()) | keys
    return found


def _seconds(data: Data, rows: int, keys: frozenset[str]) -> float:
    """On the core. The first time is cold, and counts only where it takes long."""
    seconds: list[float] = []
    while len(seconds) < 1 + _TIMES and sum(seconds) < _BUDGET_S:
        start = time.thread_time()
        data.batch("train", 0, 0, rows, keys)
        seconds.append(time.thread_time() - start)
    return min(seconds)
