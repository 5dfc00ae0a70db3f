"""The in-process carrier keeps the contract of `comm.py`, and never hangs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import DeadlockError


def message(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def test_a_ring_carries_every_rank_s_bytes_to_the_next() -> None:
    def body(comm: Communicator) -> list[int]:
        got = message(0, 0)
        receive = comm.irecv(got, (comm.rank - 1) % comm.size, 5)
        comm.wait(comm.isend(message(comm.rank, 9), (comm.rank + 1) % comm.size, 5))
        comm.wait(receive)
        return got.tolist()

    assert run_local(4, body) == [[3, 9], [0, 9], [1, 9], [2, 9]]


def test_a_send_is_not_done_before_its_receive_is_posted() -> None:
    def body(comm: Communicator) -> bool | None:
        if comm.rank == 0:
            request = comm.isend(message(1), 1, 0)
            before = request.done()
            comm.barrier()  # rank 1 posts after this
            comm.wait(request)
            return before
        comm.barrier()
        comm.wait(comm.irecv(message(0), 0, 0))
        return None

    assert run_local(2, body)[0] is False


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(tags=st.lists(st.integers(0, 3), min_size=1, max_size=8), data=st.data())
def test_tags_match_in_any_order_and_equal_tags_in_the_order_of_posting(
    tags: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(tags))))

    def body(comm: Communicator) -> list[tuple[int, int]]:
        if comm.rank == 0:
            for request in [comm.isend(message(i), 1, tag) for i, tag in enumerate(tags)]:
                comm.wait(request)
            return []
        bufs = [(tags[i], message(0)) for i in order]
        for request in [comm.irecv(buf, 0, tag) for tag, buf in bufs]:
            comm.wait(request)
        return [(tag, int(buf[0])) for tag, buf in bufs]

    got = run_local(2, body)[1]
    for tag in set(tags):
        assert [i for t, i in got if t == tag] == [i for i, t in enumerate(tags) if t == tag]


def test_messages_to_oneself_and_empty_messages_arrive() -> None:
    def body(comm: Communicator) -> int:
        got = message(0)
        requests = [comm.irecv(got, 0, 1), comm.irecv(message(), 0, 2)]
        requests += [comm.isend(message(), 0, 2), comm.isend(message(8), 0, 1)]
        for request in requests:
            comm.wait(request)
        return int(got[0])

    assert run_local(1, body) == [8]


def test_collectives_see_all_ranks_and_give_each_its_own_copy() -> None:
    def body(comm: Communicator) -> tuple[object, ...]:
        mine = [comm.rank]
        objects = comm.allgather_object(mine)
        objects[0].append(99)
        array = comm.allgather_array(np.full((2, 1), comm.rank, np.float32))
        comm.barrier()
        return mine, comm.bcast_object({"from": comm.rank}, root=2), array.tolist(), array.shape

    for rank, result in enumerate(run_local(3, body)):
        assert result == ([rank], {"from": 2}, [[[0], [0]], [[1], [1]], [[2], [2]]], (3, 2, 1))


def test_arrays_that_differ_are_named_on_every_rank() -> None:
    errors: list[str] = []

    def body(comm: Communicator) -> None:
        with pytest.raises(RuntimeError) as caught:
            comm.allgather_array(np.zeros(2, np.float32 if comm.rank else np.float64))
        errors.append(str(caught.value))

    run_local(3, body)
    assert len(errors) == 3
    assert all("rank 1 has <f4(2,), rank 0 has <f8(2,)" in error for error in errors)


def test_different_collectives_are_an_error() -> None:
    def body(comm: Communicator) -> None:
        comm.barrier() if comm.rank else comm.allgather_object(0)

    with pytest.raises(RuntimeError, match="collective 1"):
        run_local(2, body)


def test_an_exception_ends_all_ranks_and_names_its_own() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            raise KeyError("gone")
        comm.wait(comm.irecv(message(0), 2, 0))

    with pytest.raises(KeyError, match="gone") as caught:
        run_local(4, body)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]
    assert not [t for t in threading.enumerate() if t.name.startswith("rank-")]


def test_abort_ends_all_ranks() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort(7)
        comm.barrier()

    with pytest.raises(RuntimeError, match="rank 1 aborted all ranks with exit code 7"):
        run_local(3, body)


def test_a_circle_of_sends_is_a_deadlock_not_a_hang() -> None:
    def body(comm: Communicator) -> None:
        comm.wait(comm.isend(message(0), 1 - comm.rank, 4))
        comm.wait(comm.irecv(message(0), 1 - comm.rank, 4))

    with pytest.raises(DeadlockError) as caught:
        run_local(2, body)
    assert "rank 0 waits for its send to rank 1 with tag 4" in str(caught.value)
    assert "rank 1 waits for its send to rank 0 with tag 4" in str(caught.value)


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.wait(comm.irecv(message(0), 1, 0))

    with pytest.raises(DeadlockError, match="rank 0 waits for its receive from rank 1 with tag 0"):
        run_local(2, body)


def test_lengths_that_differ_are_an_error() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank:
            comm.wait(comm.irecv(message(0, 0, 0), 0, 0))
        else:
            comm.wait(comm.isend(message(1, 2), 1, 0))

    with pytest.raises(RuntimeError, match="of 3 bytes got 2"):
        run_local(2, body)


@pytest.mark.parametrize(
    ("buf", "peer", "tag", "says"),
    [
        (np.zeros(2, np.float32), 0, 0, "float32"),
        (np.zeros((2, 2), np.uint8), 0, 0, r"\(2, 2\)"),
        (np.zeros(8, np.uint8)[::2], 0, 0, "contiguous"),
        (np.zeros(1, np.uint8), 1, 0, "no rank 1 in a world of 1"),
        (np.zeros(1, np.uint8), 0, 32768, r"outside 0\.\.32767"),
    ],
)
def test_what_mpi_would_not_notice_is_refused(buf: np.ndarray, peer: int, tag: int, says: str) -> None:
    for call in ("isend", "irecv"):
        with pytest.raises(ValueError, match=says):
            run_local(1, lambda comm, call=call: getattr(comm, call)(buf, peer, tag))
