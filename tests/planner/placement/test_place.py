"""Placements against trying every one."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from placement_cases import brute_force_s, random_problem

from mpipipe.errors import PlanError
from mpipipe.planner.placement import Operator, Problem, is_contiguous, loads, place, search
from mpipipe.planner.placement.bounds import simple_bound_s
from mpipipe.planner.placement.items import contract
from mpipipe.planner.placement.linear import place_linearly
from mpipipe.planner.placement.mixed import solve_mixed
from mpipipe.planner.placement.single import single_device_bound_s


def chain(n: int, n_accelerators: int, capacity_bytes: float = math.inf, n_cpus: int = 0) -> Problem:
    """Nodes of a second and 10 bytes each; to cut costs a tenth of a second on either side."""
    operators = tuple(Operator(v, f"layer{v}", 1.0, 10.0, 10.0, 0.1) for v in range(n))
    return Problem(operators, tuple((v, v + 1) for v in range(n - 1)), n_accelerators, n_cpus, capacity_bytes)


def check_against_brute_force(seed: int, contiguous: bool) -> None:
    problem = random_problem(seed)
    best_s = brute_force_s(problem, contiguous)
    if best_s == math.inf:
        with pytest.raises(PlanError) as caught:
            place(problem, "it", contiguous=contiguous)
        said = re.search(r"give --devices (\d+), the smallest", str(caught.value))
        if said and int(said[1]) ** len(contract(problem, contiguous=False)) <= 20_000:
            counts = range(1, int(said[1]) + 1)
            tried = [brute_force_s(replace(problem, n_accelerators=count), contiguous) for count in counts]
            assert [best_s < math.inf for best_s in tried] == [False] * (len(tried) - 1) + [True]
        return
    found = place(problem, "it", contiguous=contiguous)
    assert found.loads == loads(problem, found.device_of)
    assert found.load_s == pytest.approx(best_s)
    assert found.bound_s == found.load_s, "proved"
    assert found.gap == 0
    accelerators = range(problem.n_accelerators)
    assert all(found.loads.memory_bytes[d] <= problem.capacity_bytes for d in accelerators)
    assert not contiguous or is_contiguous(problem, found.device_of)


@pytest.mark.slow
@pytest.mark.parametrize("contiguous", [True, False])
def test_is_the_optimum_of_all_placements(contiguous: bool) -> None:
    for seed in range(16):
        check_against_brute_force(seed, contiguous)


@pytest.mark.full
@pytest.mark.parametrize("contiguous", [True, False])
def test_is_the_optimum_of_all_placements_of_500_graphs(contiguous: bool) -> None:
    for seed in range(1000, 1500):
        check_against_brute_force(seed, contiguous)


@pytest.mark.slow
def test_without_the_compiled_part_chunks_are_proved_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "compiled", None)
    for seed in range(30, 45):
        check_against_brute_force(seed, contiguous=False)


@pytest.mark.slow
def test_without_the_compiled_part_what_is_said_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "compiled", None)
    proved = 0
    for seed in range(100, 140):
        problem = random_problem(seed)
        best_s = brute_force_s(problem, contiguous=True)
        try:
            found = place(problem, "it", contiguous=True)
        except PlanError:
            continue
        assert is_contiguous(problem, found.device_of)
        assert found.bound_s <= best_s * (1 + 1e-12)
        assert found.load_s >= best_s * (1 - 1e-12)
        proved += found.load_s == pytest.approx(best_s)
    assert proved > 25, "the orders that are tried find most optima"


@pytest.mark.slow
def test_the_programme_bounds_every_placement() -> None:
    for seed in range(200, 212):
        problem = random_problem(seed)
        items = contract(problem, contiguous=False)
        solved = solve_mixed(
            items, problem.n_accelerators, problem.n_cpus, problem.capacity_bytes, math.inf, 10.0
        )
        assert solved.bound_s == pytest.approx(brute_force_s(problem, contiguous=False), rel=1e-6, abs=1e-6)


@pytest.mark.slow
def test_the_bound_from_one_device_is_below_every_placement() -> None:
    tight = 0
    for seed in range(300, 320):
        problem = random_problem(seed)
        items, best_s = contract(problem, contiguous=False), brute_force_s(problem, contiguous=False)
        devices = (problem.n_accelerators, problem.n_cpus, problem.capacity_bytes)
        for known_s in (best_s, 2 * best_s):
            bound_s = single_device_bound_s(items, *devices, known_s, 10.0)
            assert bound_s <= best_s * (1 + 1e-6)
            tight += bound_s > best_s * (1 - 1e-6)
    assert tight > 15


def test_of_five_equal_layers_on_two_devices_one_has_three_and_its_messages() -> None:
    """Work shared out would be 2.5 seconds; three neighbours take 3, and a message at one end at least."""
    problem = chain(5, 2)
    items = contract(problem, contiguous=False)
    assert single_device_bound_s(items, 2, 0, math.inf, 4.0, 10.0) == pytest.approx(3.1)
    assert place(problem, "it").load_s == pytest.approx(3.1)


def test_a_chain_is_cut_into_equal_parts() -> None:
    found = place(chain(8, 4), "it", contiguous=True)
    assert found.device_of == (0, 0, 1, 1, 2, 2, 3, 3)
    assert found.loads.communication_s == pytest.approx((0.1, 0.2, 0.2, 0.1))
    assert found.load_s == pytest.approx(2.2)


def test_several_chunks_are_never_worse_and_can_be_better() -> None:
    """1 4 3 in a row on two devices: 5 in order, 4 if the ends share one."""
    loads_s = []
    for seconds in ([1.0, 3.0, 1.0, 3.0], [1.0, 4.0, 3.0]):
        operators = tuple(Operator(v, f"n{v}", s, s, 0.0, 0.01) for v, s in enumerate(seconds))
        problem = Problem(operators, tuple((v, v + 1) for v in range(len(seconds) - 1)), 2, 0, math.inf)
        ordered, free = (place(problem, "it", contiguous=c) for c in (True, False))
        assert (free.gap, ordered.gap) == (0, 0)
        loads_s.append((ordered.load_s, free.load_s))
    assert loads_s == [pytest.approx((4.01, 4.01)), pytest.approx((5.01, 4.02))]
    heavier = replace(
        problem, operators=(*operators[:1], replace(operators[1], accelerator_s=5.0), *operators[2:])
    )
    assert place(heavier, "it").load_s < place(heavier, "it", contiguous=True).load_s


def test_it_is_the_same_each_time() -> None:
    problem = random_problem(7)
    assert place(problem, "it").device_of == place(problem, "it").device_of


def test_forward_edges_alone_order_the_devices() -> None:
    """Forward 0 -> 1, backward 1' -> 0': with all edges no two devices could be ordered."""
    operators = tuple(
        Operator(v, f"n{v}", 1.0, 9.0, 1.0, 0.1, together=v % 2, backward=v > 1) for v in range(4)
    )
    problem = Problem(operators, ((0, 1), (1, 3), (3, 2)), 2, 0, math.inf)
    found = place(problem, "it", contiguous=True)
    assert found.device_of == (0, 1, 0, 1)
    assert found.load_s == pytest.approx(2.2)


def test_classes_on_a_cycle_are_parted_by_chunks_only() -> None:
    """a0 -> b0 -> a1 with a0 and a1 together: in order, b joins them."""
    operators = tuple(
        Operator(v, f"n{v}", 1.0, 9.0, 1.0, 0.1, together=together) for v, together in enumerate([0, None, 0])
    )
    problem = Problem(operators, ((0, 1), (1, 2)), 2, 0, math.inf)
    assert len(contract(problem, contiguous=True)) == 1
    assert len(contract(problem, contiguous=False)) == 2
    assert place(problem, "it", contiguous=True).load_s == 3.0
    assert place(problem, "it").load_s == pytest.approx(2.2)


def test_a_placement_costs_what_the_objective_says() -> None:
    """An output that two nodes of one device read is received once, and sent once."""
    operators = tuple(Operator(v, f"n{v}", float(v + 1), 10.0, 1.0, 0.5) for v in range(4))
    problem = Problem(operators, ((0, 1), (0, 2), (0, 3), (2, 3)), 2, 1, math.inf)
    found = loads(problem, [0, 1, 1, 2])
    assert found.compute_s == (1.0, 5.0, 10.0)
    assert found.communication_s == (0.5, 1.0, 0.0), "of a CPU nothing"
    assert found.memory_bytes == (1.0, 2.0, 1.0)
    assert found.most_s == 10.0


def test_a_linear_split_is_the_best_of_its_order() -> None:
    problem = chain(7, 3, capacity_bytes=30.0)
    items = contract(problem, contiguous=True)
    (device,) = place_linearly(items, 3, 0, 30.0)
    assert loads(problem, device.tolist()).most_s == pytest.approx(brute_force_s(problem, contiguous=True))
    assert place_linearly(items, 2, 0, 30.0) == []


def test_a_large_graph_that_has_a_placement_is_not_cut_in_other_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = contract(chain(7, 3, capacity_bytes=30.0), contiguous=True)
    found = {"status": "placed", "device": np.zeros(7, np.int32), "load": 2.0, "bound": 1.0}
    monkeypatch.setattr(search, "compiled", SimpleNamespace(solve_contiguous=lambda *_: found))
    assert len(search.solve_in_order(items, 3, 0, 30.0, 1.0)[0]) == 2
    monkeypatch.setattr(search, "LINEAR", 0)
    assert len(search.solve_in_order(items, 3, 0, 30.0, 1.0)[0]) == 1


@pytest.mark.filterwarnings("error")
def test_what_no_cpu_can_run_is_no_segment_of_one() -> None:
    operators = tuple(Operator(v, f"n{v}", 5.0, (1.0, math.inf, 1.0)[v], 0.0, 0.0) for v in range(3))
    items = contract(Problem(operators, ((0, 1), (1, 2)), 1, 1, math.inf), contiguous=True)
    (device,) = place_linearly(items, 1, 1, math.inf)
    assert device[1] == 0
    assert device.tolist() in ([0, 0, 1], [1, 0, 0])


def test_the_simple_bound_is_below_every_placement_and_met_where_work_can_be_parted() -> None:
    for seed in range(400, 440):
        problem = random_problem(seed)
        items = contract(problem, contiguous=False)
        bound_s = simple_bound_s(items, problem.n_accelerators, problem.n_cpus)
        assert bound_s <= brute_force_s(problem, contiguous=False) * (1 + 1e-12)
    halves = Problem(tuple(Operator(v, "n", 1.0, 2.0, 0.0, 0.0) for v in range(5)), (), 2, 1, math.inf)
    assert (
        simple_bound_s(contract(halves, contiguous=False), 2, 1)
        == brute_force_s(halves, contiguous=False)
        == 2.0
    )


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "contiguous", "said"),
    [
        (chain(4, 0), False, "it: --devices 0; give 1 at least"),
        (
            chain(3, 2, 5.0),
            True,
            "it: node 0 (layer0) needs 10 bytes, a device has 5 bytes: 5 bytes short, and no number of "
            "devices would do; give --memory 10B at least",
        ),
        (
            chain(9, 2, 25.0),
            True,
            "it: all need 90 bytes, 2 devices of 25 bytes have 50 bytes: 40 bytes short; give --devices 5, "
            "the smallest number that would do, or more --memory",
        ),
        (
            chain(6, 4, 15.0),
            False,
            "it: all need 60 bytes, 4 devices of 15 bytes have 60 bytes: enough in sum, but node 0 (layer0) "
            "and others do not go together; give --devices 6, the smallest number that would do, or more "
            "--memory",
        ),
    ],
)
def test_what_cannot_be_is_said_with_what_would_do(problem: Problem, contiguous: bool, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        place(problem, "it", contiguous=contiguous)
    assert str(caught.value) == said


def test_a_cpu_takes_what_fits_nowhere_else() -> None:
    found = place(chain(9, 2, 25.0, n_cpus=1), "it")
    assert found.loads.memory_bytes[2] >= 40
    assert found.gap == 0


def test_a_node_that_nothing_can_run_is_named() -> None:
    problem = chain(3, 2)
    cannot = replace(problem.operators[1], accelerator_s=math.inf)
    with pytest.raises(PlanError, match=r"node 1 \(layer1\) is not supported .* there are 0 CPUs"):
        place(replace(problem, operators=(problem.operators[0], cannot, problem.operators[2])), "it")


def test_a_cycle_is_printed_by_its_names() -> None:
    problem = replace(chain(5, 2), edges=((0, 1), (1, 2), (2, 3), (3, 1), (3, 4)))
    with pytest.raises(PlanError) as caught:
        place(problem, "it")
    cycle = "layer1 -> layer2 -> layer3 -> layer1"
    assert str(caught.value) == f"it: the graph has a cycle of 3 nodes, {cycle}; take one of its edges out"


def test_a_long_cycle_is_shortened() -> None:
    problem = chain(40, 2)
    with pytest.raises(PlanError, match=r"cycle of 40 nodes, layer0 -> .* -> \.\.\. -> .* -> layer0; take"):
        place(replace(problem, edges=(*problem.edges, (39, 0))), "it")
