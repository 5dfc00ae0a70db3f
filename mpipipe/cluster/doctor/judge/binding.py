"""Which cores the launcher left the ranks, beside how many threads they are to have; where each computes.
Judged node by node."""

from __future__ import annotations

from collections.abc import Iterator

from mpipipe.cluster.doctor.facts import Cores, Finding, RankFacts, Ranks
from mpipipe.cluster.doctor.judge.places import places
from mpipipe.cluster.doctor.judge.words import for_each_node, is_open_mpi, listed, start_line
from mpipipe.cluster.node import OPENMP_BINDS
from mpipipe.planner.sizes import counted

SECTION = "cores"


def judge_binding(ranks: Ranks, threads: int) -> Iterator[Finding]:
    def judge(on_node: list[RankFacts]) -> Iterator[Finding]:
        yield from _quota(on_node)
        wrong = [*_crowded(on_node, threads, len(ranks)), *_openmp(on_node, threads, len(ranks))]
        yield from wrong
        if not wrong:
            ranks_threads = f"{counted(len(on_node), 'rank')} x {counted(threads, 'thread')}"
            yield Finding(SECTION, "ok", f"{ranks_threads} on {counted(_room(on_node), 'core')}")
            if not ranks[0].launch.error:  # else the others have theirs
                yield from _idle(on_node, threads, len(ranks))
            yield from _hyperthreads(on_node, threads, len(ranks))
            yield from _numa(on_node, threads, len(ranks))

    yield from for_each_node(ranks, judge)
    yield from places(ranks, threads, SECTION)


def _room(on_node: list[RankFacts]) -> int:
    """Cores that these ranks have together, by binding and by quota (which their job shares)."""
    return min([len({core for r in on_node for core in r.binding.usable}), *_quotas(on_node)])


def _unbound(on_node: list[RankFacts]) -> int:
    """Cores that they would have together if no launcher had bound them."""
    return min([len({core for r in on_node for core in r.binding.job}), *_quotas(on_node)])


def _quotas(on_node: list[RankFacts]) -> list[int]:
    return [r.binding.quota for r in on_node if r.binding.quota < len(r.binding.usable)]


def _quota(on_node: list[RankFacts]) -> Iterator[Finding]:
    quota, usable = on_node[0].binding.quota, len(on_node[0].binding.usable)
    if quota < usable:
        text = f"a limit of CPU time (container, cgroup) leaves {quota} of {usable} cores"
        yield Finding(SECTION, "note", text)


def _crowded(on_node: list[RankFacts], threads: int, size: int) -> Iterator[Finding]:
    """Of the sets of cores that ranks were bound to, the one that is the most crowded."""
    first, sets = on_node[0], {r.binding.usable for r in on_node}
    inside = {cores: [r for r in on_node if set(r.binding.usable) <= set(cores)] for cores in sets}
    _, theirs = max(inside.items(), key=lambda item: (len(item[1]) / len(item[0]), -len(item[0])))
    room, job = _room(theirs), _unbound(on_node)
    if len(theirs) * threads <= room:
        return
    whose = f"{counted(len(theirs), 'rank')} x {counted(threads, 'thread')} on {counted(room, 'core')}"
    if room * len(on_node) < job * len(theirs):  # a rank would have more cores
        text = f"{whose}: bound by the launcher, {job} cores are there"
        fit = max(1, job // len(on_node))
        fix = _loosened(first, size, min(threads, fit))
        yield Finding(
            SECTION, "PROBLEM", text, fix if threads <= fit else f"{fix}  # and pipeline.threads={fit}"
        )
    elif threads == 1:
        text = f"{whose}: ranks share cores and yield them while they wait; good for tests, else slow"
        yield Finding(SECTION, "note", text, start_line(first, max(1, size * room // len(theirs))))
    else:
        fix = f"pipeline.threads={max(1, room // len(theirs))}"
        yield Finding(SECTION, "PROBLEM", f"{whose}: threads share cores", fix)


def _openmp(on_node: list[RankFacts], threads: int, size: int) -> Iterator[Finding]:
    """OpenMP, told to bind, puts the threads of each rank on the first cores that the rank may use."""
    first = on_node[0]
    told = [
        s for s in first.launch.settings if s.startswith(OPENMP_BINDS) and not s.lower().endswith("=false")
    ]
    distinct = {core for r in on_node for core in r.binding.usable}
    if not told or len(distinct) == sum(len(r.binding.usable) for r in on_node):
        return
    text = f"{listed(told)} binds the threads of {len(on_node)} ranks to the same cores: none is bound itself"
    options = [f"--map-by slot:PE={threads} --bind-to core"] if is_open_mpi(first) else []
    names = " ".join(setting.partition("=")[0] for setting in told)
    yield Finding(
        SECTION, "PROBLEM", text, f"unset {names}" if not options else start_line(first, size, *options)
    )


def _loosened(first: RankFacts, size: int, threads: int) -> str:
    if first.launch.launcher == "srun":
        return start_line(first, size, "--cpu-bind=none" if threads == 1 else f"--cpus-per-task={threads}")
    if is_open_mpi(first):
        return start_line(first, size, "--bind-to none")
    if first.mpi and first.mpi.library.startswith("Intel"):
        return f"export I_MPI_PIN_DOMAIN={threads}"
    return start_line(first, size, "-bind-to none")


def _idle(on_node: list[RankFacts], threads: int, size: int) -> Iterator[Finding]:
    if size == 1:  # started for a look at the machine: how many ranks will train is not known
        return
    first = on_node[0]
    limited = first.binding.quota < len(first.binding.usable)
    per_core = max(map(len, first.binding.siblings))  # hyperthreads
    job = first.binding.quota if limited else len(first.binding.job) // per_core
    used = len(on_node) * threads
    if used > job // 2:
        return
    fit = job // len(on_node)
    text = f"{job - used} of {job} cores are idle; more ranks or threads would use them (threads change bits)"
    if not limited and _room(on_node) < len(first.binding.job):
        yield Finding(SECTION, "note", f"{text}; the launcher binds the ranks", _loosened(first, size, fit))
    else:
        yield Finding(SECTION, "note", text, f"pipeline.threads={fit}")


def _hyperthreads(on_node: list[RankFacts], threads: int, size: int) -> Iterator[Finding]:
    """Two hyperthreads of a core share its arithmetic units: matrix products gain nothing from the second."""
    first, used = on_node[0], len(on_node) * threads
    physical = {siblings for r in on_node for siblings in r.binding.siblings}
    if len(physical) >= used:
        return
    if sum(map(len, physical)) < len(first.binding.job):
        text = "ranks share a core by its two hyperthreads, while other cores are free"
        yield Finding(SECTION, "note", text, _one_each(first, size, threads))
    else:
        text = (
            f"{used} threads on {len(physical)} cores: a core's second hyperthread multiplies nothing faster"
        )
        yield Finding(SECTION, "note", text, f"pipeline.threads={max(1, len(physical) // len(on_node))}")


def _one_each(first: RankFacts, size: int, threads: int) -> str:
    if first.launch.launcher == "srun":
        return start_line(first, size, "--hint=nomultithread")
    return start_line(first, size, *([f"--map-by slot:PE={threads}"] if is_open_mpi(first) else []))


def _numa(on_node: list[RankFacts], threads: int, size: int) -> Iterator[Finding]:
    """Memory of another domain is slower, so a rank is best kept in one."""
    domains = on_node[0].binding.numa
    spans = [_spanned(r, domains) for r in on_node]
    if len(domains) < 2 or max(spans) < 2:
        return
    first, largest = on_node[0], max(map(len, domains))
    if len(on_node) >= len(domains) and threads <= largest:
        text = f"ranks may wander over {max(spans)} NUMA domains, and there are enough to keep each in one"
        per_domain = -(-len(on_node) // len(domains))
        options = [f"--map-by ppr:{per_domain}:numa --bind-to numa"] if is_open_mpi(first) else []
        if first.launch.launcher == "srun":
            options = ["--cpu-bind=ldoms"]
        yield Finding(SECTION, "note", text, start_line(first, size, *options))
    elif threads > largest:
        text = f"a rank has threads in {max(spans)} NUMA domains; a rank for each domain is mostly faster"
        yield Finding(SECTION, "note", text, f"pipeline.threads={largest}")


def _spanned(rank: RankFacts, domains: tuple[Cores, ...]) -> int:
    own = set(rank.binding.own)
    return sum(not own.isdisjoint(cores) for cores in domains)
