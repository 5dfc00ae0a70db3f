"""Runs under the supervisor that meet a fault, each a real one in a real rank, and go on to the same bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from alone import train_alone

from mpipipe.cluster.job import kill_all, remains
from mpipipe.runtime import slowness

pytestmark = pytest.mark.jobs
REPOSITORY = Path(__file__).resolve().parents[2]
SAVE_EVERY, LIMIT_S = 3, 5  # the second is of the watchdog
FAULTS = ("kill", "launcher", "stop", "save", "sleep")  # the last one leaves the records of the watchdog
FAILS_AT = (7, 10, 13, 16, 22)  # the steps, counted from 0, whose data meet them; a save comes after
STEPS = 24

CONFIG = f"""\
model: {{name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4, dropout: 0.1}}
data: {{name: "faulty:Data"}}
train: {{steps: {STEPS}, batch: 8, warmup: 2, lr: 0.01, save_every: {SAVE_EVERY}}}
pipeline: {{micro_batches: 4}}
"""

DATA = rf"""
import os, pathlib, signal, subprocess, sys, time
import torch
from mpipipe.errors import DataError
from mpipipe.pipeline import Pipeline
from mpipipe.runtime import slowness

slowness.WINDOW = 10
SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

class Data:
    def __init__(self, faults=(), rank=1):
        self.faults = dict(zip({FAILS_AT}, faults)) if rank == RANK else {{}}

    def batch(self, step, micro):
        if micro == 1 and (fault := self.faults.get(step)):  # micro-batch 0 is loaded before, to be timed
            self.meet(fault)
        random = torch.Generator().manual_seed(100 * step + micro)
        x, labels = torch.randn(2, 8, generator=random), torch.randint(4, (2,), generator=random)
        return {{"x": x, "labels": labels}}

    def meet(self, fault):
        try:
            pathlib.Path(f"met-{{fault}}").touch(exist_ok=False)
        except FileExistsError:
            return
        if fault == "sleep":
            time.sleep(600)
        if fault == "slow":  # from now on this rank has a quarter of a core
            for thread in (os.getpid(), 0):  # the main one and, for the others, this one
                os.sched_setaffinity(thread, {{max(os.sched_getaffinity(0))}})
            self.others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(3)]
            return
        if fault == "save":
            self.die_in_a_save()
            return
        if fault == "error":
            raise DataError("the data are of the wrong year; fetch them anew")
        signals = {{"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "launcher": signal.SIGKILL}}
        os.kill(os.getppid() if fault == "launcher" else os.getpid(), signals[fault])
        time.sleep(2)  # ranks that outlive their launcher for a moment do not come to the next fault

    def die_in_a_save(self):
        begin = Pipeline.begin_save

        def dies(*args, **how):
            begin(*args, **how)
            os.kill(os.getpid(), signal.SIGKILL)

        Pipeline.begin_save = dies
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    (path / "config.yaml").write_text(CONFIG)
    (path / "faulty.py").write_text(DATA)
    return path


def start(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """One process, and whatever it starts; nothing of it is there afterwards."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), "."]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environ, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=300)
        finally:
            kill_all(remains(f"run.dir={folder}", process.pid))
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def supervised(folder: Path, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    return start(folder, "-m", "mpipipe", "run", "config.yaml", "-n", "2", f"run.dir={run}", *words)


def left(folder: Path, run: str) -> list[int]:
    return remains(f"run.dir={folder / run}")


def weights(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["weights_sha256"])


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slowness, "WINDOW", 10)  # faulty.py would set it for good
        return train_alone(folder, "run.dir=whole").weights_sha256


DIED = {
    "kill": "rank 1 on {host} was ended by SIGKILL",
    "launcher": "the launcher was ended by SIGKILL",
    "stop": "rank 1 ({host}, pid ",
    "save": "rank 1 on {host} was ended by SIGKILL",
    "sleep": "rank 1 ({host}) is in ",
}


@pytest.fixture(scope="module")
def several(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run that meets one fault after the other: each start that they share takes seconds."""
    words = [f"data.args={{faults: [{', '.join(FAULTS)}]}}", f"run.watchdog={LIMIT_S}"]
    return supervised(folder, "several", *words)


def test_a_run_goes_on_after_each_fault_to_the_same_bits(
    folder: Path, undisturbed: str, several: subprocess.CompletedProcess[str]
) -> None:
    assert several.returncode == 0, several.stdout + several.stderr
    assert weights(folder / "several") == undisturbed
    assert left(folder, "several") == []
    events = [line for line in several.stdout.splitlines() if line.startswith("mpipipe run: ")]
    assert [event.split()[2] for event in events[::2]] == ["starts:"] + ["starts"] * len(FAULTS), events
    for fault, at, said in zip(FAULTS, FAILS_AT, events[1::2], strict=True):
        assert DIED[fault].format(host=os.uname().nodename) in said
        found = re.search(r"goes on from step (\d+) in 1 s", said)
        assert found, said
        assert int(found[1]) in (at - 1 - SAVE_EVERY, at - 1)  # the newest one may be on its way yet
        assert "(restart 1 of 5 without progress)" in said
    lines = (folder / "several" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def test_the_watchdog_tells_who_was_waited_for_and_leaves_records(
    folder: Path, several: subprocess.CompletedProcess[str]
) -> None:
    """When the data slept; `flight.before`, as the run went on."""
    assert several.returncode == 0, several.stdout + several.stderr
    flight = folder / "several" / "flight.before"
    text = (flight / "diagnosis.txt").read_text()
    assert "rank 0 (" in text, text
    assert "from rank 1, since " in text, text
    assert "faulty.py:" in text, text
    assert "in meet" in text, text
    records = [json.loads((flight / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert records[0]["doing"]["waits_for"] == [1]
    assert records[1]["doing"]["waits_for"] == []
    assert "time.sleep(600)" in "".join(records[1]["stacks"]["mpipipe-prefetch"])


def test_an_error_of_the_user_s_is_not_tried_again(folder: Path) -> None:
    done = supervised(folder, "error", "data.args={faults: [error]}")
    assert done.returncode == 1
    assert done.stderr.count("mpipipe: error: the data are of the wrong year") == 1, done.stderr
    assert done.stdout.count("mpipipe run: ") == 1, done.stdout
    assert left(folder, "error") == []


@pytest.mark.full
def test_a_slow_rank_is_planned_around_to_the_same_bits(folder: Path) -> None:
    """Its instructions are long enough to be interrupted by what shares its core; that begins when the plan
    is no longer refined by what the first steps took."""
    words = ["train.steps=50", "train.save_every=0", "model.hidden=[2048, 2048, 2048, 2048, 2048]"]
    words.append("pipeline.schedule=1f1b")  # rank 1 has the labels, and so loads data
    alone = start(folder, "-m", "mpipipe.train", "config.yaml", "run.dir=alone", *words)
    assert alone.returncode == 0, alone.stderr
    done = supervised(folder, "slow", *words, "data.args={faults: ['', '', slow]}", "run.slow_rank=replan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(folder / "slow") == weights(folder / "alone")
    said = done.stdout.splitlines()
    slow = next(i for i, line in enumerate(said) if "times as long as the other ranks for 20 steps" in line)
    assert said[slow].startswith("note: rank 1 (")
    assert any(line.startswith("mpipipe: planned anew: a step is pre") for line in said[slow:]), done.stdout
