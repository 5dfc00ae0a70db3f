"""The hot loop of each kernel works on whole vectors: a compiler that gives up on one says nothing.

Of the modules that are built here; tests/kernels/test_check.py looks at those for aarch64.
"""

from __future__ import annotations

import importlib.util
import shutil
from functools import cache
from pathlib import Path

import pytest
from disassembly import Instruction, count, functions
from kernel_loops import LOOPS, REGISTERS


@cache
def built(instruction_set: str) -> dict[str, list[Instruction]]:
    if shutil.which("objdump") is None:
        pytest.skip("no objdump (Debian: apt install binutils)")
    spec = importlib.util.find_spec(f"mpipipe._kernels_{instruction_set}")
    if spec is None or spec.origin is None:
        pytest.skip(f"mpipipe._kernels_{instruction_set} is not built on this machine")
    return functions(Path(spec.origin))


@pytest.mark.parametrize("instruction_set", ["base", "v3", "v4", "v4_bf16"])
@pytest.mark.parametrize("kernel", LOOPS)
@pytest.mark.slow
def test_the_hot_loop_works_on_vectors(kernel: str, instruction_set: str) -> None:
    loop, registers = LOOPS[kernel], REGISTERS[instruction_set]
    names = loop.x86_of(instruction_set)
    found = count(built(instruction_set), loop.symbol, names, registers)
    assert found >= loop.least, f"{kernel}: {found} of {names} on {registers}"


@pytest.mark.slow
def test_bf16_products_are_made_by_their_units() -> None:
    """Where the set has any: in the tiles of attention, forward and backward."""
    found = built("v4_bf16")
    assert count(found, r"mpipipe::(block|panels?|multiply)<.*Pairs", "vdpbf16ps", "%zmm") >= 8
