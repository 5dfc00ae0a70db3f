"""The words that started a job are found again, as they were typed or in those of its launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpipipe.cluster.started import as_root, launcher_pid, started

PROGRAM = ("python", "-m", "mpipipe.train", "config.yaml", "train.steps=9")
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
HYDRA = {"PMI_SIZE": "3", "PMI_RANK": "0"}


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not root, without a launcher beside this Python."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "prefix", "/nowhere")


def under(folder: Path, *above: str, exe: str = "/bin/x") -> Path:
    """A /proc in which these command lines stand above this process, the nearest first."""
    pids = [os.getpid(), *range(10**8, 10**8 + len(above))]
    for pid, parent, line in zip(pids, [*pids[1:], 0], ["", *above], strict=True):
        (folder / f"{pid}").mkdir(parents=True)
        (folder / f"{pid}/stat").write_text(f"{pid} (a name) of ) S {parent} 1 1")
        (folder / f"{pid}/cmdline").write_bytes(b"".join(f"{word}\0".encode() for word in line.split()))
        (folder / f"{pid}/exe").symlink_to(exe)
    return folder


@pytest.mark.parametrize(
    ("above", "words"),
    [
        (("mpirun --host a:2,b:2 -n 4",), "mpirun --host a:2,b:2 -n 4"),
        (("mpirun -n 4 timeout 60",), "mpirun -n 4 timeout 60"),  # as a wrapper of each rank is typed, too
        (("timeout 60", "mpirun -n 4 timeout 60", "sh launch 4"), "mpirun -n 4 timeout 60"),
        (("env/bin/mpiexec.hydra -ppn 2 -n 4",), "env/bin/mpiexec.hydra -ppn 2 -n 4"),
        (("-proxy", "mpiexec -bind-to none -n 4"), "mpiexec -bind-to none -n 4"),
    ],
)
def test_a_launcher_on_this_node_is_told_as_it_was_typed(
    tmp_path: Path, above: tuple[str, ...], words: str
) -> None:
    lines = [line if line == "-proxy" else " ".join((line, "/bin/python", *PROGRAM[1:])) for line in above]
    assert started(4, {}, PROGRAM, under(tmp_path, *lines)) == words.split()


def test_the_process_to_which_signals_go_is_the_launcher_above(tmp_path: Path) -> None:
    assert launcher_pid(under(tmp_path / "some", "timeout 60", "prterun -n 4", "sh launch 4")) == 10**8 + 1
    assert launcher_pid(under(tmp_path / "none", "slurmstepd", "sh")) is None


def test_prterun_is_the_mpirun_beside_it_by_its_name_where_that_finds_it(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin/mpirun"
    mpirun.touch(mode=0o755)
    line = " ".join(("prterun --oversubscribe -n 4", *PROGRAM))
    proc = under(tmp_path / "proc", line, exe=str(tmp_path / "bin/prterun"))
    for path, name in (("/bin", str(mpirun)), (str(tmp_path / "bin"), "mpirun")):
        found = started(4, {"PATH": path, **OPEN_MPI}, PROGRAM, proc)
        assert found == [name, "--oversubscribe", "-n", "4"]


def test_root_is_allowed_by_open_mpi_alone_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (once, again) = (f"mpirun {option}-n 4" for option in ("", "--allow-run-as-root "))
    for i, line in enumerate((once, again)):
        proc = under(tmp_path / f"{i}", " ".join((line, *PROGRAM)))
        assert started(4, OPEN_MPI, PROGRAM, proc) == again.split()
        assert started(4, HYDRA, PROGRAM, proc) == line.split()
    assert started(1, {}, PROGRAM, under(tmp_path / "alone")) == []


SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "mpirun -n 2"),
        (OPEN_MPI, "mpirun --bind-to none --oversubscribe -n 4"),
        ({**OPEN_MPI, **SLURM}, "mpirun --bind-to none --oversubscribe -n 4"),
        (HYDRA, "mpirun -n 3"),
        (SLURM, "srun --mpi=pmix --nodes=2 -n 8"),
        ({**SLURM, "PMI_SIZE": "8", "PMI_RANK": "0"}, "srun --mpi=pmi2 --nodes=2 -n 8"),
        (
            {**SLURM, "SLURM_MPI_TYPE": "pmix_v4", "SLURM_CPUS_PER_TASK": "6"},
            "srun --mpi=pmix_v4 --nodes=2 --cpus-per-task=6 -n 8",
        ),
        ({"SLURM_STEP_NUM_TASKS": "1"}, ""),  # python within `srun --pty bash`
    ],
)
@pytest.mark.parametrize(
    "above",
    [
        (),
        ("prted --daemon",),
        (f"mpirun -n 1 python other.py : -n 3 {' '.join(PROGRAM)}",),
        ("mpirun -n 4 bash -c a.sh",),
    ],
)
def test_a_launcher_that_is_not_seen_is_told_by_the_environment(
    tmp_path: Path, environ: dict[str, str], words: str, above: tuple[str, ...]
) -> None:
    assert started(2, environ, PROGRAM, under(tmp_path, *above)) == words.split()


def test_where_there_is_no_proc_the_environment_tells(tmp_path: Path) -> None:
    assert started(2, OPEN_MPI, PROGRAM, tmp_path / "none")[-2:] == ["-n", "4"]
    assert started(2, {}, ("python",), tmp_path / "none") == ["mpirun", "-n", "2"]
    assert started(1, {}, PROGRAM, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("uid", "environ", "options"),
    [(0, {}, ["--allow-run-as-root"]), (0, {"OMPI_ALLOW_RUN_AS_ROOT": "1"}, []), (1000, {}, [])],
)
def test_a_line_for_root_says_so(
    monkeypatch: pytest.MonkeyPatch, uid: int, environ: dict[str, str], options: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert as_root(environ) == options
