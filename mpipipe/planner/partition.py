"""Where to cut: an exact minimum of the slowest stage over all cuts of the linear order (`Problem`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpipipe.errors import PlanError
from mpipipe.planner.bounds import bottleneck_bound_s
from mpipipe.planner.misfit import no_cut_text
from mpipipe.planner.problem import Problem
from mpipipe.planner.schedules import build, check_name, kept_micro_batches
from mpipipe.planner.sizes import counted
from mpipipe.planner.stages import Cuts, Ranges
from mpipipe.values import RECOMPUTE, Costs

Wish = Literal["auto", "none", "selective", "full"]  # for recomputation


@dataclass(frozen=True)
class Partition:
    cuts: Cuts  # index of the first group of stages 1 .. S-1
    bottleneck_s: float  # the slowest stage, one micro-batch, links included: the optimum
    lower_bound_s: float  # an independent bound: what no cut at all can undercut
    recomputes: bool = False  # "auto": some stage has to


def partition(
    costs: Costs,
    n_micro: int,
    schedule: str,
    n_stages: int,
    receive_window: int = 0,
    tied: str = "per_use",
    with_update: bool = False,
    explain: bool = True,
    finest: bool = False,
    n_ranks: int | None = None,
    recompute: Wish = "none",
) -> Partition:
    """The cuts with the smallest bottleneck. Stage s runs on rank s; of a schedule with several stages per
    rank, `costs` have a device for each stage (`mpipipe.planner.several`).

    The time of a stage is (forward + backward) / speed + the seconds of its messages on the
    links to both neighbours; its memory is `Ending.memory_bytes` with the stash that `schedule`
    keeps alive. `receive_window` and `tied` only size the receive buffers. `with_update`: the time counts
    the stage's share of the step's one update too, so that it balances m * (F + B) + STEP.

    Raises PlanError if there are more stages than groups or ranks, or if no cut fits into memory:
    then with the stage, the group, the bytes that are missing and the least number of ranks that would do;
    with explain=False without, as to find these takes longer than to find that there is no cut. finest: a
    micro-batch is one sample, so that smaller ones are no way out. n_ranks: as for `build`. recompute: what
    each stage makes again; "auto": the minimum is over the modes of each stage, too.
    """
    check_counts(costs, n_micro, schedule, n_stages)
    kept = kept_micro_batches(build(schedule, n_stages, n_micro, n_ranks))
    ranges = Ranges(costs, receive_window, n_micro, tied, with_update)
    problem = Problem(costs, ranges, kept, RECOMPUTE if recompute == "auto" else (recompute,))
    lower_bound_s = bottleneck_bound_s(ranges.seconds, problem.speed)
    found = problem.best(lower_bound_s)
    if found is None:
        without = "" if problem.modes[-1] == "full" else " without recomputation"
        raise PlanError(
            no_cut_text(problem, schedule, n_micro, finest) if explain else f"no cut fits{without}"
        )
    bottleneck_s, cuts = found
    return Partition(cuts, bottleneck_s, lower_bound_s, recompute == "auto" and not problem.fits(cuts))


def nearest(
    costs: Costs, n_micro: int, schedule: str, n_stages: int, receive_window: int = 0,
    tied: str = "per_use", recompute: Wish = "none",
) -> Cuts:  # fmt: skip
    """Where no cut fits: that of which the rank that lacks most memory lacks least. Arguments as for
    `partition`."""
    kept = kept_micro_batches(build(schedule, n_stages, n_micro))
    ranges = Ranges(costs, receive_window, n_micro, tied)
    modes = RECOMPUTE if recompute == "auto" else (recompute,)
    return Problem(costs, ranges, kept, modes).nearest()[1]


def check_counts(costs: Costs, n_micro: int, schedule: str, n_stages: int) -> None:
    """Raises PlanError where there cannot be a cut, whatever the costs are."""
    n_groups, n_ranks = len(costs.groups), len(costs.cluster.devices)
    check_name(schedule)
    if n_stages < 1 or n_micro < 1:
        raise PlanError(f"{n_stages} stages and {n_micro} micro-batches; both must be at least 1")
    check_stages(n_stages, n_groups, costs.copies)
    if n_stages > n_ranks:
        raise PlanError(f"{n_stages} stages but only {n_ranks} ranks; plan at most {n_ranks} stages")


def check_stages(n_stages: int, n_groups: int, n_copies: int = 1, per_rank: int = 1) -> None:
    """Raises PlanError where a stage would have no group. n_copies: of the pipeline; per_rank: stages."""
    if n_stages > n_groups:
        most = n_groups // per_rank
        each = f", {most} for each replica" if n_copies > 1 else ""
        moves = [f"start at most {counted(most * n_copies, 'rank')}{each}"] if most else []
        if per_rank > 1:
            fewer = f", and at most {counted(n_groups * n_copies, 'rank')}"
            helps = n_stages <= n_groups * per_rank
            moves += ["choose a schedule with one stage on each rank" + ("" if helps else fewer)]
        raise too_many(n_stages, n_groups, ", or ".join([*moves, "train a model of more layers"]))


def too_many(n_stages: int, n_groups: int, moves: str) -> PlanError:
    """Of stages for so many groups. moves: what to do."""
    return PlanError(
        f"{n_stages} stages, and this model can be cut into {counted(n_groups, 'part')} at most; an operator "
        "is never cut, nor parted from those that belong to it, such as a linear layer from its activation; "
        f"{moves}"
    )
