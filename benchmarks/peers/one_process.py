"""One process with all cores, eager or compiled."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.peers.task import Task, count


class OneProcess:
    """micro_batch: samples of each forward and backward; the whole batch is one possibility."""

    def __init__(self, task: Task, micro_batch: int, compiled: bool) -> None:
        self.task, self.micro_batch = task, micro_batch
        self.model = task.whole_model()
        self.optimizer = task.optimizer(self.model.parameters())
        batch = task.config.train.batch
        self.inputs, self.labels = task.inputs(0, batch), task.labels(0, batch)
        self.loss = torch.compile(self._loss) if compiled else self._loss

    def _loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.task.loss(self.model(inputs), labels)

    def step(self, step: int) -> float:
        total, mean = count(self.labels[step]), 0.0
        parts = zip(*(t[step].split(self.micro_batch) for t in (self.inputs, self.labels)), strict=True)
        for inputs, labels in parts:
            loss = self.loss(inputs, labels) / total
            loss.backward()
            mean += float(loss.detach())
        if self.task.settings.clip is not None:
            clip_grad_norm_(self.model.parameters(), self.task.settings.clip)
        self.task.apply(self.optimizer, step)
        return mean
