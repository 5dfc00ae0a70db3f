"""What replicas exchange goes on while a rank waits, under a real MPI."""

from __future__ import annotations

import pytest
from exchanging import AWAITED, BUCKETS, sums_that_come_during_a_wait, sums_that_leave_during_a_wait

from mpipipe.cluster.mpi import MpiCommunicator
from mpipipe.planner.copies import BUCKETS_AHEAD
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
