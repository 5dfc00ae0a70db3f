"""`python -m mpipipe plan`: no ranks, no weights, and a message where nothing fits."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpipipe.cluster import memory
from mpipipe.cluster.started import as_root
from mpipipe.commands import machines, output, plan
from mpipipe.commands.costing import Costing
from mpipipe.commands.inputs import model_of
from mpipipe.commands.machines import There
from mpipipe.config import parse
from mpipipe.config.cluster import load_cluster
from mpipipe.errors import PlanError
from mpipipe.graph.pieces import Sample
from mpipipe.graph.profile import Profiler
from mpipipe.planner.curve import Curve
from mpipipe.planner.schedules import SCHEDULES
from mpipipe.planner.sizes import size_text
from mpipipe.report.plan_file import read_plan
from mpipipe.runtime import costing, modelling
from mpipipe.runtime.process import resident_memory
from mpipipe.values import from_json, split_text

CLUSTER = """\
device: {kind: new, threads: 4, memory: 1 GiB, flops_per_s: {fp32: 1.0e+9, bf16: 2.0e+9}, bytes_per_s: 1.0e+9}
ranks_per_node: 2
links: {node: {latency_s: 1.0e-6, bytes_per_s: 1.0e+9}, switch: {latency_s: 1.0e-5, bytes_per_s: 1.0e+8}}
"""
MLP = """\
model: {name: mlp, inputs: 64, hidden: [64, 64, 64, 64, 64, 64], classes: 8}
data: {name: synthetic, samples: 64}
train: {batch: 16}
pipeline: {micro_batches: 4, threads: 4, schedule: 1f1b}
"""
pytestmark = pytest.mark.usefixtures("captured_once")
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """`run(config, arguments...)`: exit code, stdout, stderr; in a folder of its own with cluster.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda: None)  # of many tests, again and again
    Path("cluster.yaml").write_text(CLUSTER)
    threads = torch.get_num_threads()

    def call(config: str, *arguments: str) -> tuple[int, str, str]:
        Path("config.yaml").write_text(config)
        code = plan.main(["config.yaml", *arguments])
        return (code, *capsys.readouterr())

    yield call
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_it_says_where_to_cut_what_that_takes_and_why_not_another(run: Plan) -> None:
    code, out, err = run(MLP, "--ranks", "3", "--cluster", "cluster.yaml")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "config.yaml on 3 ranks: mlp, 25,480 parameters, 7 groups"
    stages = [line.split() for line in lines if re.match(r"[012]  ", line)]
    assert [s[0] for s in stages] == ["0", "1", "2"]
    assert sum(int(s[2]) for s in stages) == 7, "every group is on a stage"
    for words in (
        "bubble", "gap", "most memory: rank", "samples/s", "next best cut", "equal numbers of groups",
        "schedule gpipe", "2 micro-batches, batch 8", "8 micro-batches, batch 32", "1 rank", "6 ranks",
        "1 us and 1 GB/s within a node",
    ):  # fmt: skip
        assert words in out, words


@pytest.mark.slow
def test_several_levels_of_ranks_are_a_curve_on_the_same_costs(run: Plan) -> None:
    code, out, err = run(MLP, "--ranks", "1..16", "--cluster", "cluster.yaml", "-o", "c.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "config.yaml on 1 to 16 ranks: mlp, 25,480 parameters, 7 groups"
    curve = from_json(Curve, Path("c.json").read_text())
    assert [level.ranks for level in curve.levels] == [1, 2, 4]
    assert [(m.ranks, m.why) for m in curve.misfits] == [
        (n, f"{n} stages, and this model can be cut into 7 parts at most") for n in (8, 16)
    ]
    assert (curve.steps, curve.epoch) == (64 / 16, True)
    assert len([line for line in lines if re.match(r" +\d+  ", line)]) == 5
    assert "ask for" in out
    run(MLP, "--ranks", "2", "--cluster", "cluster.yaml", "-o", "p.json")
    assert curve.levels[1].step_s == read_plan("p.json").prediction.step_s


@pytest.mark.slow
def test_spares_are_started_and_not_planned_for(run: Plan) -> None:
    spare = ("--cluster", "cluster.yaml", "run.recover=mpi", "run.spares=1")
    code, out, _ = run(MLP, "--ranks", "3", *spare, "-o", "plan.json")
    assert code == 0
    assert out.startswith("config.yaml on 2 ranks, and 1 spare more: ")
    start = shlex.join(["mpirun", *as_root(), "-n", "3", "python", "-m", "mpipipe.train", "config.yaml"])
    assert f"to train it: {start}" in out
    assert read_plan("plan.json").layout.n_ranks == 2
    code, _, err = run(MLP, "--ranks", "1", *spare)
    assert code == 1
    assert "run.spares = 1, and there is 1 rank: none would train; start more than 1 rank" in err
    code, _, err = run(MLP, "--ranks", "3", "run.spares=1")
    assert code == 1
    assert "a spare takes over in the same job only; set run.recover to mpi" in err


@pytest.mark.slow
def test_replicas_that_do_not_fit_one_number_of_ranks_may_fit_another(run: Plan) -> None:
    given = ("pipeline.replicas=2", "pipeline.blocks=auto", "--cluster", "cluster.yaml")
    code, _, err = run(MLP, "--ranks", "1,2,4", *given, "-o", "c.json")
    assert (code, err) == (0, "")
    curve = from_json(Curve, Path("c.json").read_text())
    assert [level.ranks for level in curve.levels] == [2, 4]
    assert [m.ranks for m in curve.misfits] == [1]
    assert "2 replicas" in curve.misfits[0].why


@pytest.mark.usefixtures("run")
@pytest.mark.slow
def test_blocks_and_copies_are_settled_for_each_number_of_ranks() -> None:
    config = parse(MLP, overrides=["pipeline.blocks=auto"])
    machine, variants_of = There(config, load_cluster("cluster.yaml")), model_of(config)[0]
    of_one, of_four = (Costing(config, machine, n, variants_of) for n in (1, 4))
    assert [of_one.asked_on(n).numerics.blocks for n in (1, 2, 4)] == [1, 2, 4]
    of_one.max_ranks = 4
    assert [of_one.asked_on(n).numerics.blocks for n in (1, 2, 4)] == [4, 4, 4]
    with pytest.raises(PlanError, match="max_ranks = 4, and there are 8 ranks"):
        of_one.asked_on(8)
    of_one.max_ranks = None
    for n in (1, 2, 4):
        assert of_one.asked_on(n).copies == of_four.asked_on(n).copies
        cluster = machine.cluster(n, 0)
        assert of_one.prediction_on(cluster) == of_four.prediction_on(cluster), "time and memory"


@pytest.mark.slow
def test_a_plan_says_which_blocks_it_has_and_what_they_take(run: Plan) -> None:
    given = ("--ranks", "1", "--cluster", "cluster.yaml", "train.batch=8", "pipeline.micro_batches=8")
    assert "\nblocks: " not in run(MLP, *given)[1]
    code, out, _ = run(MLP, *given, "pipeline.blocks=auto", "pipeline.max_ranks=6", "-o", "p.json")
    assert code == 0
    found = read_plan("p.json")
    assert (found.numerics.blocks, found.costs is not None) == (4, True)
    weights = sum(group.param_bytes for group in found.costs.groups) if found.costs else 0
    assert (
        "\nblocks: 4, for 6 ranks at most, as pipeline.max_ranks says; 4 exact replicas at most; sums of "
        f"blocks take {size_text(3 * weights)} on the fullest rank\n"  # log2(4) + 1 of them
    ) in out


def test_a_plan_is_not_written_as_a_picture(run: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "load", lambda *_: pytest.fail("planned"))
    code, _, err = run(MLP, "--ranks", "2", "-o", "x.png")
    assert code == 1
    assert "-o x.png: a plan is written as .json" in err
    assert "python -m mpipipe draw x.json -o x.png" in err


def test_a_curve_is_not_written_as_a_plan(run: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "load", lambda *_: pytest.fail("planned"))
    code, _, err = run(MLP, "--ranks", "1..4", "-o", "curve.txt")
    assert code == 1
    assert "written as .json or drawn as .png" in err


@pytest.mark.slow
def test_seconds_are_operations_and_bytes_at_the_rates_of_the_cluster(run: Plan) -> None:
    run(MLP, "--ranks", "2", "--cluster", "cluster.yaml", "-o", "slow.json")
    faster = CLUSTER.replace("1.0e+9, bf16", "2.0e+9, bf16").replace(
        "bytes_per_s: 1.0e+9}\nranks", "bytes_per_s: 2.0e+9}\nranks"
    )
    Path("cluster.yaml").write_text(faster)
    run(MLP, "--ranks", "2", "--cluster", "cluster.yaml", "-o", "fast.json")
    slow, fast = (read_plan(f"{name}.json").costs for name in ("slow", "fast"))
    assert slow is not None
    assert fast is not None
    assert slow.source == "modelled"
    for a, b in zip(slow.groups, fast.groups, strict=True):
        assert a.fwd_s == pytest.approx(2 * b.fwd_s)
        assert a.stash_bytes == b.stash_bytes
    linear = slow.groups[1]  # (4, 64) x (64, 64), bias, relu: bound by the bytes of the weight
    assert linear.fwd_s > 64 * 64 * 4 / 1e9


@pytest.mark.slow
def test_a_plan_file_holds_the_layout_and_the_costs(run: Plan) -> None:
    code, out, _ = run(MLP, "--ranks", "2", "--cluster", "cluster.yaml", "-o", "p.json")
    made = read_plan("p.json")
    assert code == 0
    assert made.costs is not None
    assert made.layout.n_stages == 2
    assert made.layout.schedule in SCHEDULES
    assert made.numerics.threads == 4
    assert len(made.costs.groups) == 7
    assert "--plan p.json" in out
    assert [d.kind for d in made.costs.cluster.devices] == ["new"] * 2


@pytest.mark.slow
def test_the_command_that_trains_it_is_that_of_the_same_run(run: Plan) -> None:
    given = ["--ranks", "2", "--cluster", "cluster.yaml", "-o", "my plan.json"]
    _, out, _ = run(MLP, *given, "pipeline.micro_batches=8", "run.dir=a run")
    command = out.splitlines()[-1].partition("; to train it: ")[2]
    assert shlex.split(command) == [
        "mpirun", *as_root(), "-n", "2", "python", "-m", "mpipipe.train", "config.yaml",
        "pipeline.micro_batches=8", "run.dir=a run", "--plan", "my plan.json",
    ]  # fmt: skip


@pytest.mark.slow
def test_seconds_are_those_of_the_mean_micro_batch_as_in_a_run(run: Plan) -> None:
    config = MLP.replace("batch: 16", "batch: 13")
    run(config, "--ranks", "2", "--cluster", "cluster.yaml", "-o", "13.json")
    run(MLP, "--ranks", "2", "--cluster", "cluster.yaml", "-o", "16.json")
    few, full = (read_plan(f"{n}.json") for n in (13, 16))
    assert few.numerics.fill == 13 / 16
    assert few.costs is not None
    assert full.costs is not None
    for a, b in zip(few.costs.groups, full.costs.groups, strict=True):
        assert a.fwd_s == pytest.approx(b.fwd_s * 13 / 16)


@pytest.mark.slow
def test_threads_are_a_share_of_the_device_and_not_more(run: Plan) -> None:
    arguments = ["--ranks", "2", "--cluster", "cluster.yaml"]
    run(MLP, *arguments, "-o", "all.json")
    run(MLP, *arguments, "pipeline.threads=1", "-o", "one.json")
    full, one = (read_plan(f"{name}.json").costs for name in ("all", "one"))
    assert full is not None
    assert one is not None
    assert [g.fwd_s for g in one.groups] == pytest.approx([4 * g.fwd_s for g in full.groups])
    assert one.step_s_per_byte == pytest.approx(4 * full.step_s_per_byte)
    code, _, err = run(MLP, *arguments, "pipeline.threads=5")
    assert code == 1
    assert "pipeline.threads is 5, but the cluster file gives a device 4" in err


def test_auto_threads_are_those_of_a_run_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "cores_available", lambda: frozenset(range(8)))
    monkeypatch.setattr(machines, "set_threads", lambda _: None)
    config = parse(MLP, overrides=["pipeline.threads=auto"])
    assert [machines.Here(config, ranks).threads for ranks in (1, 3, 8, 20)] == [8, 2, 1, 1]


def test_a_folder_that_is_not_there_is_refused_before_planning(
    run: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "Costing", lambda *_: pytest.fail("planned"))
    code, out, err = run(MLP, "--ranks", "2", "--cluster", "cluster.yaml", "-o", "no/where.json")
    assert (code, out) == (1, "")
    assert "-o no/where.json: the folder no is not there; make it first" in err


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        output.write_output(path, "plan")
    assert os.read(reader, 99) == b"plan"
    os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert file.read_text() == "plan"


def test_a_layer_that_cannot_be_counted_must_be_small_to_be_timed_here() -> None:
    def tally(held_bytes: int) -> Any:
        return SimpleNamespace(opaque=True, held_bytes=held_bytes)

    distinct: Any = {"a": SimpleNamespace(name="layers.3/Own.0")}
    modelling._check_opaque(distinct, {"a": tally(256 << 20)})
    with pytest.raises(PlanError, match=r"layers\.3/Own\.0: .* takes 512 MiB, more than 256 MiB"):
        modelling._check_opaque(distinct, {"a": tally(512 << 20)})


@pytest.mark.slow
def test_a_model_larger_than_any_machine_is_planned(run: Plan) -> None:
    """A hundred billion parameters; nothing of that size may be allocated."""
    huge = MLP.replace("[64, 64, 64, 64, 64, 64]", str([160_000] * 5))
    Path("cluster.yaml").write_text(CLUSTER.replace("1 GiB", "2 TiB"))
    held = resident_memory()
    before = held.now_bytes
    code, out, err = run(huge, "--ranks", "4", "--cluster", "cluster.yaml")
    assert (code, err) == (0, "")
    parameters = int(re.search(r"mlp, ([\d,]+) parameters", out)[1].replace(",", ""))  # type: ignore[index]
    assert parameters > 100e9
    assert held.now_bytes - before < 200 << 20


@pytest.mark.slow
def test_where_nothing_fits_it_says_what_would(run: Plan) -> None:
    Path("cluster.yaml").write_text(CLUSTER.replace("1 GiB", "12 MiB"))
    wide = MLP.replace("[64, 64, 64, 64, 64, 64]", str([600] * 6))
    code, out, err = run(wide, "--ranks", "2", "--cluster", "cluster.yaml", "pipeline.threads=4")
    assert (code, out) == (1, "")
    assert err.startswith("mpipipe: error: stage ")
    assert "short" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
def test_small_groups_are_timed_here(run: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profiler, "sample", lambda *_: Sample(1e-3, 1e-3, 1e-3, 0.0, 0, 0, (), ()))
    monkeypatch.setattr(costing, "_UPDATE_ELEMENTS", 1 << 10)
    code, out, _ = run(MLP, "--ranks", "2", "pipeline.threads=1", "-o", "p.json")
    assert code == 0
    assert "timed here" in out
    assert "modelled" not in out
    assert "assumed: ranks like this process" in out
    assert "10 us and 1.2 GB/s between nodes" in out
    made = read_plan("p.json")
    assert made.costs is not None
    assert made.costs.source == "measured"


GPT = "model: {name: gpt, layers: 1, d_model: 16, heads: 2, context: 8}\npipeline: {threads: 4}\n"


@pytest.mark.parametrize(
    "data", ["{name: text, path: nowhere}", "{name: tokens, path: nowhere.bin, vocab: 99}"]
)
@pytest.mark.slow
def test_texts_need_not_be_there(run: Plan, data: str) -> None:
    code, out, err = run(GPT + f"data: {data}\n", "--ranks", "2", "--cluster", "cluster.yaml")
    assert (code, err) == (0, "")
    assert "tokens/s" in out
    assert not Path("runs").exists()


def test_where_only_files_tell_the_shapes_they_must_be_there(run: Plan) -> None:
    code, _, err = run(GPT + "data: {name: tokens, path: nowhere.bin}\n", "--ranks", "2")
    assert code == 1
    assert "nowhere.bin" in err
    assert "data.name=synthetic" in err
    assert "model.vocab" in err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "memory: 1 GiB",
            "memroy: 1 GiB",
            r"cluster.yaml, line 1: 'device.memroy' is not a key; did you mean 'memory'",
        ),
        (
            "1 GiB",
            "1 Gib",
            r"line 1: device.memory = '1 Gib'; expected bytes, or a size such as 24 GiB",
        ),
        ("1 GiB", "3.8.4 GiB", r"line 1: device.memory = '3.8.4 GiB'; expected bytes, or a size"),
        (CLUSTER, "- 3\n", r"cluster.yaml: holds a list; expected sections such as 'device:'"),
        ("fp32: 1.0e+9", "fp32: fast", r"line 1: device.flops_per_s.fp32 = 'fast'; expected a valid number"),
        ("ranks_per_node: 2", "ranks: 2", r"line 2: 'ranks' is not a key.*valid here: device, devices"),
        ("latency_s: 1.0e-5, ", "", r"line 3: 'links.switch.latency_s' is missing"),
        ("device: {", "device: {{", r"cluster.yaml: not valid YAML"),
    ],
)
def test_a_wrong_cluster_file_is_named_with_the_line(run: Plan, old: str, new: str, words: str) -> None:
    assert old in CLUSTER
    Path("cluster.yaml").write_text(CLUSTER.replace(old, new, 1))
    code, _, err = run(MLP, "--ranks", "2", "--cluster", "cluster.yaml")
    assert code == 1
    assert re.search(words, err), err


@pytest.mark.slow
def test_different_devices_are_counted_in_the_order_of_ranks(run: Plan) -> None:
    device = CLUSTER.splitlines()[0].removeprefix("device: {").removesuffix("}")
    slow = device.replace("1.0e+9, bf16", "5.0e+8, bf16").replace("new", "old")
    rest = "\n".join(CLUSTER.splitlines()[1:])
    Path("cluster.yaml").write_text(f"devices:\n- {{count: 1, {device}}}\n- {{count: 1, {slow}}}\n{rest}\n")
    code, out, _ = run(MLP, "--ranks", "2", "--cluster", "cluster.yaml", "-o", "p.json")
    assert code == 0
    costs = read_plan("p.json").costs
    assert costs is not None
    assert [(d.kind, d.speed) for d in costs.cluster.devices] == [("new", 1.0), ("old", 0.5)]
    assert re.search(r"4 ranks +- +- +4 ranks, but the cluster file counts 2 devices", out)
    first = json.loads(Path("p.json").read_text())["layout"]["cuts"][0]
    assert first > "layers.2", "the fast rank has more of the groups"


def test_the_examples_of_a_cluster_and_a_large_model_are_read() -> None:
    from mpipipe.config import load
    from mpipipe.config.cluster import load_cluster

    examples = Path(__file__).resolve().parents[2] / "examples"
    assert load_cluster(examples / "cluster.yaml").of(16, "bf16", 96, 0, None).node_of_rank[-1] == 7
    assert load(examples / "llama-70b.yaml").model.name == "llama"


@pytest.mark.slow
def test_a_searched_number_of_micro_batches_keeps_the_batch_across_rows(run: Plan) -> None:
    auto = MLP.replace("micro_batches: 4", "micro_batches: auto").replace("1f1b", "auto")
    arguments = ["--ranks", "2", "--cluster", "cluster.yaml", "--budget", "10m", "-o", "p.json"]
    code, out, err = run(auto, *arguments)
    assert (code, err) == (0, "")
    made = read_plan("p.json").numerics
    assert made.batch == 16
    line = next(line for line in out.splitlines() if line.startswith("tried "))
    assert line.startswith("tried 1f1b, gpipe, interleaved, zb-h1, ")
    assert "interleaved-planned with 1, 2, 3, 4, 6, 8, 16 micro-batches (costs of " in line
    assert re.search(rf"; took \S+ with {made.split}; next best ", line)
    assert ", batch " not in out
    rows = re.findall(r"^((\d+) micro-batch(?:es)? of \d+(?: or \d+)?) ", out, re.MULTILINE)
    assert len(rows) == 5
    assert all(split_text(16, int(count)) == row for row, count in rows)
    assert made.split not in dict(rows)


@pytest.mark.slow
def test_a_budget_ends_the_search_and_one_that_is_too_short_says_so(run: Plan) -> None:
    auto = MLP.replace("micro_batches: 4", "micro_batches: auto")
    code, out, err = run(auto, "--ranks", "2", "--cluster", "cluster.yaml", "--budget", "0s")
    assert (code, out) == (1, "")
    assert "the time was used before any plan was found; raise --budget, or leave it out" in err
    with pytest.raises(SystemExit):
        run(auto, "--ranks", "2", "--budget", "soon")
