"""The links of a job, level by level: one pair of each node alone, then all pairs at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mpipipe.cluster.calibrate import measure_pair
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.fit import fit_line
from mpipipe.cluster.places import Pairs, pairs_by_level
from mpipipe.values import Cluster, Link

LENGTHS = (8, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes
SHARED_BYTES = 1 << 20  # of the messages that all pairs exchange at once
SWEEPS = 3  # over all lengths: a disturbance of a moment is one of three
QUIET = 0.2  # quantile of the rounds: what else runs on a machine only adds


@dataclass(frozen=True)
class MeasuredLink:
    link: Link
    pairs: int  # that talked at once
    residual: float  # relative, of the line; see `fit.Line`


def measure_levels(comm: Communicator, where: Cluster) -> dict[str, MeasuredLink]:
    """Of every level that the job spans, the finest first; the same on all ranks. Collective."""
    return {level: _measured(comm, pairs) for level, pairs in pairs_by_level(where).items()}


def _measured(comm: Communicator, pairs: Pairs) -> MeasuredLink:
    lengths = LENGTHS * SWEEPS
    alone = _seconds(comm, pairs.alone, lengths)  # (pairs, lengths)
    line = fit_line(np.broadcast_to(lengths, alone.shape).ravel().tolist(), alone.ravel().tolist())
    contention = 1.0
    if len(pairs.together) > len(pairs.alone):
        together = _seconds(comm, pairs.together, (SHARED_BYTES,) * SWEEPS)
        before = float(np.median(alone[:, np.equal(lengths, SHARED_BYTES)]))
        extra = float(np.median(together)) - before
        contention = max(1.0, 1.0 + extra / (SHARED_BYTES / line.bytes_per_s))
    link = Link(line.latency_s, line.bytes_per_s, contention)
    return MeasuredLink(link, len(pairs.together) // 2, line.residual)


def _seconds(comm: Communicator, peers: Mapping[int, int], lengths: tuple[int, ...]) -> np.ndarray:
    """(pairs, lengths), known to all ranks."""
    comm.barrier()
    found = comm.allgather_object(measure_pair(comm, peers, lengths, QUIET))
    return np.array([x for x in found if x])
