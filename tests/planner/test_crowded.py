"""Ranks that share cores, against a simulation of what each rank computes between any two events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from planner_cases import FREE, HUGE, cluster

from mpipipe.planner import SCHEDULES, lower, simulate
from mpipipe.planner.crowded import is_crowded
from mpipipe.values import COMPUTE, RECVS, SENDS, Cluster, Op, Program, StageCost

EVEN = StageCost(1.0, 0.7, 0.6, 0.2, 0, 0, 0, 0, 0)
UNEVEN = (EVEN, replace(EVEN, fwd_s=2.0), replace(EVEN, bwd_weight_s=0.1), replace(EVEN, fwd_s=0.3))


def crowd(n_ranks: int, alone: float, nodes: Sequence[int] = ()) -> Cluster:
    found = cluster([1.0] * n_ranks, [HUGE] * n_ranks, FREE)
    devices = tuple(replace(device, alone=alone) for device in found.devices)
    return replace(found, devices=devices, node_of_rank=tuple(nodes) or (0,) * n_ranks)


def one_by_one(program: Program, stages: Sequence[StageCost], where: Cluster) -> float:
    """The step, messages being free: from one event to the next, every rank at the rate that it has then."""
    n = len(program.codes)
    todo = [deque(codes.tolist()) for codes in program.codes]
    sent, left, now = set[tuple[int, ...]](), [0.0] * n, 0.0
    seconds = {Op.F: "fwd_s", Op.I: "bwd_input_s", Op.W: "bwd_weight_s", Op.STEP: "step_s"}

    def work(op: int, stage: int) -> float:
        cost = stages[stage]
        return cost.bwd_input_s + cost.bwd_weight_s if op == Op.B else float(getattr(cost, seconds[Op(op)]))

    while any(todo):
        moved = True
        while moved:  # what takes no time
            moved = False
            at_norm = all(of and of[0][0] == Op.NORM for of in todo)
            for rank, of in enumerate(todo):
                while of and not left[rank]:
                    op, stage, micro, other, peer, tag = of[0]
                    if op in COMPUTE:
                        left[rank] = work(op, stage)
                        if left[rank]:
                            break
                    elif op in RECVS and (op - 1, other, micro, stage, peer, rank, tag) not in sent:
                        break
                    elif op in SENDS:
                        sent.add((op, stage, micro, other, rank, peer, tag))
                    elif op == Op.NORM and not at_norm:
                        break
                    of.popleft()
                    moved = True
        node = where.node_of_rank
        active = [rank for rank in range(n) if left[rank]]
        rate = {
            rank: min(
                where.devices[rank].alone,
                node.count(node[rank]) / sum(node[other] == node[rank] for other in active),
            )
            for rank in active
        }
        if not active:
            break
        step = min(left[rank] / rate[rank] for rank in active)
        now += step
        for rank in active:
            left[rank] -= step * rate[rank]
            if left[rank] < 1e-9:
                left[rank] = 0.0
                todo[rank].popleft()
    assert not any(todo)
    return now


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("stages", [(EVEN,) * 4, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(("alone", "nodes"), [(2.0, ()), (4.0, ()), (4 / 3, ()), (2.0, (0, 0, 1, 1))])
def test_a_step(schedule: str, stages: tuple[StageCost, ...], alone: float, nodes: tuple[int, ...]) -> None:
    program, where = lower(SCHEDULES[schedule](4, 8), (), "per_use", 4), crowd(4, alone, nodes)
    exact = one_by_one(program, stages, where)
    assert simulate(program, stages, where).makespan_s == pytest.approx(exact, rel=1e-4)


def test_many_ranks_settle() -> None:
    program, stages = lower(SCHEDULES["1f1b"](16, 64), (), "per_use", 4), UNEVEN * 4
    where = crowd(16, 4.0)
    exact = one_by_one(program, stages, where)
    assert simulate(program, stages, where).makespan_s == pytest.approx(exact, rel=1e-4)


def test_with_one_core_for_all_no_schedule_waits() -> None:
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        program = lower(SCHEDULES[schedule](4, 8), (), "per_use", 4)
        found = simulate(program, (EVEN,) * 4, crowd(4, 4.0)).makespan_s
        assert found == pytest.approx(8 * 2.3 + 0.2)


def test_where_each_has_its_own_core_nothing_is_new() -> None:
    program = lower(SCHEDULES["1f1b"](4, 8), (), "per_use", 4)
    assert not is_crowded(crowd(4, 1.0))
    found = simulate(program, (EVEN,) * 4, crowd(4, 1.0)).makespan_s
    assert found == one_by_one(program, (EVEN,) * 4, crowd(4, 1.0)) == pytest.approx((8 + 3) * 2.3 + 0.2)
