"""The compiled placement solver against trying every placement, and on graphs of the size people have."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from graphs import arguments, bert_operators, grid, inception, items, parallel_chains, residual_network, tiny

from mpipipe.planner.native import compiled

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled planner is not built")
NOWHERE = np.array([], np.int32)
BUDGET = {"budget_s": 60.0, "live_limit": 1_000_000}


def tensors_of(problem: dict) -> list[tuple[float, list[int]]]:
    starts = itertools.pairwise(problem["pin_start"])
    return [
        (cost, list(problem["pins"][a:b])) for cost, (a, b) in zip(problem["tensor_cost"], starts, strict=True)
    ]


def most_loaded(problem: dict, device: np.ndarray) -> float:
    """The objective, said once more: what each device takes; infinite where memory or kind does not do."""
    k = problem["n_devices"]
    load = [0.0] * (k + problem["n_cpus"])
    held = [0.0] * len(load)
    for item, d in enumerate(device):
        load[d] += problem["accelerator_s" if d < k else "cpu_s"][item]
        held[d] += problem["nbytes"][item]
    for cost, pins in tensors_of(problem):
        holders = {int(device[pin]) for pin in pins}
        if len(holders) > 1:
            for d in holders:
                load[d] += cost if d < k else 0
    return math.inf if any(bytes_ > problem["capacity"] for bytes_ in held[:k]) else max(load)


def is_contiguous(problem: dict, device: np.ndarray) -> bool:
    """No cycle between devices: repeatedly take away a device that no other one must precede."""
    arrows = {(int(device[a]), int(device[b])) for a, b in edges_of(problem) if device[a] != device[b]}
    while arrows:
        sources = {a for a, _ in arrows} - {b for _, b in arrows}
        if not sources:
            return False
        arrows = {(a, b) for a, b in arrows if a not in sources}
    return True


def edges_of(problem: dict) -> list[tuple[int, int]]:
    return list(zip(problem["edge_source"], problem["edge_dest"], strict=True))


def all_placements(problem: dict):
    """Accelerators are alike, and so are CPUs: the first item of each comes in the order of their numbers."""
    k, n_cpus, n = problem["n_devices"], problem["n_cpus"], len(problem["cpu_s"])

    def extend(device, accelerators, cpus):
        if len(device) == n:
            yield device
            return
        for d in range(min(accelerators + 1, k)):
            yield from extend([*device, d], max(accelerators, d + 1), cpus)
        for d in range(min(cpus + 1, n_cpus)):
            yield from extend([*device, k + d], accelerators, max(cpus, d + 1))

    yield from extend([], 0, 0)


def optima(problem: dict) -> tuple[float, float]:
    """(contiguous, any): the least loads of all placements."""
    contiguous = best = math.inf
    for device in all_placements(problem):
        load = most_loaded(problem, device)
        best = min(best, load)
        if load < contiguous and is_contiguous(problem, device):
            contiguous = load
    return contiguous, best


def check_contiguous(problem: dict, optimum: float) -> None:
    found = compiled.solve_contiguous(**problem, **BUDGET)
    if math.isinf(optimum):
        assert found["status"] == "infeasible"
        return
    assert found["status"] == "placed"
    assert found["load"] == pytest.approx(optimum, rel=1e-8)
    assert found["bound"] == found["load"]
    assert most_loaded(problem, found["device"]) == pytest.approx(found["load"], rel=1e-12)
    assert is_contiguous(problem, found["device"])


def check_chunks(problem: dict, optimum: float) -> None:
    found = compiled.solve_chunks(**problem, **BUDGET, seed=1, start=NOWHERE)
    if math.isinf(optimum):
        assert found["status"] in ("infeasible", "budget")
        return
    assert found["status"] == "placed"
    assert found["load"] == pytest.approx(optimum, rel=2e-6)
    assert found["bound"] <= optimum * (1 + 1e-12)
    assert most_loaded(problem, found["device"]) == pytest.approx(found["load"], rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_tiny(seed):
    problem = tiny(seed, largest=6)
    contiguous, best = optima(problem)
    check_contiguous(problem, contiguous)
    check_chunks(problem, best)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(500))
def test_small(seed):
    problem = tiny(1000 + seed, largest=9)
    contiguous, best = optima(problem)
    check_contiguous(problem, contiguous)
    check_chunks(problem, best)
