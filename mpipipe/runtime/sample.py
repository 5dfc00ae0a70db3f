"""A text sample from a trained language model, through the pipeline."""

from __future__ import annotations

from typing import Protocol

import torch

from mpipipe import ops
from mpipipe.graph.program import LABELS
from mpipipe.runtime.trainer import Trainer


class Codec(Protocol):
    def encode(self, text: str) -> list[int] | None: ...
    def decode(self, ids: list[int]) -> str | None: ...


class SampleSettings(Protocol):
    @property
    def length(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def prompt(self) -> str: ...


def generate(trainer: Trainer, codec: Codec, settings: SampleSettings, seed: int) -> str | None:
    """`settings.length` tokens after the prompt, one forward pass each; None where data is no text, the
    prompt has no token, or the model reads more than tokens.

    The same text for every layout: drawn from the stream "sample" of the run's seed. Collective.
    """
    ids, name = codec.encode(settings.prompt), _tokens_key(trainer)
    if not ids or settings.length == 0 or name is None:
        return None
    context = trainer.variants.first[name].shape[1]
    key = ops.stream_key(seed, "sample")
    for position in range(settings.length):
        window = ids[-context:]
        tokens = torch.zeros(1, context, dtype=torch.int64)
        tokens[0, : len(window)] = torch.tensor(window)
        outputs = trainer.predict({name: tokens})
        chosen = 0
        if outputs is not None:
            logits = outputs[0][0][0, len(window) - 1].float()  # (vocab,)
            draw = float(ops.uniform((1,), key, position, 0))
            chosen = _choose(logits, settings.temperature, draw)
        ids.append(trainer.comm.bcast_object(chosen, trainer.last_rank))
    return codec.decode(ids)


def _tokens_key(trainer: Trainer) -> str | None:
    """The batch key of the tokens of a causal language model."""
    reads = {key for key in trainer.variants.graph.inputs if key not in LABELS}
    return reads.pop() if reads in ({"tokens"}, {"input_ids"}) else None


def _choose(logits: torch.Tensor, temperature: float, draw: float) -> int:
    """The token at which the cumulative probability passes `draw`; the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    cumulative = torch.softmax(logits.double() / temperature, 0).cumsum(0)
    return min(int((cumulative <= draw).sum()), len(logits) - 1)
