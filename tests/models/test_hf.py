"""Models of transformers: captured, cut, trained, saved and opened again by the library itself."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")

import by_hand
import hf_tiny
import tiny
from hf_tiny import CONFIGS, CONTEXT, SEED, VOCAB, HfCase, Images, built, keys_of, tiny_moe, tiny_t5
from torch.utils import _pytree as pytree

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.config import parse
from mpipipe.data import open_dataset, prepare
from mpipipe.data.base import DatasetBase, Split
from mpipipe.data.mixture import Mixture
from mpipipe.data.synthetic import SyntheticTokens
from mpipipe.data.text import Text
from mpipipe.errors import CheckpointError, ConfigError, DataError
from mpipipe.graph.program import batch_names
from mpipipe.graph.rewrite import arguments_of, schema_name
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import build, hf
from mpipipe.models.hf.forward import weight_of
from mpipipe.runtime.trainer import Trainer
from mpipipe.state import pretrained
from mpipipe.state.checkpoint import save_shard, shard_name, write_index
from mpipipe.values import TensorSpec


def all_but_one_full(fast: str) -> list[Any]:
    """Every model; the one with the most to go wrong in the fast suite, the others in the full one."""
    return tiny.full_but([fast], CONFIGS)


def library() -> Any:
    import transformers

    return transformers


def real(model: hf.HfModel) -> Any:
    """The library's own model, with real weights: those that a run starts from."""
    source, module = ModelSource(model.factory, SEED, model.initial), model.factory()
    made = source.materialise([*source.params, *source.buffers])
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        t.data = made[name]
    return module.eval()


# -- bits and loss --------------------------------------------------------------------------------------


def assert_same_bits(case: HfCase, numbers_of_stages: tuple[int, ...]) -> None:
    whole = tiny.train_local(case, 1)
    for n_stages in numbers_of_stages:
        assert tiny.differences(whole, tiny.train_local(case, n_stages)) == [], n_stages


@pytest.mark.parametrize("case", [tiny_t5(), pytest.param(tiny_moe(), marks=pytest.mark.full)], ids=str)
@pytest.mark.slow
def test_bits_do_not_depend_on_the_cut(case: HfCase) -> None:
    assert_same_bits(case, (3,))


RAGGED = {"evaluate": True, "batch": 7}


@pytest.mark.full
@pytest.mark.parametrize("how", [RAGGED, {"precision": "bf16"}, {"tied": "eager"}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_nor_do_those_of_any_model(name: str, how: dict[str, Any]) -> None:
    assert_same_bits(HfCase(name, **how), (2, 3, 4))


@pytest.mark.slow
def test_a_weight_used_in_three_places_is_one() -> None:
    variants = tiny_t5().variants
    assert {k: v for k, v in variants.source.alias.items() if k != v} == dict.fromkeys(
        ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"], "shared.weight"
    )
    assert [len(tie.groups) for tie in variants.graph.ties if tie.param == "shared.weight"] == [3]


PLAIN: dict[str, dict[str, Any]] = {  # without dropout, and without the balance, which is no mean over labels
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "t5": {"dropout_rate": 0.0},
    "mixtral": {"output_router_logits": None},
}


@pytest.mark.parametrize(
    ("name", "bits"),
    tiny.full_but([("mixtral", "torch"), ("llama", "fast")], itertools.product(CONFIGS, ("torch", "fast"))),
)
@pytest.mark.slow
def test_loss_and_gradients_are_the_library_s_own_over_one_big_batch(name: str, bits: str) -> None:
    """Four micro-batches of two samples, one of them without a label that counts, on two ranks."""
    model = built(name, **PLAIN.get(name, {}))
    data, case = hf_tiny.Holes(hf_tiny.dataset(model)), HfCase(name, bits=bits)
    variants = hf_tiny.variants(model, bits=bits)
    assert variants.graph.groups
    for mode in ("train", "eval"):
        variants.weight(mode, data.specs(2))  # type: ignore[arg-type]

    def body(comm: Communicator) -> tuple[dict[str, float], float, float]:
        plan = tiny.plan_of(case, "1f1b", tiny.even_cuts(variants.graph.groups, comm.size))
        trainer = Trainer(comm, variants, plan, case.settings, data)
        measured, outcome = trainer.evaluate(1, 8), trainer.step(0)
        return measured, outcome.loss / outcome.weight, outcome.norm

    (measured, loss, norm), _ = run_local(2, body)
    module = real(model)
    with torch.no_grad():
        batch = data.batch("val", 0, 0, 8, keys_of(data))
        outputs = module(**batch)
        logits, labels = outputs.logits, batch["labels"]
    assert measured["loss"] == pytest.approx(float(outputs.loss), rel=1e-6)
    if model.kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    right = (logits.argmax(-1) == labels)[labels != -100].float().mean()
    assert measured["accuracy"] == pytest.approx(float(right), rel=1e-6)
    whole = module.train()(**data.batch("train", 0, 0, 8, keys_of(data))).loss
    whole.backward()
    norms = [p.grad.norm() for p in module.parameters() if p.grad is not None]
    assert loss == pytest.approx(float(whole.detach()), rel=1e-6)
    assert norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)


def attention_calls(variants: Variants) -> list[dict[str, Any]]:
    """The arguments of each."""
    graph = variants.primary.captured.graph
    return [arguments_of(n) for n in graph.nodes if "product_attention" in schema_name(n)]


@pytest.mark.slow
def test_causal_attention_without_a_mask_has_none_in_the_graph() -> None:
    """As when the library runs the model: in an export it keeps one, with other bits."""
    torch.manual_seed(0)
    module = library().LlamaForCausalLM(library().LlamaConfig(**CONFIGS["llama"])).train()
    batch = {"input_ids": torch.randint(VOCAB, (2, CONTEXT))}
    variants = by_hand.variants_of(module, lambda out, _: (out.logits.square().sum(), 1.0), batch)
    calls = attention_calls(variants)
    assert [(c["is_causal"], c["attn_mask"]) for c in calls] == [(True, None), (True, None)]
    expected = by_hand.plain(variants, lambda: copy.deepcopy(module), batch)
    assert by_hand.differences(expected, by_hand.staged(variants, (), batch)) == []


ENCODERS = ["bert", "roberta", "electra"]  # of one form, that of CONFIGS["bert"]


@pytest.mark.parametrize("name", tiny.full_but(["bert"], ENCODERS))
@pytest.mark.slow
def test_a_causal_model_of_an_encoder_does_not_look_ahead(name: str, tmp_path: Path) -> None:
    """Neither here nor where the library opens what was saved; taken for masked again, it does."""
    path = hf_tiny.write_config("bert", tmp_path, model_type=name, architectures=None, pad_token_id=0)
    ids = torch.full((2, CONTEXT), 5)
    ids[1, -1] = 6
    for task in ("causal", "masked", "causal"):
        model = hf.build(path, task=task)
        hf.export(model, tmp_path)  # over `path`
        saved = library().AutoConfig.from_pretrained(path)
        for module in (real(model), getattr(library(), saved.architectures[0])(saved).eval()):
            with torch.no_grad():
                one, other = module(input_ids=ids).logits[:, :-1]
            assert torch.equal(one, other) == (task == "causal"), task


CAUSAL = [
    "gpt2",
    "opt",
    "gptj",
    "bloom",
    "falcon",
    "mamba",
    "ctrl",
    "openai-gpt",
    "xglm",
    "biogpt",
    "roformer",
]


@pytest.mark.parametrize("name", tiny.full_but(["gpt2", "opt"], CAUSAL))
@pytest.mark.slow
def test_the_loss_of_a_causal_model_is_that_of_the_next_token(name: str, tmp_path: Path) -> None:
    path = hf_tiny.write_config(
        "llama", tmp_path, model_type=name, architectures=None, num_key_value_heads=None, rotary_dim=4,
        ffn_dim=48, dff=48, attention_heads=4, word_embed_proj_dim=32,
    )  # fmt: skip
    module, ids = real(hf.build(path, task="causal")), torch.arange(2 * CONTEXT).view(2, CONTEXT)
    with torch.no_grad():
        outputs = module(input_ids=ids, labels=ids)
    logits = outputs.logits[:, :-1].transpose(1, 2)
    torch.testing.assert_close(outputs.loss, nn.functional.cross_entropy(logits, ids[:, 1:]))


def test_a_class_in_two_of_the_library_s_lists_is_masked(tmp_path: Path) -> None:
    changes = {"model_type": "xlm", "architectures": ["XLMWithLMHeadModel"], "mask_token_id": VOCAB}
    assert hf.build(hf_tiny.write_config("bert", tmp_path, **changes)).kind == "masked"


def test_a_number_of_positions_below_zero_is_none(tmp_path: Path) -> None:
    path = hf_tiny.write_config(
        "gpt2", tmp_path, model_type="xlnet", architectures=None, d_model=32, d_inner=48, n_embd=None
    )
    assert hf.build(path, task="sequence").max_positions is None


def zeroed_behind(mask: Tensor) -> Tensor:
    mask[:, 8:] = 0
    return mask


def ones(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape, dtype=torch.long)


def positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).unsqueeze(0)


@pytest.mark.parametrize(
    ("given", "masked"),
    [
        (lambda ids: {}, False),
        (lambda ids: {"attention_mask": ones(ids)}, False),
        (lambda ids: {"attention_mask": torch.ones_like(ids)}, False),
        (lambda ids: {"position_ids": positions(ids) + 2}, False),
        (lambda ids: {"position_ids": positions(ids) % 8}, True),
        (lambda ids: {"attention_mask": (positions(ids) < 12).long().expand(ids.shape)}, True),
        (lambda ids: {"attention_mask": zeroed_behind(ones(ids))}, True),
        (lambda ids: {"attention_mask": (ids < 28).long()}, True),
        (lambda ids: {"position_ids": ids.cumsum(1)}, True),
    ],
    ids=["none", "ones", "as ids", "positions", "packed", "padded", "written", "of ids", "packed by ids"],
)
@pytest.mark.slow
def test_attention_has_a_mask_where_the_library_makes_one(
    given: Callable[[Tensor], dict[str, Tensor]], masked: bool
) -> None:
    """Without a cache it looks at positions and masks, which in a trace have values where no input has a
    part in them."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = library().LlamaConfig(**CONFIGS["llama"] | {"num_hidden_layers": 1})
            self.inner = library().AutoModelForCausalLM.from_config(config)

        def forward(self, input_ids: Tensor) -> Tensor:
            logits: Tensor = self.inner(input_ids, use_cache=False, **given(input_ids)).logits
            return logits

    batch = {"input_ids": torch.arange(2 * CONTEXT).view(2, CONTEXT)}
    variants = by_hand.variants_of(Own, lambda out, _: (out.square().sum(), 1.0), batch)
    (call,) = attention_calls(variants)
    assert (call["is_causal"], call["attn_mask"] is not None) == (not masked, masked)
    assert by_hand.differences(by_hand.plain(variants, Own, batch), by_hand.staged(variants, (), batch)) == []


@pytest.mark.parametrize(
    "name", tiny.full_but(["gpt2", "mamba"], ["gpt2", "llama", "qwen2", "mistral", "mamba"])
)
@pytest.mark.slow
def test_loss_and_gradients_of_a_micro_batch_have_the_bits_of_the_library(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"tie_word_embeddings": False, **PLAIN.get(name, {})}
    if name not in CONFIGS:
        changes |= {"model_type": name, "architectures": None, "sliding_window": 8}
    if name == "mamba":
        changes["intermediate_size"] = None
    path = hf_tiny.write_config(name if name in CONFIGS else "llama", tmp_path, **changes)
    model = hf.build(path, task="causal", vocab=VOCAB)
    data, variants = hf_tiny.dataset(model), hf_tiny.variants(model)
    batch = data.batch("train", 0, 0, 2, keys_of(data))

    got = by_hand.staged(variants, (), batch)
    module = real(model).train()
    loss = type(module).forward(module, **batch).loss.float() * weight_of("causal", batch["labels"])
    loss.backward()
    expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert by_hand.differences({"loss": loss.detach(), **expected}, got) == []


@pytest.mark.full
def test_the_balance_of_experts_is_part_of_the_loss_as_the_library_adds_it() -> None:
    model = built("mixtral")
    case, module = HfCase("mixtral", batch=2, micro_batches=1), real(built("mixtral"))
    data = hf_tiny.dataset(model)

    def body(comm: Communicator) -> float:
        trainer = Trainer(comm, case.variants, tiny.plan_of(case, "1f1b", ()), case.settings, data)
        return trainer.evaluate(1, 2)["loss"]

    batch = data.batch("val", 0, 0, 2, keys_of(data))
    with torch.no_grad():
        outputs = module(**batch)
        plain = module(**batch | {"labels": None}).logits[:, :-1].reshape(-1, VOCAB)
    alone = nn.functional.cross_entropy(plain, batch["labels"][:, 1:].reshape(-1))
    assert float(outputs.loss) > float(alone) + 1e-3
    assert run_local(1, body)[0] == pytest.approx(float(outputs.loss), rel=1e-6)


LARGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
              "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096},
    "mixtral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000,
                "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
                "output_router_logits": None},
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_models_of_full_size_are_captured_and_cut_in_ten_seconds(name: str) -> None:
    model, start = built(name, **LARGE[name]), time.process_time()  # the machine may be shared
    variants = hf_tiny.variants(model)
    cuts = tiny.even_cuts(variants.graph.groups, 4)
    for stage in range(4):
        assert variants.code("train", variants.specs(2), cuts, stage).leaves
    assert time.process_time() - start < 10.0


def test_several_kinds_of_labels_give_their_weight() -> None:
    labels = torch.tensor([[-100, 3, 4, -100], [5, -100, -100, -100]])
    assert float(weight_of("causal", labels)) == 2.0  # the first label of a sample is nobody's next token
    assert float(weight_of("masked", labels)) == 3.0
    assert weight_of("sequence", torch.zeros(6, 2)) == 6.0


# -- the folder -----------------------------------------------------------------------------------------


def save(folder: Path, model: hf.HfModel, parts: list[dict[str, Tensor]], order: tuple[str, ...]) -> None:
    where = {name: shard_name(i, len(parts)) for i, part in enumerate(parts) for name in part}
    for i, part in enumerate(parts):
        save_shard(folder, i, len(parts), part)
    total = sum(t.nbytes for part in parts for t in part.values())
    write_index(folder, {name: where[name] for name in order}, total)
    hf.export(model, folder)


def opened(model: hf.HfModel, folder: Path) -> Any:
    architecture = json.loads(model.texts["config.json"])["architectures"][0]
    module, info = getattr(library(), architecture).from_pretrained(folder, output_loading_info=True)
    assert {k: v for k, v in info.items() if v} == {}, "nothing missing, nothing too much"
    return module.eval()


@pytest.mark.parametrize("name", all_but_one_full("gpt2"))
@pytest.mark.slow
def test_what_a_run_saves_opens_in_the_library_and_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    model, case, folder = built(name), HfCase(name), tmp_path / "checkpoint"
    data, variants = case.dataset, case.variants
    batch = data.batch("val", 3, 0, 4, keys_of(data))
    if model.kind != "seq2seq":  # its decoder is fed from the labels
        del batch["labels"]

    def body(comm: Communicator) -> Any:
        plan = tiny.plan_of(case, "1f1b", tiny.even_cuts(variants.graph.groups, comm.size))
        trainer = Trainer(comm, variants, plan, case.settings, data)
        for step in range(2):
            trainer.step(step)
        predicted = trainer.predict(batch)
        return trainer.state_dict(), predicted, trainer.structure(batch) if predicted else None

    tiny.warm(case)
    ranks = run_local(2, body)
    save(folder, model, [state for state, *_ in ranks], variants.source.persistent)
    _, predicted, structure = ranks[-1]
    module = opened(model, folder)
    mine = torch.cat([pytree.tree_unflatten(micro, structure).logits for micro in predicted])
    with torch.no_grad():
        torch.testing.assert_close(mine, module(**batch).logits, rtol=1e-5, atol=1e-6)
    names = {n for part in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
             for n in [part]}  # fmt: skip
    assert names <= set(module.state_dict()), "the library's own names"
    again = hf.build(folder)  # and ours: training goes on from there
    source = ModelSource(again.factory, SEED + 1, again.initial)
    for name_, t in source.materialise(source.persistent).items():
        assert torch.equal(t, next(state[name_] for state, *_ in ranks if name_ in state)), name_


@pytest.mark.slow
def test_files_that_came_with_the_model_go_along(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    real(built("gpt2")).save_pretrained(source)
    (source / "generation_config.json").write_text('{"max_length": 12}')
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("stay here")
    hf.export(hf.build(source), target)
    assert {f.name for f in target.iterdir()} == {"config.json", "generation_config.json", "tokenizer.json"}
    assert json.loads((target / "generation_config.json").read_text()) == {"max_length": 12}
    hf.export(built("gpt2"), tmp_path / "new")
    written = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert written["eos_token_id"] == CONFIGS["gpt2"]["eos_token_id"]
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["GPT2LMHeadModel"], "float32")


# -- weights from disk ----------------------------------------------------------------------------------


def weights_of(model: hf.HfModel) -> dict[str, Tensor]:
    source = ModelSource(model.factory, SEED + 1, model.initial)
    return source.materialise(source.persistent)


def assert_same(found: dict[str, Tensor], module: nn.Module) -> None:
    wanted = module.state_dict()
    assert found.keys() <= wanted.keys()
    for name, t in found.items():
        assert torch.equal(t, wanted[name].to(t.dtype)), name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_each_rank_starts_from_the_weights_of_the_folder(name: str, tmp_path: Path) -> None:
    """As the library saves them: in several files; experts one by one, which here are one tensor."""
    module = real(built(name))
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_same(weights_of(hf.build(tmp_path)), module)


@pytest.mark.slow
def test_experts_that_lie_apart_on_disk_are_put_together(tmp_path: Path) -> None:
    module = real(built("mixtral"))
    module.save_pretrained(tmp_path)
    model = hf.build(tmp_path)
    on_disk = model.initial._weights.specs  # type: ignore[union-attr]
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in on_disk
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert name not in on_disk
    assert torch.equal(weights_of(model)[name], module.state_dict()[name])


def test_bfloat16_on_disk_becomes_float32(tmp_path: Path) -> None:
    module = real(built("llama")).to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    found = weights_of(hf.build(tmp_path))
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert_same(found, module.float())


@pytest.mark.slow
def test_a_checkpoint_without_the_prefix_or_the_head_is_read(tmp_path: Path) -> None:
    """The bare model as it is often published; a new head has to be asked for."""
    module = real(built("gpt2"))
    module.transformer.save_pretrained(tmp_path)
    model = hf.build(tmp_path, task="causal")  # the head is the embedding
    assert_same(weights_of(model), module)
    with pytest.raises(CheckpointError, match=r"1 missing on disk:\n    score.weight \[2, 32\]") as caught:
        hf.build(tmp_path, task="sequence")
    assert "model.fresh" in str(caught.value)
    model = hf.build(tmp_path, task="sequence", fresh=["score.*"])
    found = weights_of(model)
    assert torch.equal(found["transformer.wte.weight"], module.transformer.wte.weight)
    assert 0.01 < float(found["score.weight"].std()) < 0.03
    assert (model.kind, model.labels) == ("sequence", 2)


@pytest.mark.parametrize("piece_bytes", [100, 8 << 20])
def test_names_of_one_parameter_have_one_value(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(pretrained, "_PIECE_BYTES", piece_bytes)
    module = real(built("gpt2")).to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    tensors, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    head = tensors["transformer.wte.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    assert_same(weights_of(hf.build(tmp_path)), module.float())
    head[-1, -1] += 1
    for other in (head, head[:-1].clone()):
        save_file({**tensors, "lm_head.weight": other}, file, {"format": "pt"})
        with pytest.raises(CheckpointError) as caught:
            weights_of(hf.build(tmp_path))
        said = str(caught.value)
        assert "lm_head.weight" in said
        assert "transformer.wte.weight" in said
        if other is head:
            assert said.endswith("set tie_word_embeddings: false in its config.json, which makes them two")
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert torch.equal(weights_of(hf.build(tmp_path))["lm_head.weight"], head.float())


def test_names_that_do_not_fit_are_all_listed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    real(built("llama")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 47)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        hf.build(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}: does not fit the model\n  2 missing on disk:")
    assert "    model.norm.weight [32]\n" in text
    assert "  1 unknown to the model:\n    model.layers.2.mlp.up_proj.weight [3]\n" in text
    assert "    model.layers.0.mlp.down_proj.weight: [32, 47] on disk, [32, 48] in the model" in text


# -- what is frozen, what does not fit ----------------------------------------------------------------------


@pytest.mark.slow
def test_frozen_parameters_are_not_trained(tmp_path: Path) -> None:
    path = hf_tiny.write_config("gpt2", tmp_path)
    model = hf.build(path, freeze=["transformer.w?e.weight", "*.h.0.*"])
    variants = hf_tiny.variants(model)
    frozen = [n for n, p in variants.source.params.items() if not p.requires_grad]
    assert len(frozen) == 2 + 12
    assert set(variants.trained) == set(variants.source.params) - set(frozen)
    with pytest.raises(ConfigError, match=r"model\.freeze: the pattern 'wte\.\*' fits no parameter; .*wte"):
        hf.build(path, freeze=["wte.*"])


class Own(DatasetBase):
    """Samples of a user, who has masked some labels."""

    vocab = VOCAB

    def __init__(self, *keys: str) -> None:
        self.sample = dict.fromkeys(keys, TensorSpec((CONTEXT,), "int64"))

    def batch(self, *where: Any) -> dict[str, Tensor]:
        raise AssertionError("not read")


class Digits(Images):
    classes = 10


Change = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: hf.build(p / "absent"), "absent: there is no such file or folder on this machine"),
        (lambda p: hf.build(p), r"has no config\.json; name the folder that `save_pretrained` wrote"),
        (
            lambda p: hf.build(hf_tiny.write_config("gpt2", p).parent),
            r"neither model\.safetensors nor .*to start from random ones",
        ),
        (
            lambda p: hf.build(hf_tiny.write_config("gpt2", p, model_type="gpt_of_mine")),
            r"config\.json: is not a model that transformers .* knows .*package\.module:factory",
        ),
        (
            lambda p: hf.build(hf_tiny.write_config("bert", p, architectures=["BertModel"])),
            "names the class BertModel, which has no loss .* masked, causal, seq2seq, image, sequence",
        ),
        (
            lambda p: hf.build(hf_tiny.write_config("bert", p), task="translate"),
            r"model\.task = 'translate'; expected one of masked, causal",
        ),
        (
            lambda p: hf.build(hf_tiny.write_config("bert", p, model_type="xlm"), task="causal"),
            r"the loss of XLMWithLMHeadModel compares each token with itself .* choose another model\.task",
        ),
        (
            lambda p: hf.build(
                hf_tiny.write_config("llama", p, model_type="bart", architectures=["BartForCausalLM"])
            ),
            "the loss of BartForCausalLM compares each token with itself and not with the next one",
        ),
        (
            lambda p: hf.build(hf_tiny.write_config("vit", p), task="causal"),
            "no causal model of the type vit; choose another",
        ),
        (
            lambda p: hf.build(hf_tiny.write_config("llama", p), vocab=VOCAB + 1),
            "vocab_size = 32, but the data has 33 token ids",
        ),
        (
            lambda p: hf_tiny.dataset(hf.build(hf_tiny.write_config("gpt2", p, n_positions=8))),
            "samples of 16 tokens, but the model has 8 positions",
        ),
        (
            lambda p: hf_tiny.dataset(hf.build(hf_tiny.write_config("bert", p, vocab_size=VOCAB))),
            "needs a mask token, and its 32 ids are all in use by the data; set vocab_size to 33",
        ),
        (
            lambda p: hf_tiny.dataset(hf.build(hf_tiny.write_config("vit", p, num_channels=3))),
            r"reads images of \[3, 8, 8\] .*, the data gives \[1, 8, 8\]",
        ),
        (
            lambda p: hf.adapt(Digits(), hf.build(hf_tiny.write_config("vit", p)), 0),
            r"the data have 10 classes, the model 4; give id2label in config\.json 10 entries",
        ),
        (
            lambda p: hf_tiny.dataset(hf.build(hf_tiny.write_config("vit", p, id2label={"0": "a"}))),
            r"the labels of the data are int64, but a model with one label .* id2label one entry per class",
        ),
        (
            lambda p: hf.adapt(
                Own("input_ids", "labels"),
                hf.build(hf_tiny.write_config("gpt2", p, id2label={"0": "a"}), task="sequence"),
                0,
            ),
            r"the labels of the data are int64, but a model with one label",
        ),
        (
            lambda p: hf.adapt(Images(), hf.build(hf_tiny.write_config("gpt2", p)), 0),
            r"kind causal reads 'tokens', but the data gives \['x', 'y'\]",
        ),
        (
            lambda p: hf.adapt(
                SyntheticTokens(VOCAB, CONTEXT, 0),
                hf.build(hf_tiny.write_config("gpt2", p), task="sequence"),
                0,
            ),
            "needs one label per sample",
        ),
    ],
)
def test_what_does_not_fit_is_said(call: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        call(tmp_path)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"transformers: .*pip install 'mpipipe\[transformers\]'"):
        hf.build(hf_tiny.write_config("gpt2", tmp_path))


@pytest.mark.full
def test_the_library_is_not_imported_before_it_is_asked_for() -> None:
    program = "import sys, mpipipe.models.hf; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- data -----------------------------------------------------------------------------------------------


def test_data_is_put_in_the_model_s_words() -> None:
    tokens = SyntheticTokens(VOCAB, CONTEXT, SEED)
    plain = tokens.batch("train", 5, 0, 4, frozenset({"tokens"}))["tokens"]
    causal = hf_tiny.dataset(built("gpt2"))
    assert causal.specs(3) == {k: TensorSpec((3, CONTEXT), "int64") for k in ("input_ids", "labels")}
    batch = causal.batch("train", 5, 0, 4, keys_of(causal))
    assert torch.equal(batch["input_ids"], plain)
    assert torch.equal(batch["labels"], plain)
    assert list(causal.batch("train", 5, 0, 4, frozenset({"labels"}))) == ["labels"]
    assert causal.batch("train", 5, 0, 4, frozenset({"attention_mask"})) == {}
    halves = hf_tiny.dataset(built("t5"))
    batch = halves.batch("train", 5, 0, 4, keys_of(halves))
    assert torch.equal(torch.cat([batch["input_ids"], batch["labels"]], 1), plain)
    images, as_values = Images(), hf_tiny.dataset(built("vit"))
    assert as_values.specs(2)["pixel_values"] == TensorSpec((2, 1, 8, 8), "float32")
    batch = as_values.batch("train", 5, 1, 4, keys_of(as_values))
    assert torch.equal(batch["pixel_values"], images.batch("train", 5, 1, 4, frozenset({"x"}))["x"])
    assert torch.equal(batch["labels"], images.batch("train", 5, 1, 4, frozenset({"y"}))["y"])
    assert hf.adapt(causal, built("gpt2"), SEED) is causal
    assert (as_values.whole, as_values.varying) == (images.whole, images.varying)
    assert (causal.vocab, causal.tokens_per_sample, causal.exact) == (VOCAB, CONTEXT, True)
    assert causal.unigram_entropy == tokens.unigram_entropy


def test_only_a_causal_model_goes_on_with_a_text(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("some letters " * 100)
    text = Text(tmp_path / "corpus.txt", CONTEXT, 0.1, 2, 1, SEED)
    goes_on = {
        name: hf.adapt(text, hf.build(hf_tiny.write_config(name, tmp_path / name, vocab_size=257)), SEED)
        for name in ("gpt2", "bert")
    }
    assert goes_on["gpt2"].encode("a") == [97]
    assert goes_on["bert"].encode("a") is None


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_what_a_user_s_own_data_give_is_not_left_out(name: str) -> None:
    model = built(name)
    for extra in ("labels", "attention_mask"):
        own = Own("tokens", extra)
        for data in (own, Mixture([own, own], [1, 2], SEED)):
            with pytest.raises(
                DataError, match=rf"\['{extra}'\] beside 'tokens', .*name 'tokens' 'input_ids'"
            ):
                hf.adapt(data, model, SEED)
    for keys in (("input_ids", "labels", "attention_mask"), ("tokens",), ("tokens", "remarks")):
        hf.adapt(Own(*keys), model, SEED)
    made_up = SyntheticTokens(VOCAB, CONTEXT, SEED)
    hf.adapt(Mixture([made_up, made_up], [1, 2], SEED), model, SEED)


def test_whatever_tensor_the_library_s_forward_takes_may_be_in_a_batch(tmp_path: Path) -> None:
    changes = {"model_type": "layoutlm", "architectures": ["LayoutLMForSequenceClassification"]}
    model = hf.build(hf_tiny.write_config("bert", tmp_path, **changes))
    specs = {
        "input_ids": TensorSpec((2, CONTEXT), "int64"),
        "bbox": TensorSpec((2, CONTEXT, 4), "int64"),
        "labels": TensorSpec((2,), "int64"),
    }
    variants = Variants(ModelSource(model.factory, SEED), model.loss, lambda rows: specs, 2, "fp32")
    assert variants.read == specs.keys()
    assert batch_names(variants.source.module)[:3] == ["input_ids", "attention_mask", "token_type_ids"]


class ReadOnce(DatasetBase):
    exact, vocab = False, VOCAB

    def __init__(self) -> None:
        self.batches = iter([torch.arange(8).view(2, 4), torch.arange(6).view(1, 6)])

    def specs(self, rows: int) -> dict[str, TensorSpec]:
        return {"tokens": TensorSpec((rows, 4), "int64")}

    def batch(self, *where: Any) -> dict[str, Tensor]:
        raise AssertionError("not by number")

    def next_batch(self, split: Split, step: int) -> dict[str, Tensor] | None:
        tokens = next(self.batches, None)
        return None if tokens is None else {"tokens": tokens}


def test_a_bare_token_file_has_the_ids_of_the_model(tmp_path: Path) -> None:
    np.arange(100).astype("<u2").tofile(tmp_path / "a.bin")
    path = hf_tiny.write_config("gpt2", tmp_path)
    config = parse(
        f"model: {{name: 'hf:{path}', context: 4}}\ndata: {{name: tokens, path: {tmp_path / 'a.bin'}}}"
    )
    data = open_dataset(config, tmp_path)
    assert data.vocab == hf.vocab_size(path) == build(config, data).data.vocab


def test_bytes_for_a_model_with_a_tokenizer_of_its_own_are_told(tmp_path: Path) -> None:
    real(built("gpt2", vocab_size=256)).save_pretrained(tmp_path)
    file = tmp_path / "a.txt"
    file.write_text("some letters " * 100)
    text, model = f"{{name: text, path: {file}}}", f"{{name: 'hf:{tmp_path}', context: 4}}"

    def notes(data: str) -> Any:
        config = parse(f"model: {model}\ndata: {data}")
        prepare(config, tmp_path, True)
        return build(config, open_dataset(config, tmp_path)).notes

    assert notes(text) == []
    (tmp_path / "tokenizer.json").write_text("{}")
    (note,) = notes(text)
    assert f"mpipipe tokenize TEXTS -o texts.bin --tokenizer {tmp_path / 'tokenizer.json'}, and set" in note
    assert notes("synthetic") == []


@pytest.mark.parametrize("data", [[{"input_ids": torch.ones(4).long()}], ([1], [2])])
def test_what_users_bring_has_the_model_s_keys_already(tmp_path: Path, data: Any) -> None:
    config = parse(f"model: 'hf:{hf_tiny.write_config('gpt2', tmp_path)}'")
    assert build(config, data).data is data


def test_data_that_is_read_once_is_translated_too() -> None:
    data: Any = hf.adapt(ReadOnce(), built("t5"), SEED)
    assert not data.exact
    first = data.next_batch("train", 0)
    assert {k: t.tolist() for k, t in first.items()} == {
        "input_ids": [[0, 1], [4, 5]], "labels": [[2, 3], [6, 7]]
    }  # fmt: skip
    assert data.next_batch("train", 1)["labels"].tolist() == [[3, 4, 5]]
    assert data.next_batch("train", 2) is None


def test_fifteen_of_a_hundred_tokens_are_masked_alike_in_any_slice() -> None:
    data = hf_tiny.dataset(built("bert"))
    keys, rows = keys_of(data), 1500
    batch = data.batch("train", 2, 0, rows, keys)
    plain = SyntheticTokens(VOCAB, CONTEXT, SEED).batch("train", 2, 0, rows, frozenset({"tokens"}))["tokens"]
    chosen = batch["labels"] != -100
    n = rows * CONTEXT
    assert float(chosen.float().mean()) == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / n) ** 0.5)
    assert torch.equal(batch["labels"][chosen], plain[chosen])
    assert torch.equal(batch["input_ids"][~chosen], plain[~chosen])
    given = batch["input_ids"][chosen]
    hidden, kept = (given == VOCAB).float().mean(), (given == plain[chosen]).float().mean()
    assert float(hidden) == pytest.approx(0.8, abs=0.03)  # VOCAB: the first id that the data does not use
    assert float(kept) == pytest.approx(0.1 + 0.1 / VOCAB, abs=0.03)
    for start, stop in ((0, 7), (7, 8), (8, rows)):
        part = data.batch("train", 2, start, stop, keys)
        assert all(torch.equal(part[k], batch[k][start:stop]) for k in keys)
    assert not torch.equal(data.batch("train", 3, 0, rows, keys)["labels"] != -100, chosen)


@pytest.mark.slow
def test_the_mask_token_is_the_tokenizer_s_own(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    real(built("bert")).save_pretrained(tmp_path)
    words = {"[UNK]": 0, "[MASK]": 9, **{f"w{i}": i for i in range(1, 9)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    library().PreTrainedTokenizerFast(
        tokenizer_object=model, mask_token="[MASK]", unk_token="[UNK]"
    ).save_pretrained(tmp_path)
    assert hf.build(tmp_path).mask == 9
    assert "tokenizer.json" in {f.name for f in hf.build(tmp_path).companions}


@pytest.mark.parametrize("name", [m for m in all_but_one_full("llama") if "vit" not in str(m)])
@pytest.mark.slow
def test_padded_samples_with_a_mask_give_the_library_s_loss(name: str) -> None:
    model = built(name)
    specs = dict.fromkeys(("input_ids", "attention_mask", "labels"), TensorSpec((2, 6), "int64"))
    source = ModelSource(model.factory, SEED)
    variants = Variants(source, model.loss, lambda rows: specs, 2, "fp32", model.metrics)
    case = HfCase(name, batch=2, micro_batches=1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    ids = torch.arange(3, 15).view(2, 6) % VOCAB
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    class Given(DatasetBase):
        def specs(self, rows: int) -> dict[str, TensorSpec]:
            return specs

        def batch(self, *where: Any) -> dict[str, Tensor]:
            return {k: t for k, t in batch.items() if k in where[-1]}

    def body(comm: Communicator) -> float:
        plan = tiny.plan_of(case, "1f1b", tiny.even_cuts(variants.graph.groups, comm.size))
        return Trainer(comm, variants, plan, case.settings, Given()).evaluate(1, 2)["loss"]

    assert variants.graph.groups
    variants.weight("eval", specs)
    with torch.no_grad():
        assert run_local(2, body)[0] == pytest.approx(float(real(model)(**batch).loss), rel=1e-6)
