"""Costs of earlier runs: which of them still hold, and which groups are timed anew. Collective.

    known samples -> the heaviest timed, if too slow once more -> they agree ?-> the rest is trusted
                                                                             '-> all timed anew, by one rank
                                                                                 each, then once by the others

A sample stays as it was taken until a later run finds it out of line with the others: the heaviest, which
decide the plan, are timed at every start. What these take longer as a whole, this machine is slower by today
than it was then, and all of them with it.

A core may be slow by itself, for seconds: another guest of the host computes on its other half. What one rank
has timed meanwhile is too long, with little spread, next to what others have, so that a cut would be wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpipipe.cluster.agree import code_version
from mpipipe.cluster.comm import Communicator, gathered
from mpipipe.cluster.node import cores_available
from mpipipe.graph.pieces import Piece, Sample
from mpipipe.graph.profile import Profiler
from mpipipe.graph.rates import sampled
from mpipipe.ops.native import version_in_use
from mpipipe.values import Numerics, digest

CHECK_S = 0.15  # seconds for the groups that a rank times to see whether the rest still holds
AGREE = 0.5  # of all that are timed again: a machine that is busy, or was, may differ by this
ALONE = 0.4  # of one of them, beside the others: what a single timing may be off by
LITTLE = 0.02  # of their sum: so much of one is nothing to a plan
PASSING_S = 0.01  # forward and backward
LIGHT_BYTES = 256 << 20  # of parameters: what every rank can make at the same time


@dataclass(frozen=True)
class Team:
    """The ranks, each with a profiler, that share the timing of distinct groups. kinds: of each rank's
    device; factor: seconds on a device of speed 1 / seconds here."""

    comm: Communicator
    profiler: Profiler
    distinct: Mapping[str, Piece]
    kinds: Sequence[str]
    factor: float

    def _timed_by(self, keys: Iterable[str]) -> dict[str, int]:
        heaviest = sorted(keys, key=lambda key: (-self.distinct[key].workspace_bytes, key))
        return {key: i % self.comm.size for i, key in enumerate(heaviest)}

    def _mine(self, keys: Iterable[str]) -> list[str]:
        return [key for key, rank in self._timed_by(keys).items() if rank == self.comm.rank]

    def sample(self, keys: Iterable[str]) -> dict[str, Sample]:
        """Every one timed by one rank, known to all."""
        mine = self._mine(keys)
        found = {k: sampled(self.profiler, self.distinct[k]).times(self.factor) for k in mine}
        self._keep_busy(mine)
        return gathered(self.comm, found)

    def seconds(self, keys: Iterable[str], times: int) -> dict[str, float]:
        """Forward and backward of each that can be timed, the shortest of some times."""
        mine = self._mine(keys)
        found = {k: self.profiler.run(self.distinct[k], times) * self.factor for k in mine}
        self._keep_busy(mine)
        return gathered(self.comm, {k: seconds for k, seconds in found.items() if seconds < math.inf})

    def _keep_busy(self, mine: Sequence[str]) -> None:
        """Works until the other ranks of the node have timed their share: in a step, too, they share memory,
        and perhaps a core. Not where ranks take turns on a core: it would be in their way."""
        comm, none = self.comm, np.zeros(1, np.uint8)
        node = comm.node_of_rank[comm.rank]
        here = [rank for rank, other in enumerate(comm.node_of_rank) if other == node and rank != comm.rank]
        peers = [] if comm.oversubscribed else here
        sent = [comm.isend(none, peer, 0) for peer in peers]
        done = [comm.irecv(none.copy(), peer, 0) for peer in peers]
        for key in itertools.cycle(mine or [min(self.distinct, key=self._weight)]):
            if all(request.done() for request in done):
                break
            self.profiler.run(self.distinct[key], 0)
        for request in [*sent, *done]:
            comm.wait(request)

    def _weight(self, key: str) -> tuple[int, int, str]:
        return self.distinct[key].param_bytes, self.distinct[key].workspace_bytes, key

    def run_rest(self, checked: Iterable[str], missing: Iterable[str]) -> dict[str, float]:
        """Runs here what only another rank has timed: libraries keep buffers for what they have run, and each
        rank counts its own. These do not depend on how large the weights are, so those of the largest groups
        are not made on all ranks at once. Returns, of what was missing, the least seconds on another
        rank with a device of the same kind."""
        by, here = self._timed_by(missing), dict[str, float]()
        done = {*self._mine(checked), *self._mine(missing)}
        for key in sorted(self.distinct.keys() - done):
            if self.distinct[key].param_bytes <= LIGHT_BYTES:
                counts = key in by and self.kinds[by[key]] == self.kinds[self.comm.rank]
                seconds = self.profiler.run(self.distinct[key], int(counts))
                if counts:
                    here[key] = seconds * self.factor
        least: dict[str, float] = {}
        for key, seconds in (item for found in self.comm.allgather_object(here) for item in found.items()):
            least[key] = min(seconds, least.get(key, math.inf))
        return least

    def usual(self, samples: Mapping[str, Sample]) -> Piece | None:
        """What every rank can run in passing, all at the same time: of those up to `PASSING_S` the longest,
        else the shortest; None where all weights are large."""
        light = [
            (samples[key].seconds, key) for key in samples if self.distinct[key].param_bytes <= LIGHT_BYTES
        ]
        short = [each for each in light if each[0] <= PASSING_S]
        _, found = max(short) if short else min(light, default=(0.0, ""))
        return self.distinct.get(found)


def setting(numerics: Numerics, kind: str, comm: Communicator, on_core: bool, chilled_bytes: int) -> str:
    """All that decides a sample beside the group itself: code, processor, libraries, threads, how many ranks
    share a node and its cores, and how much of the caches a step takes. on_core: seconds are those on a
    core; chilled_bytes: as in `Profiler`, to a power of two, as it changes with every shape."""
    n = numerics
    facts = (
        code_version(version_in_use(), ("cluster", "graph", "ops")), kind, n.torch, n.instruction_set,
        n.threads, n.precision, n.gemm, n.bits, comm.size, comm.node_of_rank.count(0),
        len(cores_available()), on_core, round(math.log2(max(1, chilled_bytes))),
    )  # fmt: skip
    return digest(*map(repr, facts))


def names_of(distinct: Mapping[str, Piece], setting: str) -> dict[str, str]:
    """Key of a group -> the name of its sample in later runs; none of a group with code of the user's."""
    return {key: digest(setting, key) for key, piece in distinct.items() if piece.lasting}


class Reused(NamedTuple):
    """samples: as they would have been when the held ones were taken; slower: seconds now / then; timed: how
    many were timed now."""

    samples: dict[str, Sample]
    slower: float
    timed: int


def reuse(team: Team, held: Mapping[str, Sample]) -> Reused:
    """A sample of every distinct group. held: of earlier runs, by key; that of rank 0 counts."""
    held = team.comm.bcast_object(dict(held))
    checked = _heaviest(held, team.comm.size)
    again = team.seconds(checked, 1)
    doubted = _doubted(held, again)  # a single timing is easily disturbed, and to time all anew takes seconds
    if doubted:
        again |= {key: min(again[key], seconds) for key, seconds in team.seconds(doubted, 1).items()}
    held = still_held(held, again)
    slower = slowdown(held, again)
    missing = team.distinct.keys() - held.keys()
    sampled = team.sample(missing)
    least = team.run_rest(checked, missing)
    samples = held | {
        key: at_most(s, least.get(key, math.inf)).times(1.0 / slower) for key, s in sampled.items()
    }
    return Reused(samples, slower, len(missing))


def at_most(sample: Sample, seconds: float) -> Sample:
    """As long as that where it took longer: what else uses a core adds more than what a call costs varies."""
    return sample.times(seconds / sample.seconds) if seconds < sample.seconds else sample


def _heaviest(held: Mapping[str, Sample], ranks: int) -> list[str]:
    """Those of the longest that fit into the time, but one at least."""
    chosen: list[str] = []
    left_s = CHECK_S * ranks
    for key in sorted(held, key=lambda k: (-held[k].seconds, k)):
        left_s -= 2 * held[key].seconds  # the first time does not count
        if left_s > 0 or not chosen:
            chosen.append(key)
    return chosen


def slowdown(held: Mapping[str, Sample], again: Mapping[str, float]) -> float:
    """Seconds now / then of what was timed again: the median, weighted by seconds, as a disturbed one among
    them says nothing of the others. 1 where there is none."""
    ratios = sorted((again[k] / s.seconds, s.seconds) for k, s in held.items() if s.seconds and again.get(k))
    half, before = sum(seconds for _, seconds in ratios) / 2, 0.0
    for ratio, seconds in ratios:
        before += seconds
        if before >= half:
            return ratio
    return 1.0


def _doubted(held: Mapping[str, Sample], again: Mapping[str, float]) -> list[str]:
    """Of those that were timed again the ones that look disturbed."""
    slower = slowdown(held, again)
    if slower > 1.0 + ALONE:
        return list(again)
    return [key for key in _off(held, again, slower) if again[key] > slower * held[key].seconds]


def still_held(held: Mapping[str, Sample], again: Mapping[str, float]) -> dict[str, Sample]:
    """What holds after some were timed again. None does where these differ as a whole: the machine is not
    the one of then. A single one that differs from the others by more than noise is dropped."""
    slower = slowdown(held, again)
    if max(slower, 1.0 / slower) > 1.0 + AGREE:
        return {}
    off = _off(held, again, slower)
    return {key: sample for key, sample in held.items() if key not in off}


def _off(held: Mapping[str, Sample], again: Mapping[str, float], slower: float) -> list[str]:
    """Those that were disturbed, now or when they were taken."""
    due, little = {key: slower * held[key].seconds for key in again}, LITTLE * sum(again.values())
    return [k for k in again if abs(again[k] - due[k]) > max(ALONE * min(due[k], again[k]), little)]
