"""When a run stops early: its own limit, that of the batch job, and the time that a save needs."""

from __future__ import annotations

import doctest
import math
import signal
from traceback import format_exception
from types import SimpleNamespace
from typing import Any

import pytest

from mpipipe.cluster import ending
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.ending import SPEAK_FIRST_S, TO_GO_ON, TimeLimit, stop_signals, traceback_text
from mpipipe.cluster.local import run_local
from mpipipe.commands.supervise import MENDABLE
from mpipipe.errors import DataError, RecoveryError, UnreadableError
from mpipipe.state.files import parse_json


class Clock:
    """Seconds since the epoch, as told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_the_examples_in_its_documentation() -> None:
    found = doctest.testmod(ending)
    assert found.attempted >= 2
    assert found.failed == 0


def user_s(comm: Communicator) -> None:
    try:
        int("seven")
    except ValueError as error:
        raise KeyError("row 7") from error


def test_of_an_error_of_the_user_s_only_the_user_s_frames_are_shown() -> None:
    with pytest.raises(KeyError) as caught:
        run_local(1, user_s)
    said = traceback_text(caught.value)
    assert "mpipipe/cluster/local.py" not in said
    assert [line.rpartition(" in ")[2] for line in said.splitlines() if line.startswith("  File")] == [
        "user_s", "test_of_an_error_of_the_user_s_only_the_user_s_frames_are_shown", "user_s",
    ]  # fmt: skip
    assert said.startswith("(")
    assert "frames of mpipipe and Python left out)\n" in said
    assert said.endswith("KeyError: 'row 7'\nraised on rank 0 of 1")
    assert "ValueError: invalid literal" in said


def test_of_an_error_of_ours_every_frame_is_shown() -> None:
    with pytest.raises(AttributeError) as caught:
        parse_json(None)  # type: ignore[arg-type]
    assert traceback_text(caught.value) == "".join(format_exception(caught.value)).rstrip()


def test_without_any_limit_there_is_no_end() -> None:
    clock = Clock()
    limit = TimeLimit(None, {}, clock)
    clock.now = 1e12
    assert not limit.reached(step_s=1e6, save_s=1e6)
    assert limit.left_s() == math.inf


@pytest.mark.parametrize(("minutes", "least_s"), [(0.5, 3.0), (10.0, 60.0), (20.0, 60.0)])
def test_the_own_limit_counts_from_the_beginning_and_leaves_a_minute(minutes: float, least_s: float) -> None:
    """Or a tenth, where the whole is short."""
    for began, passed_s in ((None, 0.0), (1000.0, 0.0), (980.0, 20.0)):
        clock = Clock()
        limit = TimeLimit(minutes, {}, clock, began)
        clock.now += 60.0 * minutes - least_s - passed_s - 0.1
        assert not limit.reached(step_s=0.1, save_s=0.0)
        clock.now += 0.2
        assert limit.reached(step_s=0.1, save_s=0.0)


@pytest.mark.parametrize(
    ("step_s", "save_s", "reserve_s"),
    [(0.1, 0.1, 60.0), (10.0, 5.0, 60.0), (30.0, 0.0, 90.0), (10.0, 40.0, 150.0)],
)
def test_before_the_end_there_is_time_for_three_steps_and_saves(
    step_s: float, save_s: float, reserve_s: float
) -> None:
    """But never less than a minute."""
    clock = Clock()
    limits = TimeLimit(None, {"SLURM_JOB_END_TIME": "5000"}, clock), TimeLimit(4000.0 / 60.0, {}, clock)
    clock.now = 5000.0 - reserve_s - 0.5
    assert not any(limit.reached(step_s, save_s) for limit in limits)
    clock.now = 5000.0 - reserve_s
    assert all(limit.reached(step_s, save_s) for limit in limits)


def test_whichever_comes_first() -> None:
    clock = Clock()
    job = {"SLURM_JOB_END_TIME": "5000"}
    own, other = TimeLimit(1.0, job, clock), TimeLimit(1000.0, job, clock)
    clock.now = 1054.0
    assert (own.reached(1.0, 1.0), other.reached(1.0, 1.0)) == ("the time limit", None)
    assert (own.left_s(), other.left_s()) == (0.0, 3886.0)
    clock.now = 4940.0
    assert other.reached(1.0, 1.0) == "the time of the job"


@pytest.mark.parametrize("end", ["", "Unknown", "NONE", "-1"])
def test_a_job_without_a_known_end_has_no_limit(end: str) -> None:
    assert not TimeLimit(None, {"SLURM_JOB_END_TIME": end}, Clock(1e12)).reached(1.0, 1.0)


def test_signals_ask_for_a_stop_and_a_second_ctrl_c_interrupts() -> None:
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    with stop_signals() as asked:
        assert asked == []
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        assert asked == ["SIGTERM", "SIGUSR1"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert {s: signal.getsignal(s) for s in before} == before, "handed back"
    with stop_signals() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked == ["SIGINT"]


def test_a_reason_of_the_run_itself_is_no_signal(capfd: pytest.CaptureFixture[str]) -> None:
    """The first Ctrl-C while it saves at its time limit must not cut the save off."""
    with stop_signals(says=True) as asked:
        asked.append("the time limit")
        signal.raise_signal(signal.SIGINT)
        assert asked == ["the time limit", "SIGINT"]
        assert capfd.readouterr().err.startswith("mpipipe: asked to stop (SIGINT)")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("rank", "says"), [(0, ""), (1, "  on rank 1\n")])
def test_a_rank_that_speaks_for_itself_alone_says_which_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, says: str
) -> None:
    waits, aborts = list[float](), list[int]()
    monkeypatch.setattr(ending.time, "sleep", waits.append)
    comm: Any = SimpleNamespace(rank=rank, size=3, abort=aborts.append)
    assert ending.end(comm, DataError("no such file")) == 1
    assert capsys.readouterr().err == f"mpipipe: error: no such file\n{says}"
    assert aborts == [1]
    assert len(waits) == rank, "rank 0 speaks first"


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}, 2),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 1),
    ],
)
def test_before_there_is_mpi_rank_0_speaks_first_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environ: dict[str, str], rank: int
) -> None:
    """The launcher ends all as soon as one has ended, so also rank 0 before it has said why."""
    waits = list[float]()
    monkeypatch.setattr(ending.time, "sleep", waits.append)
    monkeypatch.setattr(ending.os, "environ", environ)
    assert ending.end(None, DataError("no such file")) == 1
    assert capsys.readouterr().err == ("" if rank else "mpipipe: error: no such file\n")
    assert [wait >= SPEAK_FIRST_S for wait in waits] == [True] * (rank > 0)


def test_what_another_start_may_mend_is_not_called_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (RecoveryError("too small"), UnreadableError("a stale file")):
        assert ending.end(None, error) == 1
        said = capsys.readouterr().err
        assert said == f"mpipipe: failed: {error}\n"
        assert MENDABLE not in said


@pytest.mark.parametrize("says", [True, False])
def test_the_first_signal_is_answered_at_once_where_somebody_speaks(
    says: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with stop_signals(says):
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
        said = capfd.readouterr().err
    assert said == ("mpipipe: asked to stop (SIGUSR1): after this step, with a checkpoint\n" if says else "")


def test_sigterm_is_promised_nothing_as_it_may_mean_that_a_rank_has_died(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with stop_signals(says=True):
        signal.raise_signal(signal.SIGTERM)
        said = capfd.readouterr().err
    assert said.startswith(
        "mpipipe: asked to stop (SIGTERM): after this step, with a checkpoint, if all ranks"
    )
    assert said.endswith("if not, --resume goes on from the newest checkpoint there is\n")


def test_the_last_line_of_an_error_is_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    comm: Any = SimpleNamespace(rank=0, size=1)
    way = f"{TO_GO_ON}4: mpirun -n 2 python -m mpipipe.train run/config.yaml run.dir=run --resume"
    for error in (DataError("no such sample"), ZeroDivisionError("made to fail")):
        error.add_note(way)
        ending.end(comm, error)
        assert capsys.readouterr().err.splitlines()[-1].strip() == way


def test_that_line_does_not_hide_which_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending.time, "sleep", lambda _: None)
    comm: Any = SimpleNamespace(rank=1, size=1)
    error = DataError("no such sample")
    error.add_note(f"{TO_GO_ON}4: ...")
    ending.end(comm, error)
    assert capsys.readouterr().err == f"mpipipe: error: no such sample\n  on rank 1\n  {TO_GO_ON}4: ...\n"
