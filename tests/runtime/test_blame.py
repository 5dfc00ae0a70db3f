"""A step that is not finite: what is blamed for it, on which stage, and that nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import VECTORS, Case, plan_of
from torch import Tensor, nn

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.data.base import Batch, DatasetBase
from mpipipe.errors import MpipipeError
from mpipipe.graph.program import Loss
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import cross_entropy
from mpipipe.runtime import blame
from mpipipe.runtime.setting import set_threads
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.digests import tensor_digest

CASE = Case("mlp")
CUTS = {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}  # the first layers of stages, by number of stages
Spoil = Callable[[Trainer], None]


class Net(nn.Module):
    """Four layers, BatchNorm among them; `between` is applied after the first and the third."""

    def __init__(self, between: Callable[[Tensor], Tensor], after: int) -> None:
        super().__init__()
        sizes = [(64, 16), (16, 16), (16, 16), (16, 4)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.norm, self.between, self.after = nn.BatchNorm1d(16), between, after

    def forward(self, x: Tensor) -> Tensor:  # (B, 64) -> (B, 4)
        x = torch.where(x > 1e9, torch.full_like(x, -math.inf), x)  # an infinity that is meant, and not met
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = self.norm(x) if i == 0 else x
            x = self.between(x) if i == self.after else x
        return x


class Spoilt(DatasetBase):
    """Vectors, one number of which is not one: in sample 5 of the second step."""

    sample = VECTORS.sample
    val_samples = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def batch(self, split: str, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        found = {k: t.clone() for k, t in VECTORS.batch(split, step, start, stop, keys).items()}
        if step == 1 and start <= 5 < stop and "x" in found:
            found["x"][5 - start, 3] = self.value
        return found


def said(
    n_stages: int,
    net: Callable[[], nn.Module],
    data: Any = VECTORS,
    spoil: Spoil = lambda _: None,
    step: int = 1,
    loss: Loss = cross_entropy,
) -> str:
    """What is said of `step`, which fails; `spoil` comes before it. All ranks say the same, and every
    tensor is as it was."""
    variants = Variants(ModelSource(net, 0), loss, VECTORS.specs, CASE.rows, "fp32")
    plan = plan_of(CASE, "1f1b", [f"layers.{i}/linear.0" for i in CUTS[n_stages]])
    variants.weight("train", variants.first)

    def body(comm: Communicator) -> str:
        set_threads(1)
        trainer = Trainer(comm, variants, plan, CASE.settings, data)
        for number in range(step):
            trainer.step(number)
        spoil(trainer)
        before = digests(trainer)
        with pytest.raises(MpipipeError) as caught:
            trainer.step(step)
        assert digests(trainer) == before
        assert all(not a.any() for s in trainer.interpreter.stages.values() for a in s.weights.accumulators())
        return str(caught.value)

    messages = run_local(n_stages, body)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"step {step}: ")
    return str(messages[0])


def digests(trainer: Trainer) -> dict[str, str]:
    tensors = {**trainer.state_dict(), **trainer.optimizer_state()}
    return {name: tensor_digest(name, t) for name, t in tensors.items()}


def net(between: Callable[[Tensor], Tensor] = torch.tanh, after: int = 1) -> Callable[[], nn.Module]:
    return lambda: Net(between, after)


@pytest.mark.parametrize("n_stages", [1, 2, 4])
@pytest.mark.slow
def test_a_weight_that_was_not_finite_before_the_step(n_stages: int) -> None:
    def spoil(trainer: Trainer) -> None:
        for stage in trainer.interpreter.stages.values():
            if (weight := stage.weights.data.get("layers.2.weight")) is not None:
                weight[0, 0] = math.inf

    found = said(n_stages, net(), spoil=spoil)
    place = {1: "(stage 0, rank 0)", 2: "(stage 1, rank 1)", 4: "(stage 2, rank 2)"}[n_stages]
    assert f"the weight 'layers.2.weight' {place} was not finite before the step" in found


@pytest.mark.parametrize(("n_stages", "value", "what"), [(1, math.nan, "nan"), (3, -math.inf, "inf")])
@pytest.mark.slow
def test_a_sample_of_the_batch(n_stages: int, value: float, what: str) -> None:
    found = said(n_stages, net(), Spoilt(value))
    assert f"the loss is nan: the input 'x' holds {what} in sample 5 of the batch, in micro-batch 2" in found
    assert "(stage 0, rank 0); mend that sample" in found


@pytest.mark.slow
def test_a_sample_is_called_by_the_index_that_it_has_in_the_data() -> None:
    class Named(Spoilt):
        def name_of(self, split: str, step: int, sample: int) -> str:
            return f"data[{100 * step + sample}]"

    assert "in sample 5 of the batch, data[105], in micro-batch 2" in said(2, net(), Named(math.nan))


def bursts(x: Tensor) -> Tensor:
    return torch.exp(x * 1e4)


def of_nothing(x: Tensor) -> Tensor:
    masked = x.masked_fill(x < 1e9, -math.inf)
    return torch.softmax(masked, -1)


@pytest.mark.parametrize(
    ("between", "after", "place", "makes"),
    [
        (bursts, 0, "stage 0, rank 0", "/exp.0' makes inf of finite values"),
        (bursts, 3, "stage 3, rank 3", "/exp.0' makes inf of finite values"),
        (of_nothing, 2, "stage 2, rank 2", "/softmax.0' makes nan of inf"),
    ],
    ids=["NaN comes of it on a later stage", "the loss itself", "of an infinity that is meant"],
)
@pytest.mark.slow
def test_the_first_operator(between: Callable[[Tensor], Tensor], after: int, place: str, makes: str) -> None:
    found = said(4, net(between, after), step=0)
    assert f"{makes}, in micro-batch 0 ({place})" in found
    assert "test_blame.py" in found
    assert "lower train.lr" in found


@pytest.mark.slow
def test_the_parameters_that_an_operator_reads() -> None:
    def spoil(trainer: Trainer) -> None:
        for stage in trainer.interpreter.stages.values():
            if (weight := stage.weights.data.get("layers.2.weight")) is not None:
                weight.fill_(3e38)

    found = said(2, net(), spoil=spoil)
    assert "'layers.2/linear.0' makes " in found
    assert "of finite values and 'layers.2.weight', 'layers.2.bias', in micro-batch 0 (stage 1" in found


def kinked(x: Tensor) -> Tensor:
    return torch.sqrt(x * (x > 0))


@pytest.mark.parametrize("n_stages", [1, 3])
@pytest.mark.slow
def test_a_gradient_alone(n_stages: int) -> None:
    """The slope of the square root at zero, infinite, times that of what is cut off, zero."""
    found = said(n_stages, net(kinked, 1), step=0)
    stage = {1: 0, 3: 1}[n_stages]
    assert (
        f"the gradient of 'layers.1.weight' (stage {stage}, rank {stage}, the nearest to the loss of 6)"
        in found
    )
    assert "is not finite; the loss is 1." in found


def of_no_sample(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return cross_entropy(outputs, batch)[0], (batch["y"] < 0).sum()


@pytest.mark.slow
def test_a_step_without_weight_changes_nothing_either() -> None:
    assert "the weight of the loss is 0" in said(2, net(), step=0, loss=of_no_sample)


@pytest.mark.slow
def test_memory_that_nobody_has_written_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.empty_like.default, (x,))
    graph.output(graph.call_function(torch.ops.aten.fill.Scalar, (made, 1.0)))
    watch = blame._Watch(torch.fx.GraphModule({}, graph))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills such memory with NaN
    try:
        assert watch.run(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    finally:
        torch.use_deterministic_algorithms(before)
    assert not watch.nan
