"""Where the time of a step went, rank by rank.

    compute   F, B, I, W, STEP
    exposed   a RECV waits, and its SEND has begun: the message is on its way
    bubble    a wait before that: a RECV whose SEND has not begun, a NORM at which not all ranks are; and
              what is left at both ends of the step
    norm      NORM once all ranks are there
    other     sends, and the time between instructions

The five add up to the makespan of the step on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpipipe.planner.schedules import stages_of_ranks
from mpipipe.planner.walk import match
from mpipipe.values import RECVS, SENDS, Float64, Int64, Op, RankReport, Timeline, Value


@dataclass(frozen=True)
class Account(Value):
    compute_s: float
    exposed_s: float
    bubble_s: float
    norm_s: float
    other_s: float


def account(timeline: Timeline) -> tuple[Account, ...]:
    """One per rank. Raises DeadlockError if a message of the program has one end only."""
    exposed, meeting_s = exposed_s(timeline), meetings_s(timeline)
    return tuple(_of_rank(timeline, rank, waits, meeting_s) for rank, waits in enumerate(exposed))


def exposed_s(timeline: Timeline) -> tuple[Float64, ...]:
    """Per rank and instruction: seconds that a RECV waits after its SEND has begun; 0 for the others."""
    ends = match(timeline.program)
    out = []
    for rank, (codes, times) in enumerate(zip(timeline.program.codes, timeline.times, strict=True)):
        exposed = np.zeros(len(times))
        for index in np.flatnonzero(np.isin(codes[:, 0], sorted(RECVS))).tolist():
            sent = timeline.times[ends.peers[rank][index]][ends.partner[rank][index], 0]
            exposed[index] = max(0.0, times[index, 1] - max(times[index, 0], sent))
        out.append(exposed)
    return tuple(out)


def meetings_s(timeline: Timeline) -> Float64:
    """When the last rank has come to each NORM, in their order."""
    arrivals = [
        times[codes[:, 0] == Op.NORM, 0]
        for codes, times in zip(timeline.program.codes, timeline.times, strict=True)
    ]
    met: Float64 = np.max(arrivals, axis=0)
    return met


def _of_rank(timeline: Timeline, rank: int, exposed: Float64, meeting_s: Float64) -> Account:
    times = timeline.times[rank]
    ops, took = timeline.program.codes[rank][:, 0], times[:, 1] - times[:, 0]
    norms = times[ops == Op.NORM]
    norm = np.maximum(0.0, norms[:, 1] - np.maximum(norms[:, 0], meeting_s)).sum()
    waits = took[np.isin(ops, [*RECVS, Op.NORM])].sum()
    ends = timeline.makespan_s - (times[-1, 1] - times[0, 0])
    gaps = (times[1:, 0] - times[:-1, 1]).sum()
    return Account(
        compute_s=timeline.busy_s(rank),
        exposed_s=float(exposed.sum()),
        bubble_s=float(waits - exposed.sum() - norm + ends),
        norm_s=float(norm),
        other_s=float(took[np.isin(ops, sorted(SENDS))].sum() + gaps),
    )


def rank_reports(
    predicted: Timeline,
    measured: Timeline,
    groups: Sequence[int],
    parameters: Sequence[int],
    sizes: Sequence[Int64],
) -> tuple[RankReport, ...]:
    """One per rank. groups and parameters: how many, by stage; sizes: bytes of each message, by rank (see
    `planner.prediction.sizes_of_messages`)."""
    of_ranks, accounts = stages_of_ranks(measured.program), account(measured)
    out = []
    for rank, (found, stages) in enumerate(zip(accounts, of_ranks, strict=True)):
        sends = np.isin(measured.program.codes[rank][:, 0], sorted(SENDS))
        planned_s, took_s = predicted.makespan_s, measured.makespan_s
        out.append(
            RankReport(
                stages=tuple(stages),
                groups=sum(groups[stage] for stage in stages),
                parameters=sum(parameters[stage] for stage in stages),
                predicted_compute_s=predicted.busy_s(rank),
                compute_s=found.compute_s,
                predicted_bubble=1.0 - predicted.busy_s(rank) / planned_s if planned_s else 0.0,
                bubble=1.0 - found.compute_s / took_s if took_s else 0.0,
                exposed_s=found.exposed_s,
                sent_bytes=int(sizes[rank][sends].sum()),
            )
        )
    return tuple(out)
