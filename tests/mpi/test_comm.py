"""The MPI carrier under a real launcher: the contract of `comm.py`, at any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mpipipe.cluster import mpi
from mpipipe.cluster.agree import agree
from mpipipe.cluster.calibrate import measure_links, memory_share
from mpipipe.cluster.crossing import Crossed
from mpipipe.cluster.launch import default_threads, ranks_per_node
from mpipipe.cluster.mpi import MpiCommunicator, connect
from mpipipe.cluster.node import cores_available
from mpipipe.cluster.overlap import Felt, Overlap, choose, why
from mpipipe.errors import LaunchError

pytestmark = pytest.mark.mpi
MIB = 1 << 20


def pattern(nbytes: int, salt: int) -> np.ndarray:
    return (np.arange(nbytes, dtype=np.uint64) * 2654435761 + salt >> 7).astype(np.uint8)


def ring(comm: MpiCommunicator, nbytes: int, crossing: bool = False, tag: int = 3) -> None:
    """Everybody sends to the next and checks every byte from the one before."""
    got = np.zeros(nbytes, np.uint8)
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent = pattern(nbytes, comm.rank)
    requests = [comm.irecv(got, before, tag, crossing), comm.isend(sent, after, tag, crossing)]
    for request in requests:
        comm.wait(request)
        assert request.done()  # and may be asked again
    assert (got == pattern(nbytes, before)).all()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 65537, 4 * MIB + 1])
def test_bytes_arrive_whole_at_every_length(comm: MpiCommunicator, nbytes: int) -> None:
    ring(comm, nbytes)


def test_a_message_in_many_parts_arrives_whole_and_in_order(
    comm: MpiCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "PART_BYTES", 1000)
    for nbytes in (999, 1000, 1001, 99_999):
        ring(comm, nbytes)


@pytest.fixture
def apart(comm: MpiCommunicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[MpiCommunicator]:
    """As if each rank were on a node of its own."""
    monkeypatch.setattr(comm, "node_of_rank", tuple(range(comm.size)))
    yield comm
    comm.use_parts(False)
    comm.use_helper(True)


def test_what_crosses_between_nodes_goes_in_parts_where_that_is_chosen(
    apart: MpiCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "EAGER_BYTES", 1000)
    calls, post, away = list[int](), apart._post, apart.node_of_rank

    def counted(call: Callable[..., object], *rest: Any) -> object:
        return post(lambda *a: (calls.append(a[0][0].nbytes), call(*a))[1], *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(apart, "_post", counted)
    for nodes, on, crossing, most in (
        (away, False, True, 2500), ((0,) * apart.size, True, True, 2500),
        (away, True, False, 2500), (away, True, True, 1000 if apart.size > 1 else 2500),
    ):  # fmt: skip
        monkeypatch.setattr(apart, "node_of_rank", nodes)
        apart.use_parts(on)
        calls.clear()
        ring(apart, 2500, crossing)
        assert max(calls) == most


def test_a_message_in_parts_that_is_too_short_is_an_error_and_no_wait(
    apart: MpiCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "EAGER_BYTES", 1000)
    apart.use_parts(True)
    before, after = (apart.rank - 1) % apart.size, (apart.rank + 1) % apart.size
    receive = apart.irecv(np.zeros(3500, np.uint8), before, 1, crossing=True)
    send = apart.isend(np.zeros(1500, np.uint8), after, 1, crossing=True)
    with pytest.raises(RuntimeError, match="3500 bytes got 1500; the two ranks do not run the same plan"):
        apart.wait(receive)
    apart.wait(send)
    ring(apart, 2500, True)  # and nothing of it is left


def test_tags_match_in_any_order(comm: MpiCommunicator) -> None:
    tags = [0, 7, 1000, comm.tag_ub]
    bufs = {tag: np.zeros(1, np.uint8) for tag in tags}
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    requests = [comm.irecv(bufs[tag], before, tag) for tag in reversed(tags)]
    requests += [comm.isend(np.array([i], np.uint8), after, tag) for i, tag in enumerate(tags)]
    for request in requests:
        comm.wait(request)
    assert [int(bufs[tag][0]) for tag in tags] == [0, 1, 2, 3]


def test_a_message_shorter_than_its_receive_is_an_error(comm: MpiCommunicator) -> None:
    receive = comm.irecv(np.zeros(9, np.uint8), comm.rank, 11)
    send = comm.isend(np.zeros(5, np.uint8), comm.rank, 11)
    with pytest.raises(RuntimeError, match=f"receive from rank {comm.rank} with tag 11 of 9 bytes got 5"):
        comm.wait(receive)
    comm.wait(send)


@pytest.mark.mpi(min_size=2)
def test_a_message_longer_than_its_receive_is_an_error(comm: MpiCommunicator) -> None:
    if comm.rank == 0:
        comm.wait(comm.isend(np.zeros(9, np.uint8), 1, 11))
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match="receive from rank 0 with tag 11 of 5 bytes"):
            comm.wait(comm.irecv(np.zeros(5, np.uint8), 0, 11))
    comm.barrier()


def test_what_mpi_would_not_notice_is_refused(comm: MpiCommunicator) -> None:
    with pytest.raises(ValueError, match="float32"):
        comm.isend(np.zeros(3, np.float32), 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"no rank {comm.size}"):
        comm.irecv(np.zeros(3, np.uint8), comm.size, 0)


def test_collectives_see_all_ranks(comm: MpiCommunicator) -> None:
    assert comm.allgather_object((comm.rank, "x")) == [(rank, "x") for rank in range(comm.size)]
    assert comm.bcast_object({"from": comm.rank}, comm.size - 1) == {"from": comm.size - 1}
    for dtype in (np.float64, np.float32, np.int64, np.bool_):
        for shape in ((3, 2), (), (0,), (1,)):
            out = comm.allgather_array(np.full(shape, comm.rank % 2, dtype))
            assert (out.shape, out.dtype) == ((comm.size, *shape), dtype)
            assert all((out[rank] == rank % 2).all() for rank in range(comm.size))


def test_allgather_keeps_every_bit(comm: MpiCommunicator) -> None:
    bits = np.random.default_rng(comm.rank).integers(0, 2**64, 50, dtype=np.uint64)
    out = comm.allgather_array(bits.view(np.float64)).view(np.uint64)  # not-a-numbers included
    for rank in range(comm.size):
        expected = np.random.default_rng(rank).integers(0, 2**64, 50, dtype=np.uint64)
        assert (out[rank] == expected).all()


@pytest.mark.mpi(min_size=2)
def test_arrays_that_differ_are_an_error_on_every_rank(comm: MpiCommunicator) -> None:
    last = comm.size - 1
    with pytest.raises(RuntimeError, match=rf"rank {last} has <i4\(2,\), rank 0 has <f4\(2,\)"):
        comm.allgather_array(np.zeros(2, np.int32 if comm.rank == last else np.float32))
    assert comm.allgather_array(np.zeros(1)).shape == (comm.size, 1)  # the world goes on


def test_the_world_is_described_alike_on_all_ranks(comm: MpiCommunicator) -> None:
    assert len(comm.node_of_rank) == comm.size
    assert set(comm.node_of_rank) == set(range(max(comm.node_of_rank) + 1))
    assert comm.tag_ub >= 32767
    assert len(set(comm.allgather_object(comm.node_of_rank))) == 1
    assert sum(ranks_per_node(comm)) == comm.size
    assert len(set(comm.allgather_object(default_threads(comm, cores_available())))) == 1
    assert memory_share(comm) > 0


def test_clocks_are_compared(comm: MpiCommunicator) -> None:
    """Nothing that rank 0 did can be seen to happen later on another rank's shifted clock."""
    if max(comm.node_of_rank) == 0:
        assert comm.clock_offset_s == 0.0
    comm.barrier()
    stamp = comm.bcast_object(time.perf_counter())
    assert time.perf_counter() - comm.clock_offset_s > stamp - 1e-3


def test_links_are_measured_in_a_moment(comm: MpiCommunicator) -> None:
    comm.barrier()
    start = time.perf_counter()
    links = measure_links(comm)
    took_s = time.perf_counter() - start
    one_per_node = len(set(comm.node_of_rank)) == comm.size
    assert ("node" in links) == (not one_per_node)
    assert ("switch" in links) == (len(set(comm.node_of_rank)) > 1)
    assert all(link == links for link in comm.allgather_object(links))
    assert all(0 < link.latency_s < 0.1 and link.bytes_per_s > 1e6 for link in links.values())
    assert took_s < (2 if not comm.oversubscribed else 10)  # 0.1 s on a quiet machine


def test_ranks_that_differ_are_told_so(comm: MpiCommunicator) -> None:
    agree(comm, {"plan": "same"})
    if comm.size > 1:
        with pytest.raises(LaunchError, match="rank 1"):
            agree(comm, {"plan": str(comm.rank)})


@pytest.mark.mpi(min_size=2)
def test_a_large_message_moves_while_the_ranks_compute(comm: MpiCommunicator) -> None:
    """4 MB, beyond every eager limit: the last byte is there before anybody has called MPI again."""
    if not comm.helper_allowed:
        pytest.skip("this MPI does not let a second thread call it (MPI_THREAD_MULTIPLE)")
    a = np.ones((256, 256), np.float32)
    for _ in range(3):
        buf = np.full(4 * MIB, 7 if comm.rank == 0 else 0, np.uint8)
        comm.barrier()
        request = None
        if comm.rank < 2:
            request = comm.isend(buf, 1, 2) if comm.rank == 0 else comm.irecv(buf, 0, 2)
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end and not (comm.rank == 1 and buf[-1] == 7):
            a @ a
        if comm.rank < 2:
            assert buf[-1] == 7
            assert request is not None
            comm.wait(request)
        comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_without_a_helper_a_large_message_moves_when_the_ranks_ask(comm: MpiCommunicator) -> None:
    comm.use_helper(False)
    buf = np.full(4 * MIB, 7 if comm.rank == 0 else 0, np.uint8)
    request = None
    if comm.rank < 2:
        request = comm.isend(buf, 1, 2) if comm.rank == 0 else comm.irecv(buf, 0, 2)
        end = time.perf_counter() + 30
        while time.perf_counter() < end and buf[-1] != 7:
            comm.poll()
    arrived = comm.allgather_object(bool(comm.rank > 1 or buf[-1] == 7))  # nobody leaves before
    if request is not None:
        comm.wait(request)
    comm.use_helper(True)
    assert all(arrived)


KEPT = Overlap((Felt("node", 1, 1.0, 1.0, 2.0),))


class Everything(dict[str, Overlap]):
    """A cache that has each name: its digest has measured seconds in it."""

    def get(self, name: str, default: object = None) -> Overlap:  # type: ignore[override]
        return KEPT


def test_who_moves_messages_is_one_choice_that_is_known_again(comm: MpiCommunicator) -> None:
    name, found = choose(comm, {})
    assert len(set(comm.allgather_object((name, found)))) == 1
    levels = {f.level for f in found.felt}
    assert levels == (set(measure_links(comm)) if comm.helper_allowed else set())
    assert all(f.helper_s >= 0 and f.without_s >= 0 and f.bare_s > 0 for f in found.felt)
    assert bool(why(found, comm.transport)) == bool(levels)
    assert choose(comm, Everything())[1] == (KEPT if levels else found)
    comm.use_helper(True)


def test_between_nodes_both_ways_are_tried_and_one_is_chosen_for_all(
    apart: MpiCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = choose(apart, {})
    assert len(set(apart.allgather_object((found, apart._in_parts)))) == 1
    assert [c.whole_s > 0 and c.parts_s > 0 for c in found.crossed] == [True] * len(found.felt)
    assert apart._in_parts == found.parts
    assert ("that cross take" in why(found, apart.transport)) == bool(found.felt)
    crossed = Overlap(KEPT.felt, (Crossed(1 << 18, 2.0, 1.0),))
    monkeypatch.setattr(Everything, "get", lambda *_: crossed)
    choose(apart, Everything())
    assert apart._in_parts == bool(found.felt), "what is known is done"


def test_an_unused_receive_is_given_up_at_the_end() -> None:
    other = connect()
    other.irecv(np.zeros(4, np.uint8), other.rank, 1)
    other.close()


@pytest.mark.full
@pytest.mark.mpi(min_size=2)
def test_messages_over_2_gib_arrive(comm: MpiCommunicator) -> None:
    """Counts of MPI are 31 bits; takes 2 GiB of memory on each of two ranks."""
    nbytes = (2 << 30) + 5 * MIB + 3
    share_bytes = min(comm.allgather_object(memory_share(comm)))
    if share_bytes * comm.size < 3 * nbytes:
        pytest.skip(f"needs {3 * nbytes} bytes of memory, has {share_bytes * comm.size}")
    if comm.rank < 2:
        buf = np.zeros(nbytes, np.uint8)
        spots = np.append(np.arange(0, nbytes, 97 * MIB + 13), nbytes - 1)
        values = (np.arange(len(spots)) + 1).astype(np.uint8)
        if comm.rank == 0:
            buf[spots] = values
            comm.wait(comm.isend(buf, 1, 6))
        else:
            comm.wait(comm.irecv(buf, 0, 6))
            assert (buf[spots] == values).all()
            assert int(np.count_nonzero(buf)) == int(np.count_nonzero(values))
    comm.barrier()
