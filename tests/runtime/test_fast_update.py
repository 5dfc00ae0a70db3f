"""The built-in optimizer with fast bits: close to float64, the same bits for every cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.ops.native import MODULES
from mpipipe.runtime.optimizer import Bits, FlatUpdater, OptimizerSettings, clip_coefficient, norms
from mpipipe.runtime.weights import Flat, ParamGroup

SHAPES = {"a": (33, 5), "b": (7,), "c": (40, 1000), "d": (1,), "e": (0, 3), "f": (130,)}
Tensors = dict[str, torch.Tensor]


class Stage:
    """Some of the parameters, on a rank of their own."""

    def __init__(self, names: Sequence[str], settings: OptimizerSettings, dtype: torch.dtype) -> None:
        self.groups = []
        for decay in (True, False):
            shapes = {n: torch.Size(SHAPES[n]) for n in names if (len(SHAPES[n]) > 1) == decay}
            if shapes:
                data = Flat.like(shapes, dtype)
                self.groups.append(ParamGroup(decay, data, data.sibling()))
        self.data = {n: t for g in self.groups for n, t in g.data.views.items()}
        self.grad = {n: t for g in self.groups for n, t in g.grad.views.items()}
        for name, t in self.data.items():
            t.copy_(drawn(name, -1))
        self.updater = FlatUpdater(self.groups, settings)


def drawn(name: str, step: int) -> torch.Tensor:
    seed = 100 * (step + 1) + ord(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def trained(
    cuts: Sequence[Sequence[str]], bits: Bits = "fast", clip: float | None = 1.0, steps: int = 3,
    dtype: torch.dtype = torch.float32, **others: object,
) -> Tensors:  # fmt: skip
    """Weights and state after some steps; each list of names is a rank."""
    how = OptimizerSettings(lr=1e-2, clip=clip, bits=bits, **others)  # type: ignore[arg-type]
    stages = [Stage(names, how, dtype) for names in cuts]
    for step in range(steps):
        found: dict[str, float] = {}
        for stage in stages:
            for name, grad in stage.grad.items():
                grad.copy_(drawn(name, step))
            found |= norms([g.grad for g in stage.groups], bits)
        factor = clip_coefficient([found[n] for n in SHAPES], clip)[1] if clip else None
        for stage in stages:
            stage.updater.update(step, factor)
            assert not any(g.grad.buffer.any() for g in stage.groups)
    state = {name: t for stage in stages for name, t in stage.updater.state().items()}
    return state | {name: t for stage in stages for name, t in stage.data.items()}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@settings(max_examples=8)
@given(st.lists(st.integers(0, 2), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_every_cut_has_the_same_bits(kind, clip, rank_of):
    cuts = [[name for name, at in zip(SHAPES, rank_of, strict=True) if at == rank] for rank in range(3)]
    whole = trained([list(SHAPES)], clip=clip, kind=kind)
    parts = trained([names for names in cuts if names], clip=clip, kind=kind)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(t, parts[name]) for name, t in whole.items())


@pytest.mark.parametrize("clip", [None, 0.5])
def test_errors_are_at_most_twice_those_of_torch(clip):
    cuts = [list(SHAPES)]
    exact = trained(cuts, "torch", clip, steps=20, dtype=torch.float64)
    torchs, ours = trained(cuts, "torch", clip, steps=20), trained(cuts, "fast", clip, steps=20)
    assert exact.keys() == torchs.keys() == ours.keys()
    for name, wanted in exact.items():
        error, theirs = (float((t[name].double() - wanted).norm()) for t in (ours, torchs))
        assert error <= 2 * max(theirs, 2.0**-24 * float(wanted.norm())), name


@pytest.mark.parametrize(("kind", "dtype"), [("sgd", torch.float32), ("adamw", torch.bfloat16)])
def test_where_there_is_no_kernel_bits_are_those_of_torch(kind, dtype):
    fast, torchs = (trained([list(SHAPES)], bits, None, dtype=dtype, kind=kind) for bits in ("fast", "torch"))
    assert all(torch.equal(t, torchs[name]) for name, t in fast.items())


def test_a_package_without_kernels_has_the_bits_of_torch(monkeypatch):
    monkeypatch.setitem(MODULES, "cpu", None)
    fast, torchs = (trained([list(SHAPES)], bits, None) for bits in ("fast", "torch"))
    assert all(torch.equal(t, torchs[name]) for name, t in fast.items())


def test_only_matrices_decay():
    with_decay, without = (trained([list(SHAPES)], weight_decay=decay) for decay in (0.5, 0.0))
    changed = {name for name in SHAPES if not torch.equal(with_decay[name], without[name])}
    assert changed == {"a", "c"}
