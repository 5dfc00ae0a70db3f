"""Copies of the pipeline: which numbers are exact, what they send, what they take, and where they are put."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planner_cases import HUGE, cluster, uniform

from mpipipe.errors import PlanError
from mpipipe.planner import StageTie, lower, make_plan, predict, program_for, prove
from mpipipe.planner.asked import Asked, Replicas, check_groups, copies_of
from mpipipe.planner.copies import (
    Copies,
    block_sums,
    block_sums_bytes,
    check_copies,
    even_blocks,
    legal_copies,
    placements,
    shard,
    stages_in,
)
from mpipipe.planner.exchange import (
    BUCKET_BYTES,
    BUCKETS_AHEAD,
    Exchange,
    exchange_of,
    owners_for,
    partners,
    sums_held,
)
from mpipipe.planner.joint import search
from mpipipe.planner.prediction import expect_plan, sizes_of_messages
from mpipipe.planner.schedules import SCHEDULES, build, in_copies, stages_on
from mpipipe.planner.search import plan_of
from mpipipe.planner.walk import match
from mpipipe.values import Costs, Layout, Link, Numerics, Op, Program, Tie, share_of

TIE = (StageTie(0, (1,), 100),)


def numerics(n_micro: int, blocks: int, tied: str = "per_use", bits: str = "torch") -> Numerics:
    return Numerics(4 * n_micro, 4, n_micro, blocks, 1, bits, "mkl", "fp32", tied, {}, "2", "x", 0)


def fast(n_micro: int) -> Numerics:
    return dataclasses.replace(numerics(n_micro, 1), reduce="fast")


def names(costs: Costs) -> list[str]:
    return [g.name for g in costs.groups]


def copied(
    schedule: str, n_ranks: int, n_copies: int, n_micro: int, tied: str = "per_use",
    nodes: tuple[int, ...] = (),
) -> Program:  # fmt: skip
    one = build(schedule, stages_on(schedule, n_ranks), n_micro // n_copies, n_ranks)
    copies = [[rank + copy * n_ranks for rank in one.rank_of_stage] for copy in range(n_copies)]
    order = dataclasses.replace(in_copies([one] * n_copies, copies), nodes=nodes)
    return lower(order, TIE if one.n_stages > 1 else (), tied, 16)


# -- which there may be ------------------------------------------------------------------------------------


def sum_of_blocks(first: int, end: int) -> str:
    """How a binary counter adds blocks up, in brackets."""
    levels: dict[int, str] = {}
    for block in range(first, end):
        level, total = 0, str(block)
        while level in levels:
            level, total = level + 1, f"({levels.pop(level)}{total})"
        levels[level] = total
    total = ""
    for level in sorted(levels):
        total = f"({levels[level]}{total})" if total else levels[level]
    return total


def test_legal_copies_are_those_whose_sums_are_whole_sub_trees() -> None:
    for blocks in range(1, 33):
        for n in range(1, blocks + 1):
            each = blocks // n
            parts = [sum_of_blocks(c * each, (c + 1) * each) for c in range(n)] if blocks % n == 0 else []
            whole = all(part in sum_of_blocks(0, blocks) for part in parts) and each & (each - 1) == 0
            assert (n in legal_copies(numerics(blocks, blocks))) == (n == 1 or (bool(parts) and whole)), (
                blocks,
                n,
            )
    assert legal_copies(numerics(12, 6)) == (1, 3, 6)
    assert legal_copies(numerics(8, 8)) == (1, 2, 4, 8)
    assert legal_copies(fast(5)) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("n_copies", "n_ranks", "words"),
    [
        (2, 2, "2 replicas with pipeline.blocks = 1: .* use 1;"),
        (3, 6, "3 replicas with pipeline.blocks = 4: .* use 1 or 2 or 4;"),
        (2, 3, "2 replicas on 3 ranks: each has as many ranks as the others; start 2 or 4 ranks, or use 1$"),
        (3, 4, "3 replicas on 4 ranks: each has as many ranks as the others; use 1 or 2 or 4$"),
        (4, 2, "4 replicas on 2 ranks: .* start 4 ranks, or use 1 or 2$"),
    ],
)
def test_other_numbers_are_refused_naming_the_legal_ones(n_copies: int, n_ranks: int, words: str) -> None:
    blocks = 1 if "blocks = 1" in words else 4
    with pytest.raises(PlanError, match=words):
        check_copies(n_copies, n_ranks, numerics(12, blocks))


@pytest.mark.parametrize(
    ("n_copies", "n_ranks", "n_micro", "words", "to_do"),
    [
        (
            3, 3, 8, "a multiple of 3 for pipeline.micro_batches, such as 6 or 9, with pipeline.blocks=3 (3 "
            "does not divide 8), or pipeline.reduce=fast, where any number will do", [(6, 3), (9, 3)],
        ),
        (8, 8, 4, "such as 8, with pipeline.blocks=8 (8 does not divide 4), or", [(8, 8)]),
        (
            3, 6, 24, "before the first step of a run, pipeline.blocks=3 or 6 or 12 or 24 (auto gives 6 for "
            "pipeline.max_ranks=6), or pipeline.reduce=fast",
            [(24, 3), (24, 6), (24, 12), (24, 24), (24, even_blocks(24, 48, 6))],
        ),
        (3, 15, 15, "pipeline.blocks=3, or pipeline.reduce=fast", [(15, 3)]),  # of auto it were 15
        ((2, 1), 3, 12, "a run, pipeline.blocks=2 or 4, or pipeline.reduce=fast", [(12, 2), (12, 4)]),
        ((4, 2), 6, 8, "a run, pipeline.blocks=4 or 8 (auto gives", [(8, 4), (8, 8)]),
    ],
)  # fmt: skip
def test_what_is_said_to_allow_more_copies_does(
    n_copies: Copies, n_ranks: int, n_micro: int, words: str, to_do: list[tuple[int, int]]
) -> None:
    with pytest.raises(PlanError) as caught:
        check_copies(n_copies, n_ranks, numerics(n_micro, 1))
    assert words in str(caught.value)
    for micro_batches, blocks in to_do:
        check_copies(n_copies, n_ranks, numerics(micro_batches, blocks))


@pytest.mark.parametrize("copies", [(3, 2), (6, 2), (4, 3, 1)])
def test_numbers_that_no_blocks_allow_together_are_refused_as_a_whole(copies: Copies) -> None:
    assert not any({*copies} <= {*legal_copies(numerics(blocks, blocks))} for blocks in range(1, 49))
    for blocks in (1, 3, 12):
        with pytest.raises(PlanError, match=r"with pipeline\.reduce = exact: no pipeline\.blocks allow both"):
            check_copies(copies, sum(copies), numerics(12, blocks))
    check_copies((3, 1), 4, numerics(12, 3))


@pytest.mark.parametrize(
    ("copies", "n_ranks", "words"),
    [
        (7, 7, "7 replicas with pipeline.micro_batches = 6: each does one at least; use 6 at most"),
        (
            (5, 2), 7, r"replicas 5\+2 with pipeline.micro_batches = 6: there are 10 ways through them, .*; "
            "use pipeline.micro_batches=10 or more, or numbers that divide 5: 1 or 5$",
        ),
        (
            4,
            6,
            "4 replicas on 6 ranks: each has as many ranks as the others; start 4 or 8 ranks, or use 1 or 2 "
            "or 3 or 6$",
        ),
    ],
)  # fmt: skip
def test_fast_copies_have_work(copies: Copies, n_ranks: int, words: str) -> None:
    check_copies(5, 10, fast(6))
    check_copies((6, 3, 1), 10, fast(6))
    check_copies((3, 2, 1), 6, fast(6))
    with pytest.raises(PlanError, match=words):
        check_copies(copies, n_ranks, fast(6))


def test_copies_with_unlike_shares_take_as_long_as_the_largest_one() -> None:
    """Eight micro-batches on three ranks: three for the first of them."""
    costs = uniform(3, 3)
    plan, program = make_plan(costs, fast(8), "1f1b", 4, 3, 3)
    assert [len(program.share(copy)) for copy in range(3)] == [3, 3, 2]
    nine, _ = make_plan(costs, fast(9), "1f1b", 4, 3, 3)
    assert plan.prediction.step_s == nine.prediction.step_s
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s
    with pytest.raises(
        PlanError,
        match=r"8 micro-batches would have to be a multiple of 3; use pipeline.micro_batches=6 or 9, or",
    ):
        make_plan(costs, fast(8), "zb-planned", 4, 3, 3)


@pytest.mark.parametrize(("n_ranks", "copies"), [(4, 2), (3, (2, 1))])
def test_copies_on_more_ranks_than_there_are_costs_of_are_refused(n_ranks: int, copies: Copies) -> None:
    with pytest.raises(PlanError, match=f"{n_ranks} ranks, and the costs are of 2; plan for 2 at most"):
        make_plan(uniform(8, 2), fast(8), "1f1b", 4, n_ranks, copies)


@pytest.mark.parametrize("ranks", [((0,), (1,), (2,)), ((0, 2), (1, 3))])
def test_a_plan_that_was_edited_for_more_ranks_than_there_are_costs_of_is_refused(
    ranks: tuple[tuple[int, ...], ...],
) -> None:
    costs = uniform(8, 2)
    plan = make_plan(costs, fast(8), "1f1b", 4, 2)[0]
    cuts = tuple(costs.names[2 * s] for s in range(1, len(ranks)))
    layout = dataclasses.replace(plan.layout, cuts=cuts, ranks=ranks, recompute=())
    with pytest.raises(
        PlanError, match=f"{layout.n_ranks} ranks, and the costs are of 2; plan for 2 at most"
    ):
        expect_plan(dataclasses.replace(plan, layout=layout), costs)


def test_a_share_that_a_schedule_refuses_is_told_as_that_of_a_replica() -> None:
    """Three micro-batches go round three ranks, the two of the other copy do not."""
    said = (
        r"of pipeline\.micro_batches = 5 a replica has 2: schedule 'interleaved': 2 micro-batches on 3 ranks"
    )
    with pytest.raises(PlanError, match=said):
        make_plan(uniform(8, 6), fast(5), "interleaved", 4, 6, 2)


@pytest.mark.parametrize("blocks", [1, 2, 8, 12])
def test_sums_of_blocks_are_what_the_memory_model_holds(blocks: int) -> None:
    """Beside a weight and a gradient; without optimizer state."""
    levels = blocks.bit_length() if blocks > 1 else 0
    plain = uniform(4, 2, param_bytes=100)
    costs = dataclasses.replace(plain, bytes_per_param_byte=2.0 + levels, blocks=blocks)
    for n in legal_copies(numerics(24, blocks)):
        assert costs.but(copies=n).held_per_param_byte == 2.0 + block_sums(blocks, n, n)
    one = Layout(("g3",), ((0,), (1,)), "1f1b", 4)
    assert block_sums_bytes(costs, one, (3,)) == 300 * levels
    if 2 in legal_copies(numerics(24, blocks)):
        two = Layout(("g3",), ((0, 1), (2,)), "1f1b", 4)
        apart = 2 * (blocks // 2).bit_length() - 1  # of the stage that serves both copies
        assert block_sums_bytes(costs, two, (3,)) == max(300 * block_sums(blocks, 2, 2), 100 * apart)


@pytest.mark.parametrize(
    ("replicas", "blocks", "n_ranks", "words"),
    [
        ("auto", 4, 16, r"4 stages, .* start at most 12 ranks, as pipeline\.blocks = 4 "
                        r"allows 4 replicas at most; or, .* pipeline\.blocks=auto and .*\.max_ranks=16"),
        ("auto", 4, 11, r"4 stages, .* cut into 3 parts at most; .*; start 10 or 12 ranks"),
        ("auto", 1, 5, r"5 stages, .* cut into 3 parts at most; .*; start at most 3 ranks, .*max_ranks=5$"),
        (2, 4, 8, r"4 stages, .* cut into 3 parts at most; .*; start at most 6 ranks, 3 for each replica, "),
        ((1, 1, 1, 1), 4, 4, r"4 stages, .* cut into 3 parts at most"),
    ],
)  # fmt: skip
def test_a_number_of_ranks_that_cannot_be_shared_names_those_that_can(
    replicas: Replicas, blocks: int, n_ranks: int, words: str
) -> None:
    copies = copies_of(replicas, numerics(16, blocks), n_ranks)
    asked = Asked(numerics(16, blocks), (16,), ("1f1b",), 4, n_ranks, copies, uneven=replicas == "auto")
    with pytest.raises(PlanError, match=words):
        check_groups(asked, 3)
    check_groups(asked, 16)


@pytest.mark.parametrize(
    ("replicas", "n_ranks", "n_groups", "words"),
    [
        ("auto", 4, 3, r"^8 stages, .* cut into 3 parts at most; .*; start at most 1 rank, "
                       r"or choose a schedule"),
        ("auto", 3, 5, r"^6 stages, .* cut into 5 parts at most; .*; start at most 2 ranks, or choose a"),
        ("auto", 3, 1, r"^6 stages, .* cut into 1 part at most; .*; choose a .* rank, "
                       r"and at most 1 rank, or"),
        (2, 4, 3, r"^4 stages, .* cut into 3 parts at most; .*; start at most 2 ranks, "
                  r"1 for each replica, or c"),
    ],
)  # fmt: skip
def test_two_stages_on_each_rank_are_counted(
    replicas: Replicas, n_ranks: int, n_groups: int, words: str
) -> None:
    blocks = 1 if replicas == "auto" else 4
    copies = copies_of(replicas, numerics(16, blocks), n_ranks)
    asked = Asked(numerics(16, blocks), (16,), ("zb-v",), 4, n_ranks, copies, uneven=replicas == "auto")
    with pytest.raises(PlanError, match=words):
        check_groups(asked, n_groups)
    check_groups(asked, 2 * n_ranks)
    check_groups(dataclasses.replace(asked, schedules=("1f1b", "zb-v")), n_ranks)


def test_unlike_numbers_of_copies_share_ranks_that_equal_ones_cannot() -> None:
    """7 = 4 + 2 + 1, on three stages."""
    asked = Asked(numerics(16, 4), (16,), ("1f1b",), 4, 7, (1,), uneven=True)
    check_groups(asked, 3)
    with pytest.raises(PlanError, match=r"3 stages, .* cut into 2 parts at most; .*; start 6 or 8 ranks"):
        check_groups(asked, 2)


def test_blocks_are_picked_for_the_ranks_that_may_come() -> None:
    assert [even_blocks(8, 32, n) for n in (1, 2, 3, 4, 12, 100)] == [1, 2, 2, 4, 8, 8]
    assert [even_blocks(6, 32, n) for n in (2, 4)] == [2, 2]
    assert even_blocks(None, 5, 64) == 4


@pytest.mark.parametrize("n_micro", [3, 6, 12, 15, 24, 40])
def test_blocks_that_are_picked_allow_as_many_replicas_as_the_ranks_share(n_micro: int) -> None:
    """Of 3 ranks three with 6 micro-batches, of 6 six; of a power of two of ranks those that it had."""
    for n_ranks in range(1, 65):
        blocks = even_blocks(n_micro, 100, n_ranks)
        assert blocks <= n_ranks
        assert n_micro % blocks == 0
        legal = legal_copies(numerics(n_micro, blocks))
        assert math.gcd(n_micro, n_ranks) in legal
    assert [even_blocks(n_micro, 100, 2**k) for k in range(7)] == [math.gcd(n_micro, 2**k) for k in range(7)]


def test_blocks_are_picked_for_ranks_that_are_no_power_of_two() -> None:
    assert [even_blocks(6, 32, n) for n in (3, 6, 9, 12)] == [3, 6, 6, 6]
    assert [even_blocks(12, 32, n) for n in (3, 5, 6, 12, 24)] == [3, 4, 6, 12, 12]
    assert [even_blocks(None, batch, 6) for batch in (30, 32)] == [6, 4], "micro-batches of one size"


def test_replicas_are_those_that_blocks_and_ranks_allow() -> None:
    assert copies_of("auto", numerics(12, 6), 12) == (1, 3, 6)
    assert copies_of("auto", numerics(12, 6), 4) == (1,)


def test_copies_share_the_micro_batches_evenly() -> None:
    for n_copies in range(1, 7):
        for n_micro in range(20):
            shares = [share_of(copy, n_copies, n_micro) for copy in range(n_copies)]
            assert [micro for share in shares for micro in share] == list(range(n_micro))
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1


# -- what they send ----------------------------------------------------------------------------------------


def test_two_copies_look_like_this() -> None:
    program = copied("1f1b", 2, 2, 2)
    texts = [" ".join(map(str, program.instrs(rank))) for rank in range(4)]
    assert texts == [
        "0F0 0SEND_ACT0->r1 0RECV_GRAD0<-r1 0B0 0SEND_SHARD->r2 0RECV_SHARD<-r2 0RECV_TIED<-r1 "
        "NORM 0STEP 0SEND_UPDATE->r2 0RECV_UPDATE<-r2 0SEND_COPY->r1",
        "1RECV_ACT0<-r0 1F0 1B0 1SEND_GRAD0->r0 1SEND_SHARD->r3 1RECV_SHARD<-r3 1SEND_TIED->r0 "
        "NORM 1STEP 1SEND_UPDATE->r3 1RECV_UPDATE<-r3 1RECV_COPY<-r0",
        "0F1 0SEND_ACT1->r3 0RECV_GRAD1<-r3 0B1 0SEND_SHARD->r0 0RECV_SHARD<-r0 "
        "NORM 0STEP 0SEND_UPDATE->r0 0RECV_UPDATE<-r0 0SEND_COPY->r3",
        "1RECV_ACT1<-r2 1F1 1B1 1SEND_GRAD1->r2 1SEND_SHARD->r1 1RECV_SHARD<-r1 "
        "NORM 1STEP 1SEND_UPDATE->r1 1RECV_UPDATE<-r1 1RECV_COPY<-r2",
    ]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 12, 15, 32])
def test_every_owner_gets_the_sum_of_all_copies_in_the_order_of_their_tree(n: int) -> None:
    """Played with brackets instead of numbers; then the owners' weights go back to all."""
    low, held_most = n & -n, 0
    sums = [{owner: sum_of_blocks(copy, copy + 1) for owner in range(n)} for copy in range(n)]
    trees = [dict[tuple[int, int], str]() for _ in range(n)]  # of the odd number that is left
    rounds = [list(partners(copy, n)) for copy in range(n)]
    assert all(len(of_copy) == low.bit_length() - 1 + n // low - 1 for of_copy in rounds)

    def add(copy: int, group: int, total: str) -> None:
        level = 0
        while (other := trees[copy].pop((level, group ^ 1), None)) is not None:
            total = f"({other}{total})" if group & 1 else f"({total}{other})"
            level, group = level + 1, group >> 1
        trees[copy][level, group] = total

    for bit in range(low.bit_length() - 1):
        before = [dict(of_copy) for of_copy in sums]
        for copy in range(n):
            other = rounds[copy][bit]
            assert rounds[other][bit] == copy
            for owner in owners_for(copy, other, n):
                first, second = sorted((copy, other))
                sums[copy][owner] = f"({before[first][owner]}{before[second][owner]})"
    for copy in range(n):
        add(copy, copy // low, sums[copy][copy])
        for other in rounds[copy][low.bit_length() - 1 :]:
            assert list(owners_for(copy, other, n)) == [copy]
            add(copy, other // low, sums[other][copy])
            held_most = max(held_most, len(trees[copy]))
        total = ""
        for _, part in sorted(trees[copy].items()):
            total = f"({part}{total})" if total else part
        assert total == sum_of_blocks(0, n)
    assert held_most == (sums_held(n) + 1 if n > low else 0)  # and the own one

    has = [{copy} for copy in range(n)]
    for turn in reversed(range(low.bit_length() - 1, len(rounds[0]))):  # of the odd number, in any order
        for copy in range(n):
            has[rounds[copy][turn]] |= set(owners_for(copy, rounds[copy][turn], n)) & {copy}
    for bit in reversed(range(low.bit_length() - 1)):
        before_round = [set(of_copy) for of_copy in has]
        for copy in range(n):
            given = set(owners_for(copy, rounds[copy][bit], n))
            assert given <= before_round[copy], "what it gives it has"
            has[rounds[copy][bit]] |= given
    assert all(of_copy == set(range(n)) for of_copy in has)


def test_most_bytes_go_to_the_nearest_copy() -> None:
    """Of 8 copies on two nodes of 4, one with all of 800 bytes sends 100 of them to the other node: with each
    owner for itself it would be 400."""
    costs = dataclasses.replace(uniform(8, 8, param_bytes=100), blocks=8)
    on = layout(costs, 1, 8)
    program = program_for(on, numerics(8, 8), (), names(costs))
    codes, sizes = program.codes[2], sizes_of_messages(costs, on, program)[2]
    for op, order in ((Op.SEND_SHARD, [3, 0, 6]), (Op.SEND_UPDATE, [6, 0, 3])):
        sent = codes[:, 0] == op
        assert codes[sent, 4].tolist() == order
        assert sizes[sent].tolist() == sorted([400, 200, 100], reverse=op == Op.SEND_SHARD)


def between_nodes(n: int, per_node: int) -> Fraction:
    """Of the gradients of one copy, how many times as many bytes all copies send to other nodes."""
    return sum(
        (Fraction(len(owners_for(other, copy, n)), n)
         for copy in range(n) for other in partners(copy, n) if copy // per_node != other // per_node),
        Fraction(),
    )  # fmt: skip


def test_a_power_of_two_of_copies_on_each_node_adds_up_before_anything_leaves_it() -> None:
    """Then each node sends what the owners on the others have of its sum, and no reduction sends less."""
    for k, nodes in itertools.product(range(4), (1, 2, 3, 4, 5, 6)):
        assert between_nodes(nodes << k, 1 << k) == nodes - 1


def test_three_copies_on_a_node_cannot_add_up_before_their_neighbours_in_the_tree() -> None:
    """Six copies on two nodes, added as ((01)(23))(45): copy 2 belongs to copy 3. Of the tree's sums an owner
    on the first node needs 3 and (45) from the other one, an owner there (01) and 2."""
    assert between_nodes(6, 3) == between_nodes(12, 6) == Fraction(7, 3)
    least, alone = 6 * Fraction(2, 6), 6 - 3
    assert least < between_nodes(6, 3) < alone


NODES = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple)


@pytest.mark.slow
@given(NODES)
@example((0, 0, 1))
@example((0, 0, 0, 1, 1, 1))
@example((0, 1, 0, 2, 1, 0))
@example((0, 0, 0, 0, 1, 1, 2))
def test_node_by_node_every_owner_gets_the_sum_of_all_copies_once(nodes: tuple[int, ...]) -> None:
    """Played with the numbers of the copies for their sums; then the owners' weights go back to all."""
    n, exchange = len(nodes), exchange_of(nodes)
    sums = [[Counter([copy]) for _ in range(n)] for copy in range(n)]  # by copy and owner
    has, between = [{copy} for copy in range(n)], list[int]()

    def shards(copy: int, other: int) -> dict[int, Counter[int]]:
        found = {owner: Counter(sums[copy][owner]) for owner in exchange.owners_for(other, copy)}
        assert all({*of} == {*exchange.parts(copy, other)} for of in found.values())
        between.append(len(found) * (nodes[copy] != nodes[other]))
        return found

    def add(copy: int, found: dict[int, Counter[int]]) -> None:
        for owner, of in found.items():
            sums[copy][owner].update(of)

    def weights(copy: int, other: int) -> set[int]:
        owners = {*exchange.owners_for(copy, other)}
        assert owners <= has[copy], "what it gives it has"
        return owners

    rounds = [list(exchange.partners(copy)) for copy in range(n)]
    assert all(copy in rounds[other] for copy in range(n) for other in rounds[copy])
    assert all(len({*of}) == len(of) for of in rounds), "a pair meets once"
    play(rounds, shards, add)
    assert all(sums[owner][owner] == Counter(range(n)) for owner in range(n))
    assert sum(between) == n * (len({*nodes}) - 1), "no reduction sends less"
    play([of[::-1] for of in rounds], weights, lambda copy, owners: has[copy].update(owners))
    assert all(of == {*range(n)} for of in has)


def play(rounds: list[list[int]], send: Callable[[int, int], Any], take: Callable[[int, Any], None]) -> None:
    """Each copy sends to its next partner, and waits for what that sends before it goes on."""
    sent, left = dict[tuple[int, int], Any](), [of[::-1] for of in rounds]
    moved = True
    while moved:
        moved = False
        for copy, to_come in enumerate(left):
            while to_come:
                other = to_come[-1]
                if (copy, other) not in sent:
                    sent[copy, other], moved = send(copy, other), True
                if (other, copy) not in sent:
                    break
                take(copy, sent[other, copy])
                to_come.pop()
    assert not any(left), "nobody waits for ever"


def test_where_halving_is_by_node_nothing_else_is_done() -> None:
    """So the bits are those of blocks."""
    for nodes in ((0,) * 6, (3, 1, 2), (0, 0, 1, 1, 2, 2), (0,) * 4 + (1,) * 4):
        exchange, n = exchange_of(nodes), len(nodes)
        assert not exchange.by_node
        assert [list(exchange.partners(c)) for c in range(n)] == [list(partners(c, n)) for c in range(n)]
        assert exchange.sums_held == sums_held(n)
    assert all(exchange_of(nodes).by_node for nodes in ((0, 0, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 2)))


def on_two_nodes(n: int, first: int, far: Link) -> Costs:
    """As many ranks, so many of them on the first of two nodes."""
    costs = uniform(n, n, param_bytes=600, step_s_per_byte=0.0)
    near = dataclasses.replace(
        cluster([1.0] * n, [HUGE] * n, Link(0.0, 1e6), far), node_of_rank=(0,) * first + (1,) * (n - first)
    )
    return dataclasses.replace(costs, cluster=near)


@pytest.mark.parametrize(("n", "first"), [(3, 2), (6, 3), (5, 3), (7, 4)])
def test_fast_copies_add_up_node_by_node(n: int, first: int) -> None:
    """Between nodes go the bytes that must. Where both nodes have several copies a step is shorter than by
    halving, with links that pairs of ranks do not share; else as long, but for what goes within a node."""
    costs = on_two_nodes(n, first, Link(0.0, 100.0))
    plan, program = make_plan(costs, fast(2 * n), "1f1b", 4, n, n)
    nodes = costs.cluster.node_of_rank
    assert plan.layout.nodes == program.nodes == nodes
    sizes = sizes_of_messages(costs, plan.layout, program)
    for op in (Op.SEND_SHARD, Op.SEND_UPDATE):
        away = [int(nbytes[(codes[:, 0] == op) & (np.array(nodes)[codes[:, 4]] != nodes[rank])].sum())
                for rank, (codes, nbytes) in enumerate(zip(program.codes, sizes, strict=True))]  # fmt: skip
        assert sum(away) == 600 * n  # of all weights, once
    halved = plan_of(costs, plan.numerics, dataclasses.replace(plan.layout, nodes=()))
    within_s = 0.01
    assert plan.prediction.step_s < halved.prediction.step_s + (within_s if n - first == 1 else 0.0)
    assert max(plan.prediction.peak_bytes) <= max(halved.prediction.peak_bytes)


def test_exact_copies_and_those_of_one_node_say_nothing_of_nodes() -> None:
    costs = dataclasses.replace(on_two_nodes(6, 3, Link(0.0, 100.0)), blocks=6)
    assert make_plan(costs, numerics(12, 6), "1f1b", 4, 6, 6)[0].layout.nodes == ()
    alone = on_two_nodes(6, 6, Link(0.0, 100.0))
    plan = make_plan(alone, fast(12), "1f1b", 4, 6, 6)[0]
    assert plan.layout.nodes == ()
    given = dataclasses.replace(plan.layout, nodes=(0, 0, 0, 1, 1, 1))
    with pytest.raises(PlanError, match=r"layout.nodes is \[0, 0, 0, 1, 1, 1\] with pipeline.reduce = exact"):
        program_for(given, numerics(12, 6), (), names(alone))
    with pytest.raises(PlanError, match=r"layout.nodes has 2 numbers, but the plan 6 ranks"):
        program_for(dataclasses.replace(given, nodes=(0, 1)), fast(12), (), names(alone))


@pytest.mark.parametrize("tied", ["per_use", "eager"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("nodes", [(0, 0, 1), (0, 1, 0, 2)])
def test_node_by_node_copies_need_no_buffering(schedule: str, nodes: tuple[int, ...], tied: str) -> None:
    """Of two ranks each, with one stage or two."""
    of_rank = tuple(node for node in nodes for _ in range(2))
    prove(copied(schedule, 2, len(nodes), 4 * len(nodes), tied, of_rank))


@pytest.mark.parametrize("tied", ["per_use", "eager"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("n_copies", [2, 3, 4])
def test_copies_need_no_buffering(schedule: str, n_copies: int, tied: str) -> None:
    program = copied(schedule, 2, n_copies, 4 * n_copies, tied)
    prove(program)
    match(program)
    ops = [codes[:, 0].tolist() for codes in program.codes]
    per_rank = program.n_stages // 2
    meetings = {2: 1, 3: 2, 4: 2}[n_copies]
    assert all(of_rank.count(op) == per_rank * meetings for of_rank in ops
               for op in (Op.SEND_SHARD, Op.RECV_SHARD, Op.SEND_UPDATE, Op.RECV_UPDATE))  # fmt: skip


def test_a_stage_begins_its_exchange_behind_its_last_backward_and_its_step() -> None:
    """Rank 0 holds the stages 0 and 2; each of four copies does two micro-batches, and meets two others."""
    text = " ".join(map(str, copied("interleaved", 2, 4, 8).instrs(0)))
    assert text[text.index("2B1") :] == (
        "2B1 2SEND_GRAD1->r1 2SEND_SHARD->r2 0RECV_GRAD0<-r1 0B0 0RECV_GRAD1<-r1 0B1 0SEND_SHARD->r2 "
        "2RECV_SHARD<-r2 2SEND_SHARD->r4 0RECV_SHARD<-r2 0SEND_SHARD->r4 2RECV_SHARD<-r4 0RECV_SHARD<-r4 "
        "0RECV_TIED<-r1 NORM 0STEP 0SEND_UPDATE->r4 2STEP 2SEND_UPDATE->r4 "
        "0RECV_UPDATE<-r4 0SEND_UPDATE->r2 2RECV_UPDATE<-r4 2SEND_UPDATE->r2 "
        "0RECV_UPDATE<-r2 2RECV_UPDATE<-r2 0SEND_COPY->r1"
    )


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "v-half"])
def test_only_the_stage_that_ends_last_is_waited_for(schedule: str) -> None:
    """A rank has two stages, whose shards take half a second each: one of them is on its way while the other
    one's last backward is done, and one's updated weights while the other one's update is."""
    costs = dataclasses.replace(
        uniform(8, 4, step_s_per_byte=0.01, param_bytes=50),
        cluster=cluster([1.0] * 4, [HUGE] * 4, Link(0.0, 100.0)), blocks=2,
    )  # fmt: skip
    order = build(schedule, 4, 4, 2).rank_of_stage
    on = Layout(("g2", "g4", "g6"), tuple((rank, rank + 2) for rank in order), schedule, 16)
    program = program_for(on, numerics(8, 2), (), names(costs))
    _, timeline = predict(costs, on, program)
    for codes, times in zip(program.codes, timeline.times, strict=True):
        ends = {op: times[codes[:, 0] == op, 1].max(initial=0.0) for op in Op}
        assert ends[Op.RECV_SHARD] - max(ends[Op.B], ends[Op.W]) == pytest.approx(0.5)
        assert ends[Op.RECV_UPDATE] - ends[Op.STEP] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "v-half"])
def test_later_rounds_of_gradients_begin_while_a_rank_computes_another_stage(schedule: str) -> None:
    """Four copies meet twice, with shards that take half a second and a quarter of one: of the stage that
    ends first both rounds are over when the other one ends. A round begins between two computations, or when
    its rank waits and the one before has come."""
    costs = dataclasses.replace(
        uniform(16, 8, param_bytes=25), cluster=cluster([1.0] * 8, [HUGE] * 8, Link(0.0, 100.0)), blocks=4
    )
    order = build(schedule, 4, 4, 2).rank_of_stage
    ranks = tuple(tuple(rank + 2 * copy for copy in range(4)) for rank in order)
    on = Layout(("g4", "g8", "g12"), ranks, schedule, 16)
    program = program_for(on, numerics(16, 4), (), names(costs))
    _, timeline = predict(costs, on, program)
    for codes, times in zip(program.codes, timeline.times, strict=True):
        ops, stage = codes[:, 0], codes[:, 1]
        works = np.isin(ops, [Op.F, Op.B, Op.I, Op.W])
        end = times[works, 1].max()
        assert times[ops == Op.RECV_SHARD, 1].max() - end == pytest.approx(0.75)
        first, last = (int(stage[ops == Op.SEND_SHARD][n]) for n in (0, 1))
        assert first != last
        early, late = (times[(ops == Op.SEND_SHARD) & (stage == s)] for s in (first, last))
        assert early[0][0] + 0.5 <= early[1][0]
        left = times[works & (times[:, 0] >= early[0][0])]  # what is computed then
        assert early[1][0] < end or len(left) == 1
        assert early[1][0] in left, "not within a computation"
        assert late[1] == pytest.approx([end + 0.5] * 2)


def layout(costs: Costs, n_stages: int, n_copies: int) -> Layout:
    cuts = tuple(f"g{i * len(costs.groups) // n_stages}" for i in range(1, n_stages))
    return Layout(
        cuts, tuple(tuple(s + c * n_stages for c in range(n_copies)) for s in range(n_stages)), "1f1b", 4
    )


def test_bytes_and_memory_are_those_of_the_closed_formulas() -> None:
    """Each of R copies sends (R - 1) / R of its gradients, and of its weights; its state is 1 / R."""
    params, state, blocks, groups = 1200, 2.0, 4, 4
    costs = dataclasses.replace(
        uniform(groups, 4, param_bytes=params), bytes_per_param_byte=2.0 + state + 3,
        state_bytes_per_param_byte=state, blocks=blocks,
    )  # fmt: skip
    for n_stages, n_copies in ((2, 1), (2, 2), (1, 4)):
        on = layout(costs, n_stages, n_copies)
        program = program_for(on, numerics(8, blocks), (), names(costs))
        stage = params * groups // n_stages
        for codes, sizes in zip(program.codes, sizes_of_messages(costs, on, program), strict=True):
            for op in (Op.SEND_SHARD, Op.SEND_UPDATE):
                assert sizes[codes[:, 0] == op].sum() == stage * (n_copies - 1) // n_copies
        levels = 3 if n_copies == 1 else int(math.log2(blocks // n_copies))
        held = stage * (2 + levels + state / n_copies)
        coming = int(math.log2(n_copies)) * stage / n_copies
        assert set(predict(costs, on, program)[0].peak_bytes) == {held + coming}


def test_of_large_sums_a_few_buckets_are_there_at_a_time() -> None:
    """And of an odd number of copies one message, that waits for its neighbour in the tree of the sums."""
    for n_copies, waiting in ((2, 0), (3, 1), (4, 0), (6, 1)):
        shard = BUCKETS_AHEAD * BUCKET_BYTES * 3
        costs = dataclasses.replace(uniform(n_copies, n_copies, param_bytes=shard), blocks=n_copies)
        on = layout(costs, 1, n_copies)
        program = program_for(on, numerics(n_copies, n_copies), (), names(costs))
        held = predict(costs, on, program)[1].memory_bytes[0]
        ops = program.codes[0][:, 0].tolist()
        exchange = held[ops.index(Op.SEND_SHARD) : ops.index(Op.NORM)]
        assert exchange.max() - held[0] == BUCKETS_AHEAD * BUCKET_BYTES + waiting * shard
        assert held[ops.index(Op.NORM)] == held[0]


def test_the_update_is_shared_and_gradients_take_their_time_on_the_link() -> None:
    link = Link(0.0, 100.0)
    costs = uniform(4, 2, step_s_per_byte=0.01, param_bytes=100)
    costs = dataclasses.replace(costs, cluster=cluster([1.0] * 2, [HUGE] * 2, link), blocks=2)
    plan, program = make_plan(costs, numerics(8, 2), "1f1b", 4, 2, 2)
    assert plan.layout.ranks == ((0, 1),)
    work_s, update_s, each_way_s = 4 * 4 * 3.0, 400 * 0.01 / 2, 200 / 100.0
    assert plan.prediction.step_s == pytest.approx(work_s + each_way_s + update_s + each_way_s)
    assert plan.prediction.lower_bound_s == pytest.approx(work_s + update_s)
    assert program.share(1) == range(4, 8)


@pytest.mark.parametrize("tied", ["per_use", "eager"])
def test_sums_of_other_uses_go_to_copy_0_unless_each_micro_batch_has_merged_them(tied: str) -> None:
    """Stages 0 and 3 of a V are on one rank: no message is between them."""
    costs = uniform(4, 4, param_bytes=10)
    costs = dataclasses.replace(costs, ties=(Tie("w", 6, (0, 3)),), blocks=2)
    on = Layout(("g1", "g2", "g3"), ((0, 2), (1, 3), (1, 3), (0, 2)), "zb-v", 4)
    program = program_for(on, numerics(8, 2, tied), costs.ties, names(costs))
    assert not any((codes[:, 0] == Op.SEND_TIED).any() for codes in program.codes)
    codes, sizes = program.codes[2], sizes_of_messages(costs, on, program)[2]
    sent = {stage: sizes[(codes[:, 0] == Op.SEND_SHARD) & (codes[:, 1] == stage)].sum() for stage in (0, 3)}
    assert sent == {0: 10, 3: 10 - 6 + (6 if tied == "per_use" else 0)}


# -- which are chosen --------------------------------------------------------------------------------------


def test_the_search_copies_the_pipeline_where_that_is_faster() -> None:
    """Without weights copies have no price, and no bubble; with heavy ones on slow links they lose."""
    for param_bytes, expected in ((0, 4), (10_000, 1)):
        costs = uniform(8, 4, param_bytes=param_bytes)
        costs = dataclasses.replace(costs, cluster=cluster([1.0] * 4, [HUGE] * 4, Link(0.0, 100.0)), blocks=4)
        asked = Asked(numerics(8, 4), (8,), ("1f1b",), 4, 4, copies_of("auto", numerics(8, 4), 4))
        found = search(asked, lambda _, costs=costs: costs)
        assert found.plan.layout.n_copies == expected
        assert {t.copies for t in found.tried} == {1, 2, 4}
        assert found.bound_s <= found.plan.prediction.step_s


@pytest.mark.parametrize(("most", "refines"), [(16, True), (15, False)])
def test_what_all_copies_do_decides_whether_cuts_next_to_the_first_are_simulated(
    monkeypatch: pytest.MonkeyPatch, most: int, refines: bool
) -> None:
    """Two stages, two copies with four micro-batches each."""
    tried: list[object] = []
    monkeypatch.setattr("mpipipe.planner.search.REFINE_WORK", most)
    monkeypatch.setattr("mpipipe.planner.search.least_of", lambda *_: tried.append(0) or 0.0)
    costs = uniform(8, 4)
    make_plan(costs, numerics(8, 2), "1f1b", 4, 4, 2)
    assert bool(tried) == refines


def test_whose_shards_are_in_a_message_is_found_once_for_all_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    find, costs = Exchange.owners_for, uniform(8, 4, param_bytes=100)
    monkeypatch.setattr(Exchange, "owners_for", lambda *given: asked.append(given) or find(*given))
    program = program_for(layout(costs, 2, 2), numerics(8, 2), (), names(costs))
    sizes = []
    for cut in (3, 4, 3):
        cuts = dataclasses.replace(layout(costs, 2, 2), cuts=(names(costs)[cut],))
        sizes.append([s.tolist() for s in sizes_of_messages(costs, cuts, program)])
    assert sizes[0] == sizes[2] != sizes[1]
    assert len(asked) == sum(int((codes[:, 0] >= Op.SEND_SHARD).sum()) for codes in program.codes)


def test_the_copies_of_a_stage_come_together_where_that_is_faster() -> None:
    """Two nodes of two ranks: what is heavy, activations or gradients, stays within a node."""
    assert placements((0, 1), 2, True) == [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    near, far = Link(0.0, 1e6), Link(0.0, 100.0)
    for sizes, expected in (
        ({"act_bytes": 100, "grad_bytes": 100, "param_bytes": 1}, ((0, 2), (1, 3))),
        ({"act_bytes": 1, "grad_bytes": 1, "param_bytes": 1000}, ((0, 1), (2, 3))),
    ):
        costs = uniform(2, 4, **sizes)
        costs = dataclasses.replace(costs, cluster=cluster([1.0] * 4, [HUGE] * 4, near, far), blocks=2)
        plan, _ = make_plan(costs, numerics(8, 2), "1f1b", 4, 4, 2)
        assert plan.layout.ranks == expected


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (((0, 1, 2), ()), "each stage must be on one rank for each of its copies"),
        (((0, 1, 2), (3, 4)), r"replicas 3\+2 .* no pipeline\.blocks allow both"),
        (((0, 1), (1, 0)), "each copy have ranks of its own"),
        (((0, 2), (1, 4)), "ranks 0 to 3 must hold a stage"),
    ],
)
def test_ranks_that_are_no_copies_are_refused(ranks: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        program_for(Layout(("g1",), ranks, "1f1b", 4), numerics(4, 2), (), ["g0", "g1", "g2"])


def test_a_large_parameter_is_one_copys_and_a_tied_one_the_firsts() -> None:
    assert shard({"a": 5, "b": 7, "c": 3, "d": 4}, {"c"}, 2) == {"c": 0, "b": 1, "a": 0, "d": 1}
    costs = uniform(4, 4, param_bytes=10, step_s_per_byte=0.1)
    large = dataclasses.replace(costs.groups[1], param_bytes=90)
    costs = dataclasses.replace(
        costs, groups=(costs.groups[0], large, *costs.groups[2:]), ties=(Tie("w", 10, (0, 3)),),
        state_bytes_per_param_byte=2.0, blocks=4,
    )  # fmt: skip
    stages = stages_in(costs, layout(costs, 1, 4), ())
    assert [stage.shard_bytes for stage in stages] == [10, 90, 10, 0]
    assert [stage.step_s for stage in stages] == pytest.approx([1.0, 9.0, 1.0, 0.0])
    held = [stage.fixed_bytes for stage in stages]
    assert [more - held[3] for more in held] == [20, 180, 20, 0]
    program = program_for(layout(costs, 1, 4), numerics(8, 4), costs.ties, names(costs))
    sent = sizes_of_messages(costs, layout(costs, 1, 4), program)[0]
    ops = program.codes[0][:, 0]
    assert sent[ops == Op.SEND_SHARD].tolist() == [90, 10]  # for copies 1 and 3, then for 2
    assert sent[ops == Op.SEND_UPDATE].tolist() == [10, 10 + 10]  # its own, then with that of copy 2
    assert sent[ops == Op.RECV_UPDATE].tolist() == [10, 90]


def test_a_tied_parameter_is_held_once_by_a_rank_that_has_its_owner() -> None:
    """Stages 0 and 3 of a V are on rank 0; apart, the user has a weight of its own, and both a gradient."""
    costs = dataclasses.replace(uniform(4, 4, param_bytes=10), ties=(Tie("w", 10, (0, 3)),))
    of_v, apart = (
        Layout(names(costs)[1:], ranks, schedule, 4)
        for ranks, schedule in ((((0,), (1,), (1,), (0,)), "zb-v"), (((0,), (1,), (2,), (3,)), "1f1b"))
    )
    together, own = ([s.fixed_bytes for s in stages_in(costs, which, (1, 2, 3))] for which in (of_v, apart))
    assert [a - b for a, b in zip(own, together, strict=True)] == [0, 0, 0, 10]


@pytest.mark.parametrize(
    ("memory", "expected"),
    [((100, HUGE, 100, HUGE), ((0, 2), (1, 3))), ((100, 100, HUGE, HUGE), ((0, 1), (2, 3)))],
)
def test_copies_are_where_they_fit(memory: tuple[int, ...], expected: tuple[tuple[int, int], ...]) -> None:
    """The heavy stage in the memory that there is, beside each other or apart."""
    costs = uniform(2, 4)
    heavy = dataclasses.replace(costs.groups[1], param_bytes=1000)
    machine = cluster([1.0] * 4, list(memory), Link(0.0, 1e6), Link(0.0, 1e5))
    costs = dataclasses.replace(costs, groups=(costs.groups[0], heavy), cluster=machine, blocks=2)
    assert make_plan(costs, numerics(8, 2), "1f1b", 4, 4, 2)[0].layout.ranks == expected
