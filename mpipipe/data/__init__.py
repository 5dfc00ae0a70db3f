"""The built-in data sets. Rank 0 calls `prepare`, all wait, then each calls `open_dataset`."""

from __future__ import annotations

from pathlib import Path

from mpipipe.config import Config
from mpipipe.data.base import Dataset, Split
from mpipipe.data.corpus import corpus_path, write_corpus
from mpipipe.data.synthetic import SyntheticTokens, SyntheticVectors
from mpipipe.data.text import VOCAB, Text

__all__ = ["Dataset", "Split", "open_dataset", "prepare"]


def prepare(config: Config, run_dir: str | Path, is_root: bool) -> None:
    """On the root rank: writes the corpus into the run folder where one must be gathered. The
    others must not open it before the root is done. Raises DataError."""
    if is_root and config.data.name == "text":
        write_corpus(config.data.path, Path(run_dir))


def open_dataset(config: Config, run_dir: str | Path) -> Dataset:
    """The configured data set, the same on every rank. Raises DataError."""
    model, seed = config.model, config.train.seed
    if config.data.name == "text":
        context = model.context if model.name == "gpt" else 1
        path = corpus_path(config.data.path, Path(run_dir))
        return Text(path, context, config.data.val_fraction, config.eval_batch, config.eval.batches, seed)
    if model.name == "gpt":
        return SyntheticTokens(model.vocab or VOCAB, model.context, seed)
    return SyntheticVectors(model.inputs, model.classes, config.data.samples, seed)
