"""What is aimed at: `bar` and `met` beside a figure. The exit code says nothing about them."""

from __future__ import annotations

from typing import Any

Found = float | None  # None: there is nothing to compare with


def at_most(found: Found, bar: float) -> dict[str, Any]:
    return {"bar": bar, "met": None if found is None else found <= bar}


def at_least(found: Found, bar: float) -> dict[str, Any]:
    return {"bar": bar, "met": None if found is None else found >= bar}


# -- of `benchmarks.bench`: seconds of our step over those of the best of a group of peers, at most -----

OF_EVERY_MODEL = {"kernels_off": {"pipeline": 0.97}}
OF_MODELS = {
    "gpt85m": {"kernels_on": {"parallel": 0.87, "one_process": 0.97}},
    "gpt10m": {"kernels_on": {"peer": 0.90}},
    "vgg": {"kernels_on": {"pipeline": 0.95}},
}


def bars_of(model: str, row: str) -> dict[str, float]:
    """By group of peers, as in `benchmarks.results`."""
    return OF_EVERY_MODEL.get(row, {}) | OF_MODELS.get(model, {}).get(row, {})
