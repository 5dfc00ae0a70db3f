"""Rules that hold for every test: markers, hypothesis, no network, and pytest as one of many MPI ranks.

mpi     runs under `mpirun -n 1..4` (make test-mpi): collected and run by every rank in one order;
        mpi(fast_up_to=2): on more ranks it is one of `full`, as more of them than cores take turns
jobs    starts ranks, or other processes that take seconds, by itself (make test-mpi); two at a time, so none
        may count on a core of its own
browser needs Chromium and its driver (make test-browser)
slurm   needs the test bed that MPIPIPE_TESTBED names; with it a skip counts as a failure
full    takes minutes, or says again what another test says, with other parameters (make test-full)
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(Path(__file__).parent))  # for `import tiny`: pytest's importlib mode adds no folder
TESTBED = os.environ.get("MPIPIPE_TESTBED")
MEETING_S = 120.0  # how long a rank waits for the others after a test

# Deadlines would measure the machine, not the code. Ranks must draw the same examples in one order.
settings.register_profile("alone", deadline=None, max_examples=50)
settings.register_profile("same", deadline=None, derandomize=True, database=None)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported: there is much to look through and no garbage
    with_mpi = config.getoption("--with-mpi")
    settings.load_profile("same" if with_mpi or os.environ.get("CI") else "alone")
    _forbid_network()
    _own_cache(config)
    if with_mpi:
        config.pluginmanager.register(Ranks(config), "mpipipe-ranks")


def _own_cache(config: pytest.Config) -> None:
    """What tests measure, disturbed as they are, stays out of the user's cache, and the other way round."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = folder.name
    config.add_cleanup(folder.cleanup)


def pytest_runtest_setup() -> None:
    """A test that draws has the same numbers in every run: it fails in all of them, or in none. Who imports
    torch in the middle of a test seeds it there."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not walk it again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()


# -- markers -----------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if TESTBED is None:
        for item in items:
            if item.get_closest_marker("slurm"):
                item.add_marker(pytest.mark.skip(reason="needs MPIPIPE_TESTBED"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Where the test bed was promised, a test that skips has not been run: a failure."""
    report: Any = yield
    if report.skipped and TESTBED is not None and item.get_closest_marker("slurm"):
        report.outcome = "failed"
        report.longrepr = f"skipped although MPIPIPE_TESTBED={TESTBED} is given: {report.longrepr}"
    return report


# -- network -----------------------------------------------------------------------------------


def _forbid_network() -> None:
    """Connections of Python sockets stay on this machine (MPI has its own)."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost")
        if not local:
            raise RuntimeError(
                f"a test connects to {address}: tests use no network; make the data in the test"
            )
        connect(self, address)

    socket.socket.connect = guarded  # type: ignore[method-assign, assignment]


# -- one launch, many ranks --------------------------------------------------------------------


class Ranks:
    """Makes many pytest processes behave as one: rank 0 speaks, a failure anywhere is everyone's, and a
    rank that is stuck because another one failed ends the job instead of hanging."""

    def __init__(self, config: pytest.Config) -> None:
        import mpi4py

        mpi4py.rc.thread_level = os.environ.get("MPIPIPE_THREAD_LEVEL", "multiple")
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD.Dup()
        self.highest = MPI.MAX
        self.failed: list[tuple[str, str]] = []  # of this rank: test, text
        if self.world.rank:
            config.pluginmanager.set_blocked("terminalreporter")

    @pytest.hookimpl(tryfirst=True)  # before -m chooses by markers
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            most = [m.kwargs["fast_up_to"] for m in item.iter_markers("mpi") if "fast_up_to" in m.kwargs]
            if most and self.world.size > min(most):
                item.add_marker(pytest.mark.full)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result: Any = yield
        self._meet(item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._speak(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._speak(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        self._meet("the last test")
        worst = self.world.allreduce(int(session.exitstatus), self.highest)
        by_rank = self.world.gather(self.failed)
        if by_rank is not None:
            self._count(session, by_rank)
        result = yield  # rank 0 prints its summary
        self._meet("the summary")  # a launcher ends all ranks at the first one that fails
        session.exitstatus = worst
        return result

    def _speak(self, report: Any) -> None:
        """At once, not in a summary: the other ranks may hang in this test."""
        if report.failed and self.world.rank:
            self.failed.append((report.nodeid, report.longreprtext))
            text = f"[rank {self.world.rank}] {report.nodeid} failed\n{report.longreprtext}"
            print(text, file=sys.stderr, flush=True)

    def _count(self, session: pytest.Session, by_rank: list[list[tuple[str, str]]]) -> None:
        """Failures of other ranks enter the summary of rank 0, whose own tests may all have passed."""
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        for rank, failures in enumerate(by_rank):
            for test, text in failures:
                name = f"{test} [rank {rank}]"
                report = pytest.TestReport(name, (test, None, name), {}, "failed", text, "call")
                reporter.stats.setdefault("failed", []).append(report)

    def _meet(self, where: str) -> None:
        arrived, deadline = self.world.Ibarrier(), time.monotonic() + MEETING_S
        while not arrived.Test():
            time.sleep(0.001)  # ranks may outnumber cores
            if time.monotonic() > deadline:
                text = (
                    f"[rank {self.world.rank}] waited {MEETING_S:.0f} s after {where}: another rank is stuck"
                )
                print(text, file=sys.stderr, flush=True)
                self.world.Abort(1)


# -- starting ranks from a test ----------------------------------------------------------------

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def code_version_once() -> Callable[..., str]:
    """The hash of all sources, which each rank of each start works out anew."""
    from mpipipe.cluster.agree import code_version

    return cache(code_version)


@pytest.fixture
def made_up_times(monkeypatch: pytest.MonkeyPatch, code_version_once: Callable[..., str]) -> Iterator[None]:
    """Every group and rank takes equally long, the sources are read once, and nobody tidies up the memory of
    many tests again and again."""
    import torch  # here: most tests start without it

    from mpipipe.graph.profile import Profiler
    from mpipipe.values import Link

    before = torch.get_num_threads()
    monkeypatch.setattr(Profiler, "_once", lambda *_: (1e-3, 2e-3))
    monkeypatch.setattr(Profiler, "_call_s", (0.0, 0.0))
    monkeypatch.setattr("mpipipe.runtime.costing._UPDATE_ELEMENTS", 1 << 10)
    monkeypatch.setattr("mpipipe.runtime.costing._reference_s", lambda _: 1e-3)
    monkeypatch.setattr("mpipipe.runtime.costing.measure_links", lambda _: {"node": Link(1e-6, 1e9)})
    for reader in ("cluster.agree", "runtime.known", "runtime.op_table"):
        monkeypatch.setattr(f"mpipipe.{reader}.code_version", code_version_once)
    for caller in ("cluster.memory", "pipeline", "survival"):
        monkeypatch.setattr(f"mpipipe.{caller}.give_back_freed_memory", lambda: None)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def captures() -> dict[Any, Any]:
    """What `captured_once` has captured."""
    return {}


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch, captures: dict[Any, Any]) -> None:
    """A model that is a class, or a built-in one of a config, is captured once for all ranks and tests, as in
    `tiny`. That ranks which capture for themselves agree is in tests/mpi and tests/launch."""
    from mpipipe.graph import variants
    from mpipipe.graph.source import TRACING, ModelSource

    capture, make = variants.capture, ModelSource.__init__

    def made(self: Any, model: Any, seed: int, *rest: Any) -> None:
        self.model = model
        make(self, model, seed, *rest)

    def once(
        source: Any, loss: Any, specs: Any, mode: str, precision: str, metrics: Any, written: Any
    ) -> Any:
        name = _name_of(source.model)
        if name is None:
            return capture(source, loss, specs, mode, precision, metrics, written)
        key = name, source.seed, loss, *specs.items(), mode, precision, *metrics.items(), *written.items()
        with TRACING:
            if key not in captures:
                captures[key] = capture(source, loss, specs, mode, precision, metrics, written)
            return captures[key]

    monkeypatch.setattr(ModelSource, "__init__", made)
    monkeypatch.setattr(variants, "capture", once)


def _name_of(model: Any) -> Any:
    """One for models that are alike; None where that cannot be told."""
    if isinstance(model, partial) and model.func.__module__.startswith("mpipipe."):
        return repr(model)
    return model if isinstance(model, type) else None


@pytest.fixture(scope="session")
def launch() -> Launch:
    """`launch(n, "-m", "mpipipe.train", ..., timeout_s=60, cwd=..., env={...})` runs this Python on n ranks
    and returns exit code, stdout and stderr. On timeout the whole job is ended and the test fails."""

    def run(
        n: int,
        *args: str,
        timeout_s: float = 180.0,
        cwd: Path = REPOSITORY,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = [str(REPOSITORY / ".ci" / "launch"), str(n), sys.executable, *map(str, args)]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        environ = {
            **os.environ,
            "VENV": sys.prefix,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        with subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that launcher and ranks can be ended together
        ) as job:
            try:
                out, err = job.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                out, err = _end(job)
                pytest.fail(f"{' '.join(command)}: no end after {timeout_s} s\n{out[-4000:]}\n{err[-4000:]}")
        return subprocess.CompletedProcess(command, job.returncode, out, err)

    return run


def _end(job: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a job and its ranks: .ci/launch takes a first SIGTERM as a wish, the second as an order."""
    for _ in range(2):
        os.killpg(job.pid, signal.SIGTERM)
        try:
            return job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            continue
    os.killpg(job.pid, signal.SIGKILL)
    return job.communicate()
