"""Tensors that are made and freed find their place again; addresses stay aligned, values stay."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from mpipipe.ops.native import kernels

# Each in a process of its own: the change is for good. The small blocks stay and take the ends that were cut
# off, as the objects of a step's graph do; the equal tensors are made and freed again and again.
PROGRAM = """
import ctypes, random, sys, torch
from mpipipe.cluster.memory import KEPT_BYTES, PeakMemory, keep_freed_memory
from mpipipe.ops.reuse import reuse_freed_blocks
keep_freed_memory()
redirected = reuse_freed_blocks(KEPT_BYTES) if sys.argv[1] == "with" else 0
malloc, memory, draw = ctypes.CDLL(None).malloc, PeakMemory(), random.Random(0)
tensors = [torch.ones(4096 * draw.randint(1, 4)) for _ in range(200)]
for _ in range(6000):
    i = draw.randrange(200)
    n, tensors[i] = tensors[i].numel(), None
    malloc(24 + 16 * draw.randrange(5))
    tensors[i] = torch.ones(n)
assert all(t.data_ptr() % 64 == 0 and bool((t == 1).all()) for t in tensors)
print(redirected, memory.nbytes)
"""


def held(how: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    redirected, nbytes = map(int, done.stdout.split())
    return redirected, nbytes


def test_less_is_held_where_calls_are_redirected():
    if kernels is None:
        pytest.skip("no compiled kernels")
    redirected, nbytes = held("with")
    if not redirected:
        libc = " ".join(platform.libc_ver())
        pytest.skip(f"{libc} needs no mending")
    without = held("without")[1]
    assert nbytes < without / 2  # about a tenth
    assert torch.ones(1).data_ptr() % 64 == 0
