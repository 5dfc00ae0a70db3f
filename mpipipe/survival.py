"""What a run keeps so that it outlives its ranks, and what it takes up again when one was lost.

    RankLost -> survivors -> plan for them -> newest version that is whole among them -> its tensors, by name,
    to their new owners -> new mirrors, at once

Where a rank was lost together with its partner the newest checkpoint serves, or the start of the run; so does
a checkpoint that is newer than the mirrors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpipipe.cluster.comm import Communicator
from mpipipe.graph.variants import Variants
from mpipipe.planner.mirrors import mirror_bytes
from mpipipe.planner.search import cut_indices, expect, program_for, too_full
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.mirrors import Found, Mirrors, Received, fetch, newest_whole
from mpipipe.values import Costs, Layout, Plan, Program

WORTH = 0.03  # of a step, that a plan around a slow rank must gain


@dataclass(frozen=True)
class Recovery:
    """What one recovery came to, the same on every rank but for its seconds."""

    lost: tuple[int, ...]  # ranks, by the numbers that they had at first
    step: int  # steps done where the run goes on
    replayed: int  # steps that had been done and are done again
    source: str  # for people: where the state is from
    seconds: float


class Survival:
    """The mirrors of one rank: those of its world, and until they are whole those of the world before."""

    def __init__(self) -> None:
        self._kept: list[Mirrors] = []

    def begin(self, comm: Communicator, every: int) -> None:
        """Mirrors every so many steps from here on; 0 = none."""
        self._kept = [Mirrors(comm, every)] if every and comm.size > 1 else []

    def after_step(self, step: int, trainer: Trainer) -> None:
        """`step` steps are done. Collective."""
        for mirrors in self._kept[-1:]:
            mirrors.commit()
            if step % mirrors.every == 0:
                _take(mirrors, step, trainer)

    def keep(self, comm: Communicator, step: int, trainer: Trainer) -> None:
        """The state as it is, for another layout to take up, also where there are no mirrors. Collective."""
        mirrors = self._kept[-1] if self._kept else Mirrors(comm, 0)
        mirrors.commit()
        if all(key.step != step for key in mirrors.whole()):
            _take(mirrors, step, trainer)
            mirrors.commit()
        self._kept = [mirrors]

    def find(self, comm: Communicator) -> Found | None:
        """As `newest_whole`; the memory of other versions is given back. Collective."""
        found = newest_whole(comm, self._kept)
        if found is not None:
            for mirrors in self._kept:
                mirrors.keep_only(found.key.step)
        return found

    def fetch(self, comm: Communicator, found: Found, variants: Variants, layout: Layout) -> Received:
        """What this rank needs of a version. Collective."""
        return fetch(comm, self._kept, found, _needed(found.specs, variants, layout, comm.rank))

    def begin_anew(self, comm: Communicator, every: int, step: int, trainer: Trainer) -> None:
        """As `begin`, in a new world: the first version is made now, and the old ones go when it is whole
        everywhere. Collective."""
        if every and comm.size > 1:
            mirrors = Mirrors(comm, every)
            self._kept.append(mirrors)
            _take(mirrors, step, trainer)
            mirrors.commit()
        self._kept = self._kept[-1:] if every and comm.size > 1 else []


def _take(mirrors: Mirrors, step: int, trainer: Trainer) -> None:
    mirrors.take(step, trainer.tensors(), trainer.optimizer_numbers())


def _needed(names: Iterable[str], variants: Variants, layout: Layout, rank: int) -> set[str]:
    """Weights that the stages of a rank own or read, optimizer state of those that they own."""
    mine = [stage for stage, ranks in enumerate(layout.ranks) if rank in ranks]
    owned = {name for name, stage in variants.stage_of_param(layout.cuts).items() if stage in mine}
    codes = (variants.code("train", variants.first, layout.cuts, stage) for stage in mine)
    read = owned | {name for code in codes for name, _ in code.leaves}
    return {name for name in names if name in read or name.rpartition("/")[0] in owned}


def fits_still(costs: Costs, plan: Plan, group_names: Sequence[str]) -> bool:
    """Whether a plan may stay though some of its ranks are others now, those of `costs`: they are as many, it
    fits into their memory, and they are as fast."""
    layout = plan.layout
    if layout.n_ranks != len(costs.cluster.devices):
        return False
    program = program_for(layout, plan.numerics, costs.ties, group_names)
    now = expect(costs, layout, program, group_names)[0]
    return (
        not too_full(now.peak_bytes, costs.cluster) and now.step_s <= (1.0 + WORTH) * plan.prediction.step_s
    )


def stays_as_it_is(
    costs: Costs, before: Plan, after: Plan, program: Program, group_names: Sequence[str]
) -> tuple[bool, str]:
    """Of two plans, the second one made for ranks as slow as in `costs`: whether the first one stays, and
    what to say. program: that of the first."""
    now_s, new_s = expect(costs, before.layout, program, group_names)[0].step_s, after.prediction.step_s
    if new_s > (1.0 - WORTH) * now_s:
        return True, f"the plan stays: no other is more than {WORTH:.0%} faster while that rank is so slow"
    if not before.layout.mirror_every:  # on the way the state is there once more, and that of another rank
        plans = (before, after)
        held = [mirror_bytes(costs, p.layout, cut_indices(p.layout, group_names)) for p in plans]
        peaks = [int(max(of)) for of in zip(*(p.prediction.peak_bytes for p in plans), strict=True)]
        if too_full([p + int(max(of)) for p, *of in zip(peaks, *held, strict=True)], costs.cluster):
            return True, "the plan stays: there is no room for the copies by which another one takes over"
    return False, f"planned anew: a step is predicted to take {new_s:.3g} s; as it was, {now_s:.3g} s"
