"""The compiled placement solver against trying every placement, and on graphs of the size people have."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from graphs import (
    arguments,
    bert_operators,
    grid,
    inception,
    items,
    parallel_chains,
    recurrent,
    residual_network,
    tiny,
)

from mpipipe.planner.native import compiled

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled planner is not built")
NOWHERE = np.array([], np.int32)
BUDGET = {"budget_s": 300.0, "live_limit": 1_000_000}


def tensors_of(problem: dict) -> list[tuple[float, list[int]]]:
    starts = itertools.pairwise(problem["pin_start"])
    return [
        (cost, list(problem["pins"][a:b]))
        for cost, (a, b) in zip(problem["tensor_cost"], starts, strict=True)
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


LARGE = {
    "bert 3": (bert_operators(3), 3, 1),
    "bert 3 training": (bert_operators(3).with_backward(), 8, 1),
    "bert 6, casts": (bert_operators(6, casts=True), 3, 0),
    "bert 6, casts, training": (bert_operators(6, casts=True).with_backward(), 6, 1),
    "residual": (residual_network(16), 8, 1),
    "inception": (inception(9, 4, 5), 6, 1),
    "inception training": (inception(9, 4, 5).with_backward(), 4, 0),
    "grid": (grid(8, 4), 6, 1),
    "grid training": (grid(12, 3).with_backward(), 4, 1),
    "chains": (parallel_chains(2, 40, rungs=2), 4, 1),
    "recurrent training": (recurrent(8).with_backward(), 6, 1),
    "inception, cheap tensors": (inception(11, 5, 9, communication=0.03), 6, 1),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_ones_are_proven(name):
    graph, n_devices, n_cpus = LARGE[name]
    problem = items(graph, n_devices, n_cpus)
    found = compiled.solve_contiguous(**problem, **BUDGET)
    assert (found["status"], found["bound"]) == ("placed", found["load"])
    assert most_loaded(problem, found["device"]) == pytest.approx(found["load"], rel=1e-12)
    assert is_contiguous(problem, found["device"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("graph", "n_devices"),
    [
        (bert_operators(12, casts=True).with_backward(), 6),
        (residual_network(50, per_block=15).with_backward(), 8),
        (inception(11, 5, 6), 6),
        (inception(30, 4, 6).with_backward(), 8),
        (inception(80, 5, 9), 4),
        (inception(80, 5, 9), 8),
        (recurrent(20).with_backward(), 6),
    ],
)
def test_two_thousand_nodes_are_proven(graph, n_devices):
    found = compiled.solve_contiguous(**items(graph, n_devices, 1), **BUDGET)
    assert (found["status"], found["bound"]) == ("placed", found["load"])


@pytest.mark.slow
def test_a_graph_too_wide_ends_with_its_gap():
    """Memory is bounded by the number of states kept, time by the budget."""
    problem = items(grid(10, 30), 8, 1)
    for live_limit in (10, 1_000_000):
        found = compiled.solve_contiguous(**problem, budget_s=0.3, live_limit=live_limit)
        assert found["status"] == "placed"
        assert 0 < found["bound"] < found["load"] < 2 * found["bound"]
        assert is_contiguous(problem, found["device"])
        assert found["ideals"] < 100 * live_limit  # of some tens of searches, one after the other
        assert found["seconds"] < 30  # a hang would not end at all


def test_no_budget():
    problem = items(bert_operators(1), 2)
    assert compiled.solve_contiguous(**problem, budget_s=0.0, live_limit=100)["status"] == "budget"
    found = compiled.solve_contiguous(**problem, **BUDGET)
    kept = compiled.solve_chunks(**problem, budget_s=0.0, live_limit=100, seed=0, start=found["device"])
    assert kept["load"] == pytest.approx(found["load"])


@pytest.mark.slow
def test_the_same_answer_twice():
    problem = items(inception(4, 3, 3), 4, 1)
    first, second = (compiled.solve_contiguous(**problem, **BUDGET) for _ in range(2))
    assert np.array_equal(first["device"], second["device"])
    first, second = (compiled.solve_chunks(**problem, **BUDGET, seed=7, start=NOWHERE) for _ in range(2))
    assert np.array_equal(first["device"], second["device"])


def test_chunks_are_no_worse_than_where_they_start():
    problem = items(inception(4, 3, 3), 4, 1)
    found = compiled.solve_contiguous(**problem, **BUDGET)
    chunks = compiled.solve_chunks(**problem, **BUDGET, seed=7, start=found["device"])
    assert chunks["bound"] <= chunks["load"] <= found["load"]


TWO = {"edges": [(0, 1)], "tensors": [(1.0, [0, 1])]}


@pytest.mark.parametrize("solve", ["solve_contiguous", "solve_chunks"])
@pytest.mark.parametrize(
    ("accelerator_s", "cpu_s", "nbytes"),
    [
        ([1, 1], [1, 1], [6, 1]),  # the first item is larger than a device
        ([1, 1], [1, 1], [6, 6]),
        ([math.inf, 1], [1, 1], [1, 1]),  # no accelerator can run it, and there is no CPU
    ],
)
def test_infeasible(solve, accelerator_s, cpu_s, nbytes):
    problem = arguments(accelerator_s, cpu_s, nbytes, **TWO, n_devices=2, n_cpus=0, capacity=5)
    more = {"seed": 0, "start": NOWHERE} if solve == "solve_chunks" else {}
    assert getattr(compiled, solve)(**problem, **BUDGET, **more)["status"] == "infeasible"
    problem["n_cpus"] = 1
    assert getattr(compiled, solve)(**problem, **BUDGET, **more)["status"] == "placed"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_devices": 0}, "there is no device"),
        (
            {"edge_dest": np.array([0], np.int32)},
            "edge 0 -> 0: items are not numbered in a topological order",
        ),
        ({"cpu_s": np.array([1.0])}, "cpu_s has 1 values, not 2"),
        ({"cpu_s": np.array([1.0, math.nan])}, "cpu_s has a value that is negative or no number"),
        ({"nbytes": np.array([1.0, math.inf])}, "nbytes has a value that is negative or no number"),
        ({"pins": np.array([0, 2], np.int32)}, "a pin is no item"),
        ({"pin_start": np.array([0, 3], np.int32)}, "pin_start does not cover pins"),
        ({"budget_s": math.nan}, "budget_s is negative or no number"),
    ],
)
def test_bad_arguments(wrong, message):
    problem = arguments([1, 1], [1, 1], [1, 1], **TWO, n_devices=1, n_cpus=0, capacity=5)
    with pytest.raises(ValueError, match=message):
        compiled.solve_contiguous(**{**problem, **BUDGET, **wrong})
