"""Which stages make a part of their forward again: none where all fits into memory, else what costs least.

A stage's recomputation changes the memory of its own rank alone, and the simulated step grows with the
seconds of each stage: for given cuts and one stage per rank, the fastest mode that fits, stage by stage, has
the shortest step. Of a few stages on a rank, the combination with the fewest added seconds is taken; of more,
one in which no stage alone could make less again. That no other has a shorter step is not claimed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mpipipe.planner.copies import stages_in
from mpipipe.planner.partition import Wish
from mpipipe.planner.simulate import message_bytes, rank_memory_bytes
from mpipipe.planner.stages import stage_ties
from mpipipe.values import RECOMPUTE, Costs, Layout, Program, Recompute, StageCost

_MOST = 1 << 8  # combinations of modes on one rank up to which all of them are looked at


def with_mode(layout: Layout, mode: Recompute) -> Layout:
    """The same of every stage."""
    return replace(layout, recompute=() if mode == "none" else (mode,) * layout.n_stages)


def with_least(costs: Costs, layout: Layout, cuts: Sequence[int], program: Program) -> Layout:
    """The layout with the recomputation of the fewest seconds that fits on each rank; where none does, all
    there is. cuts: its own, as indices."""
    n, ties = layout.n_stages, stage_ties(costs.ties, cuts)
    of_mode = {mode: stages_in(costs, with_mode(layout, mode), cuts) for mode in RECOMPUTE}
    sizes = message_bytes(program, of_mode["none"], ties)
    room = [device.memory_bytes - device.base_bytes for device in costs.cluster.devices]
    chosen: list[Recompute] = ["none"] * n

    def too_full(stage: int) -> bool:
        """Some rank that holds this stage, and the others that are with it."""
        stages = [of_mode[chosen[i % n]][i] for i in range(n * layout.n_copies)]
        held = ((r, rank_memory_bytes(program, stages, sizes, r)) for r in layout.ranks[stage])
        return any(nbytes.max(initial=0) > room[rank] for rank, nbytes in held)

    for rank in dict.fromkeys(layout.order):
        mine = [stage for stage, on in enumerate(layout.order) if on == rank]
        if not too_full(mine[0]):
            continue
        every = len(RECOMPUTE) ** len(mine) <= _MOST
        tried = itertools.product(RECOMPUTE, repeat=len(mine)) if every else _in_runs(len(mine))
        for modes in sorted(tried, key=lambda modes: _backward_s(of_mode, mine, modes)):
            for s, mode in zip(mine, modes, strict=True):
                chosen[s] = mode
            if not too_full(mine[0]):
                break
        if every or too_full(mine[0]):
            continue
        for s in mine:
            for mode in RECOMPUTE[: RECOMPUTE.index(chosen[s])]:
                before, chosen[s] = chosen[s], mode
                if not too_full(mine[0]):
                    break
                chosen[s] = before
    return replace(layout, recompute=tuple(chosen) if set(chosen) != {"none"} else ())


def _in_runs(n: int) -> Iterable[tuple[Recompute, ...]]:
    """Of n stages: the first ones, which keep most, with one mode, and the rest with another."""
    pairs = itertools.product(RECOMPUTE, repeat=2)
    return dict.fromkeys((first,) * k + (rest,) * (n - k) for first, rest in pairs for k in range(n))


def wish_of(layout: Layout) -> Wish:
    """What a plan with these modes may have been asked for, so that another one can be compared with it."""
    alike = layout.recompute and len({*layout.recompute}) == 1
    return layout.recompute[0] if alike else "auto"


def _backward_s(
    of_mode: Mapping[Recompute, Sequence[StageCost]], stages: Sequence[int], modes: Sequence[Recompute]
) -> float:
    return sum(of_mode[mode][s].bwd_input_s for s, mode in zip(stages, modes, strict=True))
