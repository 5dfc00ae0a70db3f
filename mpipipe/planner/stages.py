"""From the costs of groups to the costs of stages: the only place where that sum is written.

A stage is a run of consecutive groups [first, end). Stage s runs on rank s: where a layout says
otherwise, the costs are those of `in_order`. The partitioner asks
for all runs that end at one place at once (arrays over `first`), `stage_costs` picks one of them,
so what is optimised, proved and simulated is the same number.

Memory of a stage, in bytes:

    fixed + most of (whole * stash + late * waiting) + remade + workspace + messages      (`memory_bytes`)

`fixed` has the casts of weights for products in a shorter dtype, which all micro-batches of a step share.
They are counted as if they were there outside of it, too: what a step takes most is between its first F and
its update.

The stash counts what is received: once, also where the first group keeps it for backward. The buffers of
that, and of gradients that wait, stay for later ones: they are counted at their own most.

The tensors alone need a little less than what an allocator has to keep for them: while a group is at work
the stash of its micro-batch is not yet, or no longer, whole. `at_work_bytes` is what is tensors of the
workspace, with the gradients that come to the group and those that pass it by, less what is missing. The
gradients that come to the last group are messages.

`whole` and `late` are the micro-batches whose stash the schedule keeps, and those that I has left and whose
weight gradients wait for W, at the same time. Those that come with I cannot be added to the sums of a
block while others still wait for those of the one before: each block that I is ahead in has its own, of
`at_once_bytes`. With recomputation a part of the stash, `remade`, is let go after F, and made again in B, or
I. That takes the seconds of `remade_s` on top of those of the backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import PlanError
from mpipipe.values import RECOMPUTE, Costs, Float64, Int64, Link, Recompute, StageCost, Tie

Cuts = tuple[int, ...]  # the first group of the stages 1 .. S-1
_FEW = 4  # times as large as the rows that are kept of it is a table at least
_LEAST = 0.1  # of the seconds of a backward that are never taken for what it makes again
Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True)
class StageTie:
    """A tied parameter seen by stages: the owner has the first use, the users the others."""

    owner: int
    users: tuple[int, ...]  # ascending, each once, the owner not among them
    nbytes: int  # of the parameter = of its gradient = of one message
    in_place: bool = False  # whether its user adds to the owner's gradient, or sends its own into that


class Again(NamedTuple):
    """What a mode of recomputation changes, by group."""

    bwd_input_s: Float64  # with what is made again
    remade: Int64
    held_in: Int64  # as `Ranges.held_in`
    received: Int64  # by the first group: what `remade` need not hold, as it is received


@dataclass(frozen=True)
class Ending:
    """All stages that end at one group, by their first group: arrays (end - low,). Times are those of
    a device of speed 1."""

    fwd_s: Float64
    bwd_input_s: Float64
    bwd_weight_s: Float64
    step_s: Float64
    fixed_bytes: Int64
    stash_bytes: Int64
    workspace_bytes: Int64
    at_work_bytes: Int64
    message_bytes: Int64
    remade_bytes: Int64
    waiting_bytes: Int64
    waiting_received_bytes: Int64
    in_two_bytes: Int64
    at_once_bytes: Int64
    act_bytes: Int64  # that it receives
    grad_bytes: int  # that it receives
    n_micro: int
    blocks: int  # of these micro-batches

    @property
    def seconds(self) -> Float64:
        """Forward and backward of one micro-batch."""
        return self.fwd_s + self.bwd_input_s + self.bwd_weight_s

    def memory_bytes(self, kept: Int64) -> Int64:
        """kept: as of `kept_micro_batches`, of one stage (mixes, 2), or of several: then so is the result."""
        whole, late = kept[..., 0, None], kept[..., 1, None]
        waiting = np.maximum(0, self.waiting_bytes - self.waiting_received_bytes)
        held = (whole * (self.stash_bytes - self.act_bytes) + late * waiting).max(axis=-2)
        held += (whole + late).max(axis=-2) * self.act_bytes + late.max(axis=-2) * self.grad_bytes  # buffers
        in_two = np.where(late.any(axis=-2), np.maximum(0, self.in_two_bytes - self.at_work_bytes), 0)
        once = self.remade_bytes + self.grad_bytes + self.workspace_bytes + self.message_bytes + in_two
        once += blocks_ahead(late.max(axis=-2), self.n_micro, self.blocks) * self.at_once_bytes
        return np.asarray(self.fixed_bytes + held + once, np.int64)


class Ranges:
    """Sums over every run of consecutive groups.

    `receive_window`, `n_micro` and `tied` bound the receive buffers: all of those posted ahead may be for
    activations, and later, as buffers are kept, all for gradients, beside those that are read: one, or with
    backwards in two those from I to W. The message that was sent last is still there. The owner of a tied
    parameter also has gradients from its users, some per micro-batch if "eager", one per step if "per_use";
    but where it keeps rows of its own, that lands in its gradient, as a copied weight does in its place.
    `with_update`: backward carries its micro-batch's share of the step's one update.
    """

    def __init__(
        self,
        costs: Costs,
        receive_window: int = 0,
        n_micro: int = 1,
        tied: str = "per_use",
        with_update: bool = False,
    ) -> None:
        self._costs = costs
        self.kept_rows = rows_of(costs)
        self.state_per_param_byte = costs.state_bytes_per_param_byte / costs.copies
        self.window = min(receive_window, n_micro)
        self.tied_window = receive_window
        self.tied_repeats = n_micro if tied == "eager" else 1
        self.n_micro, self.blocks = n_micro, max(1, costs.blocks // costs.copies)
        c = costs.columns
        self.fwd_s, self.bwd_input_s = c["fwd_s"], c["bwd_input_s"]
        self.bwd_weight_s = c["bwd_weight_s"]
        self._update_s = c["update_s"] / costs.copies
        self._update_s_per_byte = costs.step_s_per_byte / costs.copies
        if with_update:
            update_s = self._update_s_per_byte * c["param_bytes"] + self._update_s
            self.bwd_weight_s = self.bwd_weight_s + update_s / n_micro
        self.param_bytes, self.stash_bytes = c["param_bytes"], c["stash_bytes"]
        self.workspace_bytes, self.at_work_bytes = c["workspace_bytes"], c["at_work_bytes"]
        self._stashed = np.cumsum(self.stash_bytes)  # after each group
        self.cast_bytes = c["cast_bytes"]
        self.waiting_bytes, self.late_grads = c["waiting_bytes"], c["waiting_grad_bytes"]
        self._waiting, self.at_once_bytes = np.cumsum(self.waiting_bytes), c["at_once_bytes"]
        self.act_in = np.concatenate([[0], c["act_bytes"][:-1]])
        self.grad_in = np.concatenate([c["grad_bytes"][:-1], [0]])
        received = np.minimum(c["received_bytes"], self.act_in)  # by the first group, kept by it
        self.late_received = np.minimum(c["waiting_received_bytes"], self.act_in)
        self.held_in = self.act_in - received  # of what is received, what is in no stash of here
        nothing = np.zeros_like(self.stash_bytes)
        remade = {"none": nothing, "selective": c["selective_bytes"], "full": self.stash_bytes}
        self.again = {
            mode: Again(
                bwd_input_s=self.bwd_input_s + remade_s(c, mode),
                remade=remade[mode],
                held_in=self.held_in if mode == "none" else self.act_in,  # else perhaps counted in `remade`
                received=received if mode == "full" else nothing,
            )
            for mode in RECOMPUTE
        }

    @property
    def seconds(self) -> Float64:
        """Forward and backward of each group for one micro-batch."""
        return np.asarray(self.fwd_s + self.bwd_input_s + self.bwd_weight_s, np.float64)

    def ending_at(self, end: int, low: int = 0, mode: Recompute = "none") -> Ending:
        """Every stage [first, end), first = low .. end - 1, with that recomputation."""
        again = self.again[mode]
        act_in = self.act_in[low:end]
        held, stepped, elsewhere, accumulators = self._parameters(end, low)
        rate, state = self._costs.held_per_param_byte, self.state_per_param_byte
        grad_in = int(self.grad_in[end - 1])
        received = self.window * (act_in + grad_in)
        act_out = self.act_in[end] if end < len(self.act_in) else 0
        sent = np.maximum(act_out, np.concatenate([[0], self.grad_in])[low:end])
        with_stash = (self._stashed + self.at_work_bytes + self.grad_in)[low:end] - self._stashed[end - 1]
        with_stash[-1] -= grad_in
        late_grads = self.late_grads[end - 1]  # messages
        in_two = with_stash + self._waiting[end - 1] - self._waiting[low:end] - late_grads
        in_two[-1] += late_grads
        waiting = _sums(self.waiting_bytes[low:end]) - late_grads
        return Ending(
            fwd_s=_sums(self.fwd_s[low:end]),
            bwd_input_s=_sums(again.bwd_input_s[low:end]),
            bwd_weight_s=_sums(self.bwd_weight_s[low:end]),
            step_s=stepped * self._update_s_per_byte + _sums(self._update_s[low:end]),
            fixed_bytes=(np.ceil(held * rate) - np.ceil(elsewhere * state)).astype(np.int64)
            + accumulators
            + _sums(self.cast_bytes[low:end])
            + self._batch(end, low),
            stash_bytes=_sums((self.stash_bytes - again.remade)[low:end]) + again.held_in[low:end],
            workspace_bytes=np.maximum.accumulate(self.workspace_bytes[low:end][::-1])[::-1],
            at_work_bytes=_most_from(with_stash),
            message_bytes=received + sent + self._tied_receives(end, low),
            remade_bytes=_sums(again.remade[low:end]) - again.received[low:end],
            waiting_bytes=waiting,
            waiting_received_bytes=self.late_received[low:end],
            in_two_bytes=_most_from(in_two),
            at_once_bytes=_sums(self.at_once_bytes[low:end]) * (self.blocks > 1),
            act_bytes=act_in,
            grad_bytes=grad_in,
            n_micro=self.n_micro,
            blocks=self.blocks,
        )

    def _parameters(self, end: int, low: int) -> tuple[Int64, Int64, Int64, Int64]:
        """Bytes of the weights held (a tied one once), of those updated here (a tied one at its first use
        only), of those that another stage updates, and of what tied ones have beside one gradient: those of
        their further uses here, or rows."""
        held = _sums(self.param_bytes[low:end])
        stepped = held.copy()
        elsewhere, accumulators = np.zeros((2, len(held)), np.int64)
        for tie in self._costs.ties:
            rows_bytes, owner = self.kept_rows.get(tie.param, 0), tie.groups[0]
            if owner < end:
                last = max(use for use in tie.groups if use < end)
                elsewhere[max(0, owner + 1 - low) : max(0, last + 1 - low)] += tie.nbytes
                accumulators[: max(0, owner + 1 - low)] += rows_bytes
            for before, use in itertools.pairwise(tie.groups):
                if use >= end:
                    continue
                if not rows_bytes:
                    accumulators[: max(0, before + 1 - low)] += tie.nbytes
                if use != before:  # two uses inside one group: its weight is counted once already
                    held[: max(0, before + 1 - low)] -= tie.nbytes
                    stepped[: max(0, use + 1 - low)] -= tie.nbytes
        return held, stepped, elsewhere, accumulators

    def _batch(self, end: int, low: int) -> Int64:
        """Of `Costs.batch_bytes`."""
        held = np.full(end - low, self._costs.batch_bytes.of_last if end == len(self.param_bytes) else 0)
        if low == 0:
            held[0] += self._costs.batch_bytes.first
        return held

    def _tied_receives(self, end: int, low: int) -> Int64:
        buffers = np.zeros(end - low, np.int64)
        for tie in self._costs.ties:
            owner, outside = tie.groups[0], len({use for use in tie.groups if use >= end})
            if low <= owner < end and tie.param not in self.kept_rows:
                most = min(self.tied_window + outside, outside * self.tied_repeats)
                buffers[: owner + 1 - low] += most * tie.nbytes
        return buffers


def blocks_ahead(late: Int64 | int, n_micro: int, blocks: int) -> Int64:
    """In how many blocks of its micro-batches I can be ahead of W at most, with the one at work, while that
    many others wait for W."""
    return np.asarray(np.minimum(-(-late * blocks // n_micro), blocks - 1), np.int64)


def remade_s(columns: Mapping[str, NDArray[Any]], mode: Recompute) -> Float64:
    """Seconds that backward takes for what it makes again, by group. columns: of `Costs`."""
    share = {"none": 0.0, "selective": columns["selective_share"], "full": 1.0}[mode]
    return np.asarray(share * columns["fwd_s"], np.float64)


def without_remade_s(took_s: float, again_s: float) -> float:
    """Of a backward that took so long, the seconds without `again_s` for what it makes again."""
    return max(took_s - again_s, _LEAST * took_s)


def own_bytes(costs: Costs) -> Int64:
    """Of the weights of each group; a tied one counts where it is first used, as there it is updated."""
    nbytes = costs.columns["param_bytes"].astype(np.int64)  # a copy
    for tie in costs.ties:
        nbytes[list({*tie.groups} - {tie.groups[0]})] -= tie.nbytes
    return nbytes


def _sums(x: NDArray[Number]) -> NDArray[Number]:
    """Sum of x[first:] for every first; added up, never subtracted, so nothing cancels."""
    sums: NDArray[Number] = np.cumsum(x[::-1])[::-1]
    return sums


def _most_from(x: Int64) -> Int64:
    """The largest of x[first:] for every first, at least 0."""
    return np.maximum(0, np.maximum.accumulate(x[::-1])[::-1])


def bounds(n_groups: int, cuts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(first, end) of each stage. Raises PlanError if a cut leaves a stage empty."""
    edges = (0, *cuts, n_groups)
    for stage, (first, end) in enumerate(itertools.pairwise(edges)):
        if first >= end:
            raise PlanError(
                f"stage {stage} is empty: it starts at group {first} and ends at {end} of {n_groups}; "
                f"cuts must ascend strictly inside 0 .. {n_groups}, got {tuple(cuts)}"
            )
    return tuple(itertools.pairwise(edges))


def are_cuts(n_groups: int, cuts: Cuts) -> bool:
    """Whether no stage is empty."""
    return all(a < b for a, b in itertools.pairwise((0, *cuts, n_groups)))


def neighbours(n_groups: int, cuts: Cuts) -> list[tuple[int, Cuts]]:
    """All that have one cut elsewhere by one group, each with the number of that cut."""
    moved = ((i, (*cuts[:i], cuts[i] + d, *cuts[i + 1 :])) for i in range(len(cuts)) for d in (-1, 1))
    return [(i, other) for i, other in moved if are_cuts(n_groups, other)]


def walked(n_groups: int, cuts: Cuts, most: int, better: Callable[[Cuts], bool]) -> Cuts:
    """From these cuts on, where some beside each other are moved by a group or two: the first that are better
    than those before are gone on from, few moves before many, until none are or `most` were looked at."""
    spans = sorted(
        itertools.combinations(range(len(cuts) + 1), 2), key=lambda span: (span[1] - span[0], span)
    )
    moves, seen, since = [*itertools.product(spans, (-2, -1, 1, 2))], {cuts}, 0  # since the last gain
    for (i, j), by in itertools.cycle(moves):
        if since == len(moves) or len(seen) > most:
            break
        since += 1
        other = (*cuts[:i], *(cut + by for cut in cuts[i:j]), *cuts[j:])
        if other in seen or not are_cuts(n_groups, other):
            continue
        seen.add(other)
        if better(other):
            cuts, since = other, 0
    return cuts


def in_order(costs: Costs, order: Sequence[int]) -> Costs:
    """With the ranks numbered as the stages that they hold, and links that all neighbours use at once."""
    cluster = costs.cluster.loaded(order)
    if tuple(order) != tuple(range(len(order))):
        cluster = cluster.in_order(order)
    return costs if cluster is costs.cluster else costs.but(cluster=cluster)


def stage_costs(costs: Costs, cuts: Sequence[int], modes: Sequence[Recompute] = ()) -> tuple[StageCost, ...]:
    """Costs of each stage on its rank (stage s on rank s, seconds divided by that rank's speed), with the
    recomputation `modes`, by stage; () = none.

    cuts: index of the first group of stages 1 .. S-1. `fixed_bytes` counts weight, gradient and
    optimizer state of every parameter once, plus one gradient for each further use of a tied
    parameter (an upper bound in mode "eager", as is `at_once_bytes`), or its rows (`kept_rows`), and the
    casts of each use; its users have no optimizer state. `stash_bytes` includes the received activation.
    Raises PlanError on bad cuts.
    """
    devices = costs.cluster.devices
    keys: list[tuple[int, int, Recompute, float]] = [
        (first, end, modes[stage] if modes else "none", devices[stage].speed)
        for stage, (first, end) in enumerate(bounds(len(costs.groups), cuts))
    ]
    if missing := [key for key in keys if key not in costs.stages]:
        ranges = Ranges(costs)
        costs.stages.update((key, _stage_cost(costs, ranges, *key)) for key in missing)
    return tuple(costs.stages[key] for key in keys)


def _stage_cost(
    costs: Costs, ranges: Ranges, first: int, end: int, mode: Recompute, speed: float
) -> StageCost:
    groups, e = costs.groups, ranges.ending_at(end, first, mode)
    return StageCost(
        fwd_s=float(e.fwd_s[0]) / speed,
        bwd_input_s=float(e.bwd_input_s[0]) / speed,
        bwd_weight_s=float(e.bwd_weight_s[0]) / speed,
        step_s=float(e.step_s[0]) / speed,
        fixed_bytes=int(e.fixed_bytes[0]),
        stash_bytes=int(e.stash_bytes[0]),
        workspace_bytes=int(e.workspace_bytes[0]),
        at_work_bytes=int(e.at_work_bytes[0]),
        waiting_bytes=int(e.waiting_bytes[0]),
        waiting_received_bytes=int(e.waiting_received_bytes[0]),
        in_two_bytes=int(e.in_two_bytes[0]),
        at_once_bytes=int(e.at_once_bytes[0]),
        blocks=e.blocks,
        act_bytes=groups[end - 1].act_bytes if end < len(groups) else 0,
        grad_bytes=groups[first - 1].grad_bytes if first else 0,
        remade_bytes=int(e.remade_bytes[0]),
        split_s=float(costs.columns["split_s"][first:end].sum()) / speed,
        call_s=costs.call_s / speed,
        kept_bytes=groups[end - 1].kept_bytes if end < len(groups) and mode == "none" else 0,
        act_parts=groups[end - 1].act_parts if end < len(groups) else (),
        grad_parts=groups[first - 1].grad_parts if first else (),
    )


def stage_ties(
    ties: Sequence[Tie], cuts: Sequence[int], in_place: Collection[str] = ()
) -> tuple[StageTie, ...]:
    """The ties that cross a cut, in the order of `ties`; the others need no message. in_place: parameters,
    see `StageTie`."""
    out = []
    for tie in ties:
        owner, *others = (int(np.searchsorted(cuts, group, side="right")) for group in tie.groups)
        users = tuple(sorted(set(others) - {owner}))
        if users:
            out.append(StageTie(owner, users, tie.nbytes, tie.param in in_place))
    return tuple(out)


def kept_rows(ties: Sequence[Tie], rows_bytes: Mapping[str, int], blocks: int, copies: int) -> dict[str, int]:
    """Of `Variants.rows_bytes` what is kept, as it is little and the sum is in one piece: the look-up then
    has no gradient of the table's size, the head adds to that of the owner, or sends its own into it."""
    sizes = {tie.param: tie.nbytes for tie in ties} if blocks == copies == 1 else {}
    return {name: taken for name, taken in rows_bytes.items() if _FEW * taken <= sizes.get(name, 0)}


def rows_of(costs: Costs) -> dict[str, int]:
    return kept_rows(costs.ties, costs.rows_bytes, costs.blocks, costs.copies)


def calls(ranks: Sequence[int]) -> list[int]:
    """What F, or a backward, of each stage is in calls: one, and one for each message that it waits for or
    sends. ranks: by stage."""
    near = [a != b for a, b in itertools.pairwise(ranks)]
    return [1 + before + after for before, after in zip([False, *near], [*near, False], strict=True)]


def crossing_s(costs: Costs, link: Link) -> Float64:
    """Seconds that one micro-batch (activation and gradient) spends on the link between two stages, for a
    cut before group g: array (n_groups + 1,), zero at both ends."""
    inside = [costs.columns[name][:-1] for name in ("act_bytes", "grad_bytes")]
    seconds = np.zeros(len(costs.groups) + 1)
    for sizes in inside:
        distinct, which = np.unique(sizes, return_inverse=True)
        seconds[1:-1] += np.array([link.seconds(nbytes) for nbytes in distinct.tolist()])[which]
    return seconds
