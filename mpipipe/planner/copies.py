"""How many copies of the pipeline there may be, and on which ranks they are.

Exact copies: the gradients of micro-batches are added in `blocks` equal blocks, these by a fixed binary tree
(`Numerics`). A copy does whole blocks, and what it adds up must be one whole sub-tree: the copies divide the
blocks, and each has a power of two of them. So the bits are those of any other number of copies.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mpipipe.errors import PlanError
from mpipipe.planner.sizes import counted
from mpipipe.planner.stages import bounds, in_order, own_bytes, stage_costs
from mpipipe.values import Cluster, Costs, Layout, Numerics, StageCost

Order = tuple[int, ...]  # the rank of each stage
Name = TypeVar("Name", bound=Hashable)


def legal_copies(blocks: int) -> tuple[int, ...]:
    """Ascending."""
    return tuple(n for n in range(1, blocks + 1) if n == 1 or _whole_sub_trees(n, blocks))


def _whole_sub_trees(n_copies: int, blocks: int) -> bool:
    each, left = divmod(blocks, n_copies)
    return left == 0 and each & (each - 1) == 0


def check_copies(n_copies: int, n_ranks: int, numerics: Numerics) -> None:
    """Raises PlanError where so many copies would have other bits, or do not share the ranks evenly."""
    legal = legal_copies(numerics.blocks)
    if n_copies not in legal:
        raise PlanError(
            f"{counted(n_copies, 'replica')} with pipeline.blocks = {numerics.blocks}: each must own a whole "
            f"sub-tree of the blocks' sum; use {' or '.join(map(str, legal))}, or as many blocks "
            f"as {n_copies} or a power of two times that, which must divide micro_batches = "
            f"{numerics.micro_batches}"
        )
    if n_ranks % n_copies:
        near = sorted({max(1, n_ranks // n_copies) * n_copies, -(-n_ranks // n_copies) * n_copies})
        raise PlanError(
            f"{counted(n_copies, 'replica')} on {counted(n_ranks, 'rank')}: each has equally many; start "
            f"{' or '.join(map(str, near))} ranks"
        )


def check_order(layout: Layout) -> None:
    """Raises PlanError for stages that are not on one rank of each copy, copies that share ranks, or ranks
    that are not 0, 1, ..."""
    n_stages = len(layout.cuts) + 1
    if layout.n_stages != n_stages:
        raise PlanError(
            f"{n_stages} stages by layout.cuts, but layout.ranks has {layout.n_stages}; "
            "make them fit each other"
        )
    if len(layout.recompute) not in (0, n_stages):
        raise PlanError(
            f"{n_stages} stages by layout.cuts, but layout.recompute has {len(layout.recompute)}; give a "
            "mode for each, or none at all"
        )
    ranks = [list(on) for on in layout.ranks]
    if len({len(on) for on in ranks}) > 1 or not ranks[0]:
        raise PlanError(
            f"layout.ranks is {ranks}; the pipeline is copied as a whole: each stage must be on equally many "
            "ranks, one for each copy, such as [[0, 2], [1, 3]]"
        )
    of_copies = [rank for order in layout.copies for rank in set(order)]
    if sorted(of_copies) != list(range(layout.n_ranks)):
        what = "each stage be on one rank: [[0], [1], ...], in any order"
        if layout.n_copies > 1:
            what = "each copy have ranks of its own: [[0, 2], [1, 3]] has stage 0 on the ranks 0 and 2"
        raise PlanError(
            f"layout.ranks is {ranks}; each of the ranks 0 to {layout.n_ranks - 1} must hold a stage, and "
            f"{what}"
        )


def shard(nbytes: Mapping[Name, int], tied: Collection[Name], n_copies: int) -> dict[Name, int]:
    """The owner of each parameter among the copies: the largest first, each to the copy that has least; but
    copy 0 has the tied ones. nbytes: in the order of the model, which decides where sizes do not."""
    has, owner = [0] * n_copies, dict[Name, int]()
    for name in sorted(nbytes, key=lambda name: (name not in tied, -nbytes[name])):
        owner[name] = 0 if name in tied else has.index(min(has))
        has[owner[name]] += nbytes[name]
    return owner


def sums_held(n_copies: int) -> int:
    """How many shards of other copies one copy holds at most while it adds them up, in the order of `lower`:
    one for each level of the tree; where the copies are no power of two, also one for each smaller tree."""
    return n_copies.bit_count() + n_copies.bit_length() - 2


def even_blocks(micro_batches: int | None, batch: int, n_ranks: int) -> int:
    """`blocks: auto`: the largest power of two up to the number of ranks that divides the micro-batches, or,
    where their number is searched, that the batch has samples for."""
    blocks = 1
    while 2 * blocks <= min(n_ranks, batch) and (micro_batches or 2 * blocks) % (2 * blocks) == 0:
        blocks *= 2
    return blocks


def placements(order: Order, n_copies: int, several_levels: bool) -> list[tuple[Order, ...]]:
    """Ways to put copies of a pipeline with stage s on the `order[s]`-th rank of its own: the ranks of a copy
    beside each other; where ranks are not all alike near, also the copies of a stage."""
    per = len(set(order))
    together = tuple(tuple(copy * per + rank for rank in order) for copy in range(n_copies))
    apart = tuple(tuple(rank * n_copies + copy for rank in order) for copy in range(n_copies))
    return [together, apart] if several_levels and n_copies > 1 and per > 1 else [together]


def stages_in(costs: Costs, layout: Layout, cuts: Sequence[int]) -> tuple[StageCost, ...]:
    """The stages of copy 0, each on its rank, then those of each other copy. The parameters of a group count
    as one, of which a copy owns all or nothing."""
    if layout.n_copies == 1:
        return stage_costs(in_order(costs, layout.order), cuts, layout.recompute)
    costs, speeds = replace(costs, copies=layout.n_copies), [d.speed for d in costs.cluster.devices]
    shards = [_shards(costs, first, end) for first, end in bounds(len(costs.groups), cuts)]
    known: dict[tuple[float, ...], tuple[StageCost, ...]] = {}
    found: list[StageCost] = []
    for copy, order in enumerate(layout.copies):
        key = tuple(speeds[rank] for rank in order)
        if key not in known:
            known[key] = stage_costs(in_order(costs, order), cuts, layout.recompute)
        found += [_owning(stage, of, copy, costs) for stage, of in zip(known[key], shards, strict=True)]
    return tuple(found)


def _shards(costs: Costs, first: int, end: int) -> list[int]:
    """By copy, the bytes of the weights that it updates of the groups [first, end)."""
    nbytes = dict(enumerate(own_bytes(costs)[first:end].tolist(), first))
    found = [0] * costs.copies
    for group, copy in shard(nbytes, {tie.groups[0] for tie in costs.ties}, costs.copies).items():
        found[copy] += nbytes[group]
    return found


def _owning(stage: StageCost, shards: Sequence[int], copy: int, costs: Costs) -> StageCost:
    """That of a copy, with its own shard. stage: with an even share of them."""
    nbytes, even = shards[copy], sum(shards) / len(shards)
    more = int(costs.state_bytes_per_param_byte * (nbytes - even))
    return replace(
        stage, shard_bytes=nbytes, fixed_bytes=stage.fixed_bytes + more,
        step_s=stage.step_s * nbytes / even if even else stage.step_s,
    )  # fmt: skip


def fastest_copy(costs: Costs, n_ranks: int, n_copies: int) -> Costs:
    """Costs on the fastest ranks that one of the copies could have; its update is its share of all."""
    devices = sorted(costs.cluster.devices[:n_ranks], key=lambda device: -device.speed)
    return costs if n_copies == 1 else replace(
        costs, copies=n_copies, cluster=replace(costs.cluster, devices=tuple(devices))
    )  # fmt: skip


def loaded(cluster: Cluster, layout: Layout) -> Cluster:
    """With links as slow as they are while neighbours in each copy, and the copies of each stage, talk."""
    return cluster.loaded(*layout.copies, *layout.ranks)
