"""What outlives a rank: mirrors, and the way back from them, over threads as ranks, one of which is lost.

Net has statistics, dropout and a tied matrix. Whatever is lost when, the run ends with the bits of one that
nothing disturbed, and does `EVERY` steps again at most. Real kills: tests/launch/test_survival.py.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpipipe import Pipeline
from mpipipe.cluster.comm import Communicator, RankLost
from mpipipe.cluster.local import Killed, LocalCommunicator, run_local
from mpipipe.errors import CheckpointError, LaunchError, PlanError, RecoveryError
from mpipipe.planner import speeds
from mpipipe.planner.copies import Copies
from mpipipe.planner.prediction import expect_plan
from mpipipe.planner.programs import cut_indices
from mpipipe.planner.speeds import busy_s
from mpipipe.runtime import costing
from mpipipe.runtime.interpreter import Interpreter
from mpipipe.state.checkpoint import tensor_digest
from mpipipe.state.mirrors import Mirrors, Received, apart, fetch, held, newest_whole
from mpipipe.state.resume import read_state, step_folder
from mpipipe.state.verify import newest_sound
from mpipipe.survival import LOOKS, Survival, needed
from mpipipe.values import COMPUTE, Timeline

EVERY, STEPS = 3, 8
Kill = tuple[int, str, int]  # rank, by its first number; where; the step that is being made, or was


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.a, self.drop, self.b = nn.Linear(8, 8, bias=False), nn.Dropout(0.2), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:  # (B, 8) -> (B, 4)
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.tanh(self.b(self.drop(torch.tanh(self.a(x))))))


class Samples:
    def __init__(self) -> None:
        self.x = torch.randn(37, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.x[i, :4].argmax()


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return functional.cross_entropy(outputs, batch["labels"], reduction="sum"), outputs.shape[0]


def adam(named: Any) -> tuple[Any, Any]:
    """State that torch makes at the first step, and a scheduler with numbers of its own."""
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


pytestmark = pytest.mark.usefixtures("made_up_times", "captured_once")


PLACES: dict[str, tuple[type, str, bool, Callable[..., int]]] = {  # class, method, after it, the step
    "backward": (Interpreter, "_backward", False, lambda self, _: self.job.step + 1),
    "update": (Interpreter, "_step", True, lambda self, _: self.job.step + 1),
    "transfer": (Mirrors, "take", True, lambda self, step, *_: step),
    "received": (Mirrors, "commit", False, lambda self: self._pending[1] if self._pending else 0),
    "recovery": (Survival, "fetch", False, lambda self, comm, found, *_: found.key.step),
    "wait": (LocalCommunicator, "recv_object", False, lambda self, _: 0),
}


def arm(monkeypatch: pytest.MonkeyPatch, kills: tuple[Kill, ...]) -> None:
    left = set(kills)

    def armed(where: str) -> None:
        owner, name, after, step_of = PLACES[where]
        call = getattr(owner, name)

        def deadly(self: Any, *args: Any) -> Any:
            step = step_of(self, *args)
            result = call(self, *args) if after else None
            here = self if where == "wait" else getattr(self, "comm", None) or getattr(self, "_comm", None)
            comm = args[0] if where == "recovery" else here
            kill = comm.members[comm.rank], where, step
            if kill in left:
                left.remove(kill)
                raise Killed
            return result if after else call(self, *args)

        monkeypatch.setattr(owner, name, deadly)

    for where in {where for _, where, _ in kills}:
        armed(where)


def pipeline(
    comm: Communicator, blocks: int = 1, replicas: Copies = 1, model: type[Net] = Net, optimizer: Any = adam,
    **settings: Any,
) -> Pipeline:  # fmt: skip
    return Pipeline(
        model, loss, Samples(), optimizer, batch=8, micro_batches=4, blocks=blocks, replicas=replicas,
        comm=comm, cost_cache=False, schedule="1f1b", gemm="mkl",
        **{"say": lambda _: None, "recover": "mpi", "mirror_every": EVERY, **settings},
    )  # fmt: skip


def trained(
    ranks: int, blocks: int = 1, replicas: Copies = 1, spares: int = 0
) -> tuple[dict[str, str], list[list[int]]]:
    """(losses by step and digests of the weights, for each rank that is left the steps in the order made)."""

    def body(comm: Communicator) -> tuple[dict[str, str], list[int]]:
        pipe = pipeline(comm, blocks, replicas, spares=spares)
        losses, steps, layout = dict[str, str](), list[int](), pipe.plan.layout

        def note(_: Pipeline, step: int, values: dict[str, float]) -> None:
            losses[f"loss {step}"] = values["loss"].hex()
            steps.append(step)

        pipe.fit(STEPS, [note])
        mine = {name: tensor_digest(name, t) for name, t in pipe.state_dict(full=False).items()}
        if pipe.waits:
            assert not mine
            return {}, steps
        if pipe.size == layout.n_ranks:
            assert pipe.plan.layout == layout, "as long as there are spares, the cuts stay"
        found = {k: v for part in pipe.comm.allgather_object(mine) for k, v in part.items()}
        return {name: losses[name] for name in sorted(losses)} | found, steps

    found = run_local(ranks, body)
    made = [(result, steps) for result, steps in found if result]
    first = max((result for result, _ in made), key=len)
    for result, _ in made:  # one that took over has no more than the later losses
        assert result.items() <= first.items()
        assert result.keys() >= {name for name in first if not name.startswith("loss ")}
    return first, [steps for _, steps in made]


@cache
def undisturbed() -> dict[str, str]:
    return trained(1)[0]


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (2, ((0, "update", 4),)),
        (3, ((1, "backward", 5), (2, "recovery", 3))),  # it has the mirror that is fetched: from the start
        (3, ((2, "transfer", 6),)),  # from step 3
        pytest.param(3, ((1, "received", 6),), marks=pytest.mark.full),
        pytest.param(4, ((1, "update", 5), (3, "update", 5)), marks=pytest.mark.full),
        pytest.param(4, ((3, "update", 2), (0, "backward", 5), (1, "update", 7)), marks=pytest.mark.full),
    ],
)
@pytest.mark.slow
def test_a_lost_rank_changes_no_bits(
    ranks: int, kills: tuple[Kill, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed()
    arm(monkeypatch, kills)
    found, steps = trained(ranks)
    assert found == expected
    assert len(steps) == ranks - len(kills)
    again = [a - b + 1 for made in steps for a, b in itertools.pairwise(made)]
    assert max(again) <= EVERY or any(where == "recovery" for _, where, _ in kills)


@pytest.mark.slow
def test_ranks_that_are_too_few_say_that_another_start_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> None:
        raise PlanError("rank 0 needs 2 GiB and has 1 GiB")

    arm(monkeypatch, ((1, "update", 4),))
    monkeypatch.setattr(Survival, "_plan_anew", too_large)
    with pytest.raises(
        RecoveryError, match=r"^the run does not fit the ranks that are left: rank 0 needs 2 GiB"
    ):
        trained(3)


@pytest.mark.parametrize(
    ("ranks", "spares", "kills", "left"),
    [
        (3, 1, ((1, "update", 5),), 2),
        (3, 1, ((2, "wait", 0), (0, "update", 5)), 1),  # the spare first, which nobody misses
        (4, 1, ((1, "backward", 5), (2, "update", 7)), 2),  # with a spare, then without
        pytest.param(3, 1, (), 2, marks=pytest.mark.full),
        pytest.param(3, 1, ((0, "transfer", 6), (2, "update", 8)), 1, marks=pytest.mark.full),
        pytest.param(5, 1, ((1, "update", 5), (3, "update", 5)), 3, marks=pytest.mark.full),  # two at once
        pytest.param(4, 2, ((1, "update", 5), (2, "recovery", 3)), 2, marks=pytest.mark.full),
        pytest.param(4, 2, ((0, "update", 5), (1, "update", 5)), 2, marks=pytest.mark.full),  # spares alone
    ],
)
@pytest.mark.slow
def test_a_spare_takes_over_with_the_same_cuts_and_bits(
    ranks: int, spares: int, kills: tuple[Kill, ...], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed()
    arm(monkeypatch, kills)
    found, steps = trained(ranks, spares=spares)
    assert {name: found[name] for name in expected if name in found} == found
    assert found.keys() >= {name for name in expected if not name.startswith("loss ")}
    assert len(steps) == left
    again = [a - b + 1 for made in steps for a, b in itertools.pairwise(made)]
    assert max(again, default=0) <= EVERY


@pytest.mark.slow
def test_spares_make_every_call_and_get_what_it_comes_to(tmp_path: Path) -> None:
    def body(comm: Communicator) -> list[Any]:
        pipe = pipeline(comm, spares=1, val=[*Samples()])
        found: list[Any] = [pipe.step().loss]
        pipe.fit(2)
        found += [pipe.steps_done, pipe.evaluate(), pipe.predict(Samples().x[:3]).tolist()]
        found += [pipe.save(tmp_path / "saved").weights_sha256]
        with pytest.raises(CheckpointError) as error:
            pipe.save(tmp_path / "saved" / "run.json" / "within")
        return [*found, str(error.value), pipe.waits, pipe.rank]

    *workers, spare = run_local(3, body)
    assert [found[:-2] for found in workers] == [spare[:-2]] * 2
    assert [found[-2:] for found in (*workers, spare)] == [[False, 0], [False, 1], [True, 2]]


@pytest.mark.slow
def test_a_spare_that_is_lost_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    arm(monkeypatch, ((3, "wait", 0),))

    def body(comm: Communicator) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pipe = pipeline(comm, spares=2, say=said.append)
        while pipe.rank == 0 and not comm.gone():
            pass
        pipe.fit(3)
        return pipe.lost_spares(), pipe.world.lost

    assert run_local(4, body) == [((3,), ())] * 3
    assert [line for line in said if "lost" in line] == [
        "mpipipe: lost rank 3, which was a spare; 1 spare (rank 2) left"
    ]


def test_spares_that_leave_nobody_to_work_are_refused() -> None:
    def body(comm: Communicator) -> None:
        pipeline(comm, spares=2)

    with pytest.raises(LaunchError, match="none would train"):
        run_local(2, body)


@pytest.mark.slow
def test_checkpoints_of_steps_that_are_done_again_are_taken_as_they_are(tmp_path: Path) -> None:
    """The rank is lost where the others wait for the last checkpoint, at the end of `fit`."""
    kept: list[int] = []

    def die() -> None:
        raise Killed

    def body(comm: Communicator) -> str:
        def save(pipe: Pipeline, step: int, _: dict[str, float]) -> None:
            pipe.begin_save(tmp_path / str(step), then=lambda: kept.append(step), background=False)
            if step == STEPS:
                pipe.saver.finish = die if comm.rank == 1 else pipe.comm.barrier  # type: ignore[method-assign]

        pipe = pipeline(comm)
        pipe.fit(STEPS, [save])
        assert pipe.comm.size == 1
        assert pipe.saver.saved is not None
        return pipe.saver.saved.weights_sha256

    found = run_local(2, body)
    assert found == [read_state(tmp_path / str(STEPS)).weights_sha256]
    assert kept == [*range(1, STEPS + 1), *range(STEPS - 1, STEPS + 1)], "links and pruning come again"


@pytest.mark.slow
def test_a_newer_checkpoint_goes_before_the_mirrors_if_its_bits_are_right(tmp_path: Path) -> None:
    def body(comm: Communicator) -> tuple[str, dict[str, str]]:
        def save(pipe: Pipeline, step: int, _: dict[str, float]) -> None:
            if step in (EVERY + 1, EVERY + 2):
                pipe.save(step_folder(tmp_path, step))
            if step == EVERY + 2:  # what a save leaves that is cut off
                (tmp_path / "mine").mkdir(exist_ok=True)
                (tmp_path / "mine" / "rank-1.json").touch()
                pipe.saver.abandon = lambda: tmp_path / "mine"  # type: ignore[method-assign]
            if step == EVERY + 2 and comm.rank == 1:
                path = next(step_folder(tmp_path, step).glob("optimizer-*.safetensors"))
                bits = bytearray(path.read_bytes())
                bits[-2] ^= 4
                path.write_bytes(bits)
                raise Killed

        pipe = pipeline(comm)
        pipe.recovers = False
        with pytest.raises(RankLost):
            pipe.fit(STEPS, [save])
        source = pipe.recover(lambda comm, above: newest_sound(comm, tmp_path, above)[0]).source
        pipe.fit(STEPS)
        return source, {k: tensor_digest(k, t) for k, t in pipe.state_dict(full=False).items()}

    (source, weights), *others = run_local(2, body)
    assert others == []
    assert source == str(step_folder(tmp_path, EVERY + 1))
    assert not (tmp_path / "mine").exists()
    assert weights == {k: v for k, v in undisturbed().items() if not k.startswith("loss ")}


@pytest.mark.full
def test_replicas_are_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = trained(1, blocks=4)
    arm(monkeypatch, ((3, "update", 5),))
    assert trained(4, blocks=4, replicas=2)[0] == expected
    arm(monkeypatch, ((3, "update", 5),))
    assert trained(4, blocks=4, replicas=(2, 1, 1))[0] == expected


# -- ranks that are there, but slow --------------------------------------------------------------------


on_some_ranks = pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"recover": "restart"}),
        (3, {}),
        pytest.param(4, {"recover": "restart", "blocks": 4, "replicas": 2}, marks=pytest.mark.full),
    ],
)


def groups_of(pipe: Pipeline) -> int:
    """How many this rank computes."""
    return sum(sizes_of(pipe)[stage] for stage in pipe.plan.layout.stages_on(pipe.rank))


def sizes_of(pipe: Pipeline) -> list[int]:
    """Groups of each stage."""
    names = pipe.variants.graph.groups
    edges = [0, *cut_indices(pipe.plan.layout, names), len(names)]
    return [end - start for start, end in itertools.pairwise(edges)]


@on_some_ranks
@pytest.mark.slow
def test_a_plan_around_a_slow_rank_changes_no_bits(ranks: int, settings: dict[str, Any]) -> None:
    """It has less to do from then on."""

    def body(comm: Communicator) -> tuple[dict[str, str], list[int], str]:
        pipe = pipeline(comm, **settings)
        pipe.fit(EVERY + 1)
        groups = [groups_of(pipe)]
        taken, said = pipe.plan_around({1: 6.0})
        assert taken, said
        assert pipe.steps_done == EVERY + 1
        assert not pipe.plan_around({1: 1.0})[0]
        pipe.fit(STEPS)
        mine = {name: tensor_digest(name, t) for name, t in pipe.state_dict(full=False).items()}
        groups.append(groups_of(pipe))
        return {k: v for part in comm.allgather_object(mine) for k, v in part.items()}, groups, said

    expected = undisturbed() if "blocks" not in settings else trained(1, blocks=4)[0]
    found = run_local(ranks, body)
    for weights, _, said in found:
        assert weights == {k: v for k, v in expected.items() if not k.startswith("loss ")}
        assert said.startswith("planned anew: a step is predicted to take ")
    before, after = found[1][1]
    assert after < before


@pytest.fixture
def own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made as if each rank had a core: on shared ones, what one gains others lose."""
    clock_of = costing.clock_of
    monkeypatch.setattr(costing, "clock_of", lambda *given: (clock_of(*given)[0], 1.0))


def slowed(timeline: Timeline, stage: int, factor: float) -> Timeline:
    """What that stage computes takes so many times as long."""
    times = []
    for codes, of_rank in zip(timeline.program.codes, timeline.times, strict=True):
        seconds = of_rank[:, 1] - of_rank[:, 0]
        seconds[(codes[:, 1] == stage) & np.isin(codes[:, 0], sorted(COMPUTE))] *= factor
        times.append(np.stack([of_rank[:, 0], of_rank[:, 0] + seconds], axis=1))
    return replace(timeline, times=tuple(times))


@on_some_ranks
@pytest.mark.slow
@pytest.mark.usefixtures("own_cores")
def test_a_plan_by_what_the_steps_took_changes_no_bits(ranks: int, settings: dict[str, Any]) -> None:
    """A stage that took longer has less to do from then on, if all of the steps say so."""

    def body(comm: Communicator) -> tuple[dict[str, str], list[int], bool, list[str]]:
        pipe = pipeline(comm, **settings)
        pipe.fit(EVERY + 1)
        plan, costs = pipe.plan, pipe.costs
        sizes = sizes_of(pipe)
        stage = sizes.index(max(sizes))  # one of a single group could give nothing away
        slow, other = (slowed(pipe.predicted, s, 20.0) for s in (stage, 1 - stage))
        groups, said = [groups_of(pipe)], list[str]()
        for typical, left in (([slow, slow, other], 1000), ([slow] * 3, 0)):
            taken, why = pipe.refine(typical, left)
            assert (taken, pipe.plan, pipe.costs) == (False, plan, costs)
            said.append(why)
        taken, why = pipe.refine([slow] * 3, 1000)
        assert taken, why
        assert (pipe.steps_done, pipe.plan.numerics) == (EVERY + 1, plan.numerics)
        pipe.fit(STEPS)
        mine = {name: tensor_digest(name, t) for name, t in pipe.state_dict(full=False).items()}
        groups.append(groups_of(pipe))
        had_it = comm.rank in plan.layout.ranks[stage]
        weights = {k: v for part in comm.allgather_object(mine) for k, v in part.items()}
        return weights, groups, had_it, [*said, why]

    expected = undisturbed() if "blocks" not in settings else trained(1, blocks=4)[0]
    found = run_local(ranks, body)
    for weights, (before, after), had_it, (in_part, late, why) in found:
        assert weights == {k: v for k, v in expected.items() if not k.startswith("loss ")}
        assert "whichever steps count" in in_part
        assert "too few steps are left" in late
        assert why.startswith(f"after {EVERY} steps planned anew: a step is predicted to take ")
        assert "times as long as planned, beside the others" in why
        assert after < before or not had_it


@pytest.mark.slow
@pytest.mark.usefixtures("own_cores")
def test_ranks_are_as_fast_as_was_seen_in_a_plan_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a later step is compared with speeds that are none any more, and the other rank seems slow."""
    monkeypatch.setattr(speeds, "LEAST_S", 0.0)

    def body(comm: Communicator) -> None:
        pipe = pipeline(comm)
        plan, calm, step = pipe.plan, pipe.costs.cluster, pipe.predicted
        pipe.costs = pipe.costs.but(cluster=calm.slowed({1: 2.0}))
        pipe.predicted = expect_plan(plan, pipe.costs)[1]
        pipe.survival.take_speeds(comm, pipe.costs.cluster)
        assert busy_s(pipe.predicted)[1] == pytest.approx(2.0 * busy_s(step)[1])
        assert not pipe.refine([step] * 3, 0)[0]
        assert pipe.plan is plan
        assert pipe.costs.cluster == calm
        assert busy_s(pipe.predicted) == pytest.approx(busy_s(step))
        assert not pipe.plan_around({1: 1.01})[0]
        assert pipe.plan is plan
        assert busy_s(pipe.predicted)[1] == pytest.approx(1.01 * busy_s(step)[1])

    run_local(2, body)


@pytest.mark.parametrize(
    ("where", "step", "spares"), [("recovery", EVERY + 1, 0), ("received", EVERY + 1, 0), ("update", 6, 1)]
)
@pytest.mark.slow
def test_a_rank_that_is_lost_on_the_way_to_another_layout_changes_no_bits(
    monkeypatch: pytest.MonkeyPatch, where: str, step: int, spares: int
) -> None:
    """While state moves, before all have the first mirrors of the new layout, or later: then a spare, which
    has not seen it, takes over in it."""
    arm(monkeypatch, ((1, where, step),))

    def body(comm: Communicator) -> tuple[dict[str, str], int]:
        pipe = pipeline(comm, spares=spares)
        pipe.fit(EVERY + 1)
        pipe.surviving(lambda: pipe.refine([slowed(pipe.predicted, 0, 20.0)] * 3, 1000), pipe.recover)
        pipe.fit(STEPS)
        mine = {name: tensor_digest(name, t) for name, t in pipe.state_dict(full=False).items()}
        return {k: v for part in pipe.comm.allgather_object(mine) for k, v in part.items()}, pipe.size

    expected = {k: v for k, v in undisturbed().items() if not k.startswith("loss ")}
    assert run_local(3, body) == [(expected, 2)] * 2


def test_a_version_is_of_one_layout_though_another_has_one_of_that_step() -> None:
    """A rank was lost while some had left the barrier behind the new mirrors, and others had not."""

    def body(comm: Communicator) -> tuple[str, dict[str, float]]:
        kept = []
        for plan, names in (("old", "ab"), ("new", "ba")):
            mirrors = Mirrors(comm, 1, plan)
            mirrors.take(3, {names[comm.rank]: torch.tensor(float(len(kept)))}, ())
            mirrors.commit()
            kept.append(mirrors)
        found = newest_whole(comm, kept if comm.rank == 0 else kept[:1])
        assert found is not None
        received = fetch(comm, held(kept, found), found, ["a", "b"])
        values = {name: torch.zeros(()) for name in "ab"}
        for name, out in values.items():
            received.read(name, out)
        return found.key.plan, {name: float(t) for name, t in values.items()}

    (plan, values), other = run_local(2, body)
    assert (plan, values) == other
    assert set(values.values()) == {0.0 if plan == "old" else 1.0}


@pytest.mark.slow
def test_a_copy_of_a_stage_is_sent_the_optimizer_state_that_it_updates() -> None:
    def body(comm: Communicator) -> tuple[set[str], set[str]]:
        pipe = pipeline(comm, recover="restart", blocks=2, replicas=2, optimizer=None)
        pipe.fit(1)
        layout, variants = pipe.plan.layout, pipe.variants
        has = {name.rpartition("/")[0] for name in pipe.trainer.optimizer_state()}
        names = [f"{name}/exp_avg" for name in variants.trained]
        wanted = needed([*names, *variants.trained], variants, layout, comm.rank)
        return has, {name.rpartition("/")[0] for name in wanted if "/" in name}

    for has, wanted in run_local(2, body):
        assert has == wanted
        assert has


class Quiet(Net):
    """Its statistics are in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        for name, buffer in list(self.norm.named_buffers()):
            self.norm.register_buffer(name, buffer, persistent=False)


class Odd(torch.optim.SGD):
    """It keeps what nothing can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("history", []).append(1)


@pytest.mark.slow
def test_statistics_that_no_checkpoint_has_go_over_too() -> None:
    def body(comm: Communicator, refine: bool) -> tuple[dict[str, float], bool]:
        pipe = pipeline(comm, recover="restart", model=Quiet, val=[*Samples()])
        pipe.fit(EVERY + 1)
        slow = slowed(pipe.predicted, 0, 20.0)
        taken = refine and pipe.refine([slow] * 3, 1000)[0]
        pipe.fit(STEPS)
        return pipe.evaluate(), taken

    kept = run_local(2, lambda comm: body(comm, False))
    refined = run_local(2, lambda comm: body(comm, True))
    assert [taken for _, taken in refined] == [True, True]
    assert refined[0][0] == kept[0][0]


@pytest.mark.slow
def test_the_plan_stays_where_an_optimizer_keeps_what_nothing_can_hold() -> None:
    def body(comm: Communicator) -> tuple[bool, str]:
        pipe = pipeline(comm, recover="restart", optimizer=lambda named: Odd([p for _, p in named], lr=0.01))
        pipe.fit(EVERY)
        plan, costs = pipe.plan, pipe.costs
        found = pipe.refine([slowed(pipe.predicted, 0, 20.0)] * 3, 1000)
        assert (pipe.plan, pipe.costs) == (plan, costs)
        pipe.fit(EVERY + 1)
        return found

    for taken, said in run_local(2, body):
        assert not taken
        assert "the plan stays: " in said
        assert "'history'" in said


@pytest.mark.slow
def test_all_ranks_agree_on_whether_they_look_at_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(comm: Communicator, **how: Any) -> list[int]:
        return list(pipeline(comm, optimizer=None, recover="restart", **how).survival.looks)

    for busy, expected in ((2, list(LOOKS)), (1, [])):  # the node that has too few cores
        shared = property(lambda comm, busy=busy: comm.node_of_rank[comm.rank] == busy, lambda *_: None)
        monkeypatch.setattr(LocalCommunicator, "oversubscribed", shared, raising=False)
        assert run_local(2, looks, (0, 1)) == [expected] * 2
    with pytest.raises(LaunchError, match="refine"):
        run_local(2, lambda comm: looks(comm, refine=comm.rank == 0))


@pytest.mark.slow
def test_the_plan_stays_where_another_one_gains_nothing_or_the_data_cannot_go_back() -> None:
    def body(comm: Communicator) -> list[str]:
        pipe = pipeline(comm, recover="restart")
        pipe.plan_around({0: 3.0, 1: 3.0})  # it may find a better one, as updates were timed again since
        plan, said = pipe.plan, [pipe.plan_around({0: 2.0, 1: 2.0})]
        pipe.data.exact = False
        said += [pipe.plan_around({0: 30.0}), pipe.refine([pipe.predicted] * 3, 1000)]
        assert pipe.plan is plan
        assert not any(taken for taken, _ in said)
        return [why for _, why in said]

    for said in run_local(2, body):
        assert "no other is more than 3% faster" in said[0]
        assert "plain iterable" in said[1]
        assert "plain iterable" in said[2]


def test_what_lay_in_one_buffer_is_let_go_one_by_one() -> None:
    """So that a plan can be changed in the memory of a step."""
    room = np.arange(4, dtype=np.float32)
    buffer, there = torch.from_numpy(room), weakref.ref(room)
    tensors = {"w": buffer[:2], "w/exp_avg": buffer[2:], "n": torch.ones(())}
    del room, buffer
    apart(tensors)
    assert there() is None, "nothing keeps the buffer"
    assert {name: t.tolist() for name, t in tensors.items()} == {"w": [0, 1], "w/exp_avg": [2, 3], "n": 1}
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 3
    received, out = Received(3, tensors), torch.zeros(2)
    for _ in range(2):
        received.read("w", out)
    assert out.tolist() == [0, 1]
    received.let_go(["w", "b"])
    assert tensors.keys() == {"w/exp_avg", "n"}
    received.once = True
    received.read("w/exp_avg", out)
    assert out.tolist() == [2, 3]
    assert tensors.keys() == {"n"}, "an optimizer's state is read once"
    assert set(received.names) == {"w", "w/exp_avg", "n"}, "what it came with"
