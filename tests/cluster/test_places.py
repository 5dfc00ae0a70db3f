"""Units and pairs of made-up jobs, and links between threads that pretend to be there."""

from __future__ import annotations

import pytest

from mpipipe.cluster import links
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.doctor.facts import Binding
from mpipipe.cluster.links import measure_levels
from mpipipe.cluster.local import run_local
from mpipipe.cluster.places import pairs_by_level, places
from mpipipe.values import Cluster, Device, Link

ANY = Device("", 1.0, 0, 1)
DOMAINS = ((0, 1, 2, 3), (4, 5, 6, 7))  # two of four hyperthreads, on two cores each


def bound(*usable: int, domains: tuple[tuple[int, ...], ...] = DOMAINS) -> Binding:
    siblings = tuple(sorted({(core // 2 * 2, core // 2 * 2 + 1) for core in usable}))
    return Binding(usable, len(usable), tuple(range(8)), siblings, domains)


def found(nodes: tuple[int, ...], *bindings: Binding) -> Cluster:
    results = run_local(len(nodes), lambda comm: places(comm, bindings[comm.rank]), node_of_rank=nodes)
    assert all(result == results[0] for result in results)
    return results[0]


def test_ranks_bound_to_hyperthreads_share_cores_and_domains():
    where = found((0,) * 6, bound(0), bound(1), bound(2), bound(4), bound(5), bound(7))
    assert where.numa_of_rank == (0, 0, 0, 1, 1, 1)
    assert where.core_of_rank == (0, 0, 1, 2, 2, 3)
    assert where.spanned == ("core", "numa", "node")
    assert [where.level(0, other) for other in range(1, 6)] == ["core", "numa", "node", "node", "node"]


def test_cores_of_the_same_number_on_two_nodes_are_two():
    where = found((0, 0, 1, 1), bound(0), bound(4), bound(0), bound(4))
    assert where.numa_of_rank == (0, 1, 2, 3)
    assert where.core_of_rank == ()  # nobody shares one
    assert where.spanned == ("node", "switch")


@pytest.mark.parametrize(
    "bindings",
    [
        (bound(0, 1, 2, 3, 4, 5, 6, 7), bound(4)),  # not bound
        (bound(0, domains=((0, 1, 2, 3, 4, 5, 6, 7),)), bound(4, domains=((0, 1, 2, 3, 4, 5, 6, 7),))),
        (bound(0, domains=()), bound(4, domains=())),  # the kernel does not tell
    ],
)
def test_a_domain_that_cannot_be_told_or_is_the_whole_node_is_left_out(bindings):
    where = found((0, 0), *bindings)
    assert (where.numa_of_rank, where.spanned) == ((), ("node",))


def test_pairs_are_disjoint_alone_on_their_nodes_and_then_all_at_once():
    where = found((0, 0, 0, 1, 1, 1), *[bound(0, 2), bound(1, 3), bound(4)] * 2)
    pairs = pairs_by_level(where)
    assert list(pairs) == ["numa", "node", "switch"]
    assert pairs["numa"].alone == pairs["numa"].together == {0: 1, 1: 0, 3: 4, 4: 3}
    assert pairs["node"].together == {0: 2, 2: 0, 3: 5, 5: 3}
    assert pairs["switch"].alone == {0: 3, 3: 0}
    assert pairs["switch"].together == {0: 3, 3: 0, 1: 4, 4: 1, 2: 5, 5: 2}


@pytest.mark.slow
def test_every_level_is_measured_and_all_ranks_agree(monkeypatch):
    monkeypatch.setattr(links, "LENGTHS", (8, 4096, 1 << 20))
    monkeypatch.setattr(links, "SWEEPS", 1)
    bindings = [bound(0), bound(1), bound(4), bound(0)]

    def measured(comm: Communicator):
        return measure_levels(comm, places(comm, bindings[comm.rank]))

    results = run_local(4, measured, node_of_rank=(0, 0, 0, 1))
    assert all(result == results[0] for result in results)
    assert list(results[0]) == ["core", "node", "switch"]
    for level in results[0].values():
        assert level.link.latency_s > 0
        assert level.link.bytes_per_s > 0
        assert level.link.contention == 1.0  # there is one pair on each level
        assert level.pairs == 1


def test_all_pairs_at_once_may_take_longer(monkeypatch):
    """A made-up network: each message takes as long as there are pairs that talk."""

    def measured(comm, peers, lengths, quantile):
        if comm.rank not in peers or comm.rank > peers[comm.rank]:
            return None
        return tuple(1e-6 + len(peers) / 2 * nbytes / 1e9 for nbytes in lengths)

    monkeypatch.setattr(links, "measure_pair", measured)
    where = Cluster((ANY,) * 6, (0, 0, 0, 1, 1, 1), {})
    found = run_local(6, lambda comm: measure_levels(comm, where), node_of_rank=where.node_of_rank)[0]
    assert found["switch"].link.contention == pytest.approx(3.0)
    assert found["switch"].link.bytes_per_s == pytest.approx(1e9)
    assert found["node"].pairs == 2
    assert found["node"].link.contention == 1.0


def test_a_rank_that_fails_leaves_none_waiting():
    def measured(comm: Communicator):
        if comm.rank == 1:
            raise RuntimeError("no network")
        return measure_levels(comm, Cluster((ANY,) * 2, (0, 0), {"node": Link(1.0, 1.0)}))

    with pytest.raises(RuntimeError, match="no network"):
        run_local(2, measured)
