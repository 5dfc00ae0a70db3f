"""Several stages per rank, with whole backwards (Narayanan et al. 2021): stage s is on rank s modulo p.

A rank takes p micro-batches through its first stage, then the same ones through its second, and so on. With
v stages per rank the pipeline fills v times as fast, and messages are v times as many. 2 ranks, 4 stages, 4
micro-batches:

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""

from __future__ import annotations

import numpy as np

from mpipipe.errors import PlanError
from mpipipe.planner.schedules.orders import wrapped
from mpipipe.values import Int32, Op, Schedule

STAGES_PER_RANK = 2  # where nobody says


def interleaved(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """Raises PlanError unless ranks divide stages and micro-batches."""
    ranks = n_ranks or max(1, n_stages // STAGES_PER_RANK)
    if n_stages % ranks:
        raise PlanError(
            f"schedule 'interleaved': {n_stages} stages on {ranks} ranks; give each rank equally many, "
            f"such as {ranks * -(-n_stages // ranks)} stages"
        )
    if n_micro % ranks:
        raise PlanError(
            f"schedule 'interleaved': {n_micro} micro-batches on {ranks} ranks; they go round in groups of "
            f"one per rank, use {ranks * -(-n_micro // ranks)}"
        )
    codes = tuple(_rank(rank, ranks, n_stages // ranks, n_micro) for rank in range(ranks))
    return Schedule(wrapped(n_stages, ranks), n_micro, codes)


def _rank(rank: int, n_ranks: int, per_rank: int, n_micro: int) -> Int32:
    """Warm-up forwards, then F B pairs, then the backwards that are left."""
    work = np.arange(per_rank * n_micro)
    turn = work % (n_ranks * per_rank) // n_ranks  # which of the rank's stages
    micro = work // (n_ranks * per_rank) * n_ranks + work % n_ranks
    kinds = np.full_like(work, Op.F)
    forward = np.stack([kinds, turn * n_ranks + rank, micro], axis=1)
    backward = np.stack([kinds + (Op.B - Op.F), (per_rank - 1 - turn) * n_ranks + rank, micro], axis=1)
    ahead = 2 * (n_ranks - 1 - rank) + (per_rank - 1) * n_ranks
    place = np.concatenate([2 * work, 2 * (work + ahead) + 1])
    order = np.argsort(place, kind="stable")
    return np.concatenate([forward, backward])[order].astype(np.int32)
