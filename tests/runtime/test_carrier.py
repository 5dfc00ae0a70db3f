"""The bits of a run do not depend on the cut or the schedule: threads as ranks, no MPI.

tests/mpi/test_bits.py says the same of real ranks. Here are many cuts, there is the real carrier.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest
from tiny import (
    BITS,
    CLASSES,
    SEED,
    SIDE,
    Case,
    capture,
    differences,
    even_cuts,
    full_but,
    placement,
    plan_of,
    train,
    train_local,
    warm,
)

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.data.synthetic import SyntheticTokens, SyntheticVectors
from mpipipe.errors import MpipipeError
from mpipipe.graph.program import Batch
from mpipipe.planner.copies import Copies, most_copies, ranks_in_each
from mpipipe.runtime import copies as runtime_copies
from mpipipe.runtime.feed import split_evenly
from mpipipe.runtime.setting import set_threads
from mpipipe.runtime.trainer import Trainer
from mpipipe.state.digests import tensor_digest
from mpipipe.values import Split

one_stage = cache(train_local)

FAST = [
    Case("gpt", precision="bf16", tied="eager"),
    Case("gpt", batch=7, evaluate=True),
    Case("conv and norm", evaluate=True),
    Case("traps", precision="bf16", optimizer="sgd"),
    Case("thrice", tied="eager", batch=11),
    Case("gpt, no dropout", bits="fast", precision="bf16", tied="eager"),
]


@pytest.mark.parametrize("case", full_but(FAST, BITS), ids=str)
@pytest.mark.slow
def test_any_number_of_stages_gives_the_bits_of_one(case: Case) -> None:
    expected = one_stage(case, 1)
    assert len(set(expected["losses"])) == len(expected["losses"]), "something is learned"
    for n_stages, schedule in [(2, "gpipe"), (4, "1f1b")]:
        assert differences(expected, train_local(case, n_stages, schedule)) == [], (n_stages, schedule)


IN_TWO = [  # (case, schedule, ranks)
    (Case("gpt"), "zb-v", 2),
    (Case("gpt", precision="bf16", tied="eager"), "v-half", 3),
    (Case("gpt", bits="fast", batch=7, evaluate=True), "interleaved", 2),
    (Case("conv and norm", evaluate=True), "zb-h2", 3),
    (Case("skips", evaluate=True), "zb-v", 3),
    (Case("thrice", tied="eager", batch=11), "zb-h1", 2),
]
SCHEDULES_RANKS = [
    ("interleaved", 2),
    ("zb-h1", 3),
    ("zb-h2", 4),
    ("zb-planned", 3),
    ("zb-v", 1),
    ("zb-v", 3),
    ("v-half", 2),
]
GROUPS = {"gpt": 16, "mlp": 4, "conv and norm": 8, "skips": 14, "thrice": 10, "traps": 7}


def _runs(case: Case, schedule: str, ranks: int) -> bool:
    in_two, n_groups = schedule != "interleaved", GROUPS[case.model.partition(",")[0]]
    return n_groups >= 2 * ranks and (in_two or case.micro_batches % ranks == 0)


@pytest.mark.parametrize("model", full_but(["conv and norm"], GROUPS))
@pytest.mark.slow
def test_groups_are_so_many(model: str) -> None:
    """Not counted while tests are collected: every worker would capture every model."""
    assert len(Case(model).variants.graph.groups) == GROUPS[model]


@pytest.mark.parametrize(
    ("case", "schedule", "ranks"),
    full_but(IN_TWO, [*IN_TWO, *((c, s, r) for c in BITS for s, r in SCHEDULES_RANKS if _runs(c, s, r))]),
    ids=str,
)
@pytest.mark.slow
def test_backwards_in_two_and_several_stages_per_rank_give_the_bits_of_one(
    case: Case, schedule: str, ranks: int
) -> None:
    assert differences(one_stage(case, 1), train_local(case, ranks, schedule, window=16)) == []


COPIES = [  # (case, schedule, ranks, copies)
    (Case("gpt", batch=15, micro_batches=8, blocks=4, evaluate=True), "1f1b", 4, 2),
    (Case("gpt", batch=8, micro_batches=4, blocks=4, tied="eager"), "zb-v", 4, 2),
    (Case("conv and norm", batch=11, blocks=4, evaluate=True), "gpipe", 4, 4),
    (Case("thrice", batch=12, micro_batches=6, blocks=6), "1f1b", 6, 3),
    (Case("gpt", batch=15, micro_batches=8, blocks=4), "interleaved", 4, 4),
    (Case("thrice", batch=12, micro_batches=6, blocks=6, tied="eager"), "v-planned", 6, 6),
]
ALL_COPIES = [
    *COPIES,
    (Case("conv and norm", batch=24, micro_batches=12, blocks=6, evaluate=True), "zb-v", 6, 3),
    (Case("gpt", bits="fast", batch=16, micro_batches=8, blocks=4), "zb-v", 8, 4),
    (Case("gpt", batch=16, micro_batches=8, blocks=8), "v-half", 8, 8),
    (Case("conv and norm", batch=10, blocks=4, optimizer="sgd", evaluate=True), "zb-h2", 4, 2),
    (Case("gpt", batch=12, micro_batches=6, blocks=3, evaluate=True), "1f1b", 3, 3),
    (Case("gpt", precision="bf16", batch=8, blocks=4), "1f1b", 4, 4),
    (Case("gpt", bits="fast", batch=16, micro_batches=8, blocks=4), "interleaved", 4, 2),
    (Case("mlp", optimizer="sgd", blocks=2, clip=None), "1f1b", 2, 2),
    (Case("skips", batch=16, micro_batches=8, blocks=8, evaluate=True), "1f1b", 8, 4),
    (Case("thrice", tied="eager", batch=11, blocks=4), "zb-h1", 4, 2),
    (Case("traps", precision="bf16", optimizer="sgd", blocks=4), "v-half", 4, 2),
]


@pytest.mark.parametrize(("case", "schedule", "ranks", "copies"), full_but(COPIES, ALL_COPIES), ids=str)
@pytest.mark.slow
def test_copies_of_the_pipeline_give_the_bits_of_one(
    case: Case, schedule: str, ranks: int, copies: int
) -> None:
    """With all of its state sharded; the copies' weights are compared, too."""
    got = train_local(case, ranks, schedule, window=16, copies=copies)
    assert differences(one_stage(case, 1), got) == []


@pytest.mark.parametrize(
    ("case", "schedule", "ranks", "copies"),
    [
        (Case("gpt", batch=8, micro_batches=4, blocks=2), "zb-v", 4, 2),
        (Case("conv and norm", batch=13, micro_batches=6, blocks=6), "1f1b", 6, 6),
        (Case("conv and norm", batch=16, micro_batches=8, blocks=4), "zb-v", 4, 4),
    ],
    ids=str,
)
@pytest.mark.slow
def test_sums_that_travel_in_many_buckets_have_the_same_bits(
    case: Case, schedule: str, ranks: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which tensors are no multiple; here one bucket has room for all."""
    monkeypatch.setattr(runtime_copies, "BUCKET_BYTES", 1000)
    got = train_local(case, ranks, schedule, window=16, copies=copies)
    assert differences(one_stage(case, 1), got) == []


UNLIKE = [  # (case, schedule, copies of each stage)
    (Case("gpt", batch=15, micro_batches=8, blocks=4, evaluate=True), "1f1b", (2, 1)),
    (Case("thrice", batch=12, micro_batches=6, blocks=6), "1f1b", (1, 3)),
    (Case("conv and norm", batch=11, blocks=4, evaluate=True), "zb-h1", (4, 1, 2)),
    (Case("gpt", batch=8, micro_batches=4, blocks=4, tied="eager"), "gpipe", (1, 2, 1)),
    (Case("gpt", batch=15, micro_batches=8, blocks=4, evaluate=True), "zb-planned", (2, 1)),
    (Case("conv and norm", batch=11, blocks=4, evaluate=True), "zb-planned", (1, 2)),
    (Case("gpt", batch=15, micro_batches=8, blocks=4, evaluate=True), "zb-v", (1, 2)),
]
ALL_UNLIKE = [
    *UNLIKE,
    (Case("conv and norm", batch=11, blocks=4, optimizer="sgd", evaluate=True), "1f1b", (1, 4)),
    (Case("gpt", precision="bf16", batch=12, micro_batches=12, blocks=6), "zb-h2", (3, 1, 6)),
    (Case("gpt", bits="fast", batch=16, micro_batches=8, blocks=8), "1f1b", (2, 8, 1)),
    (Case("skips", batch=16, micro_batches=8, blocks=8, evaluate=True), "1f1b", (2, 1, 4)),
    (Case("thrice", tied="eager", batch=11, blocks=4), "zb-h1", (2, 4)),
    (Case("traps", precision="bf16", optimizer="sgd", blocks=4), "1f1b", (2, 1)),
    (Case("gpt", batch=16, micro_batches=8, blocks=4), "zb-planned", (4, 2)),
    (Case("gpt", tied="eager", batch=16, micro_batches=8, blocks=8), "zb-planned", (2, 4, 1)),
    (Case("skips", batch=12, micro_batches=6, blocks=6, evaluate=True), "v-planned", (3, 1)),
    (Case("gpt", batch=16, micro_batches=8, blocks=2, tied="eager"), "v-half", (2, 1)),
    (Case("conv and norm", batch=16, micro_batches=8, blocks=4, evaluate=True), "interleaved", (1, 2)),
    (Case("thrice", batch=12, micro_batches=6, blocks=3), "interleaved-planned", (1, 3)),
]


@pytest.mark.parametrize(("case", "schedule", "copies"), full_but(UNLIKE, ALL_UNLIKE), ids=str)
@pytest.mark.slow
def test_unlike_numbers_of_copies_give_the_bits_of_one_rank(
    case: Case, schedule: str, copies: tuple[int, ...]
) -> None:
    got = train_local(case, sum(copies), schedule, window=16, copies=copies)
    assert differences(one_stage(case, 1), got) == []


EQUAL_SHARES = [  # (case, schedule, ranks, copies)
    (Case("gpt", batch=15, micro_batches=8, evaluate=True, reduce="fast"), "zb-v", 4, 2),
    (Case("conv and norm", batch=13, micro_batches=6, evaluate=True, reduce="fast"), "1f1b", 3, 3),
]
ALL_EQUAL_SHARES = [
    *EQUAL_SHARES,
    (Case("thrice", batch=12, micro_batches=6, tied="eager", reduce="fast"), "gpipe", 6, 6),
    (Case("gpt", bits="fast", batch=15, micro_batches=5, reduce="fast"), "1f1b", 5, 5),
]


@pytest.mark.parametrize(
    ("case", "schedule", "ranks", "copies"), full_but(EQUAL_SHARES, ALL_EQUAL_SHARES), ids=str
)
@pytest.mark.slow
def test_fast_copies_with_equal_shares_add_up_as_so_many_blocks(
    case: Case, schedule: str, ranks: int, copies: int
) -> None:
    got = train_local(case, ranks, schedule, window=16, copies=copies)
    assert differences(one_stage(replace(case, reduce="exact", blocks=copies), 1), got) == []


ANY_SHARES = [  # (case, schedule, copies of each stage, or of the one)
    (Case("gpt", batch=15, micro_batches=8, evaluate=True, reduce="fast"), "1f1b", (3,)),
    (Case("conv and norm", batch=11, micro_batches=5, evaluate=True, reduce="fast"), "1f1b", (2, 1)),
    (Case("thrice", batch=12, micro_batches=7, tied="eager", reduce="fast"), "gpipe", (1, 3)),
    (Case("conv and norm", batch=15, micro_batches=7, evaluate=True, reduce="fast"), "1f1b", (3, 2)),
    (Case("gpt", batch=12, micro_batches=6, evaluate=True, reduce="fast"), "zb-planned", (2, 3)),
]
ALL_ANY_SHARES = [
    *ANY_SHARES,
    (Case("gpt", batch=14, micro_batches=7, reduce="fast"), "zb-h1", (5,)),
    (Case("skips", batch=16, micro_batches=8, reduce="fast"), "zb-h1", (1, 6, 3)),
    (Case("gpt", tied="eager", batch=14, micro_batches=7, reduce="fast"), "zb-h2", (3, 1, 2)),
    (Case("skips", batch=16, micro_batches=8, reduce="fast"), "zb-v", (3, 2)),
]


@pytest.mark.parametrize(("case", "schedule", "copies"), full_but(ANY_SHARES, ALL_ANY_SHARES), ids=str)
@pytest.mark.slow
def test_fast_copies_of_any_number_train_as_one_but_for_rounding(
    case: Case, schedule: str, copies: tuple[int, ...]
) -> None:
    how = copies[0] if len(copies) == 1 else copies
    got = train_local(case, sum(copies), schedule, window=16, copies=how)
    for name in ("losses", "norms", *(["validation"] if case.evaluate else [])):
        found, expected = ([float.fromhex(x) for x in r[name]] for r in (got, one_stage(case, 1)))
        assert found == pytest.approx(expected, rel=1e-4), name


@pytest.mark.slow
def test_fast_copies_of_unlike_numbers_have_the_same_bits_each_time() -> None:
    case = Case("conv and norm", batch=15, micro_batches=7, steps=2, reduce="fast")
    first, second = (train_local(case, 5, "1f1b", window=16, copies=(3, 2)) for _ in range(2))
    assert differences(first, second) == []


# (case, schedule, copies of each stage, or of the one, nodes of the ranks); those with norms by SGD, as
# AdamW's first steps make large ones of gradients of which only rounding is left
BY_NODE = [
    (
        Case("conv and norm", batch=13, micro_batches=6, optimizer="sgd", evaluate=True, reduce="fast"),
        "1f1b",
        (5,),
        (0, 0, 0, 1, 1),
    ),
    (Case("gpt", batch=15, micro_batches=8, evaluate=True, reduce="fast"), "zb-h1", (3, 1), (0, 1, 1, 1)),
]
ALL_BY_NODE = [
    *BY_NODE,
    (
        Case("gpt", batch=14, micro_batches=7, tied="eager", reduce="fast"),
        "1f1b",
        (7,),
        (0, 0, 0, 1, 1, 2, 0),
    ),
    (
        Case("conv and norm", batch=12, micro_batches=6, steps=2, reduce="fast"),
        "zb-h1",
        (3, 6),
        (0, 1, 0, 1, 1, 1, 0, 0, 0),
    ),
    (Case("gpt", batch=12, micro_batches=6, reduce="fast"), "zb-v", (3,), (0, 0, 0, 0, 1, 1)),
]


@pytest.mark.parametrize(("case", "schedule", "copies", "nodes"), full_but(BY_NODE, ALL_BY_NODE), ids=str)
@pytest.mark.slow
def test_fast_copies_node_by_node_train_as_one_but_for_rounding(
    case: Case, schedule: str, copies: tuple[int, ...], nodes: tuple[int, ...]
) -> None:
    how = copies[0] if len(copies) == 1 else copies
    got = train_local(case, len(nodes), schedule, window=16, copies=how, nodes=nodes)
    for name in ("losses", "norms", *(["validation"] if case.evaluate else [])):
        found, expected = ([float.fromhex(x) for x in r[name]] for r in (got, one_stage(case, 1)))
        assert found == pytest.approx(expected, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "v-planned"])
def test_optimizer_state_is_on_one_copy_each(schedule: str) -> None:
    """Also where a rank has two stages, and weight gradients that wait."""
    case = Case("thrice", blocks=2)
    warm(case)

    def held(comm: Communicator) -> dict[str, int]:
        order = placement(schedule, 1)
        cuts = even_cuts(case.variants.graph.groups, len(order))
        plan = plan_of(case, schedule, cuts, order=order, copies=comm.size)
        trainer = Trainer(comm, case.variants, plan, case.settings, case.dataset)
        return {name: t.nbytes for name, t in trainer.optimizer_state().items()}

    whole, (first, second) = run_local(1, held)[0], run_local(2, held)
    assert first.keys().isdisjoint(second)
    assert first | second == whole
    n_stages = len(placement(schedule, 1))  # each is shared for itself
    assert abs(sum(first.values()) - sum(second.values())) <= n_stages * max(whole.values())


@pytest.mark.parametrize(("ranks", "copies"), [(2, 2), (4, 2), (4, 4), (3, (2, 1))], ids=str)
@pytest.mark.slow
def test_each_copy_reads_the_samples_of_its_own_micro_batches(ranks: int, copies: Copies) -> None:
    case = Case("gpt", batch=15, micro_batches=8, blocks=4)
    warm(case)

    class Noting(SyntheticTokens):
        def __init__(self) -> None:
            super().__init__(32, 16, SEED)
            self.asked = set[int]()

        def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
            if step == 0 and split == "train":
                self.asked.update(range(start, stop))
            return super().batch(split, step, start, stop, keys)

    def body(comm: Communicator) -> tuple[set[int], set[int]]:
        order = range(ranks_in_each(copies, ranks))
        cuts = even_cuts(case.variants.graph.groups, len(order))
        plan = plan_of(case, "1f1b", cuts, order=order, copies=copies)
        data = Noting()
        trainer = Trainer(comm, case.variants, plan, case.settings, data)
        trainer.step(0)
        bounds, own = split_evenly(case.batch, case.micro_batches), trainer.program.share_on(comm.rank)
        return data.asked, {sample for micro in own for sample in range(*bounds[micro])}

    found = run_local(ranks, body)
    assert all(asked == own for asked, own in found)
    assert set().union(*(asked for asked, _ in found)) == set(range(case.batch))
    assert min(len(asked) for asked, _ in found) <= -(-case.batch // most_copies(copies))


@pytest.mark.slow
def test_a_step_of_copies_that_is_refused_leaves_all_as_it_was() -> None:
    """The bad sample is seen by copy 1 alone."""
    case = Case("conv and norm", blocks=2)
    warm(case)

    class Bad(SyntheticVectors):
        def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
            found = super().batch(split, step, start, stop, keys)
            if step == 1 and stop == case.batch and "x" in found:
                found["x"][-1] = math.nan
            return found

    def body(comm: Communicator) -> tuple[str, bool]:
        data = Bad(SIDE * SIDE, CLASSES, 64, SEED)
        trainer = Trainer(
            comm, case.variants, plan_of(case, "1f1b", (), copies=2), case.settings, data
        )  # fmt: skip
        trainer.step(0)
        before = {name: tensor_digest(name, t) for name, t in trainer.state_dict().items()}
        with pytest.raises(MpipipeError) as error:
            trainer.step(1)
        after = {name: tensor_digest(name, t) for name, t in trainer.state_dict().items()}
        return str(error.value), before == after

    (said, same), other = run_local(2, body)
    assert (said, same) == other
    assert same
    assert "holds nan in sample 7 of the batch, in micro-batch 3 (stage 0, rank 1)" in said


@pytest.mark.parametrize(("schedule", "ranks", "copies"), [("zb-h1", 2, 1), ("zb-h2", 3, 1), ("zb-h1", 4, 2)])
@pytest.mark.slow
def test_kernels_add_to_the_sum_of_one_block(schedule: str, ranks: int, copies: int) -> None:
    """Micro-batches so large that the head adds to its gradient more than once in each, and a backward in two
    comes to the next block before the weight gradients of this one."""
    case = Case("gpt, no dropout", bits="fast", batch=128, micro_batches=4, blocks=2)
    got = train_local(case, ranks, schedule, window=16, copies=copies)
    assert differences(one_stage(case, 1), got) == []


@pytest.mark.parametrize("window", [1, 16])
@pytest.mark.slow
def test_the_receive_window_changes_no_bits(window: int) -> None:
    case = Case("gpt", tied="eager")
    assert differences(one_stage(case, 1), train_local(case, 4, window=window)) == []


@pytest.mark.slow
def test_what_decides_bits_can_be_seen_to_do_so() -> None:
    """The comparison above is able to fail: every field of a case changes the result."""
    base = one_stage(Case("gpt"), 1)
    for other in (
        Case("gpt", tied="eager"),
        Case("gpt", precision="bf16"),
        Case("gpt", batch=7),
        Case("gpt", micro_batches=2),
        Case("gpt", blocks=2),
        Case("gpt", clip=0.06),
        Case("gpt", optimizer="sgd"),
        Case("gpt", bits="fast"),
    ):
        assert differences(base, one_stage(other, 1)) != [], str(other)


# -- random cuts ---------------------------------------------------------------------------------------


def first_step(comm: Communicator, case: Case, cuts: tuple[str, ...]) -> dict[str, str]:
    """Loss, every gradient (SGD's momentum buffer holds it after one step) and every weight."""
    set_threads(1)
    trainer = Trainer(comm, case.variants, plan_of(case, "1f1b", cuts), case.settings, case.dataset)
    outcome = trainer.step(0)
    found = {name: tensor_digest(name, t) for name, t in trainer.state_dict().items()}
    found |= {name: tensor_digest(name, g) for name, g in trainer.optimizer_state().items()}
    found["loss"] = (outcome.loss / outcome.weight).hex()
    return {k: v for part in comm.allgather_object(found) for k, v in part.items()}


@pytest.mark.parametrize(
    ("model", "n"),
    full_but(
        [("gpt", 6), ("traps", 8)],
        [("gpt", 6), ("gpt, untied", 5), ("skips", 12), ("thrice", 8), ("traps", 8)],
    ),
)
@pytest.mark.slow
def test_random_cuts_give_the_loss_and_gradients_of_one_stage(model: str, n: int) -> None:
    case = Case(model, optimizer="sgd", clip=None, batch=4, micro_batches=2)
    groups, draw = case.variants.graph.groups, random.Random(SEED)
    warm(case)
    expected = run_local(1, lambda comm: first_step(comm, case, ()))[0]
    trained = [n for n, p in case.variants.source.params.items() if p.requires_grad and "unused" not in n]
    assert {f"{n}/momentum_buffer" for n in trained} < set(expected)
    for _ in range(n):
        n_stages = draw.randint(2, 4)
        cuts = tuple(groups[i] for i in sorted(draw.sample(range(1, len(groups)), n_stages - 1)))
        got = run_local(n_stages, lambda comm, cuts=cuts: first_step(comm, case, cuts))[0]
        assert {k for k in expected | got if expected.get(k) != got.get(k)} == set(), cuts


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize(
    "case",
    [Case("gpt", tied="eager", batch=7, evaluate=True), Case("thrice", batch=11), Case("skips")],
    ids=str,
)
@pytest.mark.slow
def test_whatever_rank_holds_a_stage_the_bits_are_those_of_one(case: Case, order: tuple[int, ...]) -> None:
    assert differences(one_stage(case, 1), train_local(case, 3, order=order)) == []


@pytest.mark.full  # tests/mpi says it of real ranks
def test_ranks_that_capture_for_themselves_agree() -> None:
    """As real ranks do: nothing is shared between the threads but the messages."""
    case = Case("gpt, no dropout")

    def body(comm: Communicator) -> tuple[str, dict[str, object]]:
        variants = capture(case.model, case.rows)
        return variants.graph.hash, train(comm, case, variants=variants)

    (hash_0, result), (hash_1, _) = run_local(2, body)
    assert hash_0 == hash_1 == case.variants.graph.hash
    assert differences(one_stage(case, 1), result) == []


@pytest.mark.slow
def test_frozen_and_unused_parameters_keep_their_first_bits() -> None:
    source = Case("thrice").variants.source
    names = ["unused.weight", "unused.bias", "frozen.weight", "frozen.bias", "head.bias"]
    before = {n: tensor_digest(n, t) for n, t in source.materialise(names).items()}
    after = one_stage(Case("thrice"), 1)["weights"]
    assert [n for n in names if before[n] != after[n]] == ["head.bias"]
