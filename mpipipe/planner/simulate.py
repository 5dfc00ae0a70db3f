"""Program + costs -> Timeline: when each instruction runs, and how much memory each rank needs.

Times: computing takes what `StageCost` says. A SEND takes no time of its rank, its message arrives
`link.seconds(bytes)` later; messages on one directed pair of ranks follow each other. A RECV lasts
until the message is there. NORM lasts until the last rank is there, and `norm_s`. Of what the copies of
a stage exchange, a round after the first begins when the message of the one before has come, or when its
rank is done with what it computes then: its SEND has that time, though it stands later. The program must
be proved (`prove`): here nothing is said about deadlock. Where ranks share cores, how long a rank computes
depends on the others, too (`crowded`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from mpipipe.errors import DeadlockError, PlanError
from mpipipe.planner.crowded import MOST_ROUNDS, is_crowded, seconds_beside
from mpipipe.planner.exchange import BUCKET_BYTES, BUCKETS_AHEAD, Exchange, exchange_of, halving
from mpipipe.planner.lower import tied_pairs
from mpipipe.planner.native import compiled
from mpipipe.planner.schedules import stashes, work_of
from mpipipe.planner.stages import StageTie
from mpipipe.planner.walk import Ends, match, walk
from mpipipe.values import (
    COMPUTE,
    RECVS,
    SENDS,
    Cluster,
    Float64,
    Int32,
    Int64,
    Op,
    Program,
    StageCost,
    Timeline,
)

Parts = tuple[int, ...]  # bytes of each tensor of a message
TIED = {Op.SEND_TIED, Op.RECV_TIED, Op.SEND_COPY, Op.RECV_COPY}
NEAR = {Op.SEND_ACT, Op.SEND_GRAD}  # to a neighbour, which is on one rank for all micro-batches
AHEAD = {Op.RECV_ACT, Op.RECV_GRAD, Op.RECV_TIED}  # posted ahead, into buffers
IS_SEND, IS_TIED, IS_NEAR, IS_AHEAD, LEAVES, WORKS, MAKES = (
    np.isin(range(len(Op)), sorted(ops))  # by op
    for ops in (SENDS, TIED, NEAR, AHEAD, {Op.B, Op.W}, {Op.F, Op.B, Op.I, Op.W}, {Op.F, Op.B, Op.I})
)


def simulate(
    program: Program,
    stages: Sequence[StageCost],
    cluster: Cluster,
    norm_s: float = 0.0,
    ties: Sequence[StageTie] = (),
) -> Timeline:
    """The predicted step. stages: those of copy 0 of the pipeline, then those of each other copy; norm_s:
    seconds of the norm's collective itself; ties: those that the program was lowered with, for the bytes of
    TIED and COPY messages.

    Raises PlanError if stages or ranks do not fit the program, DeadlockError if it cannot end.
    """
    times, sizes = times_of(program, stages, cluster, norm_s, ties)
    return Timeline(program, times, memory_bytes(program, stages, sizes))


def times_of(
    program: Program, stages: Sequence[StageCost], cluster: Cluster, norm_s: float, ties: Sequence[StageTie]
) -> tuple[tuple[Float64, ...], tuple[Int64, ...]]:
    """`Timeline.times`, and `message_bytes`. Arguments, and what is raised, as for `simulate`."""
    n_stages = program.n_stages * len(program.copies)
    if len(stages) != n_stages or len(program.codes) > len(cluster.devices):
        raise PlanError(
            f"a program of {n_stages} stages on {len(program.codes)} ranks, but costs of "
            f"{len(stages)} stages and a cluster of {len(cluster.devices)} ranks; plan again for this cluster"
        )
    sizes = message_bytes(program, stages, ties)
    seconds = instruction_seconds(program, stages, sizes, cluster)
    times = _times(program, seconds, norm_s)
    for _ in range(MOST_ROUNDS if is_crowded(cluster) else 0):
        before = times
        times = _times(program, seconds_beside(program, cluster, seconds, before), norm_s)
        if all(map(np.allclose, times, before)):
            break
    return times, sizes


def _times(program: Program, seconds: Sequence[Float64], norm_s: float) -> tuple[Float64, ...]:
    ends = match(program)
    times = walked(ends, seconds, norm_s) if compiled is None else compiled.simulate(
        program.codes, ends.partners, seconds, norm_s
    )  # fmt: skip
    if times is None:
        raise DeadlockError("the program cannot end even with endless buffers; call prove() for the place")
    return tuple(times)


def memory_bytes(program: Program, stages: Sequence[StageCost], sizes: Sequence[Int64]) -> tuple[Int64, ...]:
    """What each rank holds during each instruction."""
    return tuple(rank_memory_bytes(program, stages, sizes, rank) for rank in range(len(program.codes)))


def rank_memory_bytes(
    program: Program, stages: Sequence[StageCost], sizes: Sequence[Int64], rank: int, tensors: bool = False
) -> Int64:
    """What a rank holds during each instruction: what is fixed, its receive buffers, the rest of the stash of
    its live micro-batches, or from I to W what waits, what is made again of a stash, sums of blocks that I is
    ahead in, gradients from one of its stages to another, the message that it sent last, the largest
    workspace while it computes, and what comes in of the sums of other copies. tensors: by what they need,
    not by what an allocator keeps."""
    n, copy = program.n_stages, program.copies_on(rank).start
    own = stages[copy * n : (copy + 1) * n]
    mine = [s for s, on in enumerate(program.copies[copy]) if on == rank]
    near = tuple(own[s] for at in mine for s in (at - 1, at, at + 1) if 0 <= s < n)
    key = rank, tensors, near, sizes[rank].tobytes()
    if key not in program.memory:  # neighbouring cuts leave most ranks as they were
        program.memory[key] = _rank_memory_bytes(program, own, mine, sizes[rank], rank, tensors)
    return program.memory[key]


def _rank_memory_bytes(
    program: Program, own: Sequence[StageCost], mine: Sequence[int], nbytes: Int64, rank: int, tensors: bool
) -> Int64:
    codes, n = program.codes[rank], program.n_stages
    exchange = exchange_of(program.nodes_of(mine[0]) if mine else (0,))  # of each of them: they are alike
    stash, waiting, remade, at_work, in_two = np.zeros((5, n), np.int64)
    for s in mine:
        stash[s], waiting[s], remade[s] = own[s].stash_bytes, own[s].waiting_bytes, own[s].remade_bytes
        at_work[s], in_two[s] = own[s].at_work_bytes, own[s].in_two_bytes
        if s:  # what is counted there, or in a receive buffer
            stash[s] -= own[s - 1].kept_bytes if s - 1 in mine else own[s - 1].act_bytes
            waiting[s] -= 0 if s - 1 in mine else own[s].waiting_received_bytes
    stash, waiting = np.maximum(0, stash), np.maximum(0, waiting)
    parts = {(int(Op.RECV_ACT), s + 1): own[s].act_parts for s in range(n) if own[s].act_parts}
    parts |= {(int(Op.RECV_GRAD), s - 1): own[s].grad_parts for s in range(n) if own[s].grad_parts}
    fixed = sum(own[s].fixed_bytes for s in mine)
    received = rank, tuple(parts.items()), nbytes.tobytes()  # of any recomputation
    if received not in program.received:
        program.received[received] = receive_bytes(codes, nbytes, program.receive_window, parts)
    fixed += program.received[received]
    kept = max((own[s].workspace_bytes for s in mine), default=0)  # by the allocator, for all of them
    workspace = at_work[codes[:, 1]] if tensors else kept
    workspace = workspace + np.where(codes[:, 0] == Op.I, (in_two - at_work)[codes[:, 1]], 0)
    held = stashes(codes, stash[codes[:, 1]], waiting[codes[:, 1]]) + _sums_coming(codes, nbytes, exchange)
    held += np.where(MAKES[codes[:, 0]], remade[codes[:, 1]], 0)
    for s in (s for s in mine if own[s].at_once_bytes):
        held += own[s].at_once_bytes * _blocks_ahead(codes, s, _block_starts(program, rank, own[s].blocks))
    held += _last_sent(codes, nbytes, np.array([stage.kept_bytes for stage in own], np.int64))
    for s in set(mine) & {s - 1 for s in mine}:
        held += own[s + 1].grad_bytes * _gradients_between(codes, s)
    return np.asarray(fixed + held + np.where(WORKS[codes[:, 0]], workspace, 0), np.int64)


def _copies(program: Program) -> list[int]:
    """By rank, a copy of the pipeline that it is in."""
    return [program.copies_on(rank).start for rank in range(len(program.codes))]


def receive_bytes(codes: Int32, nbytes: Int64, window: int, parts: Mapping[tuple[int, int], Parts]) -> int:
    """The receive buffers of a rank, one for each tensor, which stay for later ones of their size: of each
    size as many as are in use at once, from the time when they are posted, `window` receives ahead, until
    their micro-batch leaves the stage. nbytes: of the message of each instruction; parts: by op and stage of
    its tensors, where there are several."""
    ops, stage, micro = codes[:, :3].T
    received = np.flatnonzero(IS_AHEAD[ops])
    if not len(received):
        return 0
    posted = np.concatenate([np.zeros(max(1, window), np.int64), received + 1])[: len(received)]
    leaves = np.flatnonzero(LEAVES[ops] if LEAVES[ops].any() else ops == Op.F)
    left = np.full((stage.max() + 1, micro.max() + 2), len(codes))  # micro -1, once per step, stays
    left[stage[leaves], micro[leaves]] = leaves + 1
    freed = left[stage[received], micro[received]]
    kinds = np.stack([ops[received], stage[received], nbytes[received]], axis=1)
    in_use = dict[tuple[int, bool], Int64]()  # at each instruction, by size; gradients of tied ones apart
    for kind in np.unique(kinds, axis=0):
        alike = (kinds == kind).all(axis=1)
        messages = _between(posted[alike], freed[alike], len(codes))
        op, at, whole = kind.tolist()
        for size, several in Counter(parts.get((op, at), (whole,))).items():
            form = size, op == Op.RECV_TIED
            in_use[form] = in_use.get(form, 0) + several * messages
    return sum(size * int(most.max()) for (size, _), most in in_use.items())


def _last_sent(codes: Int32, nbytes: Int64, kept: Int64) -> Int64:
    """By instruction, what it or the last one before it has sent: a message seldom leaves at once. kept: by
    stage, of an activation's what counts with the stash while that is whole."""
    ops, stage, micro = codes[:, :3].T
    at, leaves = np.arange(len(codes)), np.flatnonzero((ops == Op.B) | (ops == Op.I))
    last = np.maximum.accumulate(np.where(IS_NEAR[ops], at, -1))
    left = np.zeros((stage.max() + 1, micro.max() + 2), np.int64)  # never kept where there is no backward
    left[stage[leaves], micro[leaves]] = leaves
    twice = (ops[last] == Op.SEND_ACT) & (at < left[stage[last], micro[last]])
    return np.where(last >= 0, nbytes[last] - np.where(twice, kept[stage[last]], 0), 0)


def _sums_coming(codes: Int32, nbytes: Int64, exchange: Exchange) -> Int64:
    """By instruction, from a stage's first SEND_SHARD to its last RECV_SHARD: the buckets of a round, and
    what cannot be added yet. Rounds follow each other while the rank computes: any of them may be there."""
    found, (ops, stage) = np.zeros(len(codes), np.int64), codes[:, :2].T
    in_pairs = halving(exchange.n).bit_length() - 1  # the first round of those
    for s in np.unique(stage[ops == Op.RECV_SHARD]):
        sends, recvs = (np.flatnonzero((ops == op) & (stage == s)) for op in (Op.SEND_SHARD, Op.RECV_SHARD))
        held = min(int(nbytes[recvs].max()), BUCKETS_AHEAD * BUCKET_BYTES)
        if in_pairs < len(recvs):
            held += exchange.sums_held * int(nbytes[recvs[-1]])
        found[sends[0] : recvs[-1] + 1] += held
    return found


def _block_starts(program: Program, rank: int, blocks: int) -> list[int]:
    """Of so many blocks of a rank, the first micro-batch of each that follows another one of its share."""
    share, served = program.share_on(rank), program.copies_on(rank)
    alone = {program.share(copy).start for copy in served}
    starts = (
        share[i] for i in range(1, len(share)) if i * blocks // len(share) > (i - 1) * blocks // len(share)
    )
    return [micro for micro in starts if micro not in alone]


def _blocks_ahead(codes: Int32, stage: int, starts: Sequence[int]) -> Int64:
    """By instruction, the blocks that I has begun before the last W of the block before: sums apart."""
    ops, at, micro = codes[:, :3].T
    begun, ended = np.full((2, micro.max() + 1), len(codes))
    begins, ends = (np.flatnonzero((at == stage) & of) for of in (ops == Op.I, LEAVES[ops]))
    begun[micro[begins]], ended[micro[ends]] = begins, ends + 1
    ahead = [start for start in starts if begun[start] < ended[start - 1]]
    return _between(begun[ahead], ended[[start - 1 for start in ahead]], len(codes))[:-1]


def _gradients_between(codes: Int32, stage: int) -> Int64:
    """By instruction, gradients that the next stage, of the same rank, has made and this one has not left."""
    ops, at = codes[:, :2].T
    made = np.flatnonzero(((ops == Op.B) | (ops == Op.I)) & (at == stage + 1))
    left = np.flatnonzero(LEAVES[ops] & (at == stage))
    return _between(made + 1, left + 1, len(codes))[:-1]


def _between(starts: Int64, ends: Int64, n: int) -> Int64:
    """How many have started and not ended at each of 0 .. n."""
    change = np.bincount(starts, minlength=n + 1) - np.bincount(ends, minlength=n + 1)
    return np.asarray(np.cumsum(change), np.int64)


def message_bytes(
    program: Program, stages: Sequence[StageCost], ties: Sequence[StageTie]
) -> tuple[Int64, ...]:
    """Bytes of each message instruction, 0 for the others: per rank an array (n,). Statistics of buffers are
    left out of SHARD."""
    shards = np.array([stage.shard_bytes for stage in stages], np.int64).reshape(-1, program.n_stages)
    stages = stages[: program.n_stages]
    table = np.zeros((len(Op), len(stages)), np.int64)  # by op and stage: ACT and GRAD go to neighbours
    table[Op.SEND_ACT, :-1] = table[Op.RECV_ACT, 1:] = [stage.act_bytes for stage in stages[:-1]]
    table[Op.SEND_GRAD, 1:] = table[Op.RECV_GRAD, :-1] = [stage.grad_bytes for stage in stages[1:]]
    pairs: dict[tuple[int, int, int], int] = {}  # (op, stage, other)
    for (user, owner), nbytes in tied_pairs(ties).items():
        pairs[Op.SEND_TIED, user, owner] = pairs[Op.RECV_TIED, owner, user] = nbytes
        pairs[Op.SEND_COPY, owner, user] = pairs[Op.RECV_COPY, user, owner] = nbytes
    sizes = tuple(_rank_bytes(codes, table, pairs) for codes in program.codes)
    if len(program.copies) > 1:
        _add_shards(program, sizes, shards)
    if len(program.copies) > 1 and not program.eager:  # copy 0 is given the sums of the other uses, too
        _add_uses(program, sizes, ties)
    return sizes


def _rank_bytes(codes: Int32, table: Int64, pairs: dict[tuple[int, int, int], int]) -> Int64:
    sizes: Int64 = table[codes[:, 0], codes[:, 1]]
    tied = np.flatnonzero(IS_TIED[codes[:, 0]])
    sizes[tied] = [pairs.get(tuple(key), 0) for key in codes[tied][:, [0, 1, 3]].tolist()]
    return sizes


def _add_shards(program: Program, sizes: Sequence[Int64], shards: Int64) -> None:
    """shards: (copies, stages); of a message those of all the owners that it is for."""
    owned = np.zeros((program.n_stages, len(program.copies)), np.int64)
    for stage in range(program.n_stages):
        of_owners = [shards[program.copies_on(rank).start, stage] for rank in program.holders(stage)]
        owned[stage, : len(of_owners)] = of_owners
    for rank, nbytes in enumerate(sizes):
        at, stage, owner = _shards_in(program, rank)
        np.add.at(nbytes, at, owned[stage, owner])


def _shards_in(program: Program, rank: int) -> Int64:
    """(3, n): instruction, stage and owner of each shard in a message of a rank."""
    if rank not in program.shards:  # the same for all cuts
        messages = np.flatnonzero(program.codes[rank][:, 0] >= Op.SEND_SHARD)
        codes = program.codes[rank][messages].tolist()
        exchanges = {stage: exchange_of(program.nodes_of(stage)) for stage in {code[1] for code in codes}}
        found = [
            (i, code[1], owner)
            for i, code in zip(messages.tolist(), codes, strict=True)
            for owner in _owners(program, rank, code, exchanges[code[1]])
        ]
        program.shards[rank] = np.array(found, np.int64).reshape(-1, 3).T
    return program.shards[rank]


def _owners(program: Program, rank: int, instr: Sequence[int], exchange: Exchange) -> Sequence[int]:
    """The copies of a stage whose shards are in a message between two of them."""
    here, there = program.copy_on(rank), program.copy_on(instr[4])
    to_peer = instr[0] in (Op.SEND_SHARD, Op.RECV_UPDATE)
    return exchange.owners_for(there, here) if to_peer else exchange.owners_for(here, there)


def _add_uses(program: Program, sizes: Sequence[Int64], ties: Sequence[StageTie]) -> None:
    for nbytes, user in ((tie.nbytes, user) for tie in ties for user in tie.users):
        for rank, codes in enumerate(program.codes):
            at, stage, owner = _shards_in(program, rank)
            of_sums = np.isin(codes[at, 0], (Op.SEND_SHARD, Op.RECV_SHARD))
            sizes[rank][at[of_sums & (stage == user) & (owner == 0)]] += nbytes


def instruction_seconds(
    program: Program, stages: Sequence[StageCost], sizes: Sequence[Int64], cluster: Cluster
) -> tuple[Float64, ...]:
    """Per rank and instruction: seconds of compute, or of the message on its link for a SEND."""
    tables = [
        _table(ranks, stages[copy * len(ranks) : (copy + 1) * len(ranks)], cluster)
        for copy, ranks in enumerate(program.copies)
    ]
    out = []
    for rank, (copy, codes, nbytes) in enumerate(zip(_copies(program), program.codes, sizes, strict=True)):
        seconds = tables[copy][codes[:, 0], codes[:, 1]]
        alike = IS_NEAR if len(program.copies_on(rank)) == 1 else np.zeros_like(IS_NEAR)
        once = np.flatnonzero(IS_SEND[codes[:, 0]] & ~alike[codes[:, 0]])
        seconds[once] = [
            cluster.link(rank, peer).seconds(size)
            for peer, size in zip(codes[once, 4].tolist(), nbytes[once].tolist(), strict=True)
        ]
        out.append(seconds)
    return tuple(out)


def _table(ranks: Sequence[int], stages: Sequence[StageCost], cluster: Cluster) -> Float64:
    """Of one copy of the pipeline, by op and stage."""
    table = np.zeros((len(Op), len(stages)))
    work = work_of(ranks, stages)
    table[Op.F], table[Op.STEP] = work.fwd_s, [stage.step_s for stage in stages]
    table[Op.I], table[Op.W], table[Op.B] = work.bwd_input_s, work.bwd_weight_s, work.bwd_s
    for s, (stage, after) in enumerate(itertools.pairwise(stages)):
        table[Op.SEND_ACT, s] = cluster.link(ranks[s], ranks[s + 1]).seconds(stage.act_bytes)
        table[Op.SEND_GRAD, s + 1] = cluster.link(ranks[s + 1], ranks[s]).seconds(after.grad_bytes)
    return table


def walked(ends: Ends, seconds: Sequence[Float64], norm_s: float) -> tuple[Float64, ...] | None:
    """Start and end of each rank's instructions (n, 2); None if they cannot end."""
    clock = _Clock(ends, [s.tolist() for s in seconds], norm_s)
    if not walk(ends, clock, clock.at):
        return None
    return tuple(np.array([s, e]).T.reshape(-1, 2) for s, e in zip(clock.starts, clock.stops, strict=True))


class _Clock:
    """Rules of time for a walk: only RECV waits, and a message that is sent arrives."""

    def __init__(self, ends: Ends, seconds: list[list[float]], norm_s: float) -> None:
        n_ranks = len(ends.ops)
        self.ends, self.at, self._seconds, self._norm_s = ends, [0] * n_ranks, seconds, norm_s
        self.starts: list[list[float]] = [[] for _ in range(n_ranks)]
        self.stops: list[list[float]] = [[] for _ in range(n_ranks)]
        self._now = [0.0] * n_ranks
        self._arrives = [[0.0] * len(ops) for ops in ends.ops]  # per SEND
        self._link_free: dict[tuple[int, int], float] = {}

    def waits_for(self, rank: int, index: int) -> int:
        return self.ends.sender_of(rank, index, self.at)

    def passed(self, rank: int, index: int) -> None:
        op, now = self.ends.ops[rank][index], self._now[rank]
        end = now
        if op == Op.SEND_SHARD and index and self.ends.ops[rank][index - 1] == Op.RECV_SHARD:
            begins = self._begins(rank, index)
            self._send(rank, index, begins)
            self.starts[rank].append(begins)
            self.stops[rank].append(begins)
            return
        if op in SENDS:
            self._send(rank, index, now)
        elif op in RECVS:
            peer, other = self.ends.peers[rank][index], self.ends.partner[rank][index]
            end = max(now, self._arrives[peer][other])
        else:
            end = now + self._seconds[rank][index]
        self._record(rank, end)

    def norm(self, index: list[int]) -> None:
        end = max(self._now) + self._norm_s
        for rank in range(len(index)):
            self._record(rank, end)

    def _send(self, rank: int, index: int, now: float) -> None:
        way = rank, self.ends.peers[rank][index]
        arrives = max(now, self._link_free.get(way, 0.0)) + self._seconds[rank][index]
        self._arrives[rank][index] = self._link_free[way] = arrives

    def _begins(self, rank: int, send: int) -> float:
        """The round of an exchange behind the RECV of the one before."""
        ops, starts, stops = self.ends.ops[rank], self.starts[rank], self.stops[rank]
        arrives = self._arrives[self.ends.peers[rank][send - 1]][self.ends.partner[rank][send - 1]]
        for i in range(send - 1, -1, -1):
            if ops[i] in COMPUTE and starts[i] < arrives:
                return max(arrives, stops[i])
        return arrives

    def _record(self, rank: int, end: float) -> None:
        self.starts[rank].append(self._now[rank])
        self.stops[rank].append(end)
        self._now[rank] = end
