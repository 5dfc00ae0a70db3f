"""A data set in the words of a transformers model: input_ids, labels, pixel_values.

causal     input_ids = labels = tokens (the model itself shifts them)
masked     15 % of the tokens are to be found again (Devlin et al. 2019)
seq2seq    the first half of a sample is the source, the second the target
sequence   tokens with one label per sample
image      x as pixel_values
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpipipe.data.base import IGNORED, Dataset, DatasetBase, Split, uniforms
from mpipipe.data.mixture import Mixture
from mpipipe.errors import ConfigError, DataError
from mpipipe.graph.program import LABELS
from mpipipe.models.hf.build import HfModel
from mpipipe.values import TensorSpec

_MASKED, _HIDDEN, _REPLACED = 0.15, 0.8, 0.9  # of all tokens; of these: mask token, else random, else kept


def adapt(data: Dataset, model: HfModel, seed: int) -> Dataset:
    """`data` for `model`; itself where it already speaks the model's words. seed: of the masked tokens.
    Raises DataError or ConfigError where the two do not fit."""
    specs = data.specs(1)
    if model.labels is not None:
        _check_classes(data, specs, model.labels)
    if "input_ids" in specs or "pixel_values" in specs:
        return data
    adapted = _Adapted(data, model, seed)
    adapted.check(specs)
    return adapted


def _check_classes(data: Dataset, specs: dict[str, TensorSpec], labels: int) -> None:
    """labels: of the model."""
    classes = getattr(data, "classes", None)  # of images that were read from files
    if isinstance(classes, int) and classes > labels:
        raise ConfigError(
            f"the data have {classes} classes, the model {labels}; give id2label in config.json {classes} "
            "entries, and name the head in model.fresh where the model has weights"
        )
    found = next((specs[key] for key in LABELS if key in specs), None)
    if labels == 1 and found is not None and found.dtype.startswith("int"):
        raise ConfigError(
            f"the labels of the data are {found.dtype}, but a model with one label (id2label in its "
            "config.json) takes them for numbers to come close to; give id2label one entry per class, or the "
            "labels as float32"
        )


def _of_users(data: Dataset) -> bool:
    """Whether users wrote it, or a part of it: what labels mean there, only they know."""
    if isinstance(data, Mixture):
        return any(map(_of_users, data.sources))
    return not type(data).__module__.startswith("mpipipe.data.")


class _Adapted(DatasetBase):
    def __init__(self, data: Dataset, model: HfModel, seed: int) -> None:
        self._data, self._model, self._seed = data, model, seed
        self.vocab, self.tokens_per_sample = data.vocab, data.tokens_per_sample
        self.train_samples, self.val_samples = data.train_samples, data.val_samples
        self.varying = data.varying
        self.exact, self.whole = data.exact, data.whole
        self._label = next((k for k in LABELS if k in data.specs(1)), LABELS[0])

    @property
    def unigram_entropy(self) -> float | None:
        return self._data.unigram_entropy

    def encode(self, text: str) -> list[int] | None:
        """None where the model does not go on with a text."""
        return self._data.encode(text) if self._model.kind == "causal" else None

    def decode(self, ids: list[int]) -> str | None:
        return self._data.decode(ids)

    def check(self, specs: dict[str, TensorSpec]) -> None:
        m = self._model
        wanted = "x" if m.kind == "image" else "tokens"
        if wanted not in specs:
            raise DataError(
                f"a model of kind {m.kind} reads {wanted!r}, but the data gives {sorted(specs)}; choose "
                "other data"
            )
        shape = specs[wanted].shape[1:]
        read = {wanted, self._label} if m.kind in ("image", "sequence") else {wanted}
        if (left_out := sorted((specs.keys() - read) & m.takes)) and _of_users(self._data):
            raise DataError(
                f"the data give {left_out} beside {wanted!r}, which a model of kind {m.kind} would not read; "
                f"name {wanted!r} {self._input!r}, and it reads all keys, as its library means them, or "
                f"leave {left_out} out"
            )
        if m.kind == "image":
            size = (m.channels, *(m.image_size or ()))
            if len(shape) != 3 or (m.image_size is not None and shape != size):
                raise DataError(
                    f"the model reads images of {list(size)} (channels, height, width), the data gives "
                    f"{list(shape)}; change num_channels and image_size of the config"
                )
            return
        longest = shape[0] if m.kind != "seq2seq" else shape[0] - shape[0] // 2
        if m.max_positions is not None and longest > m.max_positions:
            raise ConfigError(
                f"samples of {longest} tokens, but the model has {m.max_positions} positions; shorten the "
                "context of the data"
            )
        if self.vocab is not None and m.vocab is not None and self.vocab > m.vocab:
            raise ConfigError(
                f"the data has {self.vocab} token ids, the model {m.vocab}; use the model's tokenizer"
            )
        if m.kind == "masked" and self._mask is None:
            raise ConfigError(
                f"the model needs a mask token, and its {m.vocab} ids are all in use by the data; set "
                f"{f'vocab_size to {self.vocab + 1}' if self.vocab else 'mask_token_id'} in its config.json, "
                "or bring its tokenizer along"
            )
        if m.kind == "sequence" and len(specs.get(self._label, specs[wanted]).shape) != 1:
            raise DataError("a model of kind sequence needs one label per sample; choose other data")

    @property
    def _mask(self) -> int | None:
        m = self._model
        unused = self.vocab is not None and m.vocab is not None and self.vocab < m.vocab
        return m.mask if m.mask is not None else self.vocab if unused else None

    def specs(self, rows: int) -> dict[str, TensorSpec]:
        specs = self._data.specs(rows)
        if self._model.kind in ("image", "sequence"):
            source = specs["x" if self._model.kind == "image" else "tokens"]
            return {self._input: source, "labels": specs[self._label]}
        tokens = specs["tokens"]
        if self._model.kind != "seq2seq":
            return {"input_ids": tokens, "labels": tokens}
        half = tokens.shape[1] // 2
        return {
            "input_ids": TensorSpec((rows, half), tokens.dtype),
            "labels": TensorSpec((rows, tokens.shape[1] - half), tokens.dtype),
        }

    @property
    def _input(self) -> str:
        return "pixel_values" if self._model.kind == "image" else "input_ids"

    def batch(
        self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]
    ) -> dict[str, Tensor]:
        if self._model.kind in ("image", "sequence"):
            asked = {theirs for theirs, ours in self._renamed.items() if ours in keys}
        else:
            asked = {"tokens"} if keys & {"input_ids", "labels"} else set()
        made = self._translated(
            self._data.batch(split, step, start, stop, frozenset(asked)), split, step, start
        )
        return {key: t for key, t in made.items() if key in keys}

    def next_batch(self, split: Split, step: int) -> dict[str, Tensor] | None:
        """Of data that is read in order, once (`exact` is False): the whole batch; None at the end."""
        found = self._data.next_batch(split, step)  # type: ignore[attr-defined]
        return None if found is None else self._translated(found, split, step, 0)

    @property
    def _renamed(self) -> dict[str, str]:
        return {"x" if self._model.kind == "image" else "tokens": self._input, self._label: "labels"}

    def _translated(self, found: dict[str, Tensor], split: Split, step: int, start: int) -> dict[str, Tensor]:
        """found: the data's own samples from number `start` on."""
        kind = self._model.kind
        if kind in ("image", "sequence"):
            return {ours: found[theirs] for theirs, ours in self._renamed.items() if theirs in found}
        if "tokens" not in found:
            return {}
        tokens = found["tokens"]
        if kind == "causal":
            return {"input_ids": tokens, "labels": tokens}
        if kind == "seq2seq":
            half = tokens.shape[1] // 2
            return {"input_ids": tokens[:, :half].contiguous(), "labels": tokens[:, half:].contiguous()}
        return self._hide(tokens, split, step, start)

    def _hide(self, tokens: Tensor, split: Split, step: int, start: int) -> dict[str, Tensor]:
        """Every number is drawn for a place in the data, so a sample is masked alike in any micro-batch."""
        rows, width = tokens.shape

        def draw(stream: str) -> Tensor:
            first, last = start * width, (start + rows) * width
            return torch.from_numpy(uniforms(self._seed, f"{stream}/{split}", step, first, last)).view(
                rows, width
            )

        chosen, how, other = draw("masked") < _MASKED, draw("how"), draw("other")
        ids: Any = torch.where(
            how < _HIDDEN,
            self._mask or 0,
            torch.where(how < _REPLACED, (other * (self.vocab or 1)).long(), tokens),
        )
        return {"input_ids": torch.where(chosen, ids, tokens), "labels": torch.where(chosen, tokens, IGNORED)}
