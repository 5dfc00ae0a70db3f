"""Losses in the project's form: `loss(outputs, batch) -> (sum, weight)`, both 0-d float32.

The weight must depend on the batch alone: the total of a step is then known before the first
backward, and the step's loss, sum of sums / sum of weights, is the mean over the whole batch for
every number of micro-batches. Sums are float32 also under bf16. Labels are batch["labels"], or
batch["y"]; ConfigError where the batch has neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from mpipipe.data.base import IGNORED
from mpipipe.errors import CaptureError, ConfigError
from mpipipe.graph.program import LABELS, Batch, Loss, refuse_torchs_loss


def labels_of(batch: Batch) -> Tensor:
    """The labels of a batch. Raises ConfigError where it has none."""
    for key in LABELS:
        if key in batch:
            return batch[key]
    raise ConfigError(
        f"the loss needs the key 'labels' (or 'y'); the batch has {sorted(batch)}; let the data return it "
        "(data.name), or give a model of your own a loss that does without (model.loss)"
    )


def cross_entropy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the negative log-likelihoods in nats and the number of labels that count.
    outputs: logits (..., V); labels: int64 (...), -100 counts for nothing."""
    labels = labels_of(batch).reshape(-1)
    logits = outputs.reshape(-1, outputs.shape[-1]).float()
    total = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum().to(torch.float32)


def pixel_cross_entropy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """`cross_entropy` with a label for each pixel. outputs: logits (B, K, H, W) for K classes;
    labels: int64 (B, H, W), -100 counts for nothing."""
    labels = labels_of(batch)
    total = functional.cross_entropy(outputs.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum().to(torch.float32)


def binary_cross_entropy(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the negative log-likelihoods in nats and the number of samples. outputs: logit (B,);
    labels: float (B,), 0 or 1, or the probability of 1."""
    labels = labels_of(batch).float()
    total = functional.binary_cross_entropy_with_logits(outputs.float(), labels, reduction="sum")
    return total, torch.full((), labels.numel(), dtype=torch.float32, device=labels.device)


def from_mean(loss: Callable[[Any, Batch], Any], weight_of: Callable[[Batch], Any]) -> Loss:
    """The project's form of a loss that is a mean: (mean * weight, weight).

    loss(outputs, batch) is the mean over weight_of(batch) items, 0-d. A micro-batch of weight 0, whose
    mean may be 0 / 0, counts as a sum of 0 with a gradient of 0; where the model itself computes the mean
    (its outputs hold the loss), that must be finite there.
    """

    refuse_torchs_loss(loss)

    def summed(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor | float]:
        weight = weight_of(batch)
        if not isinstance(weight, Tensor):
            return _at_least_fp32(_of_mean(loss(outputs, batch))) * weight, weight
        weight = weight.to(torch.float32)

        def kept(t: Tensor) -> Tensor:
            return t.masked_fill(weight == 0, 0.0) if t.is_floating_point() else t

        # the slope of 0 / 0 times 0 is NaN: the outputs, too, are cut off from such a mean
        mean = _of_mean(loss(pytree.tree_map_only(Tensor, kept, outputs), batch))
        return _at_least_fp32(kept(mean)) * weight, weight

    return summed


def _of_mean(found: Any) -> Tensor:
    if isinstance(found, tuple):
        raise CaptureError(
            f"the loss returns {len(found)} values, and weight_of is given, which is for one that returns a "
            "mean alone; leave weight_of out"
        )
    mean: Tensor = found
    return mean


def _at_least_fp32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
