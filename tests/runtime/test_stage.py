"""One stage alone: what it returns is its own, and blocks are added up as a fixed tree."""

from __future__ import annotations

import pytest
import torch
from tiny import SHAPES, Case, captured, differences, even_cuts, train_local
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.group_costs import group_costs
from mpipipe.graph.pieces import pieces
from mpipipe.graph.profile import Live, Profiler
from mpipipe.planner import stage_costs
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.transport import Form, as_bytes
from mpipipe.runtime.weights import BlockSums, StageWeights
from mpipipe.values import Cluster, Costs, Device, Link


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


def held(model: str, precision: str, cuts: tuple[str, ...]) -> list[tuple[set[int], int]]:
    """By stage, bytes of the tensors of a micro-batch: after a forward, for a backward as a whole and in two,
    the received ones among them; and those that after I wait for W, without the gradients that were received
    and the statistics of buffers."""
    variants, found = captured(model, 2, precision), []
    specs, owner = variants.specs(2), variants.stage_of_param(cuts)
    for s in range(len(cuts) + 1):
        stashes, waiting = set[int](), 0
        for in_two in (False, True):
            code = variants.training_code(specs, cuts, s, in_two)
            weights = StageWeights(
                variants.source, variants.graph, s, owner, code.leaves, variants.trained, "per_use"
            )
            for leaf in weights.leaves.values():
                leaf.grad = torch.zeros_like(leaf)
            stage = Stage(weights, precision)
            with Live() as live:
                received = [Form.of(port).empty().zero_() for port in code.received]
                inputs = {
                    k: torch.zeros(specs[k].shape, dtype=getattr(torch, specs[k].dtype)) for k in code.inputs
                }
                sent = stage.forward(code, 0, received, inputs, 0, True)
                grads = [torch.ones_like(t) for t, p in zip(sent, code.sent, strict=True) if p.needs_grad]
                others = {StorageWeakRef(t.untyped_storage()) for t in grads}
                del inputs, sent  # they are there longer where backward needs them
                stashes.add(live.beside(others))
                del received
                if in_two:
                    stage.backward_input(0, grads)
                    others |= {StorageWeakRef(t.untyped_storage()) for t in stage.statistics_of([0])}
                    waiting = live.beside(others)
        found.append((stashes, waiting))
    return found


def storages(tensors: list[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.slow
def test_gradients_that_are_returned_share_no_memory_with_those_received() -> None:
    """The received ones are receive buffers, filled again while what was returned is still being sent."""
    stage, received, sent = middle_stage()
    assert storages(sent) & storages(received), "something is passed on as it is"
    grads = [torch.randn_like(t) for t in sent]
    returned = stage.backward(0, grads)
    assert len(returned) == len(received)
    assert not storages(returned) & storages(grads)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_stage_without_a_weight_gradient_that_can_wait_does_all_in_i() -> None:
    """Norms alone: W has nothing to do, and the bits are those of one rank."""
    case, cuts = Case("gpt", tied="eager"), ("blocks.0.ln_2/layer_norm.0", "blocks.0.mlp.fc/linear.0")
    code = case.variants.training_code(case.variants.specs(case.rows), cuts, 1, in_two=True)
    assert [name for name, _ in code.leaves] == ["blocks.0.ln_2.weight", "blocks.0.ln_2.bias"]
    assert code.deferred == frozenset()
    got = train_local(case, 3, "zb-h1", cuts=cuts, window=16)
    assert differences(train_local(case, 1), got) == []


@pytest.mark.slow
def test_with_kernels_the_same_weight_gradients_wait_as_without() -> None:
    """But for that of the head, which is made with the loss, and biases that a kernel adds."""
    plain = captured("gpt, no dropout", 2)
    fast = plain.lowered(Lowering("fast"))
    waiting = [v.training_code(v.first, (), 0, in_two=True).deferred or set() for v in (plain, fast)]
    matrices = [{name for name, _ in of if name.endswith("weight")} for of in waiting]
    assert matrices[1] == matrices[0]


# counted with each: gradients that two groups keep as one, or parts of a message; all of what a received view
# was a view of
_PASSED_ON = {"skips": 32, "parts": 1024}


@pytest.mark.parametrize(
    ("model", "precision"), [*((model, "fp32") for model in (*SHAPES, "parts")), ("gpt", "bf16")]
)
@pytest.mark.slow
def test_what_a_stage_keeps_of_a_micro_batch_is_what_its_plan_counts_at_every_cut(
    model: str, precision: str
) -> None:
    """A tensor that is received counts once, also where a group of the stage keeps it for backward."""
    variants = captured(model, 2, precision)
    parts, names = pieces(variants.primary, variants.graph, variants.uses), variants.graph.groups
    profiler = Profiler(variants.primary, precision, lambda: 0.0)
    machine = Cluster((Device("cpu", 1.0, 1 << 40, 1),) * 3, (0, 0, 0), {"node": Link(0.0, 1e9)})
    groups = group_costs(variants.primary, parts, {p.key: profiler.sample(p) for p in parts})
    costs = Costs(groups, machine, variants.graph.ties, 4.0, 0.0, "measured", 0.0)
    n = len(names)
    for cuts in [*((at,) for at in range(1, n)), *((at, at + 2) for at in range(1, n - 2, 6))]:
        found = held(model, precision, tuple(names[at] for at in cuts))
        for stage, (stashes, waiting) in zip(stage_costs(costs, cuts), found, strict=True):
            assert stashes == {stage.stash_bytes}, cuts
            assert waiting <= stage.waiting_bytes <= waiting + _PASSED_ON.get(model, 0), cuts
    assert sum(group.received_bytes for group in groups) > 0
