"""`python -m mpipipe doctor`: what is told, by whom, and with which exit code; ranks are threads here."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from doctor_cases import COMPUTE, FILES, LAUNCH, MPI, SOFTWARE, healthy, link

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.doctor import files, transport
from mpipipe.cluster.doctor.facts import Diagnosis, Finding, RankFacts
from mpipipe.cluster.doctor.judge import JUDGES, judge
from mpipipe.cluster.doctor.text import screen
from mpipipe.cluster.local import run_local
from mpipipe.commands import doctor, examine
from mpipipe.runtime import routes
from mpipipe.runtime.setting import FP32_ERROR
from mpipipe.values import from_json

ALONE = "mpiexec started 2 processes, but each is alone\n  fix: mpirun -n 2 python x"


@pytest.fixture(autouse=True)
def healthy_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes time, or differs between machines, is made up."""
    one = healthy((0,))[0]
    monkeypatch.setattr(examine, "_imported", lambda: SOFTWARE)
    monkeypatch.setattr(examine, "_compute", lambda comm, threads: replace(COMPUTE, threads=threads))
    monkeypatch.setattr(examine, "binding", lambda: one.binding)
    monkeypatch.setattr(examine, "machine", lambda environ: one.machine)
    monkeypatch.setattr(
        transport, "measure", lambda comm: (link("node", 1),) if comm.rank == 0 < comm.size - 1 else ()
    )
    monkeypatch.setattr(files, "examine", lambda comm, folder: replace(FILES, folder=str(folder)))


def examined(ranks: list[RankFacts], **options: Any) -> list[int]:
    """Exit codes of ranks that bring these facts to one world."""
    given = Namespace(**{"threads": 1, "bind": "auto", "dir": Path("runs"), "json": False, **options})

    def work(comm: Communicator) -> int:
        one = examine.Doctor(given)
        try:
            return one.examine(comm, ranks[comm.rank])
        finally:
            one.watch.close()

    return run_local(len(ranks), work, node_of_rank=tuple(r.node for r in ranks))


def as_gathered(ranks: list[RankFacts]) -> list[RankFacts]:
    """Before anybody knows a rank's place, or has measured."""
    return [replace(r, rank=0, links=(), compute=None, files=None) for r in ranks]


Told = Callable[[], str]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return lambda: capsys.readouterr().out


def test_one_rank_tells_of_all(told: Told) -> None:
    assert examined(as_gathered(healthy((0, 0, 1, 1)))) == [0] * 4
    text = told()
    assert text.count("4 ranks on 2 nodes, 2 on each: n0, n1") == 1
    assert text.splitlines()[-1].startswith("0 problems, 0 notes, after ")
    assert [line for line in text.splitlines() if line in JUDGES] == list(JUDGES)


def test_a_problem_is_exit_code_1_of_the_rank_that_tells_it(told: Told) -> None:
    ranks = as_gathered(healthy())
    odd = [ranks[0], replace(ranks[1], software=replace(SOFTWARE, torch="2.14.0"))]
    assert examined(odd) == [1, 0]  # a launcher ends the job at the first; the others have nothing to add
    assert "PROBLEM  PyTorch differs: 2.13.0+cpu on rank 0 (n0), 2.14.0 on rank 1 (n0)" in told()


def test_json_is_the_same_as_one_value(told: Told) -> None:
    assert examined(as_gathered(healthy()), json=True, threads=1) == [0, 0]
    text = told()
    value = from_json(Diagnosis, text)
    assert value.findings == judge(value.ranks, 1)
    assert [r.rank for r in value.ranks] == [0, 1]
    assert value.ranks[0].links[0].peer == 1
    assert json.loads(text)["findings"][0]["section"] == "MPI"


def test_threads_and_folder_are_as_given(told: Told) -> None:
    assert examined(as_gathered(healthy(job=8)), threads=3, dir=Path("/elsewhere"), json=True) == [0, 0]
    value = from_json(Diagnosis, told())
    assert all(r.compute and r.files for r in value.ranks)
    assert {(r.compute.threads, r.files.folder) for r in value.ranks if r.compute and r.files} == {
        (3, "/elsewhere")
    }


def test_a_measurement_that_fails_is_reported_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(comm: Communicator) -> tuple[()]:
        raise MemoryError("no room")

    monkeypatch.setattr(transport, "measure", fails)
    assert examined(as_gathered(healthy((0, 1)))) == [0, 0]
    out, err = capsys.readouterr()
    assert "could not measure: rank 1 (n1): messages: MemoryError: no room" in out
    assert "matrix products" in out
    assert err.count("mpipipe doctor: rank 1 (n1): messages: MemoryError: no room") == 1


def test_processes_that_are_alone_are_told_by_the_first(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setattr(examine, "_world", lambda: (None, MPI, replace(LAUNCH, error=ALONE)))
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert doctor.main([]) == 0
    assert told() == ""
    monkeypatch.setenv("PMI_RANK", "0")
    assert doctor.main([]) == 1
    text = told()
    assert "each is alone" in text
    assert "           fix: mpirun -n 2 python x\n" in text
    assert "sends no messages" not in text


def test_without_any_mpi_the_rest_is_told(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    error = "cannot load MPI: no libmpi\n  fix: run `make setup`"
    monkeypatch.setattr(examine, "_world", lambda: (None, None, replace(LAUNCH, launcher="", error=error)))
    assert doctor.main([]) == 1
    text = told()
    assert "fix: run `make setup`" in text
    assert "/runs" in text or "runs: " in text


@pytest.mark.parametrize("argv", [["--threads", "0"], ["--threads", "many"], ["x"]])
def test_wrong_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(argv)
    assert ended.value.code == 2
    assert "usage: python -m mpipipe doctor" in capsys.readouterr().err


def test_what_hangs_is_told_with_what_is_known(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    one = examine.Doctor(Namespace(threads=1, dir=Path("runs"), json=False))
    one.watch.close()
    one.known = as_gathered(healthy())
    one._stuck("messages")
    text = told()
    assert "2 ranks on 1 node: n0" in text
    assert "PROBLEM  no end after 180 s: a rank is stuck in messages" in text
    assert "fix: export OMPI_MCA_btl_tcp_if_include=" in text
    one.speaks = False
    one._stuck("messages")
    assert told() == ""


def test_what_hangs_is_told_even_if_the_rest_cannot_be_judged(
    monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    def fails(ranks: Sequence[RankFacts], threads: int) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(examine, "judge", fails)
    one = examine.Doctor(Namespace(threads=1, dir=Path("runs"), json=False))
    one.watch.close()
    one.known = as_gathered(healthy())
    with pytest.raises(ZeroDivisionError):  # the watch prints it
        one._stuck("messages")
    assert "PROBLEM  no end after 180 s: a rank is stuck in messages" in told()


def test_threads_are_those_of_the_option_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """Training counts `pipeline.threads` alone, and so 2 ranks on 2 cores are well."""
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    options = doctor._parser().parse_args([])
    assert examined(as_gathered(healthy((0, 0), job=2)), **vars(options)) == [0, 0]
    assert "2 ranks x 1 thread on 2 cores" in told()


def no_torch() -> NoReturn:
    raise ModuleNotFoundError("No module named 'torch'")


@pytest.mark.parametrize("missing", ["torch", "numpy"])
def test_what_cannot_be_imported_is_told_by_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    if missing == "torch":
        monkeypatch.setattr(examine, "_imported", no_torch)
    else:  # needed by what doctor itself imports
        monkeypatch.setitem(sys.modules, "mpipipe.commands.examine", None)
    monkeypatch.setattr(doctor, "LATER_S", 0.0)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "start"
    assert lines[1].startswith("  PROBLEM  ")
    assert lines[2:] == ["           fix: make setup", "1 problem, 0 notes"]
    assert doctor.main(["--json"]) == 1
    (finding,) = from_json(Diagnosis, capsys.readouterr().out).findings
    assert (finding.section, finding.level, finding.fix) == ("start", "PROBLEM", "make setup")
    monkeypatch.setenv("PMI_RANK", "1")
    assert doctor.main([]) == 1
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)


# -- the text ----------------------------------------------------------------------------------


def test_texts_are_wrapped_and_lines_to_paste_are_not() -> None:
    findings = (
        Finding("MPI", "ok", "word " * 50),
        Finding("MPI", "PROBLEM", "short", "echo " + "x" * 200),
        Finding("files", "note", "two", "first\n  or second"),
    )
    lines = screen(Diagnosis(findings, (), 1.25)).splitlines()
    assert lines[0] == "MPI"
    assert all(len(line) <= 110 for line in lines if "echo" not in line)
    assert f"           fix: echo {'x' * 200}" in lines
    assert lines[-4:] == ["  note     two", "           fix: first", "             or second", lines[-1]]
    assert lines[-1] == "1 problem, 1 note, after 1.2 s"


# -- matrix products ---------------------------------------------------------------------------


@pytest.fixture
def short_routes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(routes, "BUDGET_S", 0.0)
    monkeypatch.setattr(routes, "SHAPES", ((8, 16, 32),))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_routes_are_measured_and_the_process_is_left_on_mkl(short_routes: None) -> None:
    found = {route.name: route for route in routes.measure_routes()}
    assert list(found) == ["mkl", "onednn", "bf16"]
    assert all(route.flops_per_s > 0 for route in found.values())
    assert found["mkl"].fp32
    assert found["mkl"].error < FP32_ERROR < found["bf16"].error
    assert not found["bf16"].fp32
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # type: ignore[attr-defined]
    assert not torch.is_autocast_enabled("cpu")
