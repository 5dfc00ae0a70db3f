"""The compiled kernels, or None: then every op uses numpy and torch, slower."""

from __future__ import annotations

import torch  # noqa: F401 - first: the kernels' threads are those of the OpenMP runtime that torch brought

from mpipipe.native import instruction_set, load

KERNELS_VERSION = "5"  # of the functions that mpipipe/ops calls; kernels/bind.cpp holds the same
kernels = load(
    f"_kernels_{instruction_set()}",
    KERNELS_VERSION,
    "random ops run on numpy, with the same results but several times slower",
)
