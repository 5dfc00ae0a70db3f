"""What the doctor finds, from made-up facts: each fault by itself, and nothing on machines that are well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from doctor_cases import (
    BY_SRUN,
    COMPUTE,
    GIB,
    ROUTES,
    change,
    cores,
    everywhere,
    healthy,
    link,
)

from mpipipe.cluster.doctor.facts import Finding, RankFacts
from mpipipe.cluster.doctor.judge import judge

Ranks = list[RankFacts]
TWO_NODES = (0, 0, 1, 1)


def on_all(ranks: Ranks, part: str, **changes: object) -> Ranks:
    return change(ranks, part, everywhere, **changes)


def last(ranks: Ranks, part: str, **changes: object) -> Ranks:
    return change(ranks, part, lambda rank: rank == len(ranks) - 1, **changes)


def bound(*each: tuple[int, ...], job: int, per_core: int = 1) -> Ranks:
    """Ranks of one node, each bound to these of its cores."""
    ranks = healthy((0,) * len(each))
    pairs = zip(ranks, each, strict=True)
    return [replace(r, binding=cores(*own, job=job, per_core=per_core)) for r, own in pairs]


def with_links(ranks: Ranks, **links: object) -> Ranks:
    """The first rank's links replaced by one."""
    level, peer = ("switch", 1) if ranks[1].node else ("node", 1)
    return [replace(ranks[0], links=(link(level, peer, **links),)), *ranks[1:]]


def alone(**launch: object) -> Ranks:
    return on_all(healthy((0,)), "launch", **{"launcher": "", **launch})


# -- nothing is wrong --------------------------------------------------------------------------

WELL: dict[str, Ranks] = {
    "two ranks": healthy(),
    "two nodes": healthy(TWO_NODES),
    "1000 ranks on 125 nodes": healthy(tuple(rank // 8 for rank in range(1000))),
    "by srun": on_all(healthy(TWO_NODES), "launch", launcher=BY_SRUN, mpirun="", own_mpirun="", mpirun_of=""),
    "a kernel that tells nothing": on_all(
        healthy(), "machine", huge_pages="", governor="", units=(), load=0.0, processor="x86_64"
    ),
    "intel_pstate": on_all(healthy(), "machine", governor="powersave intel_pstate"),
    "each bound to its core": bound((0,), (1,), job=2),
    "each bound to a core with two hyperthreads": bound((0, 2), (1, 3), job=4, per_core=2),
    "no /dev/shm, but messages pass": on_all(with_links(healthy()), "machine", shm_free_bytes=0, shm_bytes=0),
    "InfiniBand, but one node": on_all(
        healthy(), "machine", fabric=("mlx5_0 InfiniBand",), locked_bytes=8 << 20
    ),
    "a fast network that is used": [
        replace(healthy((0, 1))[0], links=(link("switch", 1, devices=("/dev/infiniband/uverbs0",)),)),
        healthy((0, 1))[1],
    ],
}


@pytest.mark.parametrize("name", WELL)
def test_there_is_nothing_to_say_of_a_machine_that_is_well(name: str) -> None:
    findings = judge(WELL[name], 1)
    assert [f for f in findings if f.level != "ok"] == []
    assert len(findings) < 20  # one screen, for 1000 ranks too


# -- what is wrong -----------------------------------------------------------------------------

ALONE = "srun started 2 processes (...), but each is alone\n  fix: srun --mpi=pmix -n 2 python x"
INFINIBAND = ("mlx5_0 InfiniBand",)
SLOW_LINK = {"bytes_per_s": 4e8}

# name -> (ranks, threads, level, part of the text, part of the fix)
FAULTS: dict[str, tuple[Ranks, int, str, str, str]] = {
    # MPI
    "alone": (alone(error=ALONE), 1, "PROBLEM", "each is alone", "srun --mpi=pmix -n 2 python x"),
    "no MPI": (
        [replace(alone(error="cannot load MPI: no libmpi\n  fix: run `make setup`")[0], mpi=None)],
        1, "PROBLEM", "cannot load MPI", "make setup",
    ),
    "funneled by wish": (
        on_all(healthy(), "mpi", thread_level="funneled", wanted_level="funneled"),
        1, "note", "MPI_THREAD_FUNNELED: large messages move only", "unset MPIPIPE_THREAD_LEVEL",
    ),
    "an MPI without threads": (
        on_all(healthy(), "mpi", thread_level="single"), 1, "note", "MPI_THREAD_SINGLE",
        "make clean setup MPI=site",
    ),
    "compiled for another MPI": (
        on_all(healthy(), "mpi", compiled_for="MPICH 4.2.0"),
        1, "PROBLEM", "compiled for MPICH 4.2.0, but Open MPI 5.0.11 runs", "make clean setup MPI=site",
    ),
    "compiled for an older MPI": (
        on_all(healthy(), "mpi", compiled_for="Open MPI 4.1.5"), 1, "note", "compiled for Open MPI 4.1.5",
        "MPI=site",
    ),
    "another MPI on the PATH": (
        alone(mpirun="/usr/bin/mpirun", mpirun_of="MPICH 4.2.0"),
        1, "PROBLEM", "/usr/bin/mpirun is of MPICH 4.2.0, and mpi4py uses Open MPI 5.0.11",
        'export PATH="/v/bin:$PATH"',
    ),
    "another MPI on the PATH, but not taken": (
        on_all(healthy(), "launch", mpirun="/usr/bin/mpirun", mpirun_of="Intel MPI 2021.18", own_mpirun=""),
        1, "note", "is of Intel MPI 2021.18", "make clean setup MPI=site",
    ),
    "another MPI that a variable names": (
        on_all(alone(), "mpi", library="MPICH 5.0.2", compiled_for="MPICH 5.0.2"),
        1, "PROBLEM", "/v/bin/mpirun is of Open MPI 5.0.11, and mpi4py uses MPICH 5.0.2",
        "unset MPI4PY_LIBMPI, if that names it, or start with the mpiexec of MPICH 5.0.2",
    ),
    "an older one on the PATH": (
        alone(mpirun="/usr/bin/mpirun", mpirun_of="Open MPI 4.1.5"), 1, "note", "Open MPI 4.1.5",
        'export PATH="/v/bin',
    ),
    "no mpirun at all": (
        alone(mpirun="", mpirun_of="", own_mpirun=""), 1, "note", "no mpirun and no mpiexec", "module load",
    ),
    # ranks
    "another PyTorch": (
        last(last(healthy(TWO_NODES), "software", torch="2.14.0"), "start", python="/w/bin/python"),
        1, "PROBLEM", "PyTorch differs: 2.13.0+cpu on rank 0 (n0), 2.14.0 on rank 3 (n1)",
        "mpirun -n 4 /v/bin/python -m mpipipe doctor",
    ),
    "another copy of mpipipe": (
        last(healthy(TWO_NODES), "software", code="other"),
        1, "PROBLEM", "the source of mpipipe differs: c0dec0dec0de on rank 0 (n0), other",
        "rsync -a /v/ n1:/v/",
    ),
    "another MPI library": (
        last(healthy(), "mpi", library="Open MPI 5.0.7"), 1, "PROBLEM", "the MPI library differs", "rsync",
    ),
    "instruction sets": (
        last(healthy(TWO_NODES), "software", instruction_set="AVX2"),
        1, "PROBLEM", "AVX512 on rank 0, AVX2 on rank 3 (n1)", "export ATEN_CPU_CAPABILITY=avx2",
    ),
    "processors": (
        last(healthy(TWO_NODES), "machine", processor="Xeon"), 1, "note",
        "AMD EPYC 9654 on rank 0, Xeon on rank 3", "",
    ),
    "ranks in turn": (
        healthy((0, 1, 0, 1)), 1, "note", "3 of 3 neighbouring ranks are on different nodes, 1 would do",
        "--map-by slot",
    ),
    "ranks in turn, by srun": (
        on_all(healthy((0, 1, 0, 1)), "launch", launcher=BY_SRUN),
        1, "note", "3 of 3 neighbouring", "srun --mpi=pmix --distribution=block -n 4 python",
    ),
    # cores
    "bound to one core": (
        bound((0,), (1,), job=8), 4, "PROBLEM",
        "1 rank x 4 threads on 1 core: bound by the launcher, 8 cores are there",
        "mpirun --bind-to none -n 2 python -m mpipipe doctor",
    ),
    "bound to one core, by srun": (
        on_all(bound((0,), (1,), job=8), "launch", launcher=BY_SRUN),
        4, "PROBLEM", "bound by the launcher", "srun --mpi=pmix --cpus-per-task=4 -n 2",
    ),
    "bound to one core, by Intel MPI": (
        on_all(bound((0,), (1,), job=8), "mpi", library="Intel MPI 2021.18",
        compiled_for="Intel MPI 2021.18"),
        4, "PROBLEM", "bound by the launcher", "export I_MPI_PIN_DOMAIN=4",
    ),
    "bound to the same core": (
        bound((0,), (0,), job=2), 1, "PROBLEM", "2 ranks x 1 thread on 1 core: bound by the launcher",
        "--bind-to none",
    ),
    "overlapping": (
        bound((0, 1), (1,), (0,), job=4), 1, "PROBLEM", "3 ranks x 1 thread on 2 cores: bound",
        "--bind-to none",
    ),
    "bound to the same core, with threads": (
        bound((0,), (0,), job=2), 2, "PROBLEM", "2 ranks x 2 threads on 1 core: bound by the launcher",
        "mpirun --bind-to none -n 2 python -m mpipipe doctor  # and pipeline.threads=1",
    ),
    "bound, with more threads than the node has cores": (
        bound((0,), (1,), job=8), 8, "PROBLEM", "1 rank x 8 threads on 1 core: bound by the launcher",
        "--bind-to none -n 2 python -m mpipipe doctor  # and pipeline.threads=4",
    ),
    "bound, and as many as it would have": (
        bound((0,), (1,), job=2), 2, "PROBLEM", "1 rank x 2 threads on 1 core: threads share cores",
        "pipeline.threads=1",
    ),
    "more ranks than cores, and all on one of them": (
        bound((0,), (0,), (0,), (0,), job=2), 1, "PROBLEM", "4 ranks x 1 thread on 1 core: bound by",
        "--bind-to none",
    ),
    "each in a control group of its own": (
        [replace(r, binding=replace(r.binding, job=r.binding.usable)) for r in bound((0,), (0, 1, 2), job=3)],
        2, "PROBLEM", "1 rank x 2 threads on 1 core: bound by the launcher, 3 cores", "pipeline.threads=1",
    ),
    "too many threads": (
        healthy((0, 0), job=8), 8, "PROBLEM", "2 ranks x 8 threads on 8 cores: threads share cores",
        "pipeline.threads=4",
    ),
    "too many ranks": (
        healthy((0,) * 4, job=2), 1, "note", "4 ranks x 1 thread on 2 cores: ranks share cores",
        "mpirun -n 2 python",
    ),
    "a quota": (
        on_all(healthy((0,), job=8), "binding", quota=2), 2, "note", "leaves 2 of 8 cores", "",
    ),
    "more threads than a quota": (
        on_all(healthy((0,), job=8), "binding", quota=2), 8, "PROBLEM", "1 rank x 8 threads on 2 cores",
        "threads=2",
    ),
    "idle cores": (
        healthy((0, 0), job=8), 2, "note", "4 of 8 cores are idle", "pipeline.threads=4",
    ),
    "idle cores of bound ranks": (
        bound((0,), (1,), job=8), 1, "note", "6 of 8 cores are idle", "mpirun --bind-to none",
    ),
    "hyperthreads": (
        [replace(healthy((0,))[0], binding=cores(job=8, per_core=2))],
        8, "note", "8 threads on 4 cores", "pipeline.threads=4",
    ),
    "two ranks on one core's hyperthreads": (
        bound((0,), (2,), job=4, per_core=2), 1, "note", "share a core by its two hyperthreads",
        "--map-by slot:PE=1",
    ),
    "NUMA": (
        [replace(r, binding=cores(job=8, domains=2)) for r in healthy()],
        4, "note", "ranks may wander over 2 NUMA domains", "--map-by ppr:1:numa --bind-to numa",
    ),
    "a rank over two domains": (
        [replace(healthy((0,))[0], binding=cores(job=8, domains=2))],
        8, "note", "threads in 2 NUMA domains", "pipeline.threads=4",
    ),
    # memory and limits
    "no memory": (
        on_all(healthy(), "machine", available_bytes=GIB // 4), 1, "PROBLEM",
        "128 MiB of memory for each of 2", "--mem=0",
    ),
    "little memory": (
        on_all(healthy(), "machine", available_bytes=GIB), 1, "note",
        "512 MiB of memory for each of 2 ranks", "",
    ),
    "swapping": (on_all(healthy(), "machine", swap_used_bytes=3 * GIB), 1, "note", "3 GiB are swapped out",
    ""),
    "a full /dev/shm": (
        on_all(healthy(), "machine", shm_free_bytes=1 << 20, shm_bytes=1 << 20), 1, "PROBLEM",
        "/dev/shm has 1 MiB free", "--shm-size",
    ),
    "the /dev/shm of a container": (
        on_all(healthy((0,) * 4), "machine", shm_free_bytes=60 << 20, shm_bytes=64 << 20),
        1, "note", "/dev/shm has 60 MiB free of 64 MiB, for 4 ranks", "remount,size=50%",
    ),
    "few open files": (
        on_all(healthy(tuple(r // 8 for r in range(400))), "machine", open_files=1024),
        1, "note", "1024 open files are allowed, 400 ranks may need 1856", "ulimit -n 1856",
    ),
    "locked memory": (
        on_all(with_links(healthy((0, 1)), devices=("/dev/infiniband/uverbs0",)), "machine",
               fabric=INFINIBAND, locked_bytes=8 << 20),
        1, "PROBLEM", "8 MiB of memory may be locked: mlx5_0 InfiniBand needs more", "ulimit -l unlimited",
    ),
    "a busy machine": (on_all(healthy(), "machine", load=9.3), 1, "note", "load 9.3 on 2 cores", ""),
    "no huge pages": (on_all(healthy(), "machine", huge_pages="never"), 1, "note", "no huge pages",
    "echo madvise >"),
    "a low clock": (
        on_all(healthy(), "machine", governor="powersave acpi-cpufreq"), 1, "note", "lowest clock",
        "cpupower",
    ),
    # messages
    "one rank": (alone(), 1, "note", "one rank sends no messages", "mpirun -n 2 python -m mpipipe doctor"),
    "slow shared memory": (
        with_links(healthy(), **SLOW_LINK), 1, "PROBLEM", "ranks 0 and 1 (n0): 400 MB/s at best",
        "--mca btl sm,self",
    ),
    "slow shared memory, by Yama": (
        on_all(with_links(healthy(), **SLOW_LINK), "machine", single_copy="kernel.yama.ptrace_scope=1"),
        1, "PROBLEM", "(kernel.yama.ptrace_scope=1)", "sysctl -w kernel.yama.ptrace_scope=0",
    ),
    "slow shared memory, by a container": (
        on_all(with_links(healthy(), **SLOW_LINK), "machine", single_copy="process_vm_readv is forbidden"),
        1, "PROBLEM", "(process_vm_readv is forbidden)", "--cap-add=SYS_PTRACE",
    ),
    "a slow network": (
        with_links(healthy((0, 1)), bytes_per_s=1e7), 1, "note", "ranks 0 and 1 (n0 - n1): 10.0 MB/s at best",
        "ethtool",
    ),
    "one slow link": (
        [replace(r, links=tuple(replace(x, seconds=tuple(4 * s for s in x.seconds)) for x in r.links))
         if r.rank == 4 else r for r in healthy((0, 0, 1, 1, 2, 2, 3, 3))],
        1, "note", "ranks 4 and 5 (n2): 2.0 GB/s, the median link gives 8.0 GB/s", "",
    ),
    "late messages": (with_links(healthy(), latency_s=3e-4), 1, "note",
    "takes 300 us, it should take less than 100 us", ""),
    "nothing in the background": (
        with_links(healthy(), hidden=0.1), 1, "note",
        "only 10% of a large message move while its ranks compute", "",
    ),
    "TCP on InfiniBand": (
        on_all(healthy((0, 1)), "machine", fabric=INFINIBAND),
        1, "note", "mlx5_0 InfiniBand is there, but Open MPI 5.0.11 does not use it",
        "module load openmpi && make clean setup",
    ),
    # compute
    "no kernels": (on_all(healthy(), "software", kernels=""), 1, "note", "compiled kernels are missing",
    "make setup"),
    "bf16 is faster": (
        on_all(healthy(), "compute", routes=(*ROUTES[:2], replace(ROUTES[2], flops_per_s=600e9))),
        1, "note", "bf16 would be 3.0x faster", "train.precision=bf16",
    ),
    "a slow rank": (
        last(healthy(TWO_NODES), "compute", routes=(replace(ROUTES[0], flops_per_s=50e9), *ROUTES[1:])),
        1, "note", "rank 3 (n1): 50 Gflop/s, the median rank has 200 Gflop/s", "",
    ),
    "a slow rank, by srun": (
        last(on_all(healthy(TWO_NODES), "launch", launcher=BY_SRUN), "compute",
             routes=(replace(ROUTES[0], flops_per_s=50e9), *ROUTES[1:])),
        1, "note", "rank 3 (n1): 50 Gflop/s", "sbatch --exclude=n1",
    ),
    "contention": (
        on_all(healthy(), "compute", copy_bytes_per_s=1e9), 1, "note", "1.0 GB/s each while all ranks", "",
    ),
    # start, files
    "a slow start": (
        last(on_all(healthy(TWO_NODES), "start", file_system="lustre"), "start", seconds=45.0),
        1, "note", "45.0 s until Python, numpy, torch and mpipipe were there (rank 3, n1); /v is on lustre",
        "cp -a /v /tmp/env",
    ),
    "a slow start, by srun": (
        on_all(on_all(healthy(), "launch", launcher=BY_SRUN), "start", seconds=45.0, file_system="nfs4"),
        1, "note", "/v is on nfs4",
        "srun --ntasks-per-node=1 cp -a /v /tmp/env && export MPIPIPE_VENV=/tmp/env",
    ),
    "cannot write": (
        on_all(healthy(), "files", failed=(("/home/me/runs", "writing: Permission denied"),)),
        1, "PROBLEM", "/home/me/runs: writing: Permission denied", "run.dir=",
    ),
    "no temporary files": (
        on_all(healthy(), "files", failed=(("/tmp", "writing: No space left on device"),)),
        1, "PROBLEM", "/tmp: writing: No space left on device", "export TMPDIR=",
    ),
    "no temporary files, and runs in /": (
        on_all(healthy(), "files", folder="/", failed=(("/tmp", "writing: Disk quota exceeded"),)),
        1, "PROBLEM", "/tmp: writing: Disk quota exceeded", "export TMPDIR=",
    ),
    "no locks": (
        on_all(healthy(), "files", failed=(("/home/me/runs", "a lock: No locks"),)), 1, "note",
        "/home/me/runs: a lock: No locks", "",
    ),
    "not seen by a node": (
        last(healthy((0, 1)), "files", seen=False),
        1, "PROBLEM", "/home/me/runs: what rank 0 writes there is not seen by rank 1 (n1)", "run.dir=",
    ),
    "a full disk": (on_all(healthy(), "files", free_bytes=GIB), 1, "note",
    "1 GiB free, on nfs4; checkpoints may not fit", "run.dir="),
    # doctor
    "a measurement that failed": (
        [replace(r, compute=None, failed=("compute: MemoryError: ",)) for r in healthy()],
        1, "note", "could not measure: rank 0 (n0): compute: MemoryError", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_the_line_that_mends_it(name: str) -> None:
    ranks, threads, level, text, fix = FAULTS[name]
    found = [f for f in judge(ranks, threads) if f.level == level and text in f.text]
    assert len(found) == 1 or name == "a measurement that failed", judge(ranks, threads)
    assert fix in found[0].fix
    assert bool(fix) == bool(found[0].fix)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault[2] == "note"])
def test_what_may_be_meant_is_no_problem(name: str) -> None:
    ranks, threads, *_ = FAULTS[name]
    assert [f for f in judge(ranks, threads) if f.level == "PROBLEM"] == []


BUSY: dict[str, Callable[[Ranks], Ranks]] = {
    "by others": lambda ranks: on_all(ranks, "machine", load=8.0),
    "by more ranks than cores": lambda ranks: on_all(ranks, "binding", usable=(0,), quota=1, job=(0,)),
}
MEASURED = ("slow shared memory", "late messages", "nothing in the background", "a slow rank", "contention")


@pytest.mark.parametrize("why", BUSY)
@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_on_busy_cores_blames_nobody(name: str, why: str) -> None:
    ranks, threads, _, text, _ = FAULTS[name]
    findings = judge(BUSY[why](ranks), threads)
    assert [f for f in findings if f.level == "PROBLEM"] == []
    same = [f for f in findings if f.level == "note" and text in f.text]
    assert all("the cores were busy" in f.text for f in same)


# -- many nodes --------------------------------------------------------------------------------


def cores_of(ranks: Ranks, threads: int) -> list[Finding]:
    return [f for f in judge(ranks, threads) if f.section == "cores"]


def test_a_fault_of_many_nodes_is_said_once_with_their_names() -> None:
    ranks = healthy(tuple(rank // 8 for rank in range(1000)))
    wrong = change(ranks, "binding", lambda rank: rank >= 8 and rank % 8 == 0, usable=(0,), quota=1)
    problems = [f for f in cores_of(wrong, 2) if f.level == "PROBLEM"]
    assert len(problems) == 2  # n0 has threads that share cores, the others ranks that are bound
    only = change(ranks, "binding", lambda rank: rank // 8 in (3, 77), usable=(0,), quota=1)
    (problem,) = [f for f in cores_of(only, 1) if f.level == "PROBLEM"]
    assert problem.text == "n3, n77: 8 ranks x 1 thread on 1 core: bound by the launcher, 8 cores are there"
    every = change(ranks, "binding", everywhere, usable=(0,), quota=1)
    (problem,) = [f for f in cores_of(every, 1) if f.level == "PROBLEM"]
    assert problem.text.startswith("all nodes: 8 ranks")


def test_differing_ranks_are_counted_not_listed() -> None:
    ranks = healthy(tuple(rank // 8 for rank in range(1000)))
    odd = change(ranks, "software", lambda rank: rank >= 496, torch="2.14.0")
    (problem,) = [f for f in judge(odd, 1) if f.level == "PROBLEM"]
    assert "2.14.0 on ranks 496, 497, 498, 499 and 500 more (n62, n63, n64, n65 and 59 more)" in problem.text


def test_one_rank_alone_says_nothing_of_idle_cores() -> None:
    """How many will train is not known; of a rank on each of two nodes it is."""
    assert [f.text for f in cores_of(healthy((0,), job=8), 1)] == [
        "1 rank x 1 thread on 8 cores",
        "rank 0: 1 thread on cores 0-7, NUMA 0",
    ]
    (note,) = [f for f in cores_of(healthy((0, 1), job=8), 1) if f.level == "note"]
    assert note.text.startswith("all nodes: 7 of 8 cores are idle")


def test_ranks_that_mpipipe_has_bound_do_not_wander() -> None:
    """Idle cores are judged by what the launcher left, though a rank has fewer to itself."""
    ranks = [replace(r, binding=cores(job=16, domains=2)) for r in healthy()]
    notes = [f.text for f in cores_of(ranks, 4) if f.level == "note"]
    assert notes[0].startswith("8 of 16 cores are idle")
    assert notes[1].startswith("ranks may wander over 2 NUMA domains")
    bound = [replace(r, binding=replace(r.binding, bound=r.binding.numa[r.rank])) for r in ranks]
    assert [f.text for f in cores_of(bound, 4) if f.level == "note"] == notes[:1]


def test_what_was_not_measured_is_not_judged() -> None:
    """As when a measurement hangs: the facts that were gathered before are told all the same."""
    ranks = [replace(r, links=(), compute=None, files=None) for r in healthy(TWO_NODES)]
    sections = {f.section for f in judge(ranks, 1)}
    assert sections == {"MPI", "ranks", "cores", "memory and limits", "start"}
    others = [replace(r, compute=replace(COMPUTE, copy_alone_bytes_per_s=None)) for r in healthy()]
    first_failed = [replace(others[0], compute=None, failed=("compute: MemoryError: ",)), others[1]]
    assert any("matrix products" in f.text for f in judge(first_failed, 1))


def test_an_amx_machine_keeps_mkl() -> None:
    rounds = replace(ROUTES[1], flops_per_s=600e9, error=2e-3, fp32=False)
    ranks = [replace(r, compute=replace(COMPUTE, routes=(ROUTES[0], rounds, ROUTES[2]))) for r in healthy()]
    findings = judge(ranks, 1)
    assert [f for f in findings if f.level != "ok"] == []
    assert any("would take MKL, as oneDNN rounds to less than fp32 here" in f.text for f in findings)
    one_cannot = [replace(ranks[0], compute=COMPUTE), ranks[1]]  # fp32 on one rank is not enough
    assert any("would take MKL, as oneDNN rounds" in f.text for f in judge(one_cannot, 1))


def test_the_route_that_would_be_taken_is_told_with_its_reason() -> None:
    routes = (ROUTES[0], replace(ROUTES[1], flops_per_s=340e9), replace(ROUTES[2], flops_per_s=600e9))
    texts = [f.text for f in judge(on_all(healthy(), "compute", routes=routes), 1)]
    taken = "kernels.gemm=auto would take oneDNN, 1.70 times as fast as MKL (340 Gflop/s and 200 Gflop/s, "
    assert any(text.startswith(taken) for text in texts)
    assert any(text.startswith("bf16 would be 1.8x faster") for text in texts), "than the route that is taken"


def told(ranks: Ranks, threads: int = 1) -> list[str]:
    """Where ranks compute."""
    return [f.text for f in cores_of(ranks, threads) if f.level == "ok" and f.text.startswith("rank")]


def test_it_is_told_where_each_rank_computes() -> None:
    assert told(healthy(), 4) == ["ranks 0-1: 4 threads each on cores 0-1, NUMA 0"], "also what is wrong"
    assert told(healthy(TWO_NODES)) == ["ranks 0-3: 1 thread each on cores 0-1, NUMA 0"]
    own = bound((0,), (2,), (1,), job=4)
    assert told(own) == [f"rank {r}: 1 thread on core {c}, NUMA 0" for r, c in enumerate((0, 2, 1))]
    two_domains = [replace(r, binding=cores(*r.binding.usable, job=4, domains=2)) for r in own]
    assert told(two_domains)[1] == "rank 1: 1 thread on core 2, NUMA 1"
    assert told([replace(r, binding=cores(job=4, domains=2)) for r in own]) == [
        "ranks 0-2: 1 thread each on cores 0-3, NUMA 0-1"
    ]
    ours = [
        replace(r, binding=replace(cores(job=4, domains=2), bound=(i, 2 + i)))
        for i, r in enumerate(healthy())
    ]
    assert told(ours)[1] == "rank 1: 1 thread on cores 1, 3, NUMA 0-1, bound by mpipipe"
    nowhere = on_all(healthy(), "binding", numa=())
    assert told(nowhere) == ["ranks 0-1: 1 thread each on cores 0-1"], "the system does not tell"


def test_many_ranks_that_are_bound_take_a_line_for_each_domain() -> None:
    ranks = healthy(tuple(rank // 64 for rank in range(512)))
    own = [replace(r, binding=cores(r.rank % 64, job=64, domains=2)) for r in ranks]
    assert told(own) == [
        "ranks 0-31, 64-95, 128-159, 192-223 and 4 more: 1 thread each on 1 core each of 0-31, NUMA 0",
        "ranks 32-63, 96-127, 160-191, 224-255 and 4 more: 1 thread each on 1 core each of 32-63, NUMA 1",
    ]
    eight = [replace(r, binding=cores(r.rank % 64, job=64, domains=8)) for r in ranks]
    assert told(eight)[3].endswith("1 thread each on 1 core each of 24-31, NUMA 3")
    assert "256 ranks more, in other ways: --json tells" in [f.text for f in cores_of(eight, 1)]


@pytest.mark.parametrize(
    ("sets", "text"),
    [(("v4", "v4"), "kernels 8 (v4)"), (("v4, cuda",) * 2, "(v4, cuda)"), (("v4", "v3"), "(v4, v3)")],
)
def test_the_kernels_that_are_loaded_are_told(sets: tuple[str, str], text: str) -> None:
    ranks = [
        replace(r, software=replace(r.software, kernels="8", kernel_set=s))
        for r, s in zip(healthy(), sets, strict=True)
    ]
    assert any(f.text.endswith(text) for f in judge(ranks, 1) if f.section == "ranks")


@pytest.mark.parametrize(
    ("sets", "least"), [(("v4", "v4_bf16"), "v4"), (("v4_bf16", "v3"), "v3"), (("sve", "base"), "base")]
)
def test_unlike_kernels_are_told_with_the_set_that_all_have(sets: tuple[str, str], least: str) -> None:
    ranks = [
        replace(r, software=replace(r.software, kernels="8", kernel_set=s))
        for r, s in zip(healthy(), sets, strict=True)
    ]
    (found,) = [f for f in judge(ranks, 1) if "unlike processors" in f.text]
    assert (found.level, found.fix) == ("note", f"export MPIPIPE_INSTRUCTION_SET={least}")


def test_openmp_that_binds_unbound_ranks_is_a_problem() -> None:
    told = on_all(healthy(), "launch", settings=("OMP_PROC_BIND=true",))
    (found,) = [f for f in judge(told, 1) if f.level == "PROBLEM"]
    assert found.text.startswith("OMP_PROC_BIND=true binds the threads of 2 ranks to the same cores")
    assert "--map-by slot:PE=1 --bind-to core" in found.fix
    by_srun = on_all(told, "launch", launcher=BY_SRUN)
    assert any(
        "OpenMP" in f.text or "OMP_PROC_BIND" in f.text for f in judge(by_srun, 1) if f.level == "PROBLEM"
    )
    ranks = bound((0,), (1,), job=2)
    assert not [f for f in judge(on_all(ranks, "launch", settings=("OMP_PROC_BIND=true",)), 1) if f.fix]
    off = on_all(healthy(), "launch", settings=("OMP_PROC_BIND=false",))
    assert not [f for f in judge(off, 1) if f.fix]


def test_settings_are_told() -> None:
    ranks = on_all(healthy(), "launch", settings=("OMPI_MCA_btl=tcp,self",))
    assert any(f.text == "as set: OMPI_MCA_btl=tcp,self" for f in judge(ranks, 1))


def test_root_is_let_in_by_the_line_itself() -> None:
    (line,) = [f.fix for f in judge(alone(by_root=True), 1) if "sends no" in f.text]
    assert line == "mpirun --allow-run-as-root -n 2 python -m mpipipe doctor"
    (line,) = [f.fix for f in judge(alone(mpirun="", mpirun_of=""), 1) if "sends no" in f.text]
    assert line == "/v/bin/mpirun -n 2 python -m mpipipe doctor"


def test_tmp_of_each_node_is_told() -> None:
    ranks = last(on_all(healthy((0, 1)), "files", temporary="/scratch"), "files", temporary_seen=False)
    assert any("/scratch (TMPDIR) is each node's own (n1)" in f.text for f in judge(ranks, 1))


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (healthy(), "no adapter is in use that it lacks, so these 8.0 GB/s"),
        (
            with_links(healthy((0, 1)), devices=("/dev/infiniband/uverbs0",)),
            "8.0 GB/s over /dev/infiniband/uverbs0; to compare: mpirun --with-ft ulfm -n 2 python",
        ),
        (
            on_all(healthy(), "launch", settings=("OMPI_MCA_mpi_ft_enable=1",)),
            "ULFM is on, and forces pml/ob1",
        ),
    ],
)
def test_it_says_which_transport_ulfm_would_force(ranks: Ranks, says: str) -> None:
    assert says in next(f.text for f in judge(ranks, 1) if f.text.startswith("run.recover=mpi: "))
