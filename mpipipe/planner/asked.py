"""What a plan is searched among: numbers of micro-batches, schedules and copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mpipipe.errors import PlanError
from mpipipe.planner.copies import Copies, check_copies, even_blocks, legal_copies, ranks_in_each
from mpipipe.planner.partition import Wish, check_stages, too_many
from mpipipe.planner.schedules import SCHEDULES, check_name, is_of_file, stages_on
from mpipipe.planner.sizes import counted
from mpipipe.values import Numerics

Replicas = Copies | Literal["auto"]  # as a config gives them


@dataclass(frozen=True)
class Asked:
    """What is searched. numerics: with any number of micro-batches; counts: those to look at; schedules:
    the first one is preferred; copies: of the pipeline, or of each stage, likewise; uneven: those of each
    stage that promise most are looked at, too."""

    numerics: Numerics
    counts: tuple[int, ...]
    schedules: tuple[str, ...]
    receive_window: int
    n_ranks: int
    copies: tuple[Copies, ...] = (1,)
    recompute: Wish = "none"
    uneven: bool = False

    def of(self, count: int) -> Numerics:
        """With so many micro-batches."""
        n = self.numerics
        return replace(n, micro_batches=count, micro_batch=math.ceil(n.batch / count))

    @property
    def sizes(self) -> list[int]:
        """Samples of the largest micro-batch for each of the counts, ascending."""
        return sorted({self.of(count).micro_batch for count in self.counts})


def schedules_of(name: str) -> tuple[str, ...]:
    """Those to choose from: with "auto" all; those of one's own come last, as they were registered. Raises
    PlanError for a name that no schedule has."""
    if name == "auto":
        return tuple(SCHEDULES)
    check_name(name)
    return (name,)


def copies_of(replicas: Replicas, numerics: Numerics, n_ranks: int) -> tuple[Copies, ...]:
    """Numbers of copies to choose from: of the pipeline, or of each stage where they are given so. Raises
    PlanError for one that does not fit."""
    if replicas == "auto":
        return tuple(n for n in legal_copies(numerics) if n_ranks % n == 0)
    check_copies(replicas, n_ranks, numerics)
    if isinstance(replicas, tuple) and len({*replicas}) == 1:
        return (replicas[0],)
    return (replicas,)


def check_groups(asked: Asked, n_groups: int) -> None:
    """Raises PlanError where a stage would have no group, however the ranks are shared by replicas."""
    n_ranks, numerics = asked.n_ranks, asked.numerics
    # of a file's order nothing is known here but that each rank has a stage; so of unlike copies below
    per_rank = min(1 if is_of_file(name) else stages_on(name, 1) for name in asked.schedules)
    if not asked.uneven:
        refused = None
        for copies in asked.copies:
            n_each = ranks_in_each(copies, n_ranks)
            try:
                if isinstance(copies, int):
                    check_stages(n_each * per_rank, n_groups, copies, per_rank)
                else:
                    check_stages(n_each, n_groups)
                return
            except PlanError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return
    legal, most_stages = legal_copies(numerics), n_groups // per_rank  # of one for each rank
    fewest = _fewest_stages(n_ranks, legal)
    if fewest <= most_stages:
        return
    if most_stages == 0:
        check_stages(n_ranks * per_rank, n_groups, 1, per_rank)
    most = most_stages * legal[-1]
    start = f"at most {counted(most, 'rank')}"
    if most > n_ranks:
        fit = [n for n in range(1, most + 1) if _fewest_stages(n, legal) <= most_stages]
        start = f"{max(n for n in fit if n < n_ranks)} or {min(n for n in fit if n > n_ranks)} ranks"
    if per_rank > 1:
        start += ", or choose a schedule with one stage on each rank"
    blocks = even_blocks(numerics.micro_batches if len(asked.counts) == 1 else None, numerics.batch, n_ranks)
    more_blocks = (
        f", as pipeline.blocks = {numerics.blocks} allows {counted(legal[-1], 'replica')} at most; or, "
        f"before the first step of a run, set pipeline.blocks=auto and pipeline.max_ranks={n_ranks}"
    )
    helps = _fewest_stages(n_ranks, legal_copies(replace(numerics, blocks=blocks))) <= most_stages
    raise too_many(fewest * per_rank, n_groups, f"start {start}{more_blocks if helps else ''}")


def _fewest_stages(n_ranks: int, legal: Sequence[int]) -> int:
    """With legal numbers of copies that are all the ranks: the largest first is best, as of two the smaller
    one divides the larger one; of fast copies there may be any number."""
    found = 0
    for copies in reversed(legal):
        found, n_ranks = found + n_ranks // copies, n_ranks % copies
    return found


def counts_of(batch: int, blocks: int = 1) -> tuple[int, ...]:
    """For each size of a micro-batch the least number that makes up the batch: those that differ in what a
    micro-batch costs. Multiples of `blocks`, descending. Raises PlanError where there is none."""
    least = (blocks * math.ceil(batch / (size * blocks)) for size in range(1, batch + 1))
    counts = sorted({count for count in least if count <= batch}, reverse=True)
    if not counts:
        raise PlanError(
            f"a batch of {batch} has no number of micro-batches that {blocks} blocks divide; use "
            f"{batch} blocks at most"
        )
    return tuple(counts)
