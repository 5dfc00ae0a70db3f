"""How often what the ranks hold is mirrored, where, and what that takes.

Each rank keeps a copy of its weights and optimizer state, and one of those of another rank; two versions of
both, since a new one is no use before all ranks have it. Memory of a rank: 2 * (own + other's).

How often: the interval that loses the least time to mirrors and to steps that are done again, by the first
terms of Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", which with
one term is Young 1974.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.sizes import size_text
from mpipipe.planner.stages import own_bytes
from mpipipe.values import Costs, Int64, Layout, Link, Plan

VERSIONS = 2
# between two failures of one node: 419 on 2,048 nodes in 54 days (Grattafiori et al. 2024, section 3.3.4)
NODE_MTBF_S = 2048 * 54 * 86400 / 419
MOST = 0.03  # of a step's time, whatever failures cost


def partner_shift(node_of_rank: Sequence[int]) -> int:
    """Rank r has its mirror on rank (r + shift) % n: the least shift with most of them on another node.

    >>> partner_shift([0, 0, 1, 1])
    2
    """
    n = len(node_of_rank)
    away = [sum(node_of_rank[r] != node_of_rank[(r + s) % n] for r in range(n)) for s in range(1, n)]
    return 1 + away.index(max(away)) if away else 0


def interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two copies that take `cost_s`, with a failure every `mtbf_s`: Daly 2006,
    equation 37.

    >>> round(interval_s(1.0, 20000.0))
    199
    """
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(cost_s / (2.0 * mtbf_s))
    return math.sqrt(2.0 * cost_s * mtbf_s) * (1.0 + ratio / 3.0 + ratio**2 / 9.0) - cost_s


def state_bytes(costs: Costs, layout: Layout, cuts: Sequence[int]) -> Int64:
    """Weights that each rank owns, a tied one at its first use, and their optimizer state: (n_ranks,)."""
    of_stage = np.add.reduceat(own_bytes(costs), [0, *cuts])
    held = np.zeros(layout.n_ranks)
    for stage, ranks in enumerate(layout.ranks):  # copies of a stage share its optimizer state out
        held[list(ranks)] += of_stage[stage] * (1.0 + costs.state_bytes_per_param_byte / len(ranks))
    return np.ceil(held).astype(np.int64)


def mirror_bytes(costs: Costs, layout: Layout, cuts: Sequence[int]) -> Int64:
    """What the mirrors take on each rank: (n_ranks,)."""
    own = state_bytes(costs, layout, cuts)
    shift = partner_shift(costs.cluster.node_of_rank[: layout.n_ranks])
    return VERSIONS * (own + np.roll(own, shift))


def mirror_s(costs: Costs, layout: Layout, cuts: Sequence[int]) -> float:
    """Of one mirror, where it takes longest, as if nothing else went on meanwhile: the copy, which moves
    about as many bytes as an update, and the transfer, while all ranks send."""
    own, n = state_bytes(costs, layout, cuts), layout.n_ranks
    shift, cluster = partner_shift(costs.cluster.node_of_rank[:n]), costs.cluster
    copy_s_per_byte = costs.step_s_per_byte / (1.0 + costs.state_bytes_per_param_byte)
    links = [cluster.link(r, (r + shift) % n).shared(1.0) for r in range(n)]
    pairs: list[tuple[Link, int]] = list(zip(links, own.tolist(), strict=True))
    return max(link.seconds(nbytes) + copy_s_per_byte * nbytes for link, nbytes in pairs)


def with_mirrors(plan: Plan, costs: Costs, every: int | Literal["auto"]) -> tuple[Plan, str]:
    """The plan with mirrors every so many steps, which its step and its memory know, and a line for people.
    "auto": as often as loses the least time, not at all where there is no room. Raises PlanError where there
    is none for what was asked."""
    layout, n = plan.layout, plan.layout.n_ranks
    if every == 0 or n == 1:
        return plan, "no mirrors: " + ("run.mirror_every is 0" if n > 1 else "there is one rank")
    cuts = cut_indices(layout, costs.names)
    taken = mirror_bytes(costs, layout, cuts)
    peaks = tuple(int(p + m) for p, m in zip(plan.prediction.peak_bytes, taken, strict=True))
    short = [p - device.memory_bytes for p, device in zip(peaks, costs.cluster.devices, strict=False)]
    if max(short) > 0:
        rank = short.index(max(short))
        need = size_text(int(taken[rank]))
        why = f"mirrors need {need} on rank {rank}, {size_text(max(short))} more than it has"
        if every == "auto":
            return plan, f"no mirrors, so recovery is from the newest checkpoint: {why}"
        raise PlanError(
            f"run.mirror_every = {every}: {why}; set auto or 0, use more ranks, or pipeline.recompute=full"
        )
    cost_s, step_s = mirror_s(costs, layout, cuts), plan.prediction.step_s
    nodes = len(set(costs.cluster.node_of_rank[:n]))
    if every == "auto":
        between_s = interval_s(cost_s, NODE_MTBF_S / nodes)
        k = max(1, round(between_s / step_s), math.ceil(cost_s / (MOST * step_s)))
        hours = NODE_MTBF_S / nodes / 3600
        why = f" (Daly 2006: a mirror takes {cost_s:.2g} s, a node fails every {hours:,.0f} h)"
    else:
        k, why = every, ""
    where = "another node" if nodes > 1 else "another rank, as there is one node"
    most, taken_text = (size_text(int(x.max())) for x in (state_bytes(costs, layout, cuts), taken))
    said = (
        f"mirrors: every {k} steps{why}, the most that a recovery does again; a rank sends up to "
        f"{most} to {where} and keeps up to {taken_text}"
    )
    longer_s, bound_s = step_s + cost_s / k, plan.prediction.lower_bound_s
    gap = longer_s / bound_s - 1.0 if bound_s else 0.0
    prediction = replace(plan.prediction, step_s=longer_s, gap=gap, peak_bytes=peaks)
    return replace(plan, layout=replace(layout, mirror_every=k), prediction=prediction), said
