"""Which stages make a part of their forward again: none where all fits into memory, else what costs least.

A stage's recomputation changes the memory of its own rank alone, and the simulated step grows with the
seconds of each stage: for given cuts and one stage per rank, the fastest mode that fits, stage by stage, has
the shortest step. Of several stages on a rank, the combination with the fewest added seconds is taken; that
no other has a shorter step is not claimed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpipipe.planner.copies import stages_in
from mpipipe.planner.partition import Wish
from mpipipe.planner.simulate import message_bytes, rank_memory_bytes
from mpipipe.planner.stages import stage_ties
from mpipipe.values import RECOMPUTE, Costs, Int64, Layout, Program, Recompute, StageCost

_MOST = 1 << 10  # combinations of modes on one rank that are looked at, beside those of one mode


def with_modes(costs: Costs, layout: Layout, cuts: Sequence[int], program: Program, wish: Wish) -> Layout:
    """The layout with the recomputation that is wished for, or on each rank the one with the fewest seconds
    that fits; where none does, all there is. cuts: its own, as indices."""
    if wish != "auto":
        return replace(layout, recompute=() if wish == "none" else (wish,) * layout.n_stages)
    n, ties = layout.n_stages, stage_ties(costs.ties, cuts)
    plain = stages_in(costs, replace(layout, recompute=()), cuts)
    sizes = message_bytes(program, plain, ties)
    room = [device.memory_bytes - device.base_bytes for device in costs.cluster.devices]
    if not _too_full(program, plain, sizes, room):
        return replace(layout, recompute=())
    of_mode = {m: stages_in(costs, replace(layout, recompute=(m,) * n), cuts) for m in RECOMPUTE}
    chosen: list[Recompute] = ["none"] * n

    def too_full(stage: int) -> bool:
        """Some rank that holds this stage, and the others that are with it."""
        stages = [of_mode[chosen[i % n]][i] for i in range(n * layout.n_copies)]
        return any(_is_full(program, stages, sizes, room, rank) for rank in layout.ranks[stage])

    for rank in dict.fromkeys(layout.order):
        mine = [stage for stage, on in enumerate(layout.order) if on == rank]
        if not too_full(mine[0]):
            continue
        some = itertools.islice(itertools.product(RECOMPUTE, repeat=len(mine)), _MOST)
        alike = ((mode,) * len(mine) for mode in RECOMPUTE)
        tried = dict.fromkeys([*alike, *some])  # a set's order is another one in each process
        for modes in sorted(tried, key=lambda modes: _backward_s(of_mode, mine, modes)):
            for s, mode in zip(mine, modes, strict=True):
                chosen[s] = mode
            if not too_full(mine[0]):
                break
    return replace(layout, recompute=tuple(chosen) if set(chosen) != {"none"} else ())


def _too_full(
    program: Program, stages: Sequence[StageCost], sizes: Sequence[Int64], room: Sequence[int]
) -> bool:
    """Some rank."""
    return any(_is_full(program, stages, sizes, room, rank) for rank in range(len(program.codes)))


def _is_full(
    program: Program, stages: Sequence[StageCost], sizes: Sequence[Int64], room: Sequence[int], rank: int
) -> bool:
    return int(rank_memory_bytes(program, stages, sizes, rank).max(initial=0)) > room[rank]


def wish_of(layout: Layout) -> Wish:
    """What a plan with these modes may have been asked for, so that another one can be compared with it."""
    alike = layout.recompute and len({*layout.recompute}) == 1
    return layout.recompute[0] if alike else "auto"


def _backward_s(
    of_mode: Mapping[Recompute, Sequence[StageCost]], stages: Sequence[int], modes: Sequence[Recompute]
) -> float:
    return sum(of_mode[mode][s].bwd_input_s for s, mode in zip(stages, modes, strict=True))
