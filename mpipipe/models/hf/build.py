"""From a path to a model of transformers: its class, its config, its first weights, its shapes."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mpipipe.data.extras import optional
from mpipipe.errors import ConfigError, first_line
from mpipipe.graph.source import Initial
from mpipipe.models.hf.forward import Kind, loss_of, metrics_of, with_batch_keys
from mpipipe.models.hf.weights import Mapped, matches
from mpipipe.state.pretrained import CONFIG, Pretrained, find, write_files

_TABLES: dict[Kind, str] = {  # the library's lists of classes, by what they learn; XLM's class is in two
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class HfModel:
    """What a run needs of a transformers model; the shapes are None where they mean nothing to it.

    factory, loss, metrics   as everywhere; batch keys are the library's names
    initial                  weights on disk, or None: random ones
    vocab                    token ids; mask: the id that hides a token
    image_size, channels     of pixel_values, (height, width)
    labels                   classes, of kinds image and sequence
    max_positions            tokens of a sample at most
    takes                    names of what the library's own forward takes
    """

    factory: Callable[[], nn.Module]
    loss: Callable[..., Any]
    metrics: dict[str, Callable[..., Any]]
    initial: Initial | None
    kind: Kind
    vocab: int | None
    mask: int | None
    image_size: tuple[int, int] | None
    channels: int | None
    labels: int | None
    max_positions: int | None
    takes: frozenset[str]
    texts: dict[str, str]  # files that go with every checkpoint: name -> content
    companions: tuple[Path, ...]  # and those that are copied


def build(
    path: str | Path,
    task: str | None = None,
    freeze: Sequence[str] = (),
    vocab: int | None = None,
    fresh: Sequence[str] = (),
) -> HfModel:
    """The model described at `path`: a config.json (random weights), or a folder with it and safetensors.

    task: a kind, where the config does not name a class with a loss; freeze: patterns (fnmatch) of
    parameters that are not trained; vocab: token ids of the data; fresh: patterns of names that start from
    random values though the folder has weights. Weights are float32, whatever type they are on disk.
    Raises ConfigError, and CheckpointError where weights and config do not fit.
    """
    transformers, found = _library(), find(path)
    config = _config(transformers, found)
    kind, model_class = _class_of(transformers, config, task, path)
    _settle(config, kind, model_class, path)
    factory = partial(_make, model_class, config, kind, tuple(freeze))
    with torch.device("meta"):
        model: Any = factory()
    known = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in freeze:
        if not any(matches(name, [pattern]) for name in known):
            raise ConfigError(
                f"model.freeze: the pattern {pattern!r} fits no parameter; their names run from {known[0]!r} "
                f"to {known[-1]!r}"
            )
    text_config = config.get_text_config()
    ids = _vocab_size(config) if kind != "image" else None
    if vocab is not None and ids is not None and vocab > ids:
        raise ConfigError(
            f"hf:{path}: vocab_size = {ids}, but the data has {vocab} token ids; use the model's own "
            "tokenizer, or a config with a larger vocab_size"
        )
    texts = {CONFIG: model.config.to_json_string()}
    if model.can_generate() and not any(f.name == _GENERATION for f in found.companions):
        texts[_GENERATION] = model.generation_config.to_json_string()
    return HfModel(
        factory=factory,
        loss=loss_of(kind),
        metrics=metrics_of(kind),
        initial=None if found.weights is None else Mapped(found.weights, model, fresh),
        kind=kind,
        vocab=ids,
        mask=_mask(transformers, config, found) if kind == "masked" else None,
        image_size=_image_size(config) if kind == "image" else None,
        channels=getattr(config, "num_channels", None) if kind == "image" else None,
        labels=config.num_labels if kind in ("image", "sequence") else None,
        max_positions=_max_positions(text_config, model) if kind != "image" else None,
        takes=frozenset(inspect.signature(model_class.forward).parameters),
        texts=texts,
        companions=found.companions,
    )


def _settle(config: Any, kind: Kind, model_class: Any, path: str | Path) -> None:
    """What the config leaves open of this kind. Raises ConfigError where the model would learn to copy."""
    config.architectures = [model_class.__name__]
    if kind == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as T5 was trained
    if kind == "causal" and "loss_function" not in _names_in(model_class.forward):
        raise ConfigError(  # only the loss that the library gives all its models shifts the labels
            f"hf:{path}: the loss of {model_class.__name__} compares each token with itself and not with the "
            "next one, so the model would learn to copy; choose another model.task, or give the model as "
            "package.module:factory with a model.loss of your own"
        )
    if kind in ("causal", "masked") and hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = kind == "causal"  # else BERT and its kin see the tokens that they are to predict


def _names_in(forward: Callable[..., Any]) -> Sequence[str]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return () if code is None else code.co_names


def vocab_size(path: str | Path) -> int | None:
    """Token ids of the model described at `path`; None where its config names none. Raises as `build`."""
    return _vocab_size(_config(_library(), find(path)))


def export(model: HfModel, folder: str | Path) -> list[str]:
    """Writes what belongs beside the weights, so that `from_pretrained(folder)` opens them: config.json,
    generation_config.json, and the tokenizer's files where the model came with them; gives their names. On
    one rank. Raises CheckpointError."""
    return write_files(folder, model.texts, model.companions)


def _library() -> Any:
    transformers = optional("transformers", "transformers", ConfigError)
    optional("transformers.core_model_loading", "transformers", ConfigError)  # since version 5
    logging.getLogger("transformers").setLevel(logging.ERROR)  # every rank would say the same
    return transformers


def _config(transformers: Any, found: Pretrained) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(
            str(found.config), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"{found.config}: is not a model that transformers {transformers.__version__} knows ({reason}); "
            "models with code of their own are given as package.module:factory"
        ) from error


def _class_of(transformers: Any, config: Any, task: str | None, path: str | Path) -> tuple[Kind, Any]:
    """The kind and the class: that of `task`, else the one that the config names."""
    from transformers.models.auto import modeling_auto

    tables = {kind: getattr(modeling_auto, table) for kind, table in _TABLES.items()}
    if task is not None and task not in tables:
        raise ConfigError(f"model.task = {task!r}; expected one of {', '.join(tables)}")
    named = (getattr(config, "architectures", None) or [None])[0]
    for kind, table in tables.items():
        listed = table.get(config.model_type)
        names = [listed] if isinstance(listed, str) else list(listed or ())
        if kind == task or (task is None and named in names):
            if not names:
                raise ConfigError(
                    f"hf:{path}: transformers has no {task} model of the type {config.model_type}; choose "
                    "another model.task"
                )
            return kind, getattr(transformers, named if named in names else names[0])
    raise ConfigError(
        f"hf:{path}: the config names the class {named}, which has no loss that is known here; set "
        f"model.task to one of {', '.join(tables)}"
    )


def _make(model_class: Any, config: Any, kind: Kind, freeze: tuple[str, ...]) -> nn.Module:
    model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32)
    for name, p in model.named_parameters(remove_duplicate=False):
        if matches(name, freeze):
            p.requires_grad_(False)
    for part in model.modules():
        if hasattr(part, "use_associative_scan"):  # of Mamba: only a compiler takes it, and no graph holds it
            part.use_associative_scan = False
    return with_batch_keys(cast(nn.Module, model), kind)


def _vocab_size(config: Any) -> int | None:
    return getattr(config.get_text_config(), "vocab_size", None)


def _mask(transformers: Any, config: Any, found: Pretrained) -> int | None:
    """The id of the mask token, from the config or from the tokenizer that came along."""
    mask = getattr(config, "mask_token_id", None)
    if mask is None and any("tokenizer" in f.name or f.name == "vocab.txt" for f in found.companions):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(found.config.parent), local_files_only=True, trust_remote_code=False
        )
        mask = tokenizer.mask_token_id
    return mask


def _image_size(config: Any) -> tuple[int, int] | None:
    size = getattr(config, "image_size", None)
    return (size, size) if isinstance(size, int) else None if size is None else (size[0], size[1])


def _max_positions(config: Any, model: nn.Module) -> int | None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or limit < 0:  # XLNet says -1
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(limit) - module.padding_idx - 1  # as RoBERTa counts
    return int(limit)
