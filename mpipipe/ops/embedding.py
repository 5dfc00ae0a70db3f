"""Rows of a table, whose gradient goes straight into the table's `.grad`.

    forward   y[...] = weight[indices[...]]
    backward  sums of dy[...] by row, in the order of the indices;  weight.grad[rows] += sums

Torch makes a gradient of the table's size, zeroes it, adds the same sums to its rows, and adds all of it. On
a processor the bits are the same: what is left out are additions of zero. For 256 tokens and a table of
32,000 x 768 that is 0.03 instead of 50 ms. Where `.grad` does not exist, a dense gradient is returned
(mpipipe/ops/gradients.py says when). The same bits for any number of threads, and without the kernel, which
float32 has.

On a GPU only the kernel does so, with the bits of the processor: torch's dense gradient, which is returned
without it, is summed in another order there.

A table that is also a head has a gradient of its size anyway: `keep_rows` lets the rows of the look-ups wait
beside it until they are added to it, once a step, in place of a second gradient of that size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpipipe.ops.gradients import destination, has_data, leaf_of
from mpipipe.ops.library import Function, define, differentiate, traced, written
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.pointers import overlap

_KEPT = "_mpipipe_row_sums"  # attribute of a leaf
_KERNELS = by_device({torch.float32: ("embedding_backward_f32",)}, ("cpu", "cuda"))


def embedding(indices: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of weight: indices (...) int64 or int32, weight (V, d) -> (..., d).

    padding_idx: an entry, negative ones from the end, that gets no gradient. Raises ValueError for a table
    that has not two dimensions, for indices of another dtype or device, for an index outside of the table."""
    if (
        weight.dim() != 2
        or indices.dtype not in (torch.int64, torch.int32)
        or indices.device != weight.device
    ):
        raise ValueError(
            f"embedding of indices {tuple(indices.shape)} {indices.dtype} on {indices.device} in a table "
            f"{tuple(weight.shape)} on {weight.device}: indices must be int64 or int32, the table (V, d), "
            "both on one device"
        )
    padding = _padding(padding_idx, weight.shape[0])
    try:
        if traced(indices, weight):
            return torch.ops.mpipipe.embedding(indices, weight, padding)
        if weight.requires_grad and torch.is_grad_enabled():
            return _Embedding.apply(indices, weight, padding)
        return _rows(indices, weight, padding)
    except IndexError:
        raise _outside(indices, weight.shape[0]) from None


def _outside(indices: Tensor, entries: int) -> ValueError:
    return ValueError(
        f"embedding: indices go from {int(indices.min())} to {int(indices.max())}, the table has "
        f"{entries} entries, 0 to {entries - 1}; check the vocabulary of model and data"
    )


def _padding(padding_idx: int | None, entries: int) -> int:
    """As torch counts: -1 for none."""
    if padding_idx is None:
        return -1
    if not -entries <= padding_idx < entries:
        raise ValueError(f"embedding: padding_idx={padding_idx} is outside of a table of {entries} entries")
    return padding_idx % entries


def _rows(indices: Tensor, weight: Tensor, padding: int) -> Tensor:
    return torch.embedding(weight, indices, padding)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    indices, weight, ctx.padding = inputs
    ctx.entries = weight.shape[0]
    ctx.save_for_backward(indices)


def _backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
    (indices,) = ctx.saved_tensors
    # without a kernel, index_add_ on a GPU is atomic additions in any order; of shorter floats it rounds a
    # sum once, not each
    exact = sums_by_row(dy.device.type, dy.dtype) and has_data(dy)
    kept = getattr(leaf_of(ctx, 1), _KEPT, None) if exact else None
    if kept is not None:
        kept.add(*row_sums(dy, indices, ctx.padding))
        return None, None, None
    grad = destination(ctx, 1) if exact else None
    if grad is None:
        return None, _dense(dy, indices, ctx.entries, ctx.padding), None
    add_row_sums(grad, indices, dy, ctx.padding)
    return None, None, None


def _dense(dy: Tensor, indices: Tensor, entries: int, padding: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(dy, indices, entries, padding, False)


def sums_by_row(device: str, dtype: torch.dtype) -> bool:
    """Whether the gradient of such a table is summed row by row, each in the order of the look-ups."""
    return (device == "cpu" and dtype in (torch.float32, torch.float64)) or (device, dtype) in _KERNELS


def add_row_sums(grad: Tensor, indices: Tensor, dy: Tensor, padding: int = -1) -> None:
    """grad[row] += the sum of dy[i] over indices[i] == row, made in the order of i and added once; nothing to
    the padding. grad (V, d), indices (...), dy (..., d). Raises an error for an index outside of grad; a GPU
    fails, as for torch's look-up."""
    if not _by_kernel(grad, indices, dy, padding):
        grad.index_add_(0, *row_sums(dy, indices, padding))


def row_sums(dy: Tensor, indices: Tensor, padding: int = -1) -> tuple[Tensor, Tensor]:
    """Rows (n,), each once, and the sums of dy[i] over indices[i] == row, (n, d); 0 for the padding. dy
    (..., d)."""
    rows, place = indices.reshape(-1).unique(return_inverse=True)
    sums = dy.new_zeros(len(rows), dy.shape[-1])
    _index_add(sums, place, dy.reshape(len(place), dy.shape[-1]))
    if padding >= 0:
        sums[rows == padding] = 0
    return rows, sums


def _index_add(total: Tensor, rows: Tensor, x: Tensor) -> None:
    """total[rows[i]] += x[i], of rows that come once or begin at 0: any way has the same bits."""
    if not _by_kernel(total, rows, x):
        total.index_add_(0, rows, x)


def _by_kernel(grad: Tensor, indices: Tensor, dy: Tensor, padding: int = -1) -> bool:
    """Whether there is a kernel for it, which has done `add_row_sums` then."""
    device = device_type(grad)
    kernel = _KERNELS.get((device, grad.dtype))
    alike = dy.dtype == grad.dtype and dy.device == indices.device == grad.device
    if kernel is None or not alike or not grad.is_contiguous():
        return False
    indices = indices.reshape(-1).long().contiguous()
    dy = dy.reshape(len(indices), grad.shape[1]).contiguous()
    if overlap(grad, dy):
        dy = dy.clone()
    # for a GPU rows and their places; nobody waits for its answer
    looked_up = (indices,) if device == "cpu" else torch.sort(indices, stable=True)
    inside = kernel[0](
        dy.data_ptr(), *(t.data_ptr() for t in looked_up), *dy.shape, padding, grad.data_ptr(), grad.shape[0],
        *workers(grad),
    )  # fmt: skip
    if inside is False:
        raise _outside(indices, grad.shape[0])
    written(grad)
    return True


class RowSums:
    """What backward adds to some rows of a table, while they wait."""

    def __init__(self) -> None:
        self._added: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor, sums: Tensor) -> None:
        """rows (n,), each once; sums (n, d)."""
        self._added.append((rows, sums))

    @torch.no_grad()
    def into(self, gradient: Tensor) -> None:
        """gradient[row] += what was added to the row, summed up in that order before; then nothing waits.
        gradient (V, d)."""
        if not self._added:
            return
        rows, place = torch.cat([rows for rows, _ in self._added]).unique(return_inverse=True)
        total = gradient.new_zeros(len(rows), gradient.shape[1])
        for at in place.split([len(rows) for rows, _ in self._added]):
            _index_add(total, at, self._added.pop(0)[1])  # all of them at once would be there twice
        _index_add(gradient, rows, total)

    def forget(self) -> None:
        self._added.clear()


def keep_rows(table: Tensor) -> RowSums:
    """Of all look-ups in a leaf, from now on, what backward adds to it; `sums_by_row` is so for it."""
    kept = RowSums()
    setattr(table, _KEPT, kept)
    return kept


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int) -> Tensor:
        rows = _rows(indices, weight, padding)
        _setup(ctx, (indices, weight, padding), rows)
        return rows

    backward = staticmethod(_backward)


define("embedding(Tensor indices, Tensor weight, int padding) -> Tensor", _rows, _rows)
differentiate("embedding", _backward, _setup)
