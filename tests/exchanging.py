"""What replicas exchange: who waits for it, and what comes of it.

Three ranks: rank 0 waits for a message of rank 2, which sends it only when what ranks 0 and 1 have to do with
each other is over. If that does not go on while rank 0 waits, all three wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from tiny import Case, plan_of
from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.planner.exchange import BUCKETS_AHEAD
from mpipipe.runtime.trainer import Trainer
from mpipipe.runtime.transport import Landing, Mailbox, Outbox, Piece, as_bytes
from mpipipe.values import Instr, Op

BUCKETS = 3 * BUCKETS_AHEAD
SUMS = Instr(Op.RECV_SHARD, 0, -1, 0, 1, 1)  # from rank 1
OTHER_SUMS, GRADIENT = Instr(Op.RECV_SHARD, 1, -1, 1, 2, 2), Instr(Op.RECV_GRAD, 1, 0, 2, 2, 2)  # from rank 2
AWAITED = [GRADIENT, OTHER_SUMS]


def sums_that_come_during_a_wait(comm: Communicator, awaited: Instr, numel: int) -> tuple[int, list[int]]:
    """On rank 0: how many buckets were added when the wait was over; all of them, in the order in which they
    were added."""
    added = list[int]()
    if comm.rank == 0:
        mailbox = Mailbox(comm, [], 1, _one, Landing(), Outbox(comm, Landing()))
        mailbox.expect(SUMS, _room(added, numel))
        _wait(mailbox, awaited)
        during = len(added)
        mailbox.finish(SUMS)
        return during, added
    if comm.rank == 1:
        buckets = [torch.full((numel,), float(i)) for i in range(BUCKETS)]
        for request in [comm.isend(as_bytes(t), 0, SUMS.tag) for t in buckets]:
            comm.wait(request)
        _tell(comm, 2)
    if comm.rank == 2:
        _hear(comm, 1)
        comm.wait(comm.isend(as_bytes(torch.zeros(1)), 0, awaited.tag))
    return 0, added


def sums_that_leave_during_a_wait(comm: Communicator, awaited: Instr, numel: int) -> None:
    """Those of rank 0, which are held back until an activation has left."""
    act, sums = Instr(Op.SEND_ACT, 0, 0, 1, 2, 3), SUMS._replace(op=Op.SEND_SHARD)
    if comm.rank == 0:
        outbox = Outbox(comm, Landing())
        mailbox = Mailbox(comm, [], 1, _one, Landing(), outbox)
        outbox.send([torch.zeros(numel)], act)
        outbox.send(_one(sums), sums)
        _wait(mailbox, awaited)
        outbox.wait_all()
    if comm.rank == 1:
        comm.wait(comm.irecv(as_bytes(torch.zeros(1)), 0, sums.tag))
        _tell(comm, 2)
    if comm.rank == 2:
        comm.wait(comm.irecv(as_bytes(torch.zeros(numel)), 0, act.tag))
        _hear(comm, 1)
        comm.wait(comm.isend(as_bytes(torch.zeros(1)), 0, awaited.tag))


def sums_of_a_step(
    comm: Communicator, case: Case, nodes: tuple[int, ...]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of replicas on these nodes, one on each rank, on the owner of each parameter: its gradient before the
    norm, and the sum of all that they had added up, in double precision."""
    trainer = Trainer(
        comm,
        case.variants,
        plan_of(case, "1f1b", (), copies=comm.size, nodes=nodes),
        case.settings,
        case.dataset,
    )
    interpreter, own, found = trainer.interpreter, dict[str, Tensor](), dict[str, Tensor]()
    (stage,) = interpreter.stages.values()
    norm, last = interpreter._handlers[Op.NORM], interpreter._handlers[Op.SEND_SHARD]

    def first_shard(instr: Instr) -> None:
        own.update({name: t.double() for name, t in stage.weights.grad.items() if name not in own})
        last(instr)

    def before_norm(instr: Instr) -> None:
        found.update(
            {n: t.clone() for group in stage.weights.own_groups for n, t in group.grad.views.items()}
        )
        norm(instr)

    interpreter._handlers |= {Op.SEND_SHARD: first_shard, Op.NORM: before_norm}
    trainer.step(0)
    every = comm.allgather_object(own)
    return {name: (t, sum(of[name] for of in every)) for name, t in found.items()}


def _wait(mailbox: Mailbox, awaited: Instr) -> None:
    if awaited == GRADIENT:
        mailbox.take(awaited)
    else:
        mailbox.expect(awaited, [(torch.zeros(1), None)])
        mailbox.finish(awaited)


def _room(added: list[int], numel: int) -> Iterator[Piece]:
    for _ in range(BUCKETS):
        yield torch.zeros(numel), lambda t: added.append(int(t[-1]))


def _one(_: Instr) -> list[torch.Tensor]:
    return [torch.zeros(1)]


def _tell(comm: Communicator, peer: int) -> None:
    comm.wait(comm.isend(np.zeros(1, np.uint8), peer, 0))


def _hear(comm: Communicator, peer: int) -> None:
    comm.wait(comm.irecv(np.zeros(1, np.uint8), peer, 0))
