"""The built-in models and their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from mpipipe.config import Config
from mpipipe.errors import ConfigError
from mpipipe.models.gpt import GPT
from mpipipe.models.losses import cross_entropy
from mpipipe.models.mlp import MLP

__all__ = ["GPT", "MLP", "Factory", "Loss", "build", "cross_entropy"]

Factory = Callable[[], nn.Module]
Loss = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


class HasVocab(Protocol):
    @property
    def vocab(self) -> int | None: ...


def build(config: Config, dataset: HasVocab) -> tuple[Factory, Loss]:
    """What makes the configured model, and its loss. Under `ModelSource` the draws of the factory are
    seeded by `train.seed` and the parameter's name. The parameters of `forward` are keys of the batch.
    Raises ConfigError when the data has more token ids than the model."""
    m = config.model
    if m.name == "mlp":
        return partial(MLP, m.inputs, m.hidden, m.classes, m.dropout), cross_entropy
    needed = dataset.vocab
    if needed is None:
        raise ConfigError(f"model.name = gpt needs tokens; data.name = {config.data.name} gives none")
    if m.vocab is not None and m.vocab < needed:
        raise ConfigError(
            f"model.vocab = {m.vocab}, but data.name = {config.data.name} has {needed} token ids; "
            f"set model.vocab to null or at least {needed}"
        )
    vocab = m.vocab or needed
    return partial(GPT, vocab, m.layers, m.d_model, m.heads, m.context, m.tied, m.dropout), cross_entropy
