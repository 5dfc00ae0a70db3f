"""Seconds of counted work: from a few figures of a machine, or from short runs on this one.

    Roofline   a machine that is not here: operations and bytes at its rates (Williams et al. 2009)
    Trials     this machine: every distinct operator is run at its own size; a large one at a reduced
               size, and its seconds taken in proportion to operations, or else bytes

What an operator is run on is made up: halves and zeros.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from mpipipe.graph.pieces import Piece, Sample
from mpipipe.graph.profile import REFUSALS, Profiler
from mpipipe.graph.source import TRACING
from mpipipe.graph.work import Form, Tallier, Tally, Work, counted, made

TRIAL_FLOPS, TRIAL_BYTES = 1e9, 64 << 20  # largest trial, per thread and in all: 5 to 10 ms
LEAST_SIZE = 128  # no dimension is reduced below: rates fall there
REPEATS = 3  # after one that is not counted; the shortest counts
LONG_S = 0.1  # a trial that takes longer is not repeated
_SPLIT = 0.04  # of a backward: what it takes longer in two, measured 2 % (MKL) to 5 % (oneDNN)
_SLACK = 16  # times a trial's limits, for what cannot be reduced so far


class Rates(Protocol):
    def seconds(self, work: Work) -> float: ...


@dataclass(frozen=True)
class Roofline:
    """flops_per_s: what matrix products reach, by precision: "fp32", "bf16"."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: float

    def seconds(self, work: Work) -> float:
        half = any(form.dtype in (torch.bfloat16, torch.float16) for form in work.forms)
        rate = self.flops_per_s["bf16" if half else "fp32"]
        return max(work.flops / rate, work.nbytes / self.bytes_per_s)


class Trials:
    """chill: empties the caches before each trial, as for the groups that are timed (`Profiler.chill`)."""

    def __init__(self, chill: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> None:
        self._chill, self._clock, self._fake = chill, clock, FakeTensorMode()
        self._flops = TRIAL_FLOPS * torch.get_num_threads()
        self._trials: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def seconds(self, work: Work) -> float:
        if work.key not in self._seconds:
            self._seconds[work.key] = self._found(work)
        return self._seconds[work.key]

    def _found(self, work: Work) -> float:
        if not work.nbytes:
            return 0.0
        for kind in (lambda work: work, _stand_in):
            with TRACING, self._fake:
                small = reduced(kind(work), self._flops)
            seconds = self._trial(small)
            if math.isfinite(seconds):
                return seconds * (work.flops / small.flops if small.flops else work.nbytes / small.nbytes)
        raise RuntimeError(f"{work.key} cannot be timed, nor what stands for it")

    def _trial(self, work: Work) -> float:
        """inf where it cannot be run on made-up values."""
        if work.key not in self._trials:
            self._trials[work.key] = self._timed(work)
        return self._trials[work.key]

    @torch.no_grad()
    def _timed(self, work: Work) -> float:
        too_large = work.flops > _SLACK * self._flops or work.nbytes > _SLACK * TRIAL_BYTES
        if too_large or work.name.startswith("mkldnn_rnn"):  # which reads what only oneDNN can make
            return math.inf
        with TRACING:
            args, kwargs = tree_map(made, work.arguments)
            try:
                return self._shortest(lambda: work.op(*args, **kwargs))
            except (RuntimeError, IndexError, TypeError, ValueError):  # whatever it found wrong with halves
                return math.inf

    def _shortest(self, run: Callable[[], object]) -> float:
        seconds: list[float] = []
        while len(seconds) < 1 + REPEATS:
            self._chill()
            start = self._clock()
            run()
            seconds.append(self._clock() - start)
            if seconds[-1] > LONG_S:
                break
        return min(seconds[1:] or seconds)


def reduced(work: Work, flops: float) -> Work:
    """The same operator with its largest dimensions halved until it is no more than these and `TRIAL_BYTES`,
    as far as they go. Inside a fake mode."""
    small, sizes, fixed = work, {size: size for size in _reducible(work)}, set[int]()
    least = 2 if "convolution" in work.name else 2 * LEAST_SIZE
    while small.flops > flops or small.nbytes > TRIAL_BYTES:
        can = [size for size, now in sizes.items() if now >= least and size not in fixed]
        if not can:
            break
        size = max(can, key=sizes.__getitem__)
        halved = sizes | {size: sizes[size] // 2}
        try:
            small = counted(work.op, tree_map(partial(_smaller, sizes=halved), work.arguments))
            sizes = halved
        except (RuntimeError, IndexError, ValueError):  # this size is tied to others
            fixed.add(size)
    return small


def _stand_in(work: Work) -> Work:
    """A matrix product, or an element-wise product, of as many operations or bytes."""
    dtype = next((form.dtype for form in work.forms if form.dtype.is_floating_point), torch.float32)
    if work.flops:
        side = max(1, round((work.flops / 2) ** (1 / 3)))
        square = Form((side, side), (side, 1), dtype)
        return counted(torch.ops.aten.mm.default, ((square, square), {}))
    line = Form((max(1, work.nbytes // (3 * dtype.itemsize)),), (1,), dtype)
    return counted(torch.ops.aten.mul.Tensor, ((line, line), {}))


def _reducible(work: Work) -> set[int]:
    """Of a convolution the batch alone: its other sizes follow from each other."""
    if "convolution" in work.name:
        return {work.forms[0].shape[0]}
    return {size for form in work.forms for size in form.shape}


def _smaller(x: Any, sizes: Mapping[int, int]) -> Any:
    """A form or a number among the arguments, with some sizes replaced."""
    if isinstance(x, Form):
        shape = [sizes.get(size, size) for size in x.shape]
        return Form(tuple(shape), _dense(shape, x.stride), x.dtype)
    return sizes.get(x, x) if type(x) is int else x


def _dense(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the order of those of `like`; what is expanded stays so."""
    strides, step = [0] * len(shape), 1
    for i in sorted(range(len(shape)), key=lambda i: (like[i], -i)):
        if like[i]:
            strides[i], step = step, step * shape[i]
    return tuple(strides)


def sampled(profiler: Profiler, piece: Piece) -> Sample:
    """Timed; modelled where its operators take no made-up numbers. Raises what they raise where that is code
    of the user's, which nobody can count."""
    try:
        return profiler.sample(piece)
    except REFUSALS:
        tally = Tallier(profiler.anatomy, profiler.precision).tally(piece)
        if tally.opaque:
            raise
        return sample_of(tally, Trials(profiler.chill, profiler.clock))


def sample_of(tally: Tally, rates: Rates) -> Sample:
    """What `profile.Profiler` would find by timing the group."""
    forward, backward, into = (
        sum(map(rates.seconds, works)) for works in (tally.forward, tally.backward, tally.into)
    )
    into = min(into, backward)
    remade = tally.remade and replace(tally.remade, seconds=sum(map(rates.seconds, tally.again)))
    return Sample(
        forward, into, backward - into, 0.0, tally.workspace_bytes, tally.saved_bytes, tally.saved_received,
        tally.saved_sent, remade, _SPLIT * backward if into < backward else 0.0,
        tally.at_work_bytes, tally.waiting, tally.returned, tally.cast_bytes,
    )  # fmt: skip
