"""The stages of a captured model one after the other, and the same model as its author runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpipipe.graph.capture import autocast
from mpipipe.graph.program import Loss, call_model
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.values import TensorSpec

Batch = dict[str, Tensor]
Result = dict[str, Tensor]  # "loss", and the gradient of each parameter that has one


def specs_of(batch: Batch) -> dict[str, TensorSpec]:
    return {k: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in batch.items()}


def variants_of(
    factory: Callable[[], nn.Module], loss: Loss, batch: Batch, precision: str = "fp32", **more: Any
) -> Variants:
    """Of a model that sees batches of this one shape."""
    rows = next(iter(batch.values())).shape[0]
    return Variants(ModelSource(factory, 0), loss, lambda _: specs_of(batch), rows, precision, **more)


def plain(variants: Variants, factory: Callable[[], nn.Module], batch: Batch) -> Result:
    """Forward and backward in eager torch, with the weights that a run starts from."""
    source, model = variants.source, factory().train()
    first = source.materialise([*source.params, *source.buffers])
    wanted = model.state_dict()
    model.load_state_dict({n: first[c] for n, c in source.alias.items() if n in wanted})
    batch = {k: t.clone() for k, t in batch.items()}
    with autocast(variants.precision):
        total, _ = variants.loss(call_model(model, batch), batch)
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), **grads}


def staged(variants: Variants, cuts: Sequence[str], batch: Batch) -> Result:
    """The same of the stages, each with leaves and copies of its own."""
    source, specs = variants.source, specs_of(batch)
    first = source.materialise([*source.params, *source.buffers])
    leaves: dict[str, list[Tensor]] = {}
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    sent: list[Tensor] = []
    for stage in range(len(cuts) + 1):
        code = variants.code("train", specs, cuts, stage)
        received = [
            t.detach().clone().requires_grad_(p.needs_grad) for t, p in zip(sent, code.received, strict=True)
        ]
        own = [
            first[name].clone().requires_grad_(source.params[name].requires_grad) for name, _ in code.leaves
        ]
        for (name, _), t in zip(code.leaves, own, strict=True):
            leaves.setdefault(name, []).append(t)
        inputs = [batch[k].clone() for k in code.inputs]
        buffers = [first[name] for name in code.buffers]
        with autocast(variants.precision):
            results, _ = code.forward(*received, *inputs, *own, *buffers, *((0, 0) if code.random else ()))
        sent = list(results)
        assert [t.requires_grad for t in sent] == [p.needs_grad for p in code.sent]
        assert [t.stride() for t in sent] == [p.stride for p in code.sent]
        kept.append((received, sent))
    loss = sent[0].detach()
    grads: list[Tensor | None] = [torch.ones_like(loss)]
    for received, sent in reversed(kept):
        pairs = [(t, g) for t, g in zip(sent, grads, strict=True) if t.requires_grad and g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        grads = [t.grad for t in received]
    found = {n: [t.grad for t in ts if t.grad is not None] for n, ts in leaves.items()}
    assert not any(len(uses) > 1 for uses in found.values()), "use a parameter once: sums have an order"
    return {"loss": loss, **{n: uses[0] for n, uses in found.items() if uses}}


def differences(expected: Result, got: Result) -> list[str]:
    """Names of what is not the same to the last bit, or only on one side."""
    equal = {n for n in expected if n in got and torch.equal(expected[n], got[n])}
    return sorted({*expected, *got} - equal)


def every_cut(variants: Variants, parts: int = 6) -> list[tuple[str, ...]]:
    """No cut, then some single ones evenly spread, then all of these at once."""
    groups = variants.graph.groups
    places = sorted({1 + i * (len(groups) - 1) // parts for i in range(parts)} & set(range(1, len(groups))))
    return [(), *((groups[i],) for i in places), tuple(groups[i] for i in places)]
