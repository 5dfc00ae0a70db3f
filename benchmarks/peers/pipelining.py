"""torch.distributed.pipelining over gloo, cut by hand: each rank builds its own stages only and states
their shapes.

A tied embedding is kept as Megatron-LM does (Shoeybi et al. 2019): the first and the last stage hold a copy
each, sum the gradients of both, and make the same update. Where both are on one rank (ZB-V), they share
the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.peers.chain import Stage, between, meta_stages
from benchmarks.peers.splits import Action, Order, Split, gpipe, one_f_one_b
from benchmarks.peers.task import Task, count
from benchmarks.peers.weights import load_weights

Loss = Callable[[Tensor, Tensor], Tensor]
SINGLE = {"gpipe": (ScheduleGPipe, gpipe), "1f1b": (Schedule1F1B, one_f_one_b)}  # one stage per rank
DOUBLE = {"interleaved_zero_bubble": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble}  # two


def stages_of(name: str, ranks: int) -> list[tuple[int, ...]]:
    """Per rank, the stages that a schedule puts there."""
    if name in SINGLE:
        return [(r,) for r in range(ranks)]
    return [(r, 2 * ranks - 1 - r if name == "zbv" else ranks + r) for r in range(ranks)]


def make_schedule(name: str, stages: list[PipelineStage], micros: int, loss: Loss) -> _PipelineSchedule:
    # the loss is divided by the weight of the whole batch already
    if name in SINGLE:
        return SINGLE[name][0](stages[0], micros, loss_fn=loss, scale_grads=False)
    return DOUBLE[name](stages, micros, loss_fn=loss, scale_grads=False)


def order_of(name: str, ranks: int, micros: int) -> Order:
    """What each rank does, in the order of torch's schedule. In a process without a process group."""
    if name in SINGLE:
        return SINGLE[name][1](ranks, micros)
    from torch.testing._internal.distributed.fake_pg import FakeStore  # ranks that are not there

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    own, n, x, cpu = stages_of(name, ranks)[0], 2 * ranks, torch.empty(1, device="meta"), torch.device("cpu")
    try:
        stages = [PipelineStage(nn.Identity(), s, n, cpu, x, x) for s in own]
        order: Any = make_schedule(name, stages, micros, lambda outputs, labels: outputs).pipeline_order
    finally:
        dist.destroy_process_group()
    return [
        [Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in order[rank] if a]
        for rank in range(ranks)
    ]


class Pipelining:
    """One rank of the hand-written trainer."""

    def __init__(self, task: Task, name: str, split: Split) -> None:
        config, rank, n = task.config, dist.get_rank(), len(split)
        assert config.train.batch % config.pipeline.micro_batches == 0, "equal micro-batches"
        self.task, self.total, batch = task, 1.0, config.train.batch
        placed = stages_of(name, dist.get_world_size())
        self.first, self.last = 0 in placed[rank], n - 1 in placed[rank]
        self.inputs = task.inputs(0, batch) if self.first else []
        self.labels = task.labels(0, batch) if self.last else []
        whole = meta_stages(task.make, split)
        shapes = between(whole, task.meta_inputs(config.micro_batch))
        self.own = nn.ModuleList(whole[s] for s in placed[rank])
        load_weights(task.weights, (slot for s in placed[rank] for slot in whole[s].slots()))
        self.params = list(self.own.parameters())
        self.tied = self._tied(whole, placed)
        self.optimizer = task.optimizer(self.params)
        cpu = torch.device("cpu")
        stages = [PipelineStage(whole[s], s, n, cpu, shapes[s], shapes[s + 1]) for s in placed[rank]]
        self.schedule = make_schedule(name, stages, config.pipeline.micro_batches, self._loss)

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.task.loss(outputs, labels) / self.total

    def _tied(
        self, whole: Sequence[Stage], placed: Sequence[Sequence[int]]
    ) -> tuple[dist.ProcessGroup, nn.Parameter] | None:
        """Of a parameter on two ranks, on these: their group, and its copy here."""
        holders = [next(r for r, own in enumerate(placed) if s in own) for s in (0, len(whole) - 1)]
        if not getattr(self.task.config.model, "tied", False) or holders[0] == holders[1]:
            return None
        group = dist.new_group(holders)
        if dist.get_rank() not in holders:
            return None
        end: Any = whole[0 if self.first else -1].layers[0 if self.first else -1]
        return group, (end.wte if self.first else end.head).weight

    def step(self, step: int) -> float:
        losses: list[Tensor] = []
        given = (self.inputs[step],) if self.first else ()
        expected: dict[str, Any] = {}
        if self.last:
            self.total = count(self.labels[step])
            expected = {"target": self.labels[step], "losses": losses}
        self.schedule.step(*given, **expected, return_outputs=False)
        loss = self._clip(sum(float(x.detach()) for x in losses))
        self.task.apply(self.optimizer, step)
        return loss

    def _clip(self, loss: float) -> float:
        """Sums up tied gradients; clips by the norm over all stages; the loss travels along."""
        counted = self.params
        if self.tied is not None:
            group, weight = self.tied
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=group)
            if not self.first:  # there it is counted
                counted = [p for p in self.params if p is not weight]
        norm = get_total_norm([p.grad for p in counted if p.grad is not None])
        sums = torch.stack([norm**2, torch.tensor(loss)])
        dist.all_reduce(sums)
        if self.task.settings.clip is not None:
            clip_grads_with_norm_(self.params, self.task.settings.clip, sums[0].sqrt())
        return float(sums[1])
