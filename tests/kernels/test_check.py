"""Every kernel against its reference without Python (kernels/check): sanitized here, emulated for aarch64."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from compiling import COMPILER, KERNELS, SANITIZED, program
from disassembly import Instruction, count, functions
from kernel_loops import FIXED, LOOPS

from mpipipe import native

MACHINE = platform.machine()
HERE = [
    name for name, needs in native.SETS.get(MACHINE, {"base": frozenset()}).items() if needs <= native.flags()
]
CROSS = "aarch64-linux-gnu-"
EMULATOR = "qemu-aarch64"


def checked(command: Sequence[str]) -> str:
    """What the checker prints, once it has found nothing."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    assert re.findall(r"[1-9][0-9]* comparisons, 0 failed", done.stdout)
    return done.stdout


@pytest.mark.kernels
def test_sanitized(tmp_path: Path) -> None:
    """On the instruction set that this machine uses."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} (CXX names another compiler)")
    check = program(tmp_path, MACHINE, HERE[0], SANITIZED)
    assert f"instruction set {HERE[0]}," in checked([str(check)])


@pytest.mark.full
@pytest.mark.parametrize("instruction_set", HERE[1:])
def test_sanitized_on_lesser_sets(instruction_set: str, tmp_path: Path) -> None:
    checked([str(program(tmp_path, MACHINE, instruction_set, SANITIZED))])


@cache
def cross_compiled(folder: Path, instruction_set: str) -> Path:
    for tool in (f"{CROSS}g++", EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} (Debian: apt install g++-aarch64-linux-gnu qemu-user)")
    into = folder / f"aarch64-{instruction_set}"
    into.mkdir()
    return program(into, "aarch64", instruction_set, ["-static"], f"{CROSS}g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cross")


@pytest.mark.full
def test_armv8(folder: Path) -> None:
    said = checked([EMULATOR, "-cpu", "cortex-a53", str(cross_compiled(folder, "base"))])
    assert "set base, vectors of 16 bytes" in said


@pytest.mark.full
@pytest.mark.parametrize("bits", [128, 256, 512])
def test_sve(folder: Path, bits: int) -> None:
    """The length of a vector is the processor's: one program, three lengths."""
    said = checked([EMULATOR, "-cpu", f"max,sve{bits}=on", str(cross_compiled(folder, "sve"))])
    assert f"set sve, vectors of {bits // 8} bytes" in said


@cache
def disassembled(path: Path) -> dict[str, list[Instruction]]:
    return functions(path, f"{CROSS}objdump")


@pytest.mark.full
@pytest.mark.parametrize("instruction_set", ["base", "sve"])
@pytest.mark.parametrize("kernel", LOOPS)
def test_the_hot_loop_works_on_vectors_of_aarch64(kernel: str, instruction_set: str, folder: Path) -> None:
    loop, found = LOOPS[kernel], disassembled(cross_compiled(folder, instruction_set))
    registers = FIXED if instruction_set == "base" else loop.arm_registers
    assert count(found, loop.symbol, loop.arm, registers) >= loop.least


def test_every_kernel_has_a_reference_and_a_check() -> None:
    """evict and reuse change no value: they have nothing to compare."""
    contracts = {path.stem for path in (KERNELS / "include" / "mpipipe").glob("*.h")} - {"evict", "reuse"}
    of_gpus = {path.stem for path in (KERNELS / "cuda").glob("*.cu")} - {"flash_attention_backward"}
    kernels = {path.stem for path in (KERNELS / "cpu").glob("*.cpp")} & contracts
    assert of_gpus <= contracts
    for folder in ("reference", "check"):
        assert kernels <= {path.stem for path in (KERNELS / folder).glob("*.cpp")}, folder
