"""What is placed: operators that have to share a device are one item, and every output is a hyperedge.

A device pays for a tensor once if it holds some but not all of its pins (the one who makes it, and its
readers): this is the objective of `problem.loads` without the distinction of sending and receiving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mpipipe.planner.placement.problem import Problem, ordering_edges, topological
from mpipipe.values import Float64, Int32


@dataclass(frozen=True, eq=False)
class Items:
    """n items in a topological order, t tensors."""

    of_operator: Int32  # (operators,)
    accelerator_s: Float64  # (n,); inf: cannot run there
    cpu_s: Float64  # (n,)
    nbytes: Float64  # (n,)
    edge_source: Int32  # (e,) precedence: source < dest
    edge_dest: Int32
    tensor_s: Float64  # (t,)
    pin_start: Int32  # (t + 1,): the pins of tensor t are pins[pin_start[t] : pin_start[t + 1]]
    pins: Int32  # ascending within a tensor

    def __len__(self) -> int:
        return len(self.accelerator_s)

    def tensors(self) -> list[Int32]:
        """The pins of each."""
        return np.split(self.pins, self.pin_start[1:-1]) if len(self.tensor_s) else []


def contract(problem: Problem, contiguous: bool) -> Items:
    """With `contiguous`, items that lie on a cycle of edges are one too, for no order of the devices
    can part them. Without, they stay apart, and precedence is only what the order of items keeps of it."""
    groups = _groups(problem)
    n = int(groups.max()) + 1
    ahead = {(int(groups[a]), int(groups[b])) for a, b in ordering_edges(problem)}
    rows, columns = np.array(sorted(ahead), np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(n, n))
    knots = connected_components(graph, directed=True, connection="strong")[1]
    first = np.full(n, len(groups))
    np.minimum.at(first, groups, np.arange(len(groups)))  # ties of the order go by the order of the file
    knot_first = np.full(n, len(groups))
    np.minimum.at(knot_first, knots, first)
    between = {(int(knots[a]), int(knots[b])) for a, b in ahead if knots[a] != knots[b]}
    order = topological(int(knots.max()) + 1, sorted(between), knot_first.tolist())
    place = np.argsort(order).astype(np.int32)  # of a knot
    if contiguous:
        return _items(problem, place[knots][groups], between, place)
    place = np.argsort(np.lexsort((first, place[knots]))).astype(np.int32)  # of a group
    return _items(problem, place[groups], {(a, b) for a, b in ahead if place[a] < place[b]}, place)


def _groups(problem: Problem) -> Int32:
    """By operator, the number of its co-location class."""
    known: dict[tuple[bool, int], int] = {}
    keys = [
        (True, position) if operator.together is None else (False, operator.together)
        for position, operator in enumerate(problem.operators)
    ]
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int32)


def _items(problem: Problem, of_operator: Int32, edges: set[tuple[int, int]], place: Int32) -> Items:
    n = int(of_operator.max()) + 1

    def total(field: str) -> Float64:
        values = np.array([getattr(operator, field) for operator in problem.operators], float)
        return np.bincount(of_operator, values, n).astype(np.float64)

    tensors = _tensors(problem, of_operator.tolist())
    sizes = [len(pins) for pins in tensors]
    ordered = place[np.array(sorted(edges), np.int64).reshape(-1, 2)]
    return Items(
        of_operator=of_operator,
        accelerator_s=total("accelerator_s"),
        cpu_s=total("cpu_s"),
        nbytes=total("nbytes"),
        edge_source=ordered[:, 0].copy(),
        edge_dest=ordered[:, 1].copy(),
        tensor_s=np.array(list(tensors.values()), float),
        pin_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        pins=np.array([pin for pins in tensors for pin in pins], np.int32),
    )


def _tensors(problem: Problem, of_operator: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Seconds by pins; tensors with the same pins are one, and one that stays within an item is none."""
    pins = [{item} for item in of_operator]
    for source, reader in problem.edges:
        pins[source].add(of_operator[reader])
    found: dict[tuple[int, ...], float] = {}
    for operator, held in zip(problem.operators, pins, strict=True):
        if len(held) > 1 and operator.output_s:
            key = tuple(sorted(held))
            found[key] = found.get(key, 0.0) + operator.output_s
    return found
