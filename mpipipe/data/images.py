"""Images with a label each: normalised, shuffled once per epoch, validated in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.data.base import Batch, DatasetBase, Order, Split
from mpipipe.data.image_files import Labelled, labels
from mpipipe.errors import DataError
from mpipipe.values import TensorSpec

_CHUNK = 64  # images of which the mean is taken at a time, in float64


class Images(DatasetBase):
    """ "x" float32 (B, C, H, W): minus the mean and over the deviation of the training set, per channel;
    "labels" int64 (B,).

    batch, val_batch: samples per step of training and of validation. classes: of the model; None = one
    more than the greatest label. Raises DataError when sizes differ or a label is not one of them.
    """

    def __init__(
        self,
        train: Labelled,
        val: Labelled,
        batch: int,
        val_batch: int,
        seed: int,
        classes: int | None = None,
    ) -> None:
        self._x = {"train": _channels_first(train), "val": _channels_first(val)}
        a, b = (x.shape[1:] for x in self._x.values())
        if a != b:
            raise DataError(
                f"{val.where}: image 0 has (channels, height, width) {b}, those of {train.where} have {a}; "
                "bring both to one size"
            )
        self.classes = classes or int(max(train.y.max(), val.y.max())) + 1
        self._y = {"train": _labels(train, self.classes), "val": _labels(val, self.classes)}
        self.sample = {"x": TensorSpec(a, "float32"), "labels": TensorSpec((), "int64")}
        self.train_samples, self.val_samples = len(train.x), len(val.x)
        self._orders: dict[Split, Order] = {
            "train": Order(len(train.x), batch, seed, shuffle=True),
            "val": Order(len(val.x), val_batch),
        }
        self.mean, self.std = _moments(self._x["train"])  # float64 (C,), in the units of the file

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        index = self._orders[split].indices(step, start, stop)
        found: Batch = {}
        if "x" in keys:
            x = (self._x[split][index] - self.mean[:, None, None]) / self.std[:, None, None]
            found["x"] = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        if "labels" in keys:
            found["labels"] = torch.from_numpy(self._y[split][index])
        return found


def _channels_first(data: Labelled) -> NDArray[Any]:  # -> (N, C, H, W)
    x = data.x
    if x.ndim not in (3, 4) or not x.size or x.dtype.kind not in "uif":
        raise DataError(
            f"{data.where}: has shape {x.shape} and dtype {x.dtype}; expected numbers (N, H, W), "
            "(N, H, W, C) or (N, C, H, W), at least one image"
        )
    if x.ndim == 3:
        return x[:, None]
    if x.shape[1] == x.shape[3]:
        raise DataError(
            f"{data.where}: shape {x.shape} does not tell channels from columns; give another size, or "
            "(N, H, W) if there is one channel"
        )
    return x if x.shape[1] < x.shape[3] else x.transpose(0, 3, 1, 2)  # there are fewer channels than pixels


def _labels(data: Labelled, classes: int) -> NDArray[np.int64]:  # -> (N,)
    y = labels(data).astype(np.int64)
    if len(wrong := np.flatnonzero((y < 0) | (y >= classes))):
        raise DataError(
            f"{data.where}: image {wrong[0]} has label {y[wrong[0]]}, expected 0 to {classes - 1}; number "
            f"the labels from 0, or set model.classes to {y.max() + 1}"
        )
    return y


def _moments(x: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation per channel; a constant channel is left as wide as it is."""
    axes, count = (0, 2, 3), x.size / x.shape[1]
    parts = [slice(i, i + _CHUNK) for i in range(0, len(x), _CHUNK)]
    mean = sum(x[p].sum(axes, dtype=np.float64) for p in parts) / count
    spread = [((x[p] - mean[:, None, None]) ** 2).sum(axes) for p in parts]
    std = np.sqrt(sum(spread) / count)
    return mean, np.where(std > 0, std, 1.0)
