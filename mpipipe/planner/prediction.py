"""Program -> Prediction: what a step of a program takes, simulated, and whether it fits into memory.

`expect` and, with a wish for recomputation, `expect_with` say it in any case; `predict` and `predict_with`
raise PlanError where a rank has too little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.bounds import uneven_bound_s, work_bound_s
from mpipipe.planner.copies import fastest_copy, loaded, stages_in
from mpipipe.planner.crowded import is_crowded
from mpipipe.planner.mirrors import mirror_bytes, mirror_s
from mpipipe.planner.misfit import MORE_MEMORY, SMALLER
from mpipipe.planner.partition import Wish
from mpipipe.planner.placing import any_order_bound_s
from mpipipe.planner.programs import cut_indices, program_for
from mpipipe.planner.recompute import with_least, with_mode
from mpipipe.planner.schedules import grid, is_of_file, stashes
from mpipipe.planner.schedules.orders import is_even, is_plain
from mpipipe.planner.simulate import message_bytes, rank_memory_bytes, simulate, times_of
from mpipipe.planner.sizes import size_text
from mpipipe.planner.stages import Cuts, stage_ties
from mpipipe.values import Cluster, Costs, Int64, Layout, Op, Plan, Prediction, Program, Timeline, makespan_s

_THOUGH = {  # by the wish for recomputation
    "auto": " even with full recomputation (none and selective were tried, too)",
    "full": " even with full recomputation",
}
LIKE = 1.02  # a step that is longer by less is as good: a prediction cannot tell them apart
EQUAL = 1.003  # likewise, of a schedule that was asked for by name
FOR_MEMORY = 1.03  # a step may be so much longer for memory that is worth it; no prediction is that exact
MEMORY_COUNTS = 0.2  # of plans that are nearly as fast: beside the step, relative


def predict(
    costs: Costs, layout: Layout, program: Program, bound_s: float | None = None, finest: bool = False
) -> tuple[Prediction, Timeline]:
    """What `program` will take. bound_s: `step_bound_s`, where it is known already, as it is the same for
    every cut. Raises PlanError if a rank's memory is too small for it. finest: a micro-batch is one sample,
    so that smaller ones are no way out."""
    prediction, timeline = expect(costs, layout, program, bound_s)
    ways_out = ["let the planner choose the cuts", *_smaller(finest), "use more ranks"]
    _check_memory(timeline, costs.cluster, lambda rank: ways_out)
    return prediction, timeline


def predict_with(
    wish: Wish, costs: Costs, layout: Layout, program: Program, bound_s: float | None = None,
    finest: bool = False,
) -> tuple[Layout, Prediction]:  # fmt: skip
    """As `expect_with`; raises PlanError if a rank's memory is too small for it. finest: as of `predict`."""
    layout, prediction, timeline = expect_with(wish, costs, layout, program, bound_s)
    own_order = layout.schedule if is_of_file(layout.schedule) else ""

    def ways_out(rank: int) -> list[str]:
        """What would do, or may: more stages only where one of this rank can be cut, and not for an order
        that is of its own number of ranks."""
        sizes = np.diff([0, *cut_indices(layout, costs.names), len(costs.groups)])
        whole = all(sizes[stage] == 1 for stage, on in enumerate(layout.ranks) if rank in on)
        enough = layout.n_stages + layout.n_stages // layout.ranks_per_copy <= len(costs.groups)
        more: list[str] = []
        if not own_order and not whole and enough:
            more = ["use more ranks"] + ["fewer replicas"] * (layout.n_copies > 1)
            more = more if layout.is_even else ["give pipeline.replicas more numbers"]
        with_less = [] if wish in ("auto", "full") else ["set pipeline.recompute=auto"]
        return [*with_less, *_smaller(finest), *more, MORE_MEMORY]

    _check_memory(timeline, costs.cluster, ways_out, own_order, _THOUGH.get(wish, ""))
    return layout, prediction


def expect(
    costs: Costs, layout: Layout, program: Program, bound_s: float | None = None
) -> tuple[Prediction, Timeline]:
    """As `predict`, whether the memory is there or not."""
    cuts = cut_indices(layout, costs.names)
    ties, stages = stage_ties(costs.ties, cuts), stages_in(costs, layout, cuts)
    norm_s = norm_seconds(costs.cluster, layout.n_ranks)
    timeline = simulate(program, stages, loaded(costs.cluster, layout), norm_s, ties)
    bound = least_step_s(costs, program) if bound_s is None else bound_s
    step = timeline.makespan_s
    bases = [device.base_bytes for device in costs.cluster.devices]
    if layout.mirror_every:
        step += mirror_s(costs, layout, cuts) / layout.mirror_every
        mirrors = mirror_bytes(costs, layout, cuts).tolist()
        bases = [base + taken for base, taken in zip(bases, mirrors, strict=False)]
    memory = tuple(held + base for held, base in zip(timeline.memory_bytes, bases, strict=False))
    timeline = replace(timeline, memory_bytes=memory)
    prediction = Prediction(
        step_s=step,
        bubble=timeline.bubble,
        bubble_rank=timeline.bubble_rank,
        peak_bytes=timeline.peak_bytes,
        lower_bound_s=bound,
        gap=step / bound - 1.0 if bound else 0.0,
    )
    return prediction, timeline


def expect_plan(plan: Plan, costs: Costs) -> tuple[Prediction, Timeline]:
    """As `expect`, of a plan as it is, with these costs."""
    program = program_for(plan.layout, plan.numerics, costs.ties, costs.names)
    return expect(costs, plan.layout, program)


def expect_with(
    wish: Wish, costs: Costs, layout: Layout, program: Program, bound_s: float | None = None,
) -> tuple[Layout, Prediction, Timeline]:  # fmt: skip
    """As `expect`, and the layout with the recomputation that is wished for; auto: none, or what is needed
    for it to fit, but for mirrors."""
    layout = with_mode(layout, "none" if wish == "auto" else wish)
    prediction, timeline = expect(costs, layout, program, bound_s)
    if wish == "auto" and too_full(timeline.peak_bytes, costs.cluster) is not None:
        less = with_least(costs, layout, cut_indices(layout, costs.names), program)
        if less != layout:
            return less, *expect(costs, less, program, bound_s)
    return layout, prediction, timeline


def least_step_s(costs: Costs, program: Program) -> float:
    """No cut, and no order of ranks, makes a step of such a program shorter."""
    n_ranks, n_copies = len(program.codes), len(program.copies)
    norm_s = norm_seconds(costs.cluster, n_ranks)
    if not is_even(program):
        most = max(len(program.holders(stage)) for stage in range(program.n_stages))
        return uneven_bound_s(costs, program.n_micro, most, n_ranks, norm_s)
    filled = is_plain(program) and not is_crowded(costs.cluster)  # else no core waits while a pipeline fills
    bound = any_order_bound_s if filled else work_bound_s
    return bound(fastest_copy(costs, n_ranks, n_copies), len(program.share(0)), n_ranks // n_copies, norm_s)


def least_of(costs: Costs, layout: Layout, cuts: Cuts, program: Program) -> float:
    """Seconds of the step without recomputation, which only makes it longer."""
    stages = stages_in(costs, layout, cuts)
    cluster, norm_s = loaded(costs.cluster, layout), norm_seconds(costs.cluster, layout.n_ranks)
    return makespan_s(times_of(program, stages, cluster, norm_s, stage_ties(costs.ties, cuts))[0])


def fullest(plan: Plan) -> float:
    """Of the memory of the rank that has least left, the share that is needed."""
    devices = plan.costs.cluster.devices if plan.costs else ()
    peaks = zip(plan.prediction.peak_bytes, devices, strict=False)
    return max((peak / device.memory_bytes for peak, device in peaks), default=0.0)


def dear(plan: Plan) -> float:
    """By which plans that are nearly as fast are compared: one that is 1 % longer is as dear as one whose
    fullest rank needs 5 % more."""
    return plan.prediction.step_s * math.pow(fullest(plan), MEMORY_COUNTS)


def norm_seconds(cluster: Cluster, n_ranks: int) -> float:
    """Of the norm's collective, a few bytes per parameter: one slow latency per doubling, in any order."""
    spanned = cluster.in_order(range(n_ranks)).spanned
    latencies = [link.latency_s for level, link in cluster.links.items() if level in spanned]
    return math.ceil(math.log2(n_ranks)) * max(latencies, default=0.0)


def _smaller(finest: bool) -> list[str]:
    return [] if finest else [f"use {SMALLER}"]


def too_full(peaks: Sequence[int], cluster: Cluster) -> tuple[int, int] | None:
    """(rank, bytes) where most is missing; None where all fits."""
    short = [(peak - device.memory_bytes, rank) for rank, (peak, device) in
             enumerate(zip(peaks, cluster.devices, strict=False))]  # fmt: skip
    most, rank = max(short)
    return (rank, most) if most > 0 else None


def _check_memory(
    timeline: Timeline, cluster: Cluster, ways_out_of: Callable[[int], Sequence[str]], own_order: str = "",
    though: str = "",
) -> None:  # fmt: skip
    """Shows where in the order it is too much first. ways_out_of: the rank that lacks most -> what may help;
    own_order: the file of the user's that it is from; though: what was tried."""
    peaks = timeline.peak_bytes
    full = too_full(peaks, cluster)
    if full is not None:
        rank, short = full
        has, base = cluster.devices[rank].memory_bytes, cluster.devices[rank].base_bytes
        ways_out = ways_out_of(rank) if base <= has else [MORE_MEMORY]
        actions = [codes[codes[:, 0] <= Op.W, :3] for codes in timeline.program.codes]
        over = int(np.argmax(timeline.memory_bytes[rank] > has))
        before = int((timeline.program.codes[rank][:over, 0] <= Op.W).sum())
        kept = stashes(actions[rank], 1)[before : before + 1]  # none behind the last action
        if own_order and base <= has and (kept > 1).any():
            ways_out = [f"do a backward of this rank sooner in {own_order}", *ways_out]
        moves = f"{', '.join(ways_out[:-1])}, or {ways_out[-1]}" if len(ways_out) > 1 else ways_out[0]
        raise PlanError(
            f"rank {rank} needs {size_text(peaks[rank])} and has {size_text(has)}, {size_text(short)} short"
            f"{though}; {moves}\n{grid(actions, {rank: before})}"
        )


def sizes_of_messages(costs: Costs, layout: Layout, program: Program) -> tuple[Int64, ...]:
    """Bytes of each message instruction, 0 for the others: per rank an array (n,)."""
    cuts = cut_indices(layout, costs.names)
    stages = stages_in(costs, layout, cuts)
    return message_bytes(program, stages, stage_ties(costs.ties, cuts))


def tensor_peak_bytes(costs: Costs, layout: Layout, program: Program) -> tuple[int, ...]:
    """By rank, the most bytes of live tensors in a step. A process needs more: what `predict` says."""
    stages = stages_in(costs, layout, cut_indices(layout, costs.names))
    sizes = sizes_of_messages(costs, layout, program)
    ranks = range(len(program.codes))
    return tuple(int(rank_memory_bytes(program, stages, sizes, rank, tensors=True).max()) for rank in ranks)
