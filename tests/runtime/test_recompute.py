"""What a stage makes again changes no bits, and less is kept meanwhile."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from tiny import BITS, SEED, Case, captured, differences, even_cuts, full_but, train_local
from torch import Tensor, fx

from mpipipe.graph.cut import Code
from mpipipe.graph.recompute import is_cheap, let_go
from mpipipe.runtime import stage as of_stage
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.weights import StageWeights
from mpipipe.values import Recompute

one_stage = cache(train_local)
Modes = tuple[Recompute, ...]
S, F, N = "selective", "full", "none"

FAST = [  # (case, schedule, ranks, modes of the stages in turn)
    (Case("gpt", precision="bf16", tied="eager"), "zb-h1", 2, (S, F)),
    (Case("gpt", batch=7, evaluate=True), "zb-v", 2, (F, S)),
    (Case("gpt", bits="fast", batch=7, evaluate=True), "interleaved", 2, (S,)),
    (Case("gpt", bits="fast", batch=7), "1f1b", 2, (S, F)),
    (Case("conv and norm", evaluate=True), "zb-h2", 3, (S,)),
    (Case("conv and norm", evaluate=True), "1f1b", 2, (F,)),
    (Case("traps", precision="bf16", optimizer="sgd"), "gpipe", 3, (S, F)),
    (Case("thrice", tied="eager", batch=11), "1f1b", 2, (F, N)),
]
ALL = [
    (case, schedule, ranks, modes)
    for case in BITS
    for schedule, ranks in [("1f1b", 1), ("gpipe", 4), ("zb-h1", 3), ("zb-v", 2), ("v-half", 2)]
    for modes in [(S,), (F,), (N, S, F)]
]


@pytest.mark.parametrize(("case", "schedule", "ranks", "modes"), full_but(FAST, [*FAST, *ALL]), ids=str)
@pytest.mark.slow
def test_the_bits_are_those_of_a_stage_that_keeps_all(
    case: Case, schedule: str, ranks: int, modes: Modes
) -> None:
    got = train_local(case, ranks, schedule, window=16, recompute=modes)
    assert differences(one_stage(case, 1), got) == []


def after_forward(recompute: Recompute) -> tuple[Stage, Code, list[Tensor]]:
    """The middle stage of three of a GPT with one micro-batch stashed; its code, and what it sent."""
    variants = captured("gpt", 2)
    cuts = even_cuts(variants.graph.groups, 3)
    code = variants.training_code(variants.first, cuts, 1, lets_go=recompute == "selective")
    owner = variants.stage_of_param(cuts)
    weights = StageWeights(
        variants.source, variants.graph, 1, owner, code.leaves, variants.trained, "per_use"
    )
    stage, draw = Stage(weights, "fp32", recompute=recompute), torch.Generator().manual_seed(SEED)
    received = [torch.randn(port.spec.shape, generator=draw) for port in code.received]
    return stage, code, stage.forward(code, 0, received, {}, 0, True)


@pytest.mark.slow
def test_results_are_let_go_after_forward_and_are_there_again_for_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone: list[Tensor] = []
    monkeypatch.setattr(of_stage, "let_go", lambda t: (gone.append(t), let_go(t)))
    whole, _, sent = after_forward(N)
    stage, code, again = after_forward(S)
    assert code.selective is not None
    assert len(gone) == code.selective.dropped > 1
    assert all(t.untyped_storage().nbytes() == 0 < t.numel() for t in gone)
    assert all(torch.equal(a, b) for a, b in zip(sent, again, strict=True)), "what is sent is kept"
    grads = [torch.ones_like(t) for t in sent]
    expected, returned = whole.backward(0, grads), stage.backward(0, grads)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in gone)
    assert all(torch.equal(a, b) for a, b in zip(expected, returned, strict=True))
    for name, g in whole.weights.grad.items():
        assert torch.equal(g, stage.weights.grad[name]), name


@pytest.mark.slow
def test_of_a_whole_forward_only_what_was_received_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ReferenceType[Any]] = []
    stash = of_stage._Stash

    def noted(*args: Any) -> Any:
        made.append(ref(found := stash(*args)))
        return found

    monkeypatch.setattr(of_stage, "_Stash", noted)
    kept = after_forward(N)[0]
    stage, _, sent = after_forward(F)
    assert [stash() is None for stash in made] == [False, True], "the graph, and so what it keeps"
    grads = [torch.ones_like(t) for t in sent]
    assert all(
        torch.equal(a, b) for a, b in zip(kept.backward(0, grads), stage.backward(0, grads), strict=True)
    )
    assert len(made) == 3


@pytest.mark.parametrize(
    ("op", "cheap"),
    [
        (torch.ops.aten.gelu.default, True),
        (torch.ops.aten.add.Tensor, True),
        (torch.ops.aten.layer_norm.default, True),
        (torch.ops.aten.transpose.int, True),
        (torch.ops.aten.linear.default, False),
        (torch.ops.aten.conv2d.default, False),
        (torch.ops.aten.scaled_dot_product_attention.default, False),
        (torch.ops.aten.embedding.default, False),
        (torch.ops.aten.lstm.input, False),
    ],
    ids=str,
)
def test_what_is_cheap_to_make_again(op: Any, cheap: bool) -> None:
    graph = fx.Graph()
    assert is_cheap(graph.call_function(op, (graph.placeholder("x"),))) == cheap
