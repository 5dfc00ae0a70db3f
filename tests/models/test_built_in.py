"""The built-in models against independent references; that each is captured, cut and trained to the
same bits; losses and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import tiny
import torch
from built_in_tiny import TINY, BuiltInCase, made
from torch import Tensor, nn
from torch.nn import functional

from mpipipe.errors import ConfigError
from mpipipe.graph.source import ModelSource
from mpipipe.graph.variants import Variants
from mpipipe.models import DLRM, LSTM, VGG, EncoderDecoder, Llama, ResNet, UNet
from mpipipe.models.losses import binary_cross_entropy, cross_entropy, from_mean, pixel_cross_entropy
from mpipipe.models.metrics import accuracy, binary_accuracy


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> Iterator[None]:
    """Models this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def ids(top: int, *shape: int) -> Tensor:
    return torch.randint(top, shape)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def shuffled(model: nn.Module) -> Any:
    """With norms and running statistics that are neither 0 nor 1, as after some training."""
    for t in [*model.parameters(), *model.buffers()]:
        if t.dim() == 1:
            nn.init.uniform_(t, 0.5, 1.5)
    return model.eval()


# -- published sizes ------------------------------------------------------------------------------------

WIDTHS, IMAGENET = (64, 128, 256, 512), {"channels": 3, "classes": 1000}
PUBLISHED = {  # those of torchvision, BatchNorm included; Llama as Meta has published it
    "resnet-18": (
        lambda: ResNet(**IMAGENET, blocks=(2, 2, 2, 2), widths=WIDTHS, stem="imagenet"),
        11_689_512,
    ),
    "resnet-50": (
        lambda: ResNet(**IMAGENET, blocks=(3, 4, 6, 3), widths=WIDTHS, bottleneck=True, stem="imagenet"),
        25_557_032,
    ),
    "vgg-11": (lambda: VGG(**IMAGENET, size=224, blocks=(1, 1, 2, 2, 2), widths=(*WIDTHS, 512)), 132_868_840),
    "vgg-16": (lambda: VGG(**IMAGENET, size=224, blocks=(2, 2, 3, 3, 3), widths=(*WIDTHS, 512)), 138_365_992),
    "llama-3.2-1b": (lambda: Llama(128256, 16, 2048, 32, 8, 8192, 131072, tied=True), 1_235_814_400),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    factory, want = PUBLISHED[name]
    with torch.device("meta"):
        assert count(factory()) == want


# -- what they compute ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_llama_is_the_one_of_transformers(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=16, rope_theta=500.0, rms_norm_eps=1e-3,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = shuffled(Llama(40, 2, 32, 4, 2, 48, 16, rope_base=500.0, tied=tied, norm_eps=1e-3))
    theirs = transformers.LlamaForCausalLM(config).eval()
    own = {
        name if name.startswith("lm_head") else f"model.{name}": t for name, t in model.state_dict().items()
    }
    theirs.load_state_dict(own, strict=True)
    tokens = ids(40, 3, 12)
    a, b = model(tokens), theirs(tokens).logits
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    a.square().sum().backward()
    b.square().sum().backward()
    torch.testing.assert_close(
        model.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("bottleneck", [True, False])
def test_resnet_is_the_one_of_transformers(bottleneck: bool) -> None:
    transformers = pytest.importorskip("transformers")
    widths = (8, 12)
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[w * 4 if bottleneck else w for w in widths],
        depths=[1, 2], layer_type="bottleneck" if bottleneck else "basic", num_labels=5,
    )  # fmt: skip
    model = shuffled(ResNet(3, 5, (1, 2), widths, bottleneck, "imagenet"))
    theirs = transformers.ResNetForImageClassification(config).eval()
    blocks = [layer for stage in theirs.resnet.encoder.stages for layer in stage.layers]
    pairs = [(model.stem, theirs.resnet.embedder), (model.head, theirs.classifier)]
    for mine, block in zip(model.blocks, blocks, strict=True):
        pairs += [(mine.convs, block.layer), (mine.shortcut, block.shortcut)]
    for mine, other in pairs:
        for a, b in zip(mine.state_dict().values(), other.state_dict().values(), strict=True):
            b.copy_(a)
    x = torch.randn(2, 3, 40, 40)
    torch.testing.assert_close(model(x), theirs(x).logits, rtol=1e-5, atol=1e-5)


def test_resnet_of_small_images_keeps_their_size_in_the_first_level() -> None:
    model = ResNet(1, 10, (1, 1, 1), (4, 8, 16))
    x = model.stem(torch.randn(2, 1, 8, 8))
    sides = [x.shape[-1], *((x := block(x)).shape[-1] for block in model.blocks)]
    assert sides == [8, 8, 4, 2]
    with pytest.raises(ConfigError, match=r"blocks = \(1, 1\), widths = \(4,\)"):
        ResNet(1, 10, (1, 1), (4,))


@pytest.mark.parametrize("size", [8, 28, 33])
def test_vgg_takes_images_of_the_size_it_is_made_for(size: int) -> None:
    model = VGG(3, size, 5, blocks=(1, 2, 1), widths=(4, 6, 8), hidden=16)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 5)
    assert [m.out_channels for m in model.features if isinstance(m, nn.Conv2d)] == [4, 6, 6, 8]
    with pytest.raises(ConfigError, match=rf"images of \(3, 9, 9\).*made for \(3, {size}, {size}\)"):
        model(torch.randn(2, 3, 9, 9))
    with pytest.raises(ConfigError, match="allow at most 3 blocks"):
        VGG(3, 8, 5, blocks=(1, 1, 1, 1), widths=(4, 4, 4, 4))


def test_unet_is_what_the_paper_draws() -> None:
    model, x = shuffled(UNet(3, 4, 8, 2)), torch.randn(2, 3, 8, 12)

    def level(x: Tensor, depth: int) -> Tensor:
        """A U is a smaller U between two rows of convolutions, with a bridge over it."""
        if depth == 2:
            return model.bottom(x)
        left = model.down[depth](x)
        right = model.up[1 - depth](level(functional.max_pool2d(left, 2), depth + 1))
        return model.join[1 - depth](torch.cat([left, right], 1))

    assert model(x).shape == (2, 4, 8, 12)
    assert torch.equal(model(x), model.head(level(x, 0)))
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)][:-1] == [
        *(8, 8, 16, 16), *(32, 32), *(16, 16, 8, 8)
    ]  # fmt: skip


@pytest.mark.parametrize(("height", "width"), [(10, 8), (8, 9)])
def test_unet_refuses_sides_that_do_not_halve(height: int, width: int) -> None:
    with pytest.raises(ConfigError, match=rf"images of {height}x{width} pixels.*depth = 2.*multiples of 4"):
        UNet(1, 2, 4, 2)(torch.randn(1, 1, height, width))


@pytest.mark.parametrize("bag", [1, 3])
def test_dlrm_is_a_loop_over_pairs(bag: int) -> None:
    model = DLRM(4, (7, 5, 6), 8, (6,), (10,))
    dense, categories = torch.randn(5, 4), torch.stack([ids(n, 5, bag) for n in (7, 5, 6)], 1)
    for b in range(5):
        first = model.bottom(dense[b])
        vectors = [first, *(t.weight[categories[b, i]].sum(0) for i, t in enumerate(model.tables))]
        products = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        assert len(products) == len(list(combinations(vectors, 2)))
        want = model.head(model.top(torch.cat([first, torch.stack(products)])))
        torch.testing.assert_close(model(dense, categories)[b], want[0])
    assert all(t.weight.abs().max() <= t.num_embeddings**-0.5 for t in model.tables)


def test_lstm_is_torch_s_own_stack() -> None:
    model, stack = LSTM(30, 3, 8, 12, False, 0.0), nn.LSTM(8, 12, num_layers=3, batch_first=True)
    own = [p for layer in model.layers for p in layer.parameters()]
    stack.load_state_dict(dict(zip(stack.state_dict(), own, strict=True)))
    tokens = ids(30, 2, 7)
    want = model.head(stack(functional.embedding(tokens, model.embed.weight))[0])
    torch.testing.assert_close(model(tokens), want)
    tied = LSTM(30, 1, 8, 8, True, 0.0)
    assert tied.head.weight is tied.embed.weight
    with pytest.raises(ConfigError, match="width = 8 and hidden = 12"):
        LSTM(30, 1, 8, 12, True, 0.0)


def encoder_decoder(tied: bool = True) -> Any:
    return shuffled(EncoderDecoder(30, 2, 16, 2, 8, tied, 0.1))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_encoder_decoder_is_torch_s_transformer() -> None:
    model = encoder_decoder()
    theirs = nn.Transformer(
        16, 2, 2, 2, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
    ).eval()

    def load(mine: Any, other: nn.MultiheadAttention) -> None:
        other.in_proj_weight.data = torch.cat([mine.q.weight, mine.kv.weight])
        other.in_proj_bias.data = torch.cat([mine.q.bias, mine.kv.bias])
        other.out_proj.load_state_dict(mine.proj.state_dict())

    layers = [*zip(model.encoder, theirs.encoder.layers, strict=True)]
    for mine, other in [*layers, *zip(model.decoder, theirs.decoder.layers, strict=True)]:
        load(mine.attn, other.self_attn)
        pairs = [(mine.ln_1, other.norm1), (mine.ln_2, other.norm2)]
        pairs += [(mine.mlp.fc, other.linear1), (mine.mlp.proj, other.linear2)]
        if hasattr(mine, "cross"):
            load(mine.cross, other.multihead_attn)
            pairs.append((mine.ln_3, other.norm3))
        for a, b in pairs:
            b.load_state_dict(a.state_dict())
    theirs.encoder.norm.load_state_dict(model.ln_encoder.state_dict())
    theirs.decoder.norm.load_state_dict(model.ln_decoder.state_dict())
    source, target = ids(29, 3, 8) + 1, ids(30, 3, 6)
    source[0, 5:] = source[1, 2:] = 0
    padded = source == 0
    x = model.embed(source) + model.positions.weight
    y = model.embed(target) + model.positions_target.weight[:6]
    out = theirs(
        x, y, tgt_mask=torch.ones(6, 6).triu(1).bool(), tgt_is_causal=True,
        src_key_padding_mask=padded, memory_key_padding_mask=padded,
    )  # fmt: skip
    torch.testing.assert_close(model(source, target), model.head(out), rtol=1e-5, atol=1e-5)


def test_padding_and_what_comes_later_change_nothing() -> None:
    model, source, target = encoder_decoder(), ids(29, 2, 6) + 1, ids(30, 2, 8)
    longer = torch.cat([source, torch.zeros(2, 2, dtype=torch.int64)], 1)
    a = model(source, target)
    torch.testing.assert_close(model(longer, target), a)
    changed = target.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 30
    b = model(source, changed)
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.equal(a[:, 5:], b[:, 5:])
    assert not torch.equal(model(source.flip(1), target), a)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_means_one_embedding_for_source_target_and_head(tied: bool) -> None:
    model = encoder_decoder(tied)
    weights = {id(w) for w in (model.embed.weight, model.embed_target.weight, model.head.weight)}
    assert len(weights) == (1 if tied else 3)
    assert count(encoder_decoder(False)) - count(encoder_decoder(True)) == 2 * 30 * 16


@pytest.mark.parametrize("model", [Llama(20, 1, 8, 2, 1, 8, 4), EncoderDecoder(20, 1, 8, 2, 4, True, 0.0)])
def test_a_text_longer_than_the_context_is_refused(model: nn.Module) -> None:
    texts = [ids(20, 1, 5)] * (2 if isinstance(model, EncoderDecoder) else 1)
    with pytest.raises(ConfigError, match="a text of 5 tokens, but context = 4"):
        model(*texts)


def test_llama_refuses_heads_that_do_not_divide() -> None:
    for d_model, heads, kv_heads in ((20, 3, 3), (12, 4, 2), (16, 4, 3)):
        with pytest.raises(ConfigError, match=f"d_model = {d_model}, heads = {heads}, kv_heads = {kv_heads}"):
            Llama(20, 1, d_model, heads, kv_heads, 8, 4)


# -- losses and metrics ---------------------------------------------------------------------------------


def test_pixel_cross_entropy_is_torch_s_and_adds_up() -> None:
    logits, labels = torch.randn(4, 3, 5, 6), ids(3, 4, 5, 6)
    labels[ids(2, 4, 5, 6) == 0] = -100
    total, weight = pixel_cross_entropy(logits, {"labels": labels})
    kept = labels != -100
    assert weight == kept.sum()
    want = functional.cross_entropy(logits.double().movedim(1, -1)[kept], labels[kept], reduction="sum")
    torch.testing.assert_close(total.double(), want, rtol=1e-6, atol=0.0)
    parts = [pixel_cross_entropy(logits[i : i + 2], {"labels": labels[i : i + 2]}) for i in (0, 2)]
    torch.testing.assert_close(parts[0][0] + parts[1][0], total)
    assert parts[0][1] + parts[1][1] == weight


def test_binary_cross_entropy_is_torch_s() -> None:
    logit, labels = 50 * torch.randn(9), torch.rand(9).round()  # far out, where a logarithm would overflow
    total, weight = binary_cross_entropy(logit, {"y": labels})
    p = torch.sigmoid(logit.double()).clamp(1e-300, 1 - 1e-16)
    want = -(labels * p.log() + (1 - labels) * torch.sigmoid(-logit.double()).log()).sum()
    torch.testing.assert_close(total.double(), want, rtol=1e-6, atol=0.0)
    assert weight == 9.0
    assert {total.dtype, weight.dtype} == {torch.float32}
    assert binary_cross_entropy(logit.bfloat16(), {"y": labels.long()})[0].dtype == torch.float32


def test_a_mean_becomes_a_sum_and_an_empty_micro_batch_counts_for_nothing() -> None:
    def mean(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs, batch["y"])

    wrapped = from_mean(mean, lambda batch: (batch["y"] != -100).sum())
    logits = torch.randn(6, 5, requires_grad=True)
    batch = {"y": torch.tensor([0, 1, -100, 3, 4, -100])}
    (total, weight), (want, same) = wrapped(logits, batch), cross_entropy(logits, batch)
    torch.testing.assert_close(total, want)
    assert weight == same
    assert from_mean(mean, len)(logits, batch)[1] == 1, "weight_of sees the batch, a plain number is fine"
    total, weight = wrapped(logits, {"y": torch.full((6,), -100)})
    assert (total.item(), weight.item()) == (0.0, 0.0)
    total.backward()
    assert torch.equal(logits.grad, torch.zeros(6, 5))  # type: ignore[arg-type]


def test_a_mean_over_nothing_has_no_gradient_however_it_is_computed() -> None:
    def mean(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return (outputs["scores"] * batch["mask"]).sum() / batch["mask"].sum()

    wrapped = from_mean(mean, lambda batch: batch["mask"].sum())
    for mask, want in ((torch.tensor([1.0, 0.0, 1.0]), [1.0, 0.0, 1.0]), (torch.zeros(3), [0.0] * 3)):
        scores = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        total, weight = wrapped({"scores": scores, "places": torch.arange(3)}, {"mask": mask})
        total.backward()
        assert scores.grad.tolist() == want
        assert (total.item(), weight.item()) == (4.0 * (mask.sum() > 0), mask.sum())


def test_metrics_count_what_is_right() -> None:
    logits, labels = torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 2, 2, -100])
    assert [t.item() for t in accuracy(logits, {"y": labels})] == [2.0, 3.0]
    assert [t.item() for t in accuracy(logits[None], {"labels": labels[None]})] == [2.0, 3.0]
    image = logits.T.reshape(1, 3, 2, 2)
    assert [t.item() for t in accuracy(image, {"labels": labels.view(1, 2, 2)})] == [2.0, 3.0]
    logit, clicks = torch.tensor([2.0, -1.0, 0.5, -3.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert [t.item() for t in binary_accuracy(logit, {"labels": clicks})] == [2.0, 4.0]


@pytest.mark.parametrize("measure", [cross_entropy, pixel_cross_entropy, binary_cross_entropy, accuracy])
def test_a_batch_without_labels_is_refused_with_its_keys(measure: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"needs the key 'labels' \(or 'y'\); the batch has \['label', 'x'\]"
    ):
        measure(torch.randn(2, 3), {"x": torch.ones(2), "label": torch.ones(2)})


# -- captured, cut and trained --------------------------------------------------------------------------


def assert_same_bits(case: tiny.Case, numbers_of_stages: tuple[int, ...]) -> None:
    whole = tiny.train_local(case, 1)
    for n_stages in numbers_of_stages:
        assert tiny.differences(whole, tiny.train_local(case, n_stages)) == [], n_stages


@pytest.mark.parametrize("name", tiny.full_but(["llama", "lstm", "unet"], TINY))
@pytest.mark.slow
def test_bits_do_not_depend_on_the_cut(name: str) -> None:
    assert_same_bits(BuiltInCase(name, steps=2), (3,))


@pytest.mark.full
@pytest.mark.parametrize("how", [{"batch": 7, "evaluate": True}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_nor_do_those_of_ragged_batches_and_bf16(name: str, how: dict[str, Any]) -> None:
    assert_same_bits(BuiltInCase(name, **how), (2, 3, 4))


@pytest.mark.full
@pytest.mark.parametrize("name", TINY)
def test_models_learn_from_the_data_made_up_for_them(name: str) -> None:
    built, data = made(name, TINY[name])
    model: Any = built.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = [key for key in data.specs(1) if key not in ("labels", "y")]
    losses = []
    for step in range(300):
        batch = data.batch("train", step, 0, 8, frozenset(data.specs(1)))
        total, weight = built.loss(model(**{key: batch[key] for key in inputs}), batch)
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / weight).item())
    assert sum(losses[-30:]) < 0.9 * sum(losses[:30])


LARGE = {
    "llama": "vocab: 128256, layers: 16, d_model: 2048, heads: 32, kv_heads: 8, d_ff: 8192, context: 4096",
    "lstm": "vocab: 33278, layers: 3, width: 1500, hidden: 1500, context: 35, tied: true, dropout: 0.5",
    "encoder_decoder": "vocab: 37000, layers: 6, d_model: 1024, heads: 16, context: 256, dropout: 0.1",
    "vgg": "channels: 3, size: 224, blocks: [2, 2, 3, 3, 3],"
    "widths: [64, 128, 256, 512, 512], hidden: 4096, dropout: 0.5",
    "resnet": "channels: 3, size: 224, blocks: [3, 4, 6, 3], widths: [64, 128, 256, 512],"
    "bottleneck: true, stem: imagenet",
    "unet": "channels: 3, size: 512, width: 64, depth: 4",
    "dlrm": "tables: [10000000, 4000000, 40000, 17000, 7000, 1000, 100, 10], width: 128,"
    "bottom: [512, 256], top: [1024, 1024, 512, 256]",
}


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_models_of_full_size_are_captured_and_cut_in_ten_seconds(name: str) -> None:
    built, data = made(name, LARGE[name])
    start = time.process_time()  # the machine may be shared
    variants = Variants(ModelSource(built.model, 0), built.loss, data.specs, 2, "fp32", built.metrics)
    cuts = tiny.even_cuts(variants.graph.groups, 4)
    for stage in range(4):
        assert variants.code("train", variants.first, cuts, stage).leaves
    assert time.process_time() - start < 10.0
