"""The logits of a linear layer and their cross entropy: products by torch, or by the kernel `gemm` (`own`),
around the kernel `cross_entropy`, in one of two orders.

    forward   for each tile of weight   logits = x @ tile.T             largest and sum online, per token
    backward  for each tile, last first  logits again, in place to their gradient g
                                         dx += g @ tile     dtile += g.T @ x

Wijmans et al. 2024 ("Cut your losses"). The gradient of a token's logits needs its sum over all tiles, so
they are computed twice; but the last tile of forward is kept and is the first of backward: nearly 4 products.

    late      for some tokens at once   logits of the whole vocabulary, tile by tile; then as in backward

Where nothing reads the loss before backward, forward has nothing to do: backward makes whole rows of logits
once and has loss and gradients of them. That is 3 products, and nothing is kept but x. (Hsu et al. 2024,
"Liger", do the same in forward, which holds a gradient of the weight's size until backward.)

Invariants
  1. Tiles follow from the shapes alone, never from threads or free memory: the same bits each time.
  2. Products are made in the dtype of x, all else in float32; sums over tiles are kept in float32, also of a
     shorter weight, whose gradient is rounded once.
  3. Rows whose label is `ignore_index` add nothing to the loss and to no gradient, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from mpipipe.ops.gemm import add_gemm, gemm
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
_FEWEST = 128  # tokens at once: for fewer, adding to the weight's gradient takes longer than a product
_PARTS = 4  # tiles of the whole vocabulary: of a converted weight there is one at a time


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


def _late_shape(tokens: int, entries: int, width: int, itemsize: int) -> tuple[int, int]:
    """Tokens of `forward_and_backward` at once, whose logits are half of a float32 weight's size at most,
    unless these are few; entries of a tile."""
    rows = _part(tokens, max(_FEWEST, 2 * width // itemsize), 1)
    return rows, _part(entries, max(_COLUMNS, entries // _PARTS), 64)


def late_elements(tokens: int, entries: int, width: int, itemsize: int) -> int:
    """Of its logits at once."""
    return _late_shape(tokens, entries, width, itemsize)[0] * entries


def summed_elements(
    tokens: int, entries: int, width: int, itemsize: int, weight_itemsize: int, late: bool
) -> int:
    """Of the float32 sum that becomes the gradient of a shorter weight, where it has more than one term."""
    shape = _late_shape(tokens, entries, width, itemsize) if late else _tile_shape(tokens, entries, width)
    return entries * width if weight_itemsize < 4 and shape[0] < tokens else 0


def _tiles(tokens: int, entries: int, rows: int, columns: int) -> Iterator[_Tile]:
    """All of them, those of the same tokens one after the other."""
    for row in range(0, tokens, max(rows, 1)):
        for first in range(0, entries, max(columns, 1)):
            yield _Tile(row, min(rows, tokens - row), first, min(columns, entries - first))


def _in(buffer: Tensor, tile: _Tile) -> Tensor:
    return buffer[: tile.rows * tile.columns].view(tile.rows, tile.columns)


@dataclass(frozen=True)
class _Head:
    """Contiguous; bias in float32."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    ignore_index: int
    smoothing: float
    own: bool

    @classmethod
    def of(
        cls, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None,
        ignore_index: int, smoothing: float, own: bool,
    ) -> _Head:  # fmt: skip
        wide = None if bias is None else bias.float().contiguous()
        return cls(x.contiguous(), weight, labels.contiguous(), wide, ignore_index, smoothing, own)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, entries, width."""
        return self.x.shape[0], self.weight.shape[0], self.x.shape[1]

    def tiles(self) -> Iterator[_Tile]:
        return _tiles(*self.shape[:2], *_tile_shape(*self.shape))

    def late_tiles(self) -> Iterator[list[_Tile]]:
        """Those of some tokens, of the whole vocabulary."""
        tiles = _tiles(*self.shape[:2], *_late_shape(*self.shape, self.x.dtype.itemsize))
        return (list(group) for _, group in groupby(tiles, key=lambda tile: tile.row))

    def state(self) -> Tensor:
        """Of every token, before its first tile."""
        state = self.x.new_zeros((self.x.shape[0], 4), dtype=torch.float64)
        state[:, 0] = -torch.inf
        return state

    def logits(self, tile: _Tile, buffer: Tensor) -> Tensor:
        """x @ weight.T of a tile, (rows, columns), in `buffer`."""
        of_tile = tile.of_rows(self.x), tile.of_columns(self.weight).to(self.x.dtype).t()
        return (gemm if self.own else torch.mm)(*of_tile, out=_in(buffer, tile))

    def see(self, tile: _Tile, logits: Tensor, state: Tensor) -> None:
        kernel = KERNELS[self.x.device.type, self.x.dtype][0]
        kernel(*self._arguments(tile, logits), tile.of_rows(state).data_ptr(), *workers(self.x))

    def loss(self, state: Tensor, log_sum: Tensor) -> Tensor:
        """(), float32. log_sum: `_log_sum` of the state."""
        losses = log_sum - (1.0 - self.smoothing) * state[:, 2]
        if self.smoothing:
            losses -= self.smoothing / self.weight.shape[0] * state[:, 3]
        losses.masked_fill_(self.labels == self.ignore_index, 0.0)
        # parts of one size: torch splits a longer sum by threads
        first, *others = losses.split(_ROWS)
        return sum((part.sum() for part in others), start=first.sum()).float()

    def to_gradient(self, tile: _Tile, logits: Tensor, log_sum: Tensor, grad: float) -> None:
        """In place."""
        shares = (1.0 - self.smoothing, self.smoothing / max(self.weight.shape[0], 1), grad)
        kernel = KERNELS[self.x.device.type, self.x.dtype][1]
        of_rows = tile.of_rows(log_sum).data_ptr()
        kernel(*self._arguments(tile, logits), of_rows, *shares, *workers(self.x))

    def _arguments(self, tile: _Tile, logits: Tensor) -> tuple[int, ...]:
        """What both kernels begin with."""
        return (
            logits.data_ptr(),
            tile.rows,
            tile.columns,
            0 if self.bias is None else tile.of_columns(self.bias).data_ptr(),
            tile.of_rows(self.labels).data_ptr(),
            tile.first,
            self.ignore_index,
        )


class _Gradients:
    """Those of x, weight and bias where `want` says so; that of the weight added to `into` if it is given."""

    def __init__(self, head: _Head, want: tuple[bool, bool, bool], into: Tensor | None, late: bool) -> None:
        x, weight, wide = head.x, head.weight, torch.float32
        self.head, self.into = head, into
        self.dx = torch.zeros(x.shape, dtype=wide, device=x.device) if want[0] else None
        self.dw: Tensor | None = None
        if want[1] and summed_elements(*head.shape, x.dtype.itemsize, weight.dtype.itemsize, late):
            self.dw = torch.zeros(weight.shape, dtype=wide, device=x.device)
        elif want[1]:
            self.dw = torch.zeros_like(weight) if into is None else into
        self.db = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if want[2] else None

    def add(self, tile: _Tile, g: Tensor) -> None:
        """What the gradient of a tile of logits adds to them."""
        x, weight = self.head.x, self.head.weight
        if self.dx is not None:
            self._add(tile.of_rows(self.dx), g, tile.of_columns(weight).to(x.dtype))
        if self.dw is not None:
            self._add(tile.of_columns(self.dw), g.t(), tile.of_rows(x))
        if self.db is not None:
            tile.of_columns(self.db).add_(g.sum(0, dtype=torch.float32))

    def _add(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a @ b"""
        if total.dtype != a.dtype:
            total.add_(a @ b)
        elif self.head.own:
            add_gemm(total, a, b)
        else:
            total.addmm_(a, b)

    def results(self, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx = None if self.dx is None else self.dx.to(self.head.x.dtype)
        dw = self.dw
        if dw is not None and dw.dtype != self.head.weight.dtype:
            if self.into is None:
                dw = dw.to(self.head.weight.dtype)
            else:  # in parts: torch makes a copy of them in float32
                for part, sum_ in zip(self.into.split(_COLUMNS), dw.split(_COLUMNS), strict=True):
                    part.add_(sum_)
                dw = self.into
        return dx, dw, None if self.db is None or bias is None else self.db.to(bias.dtype)


@torch.no_grad()
def forward(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    smoothing: float,
    keep: bool,
    own: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss (), log-sum-exp (N,) and, with `keep`, the buffer whose beginning is the last tile of logits."""
    head = _Head.of(x, weight, labels, bias, ignore_index, smoothing, own)
    buffer, state = x.new_empty(kept_elements(*head.shape)), head.state()
    for tile in head.tiles():
        head.see(tile, head.logits(tile, buffer), state)
    log_sum = _log_sum(state)
    return head.loss(state, log_sum), log_sum.float(), buffer if keep else None


@torch.no_grad()
def backward(
    grad: Tensor, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, log_sum: Tensor,
    kept: Tensor | None,
    ignore_index: int, smoothing: float, want: tuple[bool, bool, bool], into: Tensor | None,
    own: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias where `want` says so; that of weight added to `into` if it is given.

    kept: the buffer of forward, whose tile is used up; or None: all tiles are computed again."""
    head = _Head.of(x, weight, labels, bias, ignore_index, smoothing, own)
    found, ready, scale = _Gradients(head, want, into, late=False), kept is not None, float(grad)
    buffer = x.new_empty(kept_elements(*head.shape)) if kept is None else kept
    for tile in reversed(list(head.tiles())):
        g = _in(buffer, tile) if ready else head.logits(tile, buffer)
        ready = False
        head.to_gradient(tile, g, log_sum, scale)
        found.add(tile, g)
    return found.results(bias)


@torch.no_grad()
def forward_and_backward(
    grad: Tensor, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None,
    ignore_index: int, smoothing: float, want: tuple[bool, bool, bool], into: Tensor | None,
    own: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Loss () and gradients, as `forward` and `backward` return them: `late` above."""
    head = _Head.of(x, weight, labels, bias, ignore_index, smoothing, own)
    found, scale, state = _Gradients(head, want, into, late=True), float(grad), head.state()
    buffer = x.new_empty(late_elements(*head.shape, x.dtype.itemsize))
    for tiles in head.late_tiles():
        logits = [head.logits(t, buffer[t.rows * t.first :]) for t in tiles]
        for tile, of_tile in zip(tiles, logits, strict=True):
            head.see(tile, of_tile, state)
        log_sum = _log_sum(state).float()
        for tile, g in zip(tiles, logits, strict=True):
            head.to_gradient(tile, g, log_sum, scale)
            found.add(tile, g)
    return head.loss(state, _log_sum(state)), *found.results(bias)


def _log_sum(state: Tensor) -> Tensor:
    """Log-sum-exp (N,), float64."""
    return state[:, 0] + state[:, 1].log()
