"""Costs, measured by the ranks that will train: groups, updates, links and speeds. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from mpipipe.cluster.calibrate import measure_links, memory_share
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.memory import PeakMemory
from mpipipe.cluster.node import cores_available, processor
from mpipipe.graph.profile import Profiler, Sample, group_costs, pieces
from mpipipe.graph.variants import Variants
from mpipipe.runtime.optimizer import FlatUpdater, Optimizer, OptimizerSettings
from mpipipe.runtime.weights import Flat, ParamGroup
from mpipipe.values import Cluster, Costs, Device, Numerics

_UPDATE_ELEMENTS = 1 << 20


def measure(
    comm: Communicator, variants: Variants, numerics: Numerics, optimizer: Optimizer,
    memory: PeakMemory, memory_bytes: int | None,
) -> Costs:  # fmt: skip
    """Times every distinct group on one rank each, the ranks sharing the work, and gathers all.

    memory_bytes: limit per rank; None = its share of what the node has.
    """
    threads = numerics.threads
    clock, slower = _clock(comm, threads)
    kind = f"{processor()}, {numerics.instruction_set}"
    kinds, speeds = _speeds(comm, kind, _reference_s(clock))

    parts = pieces(variants.primary, variants.graph, variants.uses)
    distinct = {p.key: p for p in parts}
    mine = sorted(distinct, key=lambda k: (-distinct[k].workspace_bytes, k))[comm.rank :: comm.size]
    profiler = Profiler(variants.primary, numerics.precision, clock)
    found = {key: _scale(profiler.sample(distinct[key]), speeds[comm.rank] * slower) for key in mine}
    samples = {key: s for part in comm.allgather_object(found) for key, s in part.items()}
    del profiler  # and the memory that it chills the caches with
    step_s = min(comm.allgather_object(_update_s_per_byte(optimizer, clock) * slower))

    base = memory.now_bytes  # every kernel has run by now: what is left is not weights
    limits = comm.allgather_object(((memory_bytes or memory_share(comm) + base), base))
    devices = tuple(Device(k, s, m, threads, b) for k, s, (m, b) in zip(kinds, speeds, limits, strict=True))
    levels = numerics.blocks.bit_length() if numerics.blocks > 1 else 0
    return Costs(
        groups=group_costs(variants.primary, parts, samples),
        cluster=Cluster(devices, comm.node_of_rank, measure_links(comm)),
        ties=variants.graph.ties,
        bytes_per_param_byte=2.0 + optimizer.state_buffers + levels,
        step_s_per_byte=step_s,
        source="measured",
        spread=float(np.median([s.spread for s in samples.values()])),
    )


def _clock(comm: Communicator, threads: int) -> tuple[Callable[[], float], float]:
    """Wall time; where ranks outnumber cores, time on the core, and how often a rank has to wait."""
    if not comm.oversubscribed or threads > 1:
        return time.perf_counter, 1.0
    on_node = comm.node_of_rank.count(comm.node_of_rank[comm.rank])
    return time.thread_time, max(1.0, on_node / len(cores_available()))


def _reference_s(clock: Callable[[], float]) -> float:
    """A fixed piece of work: what makes the speeds of ranks comparable."""
    a = torch.ones(384, 384)
    seconds = []
    for _ in range(8):
        start = clock()
        torch.mm(a, a)
        seconds.append(clock() - start)
    return min(seconds[1:])


def _speeds(comm: Communicator, kind: str, reference_s: float) -> tuple[list[str], list[float]]:
    """Kind and relative speed of every rank: 1 for the kind of rank 0. Ranks of one kind are equally
    fast, and the fastest of them tells how fast, because what differs between them is noise."""
    seen = comm.allgather_object((kind, reference_s))
    fastest = {k: min(s for other, s in seen if other == k) for k, _ in seen}
    return [k for k, _ in seen], [fastest[seen[0][0]] / fastest[k] for k, _ in seen]


def _scale(s: Sample, factor: float) -> Sample:
    """Seconds on a device of speed 1."""
    return replace(
        s, fwd_s=s.fwd_s * factor, bwd_input_s=s.bwd_input_s * factor, bwd_weight_s=s.bwd_weight_s * factor
    )


@torch.no_grad()
def _update_s_per_byte(optimizer: Optimizer, clock: Callable[[], float]) -> float:
    """Norm, clip, update and zero of a block of weights, per byte of weights. A user's own optimizer,
    which may want the model's parameters and no others, counts as AdamW."""
    settings = (
        optimizer if isinstance(optimizer, OptimizerSettings) else OptimizerSettings(clip=optimizer.clip)
    )
    data = Flat.like({"w": torch.Size([_UPDATE_ELEMENTS])}, torch.float32)
    group = ParamGroup(True, data, data.sibling())
    updater = FlatUpdater([group], settings)
    seconds = []
    for _ in range(6):
        start = clock()
        torch.linalg.vector_norm(group.grad.buffer)
        updater.update(0, 1.0 if settings.clip else None)
        group.grad.buffer.zero_()
        seconds.append(clock() - start)
    return min(seconds[1:]) / data.buffer.nbytes
