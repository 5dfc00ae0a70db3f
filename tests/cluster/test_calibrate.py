"""Links of a cluster made of threads: which levels exist, and the same answer on all ranks."""

from __future__ import annotations

import pytest

from mpipipe.cluster import calibrate
from mpipipe.cluster.calibrate import measure_links, memory_share, pairs_of
from mpipipe.cluster.local import run_local


@pytest.mark.parametrize(
    ("nodes", "levels"),
    [
        ((0,), set()),
        ((0, 0), {"node"}),
        ((0, 1), {"switch"}),
        ((0, 0, 1), {"node", "switch"}),
    ],
)
def test_levels_follow_from_the_nodes_and_all_ranks_agree(nodes: tuple[int, ...], levels: set[str]) -> None:
    results = run_local(len(nodes), measure_links, node_of_rank=nodes)
    assert all(links == results[0] for links in results)
    assert set(results[0]) == levels
    for link in results[0].values():
        assert 0 < link.latency_s < 1
        assert 0 < link.bytes_per_s < 1e16


def test_pairs_are_disjoint_and_of_their_level() -> None:
    nodes = (0, 1, 0, 1, 2, 2, 0)
    pairs = run_local(7, pairs_of, node_of_rank=nodes)[0]
    assert pairs["node"] == {0: 2, 2: 0, 1: 3, 3: 1, 4: 5, 5: 4}
    assert pairs["switch"] == {0: 1, 1: 0}


def test_memory_is_shared_by_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "memory_available_bytes", lambda environ: 1000)
    assert run_local(4, memory_share, node_of_rank=(0, 0, 1, 0)) == [333, 333, 1000, 333]
