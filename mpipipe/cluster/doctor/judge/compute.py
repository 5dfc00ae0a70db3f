"""How fast the ranks compute, by which route, and whether one of them is behind."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from mpipipe.cluster.doctor.facts import Compute, Finding, RankFacts, Ranks, by_node
from mpipipe.cluster.doctor.judge.limits import busy
from mpipipe.cluster.doctor.judge.words import who
from mpipipe.cluster.routes import NAMES, fastest, gain, together, why
from mpipipe.planner.sizes import counted, per_second

SECTION = "compute"
WORTH = 1.15  # a gain that is worth another precision
STRAGGLER = 0.6  # of the median speed
CONTENTION = 4.0


def judge_compute(ranks: Ranks, threads: int) -> Iterator[Finding]:
    if not ranks[0].software.kernels:
        text = "the compiled kernels are missing, or of another version: random ops are several times slower"
        yield Finding(SECTION, "note", text, "make setup")
    measured = {r.rank: r.compute for r in ranks if r.compute}
    if measured:
        yield from _routes(list(measured.values()), ranks[0])
        quiet = not any(busy(on_node) for on_node in by_node(ranks).values())
        if quiet:
            yield from _stragglers([r for r in ranks if r.compute])
        yield from _memory(list(measured.values()), quiet)


def _flops_per_s(computes: list[Compute], name: str) -> float:
    """Median over the ranks."""
    return median(r.flops_per_s for c in computes for r in c.routes if r.name == name)


def _routes(computes: list[Compute], first: RankFacts) -> Iterator[Finding]:
    names = [r.name for r in computes[0].routes]
    told = [f"{NAMES[name]} {per_second(_flops_per_s(computes, name), 'flop/s')}" for name in names]
    units = f"; units: {', '.join(first.machine.units)}" if first.machine.units else "; no bf16 units"
    threads = counted(computes[0].threads, "thread")
    yield Finding(SECTION, "ok", f"matrix products, {threads}: {', '.join(told)}{units}")
    routes = together([c.routes for c in computes])
    yield Finding(SECTION, "ok", f"kernels.gemm=auto would take {why(routes)}; each model is measured itself")
    faster = gain(routes, "bf16") / gain(routes, fastest(routes))
    if faster > WORTH:
        text = f"bf16 would be {faster:.1f}x faster for matrix products here, if its precision will do"
        yield Finding(SECTION, "note", text, "train.precision=bf16")


def _stragglers(ranks: Ranks) -> Iterator[Finding]:
    """The plan gives a slow rank less work, but something is amiss there."""
    speeds = {r.rank: _flops_per_s([r.compute], "mkl") for r in ranks if r.compute}
    usual = median(speeds.values())
    slow = [r for r in ranks if speeds[r.rank] < STRAGGLER * usual]
    if slow:
        slowest = per_second(min(speeds.values()), "flop/s")
        text = f"{who(slow)}: {slowest}, the median rank has {per_second(usual, 'flop/s')}"
        hosts = list(dict.fromkeys(r.machine.host for r in slow))
        slurm = slow[0].launch.launcher == "srun"
        yield Finding(SECTION, "note", text, f"sbatch --exclude={','.join(hosts[:8])}" if slurm else "")


def _memory(computes: list[Compute], quiet: bool) -> Iterator[Finding]:
    together = median(c.copy_bytes_per_s for c in computes)
    each_alone = [c.copy_alone_bytes_per_s for c in computes if c.copy_alone_bytes_per_s]
    alone = median(each_alone or [together])  # where the first ranks of all nodes failed
    text = f"memory: {per_second(alone, 'B/s')} for one thread alone"
    if len(computes) > 1:
        less = f"{alone / together:.1f}x less"
        text += f", {per_second(together, 'B/s')} each while all ranks of the node copy ({less})"
    if quiet and alone > CONTENTION * together:
        text += "; fewer ranks per node, on more nodes, update and normalise faster"
        yield Finding(SECTION, "note", text)
    else:
        yield Finding(SECTION, "ok", text)
