"""`micro_batches="auto"` and `schedule="auto"`: searched at the first start, the same on all ranks, and then
kept. Times are made up: a call has a price, and so has each sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpipipe import Pipeline
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.cluster.routes import Route
from mpipipe.decided import blocks_of, micro_batches_of
from mpipipe.errors import ConfigError, DataError, LaunchError, PlanError
from mpipipe.graph import products
from mpipipe.graph.profile import Profiler
from mpipipe.planner.schedules.registry import BUILT_IN
from mpipipe.runtime import costing, gemm
from mpipipe.runtime.setting import numerics_of
from mpipipe.state.digests import tensor_digest
from mpipipe.values import Numerics

FEATURES, CLASSES, BATCH = 8, 4, 4
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def price(monkeypatch: pytest.MonkeyPatch, made_up_times: None, captured_once: None) -> dict[str, float]:
    """Seconds of a forward: of the call, and of each sample; a backward takes twice as long, and what is sent
    back needs all of it."""
    seconds = {"call": 1e-3, "sample": 1e-3}

    def once(self: Profiler, *_: Any) -> tuple[float, float]:
        rows = next(iter(self.anatomy.captured.inputs)).meta["val"].shape[0]
        forward = seconds["call"] + rows * seconds["sample"]
        return forward, 2 * forward

    monkeypatch.setattr(Profiler, "_once", once)
    monkeypatch.setattr(Profiler, "_in_two", lambda self, *_: (*once(self), 0.0))
    return seconds


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8) if norm else nn.Identity()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


def samples() -> list[tuple[Tensor, Tensor]]:
    draw = torch.randn(37, FEATURES, generator=torch.Generator().manual_seed(1))
    return [(x, x[:CLASSES].argmax()) for x in draw]


def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def pipeline(comm: Communicator, model: Any = Net, data: Any = None, **how: Any) -> Pipeline:
    given = {"batch": BATCH, "micro_batches": "auto", "cost_cache": False, "say": lambda _: None, **how}
    return Pipeline(model, loss, samples() if data is None else data, comm=comm, **given)


def result(pipe: Pipeline, steps: int) -> tuple[list[str], dict[str, str]]:
    losses = [pipe.step().loss.hex() for _ in range(steps)]
    found = {name: tensor_digest(name, t) for name, t in pipe.state_dict(full=False).items()}
    return losses, {k: v for part in pipe.comm.allgather_object(found) for k, v in part.items()}


def numerics(ranks: int, **how: Any) -> Numerics:
    found = run_local(ranks, lambda comm: pipeline(comm, **how).numerics)
    assert len(set(map(repr, found))) == 1, "ranks differ"
    return found[0]


@pytest.mark.full  # tests/launch/test_auto.py says it of real ranks
def test_all_ranks_agree_the_bits_are_those_of_the_number_and_the_plan_keeps_it(
    price: dict[str, float],
) -> None:
    said: list[str] = []

    def body(comm: Communicator, **how: Any) -> Any:
        pipe = pipeline(comm, schedule="auto", say=said.append, **how)
        return pipe.plan, result(pipe, 1)

    searched = run_local(2, body)
    assert repr(searched[0]) == repr(searched[1])
    plan, bits = searched[0]
    assert plan.numerics.micro_batches == 2, "calls have a price, and so has a bubble"
    line = next(text for text in said if text.startswith("tried "))
    assert line.startswith(
        f"tried {', '.join(BUILT_IN)} with 1, 2, 4 micro-batches (costs of 1, 2 samples in "
    )
    assert "; took 1f1b with 2 micro-batches of 2; next best " in line
    price.update(call=1e-9)
    again, same = run_local(2, lambda comm: body(comm, plan=plan))[0]
    assert (again.numerics, again.layout, same) == (plan.numerics, plan.layout, bits)
    assert run_local(1, lambda comm: result(pipeline(comm, micro_batches=2), 1))[0] == bits
    other = replace(plan, numerics=replace(plan.numerics, batch=3))
    with pytest.raises(PlanError, match=r"numerics\.batch = 3, this run 4"):
        run_local(2, lambda comm: pipeline(comm, plan=other))


@pytest.mark.full  # as above
def test_a_resumed_run_keeps_the_number(tmp_path: Path, price: dict[str, float]) -> None:
    def begin(comm: Communicator) -> Any:
        pipe = pipeline(comm)
        result(pipe, 1)
        pipe.save(tmp_path / "c")
        return pipe.numerics, result(pipe, 1)

    kept, end = run_local(2, begin)[0]
    price.update(call=1e-9)
    assert kept.micro_batches == 2
    assert numerics(2).micro_batches == 4, "a search would take another one now"

    def resume(comm: Communicator) -> Any:
        pipe = pipeline(comm, resume=tmp_path / "c")
        return pipe.numerics, result(pipe, 1)

    assert run_local(1, resume)[0] == (kept, end)
    with pytest.raises(ConfigError, match="batch: 4 in the checkpoint, 3 now"):
        numerics(1, resume=tmp_path / "c", batch=3)


@pytest.mark.parametrize(
    ("given", "batch", "decided", "new_numerics", "count"),
    [
        (3, 8, 4, False, 3),
        ("auto", 8, None, False, None),
        ("auto", 8, 4, False, 4),
        ("auto", 8, 4, True, 4),
        ("auto", 6, 4, True, None),  # another batch, and it may be split in another way
        ("auto", 3, 4, False, 3),  # what differs is refused next
    ],
)
def test_what_was_decided_holds_as_long_as_the_batch_does(
    given: Any, batch: int, decided: int | None, new_numerics: bool, count: int | None
) -> None:
    of_8 = numerics_of(
        batch=8, micro_batches=decided or 1, blocks=1, threads=1, gemm="mkl", precision="fp32",
        tied="per_use", seed=0,
    )  # fmt: skip
    assert micro_batches_of(given, batch, 1, of_8 if decided else None, new_numerics) == count


def of_blocks(blocks: int) -> Numerics:
    return numerics_of(
        batch=16, micro_batches=16, blocks=blocks, threads=1, gemm="mkl", precision="fp32", tied="per_use",
        seed=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "micro", "max_ranks", "kept", "new_numerics", "blocks", "why"),
    [
        (2, 8, 16, None, False, 2, ""),
        ("auto", 16, None, None, False, 4, "for 4 ranks at most, those of the start"),
        ("auto", 16, 9, None, False, 8, "for 9 ranks at most, as pipeline.max_ranks says"),
        (
            "auto",
            12,
            16,
            None,
            False,
            4,
            "as pipeline.max_ranks says; 12 micro-batches allow no power of two times that",
        ),
        ("auto", "auto", 64, None, False, 16, "a batch of 16 allows no power of two times that"),
        ("auto", 16, None, 2, False, 2, "those of the checkpoint or plan"),
        ("auto", 16, 16, 2, False, 2, "those of the checkpoint or plan"),
        ("auto", 16, None, 2, True, 2, "those of the checkpoint or plan"),
        ("auto", 16, 16, 2, True, 16, "for 16 ranks at most"),
    ],
)
def test_blocks_are_those_of_the_ranks_that_may_come_and_then_stay(
    given: Any, micro: Any, max_ranks: int | None, kept: int | None, new_numerics: bool, blocks: int, why: str
) -> None:
    decided = None if kept is None else of_blocks(kept)
    found = blocks_of(given, micro, 16, 4, max_ranks, decided, "exact", new_numerics)
    assert found[0] == blocks
    assert why in found[1]
    assert bool(why) == bool(found[1])
    assert blocks_of("auto", micro, 16, 4, max_ranks, decided, "fast") == (1, "")


def test_a_spare_takes_no_replicas_away() -> None:
    """Of nine ranks one waits: 3 blocks, which nine share, would be of no use to eight."""
    found = blocks_of("auto", 24, 24, 9, None, None, "exact", spares=1)
    assert found == (8, "for 8 ranks at most, those of the start, without spares")
    assert blocks_of("auto", 24, 24, 9, 9, None, "exact", spares=1)[0] == 8


def test_more_ranks_than_may_come_are_refused_before_the_first_step_only() -> None:
    with pytest.raises(PlanError, match=r"max_ranks = 2, and there are 4 ranks: set 4 at least"):
        blocks_of("auto", 8, 16, 4, 2, None, "exact")
    assert blocks_of("auto", 16, 16, 4, 2, of_blocks(2), "exact")[0] == 2


@pytest.mark.slow
def test_a_batch_norm_never_gets_a_single_sample(price: dict[str, float]) -> None:
    price.update(call=1e-9)
    assert numerics(2, model=lambda: Net(norm=True)).micro_batches == 2


def test_data_by_micro_batch_have_a_number_already() -> None:
    class Mine:
        def batch(self, step: int, micro: int) -> Batch:
            return {"x": torch.zeros(2, FEATURES), "labels": torch.zeros(2, dtype=torch.int64)}

    with pytest.raises(DataError, match=r"asked for by micro-batch.*set micro_batches to that number"):
        run_local(1, lambda comm: pipeline(comm, data=Mine()))


@pytest.mark.slow
def test_blocks_divide_the_number_and_too_many_are_refused(price: dict[str, float]) -> None:
    price.update(call=1.0)
    assert numerics(1, blocks=2).micro_batches == 2
    with pytest.raises(PlanError, match="use 4 blocks at most"):
        numerics(1, blocks=5)


def test_ranks_of_which_only_some_search_are_caught() -> None:
    with pytest.raises(LaunchError, match="searched"):
        run_local(2, lambda comm: pipeline(comm, micro_batches="auto" if comm.rank else 1))


@pytest.mark.slow
def test_links_are_measured_for_the_first_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[int]()
    monkeypatch.setattr(costing, "measure_links", lambda comm: measured.append(comm.size) or {})
    said = list[str]()
    run_local(1, lambda comm: pipeline(comm, say=said.append))
    assert any("costs of 1, " in line for line in said)  # and another size
    assert measured == [1]


# -- gemm="auto" -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_route_is_measured_once_and_kept_by_checkpoints_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"onednn": 2e11}

    def measured(*_: Any) -> tuple[Route, ...]:
        return Route("mkl", 1e11, 3e-7, True), Route("onednn", rates["onednn"], 3e-7, True)

    monkeypatch.setattr(products, "LEAST_FLOPS", 1.0)
    monkeypatch.setattr(gemm, "measure", measured)
    routes_set = list[str]()  # that the process would have
    monkeypatch.setattr("mpipipe.measuring.set_gemm_route", routes_set.append)
    for others in ("set_gemm_route", "compute_as"):  # of a processor on which oneDNN's product is no fp32
        monkeypatch.setattr(f"mpipipe.pipeline.{others}", lambda *_: None)

    def begin(comm: Communicator) -> Pipeline:
        pipe = pipeline(comm, micro_batches=2)
        pipe.save(tmp_path / "c")
        return pipe

    first, second = run_local(2, begin)
    assert first.numerics == second.numerics
    assert (first.numerics.gemm, first.gemm_why[:23]) == ("onednn", "oneDNN, 2.00 times as f")
    assert routes_set[-2:] == ["onednn"] * 2
    rates["onednn"] = 1e10
    for kept in ({"resume": tmp_path / "c"}, {"plan": replace(first.plan, costs=None)}):
        pipe = run_local(2, lambda comm, kept=kept: pipeline(comm, micro_batches=2, **kept))[0]
        assert (pipe.numerics.gemm, pipe.gemm_why) == ("onednn", "oneDNN, as the checkpoint or plan has it")
    assert run_local(1, lambda comm: pipeline(comm, micro_batches=2))[0].numerics.gemm == "mkl"
    with pytest.raises(ConfigError, match="gemm: 'onednn' in the checkpoint, 'mkl' now"):
        run_local(1, lambda comm: pipeline(comm, micro_batches=2, gemm="mkl", resume=tmp_path / "c"))


@pytest.mark.slow
def test_a_given_route_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_FLOPS", 1.0)
    monkeypatch.setattr(gemm, "measure", lambda *_: pytest.fail("measured"))
    pipe = run_local(1, lambda comm: pipeline(comm, micro_batches=2, gemm="mkl"))[0]
    assert (pipe.numerics.gemm, pipe.gemm_why) == ("mkl", "MKL, as gemm (in a config kernels.gemm) says")


def test_ranks_that_are_asked_for_other_routes_are_caught() -> None:
    with pytest.raises(LaunchError, match="gemm"):
        run_local(2, lambda comm: pipeline(comm, micro_batches=2, gemm="mkl" if comm.rank else "auto"))
