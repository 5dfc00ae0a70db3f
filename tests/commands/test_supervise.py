"""The supervisor's decisions, with a launcher that is a small shell script instead of ranks."""

from __future__ import annotations

import doctest
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from made_run import made_plan, made_report
from saved_run import save_step
from unseen import shows

from mpipipe.cluster.starter import Host, Starter
from mpipipe.commands import supervise as command
from mpipipe.commands.asking import Asking
from mpipipe.commands.supervise import LONGEST_WAIT_S, Patience, Supervisor, _parser, main
from mpipipe.config import load, parse
from mpipipe.errors import ConfigError
from mpipipe.state.rundir import create
from mpipipe.values import to_json

# each start does the line of its number in the folder of the run, with its arguments in "$@"
LAUNCHER = r"""#!/bin/sh
[ "$1" != --version ] || exit 0
cd "$(dirname "$0")"
printf '%s\n' "$*" >>starts
exec sh -c "$(sed -n "$(wc -l <starts)p" script)"
"""
DONE = "echo '{}' >run/summary.json"
STEP = "echo '{{\"step\": {}}}' >>run/metrics.jsonl"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    monkeypatch.setattr(command, "LOOK_S", 0.02)
    monkeypatch.setattr(Patience, "failed", quickly(Patience.failed))
    (tmp_path / "config.yaml").write_text("run: {dir: run}\n")
    (tmp_path / "mpirun").write_text(LAUNCHER)
    (tmp_path / "mpirun").chmod(0o755)
    return tmp_path


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """Tests that were started by nohup ignore it, and so would the supervisor."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def quickly(failed: Any) -> Any:
    return lambda self, step: None if failed(self, step) is None else 0.0


def supervise(folder: Path, *starts: str, words: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """The exit code, and the arguments of each start."""
    (folder / "script").write_text("\n".join(starts) + "\n")
    code = main(["config.yaml", *words, "--", str(folder / "mpirun")])
    return code, (folder / "starts").read_text().splitlines()


def test_it_starts_again_with_resume_until_the_run_ends(folder, capfd) -> None:
    code, starts = supervise(folder, f"{STEP.format(7)}; kill -9 $$", "exit 75", DONE, words=("-n", "4"))
    assert code == 0
    train = f"-n 4 {sys.executable} -m mpipipe.train config.yaml run.dir={folder / 'run'}"
    assert starts == [train, f"{train} --resume", f"{train} --resume"]
    said = capfd.readouterr().out.splitlines()
    assert len(said) == 5
    assert said[1].startswith("mpipipe run: the launcher was ended by SIGKILL, after 7 steps;")
    assert "goes on from step 0 in 0 s, 7 steps lost (restart 1 of 5 without progress)" in said[1]
    assert "restart 2 of 5" in said[3]


def test_without_progress_there_is_an_end(folder, capfd) -> None:
    code, starts = supervise(folder, *["exit 7"] * 9, words=("--restarts", "2"))
    assert (code, len(starts)) == (7, 3)
    assert "2 restarts came no step further, so this is the end" in capfd.readouterr().out
    (folder / "starts").unlink()
    on = [f"{STEP.format(step)}; exit 7" for step in (1, 1, 2, 2, 3, 3, 3)]
    code, starts = supervise(folder, *on, DONE, words=("--restarts", "2", "--resume"))
    assert (code, len(starts)) == (7, 7)


def test_an_error_that_can_be_mended_is_not_tried_again(folder, capfd) -> None:
    code, starts = supervise(folder, "echo 'mpipipe: error: no such data' >&2; exit 1", "exit 0")
    assert (code, len(starts)) == (1, 1)
    assert capfd.readouterr().err == "mpipipe: error: no such data\n"
    (folder / "starts").unlink()
    nodes = "for node in $(seq 99); do echo srun: error: n$node: task: Exited with exit code 1 >&2; done"
    code, starts = supervise(folder, f"echo 'mpipipe: error: no such data' >&2; {nodes}; exit 1", "exit 0")
    assert (code, len(starts)) == (1, 1), "though a launcher has said something of each node since"
    again = "echo 'mpipipe: failed: it does not fit' >&2; exit 1"
    assert supervise(folder, again, DONE)[0] == 0, "another start has all ranks"
    assert main(["config.yaml", "train.stepz=3"]) == 1
    assert "train.stepz" in capfd.readouterr().err
    assert main(["config.yaml", "--resume", "--", "./none"]) == 1
    assert "./none: cannot be started (No such file or directory); name another" in capfd.readouterr().err


def test_spares_are_a_key_and_fewer_where_hosts_are_lost(folder, monkeypatch) -> None:
    monkeypatch.setattr(command.known_hosts, "answering", lambda hosts, *_: hosts[:1])
    words = ("--hosts", "a:1,b:1", "--spares", "1", "run.recover=mpi")
    code, starts = supervise(folder, "exit 75", DONE, words=words)
    assert code == 0
    assert ["run.spares=1" in starts[0], "run.spares=0" in starts[0]] == [True, False]
    assert starts[1].index("run.spares=1") < starts[1].index("run.spares=0"), "the later one counts"
    monkeypatch.setattr(command.known_hosts, "answering", lambda hosts, *_: hosts[:3])
    words = ("--hosts", "a:1,b:1,c:1,d:1", "--spares", "2", "run.recover=mpi")
    code, starts = supervise(folder, "exit 75", DONE, words=words)
    assert "run.spares=1" in starts[1], "of 4 ranks 2 have worked, of 3 they do again"
    assert main(["config.yaml", "--spares", "1"]) == 1  # without run.recover=mpi


def test_a_run_whose_summary_is_there_is_done(folder) -> None:
    code, starts = supervise(folder, "echo '{}' >run/summary.json; kill -9 $$", "exit 0")
    assert (code, len(starts)) == (0, 1)


def test_what_ranks_on_other_nodes_have_written_is_looked_for_anew(folder, monkeypatch, capfd) -> None:
    monkeypatch.setattr(command, "look_anew", shows)
    monkeypatch.setattr("mpipipe.cluster.watchdog.look_anew", shows)
    code, starts = supervise(folder, "echo '{}' >run/summary.json.unseen", "exit 0")
    assert (code, len(starts)) == (0, 1)
    (folder / "starts").unlink()
    create(load("config.yaml", []))
    stands = "mkdir run/flight; printf 'rank 3 waits' >run/flight/diagnosis.txt.unseen; exit 75"
    assert supervise(folder, stands, f"{DONE}.unseen", words=("--resume",))[0] == 0
    assert "mpipipe run: rank 3 waits, after 0 steps" in capfd.readouterr().out


def test_a_file_system_that_fails_for_a_moment_ends_nothing(folder, monkeypatch) -> None:
    def fails(path: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    (folder / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    monkeypatch.setattr(command, "create", lambda config: folder / "run")
    for look in ("exists", "is_dir"):
        monkeypatch.setattr(Path, look, fails)
    code, starts = supervise(folder, "exit 75", f"sleep 0.1; {DONE}")
    assert (code, len(starts)) == (0, 2)


def test_a_link_that_cannot_be_made_just_now_is_made_later(folder, monkeypatch) -> None:
    (folder / "config.yaml").write_text("run: {name: mine}\n")
    links, make = [], command.make_latest

    def fails_once(config: Any, run_dir: Path) -> None:
        links.append(run_dir)
        if len(links) == 1:
            raise ConfigError("runs/latest: cannot be made (Stale file handle)", kind="failed")
        make(config, run_dir)

    monkeypatch.setattr(command, "make_latest", fails_once)
    line = "cd runs/*; echo '{\"step\": 1}' >metrics.jsonl; sleep 0.2; echo '{}' >summary.json"
    assert supervise(folder, line)[0] == 0
    assert len(links) == 2
    assert (folder / "runs" / "latest").resolve() == links[0]


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_taken_for_none(folder, monkeypatch) -> None:
    for step, number in ((7, None), (7, errno.EIO), (0, errno.ENOENT)):
        save_step(folder / "run", 7, 1)
        with monkeypatch.context() as patch:
            if number is not None:
                failing = OSError(number, os.strerror(number), "run.json")
                patch.setattr("mpipipe.state.resume.read_small", Mock(side_effect=failing))
            found = command._saved(folder / "run")
        assert found == (None if number == errno.EIO else step)
        shutil.rmtree(folder / "run")


def test_a_finished_run_is_not_started_again(folder, capfd) -> None:
    create(load("config.yaml", []))
    report = made_report(*made_plan(), steps=load("config.yaml", []).train.steps)
    (folder / "run" / "summary.json").write_text(to_json(replace(report, stopped_by=None)))
    assert main(["config.yaml", "--resume", "--", str(folder / "mpirun")]) == 0
    assert not (folder / "starts").exists()
    assert "run: the run is finished; for more, raise train.steps" in capfd.readouterr().out
    more = f"train.steps={report.steps + 1}"
    assert supervise(folder, DONE, words=("--resume", more))[0] == 0
    assert (folder / "starts").read_text().count(more) == 1, "which is what was to be done for more"


def test_neither_a_launcher_s_0_nor_a_summary_that_goes_is_the_end_of_a_run(folder) -> None:
    create(parse("run: {dir: run}"))
    (folder / "run" / "summary.json").write_text("{}")
    code, starts = supervise(
        folder, "rm run/summary.json; exit 75", "exit 0", DONE, "exit 0", words=("--resume",)
    )
    assert (code, len(starts)) == (0, 3)


@pytest.mark.slow
def test_a_launcher_that_does_not_return_is_ended(folder, monkeypatch, capfd) -> None:
    monkeypatch.setattr(command, "LINGER_S", 0.1)
    stands = "mkdir run/flight; echo x >run/flight/diagnosis.txt; exec sleep 60"
    code, _ = supervise(folder, stands, DONE)
    assert code == 0
    assert "the launcher did not return, after 0 steps; goes on from step 0" in capfd.readouterr().out
    monkeypatch.setattr(command, "SILENT_S", 0.3)
    (folder / "starts").unlink()
    silent = "mkdir run/flight; echo x >run/flight/rank-0.alive; exec sleep 60"
    assert supervise(folder, silent, DONE, words=("--resume",))[0] == 0
    (folder / "starts").unlink()
    waits = (
        "mkdir run/flight; echo x >run/flight/rank-0.alive; sleep 0.6; echo '{\"a\": 1}' >run/summary.json"
    )
    assert supervise(folder, waits, words=("--resume", "run.watchdog=30"))[0] == 0
    assert len((folder / "starts").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_job_that_was_suspended_is_not_taken_for_silent(folder, monkeypatch) -> None:
    monkeypatch.setattr(command, "SILENT_S", 0.3)
    monkeypatch.setattr(command, "PAUSE_S", 0.0)  # so that each look comes after a pause
    signs = "mkdir run/flight; echo x >run/flight/rank-0.alive; sleep 1"
    code, starts = supervise(folder, f"{signs}; {DONE}")
    assert (code, len(starts)) == (0, 1)


@pytest.mark.slow
def test_a_start_in_which_no_rank_begins_is_ended(folder, monkeypatch, capfd) -> None:
    monkeypatch.setattr(command, "START_S", 0.3)
    (folder / "run" / "flight").mkdir(parents=True)
    code, starts = supervise(folder, "sleep 60", DONE)
    assert (code, len(starts)) == (0, 2)
    assert "no rank has begun within 0 s" in capfd.readouterr().out
    (folder / "starts").unlink()
    shutil.rmtree(folder / "run")
    begins = "mkdir run/flight; touch run/flight/rank-0.alive; sleep 1; rm -r run/flight"
    code, starts = supervise(folder, f"{begins}; {DONE}")
    assert (code, len(starts)) == (0, 1)


@pytest.mark.parametrize(("code", "number"), [(0, signal.SIGTERM), (9, signal.SIGTERM), (0, signal.SIGHUP)])
def test_a_signal_is_handed_on_and_nothing_is_started_again(
    folder, default_hangup, code: int, number: int
) -> None:
    waits = f"trap 'exit {code}' USR1; touch ready; while :; do sleep 0.02; done"

    def ask() -> None:
        while not (folder / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    asks = threading.Thread(target=ask)
    asks.start()
    ended, starts = supervise(folder, waits, "exit 0")
    asks.join()
    assert (ended, len(starts)) == (code, 1)


def test_a_folder_that_ranks_still_write_to_is_left_to_them(folder, capfd) -> None:
    words = ["mpipipe.train", f"run.dir={folder / 'run'}"]
    with subprocess.Popen(["sh", "-c", "echo; read x", *words], stdin=-1, stdout=-1) as orphan:
        assert orphan.stdout is not None
        orphan.stdout.readline()
        assert main(["config.yaml", "--", str(folder / "mpirun")]) == 1
        assert f"still going on, as the processes {orphan.pid}; wait" in capfd.readouterr().err
        orphan.communicate(b"")
    assert not (folder / "starts").exists()


def test_who_is_asked_to_stop_before_the_start_does_not_start(folder, monkeypatch, capfd) -> None:
    def asked(*rest: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(Supervisor, "_check_alone", asked)
    assert main(["config.yaml", "--", str(folder / "mpirun")]) == 1
    assert "SIGUSR1 asked to stop before the training began" in capfd.readouterr().err
    assert not (folder / "starts").exists()


def test_hosts_that_do_not_answer_are_left_out(folder, monkeypatch, capfd) -> None:
    monkeypatch.setattr(
        command.known_hosts, "answering", lambda hosts, *rest: [h for h in hosts if h.name != "b"]
    )
    code, starts = supervise(folder, "exit 9", DONE, words=("-n", "4", "--hosts", "a,b", "--plan", "p.json"))
    assert code == 0
    assert starts[0].startswith("-n 4 -hosts a:2,b:2 ")  # the family of an unknown launcher
    assert starts[0].endswith("--plan p.json")
    assert starts[1].startswith("-n 2 -hosts a:2 ")
    assert starts[1].endswith("--resume"), "a plan is for its number of ranks"
    assert "b: no answer; goes on with 2 ranks on the other hosts" in capfd.readouterr().out


@pytest.mark.slow
def test_a_folder_of_its_own_is_the_latest_once_training_begins(folder) -> None:
    (folder / "config.yaml").write_text("run: {name: mine}\n")
    (folder / "script").write_text(
        "cd runs/*-mine; touch metrics.jsonl; sleep 0.5; echo '{}' >summary.json\n"
    )
    assert main(["config.yaml", "--", str(folder / "mpirun")]) == 0
    made = (folder / "runs" / "latest").resolve()
    assert made.name.endswith("-mine")
    assert f"run.dir={made}" in (folder / "starts").read_text()


def test_nothing_is_left_of_one_that_began_nothing_but_what_a_message_names(folder, capfd) -> None:
    (folder / "config.yaml").write_text("run: {name: mine}\n")
    line = "echo 'mpipipe: error: no such data' >&2; exit 1"
    assert supervise(folder, line, words=("--restarts", "1"))[0] == 1
    for words in (("--hosts", "a:x"), ("--", "./none")):
        assert main(["config.yaml", *words]) == 1
    assert list((folder / "runs").iterdir()) == []
    (folder / "starts").unlink()
    noise = "for node in $(seq 99); do echo srun: error: n$node: task: Exited with exit code 1 >&2; done"
    named = f'echo mpipipe: error: "$PWD"/runs/*/config.yaml holds nothing >&2; {noise}; exit 1'
    assert supervise(folder, named)[0] == 1
    (kept,) = (folder / "runs").iterdir()
    assert f"{kept}/config.yaml holds nothing" in capfd.readouterr().err
    (folder / "starts").unlink()
    assert supervise(folder, line, words=(f"run.dir={folder / 'given'}",))[0] == 1
    assert (folder / "given" / "config.yaml").exists(), "the next start takes it again"


def test_new_numerics_are_asked_for_until_a_checkpoint_has_them(folder, monkeypatch) -> None:
    options = _parser().parse_args(["config.yaml", "--resume", "--new-numerics"])
    create(parse("run: {dir: run}"))
    supervisor = Supervisor(options, Starter(("mpirun",), "Open MPI", False), {}, Asking())
    assert supervisor._program(True)[-2:] == ["--resume", "--new-numerics"]
    monkeypatch.setattr(command, "_saved", lambda run_dir: 5)
    assert supervisor._program(True)[-1] == "--resume"


def test_ranks_and_hosts_are_those_of_the_slurm_job(folder, monkeypatch) -> None:
    monkeypatch.setattr(command.known_hosts, "_said", lambda words: "n1\nn2\n")
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "6"}
    options = _parser().parse_args(["config.yaml"])
    supervisor = Supervisor(options, Starter(("srun",), "srun", True), environ, Asking())
    assert (supervisor.all_hosts, supervisor.all_ranks) == ([Host("n1", 3), Host("n2", 3)], 6)
    assert supervisor.hosts is None, "srun knows them"


def test_the_wait_between_starts_has_a_limit() -> None:
    assert doctest.testmod(command).failed == 0
    patience = Patience(20)
    assert [patience.failed(3) for _ in range(20)][-1] == LONGEST_WAIT_S
