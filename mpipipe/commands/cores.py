"""Ranks x threads on the cores of a node: every way to share them out, each planned on costs of its own.

Operators do not become faster in proportion to the threads, and a pipeline has a bubble, so neither one rank
with all threads nor a rank on each core is always best: each number of threads is timed here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from mpipipe.cluster.node import cores_available
from mpipipe.cluster.started import as_root
from mpipipe.commands.costing import Costing
from mpipipe.commands.machines import Here
from mpipipe.config import Config
from mpipipe.errors import DeadlockError, PlanError
from mpipipe.graph.variants import Variants
from mpipipe.planner.alternatives import first_sentence
from mpipipe.planner.per_node import ALIKE
from mpipipe.planner.sizes import counted, size_text
from mpipipe.report.progress import number
from mpipipe.report.table import text_table
from mpipipe.values import Plan

_HEADS = ("ranks", "threads each", "step, ms", "samples/s", "idle", "memory per rank", "")


@dataclass(frozen=True)
class Share:
    """One way, and its plan; or why there is none."""

    ranks: int
    threads: int
    plan: Plan | None
    why: str = ""

    @property
    def step_s(self) -> float:
        return self.plan.prediction.step_s if self.plan else float("inf")

    @property
    def text(self) -> str:
        return f"{counted(self.ranks, 'rank')} x {counted(self.threads, 'thread')}"


def ways(cores: int) -> list[tuple[int, int]]:
    """Ranks and threads that use every core, few ranks first.

    >>> ways(6)
    [(1, 6), (2, 3), (3, 2), (6, 1)]
    """
    return [(ranks, cores // ranks) for ranks in range(1, cores + 1) if cores % ranks == 0]


def shares(config: Config, cores: int, variants_of: Callable[[int], Variants]) -> list[Share]:
    """Of one node with these cores. Raises PlanError where this process has fewer, or nothing fits."""
    here = len(cores_available())
    if cores > here:
        raise PlanError(
            f"--cores {cores}: this process may use {counted(here, 'core')}, and each number of threads is "
            "timed here; start it on such a node, or where the launcher gives it all cores"
        )
    captured = cache(variants_of)
    found = [_planned(config, ranks, threads, captured) for ranks, threads in ways(cores)]
    if all(share.plan is None for share in found):
        first = found[0]
        raise PlanError(
            f"--cores {cores}: there is no plan for any ranks x threads; {first.text}: {first.why}"
        )
    return found


def _planned(config: Config, ranks: int, threads: int, variants_of: Callable[[int], Variants]) -> Share:
    own = config.with_pipeline(threads=threads)
    try:
        joint = Costing(own, Here(own, ranks), ranks, variants_of).search()
    except (PlanError, DeadlockError) as error:
        return Share(ranks, threads, None, first_sentence(error))
    return Share(ranks, threads, joint.plan)


def table(found: Sequence[Share], batch: int, width: int = 110) -> str:
    """A row for each way; `<` marks the best."""
    best = min(found, key=lambda share: share.step_s)
    rows = [_row(share, batch, share is best) for share in found]
    last = len(_HEADS) - 1
    return text_table(_HEADS, rows, width, (last,), (last,), gap=2)


def _row(share: Share, batch: int, best: bool) -> tuple[str, ...]:
    ranks, threads = str(share.ranks), str(share.threads)
    if share.plan is None:
        return ranks, threads, "-", "-", "-", "-", share.why
    p = share.plan.prediction
    speed = number(p.step_s * 1e3), number(batch / p.step_s)
    return ranks, threads, *speed, f"{p.bubble:.1%}", size_text(max(p.peak_bytes)), "<" if best else ""


def advice(found: Sequence[Share], config: str, overrides: Sequence[str]) -> str:
    """What to start, in one line and a command."""
    fit = sorted((share for share in found if share.plan), key=lambda share: share.step_s)
    best, second = fit[0], fit[1] if len(fit) > 1 else None
    said = f"best: {best.text}"
    if best.ranks == 1 and len(found) > 1:
        said = f"one rank with all {best.threads} threads is best for these cores"
    if second:
        slower = second.step_s / best.step_s - 1
        said += f"; {second.text} {f'takes {slower:.0%} longer' if slower >= ALIKE else 'is as good'}"
    bind = ["--bind-to", "none"] if best.threads > 1 else []
    launcher = ["mpirun", *as_root(), *bind, "-n", str(best.ranks)] if best.ranks > 1 else []
    overrides = [o for o in overrides if not o.startswith("pipeline.threads=")]
    words = ["python", "-m", "mpipipe.train", config, *overrides, f"pipeline.threads={best.threads}"]
    return f"{said}\n  {shlex.join([*launcher, *words])}"
