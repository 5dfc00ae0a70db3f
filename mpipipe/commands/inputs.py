"""The model and the data of a config as a plan needs them: without weights, and of text without its files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpipipe.config import Config
from mpipipe.data import open_dataset
from mpipipe.data.base import Dataset
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.data.text import VOCAB
from mpipipe.data.user import from_user
from mpipipe.errors import DataError
from mpipipe.graph.program import batch_names
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import build


def model_of(config: Config) -> tuple[Callable[[int], Variants], Dataset]:
    """As `Pipeline` captures it, for micro-batches of so many samples; the data that its shapes are from."""
    opened = _data(config)
    data, val = opened if isinstance(opened, tuple) else (opened, None)
    built, t, count = build(config, data), config.train, config.pipeline.micro_batches
    source = ModelSource(built.model, t.seed, built.initial)
    names = batch_names(source.module)
    micro_batches = None if count == "auto" else count
    shaped = from_user(built.data, val, batch=t.batch, micro_batches=micro_batches, names=names, seed=t.seed)

    def variants_of(rows: int) -> Variants:
        shapes = config.capture.max_shapes
        return Variants(source, built.loss, shaped.specs, rows, t.precision, max_shapes=shapes)

    return variants_of, shaped


def _data(config: Config) -> Any:
    """The configured data; where only its shapes would be read from files, made-up data of those shapes."""
    vocab = VOCAB if config.data.name == "text" else getattr(config.data, "vocab", None)
    vocab = vocab or getattr(config.model, "vocab", None)
    context = getattr(config.model, "context", None)
    if config.data.name in ("text", "tokens") and vocab and context:
        return SyntheticTokens(vocab, context, config.train.seed)
    try:
        return open_dataset(config, ".")
    except DataError as error:
        raise DataError(
            f"{error}\n  a plan needs the shapes of the data: plan where they are, or with "
            "data.name=synthetic (and model.vocab, the number of token ids)"
        ) from error
