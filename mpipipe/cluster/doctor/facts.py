"""What `doctor` knows of each rank, and what it finds. Frozen and plain, so that facts can be made up.

A string that is empty means: nothing of the kind is there, or the system does not tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpipipe.cluster.routes import Route
from mpipipe.values import Value

Cores = tuple[int, ...]
Level = Literal["ok", "note", "PROBLEM"]
LinkLevel = Literal["node", "switch"]
ThreadLevel = Literal["single", "funneled", "serialized", "multiple"]
THREAD_LEVELS: tuple[ThreadLevel, ...] = ("single", "funneled", "serialized", "multiple")


@dataclass(frozen=True)
class Finding(Value):
    section: str
    level: Level
    text: str
    fix: str = ""  # a line to paste


@dataclass(frozen=True)
class Diagnosis(Value):
    findings: tuple[Finding, ...]
    ranks: tuple[RankFacts, ...]
    seconds: float  # since the command began on rank 0

    @property
    def problems(self) -> int:
        return sum(finding.level == "PROBLEM" for finding in self.findings)


@dataclass(frozen=True)
class Software(Value):
    """What must be the same on all ranks."""

    python: str
    numpy: str
    torch: str
    mpi4py: str
    mpipipe: str
    code: str  # sha256 of the sources of mpipipe
    instruction_set: str  # that torch's kernels were dispatched for
    kernels: str  # version of the compiled kernels; empty: not built, or for another version
    kernel_set: str = ""  # the instruction set of those that are loaded: "v4", or "v4, cuda"
    accelerators: str = ""  # of the node, that torch sees: "4 x NVIDIA H100 (cuda)"; empty: none


@dataclass(frozen=True)
class Mpi(Value):
    """The library that runs, as "Open MPI 5.0.11"."""

    library: str
    compiled_for: str  # the library whose headers mpi4py was compiled with
    thread_level: ThreadLevel
    wanted_level: str
    tag_ub: int
    fault_tolerance: bool  # ULFM is in the library


@dataclass(frozen=True)
class Launch(Value):
    launcher: str  # that started this process, by the environment: a `name` of `launch.LAUNCHERS`
    command: str  # the whole command line of this process
    by_root: bool  # whom Open MPI's mpirun refuses unless told otherwise
    mpirun: str  # the first mpirun or mpiexec on the PATH; asked by the launcher's rank 0 alone
    mpirun_of: str  # and the MPI that it says it is of
    own_mpirun: str  # the one of this environment, if it has one
    settings: tuple[str, ...]  # variables that choose transports or bind threads
    error: str  # why there is no world: what training would have said


@dataclass(frozen=True)
class Binding(Value):
    usable: Cores  # that its launcher left this rank
    quota: int  # cores' worth of CPU time that control groups leave, at most len(usable)
    job: Cores  # that this job has on the node
    siblings: tuple[Cores, ...]  # of each usable core: itself and its hyperthreads
    numa: tuple[Cores, ...]  # cores of each NUMA domain of the node
    bound: Cores = ()  # those of `usable` to which mpipipe has bound it since; empty: none

    @property
    def own(self) -> Cores:
        """On which it computes."""
        return self.bound or self.usable


@dataclass(frozen=True)
class Machine(Value):
    host: str
    processor: str
    units: tuple[str, ...]  # of the processor, those for bf16
    load: float  # runnable processes, mean of a minute, before doctor began
    available_bytes: int  # memory that the node can give to this job
    swap_used_bytes: int
    shm_bytes: int  # /dev/shm; 0: there is none
    shm_free_bytes: int
    locked_bytes: int | None  # the limit; None: no limit
    open_files: int | None  # the limit; None: no limit
    huge_pages: str  # always, madvise or never
    governor: str  # of the first core, and its driver: "powersave acpi-cpufreq"
    fabric: tuple[str, ...]  # fast network adapters that are up: "mlx5_0 InfiniBand", "cxi0 Slingshot"
    single_copy: str  # why one process may not read another's memory (CMA); empty: it may


@dataclass(frozen=True)
class Start(Value):
    seconds: float  # from the start of the process to the end of its imports, MPI's start not counted
    python: str  # path of the interpreter
    prefix: str  # folder of the environment
    file_system: str  # that it is on


@dataclass(frozen=True)
class LinkTimes(Value):
    """Between this rank and a peer, measured while all other pairs of this level were busy."""

    level: LinkLevel
    peer: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]  # one way, median
    hidden: float  # share of a large message's time that passed while neither rank asked for it
    devices: tuple[str, ...]  # network adapters that this process has opened

    def bytes_per_s(self) -> float:
        """The best among the large messages."""
        pairs = zip(self.nbytes, self.seconds, strict=True)
        return max((n / max(s, 1e-9) for n, s in pairs if n >= 1 << 20), default=0.0)


@dataclass(frozen=True)
class Compute(Value):
    threads: int
    routes: tuple[Route, ...]
    copy_bytes_per_s: float  # read and written, while all ranks of the node copy
    copy_alone_bytes_per_s: float | None  # while the others wait; of the first rank of a node


@dataclass(frozen=True)
class Files(Value):
    folder: str  # where runs go
    file_system: str
    free_bytes: int
    temporary: str  # where rank 0 has its temporary files; empty: nowhere
    failed: tuple[tuple[str, str], ...]  # where, and what does not work there, with the reason
    seen: bool  # from this node, what rank 0 wrote in `folder`
    temporary_seen: bool  # and in `temporary`


@dataclass(frozen=True)
class RankFacts(Value):
    rank: int
    node: int
    software: Software
    mpi: Mpi | None  # None: it could not be loaded
    launch: Launch
    binding: Binding
    machine: Machine
    start: Start
    links: tuple[LinkTimes, ...] = ()
    overlap: str = ""  # who moves messages on while ranks compute
    compute: Compute | None = None
    files: Files | None = None
    failed: tuple[str, ...] = ()  # measurements that ended with an error: "transports: ..."


Ranks = Sequence[RankFacts]  # in rank order, never empty


def by_node(ranks: Ranks) -> dict[int, list[RankFacts]]:
    nodes: dict[int, list[RankFacts]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    return nodes
