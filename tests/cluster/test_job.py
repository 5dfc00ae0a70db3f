"""The processes of a job, real ones, and the words that launchers have for a death."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpipipe.cluster import death
from mpipipe.cluster.death import cause
from mpipipe.cluster.job import PROGRAM, Job, kill_all, remains
from mpipipe.cluster.starter import Host, Starter
from mpipipe.cluster.survivors import FLAGS

SLEEPS = "import time; print(flush=True); time.sleep(60)"


def test_what_is_left_is_found_by_its_session_and_by_its_argument() -> None:
    ours_words, others_words = [PROGRAM, "run.dir=/none/such"], [PROGRAM, "run.dir=/another"]
    marks = ours_words, others_words, ours_words[1:]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SLEEPS, *words], stdout=subprocess.PIPE, start_new_session=True
        )
        for words in marks
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        ours, another, no_rank = (process.pid for process in started)
        assert remains("run.dir=/none/such") == [ours]
        assert sorted(remains("run.dir=/another", no_rank)) == sorted([another, no_rank])
        os.kill(ours, signal.SIGSTOP)
        kill_all([ours, another])
        assert [process.poll() for process in started] == [-signal.SIGKILL, -signal.SIGKILL, None]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_launcher_that_ends_leaves_nothing_behind(capfd) -> None:
    script = "sleep 60 & echo its last words >&2; sleep 0.5; exit 3"
    launched = Job(["sh", "-c", script], os.environ, "run.dir=/none/such")
    assert launched.wait(0.0) is None
    assert launched.wait(20.0) == 3
    launched.end()
    assert remains("run.dir=/none/such", launched._process.pid) == []
    assert launched.said == ["its last words"]
    assert capfd.readouterr().err == "its last words\n"


def test_ranks_are_read_also_where_nobody_listens_to_this_process(monkeypatch) -> None:
    with open(os.devnull, "wb") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=closed))
    launched = Job(["sh", "-c", "seq 30000 >&2"], os.environ, "run.dir=/none/such")
    assert launched.wait(20.0) == 0
    launched.end()
    assert launched.said[-1] == "30000"


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (
            137,
            ["prterun noticed that process rank 1 with PID 13135 on node vm exited on", "signal 9 (Killed)."],
            "rank 1 on vm was ended by SIGKILL",
        ),
        (
            9,
            ["=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   RANK 2 PID 77 RUNNING AT n3",
             "=   KILLED BY SIGNAL: 9 (Killed)"],
            "rank 2 on n3 was ended by SIGKILL",
        ),
        (137, ["srun: error: n2: task 3: Killed"], "rank 3 on n2 was ended by Killed"),
        (1, ["srun: error: n2: task 3: Exited with exit code 1"], "rank 3 on n2 ended with exit code 1"),
        (
            75,
            ["   Process name: [prterun-vm-13238@1,0]", "   Exit code:    75"],
            "rank 0 ended with exit code 75",
        ),
        (
            255,
            ["PRTE has lost communication with a remote daemon.", "  HNP daemon   : [a@0,0] on node n1",
             "  Remote daemon: [a@0,1] on node n2"],
            "the node n2 was lost",
        ),
        (-9, [], "the launcher was ended by SIGKILL"),
        (143, [], "the launcher ended with exit code 143, as after SIGTERM"),
        (255, [], "the launcher ended with exit code 255"),  # 127 is no signal
        (5, ["something else"], "the launcher ended with exit code 5"),
    ],
)  # fmt: skip
def test_who_died_is_read_from_what_launchers_say(code: int, said: list[str], words: str) -> None:
    assert cause(code, said) == words


def test_mpich_s_launcher_ends_with_the_signal_s_number() -> None:
    assert cause(9, [], "MPICH") == "a rank was ended by SIGKILL"
    assert cause(1, [], "MPICH") == cause(1, []) == "the launcher ended with exit code 1"
    assert cause(9, [], "Open MPI") == "the launcher ended with exit code 9"


def test_the_examples_in_the_documentation() -> None:
    assert doctest.testmod(death).failed == 0


HOSTS = [Host("a", 2), Host("b", 2)]


@pytest.mark.parametrize(
    ("starter", "words"),
    [
        (Starter(("mpirun",), "Open MPI", False), "mpirun --bind-to none -n 4 --host a:2,b:2 x"),
        (Starter(("mpirun", "--tune", "f"), "Open MPI", True), "mpirun --tune f -n 4 --host a:2,b:2 x"),
        (Starter(("mpiexec",), "MPICH", False), "mpiexec -n 4 -hosts a:2,b:2 x"),
        (Starter(("srun", "--mpi=pmix"), "srun", True), "srun --mpi=pmix -n 4 -N 2 -w a,b x"),
    ],
)
def test_the_line_is_in_the_words_of_the_launcher(starter: Starter, words: str) -> None:
    assert " ".join(starter.line(4, HOSTS, ["x"])) == words


def test_what_a_launcher_knows_by_itself_is_not_said() -> None:
    given = Starter(("srun", "-n", "8"), "srun", True)
    assert given.line(None, None, ["x"]) == ["srun", "-n", "8", "x"]
    assert given.alone(HOSTS[0], ["x"])[3:] == ["--overlap", "-n", "1", "-N", "1", "-w", "a", "x"]
    here = Starter(("mpirun",), "Open MPI", False).line(4, None, ["x"])
    assert here == ["mpirun", "--bind-to", "none", "--oversubscribe", "-n", "4", "x"]


@pytest.mark.parametrize(
    ("starter", "flags"),
    [
        (Starter(("mpirun",), "Open MPI", False), True),
        (Starter(("mpirun", "--tune", "f"), "Open MPI", True), True),
        (Starter(("mpirun", "--with-ft", "ulfm"), "Open MPI", True), False),
        (Starter(("mpiexec",), "MPICH", True), False),
        (Starter(("srun",), "srun", True), False),
    ],
)
def test_ranks_that_outlive_one_another_need_their_flags_also_behind_a_named_launcher(
    starter: Starter, flags: bool
) -> None:
    assert (FLAGS in " ".join(starter.line(4, HOSTS, ["x"], outlive=True))) is flags
    assert FLAGS not in " ".join(starter.line(4, HOSTS, ["x"]))
