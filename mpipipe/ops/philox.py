"""The random stream of a run, in numpy: Philox4x32-10 (Salmon et al. 2011).

    run seed, node name --blake2b--> key (64 bit)          one stream per (key, step, micro)
    block b of the stream = cipher(counter = (b low, b high, step, micro), key)   -> 4 words
    element i of a tensor, in contiguous order = word i % 4 of block i // 4

Nothing here depends on ranks, cuts, threads or the order of calls, so the numbers of a micro-batch are
the same in every layout, and a mask can be drawn again in the backward pass instead of being kept.
The stream is final: changing it changes the bits of every run. kernels/include/mpipipe/philox.h states
the same contract for C++.
"""

from __future__ import annotations

import hashlib
from typing import SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray

from mpipipe.ops.native import by_device

UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]

_KERNELS = by_device({"": ("words",)}, ["cpu"])
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BLOCKS_AT_ONCE = 1 << 14  # keeps the temporaries of one piece in the second-level cache


def stream_key(seed: int, name: str) -> int:
    """Key of the random node `name` (canonical) in a run with this seed: 64 bits, unsigned."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode()).digest()[:8], "little")


def philox4x32(c0: UInt64, c1: UInt64, c2: int, c3: int, key: int) -> UInt32:
    """The cipher on many counters at once: (n,) and (n,) -> (n, 4) words.

    Every lane is a 32-bit value in a 64-bit array, so that a product keeps its high half.
    """
    lanes = [c0, c1, np.full_like(c0, c2), np.full_like(c0, c3)]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = lanes[0] * np.uint64(0xD2511F53), lanes[2] * np.uint64(0xCD9E8D57)
        lanes = [
            (b >> _HALF) ^ lanes[1] ^ np.uint64(k0),
            b & _LOW,
            (a >> _HALF) ^ lanes[3] ^ np.uint64(k1),
            a & _LOW,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(lanes, axis=1).astype(np.uint32)


def philox_words(key: int, step: int, micro: int, n: int, start: int = 0) -> UInt32:
    """Elements [start, start + n) of the stream, (n,) uint32. The meaning that kernels must match.

    Raises ValueError for a key, step or micro outside its width."""
    check_stream(key, step, micro)
    first, last = start // 4, (start + n + 3) // 4
    out = np.empty((last - first, 4), np.uint32)
    for low in range(first, last, _BLOCKS_AT_ONCE):
        block = np.arange(low, min(low + _BLOCKS_AT_ONCE, last), dtype=np.uint64)
        out[low - first : low - first + len(block)] = philox4x32(
            block & _LOW, block >> _HALF, step, micro, key
        )
    return out.reshape(-1)[start - 4 * first :][:n]


def words(key: int, step: int, micro: int, n: int, start: int = 0) -> UInt32:
    """`philox_words` by the compiled kernel when there is one."""
    found = _KERNELS.get(("cpu", ""))
    if found is None:
        return philox_words(key, step, micro, n, start)
    check_stream(key, step, micro)
    out = np.empty(n, np.uint32)
    found[0](key, step, micro, start, out.ctypes.data, n, torch.get_num_threads())
    return out


def check_stream(key: int, step: int, micro: int) -> None:
    """Raises ValueError unless key is an integer of 64 bits and step and micro of 32, none below 0."""
    whole = type(key) is type(step) is type(micro) is int  # soonest: every eager call passes here
    whole = whole or all(isinstance(n, SupportsIndex) for n in (key, step, micro))
    if not (whole and 0 <= key < 1 << 64 and 0 <= step < 1 << 32 and 0 <= micro < 1 << 32):
        raise ValueError(
            f"random stream (key={key}, step={step}, micro={micro}): all must be integers, the key in "
            "[0, 2**64), step and micro in [0, 2**32); make the key with stream_key(seed, node name)"
        )


def threshold(p: float) -> int:
    """The words below it are an event of probability p: round(p * 2**32), so p = 1 is every word.

    Raises ValueError unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"probability p={p}: it must be between 0 and 1")
    return round(p * 2.0**32)
