"""One stage alone: what it returns is its own, and blocks are added up as a fixed tree."""

from __future__ import annotations

import pytest
import torch
from tiny import captured, even_cuts
from torch import Tensor

from mpipipe.runtime.stage import Stage
from mpipipe.runtime.transport import Form, as_bytes
from mpipipe.runtime.weights import BlockSums, StageWeights


def middle_stage() -> tuple[Stage, list[Tensor], list[Tensor]]:
    """A stage between two others after its forward, a relayed skip through it; received and sent."""
    variants = captured("skips", 2)
    cuts = even_cuts(variants.graph.groups, 5)
    code = variants.code("train", variants.specs(2), cuts, 1)
    owner = variants.stage_of_param(cuts)
    weights = StageWeights(
        variants.source, variants.graph, 1, owner, code.leaves, variants.trained, "per_use"
    )
    stage = Stage(weights, "fp32")
    received = [torch.randn(port.spec.shape) for port in code.received]
    return stage, received, stage.forward(code, 0, received, {}, 0, True)


def storages(tensors: list[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def test_gradients_that_are_returned_share_no_memory_with_those_received() -> None:
    """The received ones are receive buffers, filled again while what was returned is still being sent."""
    stage, received, sent = middle_stage()
    assert storages(sent) & storages(received), "something is passed on as it is"
    grads = [torch.randn_like(t) for t in sent]
    returned = stage.backward(0, grads)
    assert len(returned) == len(received)
    assert not storages(returned) & storages(grads)


def test_gradients_are_added_to_those_of_earlier_micro_batches() -> None:
    stage, received, sent = middle_stage()
    first = [torch.randn_like(t) for t in sent]
    stage.backward(0, first)
    before = {n: g.clone() for n, g in stage.weights.grad.items()}
    assert any(g.abs().sum() > 0 for g in before.values())
    variants = captured("skips", 2)
    code = variants.code("train", variants.specs(2), even_cuts(variants.graph.groups, 5), 1)
    stage.forward(code, 1, received, {}, 0, True)
    stage.backward(1, first)
    for name, g in stage.weights.grad.items():
        assert torch.equal(g, before[name] + before[name])


def tree(parts: list[Tensor]) -> Tensor:
    """The definition: the largest power of two of parts on the left, the rest on the right."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << ((len(parts) - 1).bit_length() - 1)
    return tree(parts[:left]) + tree(parts[left:])


@pytest.mark.parametrize("n_blocks", range(2, 12))
def test_blocks_are_added_by_a_fixed_tree(n_blocks: int) -> None:
    accumulators = [torch.zeros(50), torch.zeros(3, 7)]
    sums = BlockSums(accumulators)
    for step in range(2):  # nothing is left over from the step before
        blocks = [[torch.randn_like(a) for a in accumulators] for _ in range(n_blocks)]
        for block in blocks:
            for a, value in zip(accumulators, block, strict=True):
                a += value
            sums.end_of_block()
        sums.finish()
        for i, a in enumerate(accumulators):
            assert torch.equal(a, tree([block[i] for block in blocks])), step
            a.zero_()


def test_a_tensor_travels_as_its_memory_and_with_its_strides() -> None:
    sent = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4).transpose(0, 2)
    form = Form.of(sent)
    received = form.empty()
    as_bytes(received)[:] = as_bytes(sent)
    assert received.stride() == sent.stride()
    assert torch.equal(received, sent)
    other = sent.contiguous()
    assert form.shape_like(sent) is sent
    assert form.shape_like(other).stride() == sent.stride()
    assert torch.equal(form.shape_like(other), sent)


def test_weight_gradients_wait_and_what_is_kept_for_them_is_let_go() -> None:
    """I gives the gradients of the inputs alone; W adds the bits of a whole backward."""
    whole, received, sent = middle_stage()
    grads = [torch.randn_like(t) for t in sent]
    expected = whole.backward(0, grads)
    variants = captured("skips", 2)
    cuts = even_cuts(variants.graph.groups, 5)
    code = variants.training_code(variants.specs(2), cuts, 1, in_two=True)
    assert code.deferred == frozenset(code.leaves), "convolutions alone"
    two, _, _ = middle_stage()
    two.forward(code, 1, received, {}, 0, True)
    returned = two.backward_input(1, grads)
    assert all(torch.equal(a, b) for a, b in zip(expected, returned, strict=True))
    assert not storages(returned) & storages(grads)
    assert not any(g.any() for g in two.weights.grad.values())
    two.backward_weight(1)
    for name, g in whole.weights.grad.items():
        assert torch.equal(g, two.weights.grad[name]), name
    assert not two._waiting
