"""Which parts of a graph become operators of our own, and what they compute."""

from __future__ import annotations

import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import built_in_tiny
import by_hand
import hf_tiny
import pytest
import tiny
import torch
from by_hand import every_cut, staged
from torch import Tensor, fx, nn
from torch.nn import functional

from mpipipe.graph import patterns
from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.cut import extract
from mpipipe.graph.groups import group_of
from mpipipe.graph.program import Batch, Loss, Mode
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models.losses import from_mean
from mpipipe.ops import fused
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.embedding import embedding
from mpipipe.ops.max_pool2d import max_pool2d
from mpipipe.ops.native import kernels


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.slow
def test_what_is_found_in_our_models(name: str, precision: str) -> None:
    """Under autocast too, where a branch in bfloat16 is added to a stream in float32."""
    tiny_one = name == "gpt"
    variants = (tiny if tiny_one else built_in_tiny).captured(name, 2, precision)
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
    variants = hf_tiny.captured(name, 2)
    assert lowered(variants) == {**OF_HF[name], "linear_cross_entropy": 1}
    assert lowered(variants, "eval")["flash_attention"] == 2


def test_the_bits_of_torch_lower_what_has_these_bits() -> None:
    anatomy = tiny.captured("gpt", 2).primary
    assert anatomy.matches
    assert {m.op for m in anatomy.lowered(anatomy.order)} == {embedding}


@pytest.mark.parametrize(("bits", "mode"), [("torch", "train"), ("fast", "train"), ("torch", "eval")])
@pytest.mark.slow
def test_pooling_is_ours_whatever_the_bits(bits: str, mode: str) -> None:
    for name, pools in (("vgg", 2), ("unet", 1), ("resnet", 1)):
        variants = built_in_tiny.captured(name, 2, "fp32").lowered(Lowering(bits))
        anatomy = variants.anatomy(mode, variants.first)  # type: ignore[arg-type]
        assert [m.op for m in anatomy.lowered(anatomy.order)].count(max_pool2d) == pools


class InPlace(nn.Module):
    """As torchvision writes its VGG: the activations overwrite what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Linear(4 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(functional.relu_(self.conv(x)))
        return self.head(functional.relu_(x).flatten(1))


@pytest.mark.slow
def test_pooling_between_activations_in_place_is_ours_with_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = {"x": torch.randn(2, 1, 8, 8), "labels": torch.tensor([1, 4])}
    loss: Loss = lambda y, b: (functional.cross_entropy(y, b["labels"], reduction="sum"), 1.0)  # noqa: E731
    variants = by_hand.variants_of(InPlace, loss, batch)
    assert [m.op for m in variants.primary.lowered(variants.primary.order)] == [max_pool2d]
    found = [staged(variants, cuts, batch) for cuts in every_cut(variants, 2)]
    monkeypatch.setattr(patterns._Finder, "max_pool2d", lambda self, node: None)
    plain = by_hand.variants_of(InPlace, loss, batch)
    assert not plain.primary.lowered(plain.primary.order)
    for one in found:
        assert by_hand.differences(staged(plain, (), batch), one) == []


class Packed(nn.Module):
    """q, k and v of one product, in one of the ways in which it is parted."""

    def __init__(self, way: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.way, self.dropout, self.qkv, self.head = way, dropout, nn.Linear(6, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)  # (B, T, 24), of two heads
        if self.way == "unbind":
            q, k, v = y.unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            thirds = y.split(8, dim=-1) if self.way == "split" else y.chunk(3, dim=2)
            q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in thirds)
        if self.way == "read again":
            q = q + k
        z = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.head(z.transpose(1, 2).flatten(2)[:, -1])


@pytest.mark.parametrize("way", ["unbind", "split", "chunk", "read again", "dropped"])
@pytest.mark.slow
def test_parts_that_attention_alone_reads_have_one_gradient(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = {"x": torch.randn(2, 3, 6), "labels": torch.tensor([1, 4])}
    loss: Loss = lambda y, b: (functional.cross_entropy(y, b["labels"], reduction="sum"), 1.0)  # noqa: E731

    def made() -> Variants:
        model = lambda: Packed(way, 0.1 if way == "dropped" else 0.0)  # noqa: E731
        return by_hand.variants_of(model, loss, batch).lowered(Lowering("fast"))

    ours = made()
    assert lowered(ours)["parts++"] == (way in ("unbind", "split", "chunk"))
    found = [staged(ours, cuts, batch) for cuts in every_cut(ours, 2)]
    monkeypatch.setattr(patterns._Finder, "parts", lambda self, node: None)
    plain = staged(made(), (), batch)
    for one in found:
        assert by_hand.differences(plain, one) == []


def test_on_a_gpu_they_leave_the_embedding_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose sums of a row are in another order there."""
    monkeypatch.setattr("mpipipe.graph.anatomy.on_host", lambda: False)
    plain = tiny.captured("gpt", 2).primary
    anatomy = {bits: replace(plain, lowering=Lowering(bits)) for bits in ("torch", "fast")}
    assert not anatomy["torch"].lowered(anatomy["torch"].order)
    assert embedding in {m.op for m in anatomy["fast"].lowered(anatomy["fast"].order)}


@pytest.mark.slow
def test_the_table_chooses_and_what_it_does_not_have_is_ours() -> None:
    variants = tiny.captured("gpt, no dropout", 2)
    form = next(m.form for m in variants.primary.matches if m.form.startswith("flash_attention"))
    without = variants.lowered(Lowering("fast", {form: "torch"}))
    assert lowered(variants)["flash_attention"] == 2
    found = without.primary.lowered(without.primary.order)
    assert not [m for m in found if m.form == form]
    assert [m for m in found if m.form.startswith("layer_norm")]


@pytest.mark.slow
def test_products_are_ours_form_by_form_and_only_where_a_kernel_serves_them() -> None:
    """Of a layer, of one with its activation, and of the head."""

    def ours(lowering: Lowering, precision: str = "fp32") -> Counter[str]:
        anatomy = tiny.captured("gpt, no dropout", 2, precision).lowered(lowering).primary
        code = extract(anatomy, anatomy.order, [], anatomy.captured.outputs, [], {})
        return Counter(n.target.__name__ for n in code.forward.graph.nodes if n.kwargs.get("own"))

    found = tiny.captured("gpt, no dropout", 2).primary.matches
    faster = {m.product: "v3" for m in found if m.product}
    assert ours(Lowering("fast", faster)) == {"linear": 6, "linear_gelu": 2, "head_loss": 1}
    assert ours(Lowering("fast")) == {}, "what nobody has measured is torch's"
    wide = next(m.product for m in found if m.op is fused.linear_gelu)
    assert ours(Lowering("fast", {**faster, wide: "torch"})) == {"linear": 6, "head_loss": 1}
    assert ours(Lowering("torch", faster)) == ours(Lowering("fast", faster), "bf16") == {}


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


# -- a loss that is made in backward ---------------------------------------------------------------------


def total(logits: Tensor, batch: Batch, reduction: str = "sum") -> Tensor:
    labels = batch["labels"].flatten()
    return functional.cross_entropy(logits.flatten(0, 1), labels, reduction=reduction, label_smoothing=0.1)


def mean(logits: Tensor, batch: Batch) -> Tensor:
    return total(logits, batch, "mean")


def count(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()


def cut_off(logits: Tensor, batch: Batch) -> Tensor:
    """As of a model that computes its mean itself."""
    return mean(logits, batch).masked_fill(count(batch) == 0, 0.0).reshape(())


LATE: dict[str, Loss] = {
    "the sum": lambda y, batch: (total(y, batch), count(batch)),
    "the mean": lambda y, batch: (mean(y, batch), 1.0),
    "a mean times the count": from_mean(mean, count),
    "a mean cut off twice": from_mean(cut_off, count),
    "a mean times a number": from_mean(mean, lambda batch: batch["labels"].numel()),
    "a mean times what depends on the batch": lambda y, batch: (
        batch["tokens"].float().mean() * mean(y, batch) / 3,
        batch["tokens"].float().mean(),
    ),
    "a sum over a number": lambda y, batch: (total(y, batch) / len(y) * 2.0, 1.0),
}
EARLY: dict[str, Loss] = {  # made where it is read
    "a root": lambda y, batch: (total(y, batch).sqrt(), 1.0),
    "a square": lambda y, batch: (squared(total(y, batch)), 1.0),
    "what it is itself": lambda y, batch: (weighed(total(y, batch)), 1.0),
    "more than one number": lambda y, batch: (total(y, batch).view(1), 1.0),
    "an addition": lambda y, batch: (mean(y, batch) * 2.0 + 1.0, 1.0),
    "a number over it": lambda y, batch: (2.0 / mean(y, batch), 1.0),
    "another value than 0": lambda y, batch: (mean(y, batch).masked_fill(count(batch) == 0, 1.0), 1.0),
}
APART: dict[str, Loss] = {  # logits that are cut off where the loss is not
    "logits alone": lambda y, batch: (total(y.masked_fill(count(batch) == 0, 0.0), batch), 1.0),
    "another mask": lambda y, batch: (
        mean(y.masked_fill(count(batch) == 1, 0.0), batch).masked_fill(count(batch) == 0, 0.0),
        1.0,
    ),
}


def squared(loss: Tensor) -> Tensor:
    return loss * loss


def weighed(loss: Tensor) -> Tensor:
    return loss * loss.detach()


def of_loss(loss: Loss) -> Variants:
    factory, data = tiny.MODELS["gpt, untied, no dropout"]
    return Variants(ModelSource(factory, tiny.SEED), loss, data.specs, 2, "fp32", lowering=Lowering("fast"))


def heads(variants: Variants, mode: Mode = "train") -> list[bool]:
    """Of each head that is one with its loss, whether that is made in backward."""
    anatomy = variants.anatomy(mode, variants.first)
    found = (m.args for m in anatomy.lowered(anatomy.order) if m.op is fused.head_loss)
    return [late for *_, late, _ in found]


def holes(share: float) -> Batch:
    """A batch without this share of its labels."""
    batch, draw = gpt_batch(), torch.Generator().manual_seed(0)
    batch["labels"][torch.rand(batch["labels"].shape, generator=draw) < share] = -100
    return batch


def error(got: by_hand.Result, true: by_hand.Result) -> float:
    return sum(float((got[n].double() - t).norm() / t.norm()) for n, t in true.items())


@pytest.mark.parametrize("name", [*LATE, *EARLY, *APART])
@pytest.mark.slow
def test_a_loss_that_is_only_multiplied_is_made_in_backward(name: str) -> None:
    """With the values of the loss as it is written, in float64, and the bits of none with any cut."""
    loss = {**LATE, **EARLY, **APART}[name]
    variants, batch = of_loss(loss), holes(0.4)
    assert heads(variants) == ([] if name in APART else [name in LATE])
    assert heads(variants, "eval") == ([] if name in APART else [False])
    got = staged(variants, (), batch)
    true, torchs = (exact(variants, batch, kind) for kind in (torch.float64, torch.float32))
    assert error(got, true) <= 2.0 * error(torchs, true)
    for cuts in every_cut(variants, 2)[1:]:
        assert by_hand.differences(got, staged(variants, cuts, batch)) == [], cuts


@pytest.mark.parametrize("name", ["a mean times the count", "a mean cut off twice"])
@pytest.mark.slow
def test_a_mean_over_no_label_is_no_loss_and_no_gradient(name: str) -> None:
    got = staged(of_loss(LATE[name]), (), holes(1.1))
    assert len(got) > 10
    assert not any(t.any() for t in got.values())


@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.slow
def test_models_of_transformers_make_their_loss_in_backward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    module = importlib.import_module("mpipipe.ops.linear_cross_entropy")
    made, late = [], module.forward_and_backward
    monkeypatch.setattr(module, "forward", lambda *args, **kwargs: pytest.fail("made in forward"))
    monkeypatch.setattr(module, "forward_and_backward", lambda *args: made.append(1) or late(*args))
    case = hf_tiny.HolesCase(name, bits="fast", steps=2)
    result = tiny.train_local(case, 1)
    assert len(made) == case.steps * case.micro_batches
    assert all(math.isfinite(float.fromhex(loss)) for loss in result["losses"])


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


def exact(variants: Variants, batch: Batch, dtype: torch.dtype = torch.float64) -> by_hand.Result:
    """Forward and backward in eager torch."""
    source = variants.source
    first = source.materialise([*source.params, *source.buffers])
    model = tiny.gpt(tied=False, dropout=0.0)().to(dtype)
    model.load_state_dict({n: first[c].to(dtype) for n, c in source.alias.items()})
    loss, _ = variants.loss(model(batch["tokens"]), batch)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow
def test_the_error_is_at_most_twice_that_of_torch(precision: str) -> None:
    plain = tiny.captured("gpt, untied, no dropout", 2, precision)
    true = exact(plain, gpt_batch())
    ours, torchs = (staged(plain.lowered(Lowering(bits)), (), gpt_batch()) for bits in ("fast", "torch"))
    assert error(ours, true) <= 2.0 * error(torchs, true)


# -- small models, each with what an operator of ours must not be taken for -------------------------------

WIDTH, WORDS = 16, 32
SMALL = {
    name: torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(i))
    for i, name in enumerate(("tokens", "labels"))
}


class Small(nn.Module):
    """An embedding, `body`, and a head."""

    def __init__(self, body: Callable[..., Tensor], **parts: Callable[[], Any]) -> None:
        super().__init__()
        self.body, self.table, self.head = body, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        for name, make in parts.items():
            setattr(self, name, make())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self, self.table(tokens), tokens))


def of_small(
    body: Callable[..., Tensor],
    loss: Loss = lambda y, batch: (total(y.float(), batch), 1.0),
    dtype: torch.dtype = torch.float32,
    precision: str = "fp32",
    **parts: Callable[[], Any],
) -> Variants:
    def make() -> nn.Module:
        torch.manual_seed(1)
        torch.set_default_dtype(dtype)
        try:
            return Small(body, **parts)
        finally:
            torch.set_default_dtype(torch.float32)

    return by_hand.variants_of(make, loss, SMALL, precision)


def forms(variants: Variants) -> set[str]:
    """Kinds of operators that may become ours, but for those that every small model has."""
    kinds = {m.form.split()[0] + "+" * (len(m.results) - 1) for m in variants.primary.matches}
    return kinds - {"linear", "embedding", "linear_cross_entropy"}


def assert_the_same(variants: Variants, tolerance: float = 1e-5, batch: Batch = SMALL) -> None:
    """What our operators compute is what torch's do, in the dtypes that it has."""
    ours, torchs = (staged(variants.lowered(Lowering(bits)), (), batch) for bits in ("fast", "torch"))
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in torchs.items()}
    for name, wanted in torchs.items():
        assert (ours[name] - wanted).norm() <= tolerance * wanted.norm() + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_a_norm_without_an_eps_has_that_of_torch(dtype: torch.dtype) -> None:
    """Of values so small that it decides."""
    variants = of_small(lambda m, x, _: m.norm(1e-3 * x), dtype=dtype, norm=lambda: nn.RMSNorm(WIDTH))
    assert forms(variants) == {"rms_norm"}
    assert_the_same(variants, 1e-5 if dtype == torch.float32 else 2e-2)


def scaled_late(m: Any, x: Tensor, _: Tensor) -> Tensor:
    """Gemma's norm of a sum: its weight is made after that."""
    s = x + m.linear(x)
    return s + m.linear_2(s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + m.weight))


def scaled_early(m: Any, x: Tensor, _: Tensor) -> Tensor:
    weight = 1.0 + m.weight
    s = x + m.linear(x)
    return s + m.linear_2(s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * weight)


def adaptive(m: Any, x: Tensor, _: Tensor) -> Tensor:
    s = x + m.linear(x)
    return s + m.linear_2(functional.layer_norm(s, (WIDTH,), 1.0 + m.weight))


@pytest.mark.parametrize(
    ("body", "form"), [(scaled_late, "rms_norm"), (scaled_early, "rms_norm+"), (adaptive, "layer_norm")]
)
@pytest.mark.slow
def test_a_sum_is_added_by_its_norm_only_if_the_weight_is_there(
    body: Callable[..., Tensor], form: str
) -> None:
    linear = lambda: nn.Linear(WIDTH, WIDTH)  # noqa: E731
    variants = of_small(
        body, linear=linear, linear_2=linear, weight=lambda: nn.Parameter(torch.full((WIDTH,), 0.1))
    )
    assert forms(variants) == {form, form.rstrip("+")}
    assert_the_same(variants)


@pytest.mark.parametrize(
    ("add", "form"),
    [
        (lambda x, branch: x + branch, "layer_norm+"),
        (lambda x, branch: branch + x, "layer_norm+"),
        (lambda x, branch: x + branch.half(), "layer_norm"),
        (lambda x, branch: x + branch[:, :1], "layer_norm"),
    ],
)
@pytest.mark.slow
def test_a_branch_under_autocast_is_added_by_the_norm(add: Callable[..., Tensor], form: str) -> None:
    """Whichever of the two comes first; not one of other digits or another shape."""

    def body(m: Any, x: Tensor, _: Tensor) -> Tensor:
        s = add(x, m.linear(x))
        return s + m.norm(s)

    variants = of_small(
        body, precision="bf16", linear=lambda: nn.Linear(WIDTH, WIDTH), norm=lambda: nn.LayerNorm(WIDTH)
    )
    assert forms(variants) == {form, "layer_norm"}
    assert_the_same(variants, 2e-2)


def attend(m: Any, x: Tensor, tokens: Tensor, **options: Any) -> Tensor:
    """With one projection for all, of two heads."""
    q = m.linear(x).view(2, 6, 2, 8).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q, **options).transpose(1, 2).reshape(2, 6, WIDTH)


def of_attention(body: Callable[..., Tensor], **parts: Callable[[], Any]) -> Variants:
    return of_small(body, linear=lambda: nn.Linear(WIDTH, WIDTH), **parts)


def below(diagonal: int) -> Tensor:
    return torch.ones(6, 6, dtype=torch.bool).tril(diagonal)


def keys_of(tokens: Tensor) -> Tensor:
    return (tokens > 3)[:, None, None]


def written(mask: Tensor) -> Tensor:
    mask[..., 0] = True
    return mask


def kinds_of_attention(variants: Variants) -> list[str]:
    """Of each that may become ours, which keys are seen."""
    return [m.form.split()[2] for m in variants.primary.matches if m.op is fused.attention]


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (lambda _: (torch.arange(6) < 1)[None, None, None], None),  # the first key, not those before a query
        (lambda _: torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), "causal"),
        (lambda _: torch.ones(1, 1, 1, 6, dtype=torch.bool), "full"),
        (keys_of, "masked"),
        (lambda tokens: keys_of(tokens) & (tokens < 28)[:, None, None], "masked"),
        (lambda tokens: ((torch.arange(6) >= 0)[:, None] & keys_of(tokens)).expand(2, 2, 6, 6), "masked"),
        (lambda tokens: below(0) & keys_of(tokens), "causal-masked"),
        (lambda tokens: (keys_of(tokens) & below(0) & (tokens < 28)[:, None, None]).clone(), "causal-masked"),
        (lambda tokens: torch.logical_and(below(0), keys_of(tokens).expand(2, 2, 6, 6)), "causal-masked"),
        (lambda tokens: below(0) & (torch.arange(6) >= 0) & below(-3).logical_not() & keys_of(tokens), None),
        (lambda tokens: below(0).flip(-2) & keys_of(tokens), None),
        (lambda tokens: below(0) & (torch.arange(6) < 4) & keys_of(tokens), None),
        (lambda tokens: below(0) | keys_of(tokens), None),
        (lambda tokens: (below(0) & keys_of(tokens)).logical_not(), None),
        (lambda tokens: below(0) & keys_of(tokens).transpose(2, 3), None),  # of queries, not of keys
        (lambda tokens: below(0) & (tokens[:, None, :, None] >= tokens[:, None, None]), None),
        (lambda tokens: below(0) & (tokens > 3)[0, :2, None, None] & keys_of(tokens), None),  # of heads
        (lambda tokens: written(below(0) & keys_of(tokens)), None),
    ],
)
@pytest.mark.slow
def test_a_mask_is_taken_for_what_it_is(mask: Callable[[Tensor], Tensor], kind: str | None) -> None:
    variants = of_attention(lambda m, x, tokens: attend(m, x, tokens, attn_mask=mask(tokens)))
    assert kinds_of_attention(variants) == ([] if kind is None else [kind])
    assert_the_same(variants)


MASKED = ["causal-masked", "causal-masked"]
MISTRAL: dict[str, Any] = {"model_type": "mistral", "architectures": ("MistralForCausalLM",)}
SEPARATE: dict[str, Any] = {"tie_word_embeddings": False}


def whole_mask(node: fx.Node) -> bool:
    """Of each query and key."""
    value = node.meta.get("val")
    of_bool = isinstance(value, Tensor) and value.dtype == torch.bool
    return of_bool and value.shape[-2:] == (hf_tiny.CONTEXT, hf_tiny.CONTEXT)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("name", "changes", "kinds"),
    [
        ("llama", {}, MASKED),
        ("gpt2", {"attn_pdrop": 0.0}, MASKED),
        ("bert", {"attention_probs_dropout_prob": 0.0}, ["masked", "masked"]),
        ("llama", {**MISTRAL, "sliding_window": hf_tiny.CONTEXT}, MASKED),
        ("llama", {**MISTRAL, "sliding_window": hf_tiny.CONTEXT - 1}, []),
    ],
    ids=["llama", "gpt2", "bert", "window of all", "window"],
)
@pytest.mark.slow
def test_attention_of_padded_samples(name: str, changes: dict[str, Any], kinds: list[str], side: str) -> None:
    """The library makes one mask of the batch's and of indices; padding on the left leaves queries that see
    nothing."""
    pytest.importorskip("transformers")
    variants, batch = hf_tiny.padded(hf_tiny.built(name, **SEPARATE, **changes), side)
    assert kinds_of_attention(variants) == kinds
    assert_the_same(variants, batch=batch)
    fast = variants.lowered(Lowering("fast"))
    code = fast.code("train", by_hand.specs_of(batch), (), 0)
    squares = [n for n in code.forward.graph.nodes if whole_mask(n)]
    assert (squares == []) == (kinds != []), "what nobody reads is not made"
    for cuts in every_cut(variants, 2)[1:]:
        assert by_hand.differences(staged(fast, (), batch), staged(fast, cuts, batch)) == [], cuts


def heads_of(m: Any, x: Tensor, heads: int) -> Tensor:
    return m.linear(x).view(2, 6, heads, WIDTH // heads).transpose(1, 2)


def of_heads(q: Tensor, k: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(2, 6, -1)


def drawn(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (lambda m, x, _: of_heads(m.q, heads_of(m, x, 2)), {"q": drawn(1, 2, 6, 8)}),
        (lambda m, x, _: of_heads(heads_of(m, x, 4)[:, :1], heads_of(m, x, 4)), {}),
        (lambda m, x, t: attend(m, x, t, attn_mask=(t >= 0).any(1)[:, None, None, None]), {}),
        (lambda m, x, _: x * functional.linear(x, m.w)[..., None], {"w": drawn(WIDTH)}),
        (lambda m, x, _: m.linear(functional.gelu(functional.linear(x, m.w, m.b))),
         {"w": drawn(WIDTH, WIDTH), "b": drawn(1)}),
        (lambda m, x, _: functional.gelu(torch.addmm(m.b, x.view(-1, WIDTH), m.w)).view(2, 6, WIDTH),
         {"w": drawn(WIDTH, WIDTH), "b": drawn(1)}),
    ],
    ids=["batch of q", "head of q", "mask of one key", "vector for a weight", "number for a bias", "addmm"],
)  # fmt: skip
@pytest.mark.slow
def test_what_torch_broadcasts_is_left_to_it(
    body: Callable[..., Tensor], parts: dict[str, Callable[[], Any]]
) -> None:
    variants = of_attention(body, **parts)
    assert forms(variants) == set()
    assert_the_same(variants)


class Classes(nn.Module):
    def __init__(self, biases: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.zeros(biases))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("biases", [4, 1])
def test_a_head_with_one_number_for_a_bias_is_torchs(biases: int) -> None:
    batch = {"x": torch.randn(6, 8), "labels": torch.randint(4, (6,))}
    loss: Loss = lambda y, b: (functional.cross_entropy(y, b["labels"], reduction="sum"), 1.0)  # noqa: E731
    variants = by_hand.variants_of(lambda: Classes(biases), loss, batch)
    found = [m for m in variants.primary.matches if m.op is fused.head_loss]
    assert len(found) == (biases == 4)
    ours, torchs = (staged(variants.lowered(Lowering(bits)), (), batch) for bits in ("fast", "torch"))
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize(
    ("dtype", "cast", "late"),
    [
        (torch.float32, lambda y: y, [True]),
        (torch.bfloat16, lambda y: y.float(), [True]),
        (
            torch.bfloat16,
            lambda y: y,
            [False],
        ),  # of a loss that is rounded there is no value to fill in later
        (torch.float32, lambda y: y.double(), []),
        (torch.float32, lambda y: y.bfloat16(), []),
        (torch.float32, lambda y: y.bfloat16().float(), []),
    ],
)
@pytest.mark.slow
def test_a_loss_is_computed_in_the_dtype_that_it_has(
    dtype: torch.dtype, cast: Callable[[Tensor], Tensor], late: list[bool]
) -> None:
    variants = of_small(lambda m, x, _: x, lambda y, batch: (total(cast(y), batch), 1.0), dtype)
    assert heads(variants.lowered(Lowering("fast"))) == late
    assert_the_same(variants, 1e-5 if dtype == torch.float32 else 1e-2)
