"""`calibrate` on threads that pretend to be ranks of two nodes; the rates are made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mpipipe.cluster import links
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.devices import Rates
from mpipipe.cluster.doctor.facts import Route
from mpipipe.cluster.links import MeasuredLink
from mpipipe.cluster.local import run_local
from mpipipe.commands import calibrate
from mpipipe.config.cluster import load_cluster
from mpipipe.errors import ConfigError, LaunchError
from mpipipe.values import Cluster, Device, Link

NODES = (0, 0, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = (
        Route("mkl", 1e11, 0.0, True),
        Route("onednn", 2e11, 0.0, True),
        Route("bf16", 4e11, 1e-3, False),
    )
    monkeypatch.setattr(calibrate, "measure_routes", lambda: routes)
    monkeypatch.setattr(calibrate, "triad_bytes_per_s", lambda: 1.2344e10)
    monkeypatch.setattr(calibrate, "memory_share", lambda comm: (9 << 30) + comm.rank)
    monkeypatch.setattr(calibrate, "cores_available", lambda: frozenset({0, 1}))
    monkeypatch.setattr(calibrate, "load_average", lambda: 0.0)
    monkeypatch.setattr(links, "LENGTHS", (8, 4096, 1 << 20))
    monkeypatch.setattr(links, "SWEEPS", 1)


def calibrated(
    file: Path, gemm: str = "mkl", threads: int = 1, nodes: tuple[int, ...] = NODES, crowded: bool = False
) -> list[str]:
    def body(comm: Communicator) -> str:
        watch = SimpleNamespace(doing="")
        comm.oversubscribed = crowded and comm.rank == 1  # type: ignore[misc]
        return calibrate.calibrate(comm, threads, gemm, file, watch)  # type: ignore[arg-type]

    return run_local(len(nodes), body, node_of_rank=nodes)


@pytest.mark.slow
def test_one_rank_tells_and_the_file_is_a_cluster(tmp_path: Path) -> None:
    said, *others = calibrated(tmp_path / "cluster.yaml")
    assert others == ["", ""]
    assert said.startswith("measured: 3 ranks on 2 nodes, ")
    rows = [line.split()[0] for line in said.splitlines() if line.startswith(("node", "switch"))]
    assert rows == ["node", "switch"]
    assert f"plan config.yaml --ranks 3 --cluster {tmp_path}/cluster.yaml" in said
    config = load_cluster(tmp_path / "cluster.yaml")
    assert config.device is not None
    assert config.device.flops_per_s.fp32 == 1e11
    assert config.device.bytes_per_s == 1.234e10
    assert config.device.memory == 9 << 30
    cluster = config.of(3, "bf16", 1, 0, None)
    assert cluster.node_of_rank == NODES
    assert cluster.spanned == ("node", "switch")


@pytest.mark.slow
def test_the_rates_are_those_of_the_route_that_a_training_would_take(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    for asked, gemm, rate in (("auto", "onednn", 2e11), ("mkl", "mkl", 1e11)):
        calibrated(file, asked)
        config = load_cluster(file)
        assert config.device is not None
        assert (config.gemm, config.device.flops_per_s.fp32) == (gemm, rate)


@pytest.mark.slow
def test_a_busy_machine_is_said_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, words = tmp_path / "c.yaml", "note: others use this machine too: load 1000.0 on "
    assert words not in calibrated(file)[0]
    assert words not in file.read_text()
    monkeypatch.setattr(calibrate, "load_average", lambda: 1000.0)
    assert words in calibrated(file)[0]
    assert f"# {words}" in file.read_text()
    load_cluster(file)


@pytest.mark.slow
def test_ranks_that_share_cores_are_said_and_written(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    assert "note: ranks outnumber the cores of a node" in calibrated(file, crowded=True)[0]
    assert "# note: ranks outnumber the cores" in file.read_text()
    load_cluster(file)


@pytest.mark.parametrize("nodes", [(0,), (0, 0)])
@pytest.mark.slow
def test_on_one_node_what_is_missing_is_said_and_can_be_filled_in(
    tmp_path: Path, nodes: tuple[int, ...]
) -> None:
    file = tmp_path / "c.yaml"
    assert "note: links between nodes (switch) were not measured" in calibrated(file, nodes=nodes)[0]
    given = load_cluster(file).links
    assert (given.node is None, given.switch) == (len(nodes) == 1, None)
    text = file.read_text().replace("...", "1.0e-6").replace("links: {}", "# links: {}")
    file.write_text(text.replace("# switch:", "switch:").replace("# links: {switch", "links: {switch"))
    switch = load_cluster(file).links.switch
    assert switch is not None
    assert switch.latency_s == 1e-6
    assert "note:" not in calibrated(file)[0], "of two nodes"


def test_threads_without_cores_of_their_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--threads 8, but rank 0 may use 2 cores: .* give --threads 2"):
        calibrated(tmp_path / "c.yaml", threads=8)
    assert not (tmp_path / "c.yaml").exists()


def test_a_cluster_is_written_as_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"-o .*c.json: a cluster is written as YAML; name a file"):
        calibrated(tmp_path / "c.json")


@pytest.mark.slow
def test_fp32_is_that_of_the_route_which_the_training_takes(tmp_path: Path) -> None:
    calibrated(tmp_path / "c.yaml", "onednn")
    device = load_cluster(tmp_path / "c.yaml").device
    assert device is not None
    assert device.flops_per_s.fp32 == 2e11


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"-o .*no/c.yaml: cannot be written \(No such file"):
        calibrated(tmp_path / "no" / "c.yaml")


@pytest.mark.parametrize(
    ("nodes", "numa", "cores", "keys"),
    [
        ((0, 0, 1, 1), (), (), {"ranks_per_node"}),
        ((0, 0, 0, 1), (), (), {"ranks_per_node"}),
        ((0, 1, 1, 1), (), (), {"node_of_rank"}),
        ((0, 1, 0, 1), (), (), {"node_of_rank"}),
        ((0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3), {"ranks_per_numa", "ranks_per_core"}),
        ((0,) * 4, (0, 1, 0, 1), (), {"numa_of_rank"}),
        ((0,) * 4, (0, 0, 0, 1), (0, 0, 1, 2), {"core_of_rank"}),
        ((0, 0, 0, 1), (0, 0, 1, 2), (), {"numa_of_rank"}),
    ],
)
def test_units_are_told_as_shortly_as_they_can_be(
    nodes: tuple[int, ...], numa: tuple[int, ...], cores: tuple[int, ...], keys: set[str]
) -> None:
    where = Cluster((Device("", 1.0, 0, 1),) * len(nodes), nodes, {}, numa, cores)
    measured = {level: MeasuredLink(Link(1e-6, 1e9), 1, 0.0) for level in where.spanned}
    ranks = [Rates("cpu", 1, 1 << 30, 1e11, 2e11, 1e10)] * len(nodes)
    config = calibrate.configured(ranks, where, measured, "mkl")
    assert keys <= config.model_fields_set
    cluster = config.of(len(nodes), "fp32", 1, 0, None)
    assert (cluster.node_of_rank, cluster.numa_of_rank, cluster.core_of_rank) == (nodes, numa, cores)
