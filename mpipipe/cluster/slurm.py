"""The nodes of a Slurm job, and how many ranks, threads and cores each of them is to have.

    environment of the batch script -> Allocation -> Assignment -> the launcher's line (starting.py)

The names are those of sbatch(1), "Output environment variables".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mpipipe.cluster.doctor.facts import Binding
from mpipipe.cluster.launch import binding_advice
from mpipipe.errors import LaunchError
from mpipipe.planner.sizes import counted
from mpipipe.values import Value


@dataclass(frozen=True)
class Allocation:
    """cores: of the job on each node, as Slurm counts them. The other two where they were asked for."""

    cores: tuple[int, ...]
    tasks: tuple[int, ...] = ()  # on each node
    cores_per_task: int | None = None

    @property
    def nodes(self) -> int:
        return len(self.cores)


@dataclass(frozen=True)
class Assignment(Value):
    """What a launcher is asked for."""

    per_node: tuple[int, ...]  # ranks
    threads: int  # of each rank
    bound: bool  # each rank to cores of its own

    @property
    def ranks(self) -> int:
        return sum(self.per_node)


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Of the job whose batch script this is. Raises LaunchError outside one."""
    cores = environ.get("SLURM_JOB_CPUS_PER_NODE", "")
    if not cores:
        raise LaunchError(
            "this is not a Slurm job (there is no SLURM_JOB_CPUS_PER_NODE): submit one, `sbatch "
            "slurm/train.sh config.yaml`, or get nodes by salloc first"
        )
    asked = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    return Allocation(
        cores=expanded(cores),
        tasks=expanded(environ["SLURM_TASKS_PER_NODE"]) if asked else (),
        cores_per_task=int(per_task) if per_task.isdigit() else None,
    )


def expanded(by_node: str) -> tuple[int, ...]:
    """Numbers as Slurm writes them, node by node.

    >>> expanded("4(x2),2")
    (4, 4, 2)
    """
    parts = (re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in by_node.split(","))
    return tuple(int(part[1]) for part in parts if part for _ in range(int(part[2] or 1)))


def compressed(by_node: Sequence[int]) -> str:
    """Inverse of `expanded`.

    >>> compressed((4, 4, 2))
    '4(x2),2'
    """
    runs = ((number, len(list(run))) for number, run in groupby(by_node))
    return ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in runs)


def cores_per_node(given: Allocation, here: Binding) -> int:
    """That the ranks of any node can have to themselves; hyperthreads are no cores. here: of the batch
    script, to which Slurm leaves all that the job has on the first node. Where it counts as many as there are
    cores here, it counts cores, as slurm.conf may have it."""
    counts_cores = given.cores[0] == len(here.siblings)
    hyperthreads = 1 if counts_cores else max(1, len(here.usable) // len(here.siblings))
    return max(1, min(cores_here(here), min(given.cores) // hyperthreads))


def spread(ranks: int, nodes: int) -> tuple[int, ...]:
    """As even as it goes, the first nodes have the most."""
    return tuple(len(range(node, ranks, nodes)) for node in range(nodes))


def most_threads(given: Allocation, cores: int) -> int:
    """Of each task, without sharing cores: Slurm may count hyperthreads in `cores_per_task`."""
    each = max(1, cores // max(given.tasks))
    return min(given.cores_per_task or each, each)


def cores_here(here: Binding) -> int:
    """That ranks of this node can have to themselves; hyperthreads are no cores."""
    return max(1, min(here.quota, len(here.siblings)))


def domains_here(here: Binding) -> int:
    """NUMA domains that this process may use."""
    return max(1, sum(not set(domain).isdisjoint(here.usable) for domain in here.numa))


def assign(given: Allocation, per_node: Sequence[int], threads: int, cores: int) -> Assignment:
    """Ranks are bound where each can have cores of its own. cores: see `cores_per_node`."""
    return Assignment(tuple(per_node), threads, bound=max(per_node) * threads <= cores)


def told(given: Allocation, found: Assignment, cores: int, ranks_why: str, threads_why: str) -> Iterator[str]:
    """A line each for people: nodes, ranks, threads, binding."""
    claimed, on_node = min(given.cores), max(found.per_node)
    fewer = f"; Slurm counts {claimed}, hyperthreads or cores that are not there" if cores < claimed else ""
    yield f"nodes: {given.nodes}, with {counted(cores, 'core')} each{fewer}"
    yield f"ranks: {found.ranks}, {compressed(found.per_node)} by node, {ranks_why}"
    yield f"threads: {found.threads} per rank, {threads_why}"
    if found.bound:
        yield f"binding: each rank to {counted(found.threads, 'core')} of its own"
    else:
        yield f"binding: none, as {on_node} x {found.threads} threads are more than the cores of a node"
    if advice := binding_advice(cores, on_node, found.threads, cores):
        yield f"note: {advice}"
