"""Several data sets as one, mixed by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpipipe.data.base import Batch, Dataset, DatasetBase, Specs, Split, lacking, uniforms
from mpipipe.errors import DataError


class Mixture(DatasetBase):
    """Each sample of each step is drawn from source s with probability weights[s] / sum(weights): sample i of
    the step is then sample i of that source's own batch of the step, so any rank computes any slice. A
    source of finite size is met in a random part of each of its epochs.

    Validation is mixed alike, by draws that do not depend on the seed, and has no natural end.
    Raises DataError when a source is no `Dataset`, or they differ in keys, shapes, dtypes or vocabulary,
    naming both.
    """

    def __init__(
        self, sources: Sequence[Dataset], weights: Sequence[float], seed: int, names: Sequence[str] = ()
    ) -> None:
        names = names or [f"source {i}" for i in range(len(sources))]
        _check(sources, weights, names)
        first = sources[0]
        self.vocab, self.tokens_per_sample = first.vocab, first.tokens_per_sample
        self.whole = any(source.whole for source in sources)
        if first.val_samples == 0:
            self.val_samples = 0
        self.sources, self._seed = sources, seed
        self._bounds = np.cumsum(weights)[:-1] / np.sum(weights)

    def specs(self, rows: int) -> Specs:
        return self.sources[0].specs(rows)

    def batch(self, split: Split, step: int, start: int, stop: int, keys: frozenset[str]) -> Batch:
        seed = self._seed if split == "train" else 0
        u = uniforms(seed, f"mixture {split}", step, start, stop)
        chosen = np.searchsorted(self._bounds, u, side="right").tolist()
        rows = [self.sources[s].batch(split, step, i, i + 1, keys) for i, s in enumerate(chosen, start=start)]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    def encode(self, text: str) -> list[int] | None:
        return next((ids for s in self.sources if (ids := s.encode(text)) is not None), None)

    def decode(self, ids: list[int]) -> str | None:
        return next((text for s in self.sources if (text := s.decode(ids)) is not None), None)


def _check(sources: Sequence[Dataset], weights: Sequence[float], names: Sequence[str]) -> None:
    if not sources or len(sources) != len(weights) or min(weights) <= 0:
        raise DataError(
            f"data.sources has {len(sources)} entries, data.weights = {list(weights)}; give each source one "
            "weight above 0"
        )
    for name, source in zip(names, sources, strict=True):
        if missing := lacking(source):
            raise DataError(
                f"{name} is a {type(source).__name__}, which lacks {', '.join(missing)}; a mixture takes "
                "data sets derived from mpipipe.data.base.DatasetBase: make it one, or use the source alone"
            )
        if source.varying or not source.exact:
            problem = "has micro-batches of varying shapes" if source.varying else "is a plain iterable"
            raise DataError(
                f"{name} {problem}; "
                "a mixture takes samples one by one: pad them to one shape, or use the source alone"
            )
        if (source.val_samples == 0) != (sources[0].val_samples == 0):
            raise DataError(
                f"of {names[0]} and {name} one has samples for validation, the other has none; give both some"
            )
        for what, a, b in (
            ("batches", sources[0].specs(1), source.specs(1)),
            ("vocabulary", sources[0].vocab, source.vocab),
        ):
            if a != b:
                raise DataError(
                    f"{names[0]} and {name} do not mix: {what} {a} and {b}; give all sources the same keys, "
                    "shapes and tokenizer"
                )
