"""Wrong input, on ranks of a real MPI: one message from one rank that says what to do, soon, an exit code
that is not zero, and what was there before is as it was. (All forms of messages are tested beside the rooms;
of those that end a job at the same place, one is started here, and the others in the full suite.)
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpipipe
from mpipipe.commands.plan import main as plan
from mpipipe.state.resume import newest, step_folder, survey

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [16, 16, 16, 16], classes: 4, dropout: 0.0}
data: {name: synthetic, samples: 64}
train: {steps: 6, batch: 8, warmup: 1, save_every: 2}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 4}
"""
TEXT = """\
model: {name: gpt, layers: 1, d_model: 8, heads: 1, context: 8}
data: {path: text}
train: {steps: 2, batch: 4, warmup: 1}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 2}
sample: {length: 4}
"""

PATCHED = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
{before}
from mpipipe import train
{after}
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    (path / "config.yaml").write_text(CONFIG)
    (path / "text.yaml").write_text(TEXT)
    (path / "latin.yaml").write_bytes(b"run: {name: caf\xe9}\n")
    (path / "text").mkdir()
    (path / "text" / "a.txt").write_text("0123456789" * 20)
    (path / "short.txt").write_text("0123456789")
    (path / "empty.txt").touch()
    np.array([1, 2, 70000] * 100, "<u4").tofile(path / "tokens.bin")
    return path


def train(launch: Launch, folder: Path, n: int, *args: str, by: str = "", **env: str) -> Any:
    program = [by] if by else ["-m", "mpipipe.train"]
    return launch(n, *program, *args, cwd=folder, env=env)


def refusal(job: Any) -> str:
    """What the one rank said: once, without a traceback, and the job has failed."""
    said = job.stdout + job.stderr
    assert job.returncode != 0, said
    assert said.count("mpipipe: error:") == 1, said
    assert "Traceback" not in said
    return said.partition("mpipipe: error: ")[2].partition("\n-----")[0]


def patched(folder: Path, name: str, before: str = "", after: str = "") -> str:
    (folder / name).write_text(PATCHED.format(before=before, after=after))
    return name


# -- config and data ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["config.yaml", "train.epochs=3"], ["override 'train.epochs=3'", "did you mean 'train.steps'?"]),
        pytest.param(
            ["nowhere.yaml"],
            ["nowhere.yaml: cannot be read (No such file", "name an existing YAML file"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["latin.yaml"],
            ["latin.yaml: is not UTF-8 text (byte 0xe9 at 15); save it as UTF-8"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["config.yaml", "train.steps=many"],
            ["'train.steps=many'", "'many' (str); expected a valid integer"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_config(launch: Launch, folder: Path, args: list[str], parts: list[str]) -> None:
    before = sorted(folder.iterdir())
    said = refusal(train(launch, folder, 2, *args))
    assert all(part in said for part in parts), said
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.path=nowhere", ["data.path = 'nowhere': no such file or folder"]),
        pytest.param("data.path=empty.txt", ["empty.txt: is empty; set data.path"], marks=pytest.mark.full),
        pytest.param(
            "data.path=short.txt",
            ["0 of its 10 bytes are for validation", "needs 9 (a file of 180 has them); give more text"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "data={name: tokens, path: text, vocab: 9}",
            ["text: cannot be read (Is a directory); name a token"],
            marks=pytest.mark.full,
        ),
        (
            "data={name: tokens, path: tokens.bin, dtype: uint32, vocab: 99}",
            ["tokens.bin: token ", " is 70000, but the vocabulary has 99 ids; check data.dtype"],
        ),
    ],
)
def test_data(launch: Launch, folder: Path, tmp_path: Path, override: str, parts: list[str]) -> None:
    said = refusal(train(launch, folder, 2, "text.yaml", override, f"run.dir={tmp_path}/run"))
    assert all(part in said for part in parts), said
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.full
def test_replicas_that_the_blocks_do_not_allow(launch: Launch, folder: Path, tmp_path: Path) -> None:
    run = f"run.dir={tmp_path}/run"
    said = refusal(train(launch, folder, 2, "config.yaml", "pipeline.replicas=2", run))
    assert "2 replicas with pipeline.blocks = 1: each must own a whole sub-tree" in said
    assert "use 1; or, before the first step" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "nothing was trained"


@pytest.mark.full
def test_a_model_of_tokens_without_a_tokenizer_says_why_it_writes_nothing(
    launch: Launch, folder: Path, tmp_path: Path
) -> None:
    data = "data={name: tokens, path: tokens.bin, dtype: uint32, vocab: 70001}"
    job = train(launch, folder, 2, "text.yaml", data, f"run.dir={tmp_path}/run", "train.steps=1")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("note: no sample of text, as data.tokenizer is null") == 1


# -- the plan -----------------------------------------------------------------------------------------


@pytest.mark.full  # the message is in tests/test_pipeline.py, and the next test ends a job at this place
def test_more_ranks_than_the_model_has_cuts(launch: Launch, folder: Path, tmp_path: Path) -> None:
    job = train(launch, folder, 2, "config.yaml", "model.hidden=[]", f"run.dir={tmp_path}/run")
    said = refusal(job)
    assert "2 stages, and this model can be cut into 1 part at most; an operator is never cut" in said
    assert "; start at most 1 rank, as pipeline.blocks = 1 allows 1 replica at most" in said


# Three matrices of 1024 * 1024, 4 bytes each, times 4 for gradient and optimizer: two on one rank take
# 33.6 MB and what they compute, one takes 16.8.
SHORT_OF_MEMORY = (
    "config.yaml", "model.hidden=[1024, 1024, 1024, 1024]", "pipeline.memory_bytes=38000000", "train.steps=1"
)  # fmt: skip


def test_a_memory_limit_names_the_least_number_of_ranks(launch: Launch, folder: Path, tmp_path: Path) -> None:
    said = refusal(train(launch, folder, 2, *SHORT_OF_MEMORY, f"run.dir={tmp_path}/run"))
    size = r"\S+ (MiB|KiB|bytes)"
    assert re.search(rf"stage [01] of 2 \(rank [01], {size}.*\) cannot hold .*: {size} short", said), said
    assert "even with full recomputation" in said
    assert "start 3 ranks: that is the least that would do" in said


@pytest.mark.full  # the number itself is checked in tests/planner
def test_the_least_number_of_ranks_for_a_memory_limit_does(
    launch: Launch, folder: Path, tmp_path: Path
) -> None:
    job = train(launch, folder, 3, *SHORT_OF_MEMORY, f"run.dir={tmp_path}/run")
    assert job.returncode == 0, job.stderr


ORDERS = {
    "lacking": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n",
        ["orders.csv: stage 1, micro-batch 1 has F; it needs F and B", "1F1  [no 1B1]  <-- here"],
    ),
    "repeated": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1B0\n",
        ["orders.csv: action 1B0 on rank 1 comes twice", "1B1  [1B0]  <-- here"],
    ),
    "a deadlock": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        ["orders.csv: the order cannot end, each rank waits: rank 0 for 1B0", "[0B0]  0F1   0B1   <-- here"],
    ),
    "too much memory": (
        "".join(
            ",".join([f"{rank}F{i}" for i in range(64)] + [f"{rank}B{i}" for i in range(64)]) + "\n"
            for rank in range(2)
        ),
        ["needs ", " and has 80 MiB, ", "do a backward of this rank sooner in orders.csv, set pip"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [pytest.param(w, marks=() if w == "too much memory" else pytest.mark.full) for w in ORDERS],
)
def test_an_order_of_ones_own_is_refused_with_its_place(
    launch: Launch, folder: Path, tmp_path: Path, what: str
) -> None:
    text, parts = ORDERS[what]
    (folder / "orders.csv").write_text(text)
    # a rank needs some 50 MiB for one micro-batch and 115 MiB for all 64: the limit is between them anywhere
    large = "model.hidden=[64, 64, 64, 64]", "train.batch=131072", "pipeline.recompute=none"
    said = refusal(
        train(
            launch, folder, 2, "config.yaml", "pipeline.schedule=orders.csv", f"run.dir={tmp_path}/run",
            f"pipeline.micro_batches={64 if '0F63' in text else 2}", "pipeline.memory_bytes=80MiB", *large,
        )
    )  # fmt: skip
    assert all(part in said for part in parts), said
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "nothing was trained"


# -- numbers that are none ----------------------------------------------------------------------------

SPOILS = """
from mpipipe.runtime.trainer import Trainer
step = Trainer.step

def spoils(self, number, **how):
    for stage in self.interpreter.stages.values():
        if number == 3 and stage.weights.stage == 1:
            next(iter(stage.weights.data.values())).fill_(3e38)
    return step(self, number, **how)

Trainer.step = spoils
"""


def test_a_loss_that_is_not_finite(launch: Launch, folder: Path, tmp_path: Path) -> None:
    by, run = patched(folder, "spoils.py", after=SPOILS), tmp_path / "run"
    two_stages = "pipeline.schedule=1f1b"
    said = refusal(train(launch, folder, 2, "config.yaml", two_stages, f"run.dir={run}", by=by))
    assert re.match(r"step 3: the loss is (nan|inf): '.*/linear.0' makes (nan|inf) of finite values", said), (
        said
    )
    assert "in micro-batch 0 (stage 1, rank 1)" in said
    assert "lower train.lr" in said
    assert [folder.name for folder, wrong in survey(run) if not wrong] == ["step-00000002"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


# -- disks and checkpoints ----------------------------------------------------------------------------

FILLS = """
import resource
from mpipipe.pipeline import Pipeline
{name} = Pipeline.{name}
calls = []

def fills(self, *args, **named):
    calls.append(1)
    if len(calls) == {call}:
        self.saver.finish()  # of the save before
        resource.setrlimit(resource.RLIMIT_FSIZE, ({nbytes}, resource.RLIM_INFINITY))
    return {name}(self, *args, **named)

Pipeline.{name} = fills
"""


def test_a_full_disk_while_saving(launch: Launch, folder: Path, tmp_path: Path) -> None:
    by, run = (
        patched(folder, "fills.py", after=FILLS.format(name="begin_save", call=2, nbytes=2500)),
        tmp_path / "run",
    )
    said = refusal(train(launch, folder, 2, "config.yaml", f"run.dir={run}", by=by))
    # Measured costs place the cut, and a rank with the last layer alone writes less than the limit.
    failed = re.search(f"{step_folder(run, 4)}: failed on ([12]) of 2 ranks\n", said)
    assert failed
    reason = r"rank [01]: .*safetensors: cannot be written \(.*File too large.*; it needs \d+ bytes, \d+"
    assert len(re.findall(reason, said)) == int(failed[1])
    assert "make room), then go on with --resume" in said
    assert newest(run) == step_folder(run, 2)
    assert not step_folder(run, 4).exists()


def test_a_full_disk_while_writing_metrics(launch: Launch, folder: Path, tmp_path: Path) -> None:
    by, run = (
        patched(folder, "metrics.py", after=FILLS.format(name="timed_step", call=4, nbytes=64)),
        tmp_path / "run",
    )
    said = refusal(train(launch, folder, 2, "config.yaml", f"run.dir={run}", by=by))
    assert f"{run}: cannot be written (File too large), " in said
    assert " bytes are free; checkpoints are as they were: make room, then go on with --resume" in said
    assert newest(run) == step_folder(run, 2)
    assert not list(run.rglob("*.part"))


@pytest.fixture(scope="module")
def whole(launch: Launch, folder: Path) -> Path:
    """A run with three checkpoints; copy it."""
    job = train(launch, folder, 2, "config.yaml", "run.dir=whole")
    assert job.returncode == 0, job.stderr
    return folder / "whole"


def changed(whole: Path, run: Path, change: Callable[[Path], object], kind: str = "model") -> Path:
    """A copy of the run, the first file of a kind of whose last checkpoint is changed."""
    shutil.copytree(whole, run, symlinks=True)
    last = newest(run)
    assert last is not None
    change(min(last.glob(f"{kind}-*.safetensors")))
    return last


def flip(path: Path) -> None:
    bits = bytearray(path.read_bytes())
    bits[-3] ^= 1
    path.write_bytes(bits)


@pytest.mark.full  # test_resume.py goes on past two of them each time
@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        pytest.param(
            "model", flip, r"sha256 is [0-9a-f]{12}, run.json says [0-9a-f]{12}", id="a flipped bit"
        ),
        pytest.param(
            "optimizer", flip, r"sha256 is [0-9a-f]{12}, run.json says [0-9a-f]{12}", id="of the optimizer"
        ),
        pytest.param(
            "model", Path.unlink, r"cannot be read \(No such file or directory\)", id="a missing shard"
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(
    launch: Launch, folder: Path, tmp_path: Path, whole: Path, kind: str, change: Callable[[Path], None],
    what: str,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    last = changed(whole, run, change, kind)
    job = train(launch, folder, 2, "config.yaml", f"run.dir={run}", "--resume")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("note: passed over ") == 1
    assert re.search(rf"{last}/{kind}-00001-of-0000.\.safetensors: .*{what}", job.stdout)
    assert f"resuming {run} after 4 steps" in job.stdout
    summaries = [json.loads((path / "summary.json").read_text()) for path in (whole, run)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]


# -- ranks that differ --------------------------------------------------------------------------------

DIFFERENT = {
    "other code": (
        "if rank: sys.path.insert(0, 'other')",
        "",
        [
            "the ranks do not agree on: code (1 of 2 ranks",
            "mpipipe of rank 0 is ",
            "other/mpipipe\n",
            "one copy of",
        ],
    ),
    "other threads that torch is not told": (
        "if rank: os.environ['OMP_THREAD_LIMIT'] = '1'",
        "",
        ["agree on: OMP_THREAD_LIMIT (1", "rank 0 (node 0): (not set)\n", "rank 1 (node 0): 1\n"],
    ),
    "another torch": (
        "import torch\nif rank: torch.__version__ = '2.99.0'",
        "",
        ["agree on: torch (1 of 2", "rank 1 (node 0): '2.99.0'"],
    ),
    "another config": (
        "if rank: sys.argv.append('pipeline.threads=2')",
        "",
        [
            "agree on: pipeline.threads (1",
            "rank 0 (node 0): 1\n",
            "rank 1 (node 0): 2\n",
            "the same arguments",
        ],
    ),
    "other data": (
        "",
        "from mpipipe.data.synthetic import SyntheticVectors as S\nmake = S.__init__\n"
        "S.__init__ = lambda self, *args: make(self, *args[:-1], args[-1] + rank)",
        ["agree on: the first samples (1 of 2", "put the data where every node sees it"],
    ),
    "another plan": (
        "sys.argv += ['--plan', 'plan.json']",
        "from dataclasses import replace\nfrom mpipipe import decided\nread = decided.read_plan\n"
        "def edited(path):\n"
        "    plan = read(path)\n"
        "    return replace(plan, layout=replace(plan.layout, receive_window=2)) if rank else plan\n"
        "decided.read_plan = edited",
        ["agree on: plan (1 of 2 ranks"],
    ),
}


EACH_TIME = ("other code", "other data", "another plan")  # the three places where ranks compare


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=() if w in EACH_TIME else pytest.mark.full) for w in DIFFERENT]
)
def test_ranks_that_differ(
    launch: Launch, folder: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, parts = DIFFERENT[what]
    if what == "another plan":
        monkeypatch.chdir(folder)
        assert plan(["config.yaml", "--ranks", "2", "-o", "plan.json"]) == 0
    if what == "other code" and not (folder / "other").exists():
        shutil.copytree(mpipipe.__path__[0], folder / "other" / "mpipipe")
        errors = folder / "other" / "mpipipe" / "errors.py"
        errors.write_text(errors.read_text() + "# one line more\n")
    by, run = patched(folder, "differs.py", before, after), tmp_path / "run"
    said = refusal(train(launch, folder, 2, "config.yaml", f"run.dir={run}", by=by))
    assert all(part in said for part in parts), said
    assert not (run / "metrics.jsonl").exists(), "nothing was trained"
