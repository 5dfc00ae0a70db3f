"""Random problems of placement, and the optimum by trying everything."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np

from mpipipe.planner.placement import Operator, Problem


def random_problem(seed: int, most_nodes: int = 12, most_placements: int = 20_000) -> Problem:
    """A small graph with communication, sometimes with CPUs, tight memory, co-location, a backward half,
    nodes that accelerators cannot run; few enough items that all placements can be tried."""
    rng = random.Random(seed)
    n_accelerators, n_cpus = rng.randint(1, 3), rng.choice([0, 0, 1])
    n = rng.randint(1, most_nodes)
    training = rng.random() < 0.4 and n > 1
    n_forward = (n + 1) // 2 if training else n
    while (n_accelerators + n_cpus) ** n_forward > most_placements:
        n_forward -= 1
    density = rng.choice([0.15, 0.3, 0.6])
    forward = [(a, b) for b in range(n_forward) for a in range(b) if rng.random() < density]
    edges, together = list(forward), [None] * n_forward
    if training:  # twins, of which the last may live alone
        edges += [(2 * n_forward - 1 - b, 2 * n_forward - 1 - a) for a, b in forward]
        edges += [(v, 2 * n_forward - 1 - v) for v in range(n_forward) if rng.random() < 0.5]
        together = [*range(n_forward), *reversed(range(n_forward))]
        if rng.random() < 0.5:
            together[-1] = None
    elif rng.random() < 0.5:  # classes that may be tangled
        together = [rng.choice([None, None, 0, 1]) for _ in range(n_forward)]
    operators = tuple(
        Operator(
            id=100 + v,
            name=f"node{v}",
            accelerator_s=math.inf if n_cpus and rng.random() < 0.1 else float(rng.randint(0, 9)),
            cpu_s=float(rng.randint(0, 25)),
            nbytes=float(rng.randint(0, 6)),
            output_s=float(rng.choice([0, 1, 1, 2, 5])),
            together=together[v],
            backward=v >= n_forward,
        )
        for v in range(len(together))
    )
    total = sum(operator.nbytes for operator in operators)
    capacity = rng.choice([math.inf, math.ceil(total / n_accelerators) + rng.randint(0, 4)])
    renamed = list(range(len(operators)))
    rng.shuffle(renamed)  # the order of a file need not be topological
    shuffled: list[Operator] = list(operators)
    for v, place in enumerate(renamed):
        shuffled[place] = operators[v]
    ends = tuple((renamed[a], renamed[b]) for a, b in edges)
    return Problem(tuple(shuffled), ends, n_accelerators, n_cpus, float(capacity))


def brute_force_s(problem: Problem, contiguous: bool) -> float:
    """The optimum over every placement; inf: none fits."""
    device = _placements(problem)
    k, n = problem.n_accelerators, len(problem.operators)
    most = np.zeros(len(device))
    for d in range(problem.n_devices):
        held = device == d
        load = np.zeros(len(device))
        for v, operator in enumerate(problem.operators):
            seconds = operator.accelerator_s if d < k else operator.cpu_s
            load += np.where(held[:, v], seconds, 0.0)
            readers = [b for a, b in problem.edges if a == v]
            if d < k and readers:
                some, every = held[:, readers].any(1), held[:, readers].all(1)
                load += operator.output_s * np.where(held[:, v], ~every, some)
        if d < k:
            memory = held @ np.array([operator.nbytes for operator in problem.operators])
            load[memory > problem.capacity_bytes] = np.inf
        most = np.maximum(most, load)
    if contiguous:
        most[_tangled(problem, device)] = np.inf
    assert device.shape[1] == n
    return float(most.min())


def _placements(problem: Problem) -> np.ndarray:
    """(placements, operators): the device of each, co-located ones alike."""
    classes: dict[object, int] = {}
    class_of = [
        classes.setdefault(("alone", v) if o.together is None else o.together, len(classes))
        for v, o in enumerate(problem.operators)
    ]
    every = np.array(list(itertools.product(range(problem.n_devices), repeat=len(classes))))
    return every[:, class_of]


def _tangled(problem: Problem, device: np.ndarray) -> np.ndarray:
    """Placements whose devices have no order: edges lead from one back to it."""
    count, ops = problem.n_devices, problem.operators
    reach = np.zeros((len(device), count, count), bool)
    rows = np.arange(len(device))
    follows = [any(not p.backward and p.together == o.together is not None for p in ops) for o in ops]
    for a, b in problem.edges:
        if ops[a].backward and ops[b].backward and not (follows[a] and follows[b]):
            a, b = b, a  # backward goes the other way
        elif ops[a].backward or ops[b].backward:
            continue
        reach[rows, device[:, a], device[:, b]] |= device[:, a] != device[:, b]
    for via in range(count):
        reach |= reach[:, :, via, None] & reach[:, None, via, :]
    return reach[:, range(count), range(count)].any(1)
