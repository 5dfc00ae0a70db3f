"""The route of the fp32 matrix products of a run, measured before its costs are. Collective.

    the model's products -> each rank times them by every route -> one choice for all -> `Numerics.gemm`

What was measured is kept like the costs, for this model on these kinds of machine, however many ranks there
are: the next start takes the same route, and so has the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from mpipipe.cluster.agree import variables
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.node import bf16_units
from mpipipe.cluster.routes import Route, fastest, gain, together, why
from mpipipe.graph.products import products
from mpipipe.graph.source import TRACING
from mpipipe.graph.variants import Variants
from mpipipe.runtime.costing import clock_of, device_kind
from mpipipe.runtime.routes import RouteName, Trial, measure
from mpipipe.values import Gemm, Numerics, digest

TRIAL_FLOPS = 2.5e8  # per thread, of the largest trial: about 2 ms
BUDGET_S = 0.01  # of each product and route
Routes = tuple[Route, ...]
Precision = Literal["fp32", "bf16"]
T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """why: for people; found: what was measured, by the name under which a later start finds it; seconds: of
    the measurement, 0 where there was none."""

    gemm: Gemm
    why: str
    found: Mapping[str, Routes]
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Prober:
    """comm: None = this process alone; known: on rank 0, what earlier starts have measured."""

    comm: Communicator | None
    variants: Variants
    numerics: Numerics
    known: Mapping[str, Routes]

    def choose(self) -> Choice:
        """The route for kernels.gemm = auto."""
        started = time.perf_counter()
        name, routes, again = self._routes("fp32", ("mkl", "onednn"))
        if not routes:
            return Choice("mkl", "MKL, as the model has few of them", {name: routes})
        earlier = "" if again else ", as before"
        took_s = time.perf_counter() - started if again else 0.0
        return Choice(fastest(routes), f"{why(routes)}{earlier}", {name: routes}, took_s)

    def slow_bf16(self) -> tuple[str, Mapping[str, Routes]]:
        """What to say where bf16 is slower than fp32 because a processor has no units for it, else nothing;
        and what was measured."""
        if self.numerics.precision != "bf16" or all(self._gather(bool(bf16_units()))):
            return "", {}
        name, routes, _ = self._routes("bf16", ("mkl", "bf16"))
        if not routes or (ratio := gain(routes, "bf16")) >= 1.0:
            return "", {name: routes}
        said = (
            f"train.precision = bf16, but this processor has no units for it: the matrix products of this "
            f"model take {1 / ratio:.1f} times as long as in fp32; set train.precision=fp32"
        )
        return said, {name: routes}

    def _routes(self, precision: Precision, names: tuple[RouteName, ...]) -> tuple[str, Routes, bool]:
        """Of all ranks together, with the name, and whether they were measured now; none where the model has
        too few products."""
        name = self._name(precision)
        known = self._share(self.known.get(name))
        if known is not None:
            return name, known, False
        mine = self._measured(precision, names)
        return name, together(self._gather(mine)) if mine else (), True

    def _measured(self, precision: Precision, names: tuple[RouteName, ...]) -> Routes:
        """Of this rank, while all others measure too."""
        found = products(self.variants, precision, TRIAL_FLOPS * self.numerics.threads)
        draw, trials = torch.Generator().manual_seed(0), []
        for product in found:
            args, kwargs = product.operands(draw)
            trials.append(Trial(_call(product.work.op, kwargs), args, product.work.flops, product.times))
        clock = clock_of(self.comm, self.numerics.threads)[0] if self.comm else time.perf_counter
        if self.comm:
            self.comm.barrier()
        with TRACING:
            return measure(trials, names, BUDGET_S, clock) if trials else ()

    def _name(self, precision: str) -> str:
        n = self.numerics
        kinds = sorted(set(self._gather(device_kind(n.instruction_set))))
        facts = (precision, self.variants.graph.hash, kinds, n.torch, n.threads, variables())
        return digest(*map(repr, facts))

    def _gather(self, mine: T) -> list[T]:
        return self.comm.allgather_object(mine) if self.comm else [mine]

    def _share(self, value: T) -> T:
        return self.comm.bcast_object(value) if self.comm else value


def _call(op: Callable[..., object], kwargs: Mapping[str, object]) -> Callable[..., object]:
    return lambda *args: op(*args, **kwargs)
