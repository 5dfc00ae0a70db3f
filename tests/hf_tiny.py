"""Tiny transformers models, made from configs, with all that a run needs of them.

Shared by the tests of the models and by those that compare bits between layouts. The library takes
seconds to import, so it is imported when first asked for.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny import Case
from torch import Tensor

from mpipipe.data.base import Dataset, DatasetBase, Split, draws
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import hf
from mpipipe.values import TensorSpec

SEED, VOCAB, CONTEXT = 7, 32, 16
_DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 32,
        "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_DECODER},
    "bert": {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": VOCAB + 2,
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "max_position_embeddings": 32,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": VOCAB,
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
        "eos_token_id": 1, "decoder_start_token_id": 0, "tie_word_embeddings": True,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 8,
        "patch_size": 4, "num_channels": 1, "id2label": {str(i): str(i) for i in range(4)},
        "label2id": {str(i): i for i in range(4)},
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_DECODER, "num_local_experts": 4,
        "output_router_logits": True,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", **_DECODER, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    },
}  # fmt: skip


class Images(DatasetBase):
    """Noise with one bright quarter, which is the label."""

    sample = {"x": TensorSpec((1, 8, 8), "float32"), "y": TensorSpec((), "int64")}  # noqa: RUF012

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> dict[str, Any]:
        y = torch.from_numpy((draws(SEED, split, step, start, stop) % 4).astype("int64"))
        noise = draws(SEED, f"{split} x", step, start * 64, stop * 64).astype("float64") / 2.0**64
        x = torch.from_numpy(noise).float().view(-1, 1, 8, 8)
        for image, label in zip(x, y.tolist(), strict=True):
            image[0, 4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 1.0
        return {key: t for key, t in {"x": x, "y": y}.items() if key in keys}


def with_holes(labels: Tensor, start: int) -> Tensor:
    """Some labels of each sample count for nothing; of samples 2 and 3, a whole micro-batch, none does."""
    labels = labels.clone()
    for row, sample in zip(labels, range(start, start + len(labels)), strict=True):
        row[: sample % 5] = -100
        if sample in (2, 3):
            row[:] = -100
    return labels


class Holes(DatasetBase):
    def __init__(self, inner: Dataset) -> None:
        self.inner = inner

    def specs(self, rows: int) -> dict[str, TensorSpec]:
        return self.inner.specs(rows)

    def batch(
        self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]
    ) -> dict[str, Tensor]:
        made = self.inner.batch(split, step, start, stop, keys)
        if "labels" in made and made["labels"].dim() > 1:
            made["labels"] = with_holes(made["labels"], start)
        return made


def write_config(name: str, folder: Path, **changes: Any) -> Path:
    """A config.json of one of `CONFIGS`, with keys changed or (None) left out."""
    config = {k: v for k, v in {**CONFIGS[name], **changes}.items() if v is not None}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@cache
def built(name: str, **changes: Any) -> hf.HfModel:
    """From a config alone, as `write_config` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        return hf.build(write_config(name, Path(folder), **changes), vocab=VOCAB)


def dataset(model: hf.HfModel) -> Dataset:
    data: Dataset = Images() if model.kind == "image" else SyntheticTokens(VOCAB, CONTEXT, SEED)
    return hf.adapt(data, model, SEED)


def variants(model: hf.HfModel, rows: int = 2, precision: str = "fp32", bits: str = "torch") -> Variants:
    source = ModelSource(model.factory, SEED, model.initial)
    specs, lowering = dataset(model).specs, Lowering(bits)
    return Variants(source, model.loss, specs, rows, precision, model.metrics, lowering=lowering)


def padded(model: hf.HfModel, side: str) -> tuple[Variants, dict[str, Tensor]]:
    """Of tokens with an attention_mask, and two samples: a whole one, and one with padding on that side."""
    ids = torch.randint(3, VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones_like(ids)
    mask[1, slice(None, 5) if side == "left" else slice(-5, None)] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    specs = dict.fromkeys(batch, TensorSpec((2, CONTEXT), "int64"))
    source = ModelSource(model.factory, SEED, model.initial)
    return Variants(source, model.loss, lambda _: specs, 2, "fp32", model.metrics), batch


@cache
def captured(model: str, rows: int, precision: str = "fp32", bits: str = "torch") -> Variants:
    return variants(built(model), rows, precision, bits)


class HfCase(Case):
    """A `tiny.Case` whose model is a key of `CONFIGS`."""

    @property
    def dataset(self) -> Dataset:
        return dataset(built(self.model))

    @property
    def variants(self) -> Variants:
        return captured(self.model, self.rows, self.precision, self.bits)


class HolesCase(HfCase):
    """Unlike numbers of labels that count, in one micro-batch none."""

    @property
    def dataset(self) -> Dataset:
        return Holes(super().dataset)


def tiny_t5(**how: Any) -> HfCase:
    """One weight under four names, used in three places."""
    return HfCase("t5", **how)


def tiny_moe(**how: Any) -> HfCase:
    """A mixture of four experts, two per token, with the loss of its balance."""
    return HfCase("mixtral", **how)


def keys_of(data: Dataset) -> frozenset[str]:
    return frozenset(data.specs(1))
