"""Sums of gradients that a backward in two begins before their block: what is there is what a plan counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import Case, even_cuts, placement, plan_of, warm

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.graph.group_costs import group_costs
from mpipipe.graph.pieces import Sample, pieces
from mpipipe.planner.copies import Copies, stages_in
from mpipipe.planner.prediction import sizes_of_messages
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.simulate import rank_memory_bytes
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import Cluster, Costs, Device, Int64, Link, Op, Plan, Program


def counted(case: Case, plan: Plan, program: Program, ranks: int) -> list[Int64]:
    """By rank and instruction, of the predicted memory what the sums take."""
    variants = case.variants
    parts, names = pieces(variants.primary, variants.graph, variants.uses), variants.graph.groups
    free = dict.fromkeys((piece.key for piece in parts), Sample(0.0, 0.0, 0.0, 0.0, 0, 0, (), ()))
    machine = Cluster((Device("cpu", 1.0, 1 << 40, 1),) * ranks, (0,) * ranks, {"node": Link(0.0, 1e9)})
    groups = group_costs(variants.primary, parts, free)
    costs = Costs(groups, machine, variants.graph.ties, 4.0, 0.0, "modelled", 0.0, blocks=case.blocks)
    stages = stages_in(costs, plan.layout, cut_indices(plan.layout, names))
    without = [replace(stage, at_once_bytes=0) for stage in stages]
    sizes = sizes_of_messages(costs, plan.layout, program)
    return [
        rank_memory_bytes(program, stages, sizes, rank) - rank_memory_bytes(program, without, sizes, rank)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("case", "schedule", "stages", "copies"),
    [
        (Case("gpt", batch=16, micro_batches=8, blocks=4), "zb-h2", 2, 1),
        (Case("gpt", batch=16, micro_batches=8, blocks=8), "zb-planned", 3, 1),
        (
            Case("gpt, no dropout", bits="fast", batch=16, micro_batches=8, blocks=2),
            "zb-h2",
            2,
            1,
        ),  # its head
        (Case("gpt", batch=16, micro_batches=8, blocks=4), "zb-h2", 2, 2),
        (Case("thrice", batch=16, micro_batches=8, blocks=4), "zb-h2", 2, (1, 2)),
        (Case("gpt", batch=16, micro_batches=8), "zb-h2", 2, 1),  # none
    ],
    ids=str,
)
@pytest.mark.slow
def test_sums_of_blocks_that_have_not_begun(case: Case, schedule: str, stages: int, copies: Copies) -> None:
    warm(case)
    order = placement(schedule, stages)
    plan = plan_of(case, schedule, even_cuts(case.variants.graph.groups, len(order)), 8, order, copies)
    n_ranks = plan.layout.n_ranks

    def body(comm: Communicator) -> tuple[Program, Int64]:
        trainer = Trainer(comm, case.variants, plan, case.settings, case.dataset)
        own = trainer.interpreter.stages.values()
        trainer.interpreter.resident_bytes = lambda: sum(
            t.nbytes for stage in own for sums in stage._begun.values() for t in sums.values()
        )
        return trainer.program, trainer.step(0).memory_bytes

    found = run_local(n_ranks, body)
    ahead = 0
    for rank, expected in enumerate(counted(case, plan, found[0][0], n_ranks)):
        program, there = found[rank]
        ops = program.codes[rank][:, 0]
        makes, ends = np.isin(ops, (Op.F, Op.I)), ops == Op.W  # which lets go of them at its end
        assert there[makes].tolist() == expected[makes].tolist()
        assert np.all(there[ends] <= expected[ends])
        ahead += int(there.max())
    assert (ahead > 0) == (case.blocks > 1)
