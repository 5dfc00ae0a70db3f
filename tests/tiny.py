"""Tiny models trained for a few steps, with all that must not depend on the layout as plain values.

    Case -> plan cut by hand -> Trainer on a carrier -> result {losses, norms, validation, weights}

Everything is so small that any layout of any case takes a fraction of a second; nothing is timed, so
the cuts, and with them the tests, are the same on every machine.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.export
from torch import Tensor, nn
from torch.nn import functional

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.data.base import Dataset
from mpipipe.data.synthetic import SyntheticTokens, SyntheticVectors
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import GPT, MLP, cross_entropy
from mpipipe.planner.copies import Copies, pipeline_copies, ranks_in_each
from mpipipe.planner.schedules import PLANNED, build, stages_on, to_text, zb_planned
from mpipipe.runtime.feed import split_evenly
from mpipipe.runtime.optimizer import OptimizerSettings
from mpipipe.runtime.setting import set_threads
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.digests import tensor_digest
from mpipipe.values import Layout, Numerics, Plan, Prediction, Recompute, StageCost

SEED, STEPS, SIDE, CLASSES = 7, 3, 8, 4
Result = dict[str, Any]


# -- models: vectors of 64 features, seen as 8 x 8 images where a convolution wants one ---------------


class ConvNorm(nn.Module):
    """BatchNorm with and without weights, one with another momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(6, momentum=0.3, affine=False)])
        self.fc, self.norm = nn.Linear(6 * SIDE * SIDE, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (B, 64) -> (B, classes)
        x = x.view(-1, 1, SIDE, SIDE)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(torch.relu(self.norm(self.fc(x.flatten(1)))))


class NarrowConvNorm(ConvNorm):
    """All in bf16: statistics of the norm without weights are wider than its buffers, as torch makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


class SkipNet(nn.Module):
    """Like a U-Net (Ronneberger et al. 2015): what goes down is seen again on the way up, and the input
    once more at the end, so every cut but the first and the last has a skip to relay."""

    def __init__(self) -> None:
        super().__init__()
        self.down_1, self.down_2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=1)
        self.up_2, self.up_1 = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.head = nn.Linear(2 * SIDE * SIDE, CLASSES)
        self.skip = nn.Linear(SIDE * SIDE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (B, 64) -> (B, classes)
        a = torch.relu(self.down_1(x.view(-1, 1, SIDE, SIDE)))
        b = torch.relu(self.down_2(functional.max_pool2d(a, 2)))
        y = torch.relu(self.bottom(functional.max_pool2d(b, 2)))
        y = torch.relu(self.up_2(torch.cat([functional.interpolate(y, scale_factor=2.0), b], 1)))
        y = torch.relu(self.up_1(torch.cat([functional.interpolate(y, scale_factor=2.0), a], 1)))
        return self.head(y.flatten(1)) + self.skip(x)


class Thrice(nn.Module):
    """One matrix used three times with other layers between, a layer that is frozen and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.shrink, self.shared = nn.Linear(SIDE * SIDE, 16), nn.Linear(16, 16)
        self.between = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(2))
        self.frozen, self.head = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (B, 64) -> (B, classes)
        x = torch.tanh(self.shared(self.shrink(x)))
        for layer in self.between:
            x = torch.tanh(self.shared(layer(x)))
        return self.head(self.frozen(x))


class Traps(nn.Module):
    """What a cut must not part, tuples and what is written later, and what it must carry over: strides,
    and a batch that forward itself has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIDE * SIDE, 24), nn.Linear(24, 24)
        self.act, self.norm = nn.ReLU(inplace=True), nn.LayerNorm(24)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (B, 64) -> (B, classes)
        x[:, :32].mul_(0.5)
        y = self.act(self.first(torch.sigmoid(x)))
        a, b, c = y.split(8, 1)
        largest, where = torch.max(self.second(y), 1, keepdim=True)
        y = torch.cat([c, a * largest.expand(-1, 8), b + where], 1)
        z = self.second(y) * 2.0
        flat, w = z.flatten(), self.norm(self.second(z + 1.0))
        flat.mul_(0.5)  # so z is another one from here on
        w[:, 4:] += torch.tanh(z)[:, 4:]
        y = self.act(flat.view_as(z) + y)
        y = (w * y).view(-1, 4, 6).transpose(1, 2)  # dense, not contiguous
        return self.head(self.mix(y).flatten(1) + x[:, 20:44])


class Parts(nn.Module):
    """What waits for a weight's gradient is a part of something larger: of an output that is written in
    place, and of the gradient of a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIDE, 16), nn.Linear(16, 16)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 8)
        self.head = nn.Linear(40, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (B, 64) -> (B, classes)
        y = self.last(torch.tanh(self.first(x.view(-1, SIDE, SIDE).transpose(0, 1))))
        y = torch.relu_(y)[-1]
        one, two = self.one(torch.tanh(y)), self.two(torch.sigmoid(y))
        return self.head(torch.cat([one, torch.relu(y), two], 1))


def gpt(tied: bool, dropout: float) -> Callable[[], nn.Module]:
    return partial(GPT, 32, 2, 32, 2, 16, tied, dropout)  # vocabulary, layers, width, heads, context


TOKENS = SyntheticTokens(32, 16, SEED)
MANY = 1024  # entries: a table of which a step reads a few
VECTORS = SyntheticVectors(SIDE * SIDE, CLASSES, 64, SEED)
MODELS: dict[str, tuple[Callable[[], nn.Module], Dataset]] = {
    "gpt": (gpt(tied=True, dropout=0.1), TOKENS),
    "gpt, untied": (gpt(tied=False, dropout=0.1), TOKENS),
    "gpt, large table": (partial(GPT, MANY, 2, 32, 2, 16, True, 0.1), SyntheticTokens(MANY, 16, SEED)),
    "gpt, no dropout": (gpt(tied=True, dropout=0.0), TOKENS),
    "gpt, untied, no dropout": (gpt(tied=False, dropout=0.0), TOKENS),
    "mlp": (partial(MLP, SIDE * SIDE, (16, 16, 16), CLASSES, 0.1), VECTORS),
    "conv and norm": (ConvNorm, VECTORS),
    "conv and norm, in bf16": (NarrowConvNorm, VECTORS),
    "skips": (SkipNet, VECTORS),
    "thrice": (Thrice, VECTORS),
    "traps": (Traps, VECTORS),
    "parts": (Parts, VECTORS),
}
SHAPES = ["gpt", "mlp", "conv and norm", "skips", "thrice", "traps"]  # those that differ in their graph


# -- what is trained, and how ------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Everything that decides bits; a layout is chosen beside it."""

    model: str = "gpt"
    tied: str = "per_use"
    precision: str = "fp32"
    batch: int = 8
    micro_batches: int = 4
    blocks: int = 1
    optimizer: str = "adamw"
    clip: float | None = 0.05  # below every gradient norm of these models
    evaluate: bool = False  # after each step, on a batch that does not divide either
    steps: int = STEPS
    bits: str = "torch"
    reduce: str = "exact"

    def __str__(self) -> str:
        plain = Case(self.model)
        changed = [f"{k}={v}" for k, v in vars(self).items() if k != "model" and v != getattr(plain, k)]
        return " ".join([self.model, *changed])

    @property
    def rows(self) -> int:
        return -(-self.batch // self.micro_batches)

    @property
    def dataset(self) -> Dataset:
        return MODELS[self.model][1]

    @property
    def variants(self) -> Variants:
        """Captured once per process and kind, and shared by the ranks that are threads."""
        return captured(self.model, self.rows, self.precision, self.bits)

    @property
    def numerics(self) -> Numerics:
        return Numerics(
            batch=self.batch, micro_batch=self.rows, micro_batches=self.micro_batches, blocks=self.blocks,
            threads=1, bits=self.bits, gemm="mkl", precision=self.precision, tied=self.tied, op_table={},
            torch=torch.__version__, instruction_set="", seed=SEED, reduce=self.reduce,
        )  # fmt: skip

    @property
    def settings(self) -> OptimizerSettings:
        lr = 1e-2 if self.optimizer == "adamw" else 0.1
        return OptimizerSettings(
            kind=self.optimizer, lr=lr, betas=(0.9, 0.95), eps=1e-8, momentum=0.9, weight_decay=0.1,
            warmup=2, min_lr_ratio=0.1, steps=self.steps + 2, clip=self.clip, bits=self.bits,
        )  # fmt: skip


def capture(model: str, rows: int = 2, precision: str = "fp32", bits: str = "torch") -> Variants:
    factory, dataset = MODELS[model]
    return Variants(
        ModelSource(factory, SEED), cross_entropy, dataset.specs, rows, precision, lowering=Lowering(bits)
    )


captured = cache(capture)


def full_but(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or tuples of several, each once: some in the fast suite, the others in the full
    one."""
    return [
        v if v in fast else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.full)
        for v in dict.fromkeys(values)
    ]


def even_cuts(groups: Sequence[str], n_stages: int) -> tuple[str, ...]:
    return tuple(groups[i * len(groups) // n_stages] for i in range(1, n_stages))


def placement(schedule: str, n_ranks: int) -> tuple[int, ...]:
    """The rank of each stage."""
    return build(schedule, stages_on(schedule, n_ranks), n_ranks, n_ranks).rank_of_stage


def planned(case: Case, schedule: str, order: Sequence[int], copies: Copies) -> tuple[str, ...]:
    """Where the order follows from costs, one from unlike ones: with backwards in one on the first stage.
    Uses of parameters that meet in each micro-batch: as if each stage had some of all before it."""
    n_copies = pipeline_copies(copies)
    if schedule not in PLANNED or case.micro_batches % n_copies:
        return ()
    place = {rank: i for i, rank in enumerate(dict.fromkeys(order))}
    stages = [StageCost(2.0 + s % 2, 3.0, 2.0, 0.0, 0, 1, 0, 0, 0, split_s=0.5) for s in range(len(order))]
    room, pairs = [len(order) + 1] * len(place), itertools.combinations(range(len(order)), 2)
    made = zb_planned(
        stages, case.micro_batches // n_copies, room, rank_of_stage=[place[rank] for rank in order],
        tied=[(user, owner, 0.0) for owner, user in pairs if case.tied == "eager"],
    )  # fmt: skip
    return tuple(to_text(made).splitlines())


def plan_of(
    case: Case, schedule: str, cuts: Sequence[str], window: int = 3, order: Sequence[int] = (),
    copies: Copies = 1, recompute: Sequence[Recompute] = (), nodes: tuple[int, ...] = (),
) -> Plan:  # fmt: skip
    """order: the rank of each stage in copy 0, its number if not given; further copies on further ranks.
    copies: of all stages, or of those of each rank, and then on ranks that follow each other. recompute: by
    stage, again from the first one on where they are fewer."""
    order = tuple(order or range(len(cuts) + 1))
    if isinstance(copies, int):
        ranks = tuple(tuple(rank + c * len({*order}) for c in range(copies)) for rank in order)
    else:
        edges = [*itertools.pairwise((0, *itertools.accumulate(copies)))]
        ranks = tuple(tuple(range(*edges[rank])) for rank in order)
    modes = tuple(itertools.islice(itertools.cycle(recompute), len(ranks)))
    layout = Layout(
        tuple(cuts),
        ranks,
        schedule,
        window,
        recompute=modes,
        nodes=nodes,
        actions=planned(case, schedule, [of[0] for of in ranks], copies),
    )
    return Plan(case.numerics, layout, Prediction(0.0, 0.0, 0.0, (), 0.0, 0.0))


def train(
    comm: Communicator, case: Case, schedule: str = "1f1b", cuts: Sequence[str] | None = None,
    variants: Variants | None = None, window: int = 3, order: Sequence[int] = (), copies: Copies = 1,
    recompute: Sequence[Recompute] = (), nodes: tuple[int, ...] = (),
) -> Result:  # fmt: skip
    """A few steps; the same result on every rank. `cuts` are even ones if not given, for as many stages as
    `order` has, or the schedule on the ranks of a copy. Collective."""
    set_threads(case.numerics.threads)
    variants = variants or case.variants
    order = order or placement(schedule, ranks_in_each(copies, comm.size))
    if cuts is None:
        cuts = even_cuts(variants.graph.groups, len(order))
    plan = plan_of(case, schedule, cuts, window, order, copies, recompute, nodes)
    trainer = Trainer(comm, variants, plan, case.settings, case.dataset)
    outcomes, validation = [], []
    for step in range(case.steps):
        outcomes.append(trainer.step(step))
        if case.evaluate:
            validation.append(trainer.evaluate(2, case.batch - 1)["loss"].hex())
    mine = {name: tensor_digest(name, t) for name, t in trainer.state_dict().items()}
    held = [set(part.items()) for part in comm.allgather_object(mine)]
    assert len(set().union(*held)) == len({name for part in held for name, _ in part}), "copies are equal"
    result = {
        "losses": [(o.loss / o.weight).hex() for o in outcomes],
        "norms": [o.norm.hex() for o in outcomes],
        "validation": validation or None,
        "weights": {k: v for part in comm.allgather_object(mine) for k, v in part.items()},
    }
    names = set(variants.source.persistent)
    assert set(result["weights"]) == names, "every tensor has an owner"
    assert all(r == result for r in comm.allgather_object(result)), "all ranks know the same"
    if case.clip is not None:
        assert min(o.norm for o in outcomes) > case.clip, "clipping was to be active"
    return result


def tensors_after(case: Case) -> dict[str, Tensor]:
    """Every parameter and buffer after a run on one rank."""
    warm(case)

    def body(comm: Communicator) -> dict[str, Tensor]:
        set_threads(1)
        trainer = Trainer(comm, case.variants, plan_of(case, "1f1b", ()), case.settings, case.dataset)
        for step in range(case.steps):
            trainer.step(step)
        return trainer.state_dict()

    return run_local(1, body)[0]


def train_local(case: Case, n_stages: int, schedule: str = "1f1b", **how: Any) -> Result:
    """`train` with threads as ranks."""
    warm(case)
    return run_local(n_stages, lambda comm: train(comm, case, schedule, **how))[0]


def warm(case: Case) -> None:
    """Captures what a run needs, before threads share it."""
    variants = case.variants
    assert variants.graph.groups
    assert variants.uses
    sizes = {stop - start for start, stop in split_evenly(case.batch, case.micro_batches)}
    for rows in sizes:
        variants.weight("train", variants.specs(rows))
    if case.evaluate:
        for rows in {case.rows, (case.batch - 1) % case.rows or case.rows}:
            variants.weight("eval", variants.specs(rows))


def differences(expected: Result, got: Result) -> list[str]:
    """What is not the same to the last bit, by name; empty where all is."""
    found = [f"{k}: {v} != {got[k]}" for k, v in expected.items() if k != "weights" and v != got[k]]
    names = {**expected["weights"], **got["weights"]}
    return found + [n for n in names if expected["weights"].get(n) != got["weights"].get(n)]


BITS = [  # what the promise of equal bits is tested on
    Case("gpt"),
    Case("gpt", tied="eager"),
    Case("gpt, untied"),
    Case("gpt, large table"),
    Case("gpt", precision="bf16"),
    Case("gpt", precision="bf16", tied="eager"),
    Case("gpt", batch=7, evaluate=True),  # ragged: micro-batches of 2, 2, 2 and 1
    Case("gpt", batch=4, micro_batches=2),  # fewer micro-batches than stages
    Case("gpt", tied="eager", batch=2, micro_batches=1),
    Case("gpt", batch=16, micro_batches=8, blocks=4),
    Case("gpt", batch=16, micro_batches=8, blocks=4, tied="eager"),
    Case("gpt, untied", batch=12, micro_batches=6, blocks=3),
    Case("mlp", optimizer="sgd"),
    Case("conv and norm", evaluate=True),
    Case("conv and norm", batch=10, optimizer="sgd"),
    Case("skips", evaluate=True),
    Case("thrice"),
    Case("thrice", precision="bf16"),
    Case("traps", precision="bf16", optimizer="sgd"),
    Case("thrice", tied="eager", batch=11),
    Case("gpt", bits="fast", batch=7, evaluate=True),
    Case("gpt, no dropout", bits="fast", precision="bf16", tied="eager"),
    Case("gpt, no dropout", bits="fast", batch=16, micro_batches=8, blocks=4),
    Case("thrice", bits="fast", batch=11),
]


if __name__ == "__main__":  # a look at the numbers: python tests/tiny.py [number of stages]
    for name in MODELS:
        print(name, train_local(Case(name), int(sys.argv[1]) if sys.argv[1:] else 1)["losses"])
