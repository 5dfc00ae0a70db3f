"""Tensors out of the caches, so that a timing finds them where a step of a large model does: in memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mpipipe.ops.native import kernels


def evict(tensors: Iterable[Tensor]) -> None:
    """Drops contiguous tensors out of every cache; their values stay. Nothing without the compiled kernels,
    on a processor that has no instruction for it, or for tensors of a GPU."""
    for t in tensors if kernels is not None else ():
        if t.is_cpu:
            kernels.evict(t.data_ptr(), t.nbytes)  # type: ignore[union-attr]
