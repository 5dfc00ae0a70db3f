"""Images: read as they come, normalised by the training set, visited once per epoch."""

from __future__ import annotations

import gzip
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpipipe.config import parse
from mpipipe.data import open_dataset
from mpipipe.data.extras import optional
from mpipipe.data.image_files import Labelled, one_size, read_images
from mpipipe.data.images import Images
from mpipipe.errors import DataError

BOTH = frozenset(["x", "labels"])
RANDOM = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


def images(x: Any, y: Any, n_val: int = 4, **how: Any) -> Images:
    train, val = Labelled(x[n_val:], y[n_val:], "train"), Labelled(x[:n_val], y[:n_val], "val")
    return Images(train, val, **({"batch": 4, "val_batch": 3, "seed": 0} | how))


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("layout", ["hw", "hwc", "chw"])
def test_any_layout_becomes_normalised_channels_first(layout: str, dtype: str) -> None:
    chw = pixels(30, 1 if layout == "hw" else 3, 8, 10).astype(dtype)
    given = {"hw": chw[:, 0], "hwc": chw.transpose(0, 2, 3, 1), "chw": chw}[layout]
    data = images(given, np.arange(30) % 5)
    assert data.specs(2)["x"].shape == (2, *chw.shape[1:])
    batch = data.batch("val", 0, 0, 4, BOTH)
    train = chw[4:].astype(np.float64)
    want = (chw[:4] - train.mean((0, 2, 3), keepdims=True)) / train.std((0, 2, 3), keepdims=True)
    assert batch["x"].dtype == torch.float32
    np.testing.assert_allclose(batch["x"].numpy(), want, rtol=1e-6, atol=1e-6)
    assert batch["labels"].tolist() == [0, 1, 2, 3]
    assert data.classes == 5
    slices = [data.batch("train", 2, i, i + 1, BOTH)["x"] for i in range(4)]
    assert torch.equal(torch.cat(slices), data.batch("train", 2, 0, 4, BOTH)["x"])


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    data, other = (images(pixels(14, 4, 4), np.arange(14), seed=s) for s in (0, 1))
    seen = [i for step in range(10) for i in data.batch("train", step, 0, 4, BOTH)["labels"].tolist()]
    epochs = [seen[i : i + 10] for i in range(0, 40, 10)]  # batches of 4 cross their ends
    assert [sorted(e) for e in epochs] == [list(range(4, 14))] * 4
    assert len({tuple(e) for e in epochs}) == 4
    assert other.batch("train", 0, 0, 4, BOTH)["labels"].tolist() != epochs[0][:4]


def test_the_order_is_frozen() -> None:
    """The data order of a seed never changes between versions."""
    data = images(pixels(12, 4, 4), np.arange(12))
    assert data.batch("train", 0, 0, 4, BOTH)["labels"].tolist() == [5, 4, 8, 11]


def test_validation_is_in_order_and_its_last_batch_may_be_short() -> None:
    data = images(pixels(14, 4, 4), np.arange(14))
    assert data.val_samples == 4
    found = [data.batch("val", 0, 0, 3, BOTH)["labels"], data.batch("val", 1, 0, 1, BOTH)["labels"]]
    assert torch.cat(found).tolist() == [0, 1, 2, 3]


def test_a_constant_channel_is_not_divided_by_zero() -> None:
    data = images(np.full((9, 4, 4), 7, np.uint8), np.zeros(9, np.int64))
    assert torch.equal(data.batch("train", 0, 0, 4, BOTH)["x"], torch.zeros(4, 1, 4, 4))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 19])
def test_an_image_that_is_not_finite_is_named(tmp_path: Path, value: float, place: int) -> None:
    x, y = pixels(20, 4, 4).astype(np.float32), np.arange(20) % 2
    x[place, 1, 1] = value
    np.savez(tmp_path / "whole.npz", x=x, y=y)
    np.savez(tmp_path / "split.npz", x_train=np.zeros((5, 4, 4)), y_train=y[:5], x_test=x, y_test=y)
    for name, key in (("whole", "x"), ("split", "x_test")):
        with pytest.raises(DataError, match=rf"{name}\.npz: {key}: image {place} holds infinity"):
            read_images(tmp_path / f"{name}.npz", 0.5)


def test_a_damaged_archive_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        idx(tmp_path / f"{name}-ubyte.gz", pixels(9, 5, 7), zipped=True)
    whole = bytearray((tmp_path / "train-images-idx3-ubyte.gz").read_bytes())
    whole[10:14] = b"\xff" * 4  # the head of what is compressed
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(whole)
    with pytest.raises(DataError, match=r"cannot be read \(Error -3 while decompressing"):
        read_images(tmp_path, 0.2)


def test_an_npz_has_its_own_test_set_or_gives_up_a_share(tmp_path: Path) -> None:
    x, y = pixels(20, 6, 6), np.repeat([0, 1], 10)
    np.savez(tmp_path / "split.npz", x_train=x[:15], y_train=y[:15, None], x_test=x[15:], y_test=y[15:])
    train, val = read_images(tmp_path / "split.npz", 0.5)
    assert np.array_equal(train.x, x[:15])
    assert np.array_equal(val.y, y[15:])
    np.savez_compressed(tmp_path / "whole.npz", x=x, y=y)
    train, val = read_images(tmp_path / "whole.npz", 0.3)
    assert (len(train.x), len(val.x)) == (14, 6)
    assert set(val.y.tolist()) == {0, 1}, "the file is sorted by class, the share must not be"
    assert {a.tobytes() for a in [*train.x, *val.x]} == {a.tobytes() for a in x}


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        ("vgg, size: 6", pixels(20, 6, 6), None),
        ("vgg", pixels(20, 6, 6), r"images of \[1, 6, 6\] .*model\.name = vgg is made for \[1, 8, 8\]"),
        ("vgg", pixels(20, 3, 8, 8), r"images of \[3, 8, 8\] .*set model\.channels and model\.size"),
        ("resnet", pixels(20, 6, 7), None),  # it takes any size
        ("resnet", pixels(20, 3, 8, 8), r"images of \[3, 8, 8\] .*resnet is made for \[1, 8, 8\]"),
    ],
)
def test_images_that_the_model_is_not_made_for_are_refused(
    tmp_path: Path, model: str, x: np.ndarray[Any, Any], message: str | None
) -> None:
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 2)
    config = parse(f"model: {{name: {model}}}\ndata: {{name: images, path: {tmp_path / 'a.npz'}}}")
    with pytest.raises(DataError, match=message) if message else nullcontext():
        assert open_dataset(config, tmp_path).specs(1)["x"].shape[2:] == x.shape[-2:]


def test_records_with_named_fields_are_no_images(tmp_path: Path) -> None:
    x = np.zeros(3, np.dtype([("\u0103", "u1")]))
    with pytest.warns(UserWarning, match="format 3.0"):
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(3))
    with pytest.raises(DataError, match=r"a\.npz: x: is written in version 3\.0 of the npy format"):
        read_images(tmp_path / "a.npz", 0.5)


def idx(path: Path, values: np.ndarray[Any, Any], zipped: bool = False) -> None:
    raw = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    raw += values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if zipped else raw)


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_as_it_ships(tmp_path: Path, zipped: bool) -> None:
    x, y = pixels(9, 5, 7), np.arange(9)
    end = ".gz" if zipped else ""
    for name, part in (("train", slice(0, 6)), ("t10k", slice(6, 9))):
        idx(tmp_path / f"{name}-images-idx3-ubyte{end}", x[part], zipped)
        idx(tmp_path / f"{name}-labels-idx1-ubyte{end}", y[part], zipped)
    train, val = read_images(tmp_path, 0.2)
    assert np.array_equal(np.concatenate([train.x, val.x]), x)
    assert np.array_equal(np.concatenate([train.y, val.y]), y)
    if not zipped:
        whole = tmp_path / "train-images-idx3-ubyte"
        raw = whole.read_bytes()
        whole.write_bytes(raw[:-1])
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte: 209 bytes.*\(6, 5, 7\) needs 210"):
            read_images(tmp_path, 0.2)
        whole.write_bytes(raw)
    next(tmp_path.glob("t10k-labels*")).unlink()
    with pytest.raises(DataError, match="has no t10k-labels"):
        read_images(tmp_path, 0.2)


@pytest.mark.slow
def test_digits_are_the_real_sample() -> None:
    pytest.importorskip("sklearn")
    data = open_dataset(parse("model: resnet\ndata: digits"), ".")
    assert data.specs(1)["x"].shape == (1, 1, 8, 8)
    assert data.val_samples == round(1797 * 0.2)
    assert set(data.batch("val", 0, 0, 100, BOTH)["labels"].tolist()) == set(range(10))


def test_a_missing_library_names_its_extra() -> None:
    with pytest.raises(DataError, match=r"no_such_library.*pip install 'mpipipe\[digits\]'"):
        optional("no_such_library", "digits")


def test_images_of_mixed_sizes_are_refused(tmp_path: Path) -> None:
    mixed = np.empty(4, dtype=object)
    mixed[:] = [pixels(6, 6), pixels(6, 6), pixels(6, 5), pixels(6, 6)]
    np.savez(tmp_path / "a.npz", x=mixed, y=np.arange(4))
    wrong = r"a\.npz: x: image 2 has shape \(6, 5\), image 0 has \(6, 6\); resize or crop"
    with pytest.raises(DataError, match=wrong):
        read_images(tmp_path / "a.npz", 0.5)
    with pytest.raises(DataError, match=r"mine: image 2 has shape \(6, 5\)"):
        one_size(list(mixed), "mine")
    same = np.empty(2, dtype=object)
    same[:] = [pixels(6, 6), pixels(6, 6)]
    np.savez(tmp_path / "b.npz", x=same, y=np.arange(2))
    assert read_images(tmp_path / "b.npz", 0.5)[0].x.shape == (1, 6, 6)
    sets = [Labelled(pixels(3, n, 6), np.arange(3), name) for n, name in ((6, "train"), (8, "test"))]
    with pytest.raises(DataError, match=r"test: image 0 has .*\(1, 8, 6\), those of train have \(1, 6, 6\)"):
        Images(*sets, batch=2, val_batch=2, seed=0)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code from a data file",)


def test_a_data_file_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.empty(2, dtype=object)
    x[:] = [Evil(), Evil()]
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(2))
    with pytest.raises(DataError, match=r"a\.npz: cannot be read .*builtins\.print, which is not an array"):
        read_images(tmp_path / "a.npz", 0.5)
    assert capsys.readouterr().out == ""


def test_what_cannot_be_images_and_labels_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=pixels(2, 2))
    (tmp_path / "b.npz").write_text("no archive")
    for name, message in (("a.npz", "holds images; expected x_train"), ("b.npz", "cannot be read")):
        with pytest.raises(DataError, match=message):
            read_images(tmp_path / name, 0.5)
    np.savez(tmp_path / "c.npz", x=pixels(2, 4, 4), y=np.arange(2))
    with pytest.raises(DataError, match=r"leaves 2 for training and 0 for validation"):
        read_images(tmp_path / "c.npz", 0.1)
    for y in (np.arange(5), np.arange(3), np.arange(4) / 2, np.array(1)):  # of five, four could be taken
        np.savez(tmp_path / "d.npz", x=pixels(4, 4, 4), y=y)
        with pytest.raises(DataError, match=r"d\.npz: x: 4 images, labels of shape \("):
            read_images(tmp_path / "d.npz", 0.5)
    good = np.arange(9)
    for x, y, message in (
        (pixels(9, 4), good, r"train: has shape \(5, 4\)"),
        (pixels(9, 3, 8, 3), good, r"does not tell channels from columns"),
        (pixels(9, 4, 4), good[:8], r"5 images, labels of shape \(4,\)"),
        (pixels(9, 4, 4), good / 2, r"dtype float64; expected one integer"),
        (pixels(9, 4, 4), good - 5, r"train: image 0 has label -1, expected 0 to 3"),
    ):
        with pytest.raises(DataError, match=message):
            images(x, y)
    with pytest.raises(DataError, match=r"image 1 has label 5, expected 0 to 4; .*model\.classes to 9"):
        images(pixels(9, 4, 4), good, classes=5)
