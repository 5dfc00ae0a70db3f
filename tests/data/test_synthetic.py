"""Made-up data of each kind: its form, that any slice is the same slice, and that it can be learnt."""

from __future__ import annotations

import pytest
import torch

from mpipipe.config import parse
from mpipipe.data import Dataset, open_dataset, synthetic_images
from mpipipe.data.pairs import Pairs
from mpipipe.data.synthetic import Clicks
from mpipipe.data.synthetic_images import Shapes, SyntheticImages
from mpipipe.errors import DataError

MADE: dict[str, Dataset] = {
    "images": SyntheticImages(3, 6, 4, 64, 8, 8, seed=0),
    "shapes": Shapes(2, 24, 5, 64, 8, 8, seed=0),
    "pairs": Pairs(20, 12, 64, 8, 8, seed=0),
    "clicks": Clicks(4, (10, 1000, 3), 2, 64, 8, 8, seed=0),
}


def everything(data: Dataset, split: str = "train", step: int = 0, n: int = 64) -> dict[str, torch.Tensor]:
    return data.batch(split, step, 0, n, frozenset(data.specs(1)))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MADE)
def test_form_slices_and_epochs(kind: str) -> None:
    data = MADE[kind]
    whole = everything(data)
    assert {k: (tuple(t.shape), str(t.dtype)) for k, t in whole.items()} == {
        k: (s.shape, f"torch.{s.dtype}") for k, s in data.specs(64).items()
    }
    for key, tensor in whole.items():
        parts = [data.batch("train", 0, a, b, frozenset([key])) for a, b in ((0, 1), (1, 7), (7, 64))]
        assert [set(p) for p in parts] == [{key}] * 3
        assert torch.equal(torch.cat([p[key] for p in parts]), tensor)
    again = torch.cat([everything(data, step=step, n=8)["labels"] for step in range(8, 16)])
    key = next(iter(whole))
    assert sorted(map(str, whole["labels"].tolist())) == sorted(map(str, again.tolist())), "one set of 64"
    assert (data.train_samples, data.val_samples) == (64, 8)
    assert not torch.equal(everything(data, "val", n=8)[key], whole[key][:8])


@pytest.mark.parametrize(
    "model", ["gpt", "llama", "lstm", "mlp", "vgg", "resnet", "unet", "encoder_decoder", "dlrm"]
)
def test_synthetic_follows_the_model(model: str) -> None:
    data = open_dataset(parse(f"model: {model}\ndata: synthetic"), ".")
    keys = {
        "mlp": {"x", "y"},
        "encoder_decoder": {"source", "target", "labels"},
        "dlrm": {"dense", "categories", "labels"},
        "vgg": {"x", "labels"},
        "resnet": {"x", "labels"},
        "unet": {"x", "labels"},
    }.get(model, {"tokens", "labels"})
    assert everything(data, n=2).keys() == data.specs(2).keys() == keys


def test_the_patterns_of_images_tell_their_classes() -> None:
    whole = everything(MADE["images"])
    assert set(whole["labels"].tolist()) == {0, 1, 2, 3}
    means = torch.stack([whole["x"][whole["labels"] == k].mean(0).flatten() for k in range(4)])
    held_out = everything(MADE["images"], "val", n=8)
    nearest = torch.cdist(held_out["x"].flatten(1), means).argmin(1)
    assert torch.equal(nearest, held_out["labels"])


def test_shapes_are_brighter_than_the_ground_and_two_of_a_kind_share_a_brightness() -> None:
    whole = everything(MADE["shapes"])
    mean = [whole["x"].mean(1)[whole["labels"] == k].mean().item() for k in range(5)]
    assert mean == pytest.approx([0.0, 0.75, 0.75, 1.0, 1.0], abs=0.01)


def test_shapes_are_rectangles_and_discs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fills so much of the box around it, where the border does not cut it."""
    monkeypatch.setattr(synthetic_images, "_SHAPES", 1)
    labels = everything(Shapes(1, 64, 3, 64, 8, 8, seed=3))["labels"]
    for label, filled in ((1, 1.0), (2, torch.pi / 4)):
        masks = [p == label for p in labels if label in p and not _border(p).any()]
        assert len(masks) > 5
        for mask in masks:
            assert (mask.sum() / (mask.any(1).sum() * mask.any(0).sum())).item() == pytest.approx(
                filled, abs=0.05
            )


def _border(labels: torch.Tensor) -> torch.Tensor:
    return torch.cat([labels[0], labels[-1], labels[:, 0], labels[:, -1]])


def test_pairs_are_reversed_shifted_and_padded() -> None:
    whole = everything(MADE["pairs"])
    lengths = set()
    for source, target, labels in zip(
        *(whole[k].tolist() for k in ("source", "target", "labels")), strict=True
    ):
        words = [w for w in source if w != 0]
        n = len(words)
        lengths.add(n)
        assert all(2 <= w < 20 for w in words)
        assert source == words + [0] * (12 - n)
        assert labels == words[::-1] + [-100] * (12 - n)
        assert target == [1, *words[::-1]][:n] + [0] * (12 - n)
    assert len(lengths) > 9


def test_pairs_of_varying_length_are_cut_to_the_longest_of_a_micro_batch() -> None:
    fixed, data = (Pairs(20, 12, 64, 8, 8, seed=0, varying=v, bucket=4) for v in (False, True))
    assert (fixed.varying, data.varying) == (False, True)
    widths = set()
    for step in range(8):
        whole, cut = everything(fixed, step=step, n=2), everything(data, step=step, n=2)
        width = cut["source"].shape[1]
        longest = int((whole["source"] != 0).sum(1).max())
        assert width % 4 == 0
        assert longest <= width < longest + 4
        assert all(torch.equal(whole[k][:, :width], cut[k]) for k in whole)
        widths.add(width)
    assert len(widths) > 1
    config = parse("model: encoder_decoder\ndata: {name: synthetic, varying: true}")
    assert open_dataset(config, ".").varying


def test_clicks_are_balanced_and_follow_from_the_features() -> None:
    data = Clicks(4, (10, 1000, 3), 2, 4000, 8, 8, seed=0)
    whole = everything(data, n=2000)
    assert (whole["categories"].amax((0, 2)) < torch.tensor([10, 1000, 3])).all()
    assert whole["categories"].min() == 0
    assert whole["dense"].std().item() == pytest.approx(1.0, abs=0.05)
    assert 0.3 < whole["labels"].mean().item() < 0.7
    # A linear model of the numbers and of the ten categories of the first table, fitted on one half:
    table = torch.nn.functional.one_hot(whole["categories"][:, 0], 10).sum(1).float()
    features = torch.cat([whole["dense"], table], 1)
    fit = torch.linalg.lstsq(features[:1000], whole["labels"][:1000, None] - 0.5, driver="gelsd").solution
    right = ((features[1000:] @ fit > 0).squeeze(1) == (whole["labels"][1000:] > 0)).float().mean().item()
    assert right > 0.7


def test_too_small_worlds_are_refused() -> None:
    with pytest.raises(DataError, match=r"model\.vocab = 2 has no id for a word; set it to 3"):
        Pairs(2, 12, 64, 8, 8, seed=0)
    with pytest.raises(DataError, match=r"model\.classes = 1 leaves the ground alone"):
        Shapes(1, 8, 1, 64, 8, 8, seed=0)
