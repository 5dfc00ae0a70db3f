"""The compiled kernels, or None: then every op uses numpy and torch, with the same bits, slower."""

from __future__ import annotations

from mpipipe.native import load

KERNELS_VERSION = "3"  # of the functions that mpipipe/ops calls; kernels/bind.cpp holds the same
kernels = load(
    "_kernels",
    KERNELS_VERSION,
    "random ops run on numpy, with the same results but several times slower",
)
