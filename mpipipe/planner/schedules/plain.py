"""Schedules with whole backwards and one stage per rank, and the forward-only one of an evaluation.

4 stages, 6 micro-batches, "1f1b":

    rank 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
    rank 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    rank 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
    rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe.planner.schedules.orders import coded, one_each
from mpipipe.values import Int32, Op, Schedule


def gpipe(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019); every stash lives at once."""
    one_each("gpipe", n_stages, n_ranks)
    kinds = np.repeat([Op.F, Op.B], n_micro)
    micros = np.tile(np.arange(n_micro), 2)
    codes = tuple(coded(kinds, stage, micros) for stage in range(n_stages))
    return Schedule(tuple(range(n_stages)), n_micro, codes)


def one_f_one_b(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """One forward, one backward (Narayanan et al. 2019): as short as GPipe, and stage s keeps at
    most min(n_stages - s, n_micro) stashes."""
    one_each("1f1b", n_stages, n_ranks)
    codes = tuple(_one_f_one_b_stage(s, n_stages, n_micro) for s in range(n_stages))
    return Schedule(tuple(range(n_stages)), n_micro, codes)


def _one_f_one_b_stage(stage: int, n_stages: int, n_micro: int) -> Int32:
    """Warm-up forwards, then F B pairs, then the backwards that are left."""
    ahead = min(n_stages - 1 - stage, n_micro)
    every = np.arange(n_micro)
    key_f = np.where(every < ahead, every, 2 * every - ahead)  # position in the order
    key_b = np.where(every < n_micro - ahead, 2 * every + ahead + 1, n_micro + every)
    kinds = np.empty(2 * n_micro, np.int32)
    micros = np.empty(2 * n_micro, np.int32)
    kinds[key_f], micros[key_f] = Op.F, every
    kinds[key_b], micros[key_b] = Op.B, every
    return coded(kinds, stage, micros)


def forward_only(n_stages: int, n_micro: int, rank_of_stage: Sequence[int] | None = None) -> Schedule:
    """Evaluation: no backward, nothing is stashed. A rank with several stages takes as many micro-batches as
    there are ranks through its first stage, then through its next one, and so on: all ranks work in one
    order of (round, how often a stage comes round, micro-batch), so none can wait in a circle."""
    homes = tuple(range(n_stages)) if rank_of_stage is None else tuple(rank_of_stage)
    n_ranks = len(set(homes))
    micros = np.arange(n_micro)
    codes = []
    for rank in range(n_ranks):
        own = [stage for stage, home in enumerate(homes) if home == rank]
        each = np.concatenate([coded(np.full(n_micro, Op.F), stage, micros) for stage in own])
        turn = np.repeat(np.arange(len(own)), n_micro)
        codes.append(each[np.lexsort((each[:, 2], turn, each[:, 2] // n_ranks))])
    return Schedule(homes, n_micro, tuple(codes))
