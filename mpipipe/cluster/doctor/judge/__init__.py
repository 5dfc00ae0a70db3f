"""Facts of all ranks in, findings out. Pure: no files, no clocks, no MPI.

Conservative: a PROBLEM is what ends a run, makes it wrong, or makes it several times slower on a quiet
machine; what merely costs something, or may be meant, is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpipipe.cluster.doctor.facts import Finding, Ranks
from mpipipe.cluster.doctor.judge.binding import judge_binding
from mpipipe.cluster.doctor.judge.compute import judge_compute
from mpipipe.cluster.doctor.judge.files import judge_files, judge_start
from mpipipe.cluster.doctor.judge.launch import judge_launch
from mpipipe.cluster.doctor.judge.limits import judge_limits
from mpipipe.cluster.doctor.judge.ranks import judge_ranks
from mpipipe.cluster.doctor.judge.transports import judge_transports

JUDGES: dict[str, Callable[[Ranks, int], Iterator[Finding]]] = {
    "MPI": judge_launch,
    "ranks": judge_ranks,
    "cores": judge_binding,
    "memory and limits": judge_limits,
    "messages": judge_transports,
    "compute": judge_compute,
    "start": judge_start,
    "files": judge_files,
}


def judge(ranks: Ranks, threads: int) -> tuple[Finding, ...]:
    """threads: that each rank is to compute with. What was not measured is not judged."""
    findings = [f for judge_one in JUDGES.values() for f in judge_one(ranks, threads)]
    failed = (f"rank {r.rank} ({r.machine.host}): {text}" for r in ranks for text in r.failed)
    return (*findings, *(Finding("doctor itself", "note", f"could not measure: {text}") for text in failed))
