"""Random small planning problems, and the naive answers that the planner is held against.

Seconds are small integers, speeds and link rates powers of two: sums are exact in floats, so that
ties between cuts are ties for both sides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from hypothesis import strategies as st

from mpipipe.planner import StageTie
from mpipipe.planner.stages import rows_of
from mpipipe.values import BatchBytes, Cluster, Costs, Device, GroupCost, Link, Tie

FREE = Link(0.0, math.inf)
HUGE = 2**50


def group(name: str, fwd: float = 1, bwd_input: float = 1, bwd_weight: float = 1, **nbytes: int) -> GroupCost:
    sizes = {"param_bytes": 0, "stash_bytes": 0, "workspace_bytes": 0, "act_bytes": 0, "grad_bytes": 0}
    return GroupCost(name, fwd, bwd_input, bwd_weight, **(sizes | nbytes))


def cluster(speeds: list[float], memories: list[int], link: Link = FREE, far: Link | None = None) -> Cluster:
    """Two ranks to a node."""
    devices = tuple(Device("cpu:test", s, m, 1) for s, m in zip(speeds, memories, strict=True))
    nodes = tuple(rank // 2 for rank in range(len(devices)))
    return Cluster(devices, nodes, {"node": link, "switch": far or link})


def uniform(n_groups: int, n_ranks: int, step_s_per_byte: float = 0.0, **nbytes: int) -> Costs:
    """Equal groups (F 1 s, B 2 s) on equal ranks with free links."""
    groups = tuple(group(f"g{i}", **nbytes) for i in range(n_groups))
    return Costs(
        groups, cluster([1.0] * n_ranks, [HUGE] * n_ranks), (), 4.0, step_s_per_byte, "modelled", 0.0
    )


@st.composite
def problems(
    draw: st.DrawFn, memory: str = "mixed", max_groups: int = 7, remakes: bool = False
) -> tuple[Costs, int, int]:
    """(costs, n_stages, n_micro). memory: "mixed" (some do not fit), "tight" (one small size for
    all ranks) or "huge". remakes: groups can make something again, and let go of something at I."""
    n_groups = draw(st.integers(1, max_groups))
    n_stages = draw(st.integers(1, min(4, n_groups)))
    small = st.integers(0, 9)
    ties = tuple(draw(_tie(name, n_groups)) for name in "vw"[: draw(st.integers(0, 2))])
    rows_bytes = {tie.param: draw(st.integers(1, 3)) for tie in ties if len(tie.groups) == 2}
    groups = tuple(_with_ties(draw, f"g{i}", i, ties, small) for i in range(n_groups))
    if remakes:
        groups = tuple(_with_remade(draw, g) for g in groups)
    sizes = {
        "huge": st.just(HUGE),
        "mixed": st.one_of(st.just(HUGE), st.integers(50, 600)),
        "tight": st.just(draw(st.integers(10, 160))),
    }[memory]
    machine = cluster(
        [draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(n_stages)],
        [draw(sizes) for _ in range(n_stages)],
        draw(st.sampled_from([FREE, Link(0.25, 8.0)])),
        draw(st.sampled_from([FREE, Link(0.5, 2.0)])),
    )
    costs = Costs(groups, machine, ties, draw(st.sampled_from([2.0, 4.0])), 0.125, "modelled", 0.0,
                  draw(st.sampled_from([0.0, 1.5])),
                  rows_bytes=rows_bytes, batch_bytes=BatchBytes(*draw(st.tuples(*[st.integers(0, 3)] * 3)))
    )  # fmt: skip
    return costs, n_stages, draw(st.integers(1, 5))


@st.composite
def _tie(draw: st.DrawFn, name: str, n_groups: int) -> Tie:
    uses = draw(st.lists(st.integers(0, n_groups - 1), min_size=2, max_size=3))
    return Tie(name, draw(st.integers(1, 9)), tuple(sorted(uses)))


def _with_ties(draw: st.DrawFn, name: str, index: int, ties: tuple[Tie, ...], small) -> GroupCost:
    """A group holds its own parameters and those tied to it, each once."""
    param, stash = draw(small) + sum(tie.nbytes for tie in ties if index in tie.groups), draw(small)
    return GroupCost(
        name, 1 + draw(small), draw(small), draw(small), param, stash, *(draw(small) for _ in range(3)),
        received_bytes=draw(st.integers(0, stash)), cast_bytes=draw(small),
    )  # fmt: skip


def _with_remade(draw: st.DrawFn, g: GroupCost) -> GroupCost:
    waiting = draw(st.integers(0, g.stash_bytes))
    return dataclasses.replace(
        g, selective_share=draw(st.sampled_from([0.0, 0.25, 0.5])),
        selective_bytes=draw(st.integers(0, g.stash_bytes)),
        at_work_bytes=draw(st.integers(0, g.workspace_bytes)), waiting_bytes=waiting,
        waiting_received_bytes=draw(st.integers(0, waiting)),
        waiting_grad_bytes=draw(st.integers(0, waiting)),
    )  # fmt: skip


def all_cuts(n_groups: int, n_stages: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations(range(1, n_groups), n_stages - 1)


def naive_stage_s(costs: Costs, edges: tuple[int, ...], stage: int) -> float:
    """Compute and both links of one stage, straight from the definition."""
    first, end = edges[stage], edges[stage + 1]
    seconds = sum(g.fwd_s + g.bwd_input_s + g.bwd_weight_s for g in costs.groups[first:end])
    seconds /= costs.cluster.devices[stage].speed
    for cut, left in ((first, stage - 1), (end, stage)):
        if 0 < cut < len(costs.groups):
            link, before = costs.cluster.link(left, left + 1), costs.groups[cut - 1]
            seconds += link.seconds(before.act_bytes) + link.seconds(before.grad_bytes)
    return seconds


def naive_fixed_bytes(costs: Costs, first: int, end: int) -> int:
    held = sum(g.param_bytes for g in costs.groups[first:end])
    further = elsewhere = 0
    for tie in costs.ties:
        here = [use for use in tie.groups if first <= use < end]
        held -= tie.nbytes * max(0, len(set(here)) - 1)
        if (rows := rows_of(costs).get(tie.param)) is not None:
            further += rows * (tie.groups[0] in here)
        else:
            further += tie.nbytes * max(0, len(here) - 1)
        if here and tie.groups[0] < first:
            elsewhere += tie.nbytes
    batch = costs.batch_bytes.first * (first == 0) + costs.batch_bytes.of_last * (end == len(costs.groups))
    state = math.ceil(elsewhere * costs.state_bytes_per_param_byte)
    casts = sum(g.cast_bytes for g in costs.groups[first:end])
    return math.ceil(held * costs.bytes_per_param_byte) - state + further + casts + batch


def naive_memory(costs: Costs, first: int, end: int, live: int, window: int, n_micro: int, tied: str) -> int:
    groups = costs.groups
    act_in = groups[first - 1].act_bytes if first else 0
    grad_in = groups[end - 1].grad_bytes if end < len(groups) else 0
    stash = max(0, act_in - groups[first].received_bytes) + sum(g.stash_bytes for g in groups[first:end])
    posted = min(window, n_micro)
    receive = posted * act_in + (posted + 1) * grad_in
    receive += max(
        groups[end - 1].act_bytes if end < len(groups) else 0, groups[first - 1].grad_bytes if first else 0
    )
    for tie in costs.ties:
        if first <= tie.groups[0] < end and tie.param not in rows_of(costs):
            outside = len({use for use in tie.groups if use >= end})
            receive += tie.nbytes * min(window + outside, outside * (n_micro if tied == "eager" else 1))
    workspace = max(g.workspace_bytes for g in groups[first:end])
    return naive_fixed_bytes(costs, first, end) + live * stash + workspace + receive


def naive_live(schedule: str, stage: int, n_stages: int, n_micro: int) -> int:
    return n_micro if schedule == "gpipe" else min(n_stages - stage, n_micro)


def fitting_cuts(
    costs: Costs, schedule: str, n_stages: int, n_micro: int, window: int, tied: str, memories: list[int]
) -> Iterator[tuple[int, ...]]:
    """Every cut that fits, by trying all."""
    n_groups = len(costs.groups)
    for cuts in all_cuts(n_groups, n_stages):
        edges = (0, *cuts, n_groups)
        if all(
            naive_memory(costs, edges[s], edges[s + 1], naive_live(schedule, s, n_stages, n_micro),
                         window, n_micro, tied) <= memories[s]
            for s in range(n_stages)
        ):  # fmt: skip
            yield cuts


TIES = st.lists(
    st.integers(0, 5).flatmap(
        lambda owner: st.builds(
            StageTie,
            st.just(owner),
            st.sets(st.integers(owner + 1, 6), min_size=1).map(lambda s: tuple(sorted(s))),
            st.integers(1, 99),
        )
    ),
    max_size=3,
)


def on(n_stages: int, ties: list[StageTie]) -> tuple[StageTie, ...]:
    """Those of `TIES` that a pipeline of `n_stages` has."""
    return tuple(tie for tie in ties if max(tie.users) < n_stages)


def barely_fitting() -> tuple[Costs, tuple[str, ...]]:
    """Costs of two ranks with few bytes, and cuts that fit as they are simulated with a receive window of 8
    and 4 micro-batches: `partition` takes it that all that are posted at one time are activations, and at
    another gradients."""
    groups = tuple(group(f"g{i}", act_bytes=10, param_bytes=1) for i in range(4))
    machine = cluster([1.0, 1.0], [45, 45])
    return Costs(groups, machine, (), 1.0, 0.0, "modelled", 0.0), ("g2",)
