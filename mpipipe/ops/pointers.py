"""Tensors as the compiled kernels take them: addresses, after the checks that keep it in their memory, and
sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpipipe.ops.native import workers


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def address(x: torch.Tensor | None) -> int:
    """0 for None."""
    return 0 if x is None else x.data_ptr()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one has memory between the first and the last element of the other."""
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(x: torch.Tensor) -> int:
    """The address behind the last element."""
    if x.is_contiguous():
        return x.data_ptr() + x.nbytes
    steps = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (x.itemsize * (steps + 1) if x.numel() else 0)


def rows_of(x: torch.Tensor) -> int:
    """Of x (..., d); 0 where d is."""
    d = x.shape[-1]
    return x.numel() // d if d else 0


def row_sizes(x: torch.Tensor) -> tuple[int, ...]:
    """Rows and d of x (..., d), and who computes."""
    return rows_of(x), x.shape[-1], *workers(x)


def check(
    name: str, x: torch.Tensor, shape: Sequence[int], like: torch.Tensor, any_dtype: bool = False
) -> None:
    """Raises ValueError unless the argument `name` has this shape, and the dtype and device of `like`."""
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have {tuple(shape)}")
    if x.dtype != like.dtype and not any_dtype:
        raise ValueError(f"{name} is {x.dtype}, other arguments are {like.dtype}; cast one of them")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, other arguments are on {like.device}; move one of them")


def refuse_dtypes(of: str, x: torch.Tensor, error: RuntimeError, **others: torch.Tensor | None) -> None:
    """Raises ValueError for torch's refusal where an argument has another dtype than x; torch takes some."""
    for name, t in others.items():
        if t is not None and t.dtype != x.dtype:
            said = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"{of}: {name} is {t.dtype}, x is {x.dtype}; cast one of them (torch says: {said})"
            )


def pointer(name: str, x: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> int:
    """Address of the elements of `x`, contiguous, after `check`; 0 for None. ValueError for other strides."""
    if x is None:
        return 0
    # all checks at once, some hundred nanoseconds: every eager call passes here
    served = (x.is_cpu and (x is like or like.is_cpu)) or (x.is_cuda and x.device == like.device)
    if served and (x is like or x.dtype is like.dtype) and x.is_contiguous() and x.shape == shape:
        return x.data_ptr()
    check(name, x, shape, like)
    if not served:
        raise ValueError(f"{name} is on {x.device}; the compiled kernels take tensors of the CPU or of a GPU")
    raise ValueError(f"{name} has strides {x.stride()} for shape {tuple(x.shape)}; call contiguous() first")
