"""Loading is a part of the forward where it shares a core with it."""

from __future__ import annotations

import time

import pytest
import torch
from made_run import made_costs
from tiny import Case, even_cuts, plan_of, warm

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.runtime import loading
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import Graph, Node, TensorSpec

ROW = TensorSpec((2, 4), "float32")
GRAPH = Graph(
    nodes=(
        Node("a", "aten.relu.default", "", ("x",), (ROW,), (), 0, ""),
        Node("b", "aten.relu.default", "", ("a",), (ROW,), (), 1, ""),
        Node("mask", "aten.relu.default", "", ("x",), (ROW,), (), -1, ""),
        Node("c", "aten.mul.Tensor", "", ("b", "y"), (ROW,), (), 2, ""),
    ),
    groups=("a", "b", "c"),
    inputs={"x": ROW, "y": ROW},
    params={},
    buffers={},
    ties=(),
)


class Slow:
    """Data whose keys take a millisecond of the core each."""

    exact, varying, whole = True, False, False

    def __init__(self) -> None:
        self.asked: list[frozenset[str]] = []

    def batch(self, split, step, start, stop, keys):
        self.asked.append(keys)
        end = time.thread_time() + 1e-3 * len(keys)
        while time.thread_time() < end:
            pass
        return {key: torch.zeros(stop - start, 4) for key in keys}


def added(n_ranks: int, cores: int | None, monkeypatch, data=None):
    """Seconds that each group's forward is longer, on every rank. cores: of all; None = two for each rank."""
    bound = iter([range(2 * i, 2 * i + 2) for i in range(n_ranks)])
    own = (lambda: next(bound)) if cores is None else lambda: range(cores)
    monkeypatch.setattr(loading, "cores_available", own)
    costs = made_costs(n_ranks, n_groups=3)

    def rank(comm):
        found = loading.with_loading(costs, GRAPH, data or Slow(), 2, comm, 1)
        return [b.fwd_s - a.fwd_s for a, b in zip(costs.groups, found.groups, strict=True)]

    return run_local(n_ranks, rank)


def test_the_stages_at_both_ends_load_what_they_read(monkeypatch):
    first, *others = added(2, 2, monkeypatch)
    assert all(other == first for other in others)
    assert 1e-3 <= first[0] < 3e-3
    assert first[1] == 0
    assert 1e-3 <= first[2] < 3e-3


def test_one_rank_loads_all_once(monkeypatch):
    (found,) = added(1, 1, monkeypatch)
    assert 2e-3 <= found[0] < 5e-3
    assert found[1:] == [0, 0]


@pytest.mark.parametrize("change", [{"cores": 4}, {"cores": None}, {"exact": False}, {"varying": True}])
def test_nothing_is_added_where_a_core_is_left_or_nothing_can_be_asked(monkeypatch, change):
    data = Slow()
    for name, value in change.items():
        setattr(data, name, value)
    for found in added(2, change.get("cores", 2), monkeypatch, data):
        assert found == [0, 0, 0]
    assert not data.asked


@pytest.mark.parametrize("model", ["gpt", "mlp", "skips"])
@pytest.mark.slow
def test_what_a_rank_holds_of_the_batch_is_what_its_plan_counts(model: str) -> None:
    case = Case(model, batch=16, micro_batches=8)
    warm(case)
    counted = loading.batch_bytes(case.variants, 8)
    plan = plan_of(case, "1f1b", even_cuts(case.variants.graph.groups, 2))

    def body(comm: Communicator) -> int:
        trainer, most = Trainer(comm, case.variants, plan, case.settings, case.dataset), 0
        ahead = trainer.feed.ahead
        for step in range(2):
            trainer.step(step)
            while ahead._due():  # of the next step
                time.sleep(0.01)
            most = max(most, sum(t.nbytes for batch in ahead._ready.values() for t in batch.values()))
        return most

    first, last = run_local(2, body)
    assert 2 / 3 * counted.first == first > 0  # the third is at work
    assert counted.weighing / 2 + 2 / 3 * counted.last == last > 0  # labels of the next step, not of this one
