"""Ranks that nobody has started: as many as asked for, each like this process, on nodes like this one."""

from __future__ import annotations

import os

from mpipipe.cluster.node import cores_available, memory_available_bytes, processor
from mpipipe.values import Cluster, Device, Link

# Two ranks of a node through shared memory, as Open MPI moves them here; two nodes over 10 Gb/s Ethernet
LINKS = {"node": Link(2e-6, 9e9), "switch": Link(10e-6, 1.2e9)}


def ranks_per_node(threads: int) -> int:
    """That have their cores to themselves."""
    return max(1, len(cores_available()) // threads)


def like_this_node(
    n_ranks: int,
    threads: int,
    instruction_set: str,
    base_bytes: int,
    memory_bytes: int | None,
    per_node: int | None = None,
) -> Cluster:
    """base_bytes: taken on each rank before any weight; memory_bytes: limit per rank, None = its share
    of what this node has left; per_node: ranks, None = as many as have their cores to themselves."""
    per_node = per_node or ranks_per_node(threads)
    on_node = min(n_ranks, per_node)
    memory = memory_bytes or memory_available_bytes(os.environ) // on_node + base_bytes
    device = Device(f"{processor()}, {instruction_set}", 1.0, memory, threads, base_bytes)
    return Cluster((device,) * n_ranks, tuple(rank // per_node for rank in range(n_ranks)), LINKS)
