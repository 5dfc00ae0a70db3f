"""Losses in the project's form: `loss(outputs, batch) -> (sum, weight)`, both 0-d float32.

The weight must depend on the batch alone: the total of a step is then known before the first
backward, and the step's loss, sum of sums / sum of weights, is the mean over the whole batch for
every number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # a label that counts for nothing, as in torch


def cross_entropy(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the negative log-likelihoods in nats, in float32 also under bf16, and the number of
    labels that count. outputs: logits (..., V); batch["labels"] or batch["y"]: int64 (...)."""
    labels = (batch["labels"] if "labels" in batch else batch["y"]).reshape(-1)
    logits = outputs.reshape(-1, outputs.shape[-1]).float()
    total = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum().to(torch.float32)
