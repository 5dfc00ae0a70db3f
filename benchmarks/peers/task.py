"""What every peer has to do: the model, data, loss and optimizer of a configuration of `mpipipe.train`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from benchmarks.peers.weights import load_weights, slots
from mpipipe.config import Config
from mpipipe.data import open_dataset
from mpipipe.data.base import IGNORED
from mpipipe.graph.program import LABELS
from mpipipe.models import build
from mpipipe.runtime.optimizer import OptimizerSettings

Update = Literal["fused", "loop"]  # one kernel for each parameter, or operator by operator; both are torch's
WEIGHTS = "weights.safetensors"


class Peer(Protocol):
    def step(self, step: int) -> float:
        """One optimizer step; on rank 0 the loss, a mean over the whole batch."""
        ...


class Task:
    """folder: where `prepare` has put the data and the first weights.

    Batches are read before the first step: ours reads them in a thread, so no peer shall wait for them.
    """

    def __init__(self, config: Config, folder: Path, update: Update) -> None:
        self.config, self.update, self.weights = config, update, folder / WEIGHTS
        t = config.train
        same = {f.name: getattr(t, f.name) for f in fields(OptimizerSettings) if f.name != "kind"}
        self.settings = OptimizerSettings(t.optimizer, **same)
        self.dataset = open_dataset(config, folder)
        built = build(config, self.dataset)
        self.make, self._loss = built.model, built.loss

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """A sum over the labels, to be divided by the number of those of the whole batch."""
        return self._loss(outputs, {"labels": labels})[0]

    def whole_model(self) -> nn.Module:
        """With its first values."""
        with torch.device("meta"):
            model: nn.Module = self.make()
        load_weights(self.weights, slots(model))
        return model

    def inputs(self, start: int, stop: int) -> list[Tensor]:
        """What the model reads of samples [start, stop), for each step."""
        return self._read(self._key(labels=False), start, stop)

    def labels(self, start: int, stop: int) -> list[Tensor]:
        return self._read(self._key(labels=True), start, stop)

    def meta_inputs(self, samples: int) -> Tensor:
        """Their shape alone."""
        spec = self.dataset.specs(samples)[self._key(labels=False)]
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

    def _key(self, labels: bool) -> str:
        return next(key for key in self.dataset.specs(1) if (key in LABELS) is labels)

    def _read(self, key: str, start: int, stop: int) -> list[Tensor]:
        steps = range(self.config.train.steps)
        return [self.dataset.batch("train", i, start, stop, frozenset([key]))[key] for i in steps]

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """No decay on norms and biases."""
        s, params = self.settings, list(params)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": s.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups, how = [g for g in groups if g["params"]], {"fused": self.update == "fused", "foreach": False}
        if s.kind == "adamw":
            return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps, **how)
        return torch.optim.SGD(groups, lr=s.lr, momentum=s.momentum, **how)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """The update, at the learning rate of this step; gradients are gone afterwards."""
        for group in optimizer.param_groups:
            group["lr"] = self.settings.lr_at(step)
        optimizer.step()
        optimizer.zero_grad()


def count(labels: Tensor) -> float:
    """The weight of a batch: labels that count."""
    return float((labels != IGNORED).sum())
