"""Ranks that outlive others: the in-process carrier, which loses ranks at will. Real kills: tests/launch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mpipipe.cluster.comm import Communicator, RankLost
from mpipipe.cluster.local import Killed, run_local
from mpipipe.cluster.spares import check_spares, first_working, next_working
from mpipipe.errors import LaunchError


@pytest.mark.parametrize("dies", [{1}, {0}, {0, 2}, {1, 2, 3}])
def test_those_that_are_left_are_a_world(dies: set[int]) -> None:
    def body(comm: Communicator) -> tuple[int, list[int], tuple[int, ...], tuple[int, ...]]:
        if comm.rank in dies:
            raise Killed
        with pytest.raises(RankLost):
            comm.barrier()
        left = comm.survivors()
        return left.rank, left.allgather_object(comm.rank), left.node_of_rank, left.members

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


# -- a part of a world, beside spares ------------------------------------------------------------------


def test_who_waits_outside_is_not_missed_when_it_is_lost() -> None:
    def body(comm: Communicator) -> tuple[int, list[int], tuple[int, ...]]:
        part = comm.part([2, 0])
        if part is None:
            raise Killed
        while not comm.gone():  # its threads are asleep meanwhile: nothing is collective here
            pass
        return part.rank, part.allgather_object(comm.rank), part.members

    assert run_local(3, body, node_of_rank=(0, 0, 1)) == [(1, [2, 0], (2, 0)), (0, [2, 0], (2, 0))]


@pytest.mark.parametrize("dies", [0, 1])
def test_who_waits_outside_hears_of_the_end_and_of_a_loss(dies: int) -> None:
    """Rank 2 waits for rank 0, which is lost, or is not, while others are."""

    def body(comm: Communicator) -> tuple[str, tuple[int, ...]]:
        world, part = comm, comm.part([0, 1])
        if comm.rank == dies:
            raise Killed
        waiting = part.barrier if part is not None else partial(world.recv_object, 0)
        with pytest.raises(RankLost):
            waiting()
        world = world.survivors()
        part = world.part([1, 0])
        assert part is not None
        assert part.members == (2, 1 - dies)
        if part.rank == 0:
            part.send_object({"the": "end"}, 1)
            return "sent", part.lost
        return part.recv_object(0)["the"], part.lost

    assert run_local(3, body) == [("end", (dies,)), ("sent", (dies,))]


def test_a_rank_that_waits_for_none_of_the_lost_is_told_by_those_who_do() -> None:
    def body(comm: Communicator) -> int:
        if comm.rank == 2:
            raise Killed
        with pytest.raises(RankLost):
            comm.wait(comm.irecv(np.zeros(1, np.uint8), 1 if comm.rank == 0 else 2, 0))
        return comm.survivors().size

    assert run_local(3, body) == [2, 2]


def test_working_ranks_and_spares_that_take_their_places() -> None:
    assert first_working([0, 0, 0], 0) == (0, 1, 2)
    assert first_working([0, 1, 0, 1], 3) == (0,)  # never rank 0, whatever its node
    assert first_working([0, 1, 1, 2, 3], 2) == (0, 1, 2), "nodes of their own, where there are such"
    assert next_working((0, 1), (1, 2, 3), (0, 1, 0, 1)) == (2, 1)
    assert next_working((0, 1), (3,), (0, 0, 0, 0)) == (3,)
    assert next_working((3, 1), (1, 3), (0, 0, 0, 0)) == (3, 1), "nothing moves"


@pytest.mark.parametrize(
    ("spares", "ranks", "recover", "says"),
    [
        (-1, 2, "mpi", r"spares = -1; give 0 or more"),
        (1, 2, "restart", r"spares = 1, and run\.recover = restart: a spare takes over in the same job only"),
        (2, 2, "mpi", r"spares = 2, and there are 2 ranks: none would train; start more than 2 ranks"),
    ],
)
def test_spares_that_make_no_sense(spares: int, ranks: int, recover: str, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        check_spares(spares, ranks, recover)
