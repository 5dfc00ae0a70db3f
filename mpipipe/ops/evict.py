"""Tensors out of the caches, so that a timing finds them where a step of a large model does: in memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mpipipe.ops.native import by_device

_KERNELS = by_device({"": ("evict",)}, ["cpu"])


def evict(tensors: Iterable[Tensor]) -> None:
    """Drops contiguous tensors out of every cache; their values stay. Nothing without the compiled kernels,
    on a processor that has no instruction for it, or for tensors of a GPU."""
    for t in tensors if _KERNELS else ():
        if t.is_cpu:
            _KERNELS["cpu", ""][0](t.data_ptr(), t.nbytes)
