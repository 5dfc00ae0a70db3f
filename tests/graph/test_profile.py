"""What a timing counts: the work of a group, with the caches as a step leaves them, and no call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from tiny import Case, capture
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

from mpipipe.cluster import memory
from mpipipe.graph import profile
from mpipipe.graph.cut import Code
from mpipipe.graph.group_costs import group_costs
from mpipipe.graph.pieces import Sample, pieces
from mpipipe.graph.profile import Live, Profiler, working_set_bytes
from mpipipe.graph.rates import sampled
from mpipipe.graph.source import ModelSource
from mpipipe.graph.split import split
from mpipipe.graph.variants import Variants
from mpipipe.graph.work import Tallier
from mpipipe.ops.deferred import Pending
from mpipipe.values import TensorSpec


@pytest.fixture(scope="module")
def variants() -> Variants:
    return capture("mlp")


def ticks() -> Iterator[float]:
    return map(float, count())


@pytest.mark.slow
def test_what_a_call_costs_is_not_counted(variants: Variants) -> None:
    clock = ticks()  # each reading is a second later, whatever is done between
    profiler = Profiler(variants.primary, "fp32", lambda: next(clock))
    for piece in pieces(variants.primary, variants.graph, variants.uses):
        assert profiler.sample(piece).seconds == 0.0
        assert profiler.run(piece, 2) == 0.0
        assert profiler.run(piece, 0) == math.inf


@pytest.mark.slow
def test_what_a_backward_in_two_takes_longer_is_found_where_a_weight_gradient_waits(
    variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, run = [0.0], Pending.run

    def slow(self: Pending) -> None:
        now[0] += 3.0
        run(self)

    monkeypatch.setattr(Pending, "run", slow)
    profiler = Profiler(variants.primary, "fp32", lambda: now[0])
    for piece in pieces(variants.primary, variants.graph, variants.uses):
        sample = profiler.sample(piece)
        assert sample.split_s == (3.0 if split(piece.code).deferred else 0.0)
        assert sample.seconds == 0.0
        assert sample.times(2.0).split_s == 2.0 * sample.split_s


def test_the_caches_lose_what_a_stage_touches_but_not_more_than_they_hold(
    variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = working_set_bytes(variants.primary)
    params = sum(spec.nbytes for spec in variants.graph.params.values())
    assert touched > 2 * params  # weights, their gradients, and the results
    for ranks in (1, 2):
        assert Profiler(variants.primary, "fp32", ranks=ranks).chilled_bytes == touched // ranks
    monkeypatch.setattr(profile, "CACHE_BYTES", 100)
    assert Profiler(variants.primary, "fp32").chilled_bytes == 100


def test_each_parameter_adds_its_update(variants: Variants) -> None:
    parts = pieces(variants.primary, variants.graph, variants.uses)
    samples = {p.key: Sample(1.0, 1.0, 1.0, 0.0, 0, 0, (), ()) for p in parts}
    costs = group_costs(variants.primary, parts, samples, 0.5)
    assert sum(c.update_s for c in costs) == 0.5 * len(variants.graph.params)


def test_a_smaller_mean_micro_batch_takes_less_time_and_the_largest_its_memory(variants: Variants) -> None:
    parts = pieces(variants.primary, variants.graph, variants.uses)
    samples = {p.key: Sample(1.0, 2.0, 4.0, 0.0, 16, 8, (), ()) for p in parts}
    full = group_costs(variants.primary, parts, samples)
    half = group_costs(variants.primary, parts, samples, fill=0.5)
    assert [replace(c, fwd_s=1.0, bwd_input_s=2.0, bwd_weight_s=4.0) for c in half] == list(full)
    assert [c.seconds for c in half] == [c.seconds / 2 for c in full]
    assert replace(Case().numerics, batch=9, micro_batch=3, micro_batches=4).fill == 0.75


def test_traced_operators_have_keys_that_last(variants: Variants) -> None:
    assert all(p.lasting for p in pieces(variants.primary, variants.graph, variants.uses))


def test_the_most_that_tensors_take_is_seen_between_operators() -> None:
    """Of views nothing, of what nobody holds any more nothing; what backward keeps is held."""
    kib, x = 1 << 10, torch.ones(256, requires_grad=True)
    with Live() as live:
        doubled = x.detach() * 2
        doubled.view(2, 128).add_(1.0)
        assert live.most_bytes == kib
        del doubled
        squared = (x.exp() * 3).square()  # keeps exp and the product
        assert live.most_bytes == 3 * kib
        squared.sum().backward()
    assert 3 * kib + 4 < live.most_bytes < 7 * kib, "gradients on their way"


@pytest.mark.slow
def test_tensors_at_work_are_counted_alike_with_and_without_values(variants: Variants) -> None:
    profiler, tallier = Profiler(variants.primary, "fp32"), Tallier(variants.primary, "fp32")
    for piece in pieces(variants.primary, variants.graph, variants.uses):
        sample, tally = profiler.sample(piece), tallier.tally(piece)
        assert sample.at_work_bytes == tally.at_work_bytes <= sample.workspace_bytes
        assert sample.at_work_bytes > 0


class Picky(nn.Module):
    """A Cholesky, which takes no made-up matrix, and a loss that takes probabilities alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.first(x).tanh(), self.gate(x).softmax(-1)
        matrix = h[:, :, None] * h[:, None, :] + torch.eye(4)
        return (self.last(torch.linalg.cholesky(matrix).sum(-1)).sigmoid() * gate).sum(-1)


def entropy(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    return binary_cross_entropy(outputs, batch["labels"], reduction="sum"), float(len(outputs))


@pytest.mark.slow
def test_operators_that_refuse_made_up_numbers_get_halves_or_are_modelled() -> None:
    def specs(rows: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((rows, 4), "float32"), "labels": TensorSpec((rows,), "float32")}

    v = Variants(ModelSource(Picky, 0), entropy, specs, 2, "fp32")
    profiler, refused = Profiler(v.primary, "fp32"), []
    for piece in pieces(v.primary, v.graph, v.uses):
        assert sampled(profiler, piece).seconds > 0.0
        if profiler.run(piece, 1) == math.inf:
            refused.append(piece)
    (piece,) = refused
    assert "cholesky" in piece.code.forward.code
    assert sampled(profiler, piece).saved_sent == (0,)
    with pytest.raises(RuntimeError, match="not positive-definite"):
        profiler.sample(piece)


@pytest.mark.skipif(not memory._restart_peak(), reason="the system cannot forget the highest so far")
@pytest.mark.slow
def test_what_a_library_takes_beside_is_workspace(
    variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = pieces(variants.primary, variants.graph, variants.uses)[0]
    once = Profiler._once

    def greedy(self: Profiler, code: Code, *args: Any) -> tuple[float, float]:
        if code is piece.code:
            torch.ones(16 << 20)  # as a convolution's columns; freed at once
        return once(self, code, *args)

    monkeypatch.setattr(Profiler, "_once", greedy)
    found = Profiler(variants.primary, "fp32").sample(piece).workspace_bytes
    assert found >= (60 << 20) > piece.workspace_bytes
