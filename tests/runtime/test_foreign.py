"""A torch optimizer of the user's own: the bits of a plain loop, the state by name, clear refusals."""

from __future__ import annotations

import pytest
import tiny
import torch
from tiny import Case, plan_of, warm
from torch.optim.lr_scheduler import StepLR

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import MpipipeError
from mpipipe.models import cross_entropy
from mpipipe.runtime.foreign import Factory, UserOptimizer
from mpipipe.runtime.setting import set_threads
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.checkpoint import tensor_digest

CASE = Case("gpt, untied, no dropout", batch=4, micro_batches=2)


def adam(named: list) -> torch.optim.Optimizer:
    decay = [p for _, p in named if p.dim() >= 2]
    rest = [p for _, p in named if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)


def with_schedule(named: list) -> tuple:
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, 1, gamma=0.5)


def trained(comm: Communicator, factory: Factory, clip: float | None, steps: int = 3) -> dict[str, str]:
    set_threads(1)
    cuts = tiny.even_cuts(CASE.variants.graph.groups, comm.size)
    trainer = Trainer(
        comm, CASE.variants, plan_of(CASE, "1f1b", cuts), UserOptimizer(factory, clip), CASE.dataset
    )
    losses = {f"loss {i}": (o.loss / o.weight).hex() for i in range(steps) if (o := trainer.step(i))}
    state = {**trainer.state_dict(), **trainer.optimizer_state()}
    found = {name: tensor_digest(name, t) for name, t in state.items()}
    return losses | {k: v for part in comm.allgather_object(found) for k, v in part.items()}


@pytest.mark.parametrize("factory", [adam, with_schedule])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_bits_of_a_plain_loop_on_any_number_of_ranks(factory: Factory, clip: float | None) -> None:
    warm(CASE)
    expected = plain(factory, clip)
    for ranks in (1, 2, 3):
        got = run_local(ranks, lambda comm: trained(comm, factory, clip))[0]
        assert {k: got[k] for k in expected} == expected


def plain(factory: Factory, clip: float | None) -> dict[str, str]:
    """Stock torch on the whole model: micro-batches in order, clip, step."""
    torch.set_num_threads(1)
    model = tiny.MODELS[CASE.model][0]()
    model.load_state_dict(CASE.variants.source.materialise(CASE.variants.source.params))
    made = factory([(n, p) for n, p in model.named_parameters()])
    optimizer, scheduler = made if isinstance(made, tuple) else (made, None)
    found = {}
    for step in range(3):
        optimizer.zero_grad()
        batch = CASE.dataset.batch("train", step, 0, CASE.batch, frozenset({"tokens", "labels"}))
        weight, total = torch.tensor(float(batch["labels"].numel())), 0.0
        for rows in (slice(0, 2), slice(2, 4)):
            loss, _ = cross_entropy(model(batch["tokens"][rows]), {"labels": batch["labels"][rows]})
            (loss / weight).backward()
            total += loss.item()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        found[f"loss {step}"] = (total / float(weight)).hex()
    return found | {name: tensor_digest(name, p) for name, p in model.named_parameters()}


def test_a_parameter_in_two_groups_is_refused_by_name() -> None:
    def twice(named: list) -> torch.optim.Optimizer:
        params = [p for _, p in named]
        return torch.optim.SGD([{"params": params}, {"params": params[:1]}], lr=0.1)

    with pytest.raises(MpipipeError, match=r"'wte.weight' into two parameter groups \(1 parameters"):
        run_local(1, lambda comm: trained(comm, twice, None))


def test_parameters_left_out_and_foreign_ones_are_refused() -> None:
    def short(named: list) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named][1:], lr=0.1)

    def foreign(named: list) -> torch.optim.Optimizer:
        return torch.optim.SGD([*(p for _, p in named), torch.nn.Parameter(torch.zeros(2))], lr=0.1)

    with pytest.raises(MpipipeError, match=r"leaves out 'wte.weight' \(1 parameters"):
        run_local(1, lambda comm: trained(comm, short, None))
    with pytest.raises(MpipipeError, match="1 parameters that it was not given"):
        run_local(1, lambda comm: trained(comm, foreign, None))
