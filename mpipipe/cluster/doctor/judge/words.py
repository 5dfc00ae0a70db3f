"""How findings are worded: numbers with units, who, where, and one line instead of one for each node."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from mpipipe.cluster.doctor.facts import Finding, RankFacts, Ranks, by_node
from mpipipe.cluster.launch import AS_ROOT
from mpipipe.planner.sizes import numbered

SHOWN = 4  # names, before "and 3 more"


def size(nbytes: float) -> str:
    """
    >>> size(3 << 29)
    '1.5 GiB'
    """
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def listed(names: Sequence[object]) -> str:
    """
    >>> listed(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more


def who(ranks: Ranks) -> str:
    """ "rank 3 (n2)", or "ranks 3, 4, 5, 6 and 9 more (n2, n3)"."""
    hosts = listed(list(dict.fromkeys(r.machine.host for r in ranks)))
    return f"{numbered('rank', [r.rank for r in ranks], listed)} ({hosts})"


def for_each_node(ranks: Ranks, judge: Callable[[list[RankFacts]], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of each node; those that differ in their numbers only become one, with the names of the
    nodes and the numbers of the first."""
    nodes = by_node(ranks)
    found: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    for on_node in nodes.values():
        for finding in judge(on_node):
            key = finding.level, re.sub(r"\d[\d.]*", "", finding.text)
            found.setdefault(key, (finding, []))[1].append(on_node[0].machine.host)
    for finding, hosts in found.values():
        where = "" if len(nodes) == 1 else "all nodes: " if len(hosts) == len(nodes) else f"{listed(hosts)}: "
        yield Finding(finding.section, finding.level, where + finding.text, finding.fix)


def start_line(first: RankFacts, ranks: int, *options: str, command: str = "") -> str:
    """The line that starts this command, or another one, on several ranks with the launcher that fits."""
    launch = first.launch
    command = command or launch.command
    if launch.launcher == "srun":
        speaks = "--mpi=pmix" if is_open_mpi(first) else "--mpi=pmi2"
        return " ".join(["srun", speaks, *options, f"-n {ranks}", command])
    found = launch.own_mpirun or launch.mpirun or "mpirun"
    shown = found.rpartition("/")[2] if found == launch.mpirun else found
    root = [AS_ROOT] if launch.by_root and is_open_mpi(first) else []
    return " ".join([shown, *root, *options, f"-n {ranks}", command])


def is_open_mpi(first: RankFacts) -> bool:
    return first.mpi is not None and first.mpi.library.startswith("Open MPI")
