"""A torch optimizer of the user's own: the bits of a plain loop, the state by name, clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import tiny
import torch
from tiny import Case, plan_of, warm
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as s

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import CheckpointError, MpipipeError
from mpipipe.models import cross_entropy
from mpipipe.runtime.foreign import Factory, ForeignUpdater, UserOptimizer
from mpipipe.runtime.optimizer import FlatUpdater, OptimizerSettings, check_trained, described
from mpipipe.runtime.setting import set_threads
from mpipipe.runtime.trainer import Trainer
from mpipipe.runtime.weights import Flat, ParamGroup
from mpipipe.state.digests import tensor_digest
from mpipipe.values import TensorSpec

CASE = Case("gpt, untied, no dropout", batch=4, micro_batches=2)


def adam(named: list) -> torch.optim.Optimizer:
    decay = [p for _, p in named if p.dim() >= 2]
    rest = [p for _, p in named if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)


def with_schedule(named: list) -> tuple:
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
    return optimizer, s.StepLR(optimizer, 1, gamma=0.5)


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
@pytest.mark.slow
def test_the_bits_of_a_plain_loop_on_any_number_of_ranks(factory: Factory, clip: float | None) -> None:
    warm(CASE)
    expected = plain(factory, clip)
    for ranks in (1, 2, 3):
        got = run_local(ranks, lambda comm: trained(comm, factory, clip))[0]
        assert {k: got[k] for k in expected} == expected


class Anew(Optimizer):
    """Averages with the values from before, which it keeps; makes data anew, and takes gradients away."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].get("before", p.data)
                self.state[p]["before"] = p.data
                p.data = 0.5 * (p.data + before) - 0.1 * p.grad
        self.zero_grad()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.slow
def test_an_optimizer_may_make_data_anew_and_take_gradients_away(clip: float | None) -> None:
    def factory(named: list) -> Optimizer:
        return Anew([p for _, p in named])

    warm(CASE)
    expected = plain(factory, clip)
    assert len({expected[f"loss {step}"] for step in range(3)}) == 3
    for ranks in (1, 2):
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


@pytest.mark.slow
def test_a_parameter_in_two_groups_is_refused_by_name() -> None:
    def twice(named: list) -> torch.optim.Optimizer:
        params = [p for _, p in named]
        return torch.optim.SGD([{"params": params}, {"params": params[:1]}], lr=0.1)

    with pytest.raises(MpipipeError, match=r"'wte.weight' into two parameter groups \(1 parameters"):
        run_local(1, lambda comm: trained(comm, twice, None))


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda optimizer: None, "None"),
        (lambda optimizer: [optimizer, None], "a list"),
        (lambda optimizer: (optimizer,), r"\(a SGD\)"),
        (lambda optimizer: (optimizer, None, 3), r"\(a SGD, None, a int\)"),
    ],
)
def test_what_is_no_optimizer_is_refused(made: Callable[[Any], Any], what: str) -> None:
    def factory(named: Any) -> Any:
        return made(torch.optim.SGD([p for _, p in named], lr=0.1))

    with pytest.raises(MpipipeError, match=f"returns {what}; return the optimizer, or"):
        Run(factory, [list(NAMES)])


@pytest.mark.slow
def test_parameters_left_out_and_foreign_ones_are_refused() -> None:
    def short(named: list) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named][1:], lr=0.1)

    def foreign(named: list) -> torch.optim.Optimizer:
        return torch.optim.SGD([*(p for _, p in named), torch.nn.Parameter(torch.zeros(2))], lr=0.1)

    with pytest.raises(MpipipeError, match=r"leaves out 'wte.weight' \(1 parameters"):
        run_local(1, lambda comm: trained(comm, short, None))
    with pytest.raises(MpipipeError, match="1 parameters that it was not given"):
        run_local(1, lambda comm: trained(comm, foreign, None))


@pytest.mark.slow
def test_a_factory_gets_the_order_of_the_model() -> None:
    """Rates by position are those of a plain loop, where one rank has it all."""

    def by_position(named: list) -> torch.optim.Optimizer:
        names.append([name for name, _ in named])
        return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.9**i} for i, (_, p) in enumerate(named)])

    names: list[list[str]] = []
    run_local(1, lambda comm: trained(comm, by_position, None, steps=1))
    assert names == [list(CASE.variants.trained)]


@pytest.mark.parametrize("rate", [lambda i, named: 0.1 * 0.9**i, lambda i, named: 0.1 / len(named)])
def test_options_by_position_or_number_are_refused_where_the_model_is_cut(rate: Any) -> None:
    def factory(named: list) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": rate(i, named)} for i, (_, p) in enumerate(named)])

    Run(factory, CUTS[0])
    says = r"lr = [\d.]+ for '[ac]' in the list of the 2 parameters of one stage, and lr = [\d.]+ in .* all 4"
    with pytest.raises(MpipipeError, match=says):
        Run(factory, CUTS[1])


def test_a_factory_that_reads_values_is_let_through() -> None:
    """It cannot be called for all parameters: a stage has the values of its own."""

    def by_value(named: list) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.01 * float(p.detach().norm())} for _, p in named])

    assert Run(by_value, CUTS[1]).rates() == Run(by_value, CUTS[0]).rates()


# -- what a checkpoint keeps of it ------------------------------------------------------------------------

NAMES = {"a": (3, 2), "b": (2,), "c": (2, 4), "d": (4,)}
Stages = list[list[str]]
CUTS: list[Stages] = [
    [["a", "b", "c", "d"]],
    [["a", "b"], ["c", "d"]],
    [["a"], ["b", "c", "d"]],
    [["d"], ["a"], ["c", "b"]],
]


@dataclass
class Disk:
    """`Saved`, in memory."""

    tensors: dict[str, Tensor]
    folder: Path = Path("there")

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def spec(self, name: str) -> TensorSpec:
        t = self.tensors[name]
        return TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self.tensors[name])


class Run:
    """A model of four tensors, cut into stages."""

    def __init__(self, factory: Factory, stages: Stages, values: dict[str, Tensor] | None = None) -> None:
        draw = torch.Generator().manual_seed(0)
        first = {name: torch.randn(shape, generator=draw) for name, shape in NAMES.items()}
        self.data = {name: (values or first)[name].clone() for name in NAMES}
        self.updaters = []
        self.grads = {name: torch.zeros(shape) for name, shape in NAMES.items()}
        for names in stages:
            weights = SimpleNamespace(
                data={n: self.data[n] for n in names}, own_grads={n: self.grads[n] for n in names},
                learning={n: self.data[n] for n in chain(*stages)},
            )  # fmt: skip
            self.updaters.append(ForeignUpdater(factory, weights))  # type: ignore[arg-type]

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            draw = torch.Generator().manual_seed(step)
            for grad in self.grads.values():
                grad.copy_(torch.randn(grad.shape, generator=draw))
            for updater in self.updaters:
                updater.update(step, None)

    def rates(self) -> dict[str, float]:
        return {
            name: float(group["lr"])
            for updater in self.updaters
            if updater.optimizer
            for group in updater.optimizer.param_groups
            for name in updater._names(group)
        }

    def saved(self) -> tuple[Disk, dict[str, Any]]:
        """Through JSON, as a checkpoint goes."""
        tensors = {name: t.clone() for u in self.updaters for name, t in u.state().items()}
        told = described((u.kind, u.numbers()) for u in self.updaters)
        return Disk(tensors), json.loads(json.dumps(told))

    def load(self, disk: Disk, told: dict[str, Any], step: int = 3) -> None:
        check_trained(disk, told, list(NAMES))
        for updater in self.updaters:
            updater.load(disk, told)


class Own(torch.optim.Optimizer):
    """Counts in plain numbers, per parameter and per group, and what it counts decides the update."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "seen": 0, "mode": "warm", "range": (0.5, 1), "bound": None})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["calls"] = state.get("calls", 0) + 1
                state["scale"] = state.get("scale", 1.0) * 0.7
                state["odd"] = not state.get("odd", False)
                state["nothing"] = None
                p.add_(p.grad, alpha=-group["lr"] * state["scale"] * state["calls"] / group["seen"])


def split(named: list) -> list[dict[str, Any]]:
    """Two groups, either of which may be empty; the order of the names in a stage decides nothing."""
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "lr": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "lr": 0.02},
    ]


def alone(make: Callable[[Any], Optimizer]) -> Factory:
    return lambda named: make(split(named))


def scheduled(make: Callable[[Optimizer], Any]) -> Factory:
    def factory(named: list) -> tuple:
        optimizer = torch.optim.SGD(split(named), lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    return factory


def by_layer(named: list) -> tuple:
    """A group, and a rate, for every parameter."""
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1 / (1 + ord(n) - ord("a"))} for n, p in named])
    warm = s.LinearLR(optimizer, 0.1, total_iters=2)
    return optimizer, s.SequentialLR(optimizer, [warm, s.CosineAnnealingLR(optimizer, 9)], [2])


def tensor_rate(named: list) -> tuple:
    groups = [g | {"lr": torch.tensor(g["lr"])} for g in split(named)]
    optimizer = torch.optim.Adam(groups)
    return optimizer, s.LambdaLR(optimizer, lambda step: 0.9**step)


FACTORIES: dict[str, Factory] = {
    "AdamW": alone(torch.optim.AdamW),
    "Adagrad": alone(torch.optim.Adagrad),
    "Adafactor": alone(torch.optim.Adafactor),
    "Rprop": alone(torch.optim.Rprop),
    "NAdam": alone(torch.optim.NAdam),
    "plain SGD": alone(torch.optim.SGD),
    "Own": alone(Own),
    "a rate in a tensor": tensor_rate,
    "groups by layer": by_layer,
    "StepLR": scheduled(lambda o: s.StepLR(o, 2, 0.5)),
    "MultiStepLR": scheduled(lambda o: s.MultiStepLR(o, [2, 5], 0.3)),
    "LambdaLR": scheduled(lambda o: s.LambdaLR(o, [lambda i: 0.9**i, lambda i: 1 / (i + 1)])),
    "OneCycleLR": scheduled(lambda o: s.OneCycleLR(o, [0.3, 0.1], 12)),
    "CyclicLR": scheduled(lambda o: s.CyclicLR(o, [0.01, 0.02], [0.1, 0.2], 3)),
    "warm restarts": scheduled(lambda o: s.CosineAnnealingWarmRestarts(o, 2, 2)),
    "SequentialLR": scheduled(
        lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, total_iters=4), s.MultiStepLR(o, [2, 3])], [4])
    ),
    "ChainedScheduler": scheduled(
        lambda o: s.ChainedScheduler([s.StepLR(o, 2, 0.5), s.ExponentialLR(o, 0.9)])
    ),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("before", range(len(CUTS)))
@pytest.mark.slow
def test_what_was_saved_on_one_cut_goes_on_to_the_same_bits_on_any(name: str, before: int) -> None:
    factory = FACTORIES[name]
    whole = Run(factory, CUTS[before])
    whole.train(0, 3)
    disk, told = whole.saved()
    values = {n: t.clone() for n, t in whole.data.items()}
    whole.train(3, 8)
    for cut in CUTS:
        run = Run(factory, cut, values)
        run.load(disk, told)
        again = run.saved()
        assert {n: tensor_digest(n, t) for n, t in again[0].tensors.items()} == {
            n: tensor_digest(n, t) for n, t in disk.tensors.items()
        }
        run.train(3, 8)
        assert run.rates() == whole.rates()
        for n in NAMES:
            assert tensor_digest(n, run.data[n]) == tensor_digest(n, whole.data[n]), (cut, n)


def test_numbers_come_back_as_what_they_were() -> None:
    run = Run(FACTORIES["Own"], CUTS[1])
    run.train(0, 3)
    disk, told = run.saved()
    assert disk.names == []
    assert told["kind"] == "Own"
    assert {k: v for k, v in told["numbers"].items() if k.startswith("b/")} == {
        "b/calls": 3, "b/scale": 0.7 * 0.7 * 0.7, "b/odd": True, "b/nothing": None,
    }  # fmt: skip
    other = Run(FACTORIES["Own"], CUTS[0])
    other.load(disk, told)
    optimizer = other.updaters[0].optimizer
    assert optimizer is not None
    states = [optimizer.state[p] for p in other.updaters[0].params.values()]
    assert all([type(v) for v in state.values()] == [int, float, bool, type(None)] for state in states)
    for group in optimizer.param_groups:
        assert (group["seen"], group["mode"], group["range"], group["bound"]) == (3, "warm", (0.5, 1), None)
        assert type(group["range"]) is tuple
    assert optimizer.state[other.updaters[0].params["d"]]["calls"] == 3


def test_the_numbers_of_the_checkpoint_hold_not_those_of_the_factory() -> None:
    run = Run(FACTORIES["AdamW"], CUTS[0])
    run.train(0, 3)
    for updater in run.updaters:
        assert updater.optimizer is not None
        for group in updater.optimizer.param_groups:
            group["lr"] = 0.125  # as a user's own loop may
            group["amsgrad"] = None
    other = Run(FACTORIES["AdamW"], CUTS[1])
    other.load(*run.saved())
    assert set(other.rates().values()) == {0.125}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "history",
            [1, 2],
            r"'Own' keeps 'history' for the parameter 'b', a list; a checkpoint holds tensors",
        ),
        ("a/b", 1.0, "keeps 'a/b' for the parameter 'b'"),
        ("param_groups", 1.0, "keeps 'param_groups' for the parameter 'b'"),
        (7, 1.0, "keeps 7 for the parameter 'b'"),
    ],
)
def test_state_that_a_checkpoint_cannot_keep_is_refused_by_name(key: Any, value: Any, says: str) -> None:
    run = Run(FACTORIES["Own"], CUTS[1])
    run.train(0, 1)
    updater = run.updaters[0]
    assert updater.optimizer is not None
    updater.optimizer.state[updater.params["b"]][key] = value
    with pytest.raises(CheckpointError, match=says):
        updater.numbers()


def test_state_of_no_parameter_and_tensors_of_a_group_are_refused() -> None:
    for spoil, says in (
        (lambda o: o.state.update({"steps": 3}), "keeps state for 'steps', none of the parameters"),
        (lambda o: o.param_groups[0].update(sums=torch.zeros(2)), r"'sums', a tensor of \[2\], .*of \['a'\]"),
    ):
        run = Run(FACTORIES["Own"], CUTS[0])
        spoil(run.updaters[0].optimizer)
        with pytest.raises(CheckpointError, match=says):
            run.saved()


def refused(factory: Factory, disk: Disk, told: dict[str, Any]) -> str:
    run = Run(factory, CUTS[1])
    with pytest.raises(CheckpointError) as caught:
        run.load(disk, told)
    for updater in run.updaters[:1]:
        assert updater.state() == Run(factory, CUTS[1]).updaters[0].state(), "nothing was taken up"
    return str(caught.value)


def test_a_checkpoint_of_another_optimizer_or_scheduler_is_refused() -> None:
    def saved(factory: Factory) -> tuple[Disk, dict[str, Any]]:
        run = Run(factory, CUTS[0])
        run.train(0, 3)
        return run.saved()

    adam = saved(FACTORIES["AdamW"])
    said = refused(FACTORIES["plain SGD"], *adam)
    assert said.startswith("there: was saved with the optimizer 'AdamW', this run has 'SGD'; resume with")
    disk, told = adam
    fewer = Disk({n: t for n, t in disk.tensors.items() if n not in ("b/exp_avg", "b/step")})
    said = refused(FACTORIES["AdamW"], fewer, told)
    assert "2 missing on disk: b/exp_avg, b/step\n  resume with the optimizer and the settings" in said
    more = Disk(disk.tensors | {"a/ema": torch.zeros(3, 2)})
    assert "1 unknown to it: a/ema" in refused(FACTORIES["AdamW"], more, told)
    frozen = Disk(disk.tensors | {"z/exp_avg": torch.zeros(3)})
    assert "of parameters that are not trained now: z\n" in refused(FACTORIES["AdamW"], frozen, told)
    for factory, other, says in (
        ("StepLR", "plain SGD", "scheduler StepLR, this run has none"),
        ("plain SGD", "LambdaLR", "scheduler none, this run has LambdaLR"),
        ("LambdaLR", "StepLR", "scheduler LambdaLR, this run has StepLR"),
    ):
        found = saved(FACTORIES[factory])
        with pytest.raises(CheckpointError, match=says):
            Run(FACTORIES[other], CUTS[1]).load(*found)


def test_parameters_and_groups_that_were_others_are_refused() -> None:
    part = Run(FACTORIES["AdamW"], [["a", "b", "c"]])
    part.train(0, 2)
    with pytest.raises(CheckpointError, match=r"there: was saved when 'd' was not trained \(1 parameters"):
        Run(FACTORIES["AdamW"], CUTS[0]).load(*part.saved())
    parted = Run(FACTORIES["AdamW"], CUTS[0])
    parted.train(0, 2)
    with pytest.raises(CheckpointError, match="the group of 'a' was two with different settings then"):
        Run(lambda named: torch.optim.AdamW([p for _, p in named]), CUTS[0]).load(*parted.saved())
    with pytest.raises(CheckpointError, match="makes Adam for some stages and SGD for others"):
        described([("SGD", {}), ("", {}), ("Adam", {})])


def test_before_the_first_step_and_without_parameters_there_is_little_to_keep() -> None:
    run = Run(FACTORIES["SequentialLR"], [["a", "b", "c", "d"], []])
    disk, told = run.saved()
    assert (disk.names, [u.kind for u in run.updaters]) == ([], ["SGD", ""])
    other = Run(FACTORIES["SequentialLR"], [[], *CUTS[2]])
    other.load(disk, told, 0)
    for each in (run, other):
        each.train(0, 6)
    assert all(torch.equal(run.data[n], other.data[n]) for n in NAMES)


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    with pytest.raises(MpipipeError, match="makes a ReduceLROnPlateau, which needs a metric"):
        Run(scheduled(s.ReduceLROnPlateau), CUTS[0])


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_built_in_optimizer_takes_up_its_own_state_alone(kind: Literal["adamw", "sgd"]) -> None:
    def updater(momentum: float = 0.9, kind: Literal["adamw", "sgd"] = kind) -> FlatUpdater:
        shapes = {n: torch.Size(shape) for n, shape in NAMES.items()}
        data = Flat.like(shapes, torch.float32)
        group = ParamGroup(True, data, data.sibling())
        return FlatUpdater([group], OptimizerSettings(kind=kind, momentum=momentum))

    one = updater()
    for view in one.state().values():
        view.normal_()
    disk, told = Disk(one.state()), described([(one.kind, one.numbers())])
    assert told == {"kind": kind, "numbers": {}}
    two = updater()
    two.load(disk, told)
    assert all(torch.equal(t, disk.tensors[n]) for n, t in two.state().items())
    with pytest.raises(CheckpointError, match=f"with the optimizer '{kind}', this run has"):
        updater(kind="sgd" if kind == "adamw" else "adamw").load(disk, told)
    del disk.tensors[next(name for name in disk.names if name.startswith("c/"))]
    with pytest.raises(CheckpointError, match="1 missing on disk: c/"):
        updater().load(disk, told)
    if kind == "sgd":
        with pytest.raises(CheckpointError, match="3 unknown to it: a/momentum_buffer, b/momentum_buffer"):
            updater(momentum=0.0).load(disk, told)
