"""Saved on n ranks while they train on, resumed on m: the final bits are those of the run that went on."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from tiny import Case, even_cuts, full_but, placement, plan_of, tensors_after, warm

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.graph.variants import Variants
from mpipipe.runtime.optimizer import described
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.checkpoint import Reader
from mpipipe.state.digests import tensor_digest
from mpipipe.state.resume import RunState, read_state
from mpipipe.state.saving import Saver
from mpipipe.state.verify import check_read

CASES = {"tied, dropout": Case("gpt"), "BatchNorm, ragged": Case("conv and norm", batch=10)}
SCHEDULES = ("1f1b", "zb-v")
RANKS = (1, 2, 3, 4)
SAVED_AFTER = 1


def trainer_of(comm: Communicator, case: Case, schedule: str, variants: Variants) -> Trainer:
    order = placement(schedule, comm.size)
    cuts = even_cuts(variants.graph.groups, len(order))
    return Trainer(comm, variants, plan_of(case, schedule, cuts, order=order), case.settings, case.dataset)


def digests(trainer: Trainer) -> dict[str, str]:
    return {name: tensor_digest(name, t) for name, t in trainer.state_dict().items()}


def train_and_save(comm: Communicator, case: Case, schedule: str, folder: Path) -> dict[str, str]:
    trainer, saver = trainer_of(comm, case, schedule, case.variants), Saver(comm)
    for step in range(case.steps):
        trainer.step(step)
        saver.poll()
        if step + 1 == SAVED_AFTER:
            numbers = [one for part in comm.allgather_object(trainer.optimizer_numbers()) for one in part]
            saver.save(
                folder, trainer.state_dict(), trainer.optimizer_state(), case.variants.source.persistent,
                RunState(step + 1, case.numerics, "g", described(numbers)), background=True,
            )  # fmt: skip
    saver.finish()
    return digests(trainer)


def resume(comm: Communicator, case: Case, schedule: str, folder: Path) -> dict[str, str]:
    weights, kept, state = Reader(folder), Reader(folder, "optimizer"), read_state(folder)
    variants = copy.copy(case.variants)  # the same capture, with other first values
    variants.source = copy.copy(case.variants.source)
    variants.source.initial, variants.source._initial_name = weights, {n: n for n in weights.names}
    trainer = trainer_of(comm, case, schedule, variants)
    trainer.resume(kept, state.optimizer)
    trainer.state_dict()
    for reader in (weights, kept):
        check_read(comm, reader, state.files)
    for step in range(state.step, case.steps):
        trainer.step(step)
    return digests(trainer)


@pytest.mark.parametrize(
    ("case", "schedule", "ranks", "others"),
    full_but(
        [("tied, dropout", "zb-v", 2, 3)],
        [
            (case, schedule, ranks, others)
            for case in CASES
            for schedule in SCHEDULES
            for ranks in RANKS
            for others in RANKS
        ],
    ),
)
@pytest.mark.slow
def test_any_number_of_ranks_goes_on_from_any_other(
    tmp_path: Path, case: str, schedule: str, ranks: int, others: int
) -> None:
    this = CASES[case]
    warm(this)
    folder = tmp_path / "step"
    expected = digests_of(this)
    parts = run_local(ranks, lambda comm: train_and_save(comm, this, schedule, folder))
    assert {n: d for part in parts for n, d in part.items()} == expected, "nor does saving disturb"
    parts = run_local(others, lambda comm: resume(comm, this, schedule, folder))
    assert {n: d for part in parts for n, d in part.items()} == expected


def digests_of(case: Case) -> dict[str, str]:
    return {name: tensor_digest(name, t) for name, t in tensors_after(case).items()}
