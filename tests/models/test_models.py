"""The built-in models: what they compute, that they export, and the form of their loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import full_but
from torch import nn

from mpipipe.config import parse
from mpipipe.data import open_dataset
from mpipipe.errors import ConfigError
from mpipipe.models import GPT, MLP, build, cross_entropy

TINY = {"vocab": 50, "layers": 2, "d_model": 16, "heads": 2, "context": 8}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gpt(tied: bool = True, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(**TINY, tied=tied, dropout=dropout)


def tokens(rows: int, length: int = 8) -> torch.Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(rows))


def exported(model: nn.Module, *args: torch.Tensor) -> nn.Module:
    return torch.export.export(model, args, strict=False).module()


@pytest.mark.parametrize(
    ("tied", "mode", "rows"),
    full_but(
        [(True, "train", 5), (False, "eval", 1)], itertools.product([True, False], ["train", "eval"], [1, 5])
    ),
)
@pytest.mark.slow
def test_gpt_exports_to_the_same_bits(rows: int, mode: str, tied: bool) -> None:
    model = gpt(tied).train(mode == "train")
    x = tokens(rows)
    assert torch.equal(exported(model, x)(x), model(x))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_mlp_exports_to_the_same_bits(rows: int, mode: str) -> None:
    model = MLP(6, [8, 7], 3, 0.0).train(mode == "train")
    x = torch.randn(rows, 6)
    assert torch.equal(exported(model, x)(x), model(x))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.slow
def test_dropout_is_in_the_exported_graph_in_train_mode_only(rows: int) -> None:
    for model, x in ((gpt(dropout=0.3), tokens(rows)), (MLP(6, [8], 3, 0.3), torch.randn(rows, 6))):
        for train in (True, False):
            model.train(train)
            torch.manual_seed(1)
            want = model(x)
            torch.manual_seed(1)
            assert torch.equal(exported(model, x)(x), want)
            torch.manual_seed(2)
            assert torch.equal(model(x), want) == (not train)


def test_gpt_is_causal() -> None:
    model, x = gpt().eval(), tokens(2)
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 50
    a, b = model(x), model(changed)
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.equal(a[:, 5:], b[:, 5:])


def test_gpt_takes_shorter_texts_and_gives_the_same_there() -> None:
    model, x = gpt().eval(), tokens(2)
    torch.testing.assert_close(model(x[:, :3]), model(x)[:, :3])


def test_gpt_names_and_counts_its_parameters() -> None:
    tied, untied = dict(gpt().named_parameters()), dict(gpt(tied=False).named_parameters())
    assert set(untied) - set(tied) == {"head.weight"}
    assert {"wte.weight", "wpe.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.proj.bias"} <= set(tied)
    d, layers = 16, 2
    block = 12 * d * d + 13 * d
    assert sum(p.numel() for p in tied.values()) == 50 * d + 8 * d + layers * block + 2 * d


def test_gpt_starts_near_the_uniform_loss_and_with_scaled_residual_weights() -> None:
    torch.manual_seed(0)
    model = GPT(vocab=256, layers=8, d_model=64, heads=4, context=16, tied=True, dropout=0.0)
    x = torch.randint(256, (4, 16))
    total, weight = cross_entropy(model(x), {"labels": x.roll(-1, 1)})
    assert abs(total.item() / weight.item() - torch.log(torch.tensor(256.0)).item()) < 0.1
    assert model.blocks[0].mlp.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].mlp.proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_attention_agrees_with_its_definition() -> None:
    attn = gpt().blocks[0].attn
    x = torch.randn(3, 8, 16)
    q, k, v = (part.view(3, 8, 2, 8).transpose(1, 2) for part in attn.qkv(x).split(16, dim=2))
    scores = (q @ k.transpose(2, 3)) / 8**0.5
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    want = attn.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(3, 8, 16))
    torch.testing.assert_close(attn(x), want)


def test_loss_sums_what_counts_and_its_weight_is_the_batch_alone() -> None:
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[1, -100, 2], [4, 0, -100]])
    total, weight = cross_entropy(logits, {"labels": labels})
    picked = [(0, 0, 1), (0, 2, 2), (1, 0, 4), (1, 1, 0)]
    want = -sum(logits.log_softmax(-1)[p] for p in picked)
    torch.testing.assert_close(total, want)
    assert weight == 4.0
    assert not weight.requires_grad
    assert total.dtype == weight.dtype == cross_entropy(logits.bfloat16(), {"labels": labels})[0].dtype
    nothing, zero = cross_entropy(logits, {"labels": torch.full((2, 3), -100)})
    assert (nothing.item(), zero.item()) == (0.0, 0.0)


def test_losses_of_the_parts_add_up_to_the_whole() -> None:
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, -100, 3, 4, -100])
    whole = cross_entropy(logits, {"y": labels})
    parts = [cross_entropy(logits[i : i + 2], {"y": labels[i : i + 2]}) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.stack([p[0] for p in parts]).sum(), whole[0])
    assert sum(p[1].item() for p in parts) == whole[1].item()


@pytest.mark.parametrize(
    "overrides",
    [["model.name=mlp"], ["model.layers=1", "model.d_model=32", "model.vocab=40", "model.context=8"]],
)
@pytest.mark.slow
def test_build_gives_a_model_that_reads_the_data_and_learns(overrides: list[str]) -> None:
    config = parse("data: {name: synthetic}", overrides=overrides)
    data = open_dataset(config, ".")
    built = build(config, data)
    torch.manual_seed(0)
    model = built.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(40):
        batch = data.batch("train", step, 0, 16, frozenset(data.specs(1)))
        total, weight = built.loss(model(batch.get("tokens", batch.get("x"))), batch)
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / weight).item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_a_vocabulary_too_small_for_the_data_is_refused() -> None:
    class Words:
        vocab = 256

    with pytest.raises(ConfigError, match=r"model.vocab = 100.*256 token ids"):
        build(parse("model: {vocab: 100}"), Words())
    assert build(parse("model: {vocab: 300}"), Words()).model().head.out_features == 300
    assert build(parse(""), Words()).model().head.out_features == 256


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("name: 'my_net:make', args: {typo: 1}", r"model\.args does not fit my_net:make\(width=3\): "),
        ("name: 'my_net:WIDTH'", r"model\.name = my_net:WIDTH: is of type int, which cannot be called;"),
        (
            "name: 'my_net:make', loss: 'my_net:WIDTH'",
            r"model\.loss = my_net:WIDTH: is of type int, which cannot be called; name a function or class",
        ),
        ("name: 'my_net:make', metrics: {m: 'my_net:WIDTH'}", r"model\.metrics\.m = my_net:WIDTH: is of"),
    ],
)
def test_code_of_ones_own_that_cannot_be_called_so_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, message: str
) -> None:
    (tmp_path / "my_net.py").write_text("WIDTH = 3\ndef make(width=WIDTH):\n    return [width]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build(parse(f"model: {{{section}}}"), [])


def test_the_factory_gives_the_same_weights_for_the_same_seed() -> None:
    config = parse("model: {layers: 1, d_model: 16, heads: 2}\ndata: {name: synthetic}")
    factory = build(config, open_dataset(config, ".")).model
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(factory())
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
