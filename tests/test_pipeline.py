"""The Python interface: what a user may bring, and that none of it depends on the number of ranks.

Ranks are threads, each with a pipeline of its own, as each process has one. Times are made up where a
test is not about them, so the cuts are the same on every machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from saved_run import forget_data
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from mpipipe import OptimizerSettings, Pipeline, ops, register_schedule
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlockError,
    EndOfData,
    LaunchError,
    MpipipeError,
    PlanError,
)
from mpipipe.graph.variants import Variants
from mpipipe.planner import SCHEDULES
from mpipipe.planner.copies import Copies, ranks_in_each, shape_of
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.schedules import build, to_text
from mpipipe.planner.stages import bounds
from mpipipe.report.plan_file import plan_text
from mpipipe.runtime import rehearsal
from mpipipe.runtime.sample import generate
from mpipipe.runtime.setting import use_gemm_route
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.trainer import Trainer
from mpipipe.runtime.transport import Loopback, Outbox
from mpipipe.state.digests import tensor_digest
from mpipipe.values import Costs, Plan

Batch = dict[str, Tensor]
Result = dict[str, Any]
REPOSITORY = Path(__file__).resolve().parents[1]
FEATURES, CLASSES, BATCH = 8, 4, 8


pytestmark = pytest.mark.usefixtures("made_up_times", "captured_once")


# -- one model and one data set, from which the tests depart --------------------------------------------


class Net(nn.Module):
    """Statistics, dropout, one matrix in two places under two names, and a scale that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16)
        self.a, self.drop, self.b = nn.Linear(16, 16, bias=False), nn.Dropout(0.2), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        self.b.weight = self.a.weight
        self.register_buffer("gain", torch.full((), 0.5), persistent=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:  # (B, features) -> (B, classes)
        x = torch.relu(self.norm(self.first(x)))
        x = torch.tanh(self.b(self.drop(torch.tanh(self.a(x))))) * self.gain
        return self.head(x if scale is None else x * scale[:, None])


class Samples:
    """Map-style; the label is learnable. `form` makes of (x, labels) what an element is."""

    def __init__(self, n: int, seed: int = 1, form: Callable[[Tensor, Tensor], Any] = lambda *pair: pair):
        draw = torch.Generator().manual_seed(seed)
        self.x, self.form = torch.randn(n, FEATURES, generator=draw), form
        self.labels = self.x[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.form(self.x[i], self.labels[i])


def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return functional.cross_entropy(outputs, batch["labels"], reduction="sum"), outputs.shape[0]


def accuracy(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return (outputs.argmax(-1) == batch["labels"]).sum(), outputs.shape[0]


def pipeline(comm: Communicator, model: Any = Net, data: Any = None, **how: Any) -> Pipeline:
    """Four micro-batches of 2 samples by one schedule, for a search takes a while, unless told otherwise."""
    given = {
        "loss": loss, "batch": BATCH, "micro_batches": 4, "gemm": "mkl", "schedule": "1f1b",
        "say": lambda _: None, **how,
    }  # fmt: skip
    return Pipeline(model, data=Samples(37) if data is None else data, comm=comm, **given)


def result(pipe: Pipeline, steps: int = 3) -> Result:
    """Of some more steps: every loss, every weight and buffer; the same on each rank. Collective."""
    losses = [pipe.step().loss.hex() for _ in range(steps)]
    found = {name: tensor_digest(name, t) for name, t in pipe.state_dict(full=False).items()}
    return {"losses": losses} | {k: v for part in pipe.comm.allgather_object(found) for k, v in part.items()}


def trained(ranks: int, model: Any = Net, data: Callable[[], Any] | None = None, **how: Any) -> Result:
    """data: makes a data set for each rank, as each process would."""
    return run_local(ranks, lambda comm: result(pipeline(comm, model, data and data(), **how)))[0]


@cache
def plainly_trained() -> Result:
    """On one rank, with nothing said, by the schedule that is found."""
    return trained(1, schedule="auto")


def alone(body: Callable[[Communicator], Any]) -> Any:
    return run_local(1, body)[0]


# -- models ---------------------------------------------------------------------------------------------


def layers() -> list[nn.Module]:
    return [nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, CLASSES)]


class Listed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*layers())


@pytest.mark.slow
def test_a_class_a_function_an_instance_and_a_list_are_one_model() -> None:
    first = alone(lambda comm: pipeline(comm, Listed).state_dict())
    instance = Listed()
    instance.load_state_dict(first)
    kept = {name: t.clone() for name, t in instance.state_dict().items()}
    expected = trained(1, Listed)
    assert len(set(expected["losses"])) == 3
    forms = {"function": lambda: nn.Sequential(*layers()), "function of a list": layers}
    for name, form in {**forms, "instance": instance, "list": list(instance)}.items():
        assert trained(2 if name == "instance" else 1, form) == expected, name
    assert all(torch.equal(t, kept[name]) for name, t in instance.state_dict().items()), "it is left alone"


@pytest.mark.full  # all that tests/launch trains has measured costs
def test_measured_costs_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plainly_trained()
    monkeypatch.undo()
    assert trained(2) == expected


@pytest.mark.slow
def test_a_rehearsal_leaves_no_gradient_of_tied_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed = trained(1, tied="eager")
    monkeypatch.setattr("mpipipe.pipeline.rehearse", lambda trainer, costs: costs)
    assert trained(1, tied="eager") == rehearsed == trained(2, tied="eager")


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.slow
def test_a_rehearsal_times_whole_stages_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr(Stage, "apply_statistics", lambda *_: busy(0.005))  # a backward cannot be faster

    def run(comm: Communicator) -> tuple[Plan, dict[str, Tensor], float]:
        pipe = pipeline(comm, schedule=schedule)
        weights = [stage.weights for stage in pipe.trainer.interpreter.stages.values()]
        left = sum(float(t.abs().sum()) for w in weights for t in w.accumulators())
        return pipe.plan, pipe.state_dict(), left

    plans, states, left = zip(*run_local(2, run), strict=True)
    ((_, first, _),) = run_local(1, run)
    assert plans[0] == plans[1]
    assert plans[0].prediction.step_s > plans[0].numerics.micro_batches * 0.005
    assert {name: t for state in states for name, t in state.items()}.keys() == first.keys()
    assert states[0]["norm.num_batches_tracked"] == 0
    assert not states[0]["norm.running_mean"].any()
    assert left == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "same"), [(1.0, 1.0), (1.2, 1.2), (2.0, 1.0), (2.0, 2.5)])
def test_a_rank_that_is_slow_in_the_rehearsal_is_told_and_planned_with(
    monkeypatch: pytest.MonkeyPatch, factor: float, same: float
) -> None:
    """Its groups are not dear because of it, and a plan for ranks that are left knows it, too."""
    monkeypatch.setattr("mpipipe.planner.speeds.LEAST_S", 0.0)
    monkeypatch.setattr("mpipipe.planner.speeds.is_crowded", lambda _: False)

    def seconds(trainer: Trainer, clock: Callable[[], float]) -> tuple[dict[int, list[float]], float]:
        """As planned, but on rank 1, and what the same work takes."""
        costs, by = trainer.plan.costs, factor if trainer.comm.rank else 1.0
        assert costs is not None
        edges = bounds(len(costs.groups), cut_indices(trainer.plan.layout, costs.names))
        groups = costs.groups[slice(*edges[trainer.comm.rank])]
        forward, whole = sum(g.fwd_s for g in groups), sum(g.seconds for g in groups)
        took_s = [by * (s + costs.call_s) for s in (forward, whole - forward)]
        return {trainer.comm.rank: took_s}, same if trainer.comm.rank else 1.0

    monkeypatch.setattr(rehearsal, "_seconds", seconds)
    monkeypatch.setattr(rehearsal, "clock_of", lambda *_: (time.thread_time, 1.0))

    before: list[Costs] = []
    rehearse = rehearsal.rehearse
    monkeypatch.setattr("mpipipe.pipeline.rehearse", lambda t, c: (before.append(c), rehearse(t, c))[1])

    def run(comm: Communicator) -> tuple[Plan, list[float], list[str]]:
        said: list[str] = []
        pipe = pipeline(comm, say=said.append)
        known = [device.speed for device in pipe.survival._cluster.devices]
        return pipe.plan, known, [line for line in said if "as long as others" in line]

    (plan, known, said), _ = run_local(2, run)
    slow = factor if min(factor, same) > 1.3 else 1.0
    assert plan.costs is not None
    assert known == [device.speed for device in plan.costs.cluster.devices]
    assert known == pytest.approx([1.0, 1.0 / slow])
    planned_s, now_s = (costs.groups[-1].fwd_s for costs in (before[0], plan.costs))
    assert now_s == pytest.approx(factor / slow * planned_s, rel=0.1), "but for what a call takes"
    assert len(said) == (slow > 1.0)
    assert all("rank 1 (" in line and "computes 2.0 times" in line for line in said)


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.slow
def test_a_rehearsal_runs_the_code_that_the_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here only the last stage does its backward in two."""
    asked, code = set[tuple[int, bool]](), Variants.training_code

    def noted(variants: Variants, specs: Any, cuts: Any, s: int, in_two: bool, *more: Any) -> Any:
        asked.add((s, in_two))
        return code(variants, specs, cuts, s, in_two, *more)

    def mixed(n_stages: int, n_micro: int) -> list[str]:
        whole = [f"{op}{micro}" for op in "FB" for micro in range(n_micro)]
        return [" ".join(whole), " ".join(f"F{micro} I{micro} W{micro}" for micro in range(n_micro))]

    register_schedule("mixed", mixed)
    monkeypatch.setattr(Variants, "training_code", noted)
    run_local(2, lambda comm: pipeline(comm, schedule="mixed"))
    assert asked == {(0, False), (1, True)}


class Factored(nn.Module):
    """A Cholesky takes what this model gives it, but hardly a matrix that is made up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        matrix = x[:, :, None] * x[:, None, :] + torch.eye(4)
        return self.head(torch.linalg.cholesky(matrix).sum(-1))


@pytest.mark.parametrize("how", [{}, {"schedule": "zb-h1", "tied": "eager"}], ids=["1f1b", "zb-h1"])
@pytest.mark.slow
def test_a_stage_of_operators_that_refuse_made_up_numbers_is_not_rehearsed(how: dict[str, Any]) -> None:
    assert trained(5, Factored, **how) == trained(1, Factored), "each group is a stage"


@pytest.mark.slow
def test_a_rehearsal_asks_for_the_first_step_alone() -> None:
    class Few:
        def batch(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
            if step > 2:
                raise IndexError(step)
            some, rows = Samples(8), slice(2 * micro, 2 * micro + 2)
            return some.x[rows], some.labels[rows]

    assert len(trained(2, data=Few)["losses"]) == 3


@pytest.mark.slow
def test_what_a_message_costs_its_rank_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Outbox.send

    def slowly(*given: Any) -> None:
        busy(0.004)
        send(*given)

    monkeypatch.setattr(Outbox, "send", slowly)
    costs = [plan.costs for plan in run_local(2, lambda comm: pipeline(comm).plan)]
    assert costs[0] == costs[1]
    assert costs[0] is not None
    assert 0.002 < costs[0].call_s < 0.2, "half of it is the receive"


@pytest.mark.slow
def test_what_is_timed_leaves_no_message_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made, exchange = [], Loopback.exchange

    def noted(loop: Loopback) -> None:
        exchange(loop)
        made.append(loop)

    monkeypatch.setattr(Loopback, "exchange", noted)
    run_local(1, pipeline)
    assert made
    assert not any(loop._outbox.pending() or loop._mailbox.pending() for loop in made)


@pytest.mark.slow
def test_more_ranks_than_groups_are_refused_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpipipe.measuring.measure", lambda *_: pytest.fail("timed"))
    with pytest.raises(PlanError, match=r"3 stages, and .* 1 part at most.* start at most 1 rank\b"):
        run_local(3, lambda comm: pipeline(comm, lambda: nn.Linear(FEATURES, CLASSES)))


def test_a_model_that_each_rank_made_for_itself_must_be_the_same() -> None:
    torch.manual_seed(0)
    models = [Listed(), Listed()]
    with pytest.raises(MpipipeError, match=r"model of rank 1 has other values .* rank 0.*manual_seed"):
        run_local(2, lambda comm: pipeline(comm, models[comm.rank]))


def test_data_that_each_rank_made_for_itself_must_be_the_same() -> None:
    """Neither is seeded, so on real ranks each would draw other numbers."""
    made = [[Samples(37)[i + rank] for i in range(16)] for rank in range(2)]
    with pytest.raises(LaunchError, match="the first samples") as caught:
        run_local(2, lambda comm: pipeline(comm, data=made[comm.rank]))
    assert "call torch.manual_seed before" in str(caught.value)


class WritesWhatItWasGiven(nn.Module):
    """By names that torch gives to its input itself where there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for same in (
            x.type_as(self.head.weight), torch.atleast_2d(x), x.sum_to_size(x.shape), torch.conj_physical(x),
            functional.alpha_dropout(x, training=False), torch.feature_dropout(x, 0.5, False), x.to_dense(),
        ):  # fmt: skip
            same += 1.0
        return self.head(torch.tanh(x))


@pytest.mark.slow
def test_what_may_be_its_own_input_may_be_written_in_place() -> None:
    model, samples = WritesWhatItWasGiven(), Samples(BATCH)
    outputs = model.head(torch.tanh(model.first(samples.x) + 7.0)).detach()
    expected = float(loss(outputs, {"labels": samples.labels})[0]) / BATCH
    first, second = (trained(ranks, model, lambda: Samples(BATCH)) for ranks in (1, 2))
    assert first == second
    assert float.fromhex(first["losses"][0]) == pytest.approx(expected, rel=1e-5)


# -- losses and batches ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mean_loss_with_its_weight_is_the_sum_loss() -> None:
    """Labels that are ignored are spread unevenly over the micro-batches, one has no others: a mean of means
    would be wrong."""

    def ignoring(x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.where(x[0] > 0.3, -100, label)

    def summed(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        total = functional.cross_entropy(outputs, batch["labels"], reduction="sum")
        return total, (batch["labels"] != -100).sum()

    def mean(outputs: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(outputs, batch["labels"])

    def weights(**how: Any) -> Batch:
        def body(comm: Communicator) -> Batch:
            pipe = pipeline(comm, data=Samples(37, form=ignoring), **how)
            pipe.fit(3)
            return pipe.state_dict()

        return alone(body)

    expected = weights(loss=summed)
    got = weights(loss=mean, weight_of=lambda batch: (batch["labels"] != -100).sum())
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t, rtol=1e-4, atol=1e-5)
    of_means = weights(loss=mean, weight_of=lambda batch: (batch["labels"] != -100).any())
    assert not torch.allclose(of_means["head.weight"], expected["head.weight"], rtol=1e-3), "it can be seen"


def test_a_mean_where_a_sum_is_promised_is_refused() -> None:
    def wrong(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(outputs, batch["labels"]), (batch["labels"] != -100).sum()

    with pytest.raises(MpipipeError, match="mean"):
        alone(lambda comm: pipeline(comm, loss=wrong))


@pytest.mark.slow
def test_elements_without_keys_are_named_after_forward() -> None:
    expected = plainly_trained()
    for form in (lambda x, y: [x, y], lambda x, y: {"x": x, "labels": y}):
        assert trained(1, data=partial(Samples, 37, form=form)) == expected


@pytest.mark.slow
def test_keys_that_training_does_not_read_are_told_once() -> None:
    def numbered(x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"x": x, "labels": labels, "number": labels}

    def body(comm: Communicator) -> list[str]:
        said: list[str] = []
        pipeline(comm, data=Samples(37, form=numbered), say=said.append)
        return [line for line in said if line.startswith("note: ")]

    first, second = run_local(2, body)
    assert [line.partition(";")[0] for line in first] == ["note: training does not read 'number' of the data"]
    assert second == []


def test_an_argument_of_forward_that_a_batch_brings_is_used() -> None:
    ones = trained(1, data=lambda: Samples(37, form=lambda x, y: (x, torch.ones(()), y)))
    twos = trained(1, data=lambda: Samples(37, form=lambda x, y: (x, torch.tensor(2.0), y)))
    assert ones["losses"] == plainly_trained()["losses"] != twos["losses"]


class Epochs:
    """Batches in the order of a map-style set that is not shuffled, for one pass or for ever."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.samples), BATCH):
            yield self.samples.x[start : start + BATCH], self.samples.labels[start : start + BATCH]


@pytest.mark.slow
def test_a_plain_iterable_trains_to_the_bits_of_map_style_data() -> None:
    expected = trained(1, data=lambda: Samples(4 * BATCH), shuffle=False)

    def body(comm: Communicator) -> Result:
        data = iter(Epochs(Samples(4 * BATCH))) if comm.rank == 0 else iter(())
        return result(pipeline(comm, data=data))

    for ranks in (1, 2, 3):
        assert run_local(ranks, body)[0] == expected, ranks


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Samples(2 * BATCH)
        return (samples[i] for i in range(len(samples)))


@pytest.mark.slow
def test_a_loader_over_a_stream_of_samples_begins_again() -> None:
    """It has a `__len__`, which raises."""

    def body(comm: Communicator, data: Any, val: Any) -> list[float]:
        pipe = pipeline(comm, lambda: nn.Linear(FEATURES, CLASSES), data, val=val)
        return [*(pipe.step().loss for _ in range(3)), pipe.evaluate()["loss"]]

    loader = DataLoader(Streamed(), batch_size=BATCH)
    expected = alone(partial(body, data=Epochs(Samples(2 * BATCH)), val=Samples(2 * BATCH)))
    assert alone(partial(body, data=loader, val=loader)) == expected


@pytest.mark.slow
def test_training_ends_with_data_that_ends() -> None:
    def body(comm: Communicator) -> tuple[int, bool]:
        pipe = pipeline(comm, data=iter(Epochs(Samples(2 * BATCH))))
        pipe.fit(5)
        with pytest.raises(EndOfData, match="after 2 steps"):
            pipe.step()
        return pipe.steps_done, pipe.data.exact

    assert run_local(2, body) == [(2, False)] * 2


@pytest.mark.slow
def test_batches_of_an_iterable_may_have_other_sizes_later() -> None:
    """A last batch that is smaller is cut into smaller micro-batches; one that is too small is refused."""

    def body(comm: Communicator, n: int) -> Result:
        return result(pipeline(comm, data=iter(Epochs(Samples(BATCH + n))), micro_batches=3), steps=2)

    assert run_local(2, lambda comm: body(comm, 6)) == [alone(lambda comm: body(comm, 6))] * 2
    with pytest.raises(DataError, match=r"step 1: a batch of 2 samples for 3 micro-batches"):
        run_local(2, lambda comm: body(comm, 2))


@pytest.mark.slow
@pytest.mark.parametrize("built_in", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_clipping_in_another_dtype_has_the_bits_of_a_plain_loop(dtype: torch.dtype, built_in: bool) -> None:
    n = 6  # no power of two: 1 / n is rounded

    def cast() -> list[nn.Module]:
        return [nn.Linear(FEATURES, 6).to(dtype), nn.Tanh(), nn.Linear(6, CLASSES).to(dtype)]

    def body(comm: Communicator) -> list[Tensor] | None:
        settings = OptimizerSettings("sgd", lr=0.1, momentum=0.0, weight_decay=0.0)
        optimizer = settings if built_in else lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        samples = Samples(n, form=lambda x, y: (x.to(dtype), y))
        pipe = pipeline(
            comm, cast, samples, batch=n, micro_batches=3, optimizer=optimizer, clip=0.05, shuffle=False
        )
        first = {name: t.clone() for name, t in pipe.state_dict().items()}
        norms = [pipe.step().grad_norm for _ in range(3)]
        weights = pipe.state_dict()
        if comm.rank:
            return None
        model, data = nn.Sequential(*cast()), Samples(n)
        model.load_state_dict(first)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        for norm in norms:
            plain.zero_grad()
            for x, labels in zip(data.x.to(dtype).split(2), data.labels.split(2), strict=True):
                (loss(model(x), {"labels": labels})[0] / n).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False).item() == norm
            plain.step()
        assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
        return list(weights.values())

    one, two = alone(body), run_local(2, body)[0]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@dataclass
class Images:
    form: torch.memory_format

    def batch(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(10 * step + micro))
        return images.to(memory_format=self.form), torch.tensor([micro % CLASSES, 0])


BY_CHANNEL, BY_PIXEL = torch.contiguous_format, torch.channels_last


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "data"), [(BY_PIXEL, BY_CHANNEL), (BY_CHANNEL, BY_PIXEL)])
def test_how_weights_and_images_lie_in_memory_changes_no_bits_where_the_model_is_cut(
    weights: torch.memory_format, data: torch.memory_format
) -> None:
    def images() -> nn.Module:
        first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *pooled).to(memory_format=weights)

    one, four = (trained(ranks, images, lambda: Images(data)) for ranks in (1, 4))
    assert one == four


# -- evaluation, prediction, state ----------------------------------------------------------------------


def plain(pipe: Pipeline, model: Callable[[], nn.Module] = Net) -> nn.Module | None:
    """Rank 0: the model as its author runs it, with the weights of the pipeline, all of them."""
    weights = pipe.state_dict()
    if pipe.rank:
        assert weights == {}
        return None
    module = model().eval()
    module.load_state_dict(weights, strict=True)
    return module


@pytest.mark.slow
def test_evaluation_equals_a_computation_by_hand() -> None:
    """11 samples in batches of 4: the last is ragged, and every sample counts the same."""

    def body(comm: Communicator) -> dict[str, float]:
        val = Samples(11, seed=2)
        pipe = pipeline(comm, val=val, val_batch=4, metrics={"accuracy": accuracy, "logit": largest})
        pipe.fit(4)
        found = pipe.evaluate()
        model = plain(pipe)
        if model is not None:
            with torch.no_grad():
                outputs = model(val.x)
            mean = functional.cross_entropy(outputs, val.labels).item()
            assert found["loss"] == pytest.approx(mean, rel=1e-5)
            assert found["accuracy"] == (outputs.argmax(1) == val.labels).sum().item() / 11
            assert found["logit"] == pytest.approx(outputs.amax(1).mean().item(), rel=1e-5)
        assert pipe.evaluate(batches=3) == found
        assert pipe.evaluate(batches=9) == found, "there are no more"
        assert pipe.evaluate(batches=1) != found
        return found

    def largest(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs.amax(1).sum(), torch.tensor(float(outputs.shape[0]))

    one = alone(body)
    assert list(one) == ["loss", "accuracy", "logit"]
    assert run_local(2, body) == [one] * 2


class Structured(nn.Module):
    """Returns tensors in a dict and a tuple, one of them without samples, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.norm(torch.tanh(self.first(x)))
        return {"logits": self.second(hidden), "pair": (hidden, hidden.square().mean()), "kind": None}


@pytest.mark.slow
def test_prediction_has_the_structure_and_the_bits_of_the_model() -> None:
    x = Samples(8, seed=3).x[:5]  # micro-batches of 2, 2 and 1

    def of_dict(outputs: dict[str, Any], batch: Batch) -> tuple[Tensor, int]:
        return loss(outputs["logits"], batch)

    def body(comm: Communicator) -> list[Tensor]:
        pipe = pipeline(comm, Structured, loss=of_dict)
        pipe.fit(2)
        found = pipe.predict(x)
        assert list(found) == ["logits", "pair", "kind"]
        assert found["kind"] is None
        tensors = [found["logits"], *found["pair"]]
        assert [tuple(t.shape) for t in tensors] == [(5, CLASSES), (5, 6), (3,)]
        for form in ({"x": x}, (x,), {"x": x, "labels": torch.zeros(5, dtype=torch.int64)}):
            assert torch.equal(pipe.predict(form)["logits"], found["logits"])
        model = plain(pipe, Structured)
        if model is not None:
            with torch.no_grad():
                parts = [model(part) for part in x.split(2)]
            assert torch.equal(found["logits"], torch.cat([part["logits"] for part in parts]))
            assert torch.equal(found["pair"][0], torch.cat([part["pair"][0] for part in parts]))
            assert torch.equal(found["pair"][1], torch.stack([part["pair"][1] for part in parts]))
        return tensors

    ranks = run_local(2, body)
    assert all(torch.equal(a, b) for other in ranks[1:] for a, b in zip(ranks[0], other, strict=True))


@pytest.mark.slow
def test_state_dicts_speak_the_names_of_the_model() -> None:
    """Tied names included, buffers that are not persistent left out."""
    wanted = set(Net().state_dict())
    assert {"a.weight", "b.weight"} < wanted
    assert "gain" not in wanted

    def body(comm: Communicator) -> dict[str, Tensor]:
        pipe = pipeline(comm)
        pipe.fit(1)
        full, mine = pipe.state_dict(), pipe.state_dict(full=False)
        assert set(full) == (wanted if comm.rank == 0 else set())
        if full:
            Net().load_state_dict(full, strict=True)
            assert torch.equal(full["a.weight"], full["b.weight"])
            assert all(torch.equal(t, mine[name]) for name, t in full.items() if name in mine)
        return {name: t.clone() for name, t in mine.items()}

    parts = run_local(3, body)
    assert all(parts), "every rank holds some"
    assert {name for part in parts for name in part} == wanted
    together: Batch = {name: t for part in parts for name, t in part.items()}
    Net().load_state_dict(together, strict=True)


# -- fit --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_callbacks_see_every_step_with_its_values_on_every_rank() -> None:
    def body(comm: Communicator) -> list[tuple[int, dict[str, float]]]:
        seen: list[tuple[int, dict[str, float]]] = []

        def look(pipe: Pipeline, step: int, values: dict[str, float]) -> None:
            assert pipe.steps_done == step
            seen.append((step, dict(values)))

        pipe = pipeline(comm, val=Samples(9, seed=2), metrics={"accuracy": accuracy}, clip=0.5)
        pipe.fit(2, callbacks=[look])
        pipe.fit(4, callbacks=iter([look]), eval_every=2)
        assert pipe.steps_done == 4
        for _, values in seen:
            assert values.pop("seconds") > 0
        assert {f"val_{k}": v for k, v in pipe.evaluate().items()}.items() <= seen[-1][1].items()
        return seen

    ranks = run_local(2, body)
    assert ranks[0] == ranks[1] == alone(body)
    assert [step for step, _ in ranks[0]] == [1, 2, 3, 4]
    always = {"loss", "grad_norm", "lr"}
    assert [set(values) - always for _, values in ranks[0]] == [set()] * 3 + [{"val_loss", "val_accuracy"}]
    assert all(always <= set(values) for _, values in ranks[0])


@pytest.mark.slow
def test_what_a_callback_raises_ends_all_ranks() -> None:
    def fails(pipe: Pipeline, step: int, values: dict[str, float]) -> None:
        if pipe.rank == 1:
            raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        run_local(2, lambda comm: pipeline(comm).fit(2, callbacks=[fails]))


# -- save and resume --------------------------------------------------------------------------------------


def momentum(named: list[tuple[str, nn.Parameter]]) -> Any:
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, 2, gamma=0.5)


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=1e-2, amsgrad=True)


@pytest.mark.parametrize(
    ("optimizer", "micro_batches", "ranks"),
    [
        pytest.param(None, 3, 3, id="AdamW, ragged"),
        pytest.param(adam, 4, 3, id="Adam", marks=pytest.mark.full),
        pytest.param(momentum, 4, 1, id="SGD and a scheduler", marks=pytest.mark.full),
    ],
)
@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path, optimizer: Any, micro_batches: int, ranks: int
) -> None:
    """Saved by 2 ranks after 3 of 6 steps; BatchNorm's statistics included."""
    start = partial(pipeline, optimizer=optimizer, micro_batches=micro_batches, clip=0.5)

    def saves(comm: Communicator) -> Result:
        pipe = start(comm)
        pipe.fit(3)
        pipe.save(tmp_path / "saved")
        return result(pipe)

    def resumes(comm: Communicator) -> Result:
        pipe = start(comm, resume=tmp_path / "saved")
        assert pipe.steps_done == 3
        return result(pipe)

    expected = run_local(2, saves)[0]
    with warnings.catch_warnings():  # of torch: that a scheduler steps before its optimizer
        if ranks == 1:  # the filters belong to all threads
            warnings.simplefilter("error", UserWarning)
        assert run_local(ranks, resumes)[0] == expected
    if optimizer is None:
        undisturbed = alone(lambda comm: (pipe := start(comm), pipe.fit(3), result(pipe))[-1])
        assert undisturbed == expected, "nor does saving disturb"


@pytest.mark.slow
def test_data_that_is_mended_after_an_error_is_read_again() -> None:
    """Also what was loaded ahead of it."""

    def body(comm: Communicator, broken: bool) -> Result:
        data = Samples(5 * BATCH)
        data.labels += broken  # one more than there are classes
        pipe = pipeline(comm, data=data)
        if broken:
            with pytest.raises(DataError, match="'labels' holds"):
                result(pipe)
            data.labels -= 1
        return result(pipe)

    assert alone(lambda comm: body(comm, True)) == alone(lambda comm: body(comm, False))


@pytest.mark.parametrize("bits", ["torch", "fast"])
@pytest.mark.slow
def test_another_pipeline_in_the_process_changes_no_bits(bits: str) -> None:
    """Threads, kernels and the library of products are settings of the process."""

    def body(comm: Communicator, disturbed: bool) -> Result:
        pipe = pipeline(comm, bits=bits)
        pipe.fit(2)
        before = torch.get_num_threads()
        if disturbed:
            pipeline(comm, threads=2, kernels=False)
            assert torch.get_num_threads() != before
            use_gemm_route("onednn")  # as another one may choose
        found = result(pipe)
        assert torch.get_num_threads() == before
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # type: ignore[attr-defined]
        assert ops.native.version_in_use() == ("none" if ops.kernels is None else ops.KERNELS_VERSION)
        return found

    assert alone(lambda comm: body(comm, True)) == alone(lambda comm: body(comm, False))


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.tanh(x) if x.abs().sum() > 0 else x


class Shifted(nn.Module):
    """The part that decides on values is captured again for an evaluation; the table is read on any stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.head = nn.Linear(FEATURES, 16), Decides(), nn.Linear(16, CLASSES)
        self.register_buffer("table", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(self.first(x) + self.table)
        return self.head(torch.tanh(x) + self.table)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_a_resumed_run_does_not_miss_the_checkpoint_that_later_ones_have_replaced(
    tmp_path: Path, ranks: int
) -> None:
    def body(comm: Communicator, folder: Path | None) -> dict[str, float]:
        model = lambda: Shifted()  # noqa: E731 - a class would be captured once for both runs
        pipe = pipeline(comm, model, val=Samples(11, seed=2), val_batch=5, resume=folder)
        pipe.fit(2)
        pipe.save(tmp_path / "1")
        if folder is None:
            return pipe.evaluate()
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)
        comm.barrier()
        return pipe.evaluate()

    expected = run_local(ranks, lambda comm: body(comm, None))
    (tmp_path / "1").rename(tmp_path / "old")
    assert run_local(ranks, lambda comm: body(comm, tmp_path / "old")) == expected


class Summed(nn.Module):
    """The gradient of what is summed up holds each element once for many: other sums read it otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Linear(FEATURES, 9 * 16), nn.Parameter(torch.randn(9, 16))
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(16 + 8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        words = torch.tanh(self.first(x)).view(-1, 9, 16)
        image = self.norm(self.conv(words[:, None].contiguous())).sum((2, 3))
        return self.head(torch.cat([(words * 1.5 + self.shift).sum(1), image], 1) * 0.01)


@pytest.mark.parametrize("how", [{}, {"recompute": "full"}, {"schedule": "zb-h1"}], ids=str)
@pytest.mark.slow
def test_a_gradient_that_stands_for_many_crosses_a_cut_as_it_was(how: dict[str, Any]) -> None:
    expected = alone(lambda comm: result(pipeline(comm, Summed)))
    for ranks in (2, 4, 6):
        assert trained(ranks, Summed, **how) == expected


class Fourier(nn.Module):
    """Complex weights, a complex buffer, and complex numbers between any two of its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(9), torch.arange(9.0)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.rfft(torch.tanh(self.first(x))) * self.weight
        return self.head(torch.fft.irfft(x * self.turn, n=16))


@pytest.mark.parametrize("how", [{}, {"bits": "fast"}], ids=["torch", "fast"])
@pytest.mark.slow
def test_a_model_may_compute_with_complex_numbers(tmp_path: Path, how: dict[str, Any]) -> None:
    def body(comm: Communicator, first: int = 0) -> Result:
        pipe = pipeline(comm, Fourier, resume=tmp_path / "1" if first else None, **how)
        if not first:
            pipe.fit(1)
            if comm.size == 4:
                pipe.save(tmp_path / "1")
        return result(pipe, 2)

    expected = run_local(4, body)[0]
    assert alone(body) == expected
    assert run_local(2, partial(body, first=1))[0] == expected


# -- replicas -----------------------------------------------------------------------------------------------


def masked(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The weight depends on the labels of the whole batch."""
    each = functional.cross_entropy(outputs, batch["labels"], reduction="none")
    return (each * (batch["labels"] > 0)).sum(), (batch["labels"] > 0).sum()


@pytest.mark.parametrize(
    ("optimizer", "places"),
    [
        pytest.param(None, [(2, 2), (2, 1)], id="two ranks"),
        pytest.param(None, [(3, (2, 1)), (3, (1, 2))], id="unlike numbers"),
        pytest.param(None, [(5, (4, 1)), (2, 1), (4, (1, 2, 1))], id="many of them", marks=pytest.mark.full),
        pytest.param(None, [(4, 2), (4, 4), (4, 1), (1, 1)], id="four ranks", marks=pytest.mark.full),
        pytest.param(momentum, [(2, 2), (4, 4), (2, 1)], id="SGD and a scheduler", marks=pytest.mark.full),
    ],
)
@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_replicas(
    tmp_path: Path, optimizer: Any, places: list[tuple[int, Copies]]
) -> None:
    """(ranks, replicas) of two steps each; optimizer state is spread over the replicas."""
    start = partial(pipeline, optimizer=optimizer, blocks=4, loss=masked, clip=0.5)

    def goes_on(comm: Communicator, replicas: Copies) -> tuple[Result, list[int], Copies]:
        steps = comm.bcast_object(max((int(p.name) for p in tmp_path.iterdir()), default=0))
        pipe = start(comm, replicas=replicas, resume=tmp_path / str(steps) if steps else None)
        found = result(pipe, 2)
        pipe.save(tmp_path / str(pipe.steps_done))
        sizes = comm.allgather_object(sum(t.nbytes for t in pipe.trainer.optimizer_state().values()))
        return found, sizes, shape_of(pipe.plan.layout)

    expected = alone(lambda comm: [result(pipe := start(comm), 2), *(result(pipe, 2) for _ in places[1:])])
    for (ranks, replicas), wanted in zip(places, expected, strict=True):
        found, sizes, copies = run_local(ranks, lambda comm, n=replicas: goes_on(comm, n))[0]
        assert (found, copies) == (wanted, replicas)
        assert sum(n > 0 for n in sizes) > ranks_in_each(replicas, ranks) or replicas == 1


@pytest.mark.slow
def test_blocks_for_ranks_that_may_come_let_a_run_of_one_rank_go_on_as_replicas(tmp_path: Path) -> None:
    how: dict[str, Any] = {"blocks": "auto", "loss": masked}

    def first(comm: Communicator) -> tuple[str, Result]:
        pipe = pipeline(comm, max_ranks=4, **how)
        pipe.step()
        pipe.save(tmp_path / "1")
        return pipe.blocks_why, result(pipe, 1)

    def goes_on(comm: Communicator, replicas: int = 4) -> tuple[int, str, Copies, Result]:
        pipe = pipeline(comm, replicas=replicas, resume=tmp_path / "1", **how)
        return pipe.numerics.blocks, pipe.blocks_why, shape_of(pipe.plan.layout), result(pipe, 1)

    why, expected = run_local(1, first)[0]
    assert why == "for 4 ranks at most, as pipeline.max_ranks says"
    kept = "those of the checkpoint or plan, as they decide bits"
    assert run_local(4, goes_on)[0] == (4, kept, 4, expected)
    with pytest.raises(PlanError, match=r"3 replicas with .*blocks = 4: .* use 1 or 2 or 4; .*multiple of 3"):
        run_local(3, lambda comm: goes_on(comm, 3))


A_STREAM: dict[str, Any] = {"data": lambda: Epochs(Samples(5 * BATCH))}
AUTO: dict[str, Any] = {"loss": masked, "micro_batches": "auto", "blocks": "auto"}


@pytest.mark.parametrize(
    ("how", "replicas", "on"),
    [
        pytest.param(A_STREAM, 2, ((0, 1),), id="a stream"),
        pytest.param(AUTO, 2, ((0, 1),), id="auto"),
        pytest.param(A_STREAM, (1, 2), ((0,), (1, 2)), id="a stream, 1+2"),
        pytest.param(AUTO, (2, 1), ((0, 1), (2,)), id="auto, 2+1", marks=pytest.mark.full),
    ],
)
@pytest.mark.slow
def test_replicas_read_what_is_theirs(
    how: dict[str, Any], replicas: Copies, on: tuple[tuple[int, ...], ...]
) -> None:
    """Also in an evaluation and a prediction whose micro-batches do not divide."""
    how = {"blocks": 2, "val": Samples(11, seed=2), "val_batch": 5, "metrics": {"accuracy": accuracy}, **how}
    data = how.pop("data", None)

    def body(comm: Communicator, **how: Any) -> tuple[Result, dict[str, str], Tensor, Plan]:
        pipe = pipeline(comm, data=data and data(), **how)
        found = result(pipe)
        values = {name: value.hex() for name, value in pipe.evaluate().items()}
        return found, values, pipe.predict({"x": Samples(5).x}), pipe.plan

    ranks = run_local(len({*chain(*on)}), lambda comm: body(comm, **{**how, "replicas": replicas}))
    *first, plan = ranks[0]
    assert plan.layout.ranks == on
    how |= {"micro_batches": plan.numerics.micro_batches, "blocks": plan.numerics.blocks}
    *expected, _ = alone(lambda comm: body(comm, **how))
    assert plan.numerics.blocks == 2
    assert first[:2] == expected[:2] == list(ranks[1][:2])
    assert all(torch.equal(outputs, expected[2]) for _, _, outputs, _ in ranks)


@pytest.mark.parametrize("micro_batches", [4, "auto"])
@pytest.mark.slow
def test_what_rank_0_refuses_all_ranks_do(micro_batches: int | str) -> None:
    """Somebody may catch it and go on with less."""

    def body(comm: Communicator) -> str:
        with pytest.raises(PlanError) as caught:
            pipeline(comm, micro_batches=micro_batches, memory_bytes=1)
        return str(caught.value)

    first, second = run_local(2, body)
    assert first == second


@pytest.mark.slow
def test_replicas_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match=r"2 replicas with pipeline\.blocks = 1: .* use 1; or, .*\.blocks=2"):
        run_local(2, lambda comm: pipeline(comm, replicas=2))
    with pytest.raises(PlanError, match=r"replicas 2\+1 are on 3 ranks, not 2; start 3"):
        run_local(2, lambda comm: pipeline(comm, replicas=(2, 1), blocks=2))
    assert run_local(3, lambda comm: pipeline(comm, replicas=[2, 1], blocks=2).size) == [3, 3, 3]
    with pytest.raises(MpipipeError, match=r"replicas = \(\): give a number, or one for each stage"):
        alone(lambda comm: pipeline(comm, replicas=()))
    with pytest.raises(MpipipeError, match=r"replicas = '2\+1'; give a number, one for each, as"):
        alone(lambda comm: pipeline(comm, replicas="2+1"))
    for wrong in (0, (2, 0)):
        with pytest.raises(MpipipeError, match="replicas = 0; must be at least 1"):
            alone(lambda comm, n=wrong: pipeline(comm, replicas=n))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"batch": 0, "micro_batches": "auto"}, "batch = 0; give a whole number, 1 at least"),
        ({"batch": 8.0}, "batch = 8.0; give a whole number"),
        ({"micro_batches": "all"}, "micro_batches = 'all'; give a whole number"),
        ({"threads": 0}, "threads = 0; give"),
        ({"val_batch": -1}, "val_batch = -1; give"),
        ({"memory_bytes": 0}, "memory_bytes = 0; give"),
        ({"memory_bytes": "1GB"}, "memory_bytes = '1GB'; give"),
        ({"mirror_every": -1}, "mirror_every = -1; give a whole number, 0 at least"),
        ({"receive_window": 1 << 30}, "receive_window = 1073741824; give a whole number, from 1 to 65536"),
        ({"clip": -1.0}, "clip = -1.0; give a number above 0"),
        ({"clip": 0}, "clip = 0; give a number above 0"),
        ({"optimizer": OptimizerSettings("adam")}, r"OptimizerSettings\(kind='adam'\); expected 'adamw' or"),
        ({"optimizer": OptimizerSettings(lr=-1)}, r"OptimizerSettings\(lr=-1\); give a number, 0 at least"),
        ({"optimizer": OptimizerSettings(clip=float("nan"))}, "clip = nan; give a number above 0"),
        ({"optimizer": OptimizerSettings(lr=float("inf"))}, r"OptimizerSettings\(lr=inf\); give a number"),
        ({"optimizer": OptimizerSettings(betas=(1.0, 0.9))}, r"\(betas=\(1.0, 0.9\)\): input should be"),
        ({"optimizer": OptimizerSettings(eps=-1.0)}, r"\(eps=-1.0\): input should be greater"),
        ({"optimizer": OptimizerSettings("sgd", momentum=2.0)}, r"OptimizerSettings\(momentum=2.0\): input"),
        ({"optimizer": OptimizerSettings(warmup=-3)}, r"OptimizerSettings\(warmup=-3\): input"),
        ({"optimizer": OptimizerSettings(min_lr_ratio=0.1)}, r"\(min_lr_ratio=0.1\) without steps; say"),
        ({"seed": 1.5}, "seed = 1.5; give a whole number, from 0 to"),
        ({"max_ranks": 8}, "max_ranks = 8 is what blocks='auto' goes by, but blocks = 1; set it"),
        ({"weight_of": lambda batch: 2}, "the loss returns 2 values, and weight_of is given"),
        ({"reduce": "fats"}, "reduce = 'fats'; expected one of 'exact', 'fast'; did you mean 'fast'"),
        ({"microbatches": 4}, "Pipeline has no argument 'microbatches'; did you mean 'micro_batches'"),
        ({"function": 0.1}, "Pipeline has no argument 'function'"),
    ],
)
def test_numbers_that_train_nothing_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(MpipipeError, match=says):
        alone(lambda comm: pipeline(comm, **how))


@pytest.mark.parametrize(
    ("weight", "said"), [(torch.tensor(65504.0).half() * 2, "inf"), (-1.0, "-2"), (float("nan"), "nan")]
)
@pytest.mark.slow
def test_a_weight_that_is_no_positive_number_trains_nothing(weight: Any, said: str) -> None:
    def of_weight(outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
        return loss(outputs, batch)[0], (batch["labels"] >= 0).to(torch.float16).mean() * weight

    def body(comm: Communicator) -> float:
        pipe = pipeline(comm, loss=of_weight, val=Samples(5), micro_batches=2)
        with pytest.raises(MpipipeError, match=f"step 0: the weight of the loss is {said}; give a finite"):
            pipe.step()
        return pipe.evaluate()["loss"]

    assert (run_local(2, body)[0] >= 0) is False, "NaN, or what a negative weight makes"


@pytest.mark.slow
def test_numbers_of_numpy_are_numbers() -> None:
    numbers = {
        "batch": np.int64(BATCH),
        "micro_batches": np.int32(4),
        "blocks": np.int64(2),
        "seed": np.uint8(3),
    }
    plain_numbers = {name: int(number) for name, number in numbers.items()}
    assert trained(2, **numbers) == trained(1, **plain_numbers)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.first(x))
        return {"logits": self.head(h), "layers": torch.stack([h, -h, h])}


def test_what_micro_batches_return_otherwise_than_by_sample_is_not_joined() -> None:
    def of_logits(outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, int]:
        return loss(outputs["logits"], batch)

    def body(comm: Communicator) -> None:
        pipe = pipeline(comm, Layered, loss=of_logits)
        assert pipe.predict({"x": Samples(2).x})["layers"].shape == (3, 2, 16)
        for samples in (4, 5):
            with pytest.raises(DataError, match=r"predict: tensor 1 .* the shape \[3, 2, 16\] for a"):
                pipe.predict({"x": Samples(samples).x})

    alone(body)


class Words:
    """Eight tokens each, and what comes after them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = torch.arange(i, i + 9) % 11
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


class Several(nn.Module):
    """As a mixture of experts returns them: its loss comes before the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.embed(tokens))
        return {"aux_loss": h.square().mean(), "hidden": h, "logits": self.head(h)}


class NoLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.logits = nn.Embedding(11, 16), nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.logits(self.embed(tokens).mean(1))}


@pytest.mark.slow
def test_a_sample_is_drawn_from_the_logits() -> None:
    def of_logits(outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, int]:
        logits = outputs["logits"]
        labels = batch["labels"] if logits.dim() == 3 else batch["labels"][:, -1]
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), len(logits)

    def body(comm: Communicator, model: type[nn.Module], prompt: str) -> tuple[str | None, str, list[str]]:
        pipe = pipeline(comm, model, Words(), loss=of_logits)
        said, settings = list[str](), SimpleNamespace(length=3, temperature=0.0, prompt=prompt)
        text, expected = generate(pipe.trainer, Letters(), settings, 0, said.append), prompt
        for _ in range(3 if model is Several and prompt else 0):
            ids = torch.tensor([Letters().encode(expected) + [0] * (8 - len(expected))])
            logits = pipe.predict({"tokens": ids})["logits"]
            expected += Letters().decode([int(logits[0, len(expected) - 1].argmax())])
        return text, expected, said

    for ranks in (1, 2):
        text, expected, said = run_local(ranks, partial(body, model=Several, prompt="abc"))[0]
        assert (text, said) == (expected, [])
        text, _, said = run_local(ranks, partial(body, model=NoLogits, prompt="abc"))[0]
        assert text is None
        assert "note: no sample of text, as the model returns no logits (1, 8, vocabulary)" in said[0]
    text, _, said = run_local(1, partial(body, model=Several, prompt=""))[0]
    assert (text, "sample.prompt has no token" in said[0]) == (None, True)


@pytest.mark.slow
def test_a_mean_loss_in_float64_stays_so() -> None:
    def mean(outputs: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(outputs, batch["labels"])

    def of_sum(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        return functional.cross_entropy(outputs, batch["labels"]) * 2, 2

    def doubled() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()

    def data() -> Samples:
        return Samples(37, form=lambda x, label: (x.double(), label))

    expected = trained(1, doubled, data, loss=of_sum)
    for weight in (2, torch.tensor(2)):
        assert trained(1, doubled, data, loss=mean, weight_of=lambda batch, w=weight: w) == expected


@pytest.mark.slow
def test_fast_replicas_of_unlike_numbers_go_on_with_others(tmp_path: Path) -> None:
    """Three and two do not divide each other: seven micro-batches go six ways."""
    start = partial(
        pipeline, reduce="fast", batch=14, micro_batches=7, loss=masked, val=Samples(11, seed=2), val_batch=5,
        metrics={"accuracy": accuracy},
    )  # fmt: skip

    def body(comm: Communicator, replicas: Copies, steps: int = 0) -> tuple[Any, list[str], Any]:
        """What two steps lead from and to, and their losses."""

        def shown() -> Any:
            return pipe.evaluate(), pipe.predict({"x": Samples(5).x}).tolist()

        pipe = start(comm, replicas=replicas, resume=tmp_path / str(steps) if steps else None)
        assert shape_of(pipe.plan.layout) == replicas
        before, losses = shown(), result(pipe, 2)["losses"]
        if not steps:
            pipe.save(tmp_path / "2")
        return before, losses, shown()

    expected = [float.fromhex(x) for x in alone(lambda comm: result(start(comm), 4)["losses"])]
    _, first, after = run_local(5, lambda comm: body(comm, (3, 2)))[0]
    for ranks, replicas in ((1, 1), (3, (1, 2))):
        before, more, _ = run_local(ranks, lambda comm, n=replicas: body(comm, n, 2))[0]
        assert before == after
        assert [float.fromhex(x) for x in (*first, *more)] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(PlanError, match=r"replicas 3\+2 with pipeline\.micro_batches = 5: there are 6 ways"):
        run_local(5, lambda comm: pipeline(comm, reduce="fast", micro_batches=5, replicas=(3, 2)))


@pytest.mark.slow
def test_fast_replicas_are_of_any_number(tmp_path: Path) -> None:
    """Four micro-batches on three ranks, also where both numbers are searched; a run that was exact
    becomes a fast one on purpose only."""
    fast: dict[str, Any] = {"reduce": "fast", "blocks": "auto"}
    assert trained(2, replicas=2, **fast) == trained(1, blocks=2), "equal shares, as in so many blocks"
    found = trained(3, replicas=3, **fast)
    losses = [[float.fromhex(x) for x in r["losses"]] for r in (found, plainly_trained())]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    sizes = run_local(3, lambda comm: pipeline(comm, micro_batches="auto", **fast).plan.layout.n_ranks)
    assert sizes == [3, 3, 3]
    folder = tmp_path / "exact"
    alone(lambda comm: pipeline(comm, blocks=4).save(folder))
    with pytest.raises(ConfigError, match=r"reduce: 'exact' in the checkpoint, 'fast' now"):
        alone(lambda comm: pipeline(comm, resume=folder, **fast))
    went_on = run_local(
        3, lambda comm: pipeline(comm, resume=folder, replicas=3, new_numerics=True, **fast).numerics
    )
    assert (went_on[0].reduce, went_on[0].blocks) == ("fast", 1)
    with pytest.raises(MpipipeError, match="reduce = 'fast' adds up in no blocks, but blocks = 2"):
        alone(lambda comm: pipeline(comm, reduce="fast", blocks=2))


def doubled(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
    total, weight = loss(outputs, batch)
    return 2.0 * total, weight


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one step, for all to read."""
    folder = tmp_path_factory.mktemp("run") / "saved"

    def body(comm: Communicator) -> None:
        pipe = pipeline(comm)
        pipe.fit(1)
        pipe.save(folder)

    alone(body)
    return folder


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"seed": 5}, ConfigError, r"seed: 0 in the checkpoint, 5 now"),
        ({"micro_batches": 3}, ConfigError, r"micro_batches: 4 in the checkpoint, 3 now"),
        ({"model": Structured}, CheckpointError, r"first\.weight"),
        ({"model": Listed}, CheckpointError, r"norm\.weight"),
        ({"loss": doubled}, CheckpointError, r"another form of this model or loss \(graph"),
        ({"data": Samples(38)}, CheckpointError, r"samples for training: 37 in the checkpoint, 38 now"),
        ({"data": Samples(37, seed=2)}, CheckpointError, r"sha256 of the first samples: [0-9a-f]{64} in"),
    ],
    ids=["seed", "micro-batches", "shapes", "names", "loss", "more data", "other data"],
)
@pytest.mark.slow
def test_what_does_not_fit_a_checkpoint_is_refused(
    saved: Path, changed: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        alone(lambda comm: pipeline(comm, resume=saved, **changed))


@pytest.mark.slow
def test_new_numerics_go_on_from_the_weights_and_the_state(saved: Path) -> None:
    def body(comm: Communicator) -> int:
        pipe = pipeline(comm, resume=saved, seed=5, new_numerics=True)
        pipe.fit(3)
        return pipe.steps_done

    assert alone(body) == 3


@pytest.mark.parametrize("how", ["new_data", "new_numerics"])
@pytest.mark.slow
def test_other_data_are_gone_on_with_where_that_is_meant(saved: Path, how: str) -> None:
    def body(comm: Communicator) -> dict[str, Any]:
        return pipeline(comm, data=Samples(40), resume=saved, **{how: True}).known_data

    assert alone(body)["samples"] == 40


@pytest.mark.slow
def test_a_checkpoint_that_knows_nothing_of_its_data_is_gone_on_from(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "of an earlier version"))
    forget_data(folder)
    assert alone(lambda comm: pipeline(comm, data=Samples(40), resume=folder).steps_done) == 1


@pytest.mark.slow
def test_data_are_known_again_where_the_number_of_micro_batches_was_searched(tmp_path: Path) -> None:
    """The first samples are those of a micro-batch."""
    given: dict[str, Any] = {"micro_batches": "auto"}
    alone(lambda comm: pipeline(comm, **given).save(tmp_path / "saved"))
    alone(lambda comm: pipeline(comm, resume=tmp_path / "saved", **given))


@pytest.mark.slow
def test_the_first_step_of_a_plan_says_it_in_a_line_on_rank_0() -> None:
    def body(comm: Communicator) -> list[str]:
        said: list[str] = []
        pipe = pipeline(comm, schedule="1f1b", say=said.append)
        pipe.fit(2)
        pipe.plan = replace(pipe.plan)  # as after a recovery
        pipe.fit(4)
        return said

    first, second = run_local(2, body)
    line, again = first
    assert line.startswith("plan: 1f1b, 4 micro-batches of 2, 2 stages, cut before "), line
    assert "; predicted step " in line
    assert (again, second) == (line, [])


@pytest.mark.slow
def test_say_is_called_as_print_is(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def body(comm: Communicator) -> None:
        pipeline(comm, say=said.append).say("loss", 1.5, None)
        printing = pipeline(comm, say=None)
        printing.say("a", 2, sep="-")
        printing.say()

    run_local(2, body)
    assert said == ["loss 1.5 None"]
    assert capsys.readouterr().out == "a-2\n\n"


@pytest.mark.slow
def test_a_resume_that_is_not_exact_says_so(tmp_path: Path) -> None:
    def body(comm: Communicator, **how: Any) -> list[str]:
        said: list[str] = []
        data, how = Epochs(Samples(4 * BATCH)), {"schedule": "1f1b", **how}
        pipe = pipeline(comm, data=data, say=said.append, **how)
        pipe.fit(3 if "resume" in how else 2)
        if "resume" not in how:
            pipe.save(tmp_path / "saved")
        return said

    def notes(said: list[str]) -> list[str]:
        return [line for line in said if not line.startswith("plan: ")]

    assert [notes(said) for said in run_local(2, body)] == [[], []]
    first, second = run_local(2, lambda comm: body(comm, resume=tmp_path / "saved"))
    assert ["not exact" in line for line in notes(first)] == [True]
    assert second == [], "one rank speaks"


@pytest.mark.slow
def test_a_fit_that_has_nothing_left_to_do_says_so() -> None:
    """As of a script that a chain of jobs starts once more."""

    def body(comm: Communicator) -> list[str]:
        said: list[str] = []
        pipe = pipeline(comm, data=Epochs(Samples(4 * BATCH)), say=said.append, schedule="1f1b")
        pipe.fit(2)
        pipe.fit(2)
        return [line for line in said if line.startswith("note: ")]

    said = ["note: 2 steps are done; for more, give fit a larger number of steps"]
    assert run_local(2, body) == [said, []]


# -- what is trained ----------------------------------------------------------------------------------------


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.fixed = nn.Linear(3, 3), nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fixed(x)))


@pytest.mark.slow
def test_unused_parameters_are_refused_unless_they_may_stay() -> None:
    with pytest.raises(MpipipeError, match=r"'spare.weight', 'spare.bias': no stage uses them.*to keep"):
        alone(lambda comm: pipeline(comm, Spare))

    def body(comm: Communicator) -> None:
        pipe = pipeline(comm, Spare, unused="keep")
        before = {name: t.clone() for name, t in pipe.state_dict(full=False).items()}
        pipe.fit(2)
        after = pipe.state_dict(full=False)
        assert {name for name, t in before.items() if not torch.equal(t, after[name])} == (
            {name for name in after if name.startswith("head")}
        )
        state = [name.split("/")[0] for name in pipe.trainer.optimizer_state()]
        assert set(state) == {name for name in after if name.startswith("head")}, "no other has any"

    run_local(2, body)


class SpareHead(nn.Module):
    """The second output, which is made late, is not for the loss; one of its layers is frozen, one not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.last = nn.Linear(FEATURES, CLASSES)
        self.fixed, self.spare = nn.Linear(CLASSES, 3).requires_grad_(False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y = self.last(x)
        return y, self.spare(torch.tanh(self.fixed(y)))


def spare_mean(outputs: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    return outputs[1].sum(), outputs[1].numel()


class Quantised(nn.Module):
    """Frozen integers among the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.levels = nn.Parameter(torch.arange(16, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x) * self.levels))


@pytest.mark.slow
def test_frozen_weights_may_be_integers() -> None:
    assert trained(2, Quantised) == trained(1, Quantised)


@pytest.mark.slow
def test_what_evaluation_alone_reads_is_there_on_any_number_of_ranks_and_after_a_resume(
    tmp_path: Path,
) -> None:
    """The operators that read it follow their inputs to the last stage; the first one owns the parameters."""
    how: dict[str, Any] = {
        "loss": lambda outputs, batch: loss(outputs[0], batch), "metrics": {"spare": spare_mean},
        "unused": "keep", "val": Samples(11, seed=2),
    }  # fmt: skip

    def body(comm: Communicator, schedule: str = "1f1b", resume: Path | None = None) -> Any:
        pipe = pipeline(comm, SpareHead, schedule=schedule, resume=resume, **how)
        if resume:
            comm.barrier()
            if comm.rank == 0:
                shutil.rmtree(resume)  # as `train.keep` does while a run goes on
            comm.barrier()
        else:
            pipe.fit(2)
            pipe.save(tmp_path / str(comm.size))
        values, (_, spare) = pipe.evaluate(), pipe.predict({"x": Samples(5).x})
        return values, spare.tolist(), {name: t.clone() for name, t in pipe.state_dict(full=False).items()}

    ((values, spare, weights),) = run_local(1, body)
    assert values.keys() == {"loss", "spare"}
    found = run_local(3, body)
    assert [(v, s) for v, s, _ in found] == [(values, spare)] * 3
    held = [name for *_, mine in found for name in mine]
    assert sorted(held) == sorted(weights), "each has one owner"
    assert "spare.weight" in found[0][2]
    for schedule, saved in (("1f1b", 3), ("zb-v", 1)):  # first and last stage on one rank, too
        found = run_local(2, partial(body, schedule=schedule, resume=tmp_path / str(saved)))
        assert [(v, s) for v, s, _ in found] == [(values, spare)] * 2


@pytest.mark.slow
def test_a_tensor_that_no_checkpoint_can_hold_is_refused_before_a_step() -> None:
    net = Net()
    net.register_buffer("turns", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"the model: 'turns' is complex128, .* as another type"):
        alone(lambda comm: pipeline(comm, net))


@pytest.mark.slow
def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(MpipipeError, match="all are frozen"):
        alone(lambda comm: pipeline(comm, lambda: Net().requires_grad_(False)))


class Gated(Net):
    """Calls a kernel by its name."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        found = super().forward(x, scale)
        return ops.swiglu(found, found)


@pytest.mark.slow
@pytest.mark.skipif(ops.kernels is None, reason="the compiled kernels are not built")
def test_a_kernel_that_is_called_by_name_wants_its_bits_recorded() -> None:
    with pytest.raises(MpipipeError, match=r"(?s)ops\.swiglu\(found.*mpipipe::swiglu.*train\.bits=fast"):
        alone(lambda comm: pipeline(comm, Gated))
    alone(lambda comm: pipeline(comm, Gated, bits="fast").step())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"batch": 2}, r"micro_batches = 4 for batch = 2; a micro-batch"),
        ({"data": 5}, r"data is a int; expected len"),
        ({"schedule": "2f2b"}, r"2f2b"),
    ],
    ids=["batch", "data", "schedule"],
)
def test_bad_arguments_are_named(how: dict[str, Any], says: str) -> None:
    with pytest.raises(MpipipeError, match=says):
        alone(lambda comm: pipeline(comm, **how))


@pytest.mark.slow
def test_evaluation_without_data_says_what_to_give() -> None:
    with pytest.raises(MpipipeError, match=r"no validation data; give Pipeline\(\.\.\., val="):
        alone(lambda comm: pipeline(comm).evaluate())


# -- schedules of one's own ---------------------------------------------------------------------------------


@pytest.fixture
def own_schedules() -> Iterator[None]:
    before = set(SCHEDULES)
    yield
    for name in set(SCHEDULES) - before:
        del SCHEDULES[name]


def backwards(n_stages: int, n_micro: int) -> list[str]:
    """The last micro-batch goes forward first: statistics and losses must not care."""
    forward = [f"F{micro}" for micro in reversed(range(n_micro))]
    return [" ".join([*forward, *(f"B{micro}" for micro in range(n_micro))])] * n_stages


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.slow
def test_a_schedule_of_one_s_own_changes_no_bits() -> None:
    register_schedule("backwards", backwards)
    assert trained(2, schedule="backwards") == plainly_trained()


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.slow
def test_a_file_may_be_the_schedule(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1B0,1B1,1F2,1B2,1F3,1B3\n")
    assert trained(2, schedule=str(file)) == plainly_trained()
    file.write_text(to_text(build("zb-v", 4, 4)))  # it is read again: two stages per rank, backwards in two
    assert trained(2, schedule=str(file)) == plainly_trained()
    file.write_text("0F0,0B0\n1F0\n")
    with pytest.raises(PlanError, match=r"order\.csv: stage 1, micro-batch 0 has F; it needs F and B"):
        run_local(2, lambda comm: pipeline(comm, schedule=str(file)))
    with pytest.raises(ConfigError, match=r"none\.csv"):
        run_local(2, lambda comm: pipeline(comm, schedule="none.csv"))


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 B3 F3"], r"1B3 comes before 1F3"),
        (["F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3"], r"stage 1, micro-batch 3 has F"),
        (["F0 F1 F2 F3 B0 B1 B2 B3", "forward backward"], r"stage 1: 'forward' is no action"),
        (
            ["F0 B0 F1 B1 F2 F3 B2 B3", "F1 F0 B0 B1 F2 F3 B2 B3"],
            r"rank 1 for 0F1",
        ),
    ],
    ids=["order", "missing", "text", "deadlock"],
)
@pytest.mark.slow
def test_a_schedule_that_cannot_run_is_refused(lines: list[str], says: str) -> None:
    register_schedule("wrong", lambda n_stages, n_micro: lines)
    with pytest.raises((PlanError, DeadlockError), match=says):
        run_local(2, lambda comm: pipeline(comm, schedule="wrong"))


# -- in a notebook ------------------------------------------------------------------------------------------


@pytest.mark.jobs
def test_a_script_without_mpirun_has_one_rank(tmp_path: Path) -> None:
    """As a notebook does. An error is one of Python's, which leaves the session alive."""
    script = """
        import torch
        from torch import nn
        from mpipipe import MpipipeError, Pipeline

        def loss(outputs, batch):
            return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)

        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
        try:
            Pipeline(net, loss, data, batch=4)
        except MpipipeError as error:
            print(error)
        first = Pipeline(net, loss, data, batch=8)
        first.fit(2)
        second = Pipeline(net, loss, data, batch=8)  # another cell
        second.fit(3)
        print(first.size, first.steps_done, second.steps_done, tuple(first.predict(torch.zeros(5, 4)).shape))
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    job = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert "micro_batches = 8 for batch = 4; a micro-batch" in lines[0]
    assert [line.partition(",")[0] for line in lines[1:3]] == ["plan: 1f1b"] * 2
    assert lines[3:] == ["1 2 3 (5, 2)"]


# -- plans from elsewhere --------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_edited_plan_gives_the_same_bits_with_its_own_cuts(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def made(comm: Communicator) -> tuple[Plan, tuple[str, ...], Result]:
        pipe = pipeline(comm, schedule="1f1b")
        return pipe.plan, pipe.variants.graph.groups, result(pipe)

    (plan, groups, expected), (elsewhere, *_) = run_local(2, made)
    assert plan.costs is not None
    assert plan == elsewhere  # with its costs
    assert [g.name for g in plan.costs.groups] == list(groups)
    other = next(g for g in groups[1:] if (g,) != plan.layout.cuts)
    layout = replace(plan.layout, cuts=(other,), schedule="gpipe", receive_window=2)
    edited = replace(plan, layout=layout)
    path.write_text(plan_text(edited))

    def trained_as(given: str | Plan) -> Callable[[Communicator], Any]:
        def body(comm: Communicator) -> Any:
            pipe = pipeline(comm, plan=given)
            return pipe.plan.layout, pipe.plan.prediction, result(pipe)

        return body

    for given in (str(path), edited):
        used, prediction, found = run_local(2, trained_as(given))[0]
        assert used == layout
        assert prediction != plan.prediction, "it is predicted anew"
        assert found == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"numerics": {"seed": 3}}, "numerics.seed = 3, this run 0"),
        ({"layout": {"cuts": ("no.such/group.0",)}}, "which is no group of this model; did you mean"),
    ],
)
@pytest.mark.slow
def test_a_plan_of_another_run_is_refused(change: dict[str, Any], words: str) -> None:
    plan = run_local(2, lambda comm: pipeline(comm, schedule="1f1b").plan)[0]
    for part, values in change.items():
        plan = replace(plan, **{part: replace(getattr(plan, part), **values)})
    with pytest.raises(PlanError, match=words):
        run_local(2, lambda comm: pipeline(comm, plan=plan))


@pytest.mark.slow
def test_ranks_that_were_given_different_plans_are_caught() -> None:
    plan = run_local(2, lambda comm: pipeline(comm).plan)[0]
    plans = plan, replace(plan, layout=replace(plan.layout, receive_window=1))
    with pytest.raises(LaunchError, match="do not agree on: plan"):
        run_local(2, lambda comm: pipeline(comm, plan=plans[comm.rank]))
