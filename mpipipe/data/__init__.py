"""The data sets. Rank 0 calls `prepare`, all wait, then each calls `open_dataset`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpipipe.config import Config
from mpipipe.config.dotted import factory
from mpipipe.config.sections import CustomDataConfig, HfConfig
from mpipipe.data.base import Dataset, DatasetBase, Specs, Split
from mpipipe.data.corpus import corpus_path, write_corpus
from mpipipe.data.image_files import read_digits, read_images
from mpipipe.data.images import Images
from mpipipe.data.mixture import Mixture
from mpipipe.data.pairs import Pairs
from mpipipe.data.synthetic import Clicks, SyntheticTokens, SyntheticVectors
from mpipipe.data.synthetic_images import Shapes, SyntheticImages
from mpipipe.data.text import VOCAB, Text
from mpipipe.data.tokenizer import open_tokenizer
from mpipipe.data.tokens import Tokens
from mpipipe.errors import DataError

__all__ = ["Dataset", "DatasetBase", "Specs", "Split", "open_dataset", "prepare"]


def prepare(
    config: Config, run_dir: str | Path, is_root: bool, of_run: Iterable[Mapping[str, Any]] = ()
) -> None:
    """On the root rank: writes the corpus into the run folder where one must be gathered. The
    others must not open it before the root is done. of_run: sections `data` that the run in that folder has
    gone by: their texts are there and stay as they were, any other is gathered again. Raises DataError."""
    if is_root:
        stay = {text for data in of_run for text in _texts(data, Path(run_dir))}
        for path, folder in _texts(config.model_dump(mode="json")["data"], Path(run_dir)):
            if (path, folder) not in stay:
                write_corpus(path, folder, Path(run_dir))


def _texts(data: Mapping[str, Any], folder: Path) -> Iterator[tuple[str | None, Path]]:
    """`path` of each text, and where it is gathered."""
    if data["name"] == "text":
        yield data["path"], folder
    for i, source in enumerate(data["sources"] if data["name"] == "mixture" else ()):
        yield from _texts(source, _source_folder(folder, i))


def _source_folder(folder: Path, i: int) -> Path:
    """Where the corpus of source `i` of a mixture is gathered."""
    return folder / f"source-{i}"


def open_dataset(config: Config, run_dir: str | Path) -> Any:
    """The configured data set, the same on every rank: a `Dataset`, or of a dotted path what its factory
    returned, perhaps a pair of training and validation data. Raises ConfigError, DataError."""
    data = config.data
    if isinstance(data, CustomDataConfig):
        opened = factory("data", data.name, data.args)()
    else:
        opened = _open(data, config, Path(run_dir))
    if hasattr(opened, "specs") and hasattr(config.model, "channels"):
        _check_images(opened, config)
    return opened


def _check_images(data: Dataset, config: Config) -> None:
    """VGG is made for one size; the other models of images take any."""
    model: Any = config.model
    spec = data.specs(1).get("x")
    found = spec.shape[1:] if spec else ()
    wanted = (model.channels, *((model.size, model.size) if model.name == "vgg" else found[1:]))
    if len(found) != 3 or found != wanted:
        raise DataError(
            f"data.name = {config.data.name} gives images of {list(found)} (channels, height, width), but "
            f"model.name = {model.name} is made for {list(wanted)}; set model.channels and model.size to "
            "those of the images"
        )


def _open(data: Any, config: Config, folder: Path, section: str = "data") -> Dataset:
    """section: the key at which `data` stands."""
    model: Any = config.model
    batch, val_batch, seed = config.train.batch, config.eval_batch, config.train.seed
    val = val_batch, config.eval_batches
    context = getattr(model, "context", 1)
    match data.name:
        case "text":
            return Text(corpus_path(data.path, folder), context, data.val_fraction, *val, seed)
        case "tokens":
            tokenizer = open_tokenizer(data.tokenizer) if data.tokenizer else None
            val_path = Path(data.val_path) if data.val_path else None
            return Tokens(
                Path(data.path), val_path, data.dtype, context, data.val_fraction, *val, _vocab(model), seed,
                tokenizer, data.vocab,
            )  # fmt: skip
        case "images":
            sets = read_images(Path(data.path), data.val_fraction)
            return Images(*sets, batch, val_batch, seed, getattr(model, "classes", None))
        case "digits":
            return Images(
                *read_digits(data.val_fraction), batch, val_batch, seed, getattr(model, "classes", None)
            )
        case "synthetic":
            return _synthetic(data, model, batch, val_batch, seed)
        case "mixture":
            keys = [f"data.sources.{i}" for i in range(len(data.sources))]
            sources = [
                _open(s, config, _source_folder(folder, i), keys[i]) for i, s in enumerate(data.sources)
            ]
            called = [f"{key} ({s.name})" for key, s in zip(keys, data.sources, strict=True)]
            return Mixture(sources, data.weights, seed, called)
        case path:  # of a mixture: one of ours, by dotted path
            made: Dataset = factory(section, path, data.args)()
            return made


def _vocab(model: Any) -> int | None:
    """Token ids of the model, where its section or its own config says so."""
    if isinstance(model, HfConfig):
        from mpipipe.models import hf  # an extra, and slow to import

        return hf.vocab_size(model.name.removeprefix("hf:"))
    return getattr(model, "vocab", None)


def _synthetic(data: Any, model: Any, batch: int, val_batch: int, seed: int) -> Dataset:
    """Made-up data in the form that the model takes."""
    finite = data.samples, batch, val_batch, seed
    match model.name:
        case "mlp":
            return SyntheticVectors(model.inputs, model.classes, data.samples, seed)
        case "vgg" | "resnet":
            return SyntheticImages(model.channels, model.size, model.classes, *finite)
        case "unet":
            return Shapes(model.channels, model.size, model.classes, *finite)
        case "encoder_decoder":
            return Pairs(model.vocab or VOCAB, model.context, *finite, data.varying, data.bucket)
        case "dlrm":
            return Clicks(model.dense, model.tables, model.bag, *finite)
        case _:
            return SyntheticTokens(getattr(model, "vocab", None) or VOCAB, model.context, seed)
