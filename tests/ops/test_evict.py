"""Data out of the caches: its values stay, those that nobody has written back included."""

from __future__ import annotations

import platform

import pytest
import torch

from mpipipe.ops.evict import evict
from mpipipe.ops.native import kernels


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 100_003])
def test_values_stay(n):
    x = torch.arange(n, dtype=torch.float32)
    evict([x, x[1:]])  # also from within a line
    assert torch.equal(x, torch.arange(n, dtype=torch.float32))


def test_this_processor_can():
    if kernels is None:
        pytest.skip("no compiled kernels")
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("no instruction for it")
    x = torch.ones(1000)
    assert kernels.evict(x.data_ptr(), x.nbytes)
