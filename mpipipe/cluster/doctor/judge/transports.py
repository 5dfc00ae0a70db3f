"""Whether messages are as fast as such a link should be."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from mpipipe.cluster.doctor.facts import Finding, LinkTimes, RankFacts, Ranks, by_node
from mpipipe.cluster.doctor.judge.launch import REBUILD
from mpipipe.cluster.doctor.judge.limits import busy
from mpipipe.cluster.doctor.judge.words import is_open_mpi, size, start_line
from mpipipe.planner.sizes import per_second

SECTION = "messages"
NAMES = {"node": "within a node", "switch": "between nodes"}
# shared memory, even where it is copied twice, gives 2e9, gigabit Ethernet 1.1e8
SLOW_BYTES_PER_S = {"node": 1e9, "switch": 5e7}
LATE_S = {"node": 1e-4, "switch": 1e-3}
HIDDEN = 0.5  # of a large message, where a helper thread moves it
STRAGGLER = 0.5  # of the median bandwidth of its level
Link = tuple[RankFacts, LinkTimes]


def judge_transports(ranks: Ranks, threads: int) -> Iterator[Finding]:
    if len(ranks) == 1 and not ranks[0].launch.error:
        fix = start_line(ranks[0], 2, command="python -m mpipipe doctor")
        yield Finding(SECTION, "note", "one rank sends no messages; to measure them, start several", fix)
    quiet = not any(busy(on_node) for on_node in by_node(ranks).values())
    for level in ("node", "switch"):
        links = [(r, link) for r in ranks for link in r.links if link.level == level]
        if links:
            yield _told(level, links)
            yield from _bandwidth(level, links, ranks, quiet)
            yield from _latency(level, links, quiet)
            yield from _background(level, links, quiet)
    if ranks[0].overlap:
        yield Finding(SECTION, "ok", ranks[0].overlap)
    yield from _adapters(ranks)
    yield from _under_ulfm(ranks)


def _told(level: str, links: list[Link]) -> Finding:
    """Medians over the links, one figure for each length."""
    lengths = links[0][1].nbytes
    seconds = [median(link.seconds[i] for _, link in links) for i in range(len(lengths))]
    large = [
        f"{per_second(n / s, 'B/s')} at {size(n)}" for n, s in zip(lengths[1:], seconds[1:], strict=True)
    ]
    hidden = median(link.hidden for _, link in links)
    text = f"{NAMES[level]}: {seconds[0] * 1e6:.1f} us, {', '.join(large)}; {hidden:.0%} in the background"
    if len(links) > 1:
        text += f" (median of {len(links)} links)"
    return Finding(SECTION, "ok", text)


def _bandwidth(level: str, links: list[Link], ranks: Ranks, quiet: bool) -> Iterator[Finding]:
    rank, worst = min(links, key=lambda x: x[1].bytes_per_s())
    found, usual = worst.bytes_per_s(), median(link.bytes_per_s() for _, link in links)
    between = f"ranks {rank.rank} and {worst.peer} ({_hosts(rank, worst, ranks)})"
    if found < SLOW_BYTES_PER_S[level]:
        least = per_second(SLOW_BYTES_PER_S[level], "B/s")
        text = f"{between}: {per_second(found, 'B/s')} at best, such a link should give {least}"
        if level == "switch":
            fix = "" if rank.machine.fabric else "ethtool <interface>  # the speed of the link"
            yield Finding(SECTION, "note", text, fix)
        elif not quiet:
            yield Finding(SECTION, "note", f"{text}; the cores were busy")
        else:
            reason = f" ({rank.machine.single_copy})" if rank.machine.single_copy else ""
            yield Finding(SECTION, "PROBLEM", text + reason, _copies(rank, len(ranks)))
    elif found < STRAGGLER * usual and quiet:
        text = f"{between}: {per_second(found, 'B/s')}, the median link gives {per_second(usual, 'B/s')}"
        yield Finding(SECTION, "note", text)


def _hosts(rank: RankFacts, link: LinkTimes, ranks: Ranks) -> str:
    return " - ".join(dict.fromkeys((rank.machine.host, ranks[link.peer].machine.host)))


def _copies(rank: RankFacts, size: int) -> str:
    """What lets ranks of one node copy a message once, or through shared memory at all."""
    if rank.machine.single_copy.startswith("kernel.yama"):
        return "sysctl -w kernel.yama.ptrace_scope=0  # as root"
    if rank.machine.single_copy:
        return "docker run --cap-add=SYS_PTRACE --security-opt seccomp=unconfined ..."
    return start_line(rank, size, *(["--mca btl sm,self"] if is_open_mpi(rank) else []))


def _latency(level: str, links: list[Link], quiet: bool) -> Iterator[Finding]:
    usual_s = median(link.seconds[0] for _, link in links)
    if usual_s > LATE_S[level] and quiet:
        took, least = (f"{s * 1e6:.0f} us" for s in (usual_s, LATE_S[level]))
        text = f"{NAMES[level]} a small message takes {took}, it should take less than {least}"
        yield Finding(SECTION, "note", f"{text}; use larger micro-batches, or see what else runs")


def _background(level: str, links: list[Link], quiet: bool) -> Iterator[Finding]:
    multiple = all(r.mpi is not None and r.mpi.thread_level == "multiple" for r, _ in links)
    hidden = median(link.hidden for _, link in links)
    if multiple and quiet and hidden < HIDDEN:  # without, it is said of the thread level
        text = f"{NAMES[level]} only {hidden:.0%} of a large message move while its ranks compute"
        yield Finding(SECTION, "note", f"{text}; more and smaller micro-batches overlap better")


def _adapters(ranks: Ranks) -> Iterator[Finding]:
    """A fast network is there, and no rank has opened it though they talked: they use TCP on it."""
    between = [r for r in ranks if any(link.level == "switch" for link in r.links)]
    fabric = sorted({device for r in between for device in r.machine.fabric})
    opened = sorted({device for r in between for link in r.links for device in link.devices})
    if fabric and opened:
        yield Finding(SECTION, "ok", f"{', '.join(fabric[:2])}: in use ({', '.join(opened[:2])})")
    elif fabric:
        library = between[0].mpi.library if between[0].mpi else "the MPI"
        text = f"{', '.join(fabric[:2])} is there, but {library} does not use it; the site's MPI will"
        yield Finding(SECTION, "note", text, f"module load openmpi && {REBUILD}")


def _under_ulfm(ranks: Ranks) -> Iterator[Finding]:
    """What run.recover=mpi costs: with ULFM on, Open MPI has pml/ob1 alone: shared memory, TCP and UCT."""
    links = [link for r in ranks for link in r.links]
    first, opened = ranks[0], sorted({device for link in links for device in link.devices})
    if not links or not is_open_mpi(first) or first.mpi is None or not first.mpi.fault_tolerance:
        return
    fastest = per_second(max(link.bytes_per_s() for link in links), "B/s")
    if any(setting.startswith("OMPI_MCA_mpi_ft_enable=") for setting in first.launch.settings):
        text = f"ULFM is on, and forces pml/ob1: {fastest} at best"
    elif opened:
        command = start_line(first, len(ranks), "--with-ft ulfm", command="python -m mpipipe doctor")
        text = f"ULFM would force pml/ob1, here it is {fastest} over {opened[0]}; to compare: {command}"
    else:
        text = f"ULFM would force pml/ob1; no adapter is in use that it lacks, so these {fastest}"
    yield Finding(SECTION, "ok", f"run.recover=mpi: {text}")
