"""How jobs end: real launches of two ranks, started from here (make test-mpi), each with its own fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from alone import train_alone

from mpipipe.state.checkpoint import load

pytestmark = pytest.mark.jobs
REPOSITORY = Path(__file__).resolve().parents[2]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

CONFIG = """\
model: {name: mlp, inputs: 8, hidden: [16, 16, 16], classes: 4, dropout: 0.1}
data: {name: synthetic, samples: 64}
train: {steps: 9, batch: 8, warmup: 1}
eval: {every: 0, batches: 1}
pipeline: {micro_batches: 4}
run: {dir: run}
"""

FAILS = """
import pathlib, sys, time
from mpipipe import train
from mpipipe.runtime.stage import Stage

forward = Stage.forward

def fails(self, code, micro, *rest):
    if self.weights.stage == 1 and micro == 2:
        pathlib.Path("failed_at").write_text(str(time.time()))
        raise ZeroDivisionError("made to fail")
    return forward(self, code, micro, *rest)

Stage.forward = fails
sys.exit(train.main(sys.argv[1:]))
"""

BEFORE_STEP = """
import os, pathlib, signal, sys, time
from mpipipe import train
from mpipipe.runtime.trainer import Trainer

step = Trainer.step

def acts(self, number, **how):
    if number == {step} and self.comm.rank == 1:
        {acts}
    return step(self, number, **how)

Trainer.step = acts
sys.exit(train.main(sys.argv[1:]))
"""

DIES = BEFORE_STEP.format(step=5, acts="os.kill(os.getpid(), signal.SIGKILL)")
IS_STOPPED = BEFORE_STEP.format(step=3, acts="os.kill(os.getpid(), signal.SIGTERM)")
STOPS_ITS_LAUNCHER = BEFORE_STEP.format(
    step=3,
    acts="""mpirun = os.getppid()
        script = int(pathlib.Path(f"/proc/{mpirun}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(script, signal.SIGTERM)
        time.sleep(2)  # the signal takes its way while this step lasts""",
)

SAYS_THREAD_LEVEL = """
import os, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
os.environ["OMP_NUM_THREADS"] = str(1 + int(rank))
from mpipipe import train
code = train.main(sys.argv[1:])
from mpi4py import MPI
print("level", MPI.Query_thread() == MPI.THREAD_MULTIPLE)
sys.exit(code)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def test_an_error_on_one_rank_is_told_once_and_ends_all(launch: Launch, folder: Path) -> None:
    job = launch(2, script(folder, FAILS), "config.yaml", cwd=folder)
    took_s = time.time() - float((folder / "failed_at").read_text())
    assert job.returncode != 0
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert job.stderr.count("ZeroDivisionError: made to fail") == 1
    assert "mpipipe: rank 1 failed" in job.stderr
    assert "rank 1, stage 1, instruction 1F2" in job.stderr
    assert took_s < 20  # 2 to speak, the rest to end two processes of a busy machine


def test_the_last_lines_after_an_error_name_it_and_the_command_that_goes_on(
    launch: Launch, folder: Path
) -> None:
    later = "import itertools\npasses = itertools.count()\n\ndef fails"
    fails = FAILS.replace("def fails", later).replace("micro == 2:", "micro == 2 and next(passes) == 5:")
    job = launch(2, script(folder, fails), "config.yaml", "train.save_every=1", cwd=folder)
    assert job.returncode != 0
    of_rank = job.stderr.partition("mpipipe: rank 1 failed")[2]
    assert of_rank.index("ZeroDivisionError: made to fail") < of_rank.index("to go on from step ")
    assert " -m mpipipe.train run/config.yaml run.dir=run --resume" in of_rank
    promised = [line for line in job.stderr.splitlines() if "asked to stop (SIGTERM)" in line]
    assert all("if all ranks are there" in line for line in promised), promised


def test_the_last_line_after_a_kill_promises_no_checkpoint(launch: Launch, folder: Path) -> None:
    job = launch(2, script(folder, DIES), "config.yaml", "train.save_every=1", cwd=folder)
    assert job.returncode != 0
    line = job.stderr.partition("asked to stop (SIGTERM)")[2].partition("\n")[0]
    assert line.endswith("if not, --resume goes on from the newest checkpoint there is"), job.stderr


def test_a_signal_to_one_rank_stops_all_and_the_line_that_goes_on_does_so_as_it_is(
    launch: Launch, folder: Path
) -> None:
    """After the same step; the line also for root, and with more ranks than cores."""
    stops = script(folder, IS_STOPPED)
    job = launch(3, stops, "config.yaml", "pipeline.schedule=1f1b", cwd=folder, timeout_s=120)
    assert job.returncode == 0, job.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["stopped_by"], summary["steps"]) == ("SIGTERM", 5)
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    assert len(load(folder / "run" / "checkpoint")) == 8  # weight and bias of four layers
    line = job.stdout.partition("\nto go on: ")[2].partition("\n")[0]
    assert line.endswith(" -m mpipipe.train run/config.yaml run.dir=run --resume")
    ours = ("OMPI_", "PRTE_", "MPIRUN")  # which .ci/launch sets, and the shell of a user has not
    assert not (folder / "run" / "timeline.png").exists(), "whoever sends SIGTERM may kill a second later"
    (folder / "run" / "timeline.png.part").touch()
    bare = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    again = subprocess.run(
        ["timeout", "-k", "5", "120", "sh", "-c", line], cwd=folder, capture_output=True, text=True,
        env=bare | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "mpipipe: 3 ranks x 1 thread" in again.stdout
    assert "resuming run after 5 steps" in again.stdout
    assert [path.name for path in (folder / "run").glob("timeline.png*")] == ["timeline.png"]


def test_a_sigterm_to_the_launch_script_ends_cleanly(launch: Launch, folder: Path) -> None:
    job = launch(2, script(folder, STOPS_ITS_LAUNCHER), "config.yaml", cwd=folder)
    assert job.returncode == 0, job.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "SIGUSR1"
    assert job.stderr.count("mpipipe: asked to stop (SIGUSR1): after this step, with a checkpoint") == 1
    assert summary["steps"] in (4, 5)
    assert len(load(folder / "run" / "checkpoint")) == 8


def test_over_tcp_messages_move_while_ranks_compute_and_change_no_bits(launch: Launch) -> None:
    """As between nodes, where ranks of one machine share memory: by settings that Open MPI alone knows."""
    job = launch(
        2, "-m", "pytest", "tests/mpi/test_comm.py", "tests/mpi/test_bits.py", "--with-mpi", "-q",
        "-m", "mpi and not full",
        "-k", "arrive or large_message or who_moves or with_measured_costs or several_stages_on_a_rank",
        env={"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"},
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    assert " passed" in job.stdout
    assert "skipped" not in job.stdout


def test_neither_the_thread_level_of_mpi_nor_omp_num_threads_changes_bits(
    launch: Launch, folder: Path
) -> None:
    """torch is told `pipeline.threads`. The usual level is that of all other launches."""
    job = launch(
        2, script(folder, SAYS_THREAD_LEVEL), "config.yaml", cwd=folder,
        env={"MPIPIPE_THREAD_LEVEL": "funneled"},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("level False") == 2
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["stopped_by"], summary["steps"]) == (None, 9)
    assert summary["weights_sha256"] == train_alone(folder, "run.dir=alone").weights_sha256


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("PMI", id="MPICH's", marks=pytest.mark.full),  # test_doctor.py starts such ones too
        pytest.param("OMPI_COMM_WORLD", id="Open MPI's"),
    ],
)
def test_processes_that_are_alone_do_not_train(folder: Path, launcher: str) -> None:
    """As when a launcher that does not fit the MPI starts two of them: one says so, both end."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "mpipipe.train", "config.yaml"],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                f"{launcher}_SIZE": "2",
                f"{launcher}_RANK": str(rank),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1]
    said = texts[0][1]
    assert said.count("mpipipe: error:") == 1
    assert "started 2 processes" in said
    assert "fix: " in said
    assert "mpipipe" not in texts[1][1]
    assert not (folder / "run").exists()
