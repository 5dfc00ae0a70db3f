"""The logits of a linear layer and their cross entropy, tile by tile of the vocabulary.

    forward   for each tile of weight   logits = x @ tile.T             largest and sum online, per token
    backward  for each tile, last first  logits again, in place to their gradient g
                                         dx += g @ tile     dtile += g.T @ x

Wijmans et al. 2024 ("Cut your losses"), with torch's own products around the kernel `cross_entropy`. The
gradient of a token's logits needs its sum over all tiles, so the logits are computed twice; but the last tile
of forward is kept and is the first of backward. The other way, gradients made in forward from whole rows of
logits (Hsu et al. 2024, "Liger"), is 3 products instead of nearly 4, and holds a gradient of the weight's
size from forward to backward.

Invariants
  1. Tiles follow from the shapes alone, never from threads or free memory: the same bits each time.
  2. Products are made in the dtype of x, all else in float32; sums over tiles are kept in float32.
  3. Rows whose label is `ignore_index` add nothing to the loss and to no gradient, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mpipipe.ops.native import by_device, workers

# device and dtype -> forward and backward
KERNELS = by_device(
    {
        torch.float32: ("cross_entropy_forward_f32", "cross_entropy_backward_f32"),
        torch.bfloat16: ("cross_entropy_forward_bf16", "cross_entropy_backward_bf16"),
    }
)
_ROWS = 4096  # tokens of a tile at most
_COLUMNS = 512  # vocabulary entries of a tile at least: products of fewer are slow
_ALWAYS = 1 << 20  # logits that are not worth a second product


class _Tile(NamedTuple):
    """Rows [row, row + rows) of x, columns [first, first + columns) of the vocabulary."""

    row: int
    rows: int
    first: int
    columns: int

    def of_rows(self, t: Tensor) -> Tensor:
        return t[self.row : self.row + self.rows]

    def of_columns(self, t: Tensor) -> Tensor:
        return t[self.first : self.first + self.columns]


def _tile_shape(tokens: int, entries: int, width: int) -> tuple[int, int]:
    """Rows and columns of the largest tile: equal parts, a quarter of the weight's size at most, unless the
    products would be too small."""
    rows = _part(tokens, _ROWS, 1)
    logits = max(entries * width // 4, _ALWAYS)
    return rows, _part(entries, max(_COLUMNS, logits // max(rows, 1)), 64)


def kept_elements(tokens: int, entries: int, width: int) -> int:
    """Of the buffer that `forward` keeps."""
    rows, columns = _tile_shape(tokens, entries, width)
    return rows * columns


def _part(whole: int, most: int, step: int) -> int:
    """Size of equal parts of `whole`, each about `most` or less; a multiple of `step` unless it is all."""
    parts = -(-whole // most) if whole else 1
    return min(whole, -(-whole // (parts * step)) * step)


def _tiles(tokens: int, entries: int, width: int) -> Iterator[_Tile]:
    rows, columns = _tile_shape(tokens, entries, width)
    for row in range(0, tokens, max(rows, 1)):
        for first in range(0, entries, max(columns, 1)):
            yield _Tile(row, min(rows, tokens - row), first, min(columns, entries - first))


def _logits(tile: _Tile, buffer: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of a tile, (rows, columns), in `buffer`."""
    out = _in(buffer, tile)
    return torch.mm(tile.of_rows(x), tile.of_columns(weight).to(x.dtype).t(), out=out)


def _in(buffer: Tensor, tile: _Tile) -> Tensor:
    return buffer[: tile.rows * tile.columns].view(tile.rows, tile.columns)


def _arguments(
    tile: _Tile, logits: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int
) -> tuple[int, ...]:
    """What both kernels begin with."""
    return (
        logits.data_ptr(),
        tile.rows,
        tile.columns,
        0 if bias is None else tile.of_columns(bias).data_ptr(),
        tile.of_rows(labels).data_ptr(),
        tile.first,
        ignore_index,
    )


@torch.no_grad()
def forward(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    smoothing: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss (), log-sum-exp (N,) and, with `keep`, the buffer whose beginning is the last tile of logits."""
    (tokens, width), entries = x.shape, weight.shape[0]
    x, labels, bias = x.contiguous(), labels.contiguous(), None if bias is None else bias.float().contiguous()
    rows, columns = _tile_shape(tokens, entries, width)
    buffer = x.new_empty(rows * columns)
    state = torch.tensor([-torch.inf, 0.0, 0.0, 0.0], dtype=torch.float64, device=x.device).repeat(tokens, 1)
    kernel, by = KERNELS[x.device.type, x.dtype][0], workers(x)
    for tile in _tiles(tokens, entries, width):
        logits = _logits(tile, buffer, x, weight)
        kernel(*_arguments(tile, logits, bias, labels, ignore_index), tile.of_rows(state).data_ptr(), *by)
    log_sum = state[:, 0] + state[:, 1].log()
    losses = log_sum - (1.0 - smoothing) * state[:, 2]
    if smoothing:
        losses -= smoothing / entries * state[:, 3]
    losses.masked_fill_(labels == ignore_index, 0.0)
    # parts of one size: torch splits a longer sum by threads
    loss = sum((part.sum() for part in losses.split(_ROWS)), start=losses.new_zeros(()))
    return loss.float(), log_sum.float(), buffer if keep else None


@torch.no_grad()
def backward(
    grad: Tensor, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, log_sum: Tensor,
    kept: Tensor | None,
    ignore_index: int, smoothing: float, want: tuple[bool, bool, bool], into: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias where `want` says so; that of weight added to `into` if it is given.

    kept: the buffer of forward, whose tile is used up; or None: all tiles are computed again."""
    (tokens, width), entries = x.shape, weight.shape[0]
    x, labels, wide_bias = (
        x.contiguous(),
        labels.contiguous(),
        None if bias is None else bias.float().contiguous(),
    )
    rows, columns = _tile_shape(tokens, entries, width)
    dx = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if want[0] else None
    dw = (torch.zeros_like(weight) if into is None else into) if want[1] else None
    db = torch.zeros(entries, dtype=torch.float32, device=x.device) if want[2] else None
    ready = kept is not None
    buffer = x.new_empty(rows * columns) if kept is None else kept
    shares = (1.0 - smoothing, smoothing / max(entries, 1), float(grad))
    kernel, by = KERNELS[x.device.type, x.dtype][1], workers(x)
    for tile in reversed(list(_tiles(tokens, entries, width))):
        g = _in(buffer, tile) if ready else _logits(tile, buffer, x, weight)
        ready = False
        arguments = _arguments(tile, g, wide_bias, labels, ignore_index)
        kernel(*arguments, tile.of_rows(log_sum).data_ptr(), *shares, *by)
        if dx is not None:
            _add(tile.of_rows(dx), g, tile.of_columns(weight).to(x.dtype))
        if dw is not None:
            _add(tile.of_columns(dw), g.t(), tile.of_rows(x))
        if db is not None:
            tile.of_columns(db).add_(g.sum(0, dtype=torch.float32))
    return (
        None if dx is None else dx.to(x.dtype),
        dw,
        None if db is None or bias is None else db.to(bias.dtype),
    )


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b"""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
