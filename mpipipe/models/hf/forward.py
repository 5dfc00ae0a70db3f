"""The forward of a transformers model as this project calls it, and its own loss as sum and weight.

    keys of the batch --forward--> the library's output (loss: a mean over the labels that count, logits)
                                       |
    (loss * weight, weight)  <---------'     weight: how many labels count, known from the batch alone

So the sum over micro-batches, divided by the sum of weights, is the loss of one big batch. What is no
mean over labels (the balance of a mixture of experts) enters each micro-batch as the library adds it,
weighted likewise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpipipe.data.base import IGNORED

Kind = Literal["causal", "masked", "seq2seq", "image", "sequence"]
Pair = tuple[Tensor, Tensor | float]

_FIRST = (  # of what a forward takes; the elements of a batch without keys are named in this order
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "pixel_values"),
    *("decoder_input_ids", "decoder_attention_mask", "labels"),
)


def with_batch_keys(model: nn.Module, kind: Kind) -> nn.Module:
    """Gives the module a forward whose parameters are keys of a batch, without a module around it, so
    that no parameter changes its name. The cache of keys and values, for generation, is off."""
    inner, known = model.forward, inspect.signature(model.forward).parameters
    fixed = {"use_cache": False} if "use_cache" in known else {}

    def forward(**batch: Tensor) -> Any:
        labels = batch.get("labels")
        if labels is not None and not labels.is_floating_point():
            # a mean over no label is 0 / 0; with weight 0 any label does, so that nothing becomes NaN
            batch["labels"] = torch.where(_counts(kind, labels).any(), labels, 0)
        return inner(**batch, **fixed)

    tensors = [k for k, p in known.items() if p.default is None and "Tensor" in str(p.annotation)]
    keys = [*(k for k in _FIRST if k in known), *(k for k in tensors if k not in _FIRST)]
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=None) for k in keys]
    )
    model.forward = forward
    return model


def _counts(kind: Kind, labels: Tensor) -> Tensor:
    """Which labels the loss is a mean of; a causal model predicts each token from those before it."""
    return (labels[:, 1:] if kind == "causal" else labels) != IGNORED


def weight_of(kind: Kind, labels: Tensor) -> Tensor | float:
    """Labels that count, 0-d float32; samples, where labels are numbers to come close to."""
    if labels.is_floating_point():
        return float(labels.shape[0])
    return _counts(kind, labels).sum().to(torch.float32)


def loss_of(kind: Kind) -> Callable[[Any, Mapping[str, Tensor]], Pair]:
    def loss(outputs: Any, batch: Mapping[str, Tensor]) -> Pair:
        """The model's own loss; outputs: its output with `loss`, batch: with "labels"."""
        weight = weight_of(kind, batch["labels"])
        return outputs.loss.float() * weight, weight

    return loss


def metrics_of(kind: Kind) -> dict[str, Callable[[Any, Mapping[str, Tensor]], Pair]]:
    def accuracy(outputs: Any, batch: Mapping[str, Tensor]) -> Pair:
        """Labels that the largest logit names, and labels that count."""
        labels, logits = batch["labels"], outputs.logits
        if labels.is_floating_point():
            right = (logits > 0) == (labels.view_as(logits) > 0.5)
            return right.to(torch.float32).sum() / logits.shape[-1], float(labels.shape[0])
        if kind == "causal":
            labels, logits = labels[:, 1:], logits[:, :-1]
        right = (logits.argmax(-1) == labels) & (labels != IGNORED)
        return right.sum().to(torch.float32), weight_of(kind, batch["labels"])

    return {"accuracy": accuracy}
