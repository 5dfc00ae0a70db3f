"""Ranks that share the cores of their node: each computes faster while others wait.

Costs are those of a rank beside which all others of its node compute. While only k of its n ranks do, each
has n / k times as much of a core, up to one of its own: `Device.alone` times. How fast a rank is follows from
when the others compute, and the other way round: `seconds_beside` takes the one from a timeline, from which
the next one follows. What is right until some moment in the one is right a little longer in the next
(waveform relaxation; Lelarasmee et al. 1982), so the last one is a simulation from event to event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpipipe.values import COMPUTE, Cluster, Costs, Float64, Op, Program

MOST_ROUNDS = 200  # some tens are enough
_COMPUTES = np.isin(range(len(Op)), sorted(COMPUTE))


def is_crowded(cluster: Cluster) -> bool:
    return any(device.alone > 1.0 for device in cluster.devices)


def uncrowded(costs: Costs) -> Costs:
    """As if no rank ever waited: what bounds and cuts are compared by."""
    if not is_crowded(costs.cluster):
        return costs
    devices = tuple(replace(device, alone=1.0) for device in costs.cluster.devices)
    return costs.but(cluster=replace(costs.cluster, devices=devices))


def seconds_beside(
    program: Program, cluster: Cluster, seconds: Sequence[Float64], times: Sequence[Float64]
) -> tuple[Float64, ...]:
    """What each rank's instructions take, (n,), if the others compute when `times` (n, 2) says. seconds: (n,)
    of them while all compute, or of a message."""
    found = [each.copy() for each in seconds]
    works = [_COMPUTES[codes[:, 0]] for codes in program.codes]
    on_node = Counter(cluster.node_of_rank)
    for node in set(cluster.node_of_rank[: len(found)]):
        ranks = [rank for rank in range(len(found)) if cluster.node_of_rank[rank] == node]
        spans = [times[rank][works[rank]] for rank in ranks]
        moments = np.unique(np.concatenate(spans))
        if len(moments) < 2:
            continue
        busy = np.array([_busy(span, moments) for span in spans])
        for rank, beside in zip(ranks, busy.sum(0) - busy, strict=True):
            rate = np.minimum(cluster.devices[rank].alone, on_node[node] / (1.0 + beside))
            found[rank][works[rank]] = _stretched(
                times[rank][works[rank], 0], seconds[rank][works[rank]], moments, rate
            )
    return tuple(found)


def _busy(spans: Float64, moments: Float64) -> Float64:
    """Of what lies between two moments each, 1 where one of these spans covers it, else 0."""
    change = np.zeros(len(moments))
    np.add.at(change, np.searchsorted(moments, spans[:, 0]), 1.0)
    np.add.at(change, np.searchsorted(moments, spans[:, 1]), -1.0)
    return np.asarray(np.cumsum(change)[:-1])


def _stretched(starts: Float64, work: Float64, moments: Float64, rate: Float64) -> Float64:
    """How long work that begins then takes at this rate, which its last value follows."""
    done = np.concatenate([[0.0], np.cumsum(rate * np.diff(moments))])
    ends = np.interp(starts, moments, done) + work
    beyond = np.maximum(0.0, ends - done[-1]) / rate[-1]
    return np.asarray(np.interp(ends, done, moments) + beyond - starts)
