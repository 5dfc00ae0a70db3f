"""Backward in two: I sends the gradient on at once, W waits until there is nothing else to do.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism". One stage per rank; 3 stages, 6 micro-batches, "zb-h1":

    rank 0   F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    rank 1   F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
    rank 2   F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5

A stash lives through W here. The paper lets go of a part of it at I: its figures are not larger.
"""

from __future__ import annotations

import numpy as np

from mpipipe.planner.schedules.orders import coded, one_each
from mpipipe.values import Int32, Op, Schedule


def zb_h1(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """As many forwards ahead as in 1F1B; stage s is s weight gradients late, so that each stage keeps the
    n_stages stashes that the first one has in 1F1B. A third of the bubble of 1F1B, where F, I and W take
    equally long."""
    one_each("zb-h1", n_stages, n_ranks)
    codes = tuple(_stage(s, n_stages - s, s, n_micro) for s in range(n_stages))
    return Schedule(tuple(range(n_stages)), n_micro, codes)


def zb_h2(n_stages: int, n_micro: int, n_ranks: int | None = None) -> Schedule:
    """Forwards until the first gradient is back; each stage keeps 2 n_stages - 1 stashes, and no rank waits
    between its first and its last action, where F, I and W take equally long."""
    one_each("zb-h2", n_stages, n_ranks)
    codes = tuple(_stage(s, 2 * (n_stages - s) - 1, 2 * s, n_micro) for s in range(n_stages))
    return Schedule(tuple(range(n_stages)), n_micro, codes)


def _stage(stage: int, ahead: int, late: int, n_micro: int) -> Int32:
    """`ahead` forwards, then turns of I, of the W of `late` turns before, and of F; at last the W that are
    left."""
    every = np.arange(n_micro)
    turns = np.concatenate([3 * (every - ahead) + 2, 3 * every, 3 * (every + late) + 1])
    kinds = np.repeat([Op.F, Op.I, Op.W], n_micro)
    order = np.argsort(turns, kind="stable")
    return coded(kinds[order], stage, np.tile(every, 3)[order])
