"""`calibrate` on threads that pretend to be ranks of two nodes; the rates are made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mpipipe.cluster import links
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.doctor.facts import Route
from mpipipe.cluster.local import run_local
from mpipipe.commands import calibrate
from mpipipe.config.cluster import load_cluster
from mpipipe.errors import ConfigError

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
    monkeypatch.setattr(links, "LENGTHS", (8, 4096, 1 << 20))
    monkeypatch.setattr(links, "SWEEPS", 1)


def calibrated(file: Path, gemm: str = "mkl") -> list[str]:
    def body(comm: Communicator) -> str:
        return calibrate.calibrate(comm, 1, gemm, file, SimpleNamespace(doing=""))  # type: ignore[arg-type]

    return run_local(len(NODES), body, node_of_rank=NODES)


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


def test_fp32_is_that_of_the_route_which_the_training_takes(tmp_path: Path) -> None:
    calibrated(tmp_path / "c.yaml", "onednn")
    device = load_cluster(tmp_path / "c.yaml").device
    assert device is not None
    assert device.flops_per_s.fp32 == 2e11


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"-o .*no/c.yaml: cannot be written \(No such file"):
        calibrated(tmp_path / "no" / "c.yaml")
