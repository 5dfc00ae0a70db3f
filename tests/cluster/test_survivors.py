"""Ranks that outlive others: the in-process carrier, which loses ranks at will. Real kills: tests/launch."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe.cluster.comm import Communicator, RankLost, members
from mpipipe.cluster.local import Killed, run_local


@pytest.mark.parametrize("dies", [{1}, {0}, {0, 2}, {1, 2, 3}])
def test_those_that_are_left_are_a_world(dies: set[int]) -> None:
    def body(comm: Communicator) -> tuple[int, list[int], tuple[int, ...], tuple[int, ...]]:
        if comm.rank in dies:
            raise Killed
        with pytest.raises(RankLost):
            comm.barrier()
        left = comm.survivors()
        return left.rank, left.allgather_object(comm.rank), left.node_of_rank, members(left)

    kept = tuple(r for r in range(4) if r not in dies)
    nodes = tuple(range(len(kept)))  # numbered anew
    found = run_local(4, body, node_of_rank=(0, 1, 2, 3))
    assert found == [(i, list(kept), nodes, kept) for i in range(len(kept))]


def test_a_second_one_is_lost_before_the_first_was_done_with() -> None:
    def body(comm: Communicator) -> tuple[int, tuple[int, ...]]:
        if comm.rank == 3:
            raise Killed
        with pytest.raises(RankLost):
            comm.wait(comm.irecv(np.zeros(1, np.uint8), 3, 0))
        left = comm.survivors()
        if comm.rank == 0:
            raise Killed
        with pytest.raises(RankLost):
            left.barrier()
        left = left.survivors()
        return left.rank, left.lost

    assert run_local(4, body) == [(0, (0, 3)), (1, (0, 3))]


def test_an_error_in_the_world_of_the_survivors_ends_it() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise Killed
        with pytest.raises(RankLost):
            comm.barrier()
        left = comm.survivors()
        if left.rank == 1:
            raise ZeroDivisionError
        left.barrier()

    with pytest.raises(ZeroDivisionError):
        run_local(3, body)
