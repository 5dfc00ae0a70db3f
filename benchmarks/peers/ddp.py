"""DistributedDataParallel over gloo: each rank has the whole model and its share of the batch."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.peers.task import Task, count


class Ddp:
    """Gradients are added up over the rank's micro-batches, and over ranks in the last one's backward.

    micro_batch: samples of each; at most the rank's share. Running statistics of BatchNorm stay each rank's
    own: they play no part in training.
    """

    def __init__(self, task: Task, micro_batch: int) -> None:
        self.task, self.micro_batch, self.ranks = task, micro_batch, dist.get_world_size()
        self.model = DistributedDataParallel(
            task.whole_model(), broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self.optimizer = task.optimizer(self.model.parameters())
        share, rank = task.config.train.batch // self.ranks, dist.get_rank()
        assert share * self.ranks == task.config.train.batch, "every rank has as many samples"
        own = rank * share, (rank + 1) * share
        self.inputs, self.labels = task.inputs(*own), task.labels(*own)

    def step(self, step: int) -> float:
        parts = [t[step].split(self.micro_batch) for t in (self.inputs, self.labels)]
        sums = torch.tensor([count(self.labels[step]), 0.0], dtype=torch.float64)
        dist.all_reduce(sums[:1])  # what the loss is divided by
        for i, (inputs, labels) in enumerate(zip(*parts, strict=True)):
            with nullcontext() if i == len(parts[0]) - 1 else self.model.no_sync():
                loss = self.task.loss(self.model(inputs), labels) / sums[0].item()
                (loss * self.ranks).backward()  # DDP takes the mean over ranks
                sums[1] += float(loss.detach())
        dist.all_reduce(sums[1:])
        if self.task.settings.clip is not None:
            clip_grad_norm_(self.model.parameters(), self.task.settings.clip)
        self.task.apply(self.optimizer, step)
        return float(sums[1])
