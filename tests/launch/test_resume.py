"""Runs that end early and go on: killed, out of time, or asked to with other settings. Real launches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from alone import train_alone

from mpipipe.errors import CheckpointError, ConfigError
from mpipipe.state.resume import newest, survey

pytestmark = pytest.mark.jobs
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 8

CONFIG = f"""\
model: {{name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4, dropout: 0.1}}
data: {{name: synthetic, samples: 64}}
train: {{steps: {STEPS}, batch: 8, warmup: 2, lr: 0.01, save_every: 3, keep: 5}}
eval: {{every: 2, batches: 2}}
pipeline: {{micro_batches: 4}}
"""

TEXT = """\
model: {name: gpt, layers: 1, d_model: 8, heads: 1, context: 8}
data: {name: text, path: a}
train: {steps: 6, batch: 8, save_every: 2, keep: 5}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 2}
sample: {length: 0}
run: {dir: text}
"""

KILLED = """
import os, pathlib, signal, sys, time
from mpipipe import train
from mpipipe.runtime.trainer import Trainer

step = Trainer.step

def is_killed(self, number, **rest):
    if number == 5 and self.comm.rank == 1:
        written = pathlib.Path("killed/checkpoints/step-00000003/run.json")
        until = time.monotonic() + 60.0  # for a thread of a busy machine
        while not written.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number, **rest)

Trainer.step = is_killed
sys.exit(train.main(sys.argv[1:]))
"""

MET = """
import json, pathlib, sys, time
from mpipipe import train
from mpipipe.runtime.trainer import Trainer

step, owner = Trainer.step, pathlib.Path("twice/owner.json")

def meets(self, number, **rest):
    if number == 4:
        mine = owner.read_text()
        print("waits", flush=True)
        while owner.read_text() == mine:
            time.sleep(0.05)
    return step(self, number, **rest)

Trainer.step = meets
sys.exit(train.main(sys.argv[1:]))
"""

OWN_SCHEDULE = """
def order(n_stages, n_micro):
    forward = " ".join(f"F{i}" for i in range(n_micro))
    return [forward + " " + " ".join(f"B{i}" for i in range(n_micro))] * n_stages
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs below; the first one is undisturbed, the others are compared with it."""
    path = tmp_path_factory.mktemp("runs")
    for name, text in {"config.yaml": CONFIG, "killed.py": KILLED, "met.py": MET}.items():
        (path / name).write_text(text)
    (path / "mine.py").write_text(OWN_SCHEDULE)
    return path


def train(launch: Launch, folder: Path, n: int, run: str, *args: str, by: str = "") -> Any:
    program = [by] if by else ["-m", "mpipipe.train"]
    return launch(n, *program, "config.yaml", f"run.dir={run}", *args, cwd=folder)


def told(run: Path) -> dict[str, Any]:
    """What a run tells of itself, times left out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != "step_s" and not k.endswith("per_s")} for line in lines]
    return {"steps": kept, "weights": json.loads((run / "summary.json").read_text())["weights_sha256"]}


def contents(run: Path) -> dict[str, str]:
    """All but the log, to which each attempt adds a line, and signs of life of ranks."""
    own = {"train.log", "flight"}
    files = (p for p in sorted(run.rglob("*")) if p.is_file() and not own & {*p.relative_to(run).parts})
    return {str(path.relative_to(run)): sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    train_alone(folder, "run.dir=whole")
    return told(folder / "whole")


@pytest.fixture(scope="module")
def killed(folder: Path, launch: Launch) -> Path:
    """Two ranks, one of which is killed within step 6; checkpoints were made after step 3. Not to be
    changed: copy it."""
    job = train(launch, folder, 2, "killed", by="killed.py")
    assert job.returncode != 0
    run = folder / "killed"
    assert [path.name for path, wrong in survey(run) if not wrong] == ["step-00000003"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5
    return run


def copied(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.parent / name, symlinks=True))


def test_a_killed_run_goes_on_to_the_bits_of_an_undisturbed_one(
    launch: Launch, folder: Path, undisturbed: dict[str, Any], killed: Path
) -> None:
    """On three ranks instead of two, by a schedule of the user's own: layout, which decides no bits."""
    run = copied(killed, "resumed")
    job = train(launch, folder, 3, "resumed", "--resume", "pipeline.schedule=mine:order")
    assert job.returncode == 0, job.stderr
    assert "resuming resumed after 3 steps" in job.stdout
    assert told(run) == undisturbed
    assert [step["step"] for step in told(run)["steps"]] == list(range(1, STEPS + 1)), "no line twice"


def test_of_two_starts_of_one_run_the_later_one_writes(
    launch: Launch, folder: Path, undisturbed: dict[str, Any]
) -> None:
    """As where a job is submitted twice. The earlier one is in its fifth step, a save is due after six."""
    command = [sys.executable, "met.py", "config.yaml", "run.dir=twice"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        while first.stdout.readline() != "waits\n":
            assert first.poll() is None, first.communicate()
        later = train(launch, folder, 2, "twice", "--resume", "train.save_every=0")
        _, error = first.communicate(timeout=60)
    assert later.returncode == 0, later.stderr
    assert first.returncode == 1
    assert error.count("mpipipe: error:") == 1, error
    assert "twice/owner.json: another start of this run writes here since" in error
    run = folder / "twice"
    assert json.loads((run / "summary.json").read_text())["weights_sha256"] == undisturbed["weights"]
    whole = [path.name for path, wrong in survey(run) if not wrong]
    assert sorted(whole) == ["step-00000003", f"step-{STEPS:08}"]


def test_other_numerics_are_refused_until_they_are_asked_for(
    launch: Launch, folder: Path, undisturbed: dict[str, Any], killed: Path
) -> None:
    run = copied(killed, "other")
    before = contents(run)
    job = train(launch, folder, 2, "other", "--resume", "train.seed=5")
    assert job.returncode != 0
    assert job.stderr.count("mpipipe: error:") == 1, job.stderr
    assert "seed: 0 in the checkpoint, 5 now" in job.stderr
    assert "--new-numerics" in job.stderr
    assert contents(run) == before, "nothing has changed"

    train_alone(folder, "run.dir=other", "--resume", "train.seed=5", "--new-numerics")
    found = told(run)
    assert found["steps"][:3] == undisturbed["steps"][:3]
    assert [step["step"] for step in found["steps"]] == list(range(1, STEPS + 1))
    assert found["weights"] != undisturbed["weights"]
    assert "seed: 0" in (run / "config.before-step-3.yaml").read_text()
    assert "seed: 5" in (run / "config.yaml").read_text()


def test_damaged_checkpoints_are_passed_over_and_a_finished_run_says_so(
    folder: Path, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(folder / "whole", "damaged")
    last = newest(run)
    assert last is not None
    assert last.name == f"step-{STEPS:08d}"
    shard = next(last.glob("model*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    flipped = run / "checkpoints" / "step-00000006" / "optimizer-00001-of-00001.safetensors"
    bits = bytearray(flipped.read_bytes())
    bits[-1] ^= 1
    flipped.write_bytes(bits)
    train_alone(folder, "run.dir=damaged", "--resume")
    said = capsys.readouterr().out
    assert f"note: passed over {Path('damaged') / 'checkpoints' / last.name}: " in said
    assert f"{shard.name}: has " in said
    assert f"{Path('damaged') / flipped.relative_to(run)}: its sha256 is " in said
    assert "resuming damaged after 3 steps" in said
    assert told(run) == undisturbed
    kept = [path.name for path in (run / "checkpoints").glob("*.damaged")]
    assert sorted(kept) == ["step-00000006.damaged", f"{last.name}.damaged"]

    train_alone(folder, "run.dir=damaged", "--resume")
    assert f"{STEPS} steps: the run is finished; for more, raise train.steps" in capsys.readouterr().out
    assert told(run) == undisturbed


def test_a_time_limit_ends_with_a_checkpoint_and_the_run_can_go_on(
    launch: Launch, folder: Path, undisturbed: dict[str, Any]
) -> None:
    """What came before the first step counts, so this is the only one."""
    job = train(launch, folder, 2, "limited", "run.time_limit=0.01")
    assert job.returncode == 0, job.stderr
    run = folder / "limited"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped_by"] == "the time limit"
    assert summary["steps"] == 1
    last = newest(run)
    assert last is not None
    assert last.name == f"step-{summary['steps']:08d}"
    losses = [[step["loss"] for step in steps] for steps in (told(run)["steps"], undisturbed["steps"])]
    assert losses[0] == losses[1][: summary["steps"]]

    train_alone(folder, "run.dir=limited", "--resume")
    found = told(run)
    assert found["weights"] == undisturbed["weights"]
    losses = [[step["loss"] for step in steps] for steps in (found["steps"], undisturbed["steps"])]
    assert losses[0] == losses[1]


@pytest.fixture
def of_a_text(folder: Path) -> tuple[Path, str]:
    """A run on the text of the folder `a`, cut back to its first checkpoint, and its weights at the end."""
    for name in "ab":
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
        (folder / name / "text").write_text(f"the folder {name} holds {name} " * 99)
    (folder / "text.yaml").write_text(TEXT)
    shutil.rmtree(folder / "text", ignore_errors=True)
    weights = train_alone(folder, config="text.yaml").weights_sha256
    for step in (4, 6):
        shutil.rmtree(folder / "text" / "checkpoints" / f"step-{step:08d}")
    return folder, weights


def test_a_resume_that_is_refused_leaves_the_text_of_the_run(of_a_text: tuple[Path, str]) -> None:
    folder, weights = of_a_text
    with pytest.raises(ConfigError, match="batch: 8 in the checkpoint, 16 now"):
        train_alone(folder, "--resume", "data.path=b", "train.batch=16", config="text.yaml")
    (folder / "a" / "text").write_text("it was gathered when the run began " * 99)
    assert train_alone(folder, "--resume", config="text.yaml").weights_sha256 == weights


def test_the_text_of_a_run_that_an_earlier_version_began_is_found(of_a_text: tuple[Path, str]) -> None:
    folder, weights = of_a_text
    next((folder / "text").glob("corpus-*.bin")).rename(folder / "text" / "corpus.bin")
    assert train_alone(folder, "--resume", config="text.yaml").weights_sha256 == weights


def test_data_that_changed_under_its_name_is_refused_and_another_section_is_taken(
    of_a_text: tuple[Path, str],
) -> None:
    folder, weights = of_a_text
    run = folder / "text"
    of_a = next(run.glob("corpus-*.bin"))
    kept = of_a.read_bytes()
    of_a.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(CheckpointError, match="step-00000002: was trained on other data") as caught:
        train_alone(folder, "--resume", config="text.yaml")
    assert "sha256 of the first samples: " in str(caught.value)
    assert "by --new-numerics" in str(caught.value)
    of_a.write_bytes(kept)
    for _ in range(2):  # the second time config.yaml is of `b` already, the checkpoint still of `a`
        assert train_alone(folder, "--resume", "data.path=b", config="text.yaml").weights_sha256 != weights
        for step in (4, 6):
            shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    assert train_alone(folder, "--resume", config="text.yaml").weights_sha256 == weights
