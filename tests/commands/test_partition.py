"""`python -m mpipipe partition`: both formats, what is printed and written, each fault one message."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpipipe.commands.graphs import parse_json, parse_profile
from mpipipe.commands.partition import main
from mpipipe.planner.placement import Placement, is_contiguous, loads, search
from mpipipe.report.placement import placement_text

PROFILE = """\
node1 -- Input0 -- forward_compute_time=50.000, backward_compute_time=0.000, activation_size=600.000, parameter_size=0.000
node4 -- Linear(in_features=8, out_features=8) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=10.0, parameter_size=4000000.0
node2 -- Conv2d(3, 8, kernel_size=(3, 3)) -- forward_compute_time=10.0, backward_compute_time=20.0, activation_size=[60.0; 40.0], parameter_size=100.0
node3 -- Conv2d(8, 8, kernel_size=(3, 3)) -- forward_compute_time=12.5, backward_compute_time=20.0, activation_size=20.0, parameter_size=100.0 -- stage_id=0
\tnode1 -- node2
    node2 -- node3
\tnode3 -- node4
"""  # noqa: E501
Partition = Callable[..., tuple[int, str, str]]


def graph(n: int = 6) -> dict[str, Any]:
    """A training chain of n layers: 2 ms each, half a millisecond for an output, backward beside it."""

    def node(v: int, backward: bool) -> dict[str, Any]:
        return {
            "id": v + n * backward, "name": f"layer{v}{'_grad' * backward}", "colorClass": v, "size": 100.0,
            "supportedOnFpga": 1, "cpuLatency": 30.0, "fpgaLatency": 2.0, "isBackwardNode": int(backward),
        }  # fmt: skip

    ahead = [{"sourceId": v, "destId": v + 1, "cost": 0.5} for v in range(n - 1)]
    back = [{"sourceId": n + v + 1, "destId": n + v, "cost": 0.5} for v in range(n - 1)]
    return {
        "maxFPGAs": 3, "maxCPUs": 0, "maxSizePerFPGA": 1000.0, "edges": ahead + back,
        "nodes": [node(v, backward) for backward in (False, True) for v in range(n)],
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Partition:
    """`run(graph or text, arguments...)`: exit code, stdout, stderr; in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(given: object, *arguments: str) -> tuple[int, str, str]:
        text = given if isinstance(given, str) else json.dumps(given)
        Path("graph").write_text(text)
        return (main(["graph", *arguments]), *capsys.readouterr())

    return call


@pytest.mark.parametrize("options", [[], ["--contiguous"]])
def test_it_says_who_holds_what_and_what_is_proved(run: Partition, options: list[str]) -> None:
    code, out, err = run(graph(), *options, "-o", "out.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "graph: 12 nodes, 10 edges on 3 accelerators of 1000 bytes"
    rows = [line.split() for line in lines if line.startswith("accelerator")]
    assert [row[2] for row in rows] == ["4", "4", "4"]
    assert sorted(float(row[-3]) for row in rows) == [9, 9, 10]
    assert "load 10 ms on accelerator" in lines[-1]
    assert "bound 10 ms, gap 0.00%: proved optimal" in lines[-1]
    written = json.loads(Path("out.json").read_text())
    assert (written["load"], written["bound"], written["gap"]) == (pytest.approx(10), pytest.approx(10), 0)
    assert sorted(itertools.chain(*written["stages"])) == list(range(12))
    assert written["devices"] == ["accelerator 0", "accelerator 1", "accelerator 2"]
    assert written["seconds"] > 0


def test_a_row_names_the_first_and_the_last_node(run: Partition) -> None:
    _, out, _ = run(graph(), "--contiguous")
    first = next(line.split() for line in out.splitlines() if line.startswith("accelerator 0"))
    assert first[3:5] == ["layer0", "layer0_grad"]


def test_devices_and_memory_can_be_others(run: Partition) -> None:
    _, out, _ = run(graph(), "--devices", "2", "--memory", "1 MiB", "--budget", "2s")
    assert "on 2 accelerators of 1 MiB" in out
    assert "load 13 ms" in out


def test_a_cpu_is_a_device_of_its_own(run: Partition) -> None:
    _, out, _ = run(graph() | {"maxCPUs": 1, "maxFPGAs": 2, "maxSizePerFPGA": 400.0}, "-o", "out.json")
    written = json.loads(Path("out.json").read_text())
    assert written["devices"] == ["accelerator 0", "accelerator 1", "cpu 0"]
    assert len(written["stages"][2]) == 4
    assert written["load"] == pytest.approx(120)
    assert "cpu 0" in out


@pytest.mark.slow
def test_where_memory_keeps_nodes_off_the_accelerators_it_is_said(run: Partition) -> None:
    """Two nodes of 100 bytes share a device each time."""
    with_cpu = graph() | {"maxCPUs": 1}
    code, out, _ = run(with_cpu | {"maxSizePerFPGA": 150.0})
    assert code == 0
    assert "\n3 of 3 accelerators unused\n" in out
    assert "no accelerator can hold 12 of the 12 nodes: what has to be on one device takes up to\n" in out
    assert "\n200 bytes, each has 150 bytes; --memory 200B would hold the largest\n" in out
    _, out, _ = run(with_cpu | {"maxSizePerFPGA": 300.0})
    assert "the accelerators lack 300 bytes to hold all nodes, which take 1200 bytes\n" in out
    assert "unused" not in out
    _, out, _ = run(with_cpu)
    assert "1 of 1 CPU unused" in out
    assert "lack" not in out
    assert "can hold" not in out


def test_devices_and_memory_of_the_command_need_not_be_in_the_file(run: Partition) -> None:
    given = {key: value for key, value in graph().items() if key not in ("maxFPGAs", "maxSizePerFPGA")}
    code, out, _ = run(given, "--devices", "1", "--memory", "1MiB", "--budget", "1s")
    assert code == 0
    assert "12 nodes, 10 edges on 1 accelerator of 1 MiB\n" in out


def test_a_gap_that_is_small_is_not_proved(run: Partition) -> None:
    problem = parse_json(json.dumps(graph(1)), "it")
    found = loads(problem, [0, 0])
    for bound_s, said in ((found.most_s * (1 - 2e-5), "gap 0.002%, not proved"), (3.2e-3, "gap 25.00%, not")):
        assert said in placement_text(problem, Placement((0, 0), found, bound_s, False, 0.1))


def test_a_profile_of_pipedream_is_placed_with_a_bandwidth(run: Partition) -> None:
    """Cut between the convolutions 100 bytes cross, and their gradient: 200 bytes at 100 bytes/ms. The input
    is free, so that it may be with either."""
    code, out, _ = run(PROFILE, "--devices", "2", "--bandwidth", "100kB/s", "--contiguous", "-o", "out.json")
    written = json.loads(Path("out.json").read_text())
    assert code == 0
    assert sorted([node for node in stage if node != "node1"] for stage in written["stages"]) == [
        ["node2"],
        ["node4", "node3"],
    ]
    assert written["load"] == pytest.approx(35.5 + 2)
    assert "on 2 accelerators\n" in out


def test_replicas_share_what_is_cheap_to_keep_alike(run: Partition) -> None:
    code, out, _ = run(PROFILE, "--devices", "4", "--bandwidth", "1e8", "--replicas", "-o", "out.json")
    written = json.loads(Path("out.json").read_text())
    assert code == 0
    assert written["replicas"] == [3, 1]
    assert written["stages"] == [["node1", "node2", "node3"], ["node4"]]
    assert written["load"] == pytest.approx(62.5 / 3)
    assert "replicas 3+1: 20.8333 ms per micro-batch; bound 20.8333 ms, gap 0.00%: proved optimal" in out


def test_both_formats_are_read_as_they_are_meant() -> None:
    profile = parse_profile(PROFILE, "it")
    assert [layer.id for layer in profile.layers] == ["node1", "node4", "node2", "node3"]
    assert profile.edges == ((0, 2), (2, 3), (3, 1))
    assert profile.layers[0].compute_s == 0, "inputs are read where they are needed"
    assert profile.layers[2].activation_bytes == 100, "the sum of an output of two tensors"
    assert profile.layers[3].compute_s == pytest.approx(0.0325)
    problem = parse_json(json.dumps(graph()), "it")
    assert [o.backward for o in problem.operators] == [False] * 6 + [True] * 6
    assert problem.operators[1].output_s == pytest.approx(0.5e-3)
    assert problem.operators[6].output_s == 0, "nobody reads it"
    assert problem.operators[7].together == 1


@pytest.mark.parametrize(("how", "load"), [([], 7.3), (["--contiguous"], 8.4)])
def test_the_example_needs_several_chunks(tmp_path: Path, how: list[str], load: float) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "graph.json"
    assert main([str(example), *how, "-o", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["load"], found["gap"]) == (pytest.approx(load), 0.0)


# -- faults --------------------------------------------------------------------------------------


def changed(*path: str | int, to: object = None) -> dict[str, Any]:
    """The graph with another value at a path; without a value, with none."""
    whole: Any = copy.deepcopy(graph())
    place = whole
    for step in path[:-1]:
        place = place[step]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return whole  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{ nodes", "graph, line 1: neither JSON (Expecting property name"),
        ("[1]", "graph: a list, where an object with nodes and edges is expected"),
        (changed("nodes"), "graph: 'nodes' is missing; write it"),
        (changed("nodes", to=[3]), "graph: 'nodes' is no list of objects"),
        (changed("nodes", to=[]) | {"edges": []}, "graph: the graph has no node; give 1 at least"),
        (changed("maxFPGAs"), "graph: 'maxFPGAs' is missing; write it, or give --devices N"),
        (changed("maxSizePerFPGA"), "graph: 'maxSizePerFPGA' is missing; write it, or give --memory SIZE"),
        (changed("maxFPGAs", to=0), "graph: maxFPGAs = 0, and CPUs alone are not planned; write 1 at least"),
        (changed("maxFPGAs", to=1.5), "graph: maxFPGAs = 1.5; give a whole number"),
        (
            changed("maxSizePerFPGA", to="16 GB"),
            "graph: maxSizePerFPGA = '16 GB'; give a finite number, 0 at least",
        ),
        (changed("nodes", 2, "id"), "graph: node at position 2: 'id' is missing; write it"),
        (changed("nodes", 2, "id", to=1.5), "graph: node 1.5: id = 1.5; give a whole number"),
        (
            changed("nodes", 2, "id", to=1),
            "graph: node 1: its id is that of two nodes, number 1 and 2; give each",
        ),
        (changed("nodes", 2, "fpgaLatency"), "graph: node 2 (layer2): 'fpgaLatency' is missing; write it"),
        (
            changed("nodes", 2, "fpgaLatency", to=-1),
            "graph: node 2 (layer2): fpgaLatency = -1; give a finite number",
        ),
        (
            changed("nodes", 2, "cpuLatency", to=float("nan")),
            "graph: node 2 (layer2): cpuLatency = nan; give a finite",
        ),
        (
            changed("nodes", 2, "size", to=float("inf")),
            "graph: node 2 (layer2): size = inf; give a finite number",
        ),
        (changed("nodes", 2, "size", to=True), "graph: node 2 (layer2): size = True; give a finite number"),
        (
            changed("nodes", 2, "supportedOnFpga", to=2),
            "graph: node 2 (layer2): supportedOnFpga = 2; give 0 or 1",
        ),
        (
            changed("nodes", 2, "colorClass", to="red"),
            "graph: node 2 (layer2): colorClass = 'red'; give a whole",
        ),
        (
            changed("edges", 2, "sourceId", to=99),
            "graph: edge number 2 (from 99 to 3): sourceId = 99 is the id of no node; add it",
        ),
        (
            changed("edges", 2, "sourceId", to="1"),
            'graph: edge number 2 (from "1" to 3): sourceId = "1" is text, but the id of that node is a',
        ),
        (changed("edges", 2, "destId"), "graph: edge number 2 (from 2): 'destId' is missing; write it"),
        (changed("edges", 2, "cost"), "graph: edge number 2 (from 2 to 3): 'cost' is missing; write it"),
        (
            changed("edges", 2, "cost", to=-0.5),
            "graph: edge number 2 (from 2 to 3): cost = -0.5; give a finite number",
        ),
        (
            changed("edges", 2, "sourceId", to=[1]),
            "graph: edge number 2 (from [1] to 3): sourceId = [1] is the id of no node",
        ),
        (
            changed("edges", 2, "sourceId", to=3),
            "graph: the graph has a cycle of 1 node, layer3 -> layer3",
        ),
        (
            changed("edges", 2, to={"sourceId": 1, "destId": 4, "cost": 0.75}),
            "graph: edge number 2 (from 1 to 4): cost = 0.75, but another edge from node 1 has 0.5",
        ),
    ],
)
def test_a_fault_of_the_json_is_named(run: Partition, given: object, said: str) -> None:
    code, out, err = run(given)
    assert (code, out) == (1, "")
    assert err.startswith(f"mpipipe: error: {said}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            PROFILE.replace("=12.5", "=-12.5"),
            "graph, line 4: node3 (Conv2d(8, 8, kernel_size=(3, 3))): forward_com",
        ),
        (
            PROFILE.replace("=12.5", "=nan"),
            "graph, line 4: node3 (Conv2d(8, 8, kernel_size=(3, 3))): forward_com",
        ),
        (
            PROFILE.replace("=12.5", "=fast"),
            "graph, line 4: node3 (Conv2d(8, 8, kernel_size=(3, 3))): forward_com",
        ),
        (
            PROFILE.replace(", parameter_size=4000000.0", ""),
            "graph, line 2: node4 (Linear(in_features=8, out_features",
        ),
        (PROFILE.replace("node4 -- Linear", "node4, Linear"), "graph, line 2: 'node4, Linear"),
        (
            PROFILE.replace("node4 -- L", "node1 -- L"),
            "graph, line 2: node1 is there a second time; give each node",
        ),
        (
            PROFILE.replace("\tnode3 -- node4", "\tnode3 -- node9"),
            "graph, line 7: 'node9' is no node of this file",
        ),
        (
            PROFILE.replace("\tnode3 -- node4", "\tnode3"),
            "graph, line 7: 'node3' is no edge; write node1 -- node2",
        ),
        (
            PROFILE + "\tnode4 -- node2\n",
            "graph: the graph has a cycle of 3 nodes, Linear(in_features=8, out_feat",
        ),
    ],
)
def test_a_fault_of_a_profile_is_named(run: Partition, text: str, said: str) -> None:
    code, out, err = run(text, "--devices", "2", "--bandwidth", "1e9")
    assert (code, out) == (1, "")
    assert err.startswith(f"mpipipe: error: {said}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (graph(), ["--devices", "0"], "graph: --devices 0; give 1 at least"),
        (
            graph(),
            ["--memory", "150"],
            "graph: node 0 (layer0) with 1 more that have to share its device needs 200 b",
        ),
        (
            graph(),
            ["--memory", "300"],
            "graph: all need 1200 bytes, 3 devices of 300 bytes have 900 bytes: 300 bytes",
        ),
        (
            graph(),
            ["--replicas"],
            "--replicas: for a graph.txt of PipeDream, but graph is JSON; leave it out",
        ),
        (graph(), ["--bandwidth", "1e9"], "--bandwidth: for a graph.txt of PipeDream, but graph is JSON"),
        (
            graph(),
            ["-o", "nowhere/out.json"],
            "-o nowhere/out.json: the folder nowhere is not there; make it first",
        ),
        (graph(), ["-o", "."], "-o .: cannot be written (Is a directory); name a file of yours"),
        (PROFILE, [], "graph: a graph.txt says nothing of devices; give --devices N"),
        (PROFILE, ["--devices", "2"], "graph: --bandwidth is not given; give bytes per second"),
        (PROFILE, ["--devices", "2", "--bandwidth", "0"], "graph: --bandwidth 0.0; give bytes per second"),
        (
            PROFILE,
            ["--devices", "2", "--bandwidth", "1e9", "--replicas", "--contiguous"],
            "--replicas: plans without a limit of memory, and is contiguous; leave the others out",
        ),
    ],
)
def test_options_that_cannot_be_are_named(
    run: Partition, given: object, options: list[str], said: str
) -> None:
    code, _, err = run(given, *options)
    assert code == 1
    assert err.startswith(f"mpipipe: error: {said}")


def test_a_budget_that_ends_before_anything_is_found(run: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none of the orders that are tried fits into memory, and no time is left for others."""
    monkeypatch.setattr(search, "compiled", None)
    tight = graph()
    for v, size in enumerate([300, 100, 300, 100, 100, 100]):
        tight["nodes"][v]["size"] = tight["nodes"][6 + v]["size"] = float(size)
    code, _, err = run(tight | {"maxSizePerFPGA": 700.0}, "--contiguous", "--budget", "0s")
    assert code == 1
    assert err == (
        "mpipipe: error: graph: no placement on 3 devices was found within --budget 0s; give --budget 10s, "
        "or more --memory\n"
    )


@pytest.mark.parametrize(
    "option", [["--budget", "soon"], ["--memory", "16 GX"], ["--memory", "0"], ["--bandwidth", "10 GX"]]
)
def test_times_and_sizes_are_texts_with_units(run: Partition, option: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(graph(), *option)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("name", "text", "said"), [("absent", None, "cannot be read"), ("bytes", b"\xff{", "is not UTF-8")]
)
def test_a_file_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text)
    assert main([str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"mpipipe: error: {path}: {said}")


@pytest.mark.jobs
def test_neither_torch_nor_mpi_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(graph(2)))
    program = (
        "import sys; from mpipipe.__main__ import main; main(['partition', 'graph.json'])\n"
        "print(*sorted({'torch', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "", "")


# -- the graphs of the papers --------------------------------------------------------------------

PROVED = {  # milliseconds: contiguous, and with several chunks on a device
    "bert24_inference": (17.789906, 17.714719),
    "bert24_training": (41.745812, 39.789539),
    "bert_l-3_inference": (27.918568, 21.908376),
    "bert_l-3_training": (65.303149, 54.207399),
}


@pytest.fixture
def graphs() -> Path:
    if "MPIPIPE_GRAPHS" not in os.environ:
        pytest.skip("MPIPIPE_GRAPHS names no folder with the graphs of dnn-partitioning and PipeDream")
    return Path(os.environ["MPIPIPE_GRAPHS"])


@pytest.mark.parametrize("name", PROVED)
def test_the_graphs_of_the_paper_reach_what_is_proved(
    graphs: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = graphs / f"{name}.json", tmp_path / "out.json"
    problem = parse_json(path.read_text(), name)
    for options, best, precision in (["--contiguous"], PROVED[name][0], 1e-6), ([], PROVED[name][1], 1e-4):
        assert main([str(path), *options, "-o", str(out)]) == 0
        written = json.loads(out.read_text())
        assert written["load"] == pytest.approx(best, rel=precision)
        assert written["bound"] <= best * (1 + 1e-6)
        assert not options or written["gap"] == 0
        device = {node: i for i, stage in enumerate(written["stages"]) for node in stage}
        device_of = [device[operator.id] for operator in problem.operators]
        assert loads(problem, device_of).most_s * 1e3 == pytest.approx(written["load"])
        assert not options or is_contiguous(problem, device_of)


def test_vgg16_on_16_workers_is_planned_as_published(
    graphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """15 + 1, the linear layers on the one, at the 10 Gb/s between the servers of PipeDream's cluster A."""
    out = tmp_path / "out.json"
    given = [str(graphs / "pipedream_vgg16.txt"), "--devices", "16", "--replicas", "-o", str(out)]
    assert main([*given, "--bandwidth", "1.25e9"]) == 0
    written = json.loads(out.read_text())
    assert written["replicas"] == [15, 1]
    profile = parse_profile((graphs / "pipedream_vgg16.txt").read_text(), "vgg")
    names = {layer.id: layer.name for layer in profile.layers}
    kinds = [{names[node].split("(")[0] for node in stage} for stage in written["stages"]]
    assert "Linear" not in kinds[0]
    assert "Conv2d" not in kinds[1]
