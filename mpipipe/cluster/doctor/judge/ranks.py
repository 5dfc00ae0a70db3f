"""Who takes part, in which order, and whether all are the same where they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from mpipipe.cluster.doctor.facts import Finding, RankFacts, Ranks, by_node
from mpipipe.cluster.doctor.judge.words import is_open_mpi, listed, start_line, who
from mpipipe.native import FORCED, SETS
from mpipipe.planner.sizes import counted

SECTION = "ranks"
SAME: dict[str, Callable[[RankFacts], str]] = {
    "Python": lambda r: r.software.python,
    "PyTorch": lambda r: r.software.torch,
    "numpy": lambda r: r.software.numpy,
    "mpi4py": lambda r: r.software.mpi4py,
    "the MPI library": lambda r: r.mpi.library if r.mpi else "none",
    "the version of mpipipe": lambda r: r.software.mpipipe,
    "the source of mpipipe": lambda r: r.software.code[:12],
    "the compiled kernels": lambda r: r.software.kernels or "none",
    "what torch sees of accelerators": lambda r: r.software.accelerators or "none",
}
# instruction sets of the kernels, of one kind of machine after the other
BEST_FIRST = [name for sets in SETS.values() for name in sets]
# the smallest set of instructions that all have is what all must then use
NARROWER = "export ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2"


def judge_ranks(ranks: Ranks, threads: int) -> Iterator[Finding]:
    nodes = by_node(ranks)
    counts = [len(on_node) for on_node in nodes.values()]
    each = f", {counts[0]} on each" if len(set(counts)) == 1 and len(counts) > 1 else ""
    if not each and len(counts) > 1:
        each = f", {listed(counts)} on them"
    hosts = listed([on_node[0].machine.host for on_node in nodes.values()])
    yield Finding(
        SECTION, "ok", f"{counted(len(ranks), 'rank')} on {counted(len(nodes), 'node')}{each}: {hosts}"
    )
    yield from _software(ranks)
    yield from _processors(ranks)
    yield from _order(ranks, len(nodes))


def _software(ranks: Ranks) -> Iterator[Finding]:
    first = ranks[0]
    differing = [what for what, value in SAME.items() if any(value(r) != value(first) for r in ranks)]
    for what in differing:
        value = SAME[what]
        others = [r for r in ranks if value(r) != value(first)]
        text = f"{what} differs: {value(first)} on {who([first])}, {value(others[0])} on {who(others)}"
        yield Finding(SECTION, "PROBLEM", text, _one_environment(first, others[0], len(ranks)))
    if not differing:
        s = first.software
        libraries = f"Python {s.python}, PyTorch {s.torch}, numpy {s.numpy}, mpi4py {s.mpi4py}"
        sets = listed(list(dict.fromkeys(r.software.kernel_set for r in ranks)))
        kernels = f"{s.kernels} ({sets})" if s.kernels else "missing"
        own = f"mpipipe {s.mpipipe}, kernels {kernels}"
        yield Finding(SECTION, "ok", f"{libraries}, {own}")


def _one_environment(first: RankFacts, other: RankFacts, size: int) -> str:
    if first.start.python != other.start.python:
        return start_line(first, size, command=f"{first.start.python} -m mpipipe doctor")
    prefix = first.start.prefix
    return f"rsync -a {prefix}/ {other.machine.host}:{prefix}/  # and the sources; or share both"


def _processors(ranks: Ranks) -> Iterator[Finding]:
    first = ranks[0]
    others = [r for r in ranks if r.software.instruction_set != first.software.instruction_set]
    if others:
        text = (
            f"instruction sets differ, so bits would: {first.software.instruction_set} on rank 0, "
            f"{others[0].software.instruction_set} on {who(others)}; take nodes of one kind, or narrow all"
        )
        yield Finding(SECTION, "PROBLEM", text, NARROWER)
        return
    sets = {r.software.kernel_set.partition(",")[0] for r in ranks} - {""}
    if len(sets) > 1:
        least = next(name for name in reversed(BEST_FIRST) if name in sets)
        text = (
            f"the kernels are compiled for unlike processors: {listed(sorted(sets))}; bits=fast needs one set"
        )
        yield Finding(SECTION, "note", text, f"export {FORCED}={least}")
    others = [r for r in ranks if r.machine.processor != first.machine.processor]
    text = f"{first.machine.processor}, {first.software.instruction_set}"
    if others:
        other = f"{others[0].machine.processor} on {who(others)}"
        text = f"processors differ: {first.machine.processor} on rank 0, {other}"
        yield Finding(SECTION, "note", f"{text}; the plan gives faster ranks more work")
    else:
        yield Finding(SECTION, "ok", text)
    if first.software.accelerators:
        yield Finding(SECTION, "ok", f"{first.software.accelerators}, by pipeline.device=auto")


def _order(ranks: Ranks, nodes: int) -> Iterator[Finding]:
    """Neighbouring stages talk to each other, so neighbouring ranks belong on one node."""
    crossing = sum(a.node != b.node for a, b in pairwise(ranks))
    if crossing <= nodes - 1:
        return
    text = f"{crossing} of {len(ranks) - 1} neighbouring ranks are on different nodes, {nodes - 1} would do"
    first = ranks[0]
    if first.launch.launcher == "srun":
        fix = start_line(first, len(ranks), "--distribution=block")
    else:
        fix = start_line(first, len(ranks), *(["--map-by slot"] if is_open_mpi(first) else []))
    yield Finding(SECTION, "note", text, fix)
