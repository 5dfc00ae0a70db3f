"""Memory, the limits of the user, and settings of the kernel. Judged node by node."""

from __future__ import annotations

from collections.abc import Iterator

from mpipipe.cluster.doctor.facts import Finding, RankFacts, Ranks
from mpipipe.cluster.doctor.judge.words import for_each_node, size
from mpipipe.cluster.launch import load_advice

SECTION = "memory and limits"
GIB, MIB = 1 << 30, 1 << 20
TOO_LITTLE_BYTES, LITTLE_BYTES = 256 * MIB, GIB  # per rank, above the imports
SHM_NEEDED_BYTES, SHM_GOOD_BYTES = 4 * MIB, 32 * MIB  # per rank: the queues of Open MPI and MPICH
LOCKED_BYTES = 64 * MIB  # what InfiniBand registers before anything is sent
FILES_PER_RANK, FILES = 4, 256  # a connection to each rank over TCP, and the rest


def judge_limits(ranks: Ranks, threads: int) -> Iterator[Finding]:
    def judge(on_node: list[RankFacts]) -> Iterator[Finding]:
        yield from _memory(on_node)
        yield from _shared_memory(on_node)
        yield from _user_limits(on_node, len(ranks))
        yield from _kernel(on_node)

    yield from for_each_node(ranks, judge)


def busy(on_node: list[RankFacts]) -> bool:
    """Others use the cores too, or the ranks outnumber them: what was measured there means little."""
    cores = {core for r in on_node for core in r.binding.usable}
    first = on_node[0]
    return len(on_node) > len(cores) or load_advice(first.machine.load, len(first.binding.job)) is not None


def _memory(on_node: list[RankFacts]) -> Iterator[Finding]:
    each = min(r.machine.available_bytes for r in on_node) // len(on_node)
    text = (
        f"{size(each)} of memory for each of {len(on_node)} ranks"
        if len(on_node) > 1
        else f"{size(each)} of memory"
    )
    if each < TOO_LITTLE_BYTES:
        fix = "sbatch --mem=0  # all of the node; or fewer ranks on it, or a container with more"
        yield Finding(SECTION, "PROBLEM", f"{text}: too little to train in", fix)
    else:
        small = each < LITTLE_BYTES
        yield Finding(SECTION, "note" if small else "ok", f"{text}: small models only" if small else text)
    swapped = on_node[0].machine.swap_used_bytes
    if swapped > GIB:
        yield Finding(SECTION, "note", f"{size(swapped)} are swapped out: the node is or was short of memory")


def _shared_memory(on_node: list[RankFacts]) -> Iterator[Finding]:
    """Ranks of one node exchange messages in /dev/shm; containers give it 64 MiB."""
    first, n = on_node[0].machine, len(on_node)
    if n == 1 or not first.shm_bytes:
        return
    fix = "mount -o remount,size=50% /dev/shm  # as root; of a container: docker run --shm-size=2g"
    text = f"/dev/shm has {size(first.shm_free_bytes)} free of {size(first.shm_bytes)}, for {n} ranks"
    if first.shm_free_bytes < n * SHM_NEEDED_BYTES:
        yield Finding(SECTION, "PROBLEM", text, fix)
    elif first.shm_free_bytes < n * SHM_GOOD_BYTES:
        yield Finding(SECTION, "note", text, fix)


def _user_limits(on_node: list[RankFacts], n_ranks: int) -> Iterator[Finding]:
    first = on_node[0].machine
    needed = FILES + FILES_PER_RANK * n_ranks
    if first.open_files is not None and first.open_files < needed:
        text = f"{first.open_files} open files are allowed, {n_ranks} ranks may need {needed}"
        yield Finding(SECTION, "note", text, f"ulimit -n {needed}")
    registers = [device for device in first.fabric if device.endswith("InfiniBand")]
    limit = None if on_node[0].launch.by_root else first.locked_bytes
    if registers and limit is not None and limit < LOCKED_BYTES and n_ranks > len(on_node):
        text = f"{size(limit)} of memory may be locked: {registers[0]} needs more"
        yield Finding(
            SECTION,
            "PROBLEM",
            text,
            "ulimit -l unlimited  # in limits.conf, or PropagateResourceLimits of Slurm",
        )


def _kernel(on_node: list[RankFacts]) -> Iterator[Finding]:
    first = on_node[0]
    if advice := load_advice(first.machine.load, len(first.binding.job)):
        yield Finding(SECTION, "note", advice)
    if first.machine.huge_pages == "never":
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled  # as root"
        yield Finding(SECTION, "note", "no huge pages: large tensors cost more page faults", fix)
    governor, _, driver = first.machine.governor.partition(" ")
    if governor == "powersave" and not driver.startswith(
        ("intel_pstate", "amd-pstate")
    ):  # there it is no brake
        fix = "cpupower frequency-set -g performance  # as root"
        yield Finding(
            SECTION, "note", f"the cores run at their lowest clock (governor powersave of {driver})", fix
        )
