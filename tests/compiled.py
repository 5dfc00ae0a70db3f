"""What must not change the bits of a kernel: the threads, and the instruction set that it was built for."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from mpipipe.native import SETS, flags


def with_threads(run: Callable[[], Any], threads: tuple[int, ...] = (1, 2, 3)) -> list[Any]:
    """Results of `run` at each number of torch's threads."""
    before, found = torch.get_num_threads(), []
    try:
        for n in threads:
            torch.set_num_threads(n)
            found.append(run())
    finally:
        torch.set_num_threads(before)
    return found


def instruction_sets() -> Iterator[ModuleType]:
    """The compiled kernels for every instruction set that this processor runs."""
    found = flags()
    for name, needs in SETS.get(platform.machine(), {"base": frozenset[str]()}).items():
        if needs <= found:
            yield importlib.import_module(f"mpipipe._kernels_{name}")
