"""Stages and how often each is copied: the dynamic programme of PipeDream.

Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training* (SOSP 2019), section 3.1,
over the ideals of the graph instead of a chain, with one bandwidth between all devices:

    best[m, J] = min over ideals I < J and copies c <= m of
                 max(best[m - c, I], 2 activation(I) / bandwidth, stage(J - I, c))
    stage(S, c) = max(seconds(S), 4 (c - 1) / c * parameters(S) / bandwidth) / c

Messages are overlapped with computation, hence the maxima. Factor 2: activations forward and gradients back.
Factor 4: each copy sends and receives 2 (c - 1) / c of the gradients in an all-reduce, as in PipeDream's own
optimizer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpipipe.planner.placement.problem import Operator, Problem, check, gap, topological
from mpipipe.values import Float64, Value

MOST_IDEALS = 1500  # beyond, prefixes of one topological order; time goes with their square
_ROUNDING = 1e-12  # of sums in another order, relative


@dataclass(frozen=True)
class Layer(Value):
    """One node of a profile, for one micro-batch."""

    id: str
    name: str
    compute_s: float  # forward and backward
    activation_bytes: float  # its output
    parameter_bytes: float


@dataclass(frozen=True)
class Profile(Value):
    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]  # (source, reader), positions in `layers`

    def problem(self, n_accelerators: int, bytes_per_s: float, capacity_bytes: float) -> Problem:
        """Without copies: an output crosses, and its gradient back. Memory: parameters and outputs."""
        operators = tuple(
            Operator(
                id=layer.id,
                name=layer.name,
                accelerator_s=layer.compute_s,
                cpu_s=layer.compute_s,
                nbytes=layer.parameter_bytes + layer.activation_bytes,
                output_s=2 * layer.activation_bytes / bytes_per_s,
            )
            for layer in self.layers
        )
        return Problem(operators, self.edges, n_accelerators, 0, capacity_bytes)


@dataclass(frozen=True)
class Stage(Value):
    layers: tuple[int, ...]  # positions in the profile, in a topological order
    copies: int
    compute_s: float  # of one micro-batch on one copy
    all_reduce_s: float  # that hides behind it
    receive_s: float  # what comes in, and its gradient back

    @property
    def load_s(self) -> float:
        """Seconds per micro-batch, when the copies take turns."""
        return max(self.receive_s, max(self.compute_s, self.all_reduce_s) / self.copies)


@dataclass(frozen=True)
class Replicated(Value):
    stages: tuple[Stage, ...]
    bound_s: float
    seconds: float  # that it took

    @property
    def load_s(self) -> float:
        return max(stage.load_s for stage in self.stages)

    @property
    def gap(self) -> float:
        """As that of `Placement`."""
        return gap(self.load_s, self.bound_s)


def replicate(profile: Profile, source: str, n_devices: int, bytes_per_s: float) -> Replicated:
    """The stages with the smallest largest load on at most `n_devices`. Exact unless the graph has more than
    MOST_IDEALS ideals. Raises PlanError as `check`; `source` names the profile."""
    started = time.perf_counter()
    check(profile.problem(n_devices, bytes_per_s, np.inf), source)
    n = len(profile.layers)
    order = topological(n, profile.edges, range(n))
    found = _ideals(profile, order)
    ideals = np.tri(n + 1, n, -1, bool)[:, np.argsort(order)] if found is None else found
    seconds, parameters = (
        ideals @ np.array([getattr(layer, field) for layer in profile.layers])
        for field in ("compute_s", "parameter_bytes")
    )
    receive_s = 2 * _boundary_bytes(profile, ideals) / bytes_per_s
    reduce_s = 4 * parameters / bytes_per_s
    cuts, copies = _best(ideals, seconds, receive_s, reduce_s, n_devices)
    stages = tuple(
        Stage(
            layers=tuple(v for v in order if ideals[end, v] and not ideals[begin, v]),
            copies=count,
            compute_s=float(seconds[end] - seconds[begin]),
            all_reduce_s=float(reduce_s[end] - reduce_s[begin]) * (count - 1) / count,
            receive_s=float(receive_s[begin]),
        )
        for (begin, end), count in zip(cuts, copies, strict=True)
    )
    load_s = max(stage.load_s for stage in stages)
    bound_s = float(seconds[-1]) / n_devices if found is None else load_s
    return Replicated(stages, bound_s, time.perf_counter() - started)


def _ideals(profile: Profile, order: list[int]) -> NDArray[np.bool_] | None:
    """Every set of layers that holds what its layers read, (ideals, layers), small ones first; None if there
    are too many."""
    needs = dict.fromkeys(order, 0)
    for source, reader in profile.edges:
        needs[reader] |= 1 << source
    level, found = {0}, [0]
    while level:
        level = {
            ideal | 1 << v
            for ideal in level
            for v, need in needs.items()
            if not ideal >> v & 1 and need & ideal == need
        }
        found += sorted(level)
        if len(found) > MOST_IDEALS:
            return None
    return np.array([[ideal >> v & 1 for v in range(len(order))] for ideal in found], bool)


def _boundary_bytes(profile: Profile, ideals: NDArray[np.bool_]) -> Float64:
    """Of the outputs in each ideal that are read outside of it."""
    read_outside = np.zeros(ideals.shape, bool)
    for source, reader in profile.edges:
        read_outside[:, source] |= ideals[:, source] & ~ideals[:, reader]
    total: Float64 = read_outside @ np.array([layer.activation_bytes for layer in profile.layers])
    return total


def _best(
    ideals: NDArray[np.bool_], seconds: Float64, receive_s: Float64, reduce_s: Float64, n_devices: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Of each stage the ideals that it lies between, and its copies. Of equally good plans one with fewest
    stages."""
    counts = np.arange(1, n_devices + 1)[:, None]
    best = np.zeros((n_devices + 1, len(ideals)))
    best[0, 1:] = np.inf
    n_stages = np.zeros(best.shape, int)
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for end in range(1, len(ideals)):
        begins = np.flatnonzero(~(ideals[:end] & ~ideals[end]).any(1))
        compute, reduce = (
            seconds[end] - seconds[begins],
            (reduce_s[end] - reduce_s[begins]) * (counts - 1) / counts,
        )
        stage = np.maximum(np.maximum(compute, reduce) / counts, receive_s[begins])
        for m in range(1, n_devices + 1):
            cost = np.maximum(best[m - 1 :: -1, begins], stage[:m])
            equal = cost <= cost.min() * (1 + _ROUNDING)
            before = np.where(equal, n_stages[m - 1 :: -1, begins], len(ideals))
            fewer, which = divmod(int(before.argmin()), len(begins))
            best[m, end], n_stages[m, end] = cost[fewer, which], before[fewer, which] + 1
            came[m, end] = (int(begins[which]), fewer + 1)
    cuts, copies, m, end = [], [], n_devices, len(ideals) - 1
    while end:
        begin, count = came[m, end]
        cuts.append((begin, end))
        copies.append(count)
        m, end = m - count, begin
    return cuts[::-1], copies[::-1]
