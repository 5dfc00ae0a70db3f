"""The placement of operators on devices, stated in plain values, and its objective in plain Python.

The throughput problem of Tarnawski et al., *Efficient Algorithms for Device Placement of DNN Graph Operators*
(NeurIPS 2020): of all ways to give operators to devices, the one whose most loaded device is loaded least.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpipipe.errors import PlanError
from mpipipe.planner.sizes import counted
from mpipipe.values import Value


@dataclass(frozen=True)
class Operator(Value):
    """One node of the graph. Seconds and bytes are those of one sample."""

    id: int | str  # as the file has it
    name: str
    accelerator_s: float  # inf: it cannot run there
    cpu_s: float
    nbytes: float  # that it takes of an accelerator's memory
    output_s: float  # to move its output into or out of an accelerator
    together: int | None = None  # operators with the same number share a device; None: alone
    backward: bool = False


@dataclass(frozen=True)
class Problem(Value):
    """Operators, who reads whose output, and the devices: accelerators that are all alike, then CPUs, which
    have no limit of memory and pay nothing for communication."""

    operators: tuple[Operator, ...]
    edges: tuple[tuple[int, int], ...]  # (source, reader), positions in `operators`; without a cycle
    n_accelerators: int
    n_cpus: int
    capacity_bytes: float  # of each accelerator

    @property
    def n_devices(self) -> int:
        return self.n_accelerators + self.n_cpus


@dataclass(frozen=True)
class Loads(Value):
    """By device: accelerators, then CPUs."""

    compute_s: tuple[float, ...]
    communication_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]

    @property
    def total_s(self) -> tuple[float, ...]:
        return tuple(a + b for a, b in zip(self.compute_s, self.communication_s, strict=True))

    @property
    def most_s(self) -> float:
        """The objective."""
        return max(self.total_s)


def loads(problem: Problem, device_of: Sequence[int]) -> Loads:
    """What each device has to do; `device_of`: by operator.

    An accelerator pays for the output of each of its operators that another device reads, once, and once for
    each output of another device that it reads itself.
    """
    compute, communication, memory = ([0.0] * problem.n_devices for _ in range(3))
    readers: list[set[int]] = [set() for _ in problem.operators]
    for source, reader in problem.edges:
        readers[source].add(device_of[reader])
    for operator, device, reading in zip(problem.operators, device_of, readers, strict=True):
        accelerated = device < problem.n_accelerators
        compute[device] += operator.accelerator_s if accelerated else operator.cpu_s
        memory[device] += operator.nbytes
        elsewhere = reading - {device}
        for payer in elsewhere | {device} if elsewhere else ():
            if payer < problem.n_accelerators:
                communication[payer] += operator.output_s
    return Loads(tuple(compute), tuple(communication), tuple(memory))


def gap(load_s: float, bound_s: float) -> float:
    """How far a load is above its bound, relative; inf: the bound is 0 and the load is not."""
    if load_s <= bound_s:
        return 0.0
    return load_s / bound_s - 1.0 if bound_s else math.inf


def is_contiguous(problem: Problem, device_of: Sequence[int]) -> bool:
    """Whether the devices can be put in an order in which no edge of `ordering_edges` goes back."""
    edges = {(device_of[a], device_of[b]) for a, b in ordering_edges(problem)}
    return find_cycle(problem.n_devices, [(a, b) for a, b in edges if a != b]) is None


def ordering_edges(problem: Problem) -> list[tuple[int, int]]:
    """What orders contiguous devices: forward edges.

    Backward operators follow by sharing the device of a forward one. The backward edges of those that share
    with none count in reverse, for backward goes through the devices from the last to the first.
    """
    ops = problem.operators
    with_forward = {o.together for o in ops if not o.backward and o.together is not None}
    alone = [o.backward and o.together not in with_forward for o in ops]
    edges = [(a, b) for a, b in problem.edges if not (ops[a].backward or ops[b].backward)]
    return edges + [
        (b, a) for a, b in problem.edges if ops[a].backward and ops[b].backward and (alone[a] or alone[b])
    ]


def topological(n: int, edges: Sequence[tuple[int, int]], priority: Sequence[float]) -> list[int]:
    """An order of a graph: of the nodes that may come next, the one of the smallest priority. Without those
    on a cycle, or behind one."""
    following: list[list[int]] = [[] for _ in range(n)]
    entering = [0] * n
    for a, b in edges:
        following[a].append(b)
        entering[b] += 1
    ready = [(priority[v], v) for v in range(n) if not entering[v]]
    heapq.heapify(ready)
    order = []
    while ready:
        v = heapq.heappop(ready)[1]
        order.append(v)
        for w in following[v]:
            entering[w] -= 1
            if not entering[w]:
                heapq.heappush(ready, (priority[w], w))
    return order


def find_cycle(n: int, edges: Sequence[tuple[int, int]]) -> list[int] | None:
    """Nodes of one cycle of a directed graph, in its order from the smallest; None if there is none."""
    stuck = {*range(n)} - {*topological(n, edges, range(n))}
    if not stuck:
        return None
    before = {b: a for a, b in edges if a in stuck and b in stuck}
    path, place = [min(stuck)], {min(stuck): 0}
    while (v := before[path[-1]]) not in place:  # each stuck node has a stuck one before it
        place[v] = len(path)
        path.append(v)
    cycle = path[place[v] :][::-1]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]


def check(problem: Problem, source: str) -> None:
    """Raises PlanError where the devices or the graph cannot be; `source` names it."""
    if not problem.operators:
        raise PlanError(f"{source}: the graph has no node; give 1 at least")
    for what, count, least in (("--devices", problem.n_accelerators, 1), ("CPUs", problem.n_cpus, 0)):
        if count < least:
            raise PlanError(f"{source}: {what} {count}; give {least} at least")
    if not problem.capacity_bytes >= 0:
        raise PlanError(f"{source}: memory {problem.capacity_bytes}; give bytes, or a size such as 16 GiB")
    if cycle := find_cycle(len(problem.operators), problem.edges):
        names = [str(problem.operators[v].name) for v in [*cycle, cycle[0]]]
        text = " -> ".join(names if len(names) <= 12 else [*names[:6], "...", *names[-5:]])
        raise PlanError(
            f"{source}: the graph has a cycle of {counted(len(cycle), 'node')}, {text}; take one of "
            "its edges out"
        )
