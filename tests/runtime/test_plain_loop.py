"""One rank computes what a plain PyTorch loop computes, to the last bit (bits: torch, blocks: 1).

The loop below is written as a user would: autograd, gradient accumulation over micro-batches,
clip_grad_norm_, torch's own optimizers. Without dropout, whose random stream is our own.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import MODELS, Case, Result, Thrice, differences, tensors_after, train_local
from torch import nn

from mpipipe.models import cross_entropy
from mpipipe.state.digests import tensor_digest


def plain_model(case: Case) -> nn.Module:
    """The user's module with the weights that our run starts from."""
    source = case.variants.source
    first = source.materialise([*source.params, *source.buffers])
    model = MODELS[case.model][0]()
    model.load_state_dict({name: first[canonical] for name, canonical in source.alias.items()})
    return model.train()


def plain_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    return torch.optim.SGD(groups, momentum=0.9, foreach=False)


def learning_rate(step: int, lr: float, warmup: int, total: int) -> float:
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))))


def bounds(batch: int, parts: int) -> list[tuple[int, int]]:
    sizes = [len(part) for part in torch.arange(batch).tensor_split(parts)]
    return [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(parts)]


def plain_loop(case: Case, model: nn.Module) -> Result:
    torch.set_num_threads(1)
    key, label = ("tokens", "labels") if case.model.startswith("gpt") else ("x", "y")
    optimizer = plain_optimizer(case, model)
    losses, norms = [], []
    for step in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 1e-2 if case.optimizer == "adamw" else 0.1, 2, case.steps + 2)
        whole = case.dataset.batch("train", step, 0, case.batch, frozenset({key, label}))
        weight = torch.tensor(float(whole[label].numel()))
        total = 0.0
        optimizer.zero_grad()
        for start, stop in bounds(case.batch, case.micro_batches):
            part = {k: v[start:stop] for k, v in whole.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
                loss, _ = cross_entropy(model(part[key]), part)
            (loss / weight).backward()
            total += loss.item()
        if case.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip, foreach=False)
            norms.append(float(norm).hex())
        optimizer.step()
        losses.append((total / float(weight)).hex())
    canonical = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {name: tensor_digest(name, t) for name, t in canonical.items()}
    return {"losses": losses, "norms": norms, "validation": None, "weights": weights}


SAME = [
    Case("gpt, untied, no dropout"),
    Case("gpt, untied, no dropout", precision="bf16"),
    Case("gpt, no dropout", tied="eager"),
    Case("gpt, no dropout", tied="eager", precision="bf16"),
    Case("gpt, no dropout", tied="eager", batch=7, optimizer="sgd"),
    Case("skips", optimizer="sgd"),
    Case("thrice", tied="eager"),
]


@pytest.mark.parametrize("case", SAME, ids=str)
@pytest.mark.slow
def test_one_rank_has_the_bits_of_a_plain_loop(case: Case) -> None:
    assert differences(plain_loop(case, plain_model(case)), train_local(case, 1)) == []


@pytest.mark.slow
def test_without_clipping_too() -> None:
    case = Case("gpt, no dropout", tied="eager", clip=None)
    expected, got = plain_loop(case, plain_model(case)), train_local(case, 1)
    assert differences({**expected, "norms": got["norms"]}, got) == []


@pytest.mark.slow
def test_tied_per_use_is_the_plain_sum_in_another_order() -> None:
    """The same first loss; after it, close but not the same: this is why `tied` is part of Numerics."""
    case = Case("gpt, no dropout", tied="per_use")
    expected, got = plain_loop(case, plain_model(case)), train_local(case, 1)
    assert got["losses"][0] == expected["losses"][0]
    assert differences(expected, got) != []
    for a, b in zip(expected["losses"], got["losses"], strict=True):
        assert float.fromhex(a) == pytest.approx(float.fromhex(b), rel=1e-6)


class Copies(nn.Module):
    """`Thrice` with a matrix of its own for each use."""

    def __init__(self, model: Thrice) -> None:
        super().__init__()
        self.model, self.uses = model, nn.ModuleList(copy.deepcopy(model.shared) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [self.model.shrink, *self.model.between]
        for layer, shared in zip(layers, self.uses, strict=True):
            x = torch.tanh(shared(layer(x)))
        return self.model.head(self.model.frozen(x))


def test_tied_per_use_adds_up_each_use_first_and_then_the_uses_in_order() -> None:
    case = Case("thrice", optimizer="sgd", clip=None, steps=1)
    model = Copies(plain_model(case))  # type: ignore[arg-type]
    batch = case.dataset.batch("train", 0, 0, case.batch, frozenset({"x", "y"}))
    for start, stop in bounds(case.batch, case.micro_batches):
        part = {k: v[start:stop] for k, v in batch.items()}
        (cross_entropy(model(part["x"]), part)[0] / float(case.batch)).backward()
    one, two, three = (use.weight for use in model.uses)
    one.grad += two.grad
    one.grad += three.grad
    torch.optim.SGD([one], lr=0.1 / 2, momentum=0.9, weight_decay=0.1, foreach=False).step()
    assert torch.equal(tensors_after(case)["shared.weight"], one)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.slow
def test_batch_norm_trains_to_the_same_bits_and_its_statistics_to_close_ones(optimizer: str) -> None:
    """Losses, norms, parameters and the count of batches are the plain loop's, bit for bit. The running
    mean and variance are applied after the step, (1 - m) * old + m * new, where torch does it inside its
    kernel: equal but for rounding."""
    case = Case("conv and norm", optimizer=optimizer)
    model = plain_model(case)
    expected, got = plain_loop(case, model), train_local(case, 1)
    different = differences(expected, got)
    assert all(name.endswith(("running_mean", "running_var")) for name in different)
    running = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    ours = tensors_after(case)
    for name, b in running.items():
        torch.testing.assert_close(ours[name], b, rtol=1e-6, atol=1e-7)
    assert int(ours["norm.num_batches_tracked"]) == case.steps * case.micro_batches
