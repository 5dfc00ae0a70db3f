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
  3. Rows whose label is `ignore_index` add nothing to the loss and to no gradient, whatever finite numbers
     they hold; NaN times the zeros of their gradient is NaN, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from mpipipe.ops.gemm import add_gemm, gemm
from mpipipe.ops.native import Functions, by_device, device_type, workers

# device and dtype -> forward, backward and loss
KERNELS = by_device(
    {
        torch.float32: ("cross_entropy_forward_f32", "cross_entropy_backward_f32", "cross_entropy_loss"),
        torch.bfloat16: ("cross_entropy_forward_bf16", "cross_entropy_backward_bf16", "cross_entropy_loss"),
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
        return t if self.rows == t.shape[0] else t[self.row : self.row + self.rows]

    def of_columns(self, t: Tensor) -> Tensor:
        return t if self.columns == t.shape[0] else t[self.first : self.first + self.columns]


def _tile_shape(tokens: int, entries: int, width: int) -> tuple[int, int]:
    """Rows and columns of the largest tile: equal parts, a quarter of the weight's size at most, unless the
    products would be too small."""
    return _largest(tokens, entries, _ROWS, _COLUMNS, max(entries * width // 4, _ALWAYS))


@lru_cache
def _largest(tokens: int, entries: int, most_rows: int, fewest_columns: int, logits: int) -> tuple[int, int]:
    rows = _part(tokens, most_rows, 1)
    return rows, _part(entries, max(fewest_columns, logits // max(rows, 1)), 64)


def kept_elements(tokens: int, entries: int, width: int) -> int:
    """Of the tile that `forward` keeps."""
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


@lru_cache
def _tiles(tokens: int, entries: int, rows: int, columns: int) -> tuple[_Tile, ...]:
    """All of them, those of the same tokens one after the other."""
    return tuple(
        _Tile(row, min(rows, tokens - row), first, min(columns, entries - first))
        for row in range(0, tokens, max(rows, 1))
        for first in range(0, entries, max(columns, 1))
    )


def _in(buffer: Tensor, tile: _Tile) -> Tensor:
    """(rows, columns) at the beginning of a contiguous buffer."""
    shape = tile.rows, tile.columns
    return buffer if buffer.shape == shape else buffer.view(-1)[: tile.rows * tile.columns].view(shape)


class _Head(NamedTuple):
    """Contiguous; bias in float32. shape: tokens, entries, width."""

    kernels: Functions
    shape: tuple[int, int, int]
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
        kernels = KERNELS[device_type(x), x.dtype]
        wide = None if bias is None else bias.float().contiguous()
        given = x.contiguous(), weight, labels.contiguous(), wide
        tokens, width = x.shape
        return cls(kernels, (tokens, weight.shape[0], width), *given, ignore_index, smoothing, own)

    def tiles(self) -> tuple[_Tile, ...]:
        return _tiles(*self.shape[:2], *_tile_shape(*self.shape))

    def whole(self) -> _Tile:
        tokens, entries, _ = self.shape
        return _Tile(0, tokens, 0, entries)

    def late_tiles(self) -> Iterator[list[_Tile]]:
        """Those of some tokens, of the whole vocabulary."""
        tiles = _tiles(*self.shape[:2], *_late_shape(*self.shape, self.x.dtype.itemsize))
        return (list(group) for _, group in groupby(tiles, key=lambda tile: tile.row))

    def buffer(self) -> Tensor:
        """For the logits of any tile."""
        return self.x.new_empty(*_tile_shape(*self.shape))

    def state(self) -> Tensor:
        """Of every token, which its first tile sets."""
        return self.x.new_empty(self.shape[0], 4, dtype=torch.float64)

    def log_sum(self) -> Tensor:
        """Of every token, which `loss` sets."""
        return self.x.new_empty(self.shape[0], dtype=torch.float32)

    def logits(self, tile: _Tile, buffer: Tensor) -> Tensor:
        """x @ weight.T of a tile, (rows, columns), in `buffer`."""
        of_tile = tile.of_rows(self.x), self.weight_of(tile).t()
        return (gemm if self.own else torch.mm)(*of_tile, out=_in(buffer, tile))

    def weight_of(self, tile: _Tile) -> Tensor:
        """(columns, width), in the dtype of x."""
        part = tile.of_columns(self.weight)
        return part if part.dtype == self.x.dtype else part.to(self.x.dtype)

    def see(self, tile: _Tile, logits: Tensor, state: Tensor) -> None:
        of_rows = tile.of_rows(state).data_ptr()
        self.kernels[0](*self._arguments(tile, logits), of_rows, *workers(self.x))

    def loss(self, tile: _Tile, state: Tensor, log_sum: Tensor) -> tuple[Tensor, bool]:
        """Of the tokens of a tile, for which all entries were seen: the sum of their losses, (), float32, and
        whether their labels are known to be right, which a GPU does not say. Sets their log_sum."""
        loss = self.x.new_empty((), dtype=torch.float32)
        right: bool = self.kernels[2](
            tile.of_rows(state).data_ptr(),
            tile.rows,
            tile.of_rows(self.labels).data_ptr(),
            self.shape[1],
            self.ignore_index,
            self.smoothing,
            tile.of_rows(log_sum).data_ptr(),
            loss.data_ptr(),
            *workers(self.x),
        )
        return loss, right

    def to_gradient(self, tile: _Tile, logits: Tensor, log_sum: Tensor, grad: float) -> None:
        """In place."""
        shares = (1.0 - self.smoothing, self.smoothing / max(self.weight.shape[0], 1), grad)
        of_rows = tile.of_rows(log_sum).data_ptr()
        self.kernels[1](*self._arguments(tile, logits), of_rows, *shares, *workers(self.x))

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
        if self.dx is not None:
            self._add(tile.of_rows(self.dx), g, self.head.weight_of(tile))
        if self.dw is not None:
            self._add(tile.of_columns(self.dw), g.t(), tile.of_rows(self.head.x))
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


def check_labels(labels: Tensor, entries: int, ignore_index: int) -> None:
    """Raises ValueError for a label that is neither of the vocabulary nor ignored."""
    if not labels.numel():
        return
    low, high = torch.aminmax(labels)
    if int(low) >= 0 and int(high) < entries:
        return
    wrong = labels[((labels < 0) | (labels >= entries)) & (labels != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"linear_cross_entropy: label {int(wrong[0])} with a vocabulary of {entries} entries: labels "
            f"must be in [0, {entries}) or ignore_index={ignore_index}; check the vocabulary of the data"
        )


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
    """Loss (), log-sum-exp (N,), and with `keep`, for `backward`, the buffer whose beginning is the last tile
    of logits. Called where nothing is recorded. Raises ValueError for a label out of range."""
    head = _Head.of(x, weight, labels, bias, ignore_index, smoothing, own)
    buffer, state, log_sum = head.buffer(), head.state(), head.log_sum()
    for tile in head.tiles():
        head.see(tile, head.logits(tile, buffer), state)
    loss, right = head.loss(head.whole(), state, log_sum)
    if not right:
        check_labels(labels, weight.shape[0], ignore_index)
    return loss, log_sum, buffer if keep else None


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
    buffer = head.buffer() if kept is None else kept
    for tile in reversed(head.tiles()):
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
    found, scale = _Gradients(head, want, into, late=True), float(grad)
    state, log_sum = head.state(), head.log_sum()
    buffer = x.new_empty(late_elements(*head.shape, x.dtype.itemsize))
    for tiles in head.late_tiles():
        logits = [head.logits(t, buffer[t.rows * t.first :]) for t in tiles]
        for tile, of_tile in zip(tiles, logits, strict=True):
            head.see(tile, of_tile, state)
        head.loss(tiles[0], state, log_sum)
        for tile, g in zip(tiles, logits, strict=True):
            head.to_gradient(tile, g, log_sum, scale)
            found.add(tile, g)
    return head.loss(head.whole(), state, log_sum)[0], *found.results(bias)
