"""Every schedule, number of replicas and way to recompute trains to the bits of one rank.

One generator makes all cells, threads as ranks. The ordinary tests run a part of them in which every two
values of two axes meet, and every schedule BatchNorm in one pipeline and in two; make test-full runs all.
`test_carrier.py` has what the axes do not: cuts, fast bits, precision, few micro-batches, unlike numbers of
replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache

import pytest
from hf_tiny import HfCase, HolesCase
from kinds import KINDS
from tiny import Case, differences, full_but, train_local

from mpipipe.planner.copies import legal_copies
from mpipipe.planner.schedules import PLAIN, SCHEDULES
from mpipipe.values import Recompute

one_stage = cache(train_local)
COPIES = (1, 2, 3, 4)
MIXED: tuple[Recompute, ...] = ("selective", "full", "none")  # of the stages in turn
MODES = ((), MIXED)
MODELS = ("gpt", "conv and norm")
IN_TWO = tuple(name for name in SCHEDULES if name not in (*PLAIN, "interleaved"))


@dataclass(frozen=True)
class Cell:
    schedule: str
    copies: int
    recompute: tuple[Recompute, ...]
    model: str

    def __str__(self) -> str:
        mode = "mixed" if self.recompute else "none"
        return f"{self.model} {self.schedule} x{self.copies} {mode}"

    @property
    def case(self) -> Case:
        """A copy does four micro-batches, two blocks of them, of three samples but a few of two."""
        n = self.copies
        return Case(self.model, batch=12 * n - 1, micro_batches=4 * n, blocks=2 * n, evaluate=True, steps=2)

    @property
    def ranks(self) -> int:
        return 4 if self.copies == 1 else 2 * self.copies


def cells() -> Iterator[tuple[Cell, bool]]:
    """All, and whether one is of the part in which every two values of two axes meet."""
    axes = map(enumerate, (SCHEDULES, COPIES, MODES, MODELS))
    for (s, schedule), (c, copies), (r, recompute), (m, model) in itertools.product(*axes):
        yield Cell(schedule, copies, recompute, model), r == (s + c) % 2 and m == (s + c // 2) % 2


ALL = [cell for cell, _ in cells()]
PAIRS = [cell for cell, chosen in cells() if chosen]
OF_NORMS = [cell for cell in ALL if cell.model != "gpt" and cell.copies <= 2 and not cell.recompute]


@pytest.mark.parametrize("cell", full_but([*PAIRS, *OF_NORMS], ALL), ids=str)
@pytest.mark.slow
def test_every_layout_gives_the_bits_of_one_rank(cell: Cell) -> None:
    got = train_local(
        cell.case, cell.ranks, cell.schedule, window=16, copies=cell.copies, recompute=cell.recompute
    )
    assert differences(one_stage(cell.case, 1), got) == []


def test_every_two_values_of_two_axes_meet_in_the_ordinary_tests() -> None:
    def pairs(some: list[Cell]) -> set[tuple[object, ...]]:
        values = [enumerate(astuple(cell)) for cell in some]
        return {pair for of_one in values for pair in itertools.combinations(of_one, 2)}

    assert pairs(PAIRS) == pairs(ALL)
    assert len(PAIRS) == len(ALL) // 4
    assert all(cell.copies in legal_copies(cell.case.numerics) for cell in ALL)


UNLIKE = [  # (schedule, copies of each stage, model): the schedules with one stage per rank
    ("1f1b", (2, 1), "gpt"),
    ("gpipe", (1, 2), "conv and norm"),
    ("zb-h1", (1, 2, 1), "gpt"),
    ("zb-h2", (2, 1), "conv and norm"),
    ("zb-planned", (1, 2), "gpt"),
]


@pytest.mark.parametrize(("schedule", "copies", "model"), UNLIKE, ids=str)
@pytest.mark.slow
def test_unlike_numbers_of_copies_that_make_again_give_the_bits_of_one_rank(
    schedule: str, copies: tuple[int, ...], model: str
) -> None:
    case = Cell(schedule, max(copies), MIXED, model).case
    got = train_local(case, sum(copies), schedule, window=16, copies=copies, recompute=MIXED)
    assert differences(one_stage(case, 1), got) == []


ONE_OF_EACH = [*zip(KINDS, itertools.cycle(IN_TWO), strict=False)]


@pytest.mark.parametrize(
    ("case", "schedule"), full_but(ONE_OF_EACH, itertools.product(KINDS, IN_TWO)), ids=str
)
@pytest.mark.slow
def test_backwards_in_two_give_the_bits_of_one_rank_for_every_kind_of_model(
    case: Case, schedule: str
) -> None:
    if isinstance(case, HfCase):
        pytest.importorskip("transformers")
    assert differences(one_stage(case, 1), train_local(case, 2, schedule, window=16)) == []


AS_COPIES = [
    *zip((replace(case, blocks=2) for case in KINDS), itertools.cycle(SCHEDULES), strict=False),
    (Case("conv and norm", bits="fast", batch=11, blocks=2, evaluate=True, steps=2), "zb-v"),
    (Case("conv and norm, in bf16", batch=11, blocks=2, evaluate=True, steps=2), "1f1b"),
    (Case("gpt", precision="bf16", tied="eager", blocks=2, steps=2), "zb-planned"),
]


@pytest.mark.parametrize(("case", "schedule"), AS_COPIES, ids=str)
@pytest.mark.slow
def test_two_copies_give_the_bits_of_one_rank_for_every_kind_of_model(case: Case, schedule: str) -> None:
    if isinstance(case, HfCase):
        pytest.importorskip("transformers")
    assert differences(one_stage(case, 1), train_local(case, 4, schedule, window=16, copies=2)) == []


OF_MEAN = HolesCase("llama", bits="fast", batch=15, micro_batches=8, blocks=4, evaluate=True, steps=2)


@pytest.mark.parametrize(
    ("schedule", "copies", "recompute"),
    full_but(
        [("1f1b", 2, MIXED), ("zb-v", 1, ()), ("interleaved", 1, MIXED)],
        itertools.product(SCHEDULES, (1, 2, 4), MODES),
    ),
    ids=str,
)
@pytest.mark.slow
def test_a_mean_over_unlike_numbers_of_labels_has_the_bits_of_one_rank(
    schedule: str, copies: int, recompute: tuple[Recompute, ...]
) -> None:
    """Made in backward, by kernels of our own; one micro-batch has no label that counts."""
    pytest.importorskip("transformers")
    expected = one_stage(OF_MEAN, 1)
    assert all(math.isfinite(float.fromhex(loss)) for loss in expected["losses"])
    got = train_local(OF_MEAN, 2 * copies, schedule, window=16, copies=copies, recompute=recompute)
    assert differences(expected, got) == []
