"""How many copies of the pipeline, or of single stages, there may be, and on which ranks they are.

Exact copies: the gradients of micro-batches are added in `blocks` equal blocks, these by a fixed binary tree
(`Numerics`). A copy does whole blocks, and what it adds up must be one whole sub-tree: the copies divide the
blocks, and each has a power of two of them. So the bits are those of any other number of copies.

Stages may have unlike numbers of copies, such as 15 and 1. Micro-batches then take as many ways through the
pipeline as the least common multiple of these numbers, each a copy of it, and each copy of a stage serves as
many of them as any other: it takes turns between their micro-batches, and adds up those of each apart. Of two
legal numbers the smaller one divides the larger one, so there are as many ways as copies of some stage.

Fast copies (`Numerics.reduce`): there are no blocks, each copy adds up its micro-batches in order, and these
sums are added as they meet, node by node first (`exchange`). So there may be any number of copies, with
unlike shares of the micro-batches, and any of each stage whose ways have a micro-batch each. Bits are then a
function of that number, and of the nodes where these do not have a power of two of copies each; with unlike
numbers of copies also of the cuts, and where shares differ of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mpipipe.errors import PlanError
from mpipipe.planner.sizes import counted, multiples_beside
from mpipipe.planner.stages import bounds, in_order, own_bytes, rows_of, stage_costs, stage_ties
from mpipipe.values import Cluster, Costs, Layout, Numerics, StageCost, share_of

Order = tuple[int, ...]  # the rank of each stage
Copies = int | tuple[int, ...]  # of the whole pipeline, or of the stage, or stages, of each of its ranks
Name = TypeVar("Name", bound=Hashable)


def legal_copies(numerics: Numerics) -> tuple[int, ...]:
    """Ascending."""
    if numerics.reduce == "fast":
        return tuple(range(1, numerics.micro_batches + 1))
    return tuple(n for n in range(1, numerics.blocks + 1) if n == 1 or _whole_sub_trees(n, numerics.blocks))


def _whole_sub_trees(n_copies: int, blocks: int) -> bool:
    each, left = divmod(blocks, n_copies)
    return left == 0 and each & (each - 1) == 0


def check_copies(copies: Copies, n_ranks: int, numerics: Numerics) -> None:
    """Raises PlanError where so many copies would have other bits or nothing to do, or do not share the ranks
    evenly."""
    if isinstance(copies, tuple) and sum(copies) != n_ranks:
        raise PlanError(
            f"replicas {shape_text(copies)} are on {counted(sum(copies), 'rank')}, not "
            f"{n_ranks}; start {sum(copies)}, or give pipeline.replicas other numbers, or leave it out"
        )
    legal, most = legal_copies(numerics), most_copies(copies)
    if isinstance(copies, int) and n_ranks % copies:
        ranks = f"start {multiples_beside(n_ranks, copies)} ranks, or " if copies in legal else ""
        raise PlanError(
            f"{counted(copies, 'replica')} on {counted(n_ranks, 'rank')}: each has as many ranks as the "
            f"others; {ranks}use {' or '.join(str(n) for n in legal if n_ranks % n == 0)}"
        )
    of_stages = (copies,) if isinstance(copies, int) else copies
    apart = [n for n in of_stages if n > 1 and not _whole_sub_trees(n, most)]
    if apart and numerics.reduce == "exact":
        raise PlanError(
            f"replicas {shape_text(copies)} with pipeline.reduce = exact: no pipeline.blocks allow both "
            f"{apart[0]} and {most}; use numbers that are a power of two times each other, such as 2+1 or 6+3"
            ", or pipeline.reduce=fast, where any numbers will do"
        )
    for n_copies in of_stages:
        if n_copies not in legal and numerics.reduce == "fast":
            raise PlanError(
                f"{counted(n_copies, 'replica')} with pipeline.micro_batches = {numerics.micro_batches}: "
                f"each does one at least; use {numerics.micro_batches} at most, or more micro-batches"
            )
        if n_copies not in legal:
            raise PlanError(
                f"{counted(n_copies, 'replica')} with pipeline.blocks = {numerics.blocks}: each must own a "
                f"whole sub-tree of the blocks' sum; use {' or '.join(map(str, legal))}; or, before the "
                f"first step of a run, {_blocks_for(of_stages, n_ranks, numerics)}, or pipeline.reduce=fast, "
                "where any number will do"
            )
    ways = pipeline_copies(copies)
    if numerics.reduce == "fast" and ways > numerics.micro_batches:
        raise PlanError(
            f"replicas {shape_text(copies)} with pipeline.micro_batches = {numerics.micro_batches}: there "
            f"are {ways} ways through them, the least common multiple, and each has one at least; use "
            f"pipeline.micro_batches={ways} or more, or numbers that divide {most}: "
            f"{' or '.join(str(n) for n in legal if most % n == 0)}"
        )


def _blocks_for(of_stages: Sequence[int], n_ranks: int, numerics: Numerics) -> str:
    """What allows so many copies of each."""
    n_micro, most = numerics.micro_batches, max(of_stages)
    if n_micro % most:
        return (
            f"a multiple of {most} for pipeline.micro_batches, such as {multiples_beside(n_micro, most)}, "
            f"with pipeline.blocks={most} ({most} does not divide {n_micro})"
        )
    doubled = (most << times for times in range(n_micro.bit_length()))
    blocks = " or ".join(str(n) for n in doubled if n_micro % n == 0)
    auto = even_blocks(n_micro, numerics.batch, n_ranks)
    finds = {*of_stages} <= {*legal_copies(replace(numerics, blocks=auto))}
    by_auto = f" (auto gives {auto} for pipeline.max_ranks={n_ranks})" if finds else ""
    return f"pipeline.blocks={blocks}{by_auto}"


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
    if not all(ranks):
        raise PlanError(
            f"layout.ranks is {ranks}; each stage must be on one rank for each of its copies, such as "
            "[[0, 2], [1, 3]] or [[0, 1], [2]]"
        )
    of_copies = [rank for on in {*layout.ranks} for rank in on]
    if sorted(of_copies) != list(range(layout.n_ranks)):
        what = "each stage be on one rank: [[0], [1], ...], in any order"
        if layout.n_copies > 1:
            what = "each copy have ranks of its own: [[0, 2], [1, 3]] has stage 0 on the ranks 0 and 2"
        raise PlanError(
            f"layout.ranks is {ranks}; each of the ranks 0 to {layout.n_ranks - 1} must hold a stage, and "
            f"{what}"
        )


def check_nodes(layout: Layout, numerics: Numerics) -> None:
    """Raises PlanError for nodes that are not those of all ranks, or where sums have one order."""
    if layout.nodes and len(layout.nodes) != layout.n_ranks:
        raise PlanError(
            f"layout.nodes has {len(layout.nodes)} numbers, but the plan {counted(layout.n_ranks, 'rank')}; "
            "give the node of each, or none at all"
        )
    if layout.nodes and numerics.reduce == "exact":
        raise PlanError(
            f"layout.nodes is {list(layout.nodes)} with pipeline.reduce = exact, where sums have one order; "
            "leave it out, or plan with pipeline.reduce=fast"
        )


def shard(nbytes: Mapping[Name, int], tied: Collection[Name], n_copies: int) -> dict[Name, int]:
    """The owner of each parameter among the copies: the largest first, each to the copy that has least; but
    copy 0 has the tied ones. nbytes: in the order of the model, which decides where sizes do not."""
    has, owner = [0] * n_copies, dict[Name, int]()
    for name in sorted(nbytes, key=lambda name: (name not in tied, -nbytes[name])):
        owner[name] = 0 if name in tied else has.index(min(has))
        has[owner[name]] += nbytes[name]
    return owner


def even_blocks(micro_batches: int | None, batch: int, max_ranks: int) -> int:
    """`blocks: auto`: up to the number of ranks that may come, the largest odd number that divides both it
    and the micro-batches, times the largest power of two with which the blocks still divide these. No other
    blocks allow more of the numbers of replicas that share these ranks evenly. Where the number of
    micro-batches is searched, the odd number divides the batch, for micro-batches of one size, and the batch
    has a sample for each block."""
    blocks = math.gcd(micro_batches or batch, max_ranks)
    blocks //= blocks & -blocks  # the odd part
    while 2 * blocks <= min(max_ranks, batch) and (micro_batches or 2 * blocks) % (2 * blocks) == 0:
        blocks *= 2
    return blocks


def most_copies(copies: Copies) -> int:
    """Of any stage."""
    return copies if isinstance(copies, int) else max(copies)


def pipeline_copies(copies: Copies) -> int:
    """Of the whole pipeline, as `Layout.n_copies`."""
    return copies if isinstance(copies, int) else math.lcm(*copies)


def largest_share(n_micro: int, copies: Copies) -> int:
    """Micro-batches of copy 0 of the pipeline: no other has more."""
    return len(share_of(0, pipeline_copies(copies), n_micro))


def ranks_in_each(copies: Copies, n_ranks: int) -> int:
    """Ranks that a micro-batch goes through."""
    return n_ranks // copies if isinstance(copies, int) else len(copies)


def shape_of(layout: Layout) -> Copies:
    """Where they are unlike, of each rank of a copy of the pipeline, whose stages have equally many."""
    return layout.n_copies if layout.is_even else tuple(map(len, dict.fromkeys(layout.ranks)))


def shape_text(copies: Copies) -> str:
    """ "4", or "2+1": of each stage, or of the stages of each rank."""
    return str(copies) if isinstance(copies, int) else "+".join(map(str, copies))


def replicas_text(copies: Copies) -> str:
    """ "4 replicas", or "2+1 replicas"."""
    return counted(copies, "replica") if isinstance(copies, int) else f"{shape_text(copies)} replicas"


def placements(order: Order, n_copies: int, several_levels: bool) -> list[tuple[Order, ...]]:
    """Ways to put copies of a pipeline with stage s on the `order[s]`-th rank of its own: the ranks of a copy
    beside each other; where ranks are not all alike near, also the copies of a stage."""
    per = len(set(order))
    together = tuple(tuple(copy * per + rank for rank in order) for copy in range(n_copies))
    apart = tuple(tuple(rank * n_copies + copy for rank in order) for copy in range(n_copies))
    return [together, apart] if several_levels and n_copies > 1 and per > 1 else [together]


def check_known(n_ranks: int, costs: Costs) -> None:
    """Raises PlanError for more ranks than there are costs of."""
    if n_ranks > (there := len(costs.cluster.devices)):
        raise PlanError(f"{n_ranks} ranks, and the costs are of {there}; plan for {there} at most")


def stages_in(costs: Costs, layout: Layout, cuts: Sequence[int]) -> tuple[StageCost, ...]:
    """The stages of copy 0, each on its rank, then those of each other copy. The parameters of a group count
    as one, of which a copy owns all or nothing; a tied one is there once on its owner's rank. Raises as
    `check_known`."""
    check_known(layout.n_ranks, costs)
    if layout.n_copies > 1:  # also of a stage that has one
        costs = costs.but(rows_bytes={})
    found, n = list(_stages_apart(costs, layout, cuts)), layout.n_stages
    for tie in stage_ties(costs.ties, cuts, rows_of(costs)):
        less = dict[int, int]()  # by stage
        for user in tie.users:
            if layout.ranks[user] == layout.ranks[tie.owner]:
                less[user] = tie.nbytes * (2 if tie.in_place else 1)  # the weight, and its gradient
            elif tie.in_place:  # which is counted as a buffer that is received in
                less[tie.owner] = tie.nbytes
        for stage, nbytes in less.items():
            for i in range(stage, len(found), n):
                found[i] = replace(found[i], fixed_bytes=found[i].fixed_bytes - nbytes)
    return tuple(found)


def _stages_apart(costs: Costs, layout: Layout, cuts: Sequence[int]) -> Sequence[StageCost]:
    """As if each were on ranks of its own."""
    if layout.n_copies == 1:
        return stage_costs(in_order(costs, layout.order), cuts, layout.recompute)
    speeds, edges = [d.speed for d in costs.cluster.devices], bounds(len(costs.groups), cuts)
    of_count = {n: costs.but(copies=n) for n in {len(on) for on in layout.ranks}}
    shards = [_shards(of_count[len(on)], *edge) for on, edge in zip(layout.ranks, edges, strict=True)]
    sums = sums_apart_bytes(costs, layout, cuts)
    known: dict[tuple[int, tuple[float, ...]], tuple[StageCost, ...]] = {}
    found: list[StageCost] = []
    for copy, order in enumerate(layout.copies):
        speed = tuple(speeds[rank] for rank in order)
        for s, on in enumerate(layout.ranks):
            n = len(on)
            if (n, speed) not in known:
                known[n, speed] = stage_costs(in_order(of_count[n], order), cuts, layout.recompute)
            stage = _owning(known[n, speed][s], shards[s], copy * n // layout.n_copies, of_count[n])
            found.append(replace(stage, fixed_bytes=stage.fixed_bytes + sums[s]))
    return found


def block_sums(blocks: int, n_copies: int, of_stage: int) -> int:
    """How many sums of gradients a rank of a stage with so many copies holds beside its gradients, n_copies:
    of the pipeline. Where it serves several of these, it adds up the micro-batches of each apart."""
    if blocks == 1:
        return 0
    if of_stage == n_copies == 1:
        return blocks.bit_length()
    return n_copies // of_stage * (blocks // n_copies).bit_length() - 1


def sums_apart_bytes(costs: Costs, layout: Layout, cuts: Sequence[int]) -> list[int]:
    """By stage, on each of its ranks, `block_sums` beyond those that `Costs.held_per_param_byte` counts."""
    found = []
    for on, (first, end) in zip(layout.ranks, bounds(len(costs.groups), cuts), strict=True):
        n, blocks = len(on), costs.blocks
        more = block_sums(blocks, layout.n_copies, n) - block_sums(blocks, n, n)
        found.append(more * sum(group.param_bytes for group in costs.groups[first:end]))
    return found


def block_sums_bytes(costs: Costs, layout: Layout, cuts: Sequence[int]) -> int:
    """Of all `block_sums` of the rank that holds most of them."""
    held = dict.fromkeys(range(layout.n_ranks), 0)
    for on, (first, end) in zip(layout.ranks, bounds(len(costs.groups), cuts), strict=True):
        weights = sum(group.param_bytes for group in costs.groups[first:end])
        for rank in on:
            held[rank] += weights * block_sums(costs.blocks, layout.n_copies, len(on))
    return max(held.values())


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
    if n_copies == 1:
        return costs
    return costs.but(copies=n_copies, cluster=replace(costs.cluster, devices=tuple(devices)))


def loaded(cluster: Cluster, layout: Layout) -> Cluster:
    """With links as slow as they are while neighbours in each copy, and the copies of each stage, talk."""
    return cluster.loaded(*layout.copies, *layout.ranks)
