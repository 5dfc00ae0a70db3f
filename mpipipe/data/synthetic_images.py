"""Made-up images: of classes that are patterns, and of shapes to be found pixel by pixel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipipe.data.base import Split, uniforms
from mpipipe.data.synthetic import Drawn, centred
from mpipipe.errors import DataError
from mpipipe.values import TensorSpec

_NOISE = 0.5  # peak to peak; a shape's brightness is between 0.5 and 1
_SHAPES = 4  # on each image


class SyntheticImages(Drawn):
    """ "x" float32 (B, channels, size, size): one of `classes` fixed random patterns under noise twice as
    strong; "labels" int64 (B,): which."""

    def __init__(
        self, channels: int, size: int, classes: int, samples: int, batch: int, val_batch: int, seed: int
    ) -> None:
        super().__init__(samples, batch, val_batch, seed)
        shape = (channels, size, size)
        self.sample = {"x": TensorSpec(shape, "float32"), "labels": TensorSpec((), "int64")}
        self._patterns = [
            centred(uniforms(seed, "pattern", k, 0, channels * size * size)) for k in range(classes)
        ]
        self._shape = shape

    def draw(self, split: Split, index: int) -> dict[str, NDArray[Any]]:
        u = self.uniforms(split, index, 1 + self._patterns[0].size)
        label = int(u[0] * len(self._patterns))
        x = self._patterns[label] + 2 * centred(u[1:])
        return {"x": x.reshape(self._shape).astype(np.float32), "labels": np.array(label, dtype=np.int64)}


class Shapes(Drawn):
    """Bright rectangles and discs on a dark, noisy ground; later ones cover earlier ones.

    "x" float32 (B, channels, size, size); "labels" int64 (B, size, size): 0 the ground, odd classes
    rectangles, even ones discs. Each pair of them has a brightness of its own, so the form decides
    between the two: a pixel alone does not tell. classes: the ground included.
    Raises DataError when there is none but the ground.
    """

    def __init__(
        self, channels: int, size: int, classes: int, samples: int, batch: int, val_batch: int, seed: int
    ) -> None:
        if classes < 2:
            raise DataError(f"shapes: model.classes = {classes} leaves the ground alone; set it to 2 or more")
        super().__init__(samples, batch, val_batch, seed)
        self.sample = {
            "x": TensorSpec((channels, size, size), "float32"),
            "labels": TensorSpec((size, size), "int64"),
        }
        self._channels, self._size, self._classes = channels, size, classes
        self._places = np.arange(size)
        pair = (np.arange(classes) + 1) // 2
        self._brightness = np.where(pair == 0, 0.0, 0.5 + 0.5 * pair / (classes // 2))

    def draw(self, split: Split, index: int) -> dict[str, NDArray[Any]]:
        size, form = self._size, (self._channels, self._size, self._size)
        u = self.uniforms(split, index, 4 * _SHAPES + self._channels * size * size)
        labels = np.zeros((size, size), dtype=np.int64)
        for kind, row, column, extent in u[: 4 * _SHAPES].reshape(_SHAPES, 4).tolist():
            label = 1 + int(kind * (self._classes - 1))
            dy, dx = np.abs(self._places - row * size)[:, None], np.abs(self._places - column * size)
            radius = size * (1 + extent) / 8
            inside = (dy <= radius) & (dx <= radius) if label % 2 else dy**2 + dx**2 <= radius**2
            labels[inside] = label
        noise = (u[4 * _SHAPES :].reshape(form) - 0.5) * _NOISE
        return {"x": (self._brightness[labels] + noise).astype(np.float32), "labels": labels}
