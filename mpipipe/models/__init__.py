"""The built-in models, and how a config's model section becomes what a run needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mpipipe.config import Config
from mpipipe.config.dotted import factory, resolve
from mpipipe.config.sections import CustomModelConfig, HfConfig
from mpipipe.errors import ConfigError
from mpipipe.graph.program import Loss, Metric
from mpipipe.graph.source import Initial
from mpipipe.models.dlrm import DLRM
from mpipipe.models.encoder_decoder import EncoderDecoder
from mpipipe.models.gpt import GPT
from mpipipe.models.llama import Llama
from mpipipe.models.losses import binary_cross_entropy, cross_entropy, pixel_cross_entropy
from mpipipe.models.lstm import LSTM
from mpipipe.models.metrics import accuracy, binary_accuracy
from mpipipe.models.mlp import MLP
from mpipipe.models.resnet import ResNet
from mpipipe.models.unet import UNet
from mpipipe.models.vgg import VGG

__all__ = [
    "DLRM", "GPT", "LSTM", "MLP", "VGG", "Built", "EncoderDecoder", "Llama", "ResNet", "UNet", "build",
    "cross_entropy",
]  # fmt: skip


class _Kind(NamedTuple):
    make: type[nn.Module]
    loss: Loss
    metrics: dict[str, Metric]


_BUILT_IN = {
    "gpt": _Kind(GPT, cross_entropy, {}),
    "llama": _Kind(Llama, cross_entropy, {}),
    "lstm": _Kind(LSTM, cross_entropy, {}),
    "encoder_decoder": _Kind(EncoderDecoder, cross_entropy, {"accuracy": accuracy}),
    "mlp": _Kind(MLP, cross_entropy, {"accuracy": accuracy}),
    "vgg": _Kind(VGG, cross_entropy, {"accuracy": accuracy}),
    "resnet": _Kind(ResNet, cross_entropy, {"accuracy": accuracy}),
    "unet": _Kind(UNet, pixel_cross_entropy, {"accuracy": accuracy}),
    "dlrm": _Kind(DLRM, binary_cross_entropy, {"accuracy": binary_accuracy}),
}


_OWN_TOKENS = (
    "data.name = text gives bytes as tokens, but the model comes with a tokenizer, {0}; where it was trained "
    "with that, make a token file with: python -m mpipipe tokenize TEXTS -o texts.bin --tokenizer {0}, and "
    "set data.name=tokens, data.path=texts.bin"
)


@dataclass(frozen=True)
class Built:
    """model: a factory, whose draws are seeded by `train.seed` and the parameter's name; the parameters of
    its `forward` are keys of the batch. data: what was given, in the words of the model.
    export: writes beside a checkpoint's weights what else belongs there, and names it. notes: what to say
    before it is trained."""

    model: Callable[[], Any]
    loss: Loss
    metrics: Mapping[str, Metric]
    data: Any
    initial: Initial | None = None
    export: Callable[[Path], Sequence[str]] = field(default=lambda folder: ())
    notes: Sequence[str] = ()


def build(config: Config, data: Any) -> Built:
    """Raises ConfigError when the data has more token ids than the model, or a dotted path leads to nothing
    that can be called so."""
    m = config.model
    if isinstance(m, CustomModelConfig):
        loss = cross_entropy if m.loss is None else resolve("model.loss", m.loss)
        metrics = {name: resolve(f"model.metrics.{name}", path) for name, path in m.metrics.items()}
        return Built(factory("model", m.name, m.args), loss, metrics, data)
    if isinstance(m, HfConfig):
        from mpipipe.models import hf  # an extra, and slow to import

        vocab = getattr(data, "vocab", None)
        found = hf.build(m.name.removeprefix("hf:"), m.task, m.freeze, vocab, m.fresh)
        ours = hasattr(data, "specs")  # what users bring by dotted path has the library's keys already
        adapted = hf.adapt(data, found, config.train.seed) if ours else data
        own = next((f for f in found.companions if f.name == "tokenizer.json"), None)
        notes = [_OWN_TOKENS.format(own)] if own and config.data.name == "text" else []
        return Built(
            found.factory, found.loss, found.metrics, adapted, found.initial, partial(hf.export, found), notes
        )
    kind, settings = _BUILT_IN[m.name], dict(m)
    if "vocab" in settings:
        settings["vocab"] = _vocab(config, settings["vocab"], data)
    wanted = inspect.signature(kind.make).parameters
    model = partial(kind.make, **{key: value for key, value in settings.items() if key in wanted})
    return Built(model, kind.loss, kind.metrics, data)


def _vocab(config: Config, given: int | None, data: Any) -> int:
    needed = getattr(data, "vocab", None)
    where = f"model.name = {config.model.name}"
    if needed is None and given is None:
        raise ConfigError(f"{where} needs tokens; data.name = {config.data.name} gives none: set model.vocab")
    if given is not None and needed is not None and given < needed:
        raise ConfigError(
            f"model.vocab = {given}, but data.name = {config.data.name} has {needed} token ids; "
            f"set model.vocab to null or at least {needed}"
        )
    return given or needed or 0
