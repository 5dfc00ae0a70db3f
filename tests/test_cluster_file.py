"""A cluster's file: levels of links, ranks that differ, what does not fit, and the way back from a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpipipe.cluster.devices import Rates, devices_of
from mpipipe.config.cluster import ClusterConfig, load_cluster
from mpipipe.config.cluster_text import cluster_text
from mpipipe.errors import ConfigError, PlanError
from mpipipe.values import Cluster, Link, from_json, to_json

DEVICE = (
    'device: {kind: "any", threads: 4, memory: 1 GiB, flops_per_s: {fp32: 1.0e+9, bf16: 2.0e+9}, '
    "bytes_per_s: 1.0e+10}\n"
)
LINK = "{latency_s: 1.0e-6, bytes_per_s: 1.0e+9}"
LEVELS = (
    f"ranks_per_node: 8\nranks_per_numa: 4\nranks_per_core: 2\n"
    f"links: {{core: {LINK}, numa: {LINK}, node: {LINK}, switch: {LINK}}}\n"
)


def written(tmp_path: Path, text: str) -> ClusterConfig:
    (tmp_path / "c.yaml").write_text(text)
    return load_cluster(tmp_path / "c.yaml")


def of(config: ClusterConfig, n_ranks: int) -> Cluster:
    return config.of(n_ranks, "fp32", 4, 0, None)


def test_units_follow_from_how_many_ranks_share_one(tmp_path):
    cluster = of(written(tmp_path, DEVICE + LEVELS), 16)
    assert cluster.spanned == ("core", "numa", "node", "switch")
    assert [cluster.level(0, other) for other in (1, 2, 4, 8)] == ["core", "numa", "node", "switch"]
    assert cluster.level(8, 9) == "core"
    assert cluster.level(7, 8) == "switch"
    assert of(written(tmp_path, DEVICE + LEVELS), 2).spanned == ("core",)


def test_units_may_be_told_rank_by_rank(tmp_path):
    numbers = "node_of_rank: [0, 1, 0, 1, 0]\nnuma_of_rank: [0, 1, 0, 1, 2]\nranks_per_core: 2\n"
    links = f"links: {{core: {LINK}, numa: {LINK}, node: {LINK}, switch: {LINK}}}\n"
    cluster = of(written(tmp_path, DEVICE + numbers + links), 5)
    assert cluster.node_of_rank == (0, 1, 0, 1, 0)
    assert cluster.core_of_rank == (0, 1, 0, 1, 2)
    assert cluster.level(0, 4) == "node"
    with pytest.raises(
        PlanError, match=r"6 ranks, but node_of_rank of the cluster file has 5; .*-n 6 python"
    ):
        of(written(tmp_path, DEVICE + numbers + links), 6)


def test_a_link_has_its_contention(tmp_path):
    link = "{latency_s: 1.0e-6, bytes_per_s: 1.0e+9, contention: 2.5}"
    cluster = of(written(tmp_path, f"{DEVICE}ranks_per_node: 4\nlinks: {{node: {link}}}\n"), 4)
    assert cluster.link(0, 3) == Link(1e-6, 1e9, 2.5)
    assert from_json(Cluster, to_json(cluster)) == cluster


def test_a_cluster_of_an_older_plan_is_read():
    old = '{"devices": [], "node_of_rank": [0], "links": {"node": {"latency_s": 1.0, "bytes_per_s": 2.0}}}'
    assert from_json(Cluster, old) == Cluster((), (0,), {"node": Link(1.0, 2.0)})


@pytest.mark.parametrize(
    ("levels", "n_ranks", "words"),
    [
        (
            f"links: {{node: {LINK}}}\n",
            2,
            "of 2 ranks, 0 and 1 are on two nodes, but links.switch is missing",
        ),
        (f"ranks_per_node: 3\nlinks: {{switch: {LINK}}}\n", 4, "0 and 1 are on one node, but links.node is"),
        (
            f"ranks_per_node: 4\nranks_per_numa: 2\nlinks: {{node: {LINK}}}\n",
            4,
            "of 4 ranks, 0 and 1 are in one NUMA domain, .*, mpirun -n 4 python -m mpipipe calibrate",
        ),
    ],
)
def test_a_level_that_is_used_must_be_given(tmp_path, levels, n_ranks, words):
    config = written(tmp_path, DEVICE + levels)
    with pytest.raises(PlanError, match=words):
        of(config, n_ranks)
    assert of(config, 1).spanned == ()


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (
            f"links: {{numa: {LINK}}}\n",
            "links.numa is given, but not which ranks it links; add ranks_per_numa",
        ),
        (
            "node_of_rank: [0, 1]\nnuma_of_rank: [0, 0]\nlinks: {}\n",
            "rank 1 is in numa 0, which is in node 0 and in node 1; number each numa",
        ),
        (
            "ranks_per_node: 2\nnuma_of_rank: [0, 1, 0, 1]\nlinks: {}\n",
            "rank 2 is in numa 0, which is in node 0 and in node 1; number each numa",
        ),
        (
            "ranks_per_node: 4\nranks_per_numa: 1\ncore_of_rank: [0, 0]\nlinks: {}\n",
            "rank 1 is in core 0, which is in numa 0 and in numa 1; number each core",
        ),
        (
            "links: {node: {latency_s: 0.0, bytes_per_s: 1.0}}\n",
            "line 2: links.node.latency_s = 0.0; expected",
        ),
        (
            "links: {node: {latency_s: 1.0, bytes_per_s: -1.0}}\n",
            "links.node.bytes_per_s = -1.0; expected great",
        ),
        (
            f"links: {{node: {LINK[:-1]}, contention: 0.5}}}}\n",
            "links.node.contention = 0.5; expected greater",
        ),
        (f"ranks_per_node: 0\nlinks: {{node: {LINK}}}\n", "line 2: ranks_per_node = 0; expected greater"),
        (
            f"links: {{socket: {LINK}}}\n",
            "'links.socket' is not a key.*valid here: core, numa, node, switch",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(tmp_path, levels, words):
    with pytest.raises(ConfigError, match=words):
        written(tmp_path, DEVICE + levels)


def test_a_training_config_is_no_cluster_file():
    example = Path(__file__).resolve().parents[1] / "examples" / "gpt.yaml"
    with pytest.raises(ConfigError, match=r"gpt.yaml: this is a training config .*, not a cluster file") as e:
        load_cluster(example)
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DEVICE.replace("{fp32: 1.0e+9, bf16: 2.0e+9}", "1.0e+9"), "expected keys fp32, bf16"),
        ("device: 3\nlinks: {}\n", "device = 3; expected keys kind, threads, memory, flops_per_s"),
        ("devices: [3]\nlinks: {}\n", "devices.0 = 3; expected keys kind, threads"),
        (f"{DEVICE}links: {{node: fast}}\n", "expected keys latency_s, bytes_per_s, contention"),
        (f"{DEVICE}links: fast\n", "links = 'fast'; expected keys core, numa, node, switch"),
    ],
)
def test_what_is_no_section_is_told_its_keys(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, text if "links" in text else text + "links: {}\n")


def test_ranks_of_a_cluster_without_links_have_none_to_use():
    cluster = Cluster((), (0, 1), {})
    assert cluster.link(0, 0).seconds(8) == 0
    with pytest.raises(PlanError, match=r"at the level 'switch', but the cluster has no links; give links"):
        cluster.link(0, 1)


def rates(kind: str = "cpu", memory: int = 8 << 30, speed: float = 1.0) -> Rates:
    return Rates(kind, 2, memory, speed * 1e11, speed * 3e11, 2e10)


def test_ranks_that_differ_by_noise_are_on_one_device():
    (device,) = devices_of([rates(speed=s) for s in (1.0, 1.1, 0.95, 1.05)])
    assert (device.count, device.kind, device.threads) == (4, "cpu", 2)
    assert device.flops_per_s.fp32 == pytest.approx(1.025e11)


def test_ranks_that_differ_are_counted_in_their_order():
    ranks = [
        rates(),
        rates(speed=0.5),
        rates(speed=0.52),
        rates(memory=4 << 30),
        rates("gpu"),
        rates(speed=1.1),
    ]
    found = devices_of(ranks)
    assert [d.count for d in found] == [1, 2, 1, 1, 1]
    assert [d.kind for d in found] == ["cpu", "cpu", "cpu", "gpu", "cpu"]
    assert found[0].flops_per_s == found[4].flops_per_s
    assert found[1].flops_per_s.fp32 == pytest.approx(0.51e11)
    assert found[2].memory == 4 << 30


@pytest.mark.parametrize(
    "devices", [[rates()], [rates(), rates(memory=12345678, speed=1 / 3), rates('"gpu": H200, #1 \\ µ')]]
)
@pytest.mark.parametrize("levels", [LEVELS, "node_of_rank: [0, 1, 0]\nlinks: {}\n"])
def test_a_file_that_is_written_is_read_back_as_the_same(tmp_path, devices, levels):
    config = written(tmp_path, DEVICE + levels)
    counted = devices_of(devices)
    if len(counted) > 1:
        config = ClusterConfig(**{**dict(config), "device": None, "devices": counted})
    assert written(tmp_path, cluster_text(config, "made up\nof two lines")) == config


def test_the_example_has_every_key_that_a_person_writes():
    example = Path(__file__).resolve().parents[1] / "examples" / "cluster.yaml"
    text = example.read_text()
    assert of(load_cluster(example), 1).node_of_rank == (0,)
    for key in ("contention", "ranks_per_numa", "node_of_rank", "calibrate"):
        assert key in text
