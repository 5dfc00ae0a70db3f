"""Random tensors out of the stream: uniform, normal, integers, coin flips.

Each takes the name of its stream (key, step, micro) last, and fills a tensor in contiguous order from
element 0. Numbers are made on the CPU and moved to `device`. Gradients do not pass (as in torch).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.ops.dropout import shape_only
from mpipipe.ops.philox import threshold, words

# Bits of a word that `uniform` keeps: the significand, so that no dtype rounds a draw up to 1.
_BITS = {torch.float64: 24, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(
    shape: Sequence[int],
    key: int,
    step: int,
    micro: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> torch.Tensor:
    """Uniform in [0, 1): the top 24 bits of a word (float16: 11, bfloat16: 8) times 2**-24."""
    bits = _BITS[_floating(dtype)]
    top = words(key, step, micro, _count(shape)) >> np.uint32(32 - bits)
    return _tensor(top.astype(np.float64) * 2.0**-bits, shape, dtype, device)


def normal(
    shape: Sequence[int],
    key: int,
    step: int,
    micro: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> torch.Tensor:
    """Mean 0, variance 1, by Box and Muller (1958) in float64, then rounded to dtype.

    Elements 2j and 2j + 1 are r cos(a) and r sin(a) of words 2j and 2j + 1, with
    r = sqrt(-2 ln((w + 1) 2**-32)) and a = 2 pi w' 2**-32; no draw is further than 6.7 from 0.
    """
    n = _count(shape)
    pairs = words(key, step, micro, n + n % 2).astype(np.float64).reshape(-1, 2) * 2.0**-32
    radius, angle = np.sqrt(-2.0 * np.log(pairs[:, 0] + 2.0**-32)), 2.0 * np.pi * pairs[:, 1]
    z = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:n]
    return _tensor(z, shape, _floating(dtype), device)


def integers(
    low: int,
    high: int,
    shape: Sequence[int],
    key: int,
    step: int,
    micro: int,
    *,
    dtype: torch.dtype = torch.int64,
    device: str = "cpu",
) -> torch.Tensor:
    """Integers in [low, high): low + (word * (high - low) >> 32), so even to (high - low) / 2**32.

    Raises ValueError for an empty range or one above 2**32."""
    span = high - low
    if not 0 < span <= 1 << 32:
        raise ValueError(f"random integers in [{low}, {high}): the range must hold 1 to 2**32 values")
    scaled = words(key, step, micro, _count(shape)).astype(np.uint64) * np.uint64(span) >> np.uint64(32)
    return _tensor(scaled.astype(np.int64) + low, shape, dtype, device)


def bernoulli(probabilities: torch.Tensor, key: int, step: int, micro: int) -> torch.Tensor:
    """1 with the probability that the same element of `probabilities` holds, else 0; its shape and dtype.

    Raises ValueError for a probability outside [0, 1]."""
    if shape_only(probabilities):
        return torch.empty_like(probabilities, memory_format=torch.contiguous_format)
    p = probabilities.detach().to("cpu", torch.float64).contiguous().numpy().reshape(-1)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"bernoulli: probabilities from {p.min()} to {p.max()}; they must be between 0 and 1"
        )
    ones = words(key, step, micro, p.size) < np.rint(p * 2.0**32)
    return _tensor(ones, probabilities.shape, probabilities.dtype, str(probabilities.device))


def bernoulli_like(x: torch.Tensor, p: float, key: int, step: int, micro: int) -> torch.Tensor:
    """1 with probability p, else 0; shape and dtype of x."""
    ones = words(key, step, micro, x.numel()) < threshold(p)
    return _tensor(ones, x.shape, x.dtype, str(x.device))


def uniform_like(x: torch.Tensor, key: int, step: int, micro: int) -> torch.Tensor:
    """`uniform` with the shape, dtype and device of x."""
    return uniform(x.shape, key, step, micro, dtype=x.dtype, device=str(x.device))


def normal_like(x: torch.Tensor, key: int, step: int, micro: int) -> torch.Tensor:
    """`normal` with the shape, dtype and device of x."""
    return normal(x.shape, key, step, micro, dtype=x.dtype, device=str(x.device))


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _BITS:
        raise ValueError(f"random {dtype}: the dtype must be one of {', '.join(map(str, _BITS))}")
    return dtype


def _tensor(
    values: NDArray[np.generic], shape: Sequence[int], dtype: torch.dtype, device: str
) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype).view(tuple(shape)).to(device)
