"""How many micro-batches a run has, where its config leaves that open: costs of a few sizes, then the search.

A size needs a graph of its own, because capture knows the shapes; that takes half a second, its timing less
for smaller ones. Collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mpipipe.cluster.agree import from_root
from mpipipe.cluster.comm import Communicator
from mpipipe.graph.variants import Variants
from mpipipe.planner.asked import Asked
from mpipipe.planner.joint import Joint
from mpipipe.planner.sizing import costs_at, settle
from mpipipe.runtime.costing import Measured
from mpipipe.values import Costs, Numerics


@dataclass(frozen=True)
class Settled:
    """The answer, the same on every rank but for `joint`, which rank 0 has. sizes: samples of the
    micro-batches that were timed; timed: distinct groups timed now, and all of them, over all sizes;
    seconds: of all this."""

    numerics: Numerics
    variants: Variants
    costs: Costs
    joint: Joint | None
    sizes: tuple[int, ...]
    timed: tuple[int, int]
    seconds: float


def settle_micro_batches(
    comm: Communicator,
    asked: Asked,
    variants_of: Callable[[int], Variants],
    measured: Callable[[Variants, Numerics, Measured | None], Measured],
) -> Settled:
    """variants_of(rows): the model for micro-batches of so many samples; measured: as `measure`, its last
    argument what was measured before. Raises PlanError, DeadlockError and CaptureError."""
    started = time.perf_counter()
    at: dict[int, tuple[Variants, Measured]] = {}

    def take(rows: int) -> Costs:
        variants = variants_of(rows)
        _ = variants.graph  # what cannot be captured is refused before ranks wait for each other
        one = replace(asked.numerics, batch=rows, micro_batch=rows, micro_batches=1)
        before = next((m for _, m in at.values()), None)
        at[rows] = variants, measured(variants, one, before)
        return at[rows][1].costs

    joint, taken = settle(asked, take, share=partial(from_root, comm))
    numerics = asked.of(comm.bcast_object(joint.plan.numerics.micro_batches if joint else 0))
    costs = costs_at(taken, numerics.batch, numerics.micro_batches)
    timed, of = sum(m.timed for _, m in at.values()), sum(m.of for _, m in at.values())
    variants, seconds = at[numerics.micro_batch][0], time.perf_counter() - started
    return Settled(numerics, variants, costs, joint, tuple(sorted(taken)), (timed, of), seconds)
