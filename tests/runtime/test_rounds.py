"""When the rounds of what replicas exchange begin: what a rank sends between two computations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny import Case, even_cuts, plan_of, warm

from mpipipe.cluster.comm import Bytes, Communicator, Request
from mpipipe.cluster.local import run_local
from mpipipe.runtime.trainer import Trainer
from mpipipe.values import Float64, Instr, Op

Sent = tuple[int, int]  # peer, tag
# three micro-batches of each replica; stage 1 is done when stage 0 has all of its backwards before it
ACTIONS = "0F0,1F0,0F1,1F1,0F2,1F2,1B0,1B1,1B2,0B0,0B1,0B2"


class Noting:
    """A communicator that notes what is sent. All ranks are together behind each computation: what was sent
    before it is there."""

    def __init__(self, comm: Communicator, log: list[Instr | Sent]) -> None:
        self._comm, self._log = comm, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def isend(self, buf: Bytes, peer: int, tag: int, crossing: bool = False) -> Request:
        self._log.append((peer, tag))
        return self._comm.isend(buf, peer, tag)

    def poll(self) -> None:
        self._comm.barrier()


def step_of(
    comm: Communicator, case: Case, nodes: tuple[int, ...]
) -> tuple[Sequence[Instr], list[Instr | Sent], Float64]:
    """The instructions of a rank with both stages of a replica, its backwards and what it has sent, and the
    times of the former."""
    log, cuts = list[Instr | Sent](), even_cuts(case.variants.graph.groups, 2)
    plan = plan_of(case, "v-planned", cuts, 16, (0, 0), comm.size, nodes=nodes)
    plan = replace(plan, layout=replace(plan.layout, actions=(ACTIONS,)))
    noting: Any = Noting(comm, log)
    trainer = Trainer(noting, case.variants, plan, case.settings, case.dataset)
    interpreter = trainer.interpreter
    backward = interpreter._handlers[Op.B]

    def noted(instr: Instr) -> None:
        log.append(instr)
        backward(instr)

    interpreter._handlers[Op.B] = noted
    outcome = trainer.step(0)
    assert outcome is not None
    return trainer.program.instrs(comm.rank), log, outcome.times


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "nodes"),
    [
        (Case("mlp", batch=24, micro_batches=12, blocks=4), (0,) * 4),
        (Case("mlp", batch=18, micro_batches=9, blocks=3), (0,) * 3),
        (Case("mlp", batch=18, micro_batches=9, reduce="fast"), (0, 0, 1)),
    ],
    ids=str,
)
def test_a_later_round_of_a_stage_begins_while_its_rank_computes_another(
    case: Case, nodes: tuple[int, ...]
) -> None:
    """As soon as a backward of the other one is over: what was sent before that has come. Of three replicas
    one meets another one first that comes to it second, and is a backward later."""
    warm(case)
    nodes_of_plan = nodes if len({*nodes}) > 1 else ()
    sent = 0  # of second rounds, where there is something
    for instrs, log, times in run_local(len(nodes), lambda comm: step_of(comm, case, nodes_of_plan), nodes):
        rounds = [i for i in instrs if i.op == Op.SEND_SHARD and i.stage == 1]
        last = [i for i in instrs if i.op == Op.B][-1]
        assert (len(rounds), last.stage) == (2, 0)
        places = [log.index((i.peer, i.tag)) for i in rounds if (i.peer, i.tag) in log]
        assert places == sorted(places)
        assert all(place < log.index(last) for place in places)
        sent += len(places) == 2
        for i in rounds:
            start_s, end_s = times[instrs.index(i)]
            assert start_s <= end_s <= times[instrs.index(last), 0], "it has the time at which it was begun"
    assert sent
