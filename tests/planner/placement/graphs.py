"""Graphs like those people place: chains of small operators, wide cells, grids; and tiny random ones.

A `Drawn` graph has one node per operator; `items` makes of it what the compiled solver takes: one item per
co-location class, precedence from forward edges, one tensor per node with consumers.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from numpy.random import Generator, default_rng

GIB = float(2**30)


@dataclasses.dataclass
class Drawn:
    """Grows node by node; times are milliseconds, an edge costs what its source's tensor costs."""

    rng: Generator
    accelerator_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    nbytes: list[float] = dataclasses.field(default_factory=list)
    tensor_cost: list[float] = dataclasses.field(default_factory=list)  # of each node's output
    colour: list[int] = dataclasses.field(default_factory=list)
    backward: list[bool] = dataclasses.field(default_factory=list)
    edges: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def node(
        self, seconds: float, cost: float, *sources: int, nbytes: float = 1e6, spread: float = 0.1
    ) -> int:
        """One more node after `sources`; `seconds` and `cost` vary by `spread`."""
        index = len(self.accelerator_s)
        seconds *= 1 + spread * self.rng.uniform(-1, 1)
        self.accelerator_s.append(seconds)
        self.cpu_s.append(seconds * self.rng.uniform(8, 25))
        self.nbytes.append(nbytes)
        self.tensor_cost.append(cost * (1 + spread * self.rng.uniform(-1, 1)))
        self.colour.append(index)
        self.backward.append(False)
        self.edges.extend((source, index) for source in sources)
        return index

    def weight(self, cost: float, nbytes: float) -> int:
        return self.node(0.0, cost, nbytes=nbytes)

    def with_backward(self, share: float = 1.0) -> Drawn:
        """A training graph: a twin of every node (of `share` of them) in its class, edges reversed between
        twins, the activation of a node also read by its consumers' twins."""
        forward = list(self.edges)
        twin = {}
        for node in range(len(self.accelerator_s)):
            if self.rng.uniform() < share:
                index = self.node(
                    2 * self.accelerator_s[node], self.tensor_cost[node], nbytes=self.nbytes[node]
                )
                self.colour[index], self.backward[index] = node, True
                twin[node] = index
        for source, dest in forward:
            if dest in twin:
                self.edges.append((source, twin[dest]))
            if source in twin and dest in twin:
                self.edges.append((twin[dest], twin[source]))
        return self


def bert_operators(layers: int, seed: int = 0, weights: bool = True, casts: bool = False) -> Drawn:
    """Operators of an encoder: small operators around dear tensors, weights (cast first) beside them."""
    g = Drawn(default_rng(seed))

    def parameter(cost: float, nbytes: float) -> tuple[int, ...]:
        if not weights:
            return ()
        source = g.weight(cost, nbytes)
        return (g.node(0.05 * cost, cost / 2, source, nbytes=nbytes / 2),) if casts else (source,)

    def linear(x: int, seconds: float, cost: float) -> int:
        y = g.node(seconds, cost, x, *parameter(0.1 * cost, 4e6))
        return g.node(0.05, cost, y, *parameter(0.001, 4e3))

    def norm(x: int) -> int:
        inner = g.node(0.2, 0.7, x, *parameter(0.001, 4e3), *parameter(0.001, 4e3))
        return g.node(0.0, 0.0, inner) and inner

    mask = g.node(0.02, 0.05, g.weight(0.01, 1e3))
    x = norm(g.node(0.3, 0.7, g.weight(1.0, 9e7), g.weight(0.01, 1e3)))
    for _ in range(layers):
        q, k, v = (g.node(0.05, 0.7, g.node(0.02, 0.7, linear(x, 0.5, 0.7))) for _ in range(3))
        scores = g.node(0.4, 5.0, g.node(0.5, 5.0, q, k), mask)
        probabilities = g.node(0.4, 5.0, g.node(0.6, 5.0, scores))
        context = g.node(0.02, 0.7, g.node(0.05, 0.7, g.node(0.5, 0.7, probabilities, v)))
        x = norm(g.node(0.05, 0.7, linear(context, 0.5, 0.7), x))
        hidden = g.node(2.3, 23.0, linear(x, 1.1, 23.0))
        x = norm(g.node(0.05, 0.7, linear(hidden, 1.1, 0.7), x))
    pooled = linear(g.node(0.01, 0.01, x), 0.1, 0.01)
    logits = linear(norm(g.node(0.3, 0.7, linear(x, 0.5, 0.7))), 8.0, 20.0)
    g.node(0.1, 0.0, g.node(1.0, 20.0, logits), linear(pooled, 0.01, 0.01))
    return g


def residual_network(blocks: int, seed: int = 0, per_block: int = 10) -> Drawn:
    """Bottleneck blocks of small operators: a chain, a shortcut beside it, sometimes with a projection."""
    g = Drawn(default_rng(seed))
    x = g.node(2.0, 4.0)
    for block in range(blocks):
        shrink = 1 / (1 + 3 * block / blocks)
        shortcut, y = x, x
        if block % 4 == 0:
            shortcut = g.node(0.3, 4 * shrink, g.node(0.8, 4 * shrink, x, g.weight(0.05, 1e6)))
        for step in range(per_block):
            sources = (y, g.weight(0.05, 1e6)) if step % 3 == 0 else (y,)
            y = g.node(1.0 if step % 3 == 0 else 0.2, 4 * shrink, *sources)
        x = g.node(0.1, 4 * shrink, g.node(0.2, 4 * shrink, y, shortcut))
    g.node(0.5, 0.0, x)
    return g


def inception(cells: int, branches: int, length: int, seed: int = 0, communication: float = 0.5) -> Drawn:
    """Cells of parallel branches of different lengths that meet again."""
    g = Drawn(default_rng(seed))
    x = g.node(1.0, communication, g.node(2.0, communication))
    for _ in range(cells):
        ends = []
        for branch in range(branches):
            y = x
            for _ in range(1 + branch * length // branches):
                y = g.node(g.rng.uniform(0.1, 2.0), communication * g.rng.uniform(0.2, 1.0), y)
            ends.append(y)
        x = g.node(0.1, communication, *ends)
    g.node(1.0, 0.0, x)
    return g


def grid(layers: int, steps: int, seed: int = 0, communication: float = 0.2) -> Drawn:
    """Recurrent layers unrolled in time: a node waits for the layer below and for the step before."""
    g = Drawn(default_rng(seed))
    below: list[int] = [g.node(0.2, communication) for _ in range(steps)]
    for _ in range(layers):
        last: tuple[int, ...] = ()
        row = []
        for t in range(steps):
            row.append(g.node(1.0, communication, below[t], *last))
            last = (row[-1],)
        below = row
    g.node(1.0, 0.0, *below)
    return g


def recurrent(layers: int, seed: int = 0, communication: float = 0.006) -> Drawn:
    """Layers of an encoder and a decoder as nodes: heavy cells, beside them much that takes no time (states
    that are taken out, residual sums), and an attention that every decoder layer reads."""
    g = Drawn(default_rng(seed))
    x = g.node(0.14, communication, g.node(0.0, 0.0))
    attention: tuple[int, ...] = ()
    for layer in range(2 * layers):
        state = (g.node(0.0, 0.0, g.node(0.0, 0.0)),) if attention else ()
        y = g.node(0.0, communication, g.node(0.12, communication, x), *attention)
        y = g.node(10.6 if attention else 6.9, communication, y, *state)
        y, rest = g.node(0.0, communication, y), g.node(0.0, communication / 25, y)
        x = g.node(0.0, communication, y, x)
        if layer == layers - 1:
            attention = (rest,)
    g.node(24.8, 0.0, x)
    return g


def parallel_chains(
    chains: int, length: int, seed: int = 0, communication: float = 0.3, rungs: int = 0
) -> Drawn:
    """Long chains side by side, as an encoder and a decoder, with attention between (`rungs`)."""
    g = Drawn(default_rng(seed))
    start = g.node(1.0, communication)
    rows = []
    for _ in range(chains):
        rows.append([start])
        for _ in range(length):
            rows[-1].append(
                g.node(g.rng.uniform(0.3, 1.5), communication * g.rng.uniform(0.3, 1), rows[-1][-1])
            )
    for (a, b), place in itertools.product(itertools.pairwise(rows), range(1, rungs + 1)):
        at = place * length // (rungs + 1)
        g.edges.append((a[at], b[at + 1]))
    g.node(1.0, 0.0, *(row[-1] for row in rows))
    return g


def items(graph: Drawn, n_devices: int, n_cpus: int = 0, capacity: float = 16 * GIB) -> dict:
    """The arguments of the compiled solver, without budget. Forward nodes are drawn in topological order, and
    so are their classes: each begins with its forward node."""
    classes, item = np.unique(graph.colour, return_inverse=True)
    consumers: dict[int, set[int]] = {}
    for source, dest in graph.edges:
        consumers.setdefault(source, set()).add(int(item[dest]))
    tensors = [
        (graph.tensor_cost[source], sorted({int(item[source]), *dests}))
        for source, dests in consumers.items()
    ]
    edges = {
        (int(item[a]), int(item[b]))
        for a, b in graph.edges
        if not graph.backward[a] and not graph.backward[b]
    }
    return arguments(
        *(np.bincount(item, x, len(classes)) for x in (graph.accelerator_s, graph.cpu_s, graph.nbytes)),
        sorted(edges),
        tensors,
        n_devices,
        n_cpus,
        capacity,
    )


def arguments(accelerator_s, cpu_s, nbytes, edges, tensors, n_devices, n_cpus, capacity) -> dict:
    tensors = [(cost, pins) for cost, pins in tensors if len(pins) > 1]
    ends = np.array(edges, np.int32).reshape(-1, 2)
    return {
        "n_devices": n_devices,
        "n_cpus": n_cpus,
        "accelerator_s": np.asarray(accelerator_s, float),
        "cpu_s": np.asarray(cpu_s, float),
        "nbytes": np.asarray(nbytes, float),
        "capacity": float(capacity),
        "edge_source": np.ascontiguousarray(ends[:, 0]),
        "edge_dest": np.ascontiguousarray(ends[:, 1]),
        "tensor_cost": np.array([cost for cost, _ in tensors], float),
        "pin_start": np.cumsum([0, *(len(pins) for _, pins in tensors)]).astype(np.int32),
        "pins": np.array([pin for _, pins in tensors for pin in pins], np.int32),
    }


def tiny(seed: int, largest: int = 8) -> dict:
    """A random problem small enough to try every placement, of every kind: tight memory, CPUs, items that
    only one kind of device supports, times of zero, tensors that cost more than the work."""
    rng = default_rng(seed)
    n = int(rng.integers(2, largest + 1))
    n_devices, n_cpus = [(1, 0), (2, 0), (3, 0), (2, 1), (1, 1), (1, 2), (0, 2), (3, 1)][int(rng.integers(8))]
    accelerator_s, cpu_s = rng.integers(0, 8, n).astype(float), rng.integers(0, 30, n).astype(float)
    if rng.uniform() < 0.25:
        accelerator_s[rng.uniform(size=n) < 0.2] = np.inf
        cpu_s[rng.uniform(size=n) < 0.3] = np.inf
    nbytes = rng.integers(0, 10, n).astype(float)
    density = rng.uniform(0.1, 0.7)
    edges = [pair for pair in itertools.combinations(range(n), 2) if rng.uniform() < density]
    dearest = float(rng.choice([0.5, 3, 12]))
    tensors = []
    for source in range(n):
        pins = {source, *(b for a, b in edges if a == source), *(int(x) for x in rng.integers(0, n, 1))}
        tensors.append((round(float(rng.uniform(0, dearest)), 2), sorted(pins)))
    capacity = nbytes.sum() * rng.choice([0.35, 0.6, 1.1])
    return arguments(accelerator_s, cpu_s, nbytes, edges, tensors, n_devices, n_cpus, capacity)
