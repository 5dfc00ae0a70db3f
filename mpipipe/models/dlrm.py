"""A DLRM: click prediction from numbers and categories (Naumov et al. 2019).

    dense      -> bottom MLP -----------> one vector    (B, E) --.
    categories -> a table each, summed -> `tables` vectors       +-> products of all pairs -> top MLP -> logit
                                                                 '-> the dense vector itself ---^

Shapes: B samples, D = dense, N tables, L = bag entries summed per table, E = width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class DLRM(nn.Module):
    """`forward(dense, categories)`: float32 (B, D) and int64 (B, N, L) -> logit (B,).

    `tables`: rows of each table. `bottom` and `top` are hidden widths: the bottom MLP ends in `width`,
    the top one in the logit. A table of n rows starts from U(-1/sqrt(n), 1/sqrt(n)), as in the paper's
    code; linear layers as torch's do.
    """

    def __init__(
        self, dense: int, tables: Sequence[int], width: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.bottom = _mlp([dense, *bottom, width])
        self.tables = nn.ModuleList(_table(rows, width) for rows in tables)
        widths = [width + math.comb(1 + len(tables), 2), *top]
        self.top = _mlp(widths)
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:  # (B, D), (B, N, L) -> (B,)
        x = self.bottom(dense)
        vectors = [x, *(table(ids) for table, ids in zip(self.tables, categories.unbind(1), strict=True))]
        logit: Tensor = self.head(self.top(torch.cat([x, interactions(torch.stack(vectors, 1))], 1)))
        return logit.squeeze(1)


def interactions(vectors: Tensor) -> Tensor:  # (B, N, E) -> (B, N (N-1) / 2)
    """Dot products of all pairs (i, j), j < i, in the order of i, then j."""
    n = vectors.shape[1]
    i, j = torch.tril_indices(n, n, -1, device=vectors.device)
    products = vectors @ vectors.transpose(1, 2)  # (B, N, N)
    return products.flatten(1).index_select(1, i * n + j)


def _table(rows: int, width: int) -> nn.EmbeddingBag:
    table, bound = nn.EmbeddingBag(rows, width, mode="sum"), 1.0 / math.sqrt(rows)
    nn.init.uniform_(table.weight, -bound, bound)
    return table


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers, each with ReLU."""
    return nn.Sequential(*(part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())))
