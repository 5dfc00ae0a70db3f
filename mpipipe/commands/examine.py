"""One rank's part of `python -m mpipipe doctor`.

facts of each rank -> gathered -> measured together -> judged and told by rank 0
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import mpipipe
from mpipipe.cluster.agree import code_version
from mpipipe.cluster.binding import bind_ranks
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.doctor import copying, files, transport
from mpipipe.cluster.doctor.facts import Compute, Diagnosis, Finding, Launch, Mpi, RankFacts, Ranks, Software
from mpipipe.cluster.doctor.judge import judge
from mpipipe.cluster.doctor.launcher import launch
from mpipipe.cluster.doctor.machine import binding, machine
from mpipipe.cluster.doctor.start import age_s, start
from mpipipe.cluster.doctor.text import screen
from mpipipe.cluster.doctor.watch import FIXES, LATER_S, Watch
from mpipipe.cluster.launch import launcher_rank
from mpipipe.cluster.local import run_local
from mpipipe.cluster.mpi import connect, library
from mpipipe.cluster.overlap import choose, why
from mpipipe.errors import LaunchError
from mpipipe.values import to_json

T = TypeVar("T")
START_LIMIT_S = 180.0  # of the imports and of MPI's: where a thousand ranks import, it takes a minute
LIMIT_S = 60.0  # of the rest


class Doctor:
    """One rank's part; made when the command begins, since time counts from then."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begun = options, time.perf_counter()
        self.speaks = launcher_rank(os.environ) == 0
        self.known: Ranks = ()  # as far as it is gathered
        self.limit_s = START_LIMIT_S if self.speaks else START_LIMIT_S + LIMIT_S + LATER_S
        self.watch = Watch(self.limit_s, self._stuck)

    def work(self) -> int:
        """The exit code. Raises ImportError where torch, or what it needs, is missing or broken."""
        try:
            software = _imported()
            started = start(age_s())
            self.watch.doing = "the start of MPI"
            comm, mpi, launched = _world()
            if comm is None and not self.speaks:
                return 0  # one of many that are alone: the first says it
            facts = RankFacts(0, 0, software, mpi, launched, binding(), machine(os.environ), started)
            if comm is None:
                return run_local(1, lambda alone: self.examine(alone, facts))[0]
            code = self.examine(comm, facts)
            comm.close()
            return code
        finally:
            self.watch.close()

    def examine(self, comm: Communicator, facts: RankFacts) -> int:
        """The exit code; facts: those of this process alone. Collective."""
        rank = comm.rank
        self.speaks = rank == 0
        facts = replace(facts, rank=rank, node=comm.node_of_rank[rank])
        if self.speaks:
            self.limit_s = LIMIT_S
            self.watch.restart(LIMIT_S)
        self.watch.doing = "gathering"
        self.known = comm.allgather_object(facts)
        bound = bind_ranks(comm, self.options.threads, wanted=self.options.bind == "auto")
        facts = replace(facts, binding=replace(facts.binding, bound=bound.by_rank[rank]))
        self.known = comm.allgather_object(self._measured(comm, facts))
        if rank != 0:
            return 0
        diagnosis = self._diagnosis(judge(self.known, self.options.threads))
        self._tell(diagnosis)
        return 1 if diagnosis.problems else 0

    def _measured(self, comm: Communicator, facts: RankFacts) -> RankFacts:
        links = self._try(facts, "messages", lambda: transport.measure(comm))
        overlap = self._try(facts, "messages", lambda: choose(comm, {})[1])
        compute = self._try(facts, "compute", lambda: _compute(comm, self.options.threads))
        place = self._try(facts, "files", lambda: files.examine(comm, self.options.dir))
        return replace(
            facts,
            links=() if isinstance(links, str) else links,
            overlap="" if isinstance(overlap, str) else why(overlap, comm.transport),
            compute=None if isinstance(compute, str) else compute,
            files=None if isinstance(place, str) else place,
            failed=tuple(x for x in (links, overlap, compute, place) if isinstance(x, str)),
        )

    def _try(self, facts: RankFacts, what: str, measure: Callable[[], T]) -> T | str:
        """Or why it failed; said at once too, since other ranks may wait for this one in vain."""
        self.watch.doing = what
        try:
            return measure()
        except Exception as error:
            text = f"{what}: {type(error).__name__}: {error}"
            who = f"rank {facts.rank} ({facts.machine.host})"
            print(f"mpipipe doctor: {who}: {text}", file=sys.stderr, flush=True)
            return text

    def _stuck(self, doing: str) -> None:
        if not self.speaks:
            return
        text = f"no end after {self.limit_s:.0f} s: a rank is stuck in {doing}"
        findings = [Finding("doctor itself", "PROBLEM", text, FIXES.get(doing, ""))]
        try:
            if self.known:
                findings = [*judge(self.known, self.options.threads), *findings]
        finally:  # the one finding is told even if what is known cannot be judged
            self._tell(self._diagnosis(findings))

    def _diagnosis(self, findings: Sequence[Finding]) -> Diagnosis:
        return Diagnosis(tuple(findings), tuple(self.known), time.perf_counter() - self.begun)

    def _tell(self, diagnosis: Diagnosis) -> None:
        print(to_json(diagnosis) if self.options.json else screen(diagnosis), flush=True)


def _imported() -> Software:
    """Imports what a training imports; a message of missing kernels is left to the judge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        import numpy

        try:
            import torch
        except OSError as error:  # a library of torch that cannot be loaded
            raise ImportError(str(error)) from error
        from mpipipe.native import instruction_set as kernel_set
        from mpipipe.ops.device import seen
        from mpipipe.ops.native import KERNELS_VERSION, cuda_kernels, kernels
        from mpipipe.runtime.setting import instruction_set
    built = KERNELS_VERSION if kernels is not None else ""
    try:
        mpi4py = version("mpi4py")
    except PackageNotFoundError:
        mpi4py = "missing"
    return Software(
        python=platform.python_version(),
        numpy=numpy.__version__,
        torch=str(torch.__version__),
        mpi4py=mpi4py,
        mpipipe=mpipipe.__version__,
        code=code_version(built),
        instruction_set=instruction_set(),
        kernels=built,
        kernel_set=f"{kernel_set()}{'' if cuda_kernels is None else ', cuda'}" if built else "",
        accelerators=seen(),
    )


def _world() -> tuple[Communicator | None, Mpi | None, Launch]:
    launched = launch(os.environ)
    comm: Communicator | None = None
    mpi: Mpi | None = None
    try:
        mpi = library(os.environ)
        comm = connect()
    except LaunchError as error:
        launched = replace(launched, error=str(error))
    return comm, mpi, launched


def _compute(comm: Communicator, threads: int) -> Compute:
    from mpipipe.runtime.routes import measure_routes
    from mpipipe.runtime.setting import set_threads

    set_threads(threads)
    comm.barrier()
    routes = measure_routes()
    together, alone = copying.measure(comm)
    return Compute(threads, routes, together, alone)
