"""One copy of each weight in the dtype of the products, for all micro-batches of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import Case, captured, differences, even_cuts, full_but, plan_of, train_local, warm
from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.group_costs import group_costs
from mpipipe.graph.pieces import pieces
from mpipipe.graph.profile import Live, Profiler
from mpipipe.graph.variants import Variants
from mpipipe.graph.work import Tallier
from mpipipe.ops.linear import Casts, casts_of
from mpipipe.planner import stage_costs
from mpipipe.runtime import weights as of_weights
from mpipipe.runtime.setting import set_threads
from mpipipe.runtime.stage import Stage
from mpipipe.runtime.trainer import Trainer
from mpipipe.runtime.transport import Form
from mpipipe.runtime.weights import StageWeights
from mpipipe.values import RECOMPUTE, Cluster, Costs, Device, Link, Recompute

CASE = Case("gpt, untied", bits="fast", precision="bf16", evaluate=True)
BLOCKS = replace(CASE, batch=16, micro_batches=8, blocks=4)
EAGER = Case("gpt", bits="fast", precision="bf16", tied="eager", batch=7)
FAST = [
    (CASE, "1f1b", 2, ("none",)),
    (CASE, "zb-v", 2, ("none",)),
    (BLOCKS, "zb-h1", 2, ("selective", "full")),
]
ALL = [
    (case, schedule, ranks, modes)
    for case in (CASE, BLOCKS, EAGER, Case("thrice", bits="fast", precision="bf16", optimizer="sgd"))
    for schedule, ranks in [("1f1b", 1), ("gpipe", 3), ("zb-h2", 2), ("v-half", 2), ("interleaved", 2)]
    for modes in [("none",), ("selective", "full")]
]


@pytest.mark.parametrize(("case", "schedule", "ranks", "modes"), full_but(FAST, [*FAST, *ALL]), ids=str)
@pytest.mark.slow
def test_the_bits_are_those_of_a_copy_for_each_micro_batch(
    case: Case, schedule: str, ranks: int, modes: tuple[Recompute, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = train_local(case, ranks, schedule, window=16, recompute=modes)
    monkeypatch.setattr(of_weights, "share_casts", lambda _: Casts())  # which no product knows
    assert differences(train_local(case, 1), got) == []


def shared(trainer: Trainer) -> list[Tensor]:
    weights = [stage.weights for stage in trainer.interpreter.stages.values()]
    return [cast for of in weights for leaf in of.leaves.values() for cast in casts_of(leaf)]


def trainer(comm: Communicator) -> Trainer:
    set_threads(1)
    return Trainer(comm, CASE.variants, plan_of(CASE, "1f1b", ()), CASE.settings, CASE.dataset)


@pytest.mark.slow
def test_a_step_shares_copies_and_leaves_none_nor_does_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    warm(CASE)
    there, backward = list[int](), Stage.backward

    def noted(self: Stage, micro: int, grads: list[Tensor]) -> list[Tensor]:
        there.append(sum(len(casts_of(leaf)) for leaf in self.weights.leaves.values()))
        return backward(self, micro, grads)

    monkeypatch.setattr(Stage, "backward", noted)

    def body(comm: Communicator) -> None:
        one = trainer(comm)
        one.step(0)
        assert shared(one) == []
        one.evaluate(2, CASE.batch)
        assert shared(one) == []

    run_local(1, body)
    assert len(there) == CASE.micro_batches
    assert min(there) == max(there) > 0


@pytest.mark.slow
def test_a_copy_that_a_broken_step_has_left_is_not_used() -> None:
    """Nor where weights were written meanwhile, as where a state is loaded."""
    warm(CASE)

    def body(comm: Communicator) -> list[dict[str, Tensor]]:
        found = []
        for broken in (False, True):
            one = trainer(comm)
            for stage in one.interpreter.stages.values() if broken else ():
                for casts, leaf in zip(stage.weights._casts, stage.weights.leaves.values(), strict=True):
                    casts.of(leaf, torch.bfloat16).fill_(3.0)
            assert bool(shared(one)) == broken
            one.step(0)
            found.append({name: t.clone() for name, t in one.state_dict().items()})
        return found

    ((whole, again),) = run_local(1, body)
    assert all(torch.equal(t, again[name]) for name, t in whole.items())


# -- memory ------------------------------------------------------------------------------------


def variants() -> Variants:
    return captured("gpt, no dropout", 2, "bf16").lowered(Lowering("fast"))


def held(recompute: Recompute, in_two: bool) -> tuple[list[int], int]:
    """Of the second of three stages, bytes of tensors after the forward of each micro-batch, with what it has
    received; of its casts."""
    of, found = variants(), list[int]()
    cuts = even_cuts(of.graph.groups, 3)
    code = of.training_code(of.first, cuts, 1, in_two, recompute == "selective")
    owner = of.stage_of_param(cuts)
    weights = StageWeights(of.source, of.graph, 1, owner, code.leaves, of.trained, "per_use")
    stage = Stage(weights, "bf16", recompute)
    with Live() as live:
        for micro in range(3):
            stage.forward(code, micro, [Form.of(p).empty().zero_() for p in code.received], {}, 0, True)
            found.append(live.nbytes)
    return found, sum(cast.nbytes for leaf in weights.leaves.values() for cast in casts_of(leaf))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("in_two", [False, True])
@pytest.mark.slow
def test_micro_batches_in_flight_hold_one_copy_as_planned(recompute: Recompute, in_two: bool) -> None:
    (one, two, three), casts = held(recompute, in_two)
    assert two - one == three - two
    assert one == casts + (two - one)
    of = variants()
    parts, names = pieces(of.primary, of.graph, of.uses), of.graph.groups
    profiler = Profiler(of.primary, "bf16", lambda: 0.0)
    groups = group_costs(of.primary, parts, {p.key: profiler.sample(p) for p in parts})
    machine = Cluster((Device("cpu", 1.0, 1 << 40, 1),) * 3, (0, 0, 0), {"node": Link(0.0, 1e9)})
    costs = Costs(groups, machine, of.graph.ties, 0.0, 0.0, "measured", 0.0)
    cuts = [names.index(cut) for cut in even_cuts(names, 3)]
    stage = stage_costs(costs, cuts, (recompute,) * 3)[1]
    assert stage.fixed_bytes == casts > 0, "parameters count nothing here"
    if recompute == "none":
        assert two - one == stage.stash_bytes


@pytest.mark.slow
def test_what_is_counted_is_what_is_there() -> None:
    of = variants()
    counted, real = Tallier(of.primary, "bf16"), Profiler(of.primary, "bf16", lambda: 0.0)
    for piece in {p.key: p for p in pieces(of.primary, of.graph, of.uses)}.values():
        tally, sample = counted.tally(piece), real.sample(piece)
        assert tally.cast_bytes == sample.cast_bytes
        assert tally.saved_bytes == sample.saved_bytes
        assert tally.waiting == sample.waiting
