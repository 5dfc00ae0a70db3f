"""Measures of evaluation in the form of a loss: `metric(outputs, batch) -> (sum, weight)`, both 0-d
float32, so that a share over the whole validation set is sum of sums / sum of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from mpipipe.data.base import IGNORED
from mpipipe.graph.program import Batch
from mpipipe.models.losses import labels_of


def accuracy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """How many labels are the most likely class, and how many count. outputs: logits (B, K), (B, T, K)
    or, for images, (B, K, H, W); labels: int64 (B), (B, T) or (B, H, W), -100 counts for nothing."""
    labels = labels_of(batch)
    best = outputs.argmax(1 if outputs.dim() == 4 else -1)
    return (best == labels).sum().to(torch.float32), (labels != IGNORED).sum().to(torch.float32)


def binary_accuracy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """How many samples are on the right side, and how many there are. outputs: logit (B,), more than 0
    means 1; labels: float (B,), more than 0.5 means 1."""
    labels = labels_of(batch)
    right = ((outputs > 0) == (labels > 0.5)).sum().to(torch.float32)
    return right, torch.full((), labels.numel(), dtype=torch.float32, device=labels.device)
