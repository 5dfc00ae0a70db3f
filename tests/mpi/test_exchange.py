"""What replicas exchange goes on while a rank waits, and adds up, under a real MPI."""

from __future__ import annotations

import pytest
import tiny
from exchanging import (
    AWAITED,
    BUCKETS,
    sums_of_a_step,
    sums_that_come_during_a_wait,
    sums_that_leave_during_a_wait,
)
from tiny import Case

from mpipipe.cluster.mpi import MpiCommunicator
from mpipipe.planner.exchange import BUCKETS_AHEAD
from mpipipe.values import Instr

pytestmark = pytest.mark.mpi
NUMEL = 1 << 18  # a MiB, beyond every eager limit: it leaves only when its receive is posted


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("awaited", AWAITED, ids=str)
def test_while_a_rank_waits_the_sums_of_others_come_in_and_its_own_leave(
    comm: MpiCommunicator, awaited: Instr
) -> None:
    during, added = sums_that_come_during_a_wait(comm, awaited, NUMEL)
    if comm.rank == 0:
        assert during >= BUCKETS - BUCKETS_AHEAD
        assert added == list(range(BUCKETS))
    comm.barrier()
    sums_that_leave_during_a_wait(comm, awaited, NUMEL)
    comm.barrier()


NODES = {3: [(0, 0, 1), (0, 1, 0)], 4: [(0, 0, 0, 1), (0, 1, 1, 2)]}  # by rank


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("which", range(2))
def test_fast_replicas_add_up_node_by_node(comm: MpiCommunicator, which: int) -> None:
    """All of them then hold the same bits, which is asked in `tiny.train`, of statistics of buffers too."""
    nodes, rounding = NODES[comm.size][which], 1e-5
    case = Case("conv and norm", batch=11, micro_batches=5, evaluate=True, reduce="fast")
    sums = sums_of_a_step(comm, case, nodes)
    for name, (found, expected) in sums.items():
        error = float((found.double() - expected).abs().max() / expected.abs().max())
        assert error < rounding, name
    owned = comm.allgather_object(sorted(sums))
    assert sorted(name for of in owned for name in of) == sorted(case.variants.trained)
    got = tiny.train(comm, case, window=16, copies=comm.size, nodes=nodes)
    assert got == tiny.train(comm, case, window=16, copies=comm.size, nodes=nodes), "again, to the bit"
    comm.barrier()
