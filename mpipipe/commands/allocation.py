"""`python -m mpipipe plan config.yaml --from-allocation`, inside a Slurm job: ranks per node, threads and
binding for its nodes. `python -m mpipipe launch` starts them so.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from mpipipe.cluster.doctor.facts import Binding
from mpipipe.cluster.doctor.machine import binding
from mpipipe.cluster.slurm import (
    Allocation,
    Assignment,
    allocation,
    assign,
    cores_per_node,
    domains_here,
    most_threads,
    spread,
    told,
)
from mpipipe.commands import run
from mpipipe.commands.job import JobRun, add_arguments, run_of_job
from mpipipe.commands.output import check_folder, write_output, writing
from mpipipe.config import load
from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.per_node import Split, splits
from mpipipe.report.plan_file import read_plan
from mpipipe.values import Plan, to_json


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe plan --from-allocation",
        description="ranks per node, threads and binding for the nodes of this Slurm job",
    )
    add_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write them there, for launch --assignment")
    a = parser.parse_intermixed_args(list(argv))
    return run(lambda: _show(a))


def _show(a: argparse.Namespace) -> None:
    if a.output:
        check_folder(a.output)
    assigned, lines = assignment(a)
    print(*lines, sep="\n")
    if a.output:
        with writing(a.output):
            write_output(Path(a.output), to_json(assigned) + "\n")


def assignment(a: argparse.Namespace) -> tuple[Assignment, list[str]]:
    """With a line each for people. a: see `job.add_arguments`. Raises LaunchError outside a Slurm job."""
    given, here, job = allocation(os.environ), binding(), run_of_job(a, os.environ)
    cores = cores_per_node(given, here)
    per_node: Sequence[int]
    if job.config.pipeline.threads == "auto" and job.threads is None and not given.tasks and not a.plan:
        split, threads_why = _weighed(job, given.nodes, splits(cores, domains_here(here)))
        threads, per_node = split.threads, (split.per_node,) * given.nodes
        ranks_why = "with their threads all cores of a node"
    else:
        plan = read_plan(Path(a.plan)) if a.plan else None
        threads, threads_why = _threads(a, job, given, cores, here, plan)
        per_node, ranks_why = _ranks(a, job, given, cores, threads, plan)
    found = assign(given, per_node, threads, cores)
    return found, list(told(given, found, cores, ranks_why, threads_why))


def _threads(
    a: argparse.Namespace, job: JobRun, given: Allocation, cores: int, here: Binding, plan: Plan | None
) -> tuple[int, str]:
    asked = job.config.pipeline.threads
    if asked != "auto":
        return asked, "as pipeline.threads says"
    if (saved := job.threads) is not None:
        return saved, "as the run has had them before: they decide its bits"
    if plan is not None:
        return plan.numerics.threads, f"as {a.plan} has them (pipeline.threads=auto)"
    if given.tasks:
        return most_threads(given, cores), "all cores of a task (pipeline.threads=auto)"
    return max(1, cores // domains_here(here)), "the cores of a NUMA domain (pipeline.threads=auto)"


def _weighed(job: JobRun, nodes: int, found: Sequence[Split]) -> tuple[Split, str]:
    """The one with the shortest predicted step, and why. Raises the error of the first where none has a
    plan."""
    from mpipipe.commands.nodes import by_split  # torch, where it is needed

    step_s, failed = dict[Split, float](), list[PlanError | DeadlockError]()
    for split, planned in by_split(job.config, found, nodes):
        try:
            step_s[split] = planned.prediction(nodes, split.per_node).step_s
        except (PlanError, DeadlockError) as error:
            failed.append(error)
    if not step_s:
        raise failed[0]
    best = min(step_s, key=step_s.__getitem__)  # of equal ones that with the fewest ranks
    tried = ", ".join(f"{split.text} {s:.3g} s" for split, s in step_s.items())
    one = "one rank with all cores of a node is best; " * (best.per_node == 1 and len(found) > 1)
    return best, f"{one}predicted steps: {tried} (pipeline.threads=auto)"


def _ranks(
    a: argparse.Namespace, job: JobRun, given: Allocation, cores: int, threads: int, plan: Plan | None
) -> tuple[Sequence[int], str]:
    if given.tasks:
        return given.tasks, "the tasks of the job"
    if plan is not None:
        ranks = plan.layout.n_ranks + job.config.run.spares
        if ranks < given.nodes:
            raise PlanError(
                f"{a.plan} is for {ranks} ranks, and the job has {given.nodes} nodes; sbatch --nodes={ranks}"
            )
        return spread(ranks, given.nodes), f"as {a.plan} has them"
    most = max(1, cores // threads)
    if most == 1:
        return (1,) * given.nodes, "each with the cores of a node"
    from mpipipe.commands.nodes import Planned, fastest  # torch, where it is needed

    config = load(a.config, [*a.overrides, f"pipeline.threads={threads}"])
    found = Planned(config, given.nodes).by_ranks_per_node(given.nodes, most)
    tried = ", ".join(f"{n} per node {prediction.step_s:.3g} s" for n, prediction in found.items())
    return (fastest(found),) * given.nodes, f"the shortest predicted step: {tried}"
