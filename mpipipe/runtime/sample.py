"""A text sample from a trained language model, through the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.utils import _pytree as pytree

from mpipipe import ops
from mpipipe.graph.anatomy import spec_of
from mpipipe.graph.program import LABELS, Batch
from mpipipe.runtime.feed import specs_of
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


def generate(
    trainer: Trainer, codec: Codec, settings: SampleSettings, seed: int, say: Callable[[str], object]
) -> str | None:
    """`settings.length` tokens after the prompt, one forward pass each; None where data is no text, the
    model reads more than tokens or returns no logits, or the prompt has no token, which is said.

    The same text for every layout: drawn from the stream "sample" of the run's seed. Collective.
    """
    ids, name = codec.encode(settings.prompt), _tokens_key(trainer)
    if ids is None or settings.length == 0 or name is None:
        return None
    context = trainer.variants.first[name].shape[1]
    place = _logits(trainer, {name: torch.zeros(1, context, dtype=torch.int64)})
    if not ids or place is None:
        what = (
            f"the model returns no logits (1, {context}, vocabulary)" if ids else "sample.prompt has no token"
        )
        say(f"note: no sample of text, as {what}; sample.length=0 asks for none")
        return None
    key = ops.stream_key(seed, "sample")
    for position in range(settings.length):
        window = ids[-context:]
        tokens = torch.zeros(1, context, dtype=torch.int64)
        tokens[0, : len(window)] = torch.tensor(window)
        outputs = trainer.predict({name: tokens})
        chosen = 0
        if outputs is not None:
            logits = outputs[0][place][0, len(window) - 1].float()  # (vocab,)
            draw = float(ops.uniform((1,), key, position, 0))
            chosen = _choose(logits, settings.temperature, draw)
        ids.append(trainer.comm.bcast_object(chosen, trainer.last_rank))
    return codec.decode(ids)


def _tokens_key(trainer: Trainer) -> str | None:
    """The batch key of the tokens of a causal language model."""
    reads = {key for key in trainer.variants.graph.inputs if key not in LABELS}
    return reads.pop() if reads in ({"tokens"}, {"input_ids"}) else None


def _logits(trainer: Trainer, batch: Batch) -> int | None:
    """Which of the model's tensors: that of this name, or the first of floats of (1, context, any)."""
    outputs = [spec_of(n) for n in trainer.variants.anatomy("predict", specs_of(batch)).captured.outputs]
    named = pytree.tree_unflatten(range(len(outputs)), trainer.structure(batch))
    names = [pytree.keystr(path[-1:]).strip("[].'") for path, _ in pytree.tree_flatten_with_path(named)[0]]
    (tokens,) = batch.values()
    found = [i for i, o in enumerate(outputs) if o.shape[:-1] == tokens.shape and "float" in o.dtype]
    return next((i for i in found if names[i] == "logits"), next(iter(found), None))


def _choose(logits: torch.Tensor, temperature: float, draw: float) -> int:
    """The token at which the cumulative probability passes `draw`; the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    cumulative = torch.softmax(logits.double() / temperature, 0).cumsum(0)
    return min(int((cumulative <= draw).sum()), len(logits) - 1)
