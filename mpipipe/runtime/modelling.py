"""Costs without ranks and without weights: groups are counted, and timed where that is quick. No messages."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mpipipe.errors import PlanError
from mpipipe.graph.pieces import Piece, Sample, pieces
from mpipipe.graph.rates import Rates, sample_of, sampled
from mpipipe.graph.variants import Variants
from mpipipe.graph.work import Tallier, Tally
from mpipipe.planner.sizes import size_text
from mpipipe.runtime.costing import Found
from mpipipe.runtime.optimizer import Optimizer, OptimizerSettings

TIMED_BYTES, TIMED_S = 256 << 20, 0.2  # what a group may take to be run here; the seconds are a guess
_GUESSED_FLOPS_PER_S, _GUESSED_BYTES_PER_S = 50e9, 5e9  # of a thread, for that guess


def find(variants: Variants, tallier: Tallier, rates: Rates, here: bool) -> Found:
    """Every distinct group once. here: small ones are timed, for ranks like this process; else only layers
    that run as they are written are, because they cannot be counted. Raises PlanError where one of these
    is too large to be run on a machine that is not the one it is planned for."""
    parts = tuple(pieces(variants.primary, variants.graph, variants.uses))
    distinct = {p.key: p for p in parts}
    tallies = {key: tallier.tally(p) for key, p in distinct.items()}
    if not here:
        _check_opaque(distinct, tallies)
    timed = frozenset(key for key, t in tallies.items() if t.opaque or (here and _is_small(t)))
    samples = {key: sampled(tallier, distinct[key]) for key in distinct if key in timed}
    both = [key for key in timed if not tallies[key].opaque] if len(timed) < len(distinct) else []
    compared = [_seconds(sample_of(tallies[key], rates)) / _seconds(samples[key]) for key in both]
    samples |= {key: sample_of(t, rates) for key, t in tallies.items() if key not in timed}
    return Found(parts, samples, timed, tuple(compared))


def _check_opaque(distinct: Mapping[str, Piece], tallies: Mapping[str, Tally]) -> None:
    for key, tally in tallies.items():
        if tally.opaque and tally.held_bytes > TIMED_BYTES:
            raise PlanError(
                f"{distinct[key].name}: this layer runs as it is written, so it would have to be timed here, "
                f"and takes {size_text(tally.held_bytes)}, more than {size_text(TIMED_BYTES)}; plan on a "
                "machine of that kind, without --cluster, or write the layer so that it can be captured"
            )


def _is_small(tally: Tally) -> bool:
    works = (*tally.forward, *tally.backward)
    flops, nbytes = sum(w.flops for w in works), sum(w.nbytes for w in works)
    guess = flops / (_GUESSED_FLOPS_PER_S * torch.get_num_threads()) + nbytes / _GUESSED_BYTES_PER_S
    return tally.held_bytes <= TIMED_BYTES and guess <= TIMED_S


def _seconds(s: Sample) -> float:
    return max(s.seconds, 1e-9)


def update_bytes(optimizer: Optimizer) -> float:
    """That norm, clip, update and zero move, per byte of weights: reads of the gradient for the norm and the
    update, writes of zeros, weights and each buffer of the optimizer read and written; the clip likewise, but
    where one kernel does all after the norm: 32 bytes of an fp32 weight by AdamW."""
    at_once = isinstance(optimizer, OptimizerSettings) and optimizer.by_kernel
    clip = 2 if optimizer.clip and not at_once else 0
    return 1.0 + clip + 1.0 + 2.0 + 2.0 * optimizer.state_buffers + 1.0
