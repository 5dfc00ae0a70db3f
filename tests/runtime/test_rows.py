"""A table that is also a head: the look-ups keep rows, and one gradient serves both."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import MANY, Case, differences, even_cuts, full_but, placement, plan_of, train_local, warm
from torch import Tensor, nn
from torch.nn import functional

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import cross_entropy
from mpipipe.ops.embedding import RowSums, row_sums
from mpipipe.planner.copies import stages_in
from mpipipe.planner.prediction import sizes_of_messages
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.simulate import rank_memory_bytes
from mpipipe.planner.sizing import costs_at
from mpipipe.planner.stages import kept_rows
from mpipipe.runtime.rehearsal import rehearse
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import Cluster, Costs, Device, Graph, GroupCost, Link

CASE = Case("gpt, large table")
TABLE, ROWS = "wte.weight", 4 * 2 * 16  # of a step: micro-batches, samples, tokens
BYTES = ROWS * (32 * 4 + 8)  # with their numbers
FAST = [("1f1b", 1), ("1f1b", 2), ("zb-v", 2)]
ALL = [*FAST, ("gpipe", 3), ("zb-h1", 2), ("zb-h2", 3), ("interleaved", 2), ("v-half", 2), ("1f1b", 4)]


class Tied(nn.Module):
    """A table and a head that are one. twice: the table is read at two places of the same layer; odd: in
    another way for a single sample."""

    def __init__(self, twice: bool = False, odd: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table, self.between = nn.Embedding(MANY, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)
        self.twice, self.odd = twice, odd

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, MANY)
        if self.odd and len(tokens) == 1:
            x = functional.one_hot(tokens, MANY).float() @ self.table.weight
        else:
            x = self.table(tokens)
        if self.twice:
            x = x * self.table(tokens.flip(-1))
        return functional.linear(torch.tanh(self.between(x)), self.table.weight).float()


def tied(**how: object) -> Variants:
    data = SyntheticTokens(MANY, 16, 7)
    source = ModelSource(lambda: Tied(**how), 7)  # type: ignore[arg-type]
    return Variants(source, cross_entropy, data.specs, 2, "fp32", lowering=Lowering("torch"))


def trainers(schedule: str, n_ranks: int, copies: int = 1, case: Case = CASE) -> list[Trainer]:
    """Of each rank, before a step."""
    warm(case)
    order = placement(schedule, n_ranks)
    plan = plan_of(case, schedule, even_cuts(case.variants.graph.groups, len(order)), 3, order, copies)

    def body(comm: Communicator) -> Trainer:
        return Trainer(comm, case.variants, plan, case.settings, case.dataset)

    return run_local(n_ranks * copies, body)


def gradients(trainer: Trainer) -> list[tuple[int, ...]]:
    """Shapes of all that backward adds into and that are as large as the table."""
    tensors = [t for stage in trainer.interpreter.stages.values() for t in stage.weights.accumulators()]
    return [tuple(t.shape) for t in tensors if t.numel() >= MANY * 32]


@pytest.mark.parametrize(("schedule", "ranks"), full_but(FAST, ALL))
@pytest.mark.slow
def test_the_bits_are_those_of_whole_gradients(
    schedule: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept(CASE) == {TABLE: BYTES}
    got = train_local(CASE, ranks, schedule)
    monkeypatch.setattr(Variants, "rows_bytes", lambda *_: {})  # whole gradients
    assert differences(train_local(CASE, 1), got) == []


@pytest.mark.slow
def test_a_rank_has_one_gradient_of_the_table_for_both_uses() -> None:
    (alone,) = trainers("1f1b", 1)
    assert len(gradients(alone)) == 1
    first, last = trainers("1f1b", 2)
    assert len(gradients(first)) == 1
    assert len(gradients(last)) == 1  # which it sends into that of the first
    both, neither = trainers("zb-v", 2)
    assert len(gradients(both)) == 1
    assert gradients(neither) == []
    copies = trainers("1f1b", 1, 2, replace(CASE, reduce="fast"))  # which exchange parts of their sums
    assert [len(gradients(t)) for t in copies] == [2, 2]


@pytest.mark.slow
def test_rows_are_forgotten_with_the_step() -> None:
    (trainer,) = trainers("1f1b", 1)
    (stage,) = trainer.interpreter.stages.values()
    stage.weights.rows[TABLE].add(torch.tensor([3]), torch.ones(1, 32))
    stage.weights.grad[TABLE].fill_(1.0)
    stage.weights.forget()
    stage.weights.rows[TABLE].into(stage.weights.grad[TABLE])
    assert not stage.weights.grad[TABLE].any()


@pytest.mark.slow
def test_no_gradient_is_lost_where_another_shape_reads_the_table_otherwise() -> None:
    """The last micro-batch of 7 has a single sample."""
    variants, case = tied(odd=True), Case("gpt, large table", batch=7)
    plan, data = plan_of(case, "1f1b", ()), SyntheticTokens(MANY, 16, 7)

    def norms(comm: Communicator) -> list[float]:
        trainer = Trainer(comm, variants, plan, case.settings, data)
        (stage,) = trainer.interpreter.stages.values()
        assert list(stage.weights.rows) == (["table.weight"] if rows else [])
        return [outcome.norm for step in range(3) if (outcome := trainer.step(step))]

    rows = variants.rows_bytes(case.numerics)
    (got,) = run_local(1, norms)
    rows.clear()
    variants.rows_bytes = lambda _: rows  # type: ignore[method-assign]
    (expected,) = run_local(1, norms)
    assert got == pytest.approx(expected, rel=1e-6)  # the sums have another order


@pytest.mark.slow
def test_what_waits_before_the_norm_is_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, into = [], RowSums.into

    def noted(kept: RowSums, gradient: Tensor) -> None:
        waited.append(sum(t.nbytes for pair in kept._added for t in pair))
        into(kept, gradient)

    monkeypatch.setattr(RowSums, "into", noted)
    (trainer,) = trainers("1f1b", 1)
    trainer.step(0)
    assert 0.5 * BYTES < waited[0] <= BYTES  # a row that a micro-batch reads twice is there once


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 1), ("1f1b", 2), ("zb-v", 2)])
@pytest.mark.slow
def test_a_rehearsal_leaves_nothing_for_the_first_step(schedule: str, ranks: int) -> None:
    costs, order = costs_of(ranks), placement(schedule, ranks)
    plan = plan_of(CASE, schedule, even_cuts(CASE.variants.graph.groups, len(order)), 3, order)
    warm(CASE)

    def body(comm: Communicator) -> float:
        trainer = Trainer(comm, CASE.variants, plan, CASE.settings, CASE.dataset)
        rehearse(trainer, costs)
        weights = [stage.weights for stage in trainer.interpreter.stages.values()]
        for of_stage in weights:
            for name, rows in of_stage.rows.items():
                rows.into(of_stage.grad[name])
        return sum(float(t.abs().sum()) for of_stage in weights for t in of_stage.accumulators())

    assert run_local(ranks, body) == [0.0] * ranks


def test_rows_that_wait_are_summed_up_before_they_are_added() -> None:
    a, b, c = 1e8, 1.0, -1e8  # (a + b) + c = 0, a + (b + c) = 0, (c + a) + b = 1
    kept, gradient = RowSums(), torch.tensor([[5.0], [c], [7.0]])
    kept.add(torch.tensor([1]), torch.tensor([[a]]))
    kept.add(torch.tensor([1, 2]), torch.tensor([[b], [2.0]]))
    kept.into(gradient)
    assert gradient.flatten().tolist() == [5.0, 0.0, 9.0]
    kept.into(gradient)
    assert gradient.flatten().tolist() == [5.0, 0.0, 9.0], "each is added once"
    rows, sums = row_sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([9, 2, 9]))
    assert dict(zip(rows.tolist(), sums.flatten().tolist(), strict=True)) == {2: 2.0, 9: 5.0}


@pytest.mark.slow
def test_where_a_use_has_a_whole_gradient() -> None:
    assert kept(replace(CASE, tied="eager")) == {}  # uses are merged in each micro-batch
    assert kept(replace(CASE, blocks=2)) == {}  # sums of blocks are added up
    assert kept(replace(CASE, batch=16, micro_batches=8)) == {}  # more than a fourth of the table
    assert kept(Case("gpt, untied")) == {}
    numerics, bytes_of_8 = CASE.numerics, {"table.weight": ROWS * (8 * 8 + 8)}
    assert list(tied().rows_bytes(numerics)) == ["table.weight"]
    assert tied(twice=True).rows_bytes(numerics) == {}  # autograd adds them up first
    assert tied(dtype=torch.float64).rows_bytes(numerics) == bytes_of_8
    assert tied(dtype=torch.bfloat16).rows_bytes(numerics) == {}  # torch rounds those otherwise


@pytest.mark.slow
def test_rows_of_a_step_follow_from_those_of_a_micro_batch() -> None:
    """Costs are taken of single micro-batches, and searched for several."""
    small, large = (replace(CASE, batch=rows, micro_batches=1) for rows in (1, 4))
    taken = {case.rows: replace(costs_of(1), rows_bytes=raw(case)) for case in (small, large)}
    for count in (1, 2, 3, 4, 8):
        assert costs_at(taken, 8, count).rows_bytes == raw(replace(CASE, micro_batches=count))


def raw(case: Case) -> dict[str, int]:
    return case.variants.rows_bytes(case.numerics)


def kept(case: Case) -> dict[str, int]:
    return kept_rows(case.variants.graph.ties, raw(case), case.numerics.blocks, 1)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 1), ("1f1b", 2), ("zb-v", 2)])
def test_the_planner_counts_what_is_there(schedule: str, ranks: int) -> None:
    """Weights, gradients, rows and receive buffers of each rank, before a step."""
    graph, rows, costs = CASE.variants.graph, kept(CASE), costs_of(ranks)
    found = trainers(schedule, ranks)
    layout, program = found[0].plan.layout, found[0].program
    stages = stages_in(costs, layout, cut_indices(layout, graph.groups))
    sizes = sizes_of_messages(costs, layout, program)
    for rank, trainer in enumerate(found):
        weights = [stage.weights for stage in trainer.interpreter.stages.values()]
        tensors = [t for w in weights for t in (*w.data.values(), *w.grad.values(), *w.extra.values())]
        held = sum({t.data_ptr(): t.nbytes for t in tensors}.values())
        waiting = sum(rows[name] for w in weights for name in w.rows)
        assert rank_memory_bytes(program, stages, sizes, rank)[0] == held + waiting


def costs_of(ranks: int) -> Costs:
    """Without an optimizer's state."""
    graph = CASE.variants.graph
    device = Device("cpu", 1.0, 1 << 40, 1)
    cluster = Cluster((device,) * ranks, (0,) * ranks, {"node": Link(0.0, 1e9)})
    return Costs(groups_of(graph), cluster, graph.ties, 2.0, 0.0, "modelled", 0.0, rows_bytes=raw(CASE))


def groups_of(graph: Graph) -> tuple[GroupCost, ...]:
    """With parameters alone."""
    nbytes = {name: 4 * math.prod(spec.shape) for name, spec in graph.params.items()}
    read = [{name for node in graph.nodes if node.group == i for name in node.params if name in nbytes}
            for i in range(len(graph.groups))]  # fmt: skip
    return tuple(
        GroupCost(name, 1.0, 1.0, 1.0, sum(nbytes[p] for p in of_group), 0, 0, 0, 0)
        for name, of_group in zip(graph.groups, read, strict=True)
    )
