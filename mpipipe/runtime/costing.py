"""Costs, measured by the ranks that will train: groups, updates, links and speeds. Collective."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mpipipe.cluster.calibrate import measure_links, memory_share, share_of
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.memory import Memory
from mpipipe.cluster.node import cores_available, processor
from mpipipe.graph.group_costs import group_costs
from mpipipe.graph.pieces import Piece, Sample, pieces
from mpipipe.graph.profile import Profiler
from mpipipe.graph.variants import Variants
from mpipipe.ops import device
from mpipipe.runtime.known import Team, names_of, reuse, setting
from mpipipe.runtime.loading import batch_bytes
from mpipipe.runtime.optimizer import FlatUpdater, Optimizer, OptimizerSettings, norms
from mpipipe.runtime.transport import Loopback
from mpipipe.runtime.weights import Flat, ParamGroup
from mpipipe.values import Cluster, Costs, Device, Graph, Numerics, digest

CALL_S = 5e-5  # as `Costs.call_s`, where none is measured: 20 us with warm caches, 100 to 200 with cold ones
_UPDATE_ELEMENTS, _UPDATE_PARAMETERS, _STATISTICS = 1 << 20, 32, 64
_MESSAGES, _MESSAGES_S = 6, 0.1  # at most, the first one left out


class Updates(NamedTuple):
    """Seconds of norm, clip, update and zero for a byte of weights, and for a parameter without elements:
    torch's calls alone. And of what a micro-batch adds to a buffer such as a running mean."""

    of_byte: float
    of_parameter: float
    of_statistic: float


@dataclass(frozen=True)
class Found:
    """Samples of the distinct groups, by key. timed: those that were run; compared: modelled seconds over
    measured ones, for those of them that were counted as well."""

    parts: tuple[Piece, ...]
    samples: dict[str, Sample]
    timed: frozenset[str]
    compared: tuple[float, ...] = ()

    @property
    def modelled(self) -> int:
        return len(self.samples) - len(self.timed)

    @property
    def spread(self) -> float:
        """Of the repeated timings; where all is modelled, 0."""
        return float(np.median([self.samples[key].spread for key in self.timed] or [0.0]))


@dataclass(frozen=True)
class Measured:
    """costs, and the samples that they are made of as they were taken, by the name under which a later run
    finds them, as it does the update; timed, of: how many distinct groups were timed now, and how many there
    are."""

    costs: Costs
    samples: dict[str, Sample]
    timed: int
    of: int
    update_name: str
    update_s: Updates


def measure(
    comm: Communicator, variants: Variants, numerics: Numerics, optimizer: Optimizer,
    memory: Memory, memory_bytes: int | None, known: Mapping[str, Sample] | None = None,
    known_updates: Mapping[str, Updates] | None = None, before: Measured | None = None,
) -> Measured:  # fmt: skip
    """Times every distinct group on one rank each, the ranks sharing the work, once on the others, and
    gathers all; the least counts.

    memory_bytes: limit per rank; None = its share of what the node has. known: on rank 0, samples of
    earlier runs by name (`Measured.samples`); None = time all. known_updates: likewise their updates, which
    hold where all samples do. before: of micro-batches of another size, whose links and update count.
    """
    threads = numerics.threads
    clock, slower = clock_of(comm, threads)
    kind = device_kind(numerics.instruction_set)
    kinds, speeds = _speeds(comm, kind, _reference_s(clock))

    parts = pieces(variants.primary, variants.graph, variants.uses)
    distinct = {p.key: p for p in parts}
    profiler = Profiler(variants.primary, numerics.precision, clock, comm.size)
    team = Team(comm, profiler, distinct, kinds, speeds[comm.rank] * slower)
    on_core = clock is time.thread_time
    where = setting(numerics, kinds[0], comm, on_core, profiler.chilled_bytes)
    names, update_name = names_of(distinct, where), digest(where, *map(repr, _form(optimizer)))
    known = known or {}
    reused = reuse(team, {key: known[name] for key, name in names.items() if name in known})
    kept = None if reused.timed else (known_updates or {}).get(update_name)
    update_s = before.update_s if before else comm.bcast_object(kept)
    update_s = update_s or _updates_s(comm, optimizer, clock, profiler, slower)
    call_s = before.costs.call_s if before else _call_s(team, reused.samples, clock)
    del profiler, team  # and the memory that it chills the caches with

    links = before.costs.cluster.links if before else measure_links(comm)
    # every kernel has run, and MPI has its buffers: what is left is not weights
    base = memory.base_bytes(saved_bytes(variants.graph, optimizer))
    share = _memory_share(comm) + base  # collective, so that ranks may be given different limits
    limits = comm.allgather_object((memory_bytes or share, base, slower))
    devices = tuple(
        Device(kind, speed, most, threads, base, alone)
        for kind, speed, (most, base, alone) in zip(kinds, speeds, limits, strict=True)
    )
    cluster = Cluster(devices, comm.node_of_rank, links)
    today = {key: sample.times(reused.slower) for key, sample in reused.samples.items()}
    found = Found(tuple(parts), today, frozenset(today))
    costs = costs_of(found, variants, numerics, optimizer, cluster, update_s, call_s)
    named = {name: reused.samples[key] for key, name in names.items()}
    return Measured(costs, named, reused.timed, len(distinct), update_name, update_s)


def saved_bytes(graph: Graph, optimizer: Optimizer) -> int:
    """Of a checkpoint, at most: weights with the optimizer's state, and buffers."""
    weights, buffers = (sum(spec.nbytes for spec in of.values()) for of in (graph.params, graph.buffers))
    return (1 + optimizer.state_buffers) * weights + buffers


def costs_of(
    found: Found, variants: Variants, numerics: Numerics, optimizer: Optimizer, cluster: Cluster,
    update_s: Updates, call_s: float = CALL_S,
) -> Costs:  # fmt: skip
    """On a cluster, which may be elsewhere."""
    return Costs(
        groups=group_costs(
            variants.primary, found.parts, found.samples, update_s.of_parameter, numerics.fill,
            update_s.of_statistic,
        ),
        cluster=cluster,
        ties=variants.graph.ties,
        bytes_per_param_byte=bytes_per_param_byte(optimizer, numerics),
        state_bytes_per_param_byte=float(optimizer.state_buffers),
        blocks=numerics.blocks,
        step_s_per_byte=update_s.of_byte,
        source="modelled" if found.modelled else "measured",
        spread=found.spread,
        call_s=call_s,
        rows_bytes=variants.rows_bytes(numerics),
        batch_bytes=batch_bytes(variants, numerics.micro_batches),
    )  # fmt: skip


def _settings(optimizer: Optimizer) -> OptimizerSettings:
    """A user's own optimizer, which may want the model's parameters and no others, counts as AdamW."""
    return optimizer if isinstance(optimizer, OptimizerSettings) else OptimizerSettings(clip=optimizer.clip)


def _form(optimizer: Optimizer) -> tuple[object, ...]:
    """What decides how long its update takes."""
    s = _settings(optimizer)
    return s.kind, s.bits, s.clip is None, s.momentum == 0, s.weight_decay == 0


def _updates_s(
    comm: Communicator, optimizer: Optimizer, clock: Callable[[], float], profiler: Profiler, slower: float
) -> Updates:
    """`Measured.update_s`, of the rank that was disturbed least."""
    mine = [seconds * slower for seconds in update_times(optimizer, clock, profiler.chill)]
    return Updates(*map(min, zip(*comm.allgather_object(mine), strict=True)))


def _call_s(team: Team, samples: Mapping[str, Sample], clock: Callable[[], float]) -> float:
    """`Costs.call_s`, of the rank that was disturbed least: half of what sending and receiving takes after a
    computation, which empties more caches than those of data."""
    found, seconds = team.usual(samples), list[float]()
    message = Loopback(team.comm, max(1, len(found.code.sent)) if found else 1)
    begun = time.perf_counter()
    while len(seconds) < 2 or (len(seconds) < _MESSAGES and time.perf_counter() - begun < _MESSAGES_S):
        if found:
            team.profiler.run(found, 0)
        start = clock()
        message.exchange()
        seconds.append((clock() - start) / 2)
    return min(team.comm.allgather_object(statistics.median(seconds[1:]) * team.factor))


def _memory_share(comm: Communicator) -> int:
    """Bytes that this rank may still take of what it computes in. Collective."""
    if device.on_host():
        return memory_share(comm)
    place = comm.node_of_rank[comm.rank], device.identity()
    return share_of(comm, place, device.free_bytes())


def device_kind(instruction_set: str) -> str:
    """`Device.kind` of this process."""
    return f"{processor()}, {instruction_set}"


def bytes_per_param_byte(optimizer: Optimizer, numerics: Numerics) -> float:
    """Weight, gradient, the sums of blocks, and the optimizer's state."""
    levels = numerics.blocks.bit_length() if numerics.blocks > 1 else 0
    return 2.0 + optimizer.state_buffers + levels


def clock_of(comm: Communicator, threads: int) -> tuple[Callable[[], float], float]:
    """Wall time, of an accelerator when it has finished; where ranks outnumber cores, time on the core, and
    how often a rank has to wait."""
    if not device.on_host():
        return device.finished, 1.0
    if not comm.oversubscribed or threads > 1:
        return time.perf_counter, 1.0
    on_node = comm.node_of_rank.count(comm.node_of_rank[comm.rank])
    return time.thread_time, max(1.0, on_node / len(cores_available()))


def _reference_s(clock: Callable[[], float]) -> float:
    once = same_work(clock)
    return min([once() for _ in range(8)][1:])


def same_work(clock: Callable[[], float]) -> Callable[[], float]:
    """Seconds of a fixed piece of work, each time: what makes the speeds of ranks comparable."""
    side = 384 if device.on_host() else 4096  # a GPU would only show how fast it starts
    a = torch.ones(side, side, device=device.here())

    def seconds() -> float:
        start = clock()
        torch.mm(a, a)
        return clock() - start

    return seconds


def _speeds(comm: Communicator, kind: str, reference_s: float) -> tuple[list[str], list[float]]:
    """Kind and relative speed of every rank: 1 for the kind of rank 0. Ranks of one kind are equally
    fast, and the fastest of them tells how fast, because what differs between them is noise."""
    seen = comm.allgather_object((kind, reference_s))
    fastest = {k: min(s for other, s in seen if other == k) for k, _ in seen}
    return [k for k, _ in seen], [fastest[seen[0][0]] / fastest[k] for k, _ in seen]


def update_times(
    optimizer: Optimizer, clock: Callable[[], float], chill: Callable[[], object] = lambda: None
) -> Updates:
    """Timed on this rank. chill: empties the caches."""
    whole, single = {"": torch.Size([_UPDATE_ELEMENTS])}, torch.Size([1])
    single_s = _update_s(optimizer, clock, chill, {str(i): single for i in range(_UPDATE_PARAMETERS)})
    return Updates(
        of_byte=_update_s(optimizer, clock, chill, whole) / (4 * _UPDATE_ELEMENTS),
        of_parameter=single_s / _UPDATE_PARAMETERS,
        of_statistic=_statistic_s(clock),
    )


@torch.no_grad()
def _statistic_s(clock: Callable[[], float]) -> float:
    """As `Stage.apply_statistics` does it, for small buffers."""
    buffers = [torch.zeros(64, device=device.here()) for _ in range(_STATISTICS)]
    value, seconds = torch.ones(64, device=device.here()), []
    for _ in range(4):
        start = clock()
        for buffer in buffers:
            buffer.mul_(0.9).add_(value, alpha=0.1)
        seconds.append(clock() - start)
    return min(seconds[1:]) / _STATISTICS


@torch.no_grad()
def _update_s(
    optimizer: Optimizer,
    clock: Callable[[], float],
    chill: Callable[[], object],
    shapes: dict[str, torch.Size],
) -> float:
    settings = _settings(optimizer)
    data = Flat.like(shapes, torch.float32)
    group = ParamGroup(True, data, data.sibling())
    updater = FlatUpdater([group], settings)
    seconds = []
    for _ in range(4):
        chill()
        start = clock()
        norms([group.grad], settings.bits)
        updater.update(0, 1.0 if settings.clip else None)
        seconds.append(clock() - start)
    return min(seconds[1:])
