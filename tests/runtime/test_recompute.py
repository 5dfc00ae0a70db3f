"""What a stage makes again changes no bits, and less is kept meanwhile."""

from __future__ import annotations

from functools import cache

import pytest
from tiny import BITS, Case, differences, full_but, train_local

from mpipipe.values import Recompute

one_stage = cache(train_local)
Modes = tuple[Recompute, ...]
S, F, N = "selective", "full", "none"

FAST = [  # (case, schedule, ranks, modes of the stages in turn)
    (Case("gpt", precision="bf16", tied="eager"), "zb-h1", 2, (S, F)),
    (Case("gpt", batch=7, evaluate=True), "zb-v", 2, (F, S)),
    (Case("gpt", bits="fast", batch=7, evaluate=True), "interleaved", 2, (S,)),
    (Case("conv and norm", evaluate=True), "zb-h2", 3, (S,)),
    (Case("conv and norm", evaluate=True), "1f1b", 2, (F,)),
    (Case("traps", precision="bf16", optimizer="sgd"), "gpipe", 3, (S, F)),
    (Case("thrice", tied="eager", batch=11), "1f1b", 2, (F, N)),
]
ALL = [
    (case, schedule, ranks, modes)
    for case in BITS
    for schedule, ranks in [("1f1b", 1), ("gpipe", 4), ("zb-h1", 3), ("zb-v", 2), ("v-half", 2)]
    for modes in [(S,), (F,), (N, S, F)]
    if schedule in ("1f1b", "gpipe") or not (case.bits == "fast" and case.blocks > 1)
    if len(case.variants.graph.groups) >= (2 * ranks if schedule in ("zb-v", "v-half") else ranks)
]


@pytest.mark.parametrize(("case", "schedule", "ranks", "modes"), full_but(FAST, [*FAST, *ALL]), ids=str)
def test_the_bits_are_those_of_a_stage_that_keeps_all(
    case: Case, schedule: str, ranks: int, modes: Modes
) -> None:
    got = train_local(case, ranks, schedule, window=16, recompute=modes)
    assert differences(one_stage(case, 1), got) == []
