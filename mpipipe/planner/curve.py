"""What more ranks would bring: a plan for each number of them.

The knee is the level with the largest efficiency / step time, where the benefit per unit of cost is largest
(Eager, Zahorjan and Lazowska 1989, "Speedup versus efficiency in parallel systems"). Twice as many ranks
pass it on while they are at least 1.41 times as fast, that is, while 41 % of what they could add arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.alternatives import first_sentence, why_no_plan
from mpipipe.values import Cluster, Prediction, Value


@dataclass(frozen=True)
class Level(Value):
    """A number of ranks, and what the plan for them is predicted to do."""

    ranks: int
    nodes: int
    step_s: float
    samples_per_s: float
    efficiency: float  # samples per second and rank, over those of the smallest level that fits
    bubble: float
    peak_bytes: int  # of the fullest rank
    node_hours: float  # for `Curve.steps`


@dataclass(frozen=True)
class Misfit(Value):
    """A number of ranks for which there is no plan."""

    ranks: int
    why: str


@dataclass(frozen=True)
class Curve(Value):
    """levels and misfits ascend in ranks. steps: of an epoch, or 1,000 where the data have no end."""

    levels: tuple[Level, ...]
    misfits: tuple[Misfit, ...]
    steps: float
    epoch: bool
    knee: int  # ranks
    end: str  # why the cluster has no more ranks than the largest level; "": it has, or nobody has asked

    @property
    def at_knee(self) -> Level:
        return next(level for level in self.levels if level.ranks == self.knee)


def resource_curve(
    planned: Callable[[Cluster], Prediction],
    batch: int,
    ranks: Sequence[int],
    cluster_of: Callable[[int], Cluster],
    train_samples: int | None = None,
) -> Curve:
    """Plans for each number of `ranks`, ascending; one without a plan is a `Misfit`.

    planned: what the plan for all ranks of a cluster will do; raises as `make_plan` does. batch: samples of a
    step. cluster_of(n): the cluster with n ranks; raises PlanError where it has fewer. train_samples: of an
    epoch; None = the data have no end. Raises the PlanError of the last one where there is no plan for any.
    """
    steps = 1000.0 if train_samples is None else train_samples / batch
    levels, misfits = list[Level](), list[Misfit]()
    for n in ranks:
        try:
            cluster = cluster_of(n)
            found = planned(cluster)
        except (PlanError, DeadlockError) as error:
            if not levels and n == ranks[-1]:
                raise
            misfits.append(Misfit(n, why_no_plan(planned, cluster_of, n, error)))
            continue
        levels.append(_level(cluster, found, batch, steps, levels[0] if levels else None))
    end = _end(cluster_of, ranks[-1])
    return Curve(tuple(levels), tuple(misfits), steps, train_samples is not None, knee_of(levels), end)


def _end(cluster_of: Callable[[int], Cluster], most: int) -> str:
    try:
        cluster_of(most + 1)
    except PlanError as error:
        return first_sentence(error)
    return ""


def _level(cluster: Cluster, found: Prediction, batch: int, steps: float, first: Level | None) -> Level:
    n, nodes, per_s = len(cluster.devices), len(set(cluster.node_of_rank)), batch / found.step_s
    return Level(
        ranks=n,
        nodes=nodes,
        step_s=found.step_s,
        samples_per_s=per_s,
        efficiency=per_s / n / (first.samples_per_s / first.ranks) if first else 1.0,
        bubble=found.bubble,
        peak_bytes=max(found.peak_bytes),
        node_hours=nodes * found.step_s * steps / 3600.0,
    )


def knee_of(levels: Sequence[Level]) -> int:
    """Ranks of the level with the largest efficiency / step time; of equal ones the fewest."""
    return max(levels, key=lambda level: (level.efficiency / level.step_s, -level.ranks)).ranks
