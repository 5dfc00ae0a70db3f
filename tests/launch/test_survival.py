"""Runs under the supervisor that meet a fault, each a real one in a real rank, and go on to the same bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpipipe.cluster.job import kill_all, remains

pytestmark = pytest.mark.jobs
REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY, FAILS_AT = 9, 3, 7  # `FAILS_AT`: the step, counted from 0, whose data meet the fault
LIMIT_S = 5  # of the watchdog

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
from mpipipe.runtime import slowness

slowness.WINDOW = 10
SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

class Data:
    def __init__(self, fault=None, rank=1):
        self.fault = fault if rank == RANK else None

    def batch(self, step, micro):
        if (step, micro) == ({FAILS_AT}, 1) and self.fault:  # micro-batch 0 is loaded before, to be timed
            self.meet(pathlib.Path("met"))
        random = torch.Generator().manual_seed(100 * step + micro)
        x, labels = torch.randn(2, 8, generator=random), torch.randint(4, (2,), generator=random)
        return {{"x": x, "labels": labels}}

    def meet(self, met):
        try:
            met.touch(exist_ok=False)
        except FileExistsError:
            return
        if self.fault == "sleep":
            time.sleep(600)
        if self.fault == "slow":  # from now on this rank has a quarter of a core
            for thread in (os.getpid(), 0):  # the main one and, for the others, this one
                os.sched_setaffinity(thread, {{max(os.sched_getaffinity(0))}})
            self.others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(3)]
            return
        if self.fault == "error":
            raise DataError("the data are of the wrong year; fetch them anew")
        signals = {{"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "launcher": signal.SIGKILL}}
        os.kill(os.getppid() if self.fault == "launcher" else os.getpid(), signals[self.fault])
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
    (folder / "met").unlink(missing_ok=True)
    return start(folder, "-m", "mpipipe", "run", "config.yaml", "-n", "2", f"run.dir={run}", *words)


def left(folder: Path, run: str) -> list[int]:
    return remains(f"run.dir={folder / run}")


def weights(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["weights_sha256"])


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    done = start(folder, "-m", "mpipipe.train", "config.yaml", "run.dir=whole")
    assert done.returncode == 0, done.stderr
    return weights(folder / "whole")


DIED = {
    "kill": "rank 1 on {host} was ended by SIGKILL",
    "launcher": "the launcher was ended by SIGKILL",
    "stop": "rank 1 ({host}, pid ",
    "sleep": "rank 1 ({host}) is in ",
}


@pytest.mark.parametrize("fault", DIED)
def test_a_run_goes_on_after_a_fault_to_the_same_bits(folder: Path, undisturbed: str, fault: str) -> None:
    words = [f"run.watchdog={LIMIT_S}"] if fault in ("stop", "sleep") else []
    done = supervised(folder, fault, f"data.args={{fault: {fault}}}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(folder / fault) == undisturbed
    assert left(folder, fault) == []
    events = [line for line in done.stdout.splitlines() if line.startswith("mpipipe run: ")]
    assert [event.split()[2] for event in events] == ["starts:", events[1].split()[2], "starts"], events
    assert DIED[fault].format(host=os.uname().nodename) in events[1]
    assert re.search("goes on from step [36] in 1 s", events[1])  # that of step 6 may be on its way yet
    assert "(restart 1 of 5 without progress)" in events[1]
    steps = [json.loads(line)["step"] for line in (folder / fault / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


def test_the_watchdog_tells_who_was_waited_for_and_leaves_records(folder: Path, undisturbed: str) -> None:
    """Of the run above whose data slept; `flight.before`, as the run went on."""
    if not (folder / "sleep").exists():
        test_a_run_goes_on_after_a_fault_to_the_same_bits(folder, undisturbed, "sleep")
    flight = folder / "sleep" / "flight.before"
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
    done = supervised(folder, "error", "data.args={fault: error}")
    assert done.returncode == 1
    assert done.stderr.count("mpipipe: error: the data are of the wrong year") == 1, done.stderr
    assert done.stdout.count("mpipipe run: ") == 1, done.stdout
    assert left(folder, "error") == []


@pytest.mark.full
def test_a_slow_rank_is_planned_around_to_the_same_bits(folder: Path) -> None:
    """Its instructions are long enough to be interrupted by what shares its core."""
    words = ["train.steps=40", "train.save_every=0", "model.hidden=[2048, 2048, 2048, 2048, 2048]"]
    alone = start(folder, "-m", "mpipipe.train", "config.yaml", "run.dir=alone", *words)
    assert alone.returncode == 0, alone.stderr
    done = supervised(folder, "slow", *words, "data.args={fault: slow}", "run.slow_rank=replan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(folder / "slow") == weights(folder / "alone")
    said = done.stdout.splitlines()
    slow = next(i for i, line in enumerate(said) if "times as long as the other ranks for 20 steps" in line)
    assert said[slow].startswith("note: rank 1 (")
    assert any(line.startswith("mpipipe: planned anew: a step is pre") for line in said[slow:]), done.stdout
