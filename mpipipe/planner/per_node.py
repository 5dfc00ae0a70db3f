"""How many ranks to put on each node, and with how many threads: a plan for each way that its cores allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.curve import Curve
from mpipipe.planner.sizes import counted
from mpipipe.values import Prediction

ALIKE = 0.03  # relative: what two ways differ by less is noise


@dataclass(frozen=True)
class Split:
    """A way to share out the cores of a node."""

    per_node: int  # ranks
    threads: int  # of each

    @property
    def text(self) -> str:
        return f"{counted(self.per_node, 'rank')} x {counted(self.threads, 'thread')}"


def splits(cores: int, domains: int) -> list[Split]:
    """Those worth a plan, few ranks first: one rank with all cores, one in each NUMA domain, and two, four
    ... in each, where they use every core.

    >>> [split.per_node for split in splits(96, 6)], splits(7, 2)
    ([1, 6, 12, 24, 48, 96], [Split(per_node=1, threads=7), Split(per_node=2, threads=3)])
    """
    domains = min(domains, cores)
    most = cores // domains
    numbers = {1, domains} | {n for i in range(most.bit_length()) if cores % (n := domains << i) == 0}
    return [Split(n, cores // n) for n in sorted(numbers)]


def best_split(curves: Mapping[Split, Curve]) -> Split:
    """That of the best knee: as `curve.knee_of` weighs them, but by nodes, as ranks have other numbers of
    cores; of equal ones the first."""

    def benefit(split: Split) -> float:
        knee = curves[split].at_knee
        return knee.samples_per_s / knee.nodes / knee.step_s

    return max(curves, key=benefit)


def by_ranks_per_node(planned: Callable[[int], Prediction], most: int) -> dict[int, Prediction]:
    """What plans with 1, 2, 4 ... and `most` ranks per node will do, but for those that have no plan.

    planned: for a number of ranks per node. Raises the PlanError or DeadlockError of the fewest where no
    number has a plan.
    """
    found: dict[int, Prediction] = {}
    failed: list[PlanError | DeadlockError] = []
    for per_node in sorted({1 << i for i in range(most.bit_length())} | {most}):
        try:
            found[per_node] = planned(per_node)
        except (PlanError, DeadlockError) as error:
            failed.append(error)
    if not found:
        raise failed[0]
    return found
