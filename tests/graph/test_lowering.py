"""Which parts of a graph become operators of our own, and what they compute."""

from __future__ import annotations

import itertools
from collections import Counter

import built_in_tiny
import by_hand
import hf_tiny
import pytest
import tiny
from by_hand import every_cut, staged
from torch import Tensor
from torch.nn import functional

from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.groups import group_of
from mpipipe.graph.variants import Variants
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.embedding import embedding


def lowered(variants: Variants, mode: str = "train") -> Counter[str]:
    """How many operators of each kind; `+` where the residual add is part of it."""
    anatomy = variants.lowered(Lowering("fast")).anatomy(mode, variants.first)  # type: ignore[arg-type]
    found = anatomy.lowered(anatomy.order)
    return Counter(m.form.split()[0] + "+" * (len(m.results) - 1) for m in found)


BUILT_IN = {
    "gpt": {"linear": 6, "layer_norm": 2, "layer_norm+": 3, "bias_gelu": 2, "embedding": 2},
    "llama": {"linear": 14, "rms_norm": 2, "rms_norm+": 3, "swiglu": 2, "flash_attention": 2, "embedding": 1},
}
OF_HF = {
    "llama": {"linear": 14, "rms_norm": 2, "rms_norm+": 3, "swiglu": 2, "flash_attention": 2, "embedding": 1},
    "gpt2": {"linear": 6, "layer_norm": 2, "layer_norm+": 3, "bias_gelu": 2, "embedding": 2},
    "bert": {"linear": 10, "layer_norm": 6, "bias_gelu": 3, "embedding": 3},
}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.slow
def test_what_is_found_in_our_models(name: str) -> None:
    variants = tiny.captured("gpt", 2) if name == "gpt" else built_in_tiny.captured(name, 2, "fp32")
    assert lowered(variants) == {**BUILT_IN[name], "linear_cross_entropy": 1}


@pytest.mark.parametrize(
    ("name", "alone", "relu", "added"),
    [("vgg", 0, 2, 0), ("unet", 0, 6, 0), ("resnet", 1, 3, 2), ("conv and norm", 0, 2, 0)],
)
@pytest.mark.slow
def test_what_follows_a_batch_norm(name: str, alone: int, relu: int, added: int) -> None:
    """The ReLU, of a ResNet's blocks the addition before it; not that of a projected shortcut, nor one of
    vectors."""
    tiny_ones = name in tiny.MODELS
    variants = tiny.captured(name, 2) if tiny_ones else built_in_tiny.captured(name, 2, "fp32")
    anatomy = variants.lowered(Lowering("fast")).primary
    norms = [m.args for m in anatomy.lowered(anatomy.order) if m.op is batch_norm]
    found = Counter("alone" if len(a) == 4 else "relu" if a[5] is None else "added" for a in norms)
    assert (found["alone"], found["relu"], found["added"]) == (alone, relu, added)


@pytest.mark.parametrize("name", OF_HF)
@pytest.mark.slow
def test_what_is_found_in_models_of_transformers(name: str) -> None:
    """The norms and activations that it writes out, and a causal mask that it makes of indices; not the
    attention with dropout of GPT-2 and BERT, but without it, in evaluation."""
    pytest.importorskip("transformers")
    variants = hf_tiny._captured(name, 2, "fp32")
    assert lowered(variants) == {**OF_HF[name], "linear_cross_entropy": 1}
    assert lowered(variants, "eval")["flash_attention"] == 2


def test_the_bits_of_torch_lower_what_has_these_bits() -> None:
    anatomy = tiny.captured("gpt", 2).primary
    assert anatomy.matches
    assert {m.op for m in anatomy.lowered(anatomy.order)} == {embedding}


def test_the_table_chooses_and_what_it_does_not_have_is_ours() -> None:
    variants = tiny.captured("gpt, no dropout", 2)
    form = next(m.form for m in variants.primary.matches if m.form.startswith("flash_attention"))
    without = variants.lowered(Lowering("fast", {form: "torch"}))
    assert lowered(variants)["flash_attention"] == 2
    found = without.primary.lowered(without.primary.order)
    assert not [m for m in found if m.form == form]
    assert [m for m in found if m.form.startswith("layer_norm")]


@pytest.mark.parametrize("model", ["gpt", "thrice", "traps", "conv and norm"])
def test_no_group_ends_within_a_match(model: str) -> None:
    """Whatever is used of them: the groups of a plain run are those of a fast one."""
    variants = tiny.captured(model, 2)
    groups = group_of(variants.primary)
    for match in variants.primary.matches:
        assert len({groups[n] for n in match.nodes}) == 1 or not match.atomic
    assert variants.lowered(Lowering("fast")).graph.hash == variants.graph.hash


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow
def test_results_have_the_forms_that_torch_gives(precision: str) -> None:
    """Shapes and dtypes, under autocast too: what follows was captured for these."""
    for variants in (
        tiny.captured("gpt, no dropout", 2, precision),
        built_in_tiny.captured("llama", 2, precision),
        built_in_tiny.captured("resnet", 2, precision),
    ):
        anatomy = variants.lowered(Lowering("fast")).primary
        for match in anatomy.lowered(anatomy.order):
            for n in match.results:
                ours, theirs = anatomy.values[n], n.meta["val"]
                assert (ours.shape, ours.dtype, ours.requires_grad) == (
                    theirs.shape, theirs.dtype, theirs.requires_grad,
                ), n  # fmt: skip


# -- what they compute -----------------------------------------------------------------------------------


def gpt_batch() -> dict[str, Tensor]:
    return tiny.TOKENS.batch("train", 0, 0, 2, frozenset({"tokens", "labels"}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow
def test_any_cut_gives_the_bits_of_none_and_the_strides_that_were_foretold(precision: str) -> None:
    """`staged` compares the strides of what is sent with those of the plan."""
    variants = tiny.captured("gpt, untied, no dropout", 2, precision).lowered(Lowering("fast"))
    expected = staged(variants, (), gpt_batch())
    for cuts in every_cut(variants)[1:]:
        assert by_hand.differences(expected, staged(variants, cuts, gpt_batch())) == [], cuts


@pytest.mark.parametrize(
    ("name", "precision"),
    tiny.full_but(
        [("resnet", "fp32"), ("unet", "bf16")], itertools.product(["resnet", "unet"], ["fp32", "bf16"])
    ),
)
@pytest.mark.slow
def test_any_cut_of_a_model_with_batch_norm_gives_the_bits_of_none(name: str, precision: str) -> None:
    """Also one between a norm and the ReLU that it is one with elsewhere."""
    variants = built_in_tiny.captured(name, 2, precision).lowered(Lowering("fast"))
    data = built_in_tiny.made(name, built_in_tiny.TINY[name])[1]
    batch = data.batch("train", 0, 0, 2, frozenset({"x", "labels"}))
    expected = staged(variants, (), batch)
    groups = variants.graph.groups
    for group in groups[1:]:
        assert by_hand.differences(expected, staged(variants, (group,), batch)) == [], group


def exact(variants: Variants) -> by_hand.Result:
    """Forward and backward in float64."""
    source, batch = variants.source, gpt_batch()
    first = source.materialise([*source.params, *source.buffers])
    model = tiny.gpt(tied=False, dropout=0.0)().double()
    model.load_state_dict({n: first[c].double() for n, c in source.alias.items()})
    loss = functional.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_error_is_at_most_twice_that_of_torch(precision: str) -> None:
    plain = tiny.captured("gpt, untied, no dropout", 2, precision)
    true = exact(plain)

    def error(bits: str) -> float:
        found = staged(plain.lowered(Lowering(bits)), (), gpt_batch())
        return sum(float((found[n].double() - t).norm() / t.norm()) for n, t in true.items())

    assert error("fast") <= 2.0 * error("torch")
