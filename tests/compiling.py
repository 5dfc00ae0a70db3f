"""kernels/check as a program, compiled as setup.py compiles the kernels, for any instruction set."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[1]
KERNELS = REPOSITORY / "kernels"
COMPILER = os.environ.get("CXX", "c++")
FOLDERS = ("check", "cpu", "reference")
# -O2: the bounds of every vector loop are those of -O3, and the checks of each access are inlined less;
# -g1: files and lines, which is what a sanitizer says
SANITIZED = ("-O2", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@cache
def setup() -> dict[str, Any]:
    """The names in setup.py, and under `given` what it hands to setuptools."""
    with mock.patch("setuptools.setup") as to_setuptools:
        here = os.getcwd()
        os.chdir(REPOSITORY)
        try:
            names = runpy.run_path("setup.py")
        finally:
            os.chdir(here)
    return names | {"given": to_setuptools.call_args.kwargs}


def flags(machine: str, instruction_set: str) -> list[str]:
    """Of the compiler for one instruction set of one machine."""
    return ["-std=c++17", "-O3", *setup()["SETS"][machine][instruction_set], *setup()["FAST"]]


def emulated(folder: Path) -> Path:
    """The checker of the kernels for GPUs, in `folder`, the processor in a GPU's place (check/emulated).

    Raises subprocess.CalledProcessError where it does not compile."""
    common = [
        COMPILER, "-std=c++17", "-O2", "-U_FORTIFY_SOURCE", '-DMPIPIPE_SET="emulated"',
        f"-I{KERNELS / 'check' / 'emulated'}", f"-I{KERNELS / 'include'}",
    ]  # fmt: skip
    kernels = {path: ["-x", "c++"] for path in (KERNELS / "cuda").glob("*.cu")}
    ours = {path.stem for path in kernels}
    checks = {
        # where a CHECK says cpu, the kernels for GPUs are meant
        path: ["-Dcpu=cuda"]
        for path in (KERNELS / "check").glob("*.cpp")
        if path.stem in {*ours, "main"}
    }
    rest = {
        path: list[str]()
        for name in ("reference", "check/emulated")
        for path in (KERNELS / name).glob("*.cpp") if path.stem in {*ours, "fibers"}
    }  # fmt: skip
    sources = kernels | checks | rest
    objects = {path: folder / f"{path.parent.name}_{path.stem}.o" for path in sources}

    def compile_one(path: Path) -> None:
        command = [*common, *sources[path], "-c", str(path), "-o", str(objects[path])]
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources))
    done = folder / "check"
    subprocess.run([*common, *map(str, objects.values()), "-o", str(done)], check=True)
    return done


def program(
    folder: Path, machine: str, instruction_set: str, more: Sequence[str] = (), compiler: str = COMPILER
) -> Path:
    """The checker, in `folder`. Raises subprocess.CalledProcessError where it does not compile."""
    common = [
        compiler, *flags(machine, instruction_set), *more,
        f'-DMPIPIPE_SET="{instruction_set}"', f"-I{KERNELS / 'include'}",
    ]  # fmt: skip
    sources = sorted(path for name in FOLDERS for path in (KERNELS / name).glob("*.cpp"))
    objects = [folder / f"{source.parent.name}_{source.stem}.o" for source in sources]

    def compile_one(source: Path, to: Path) -> None:
        subprocess.run([*common, "-c", str(source), "-o", str(to)], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    done = folder / "check"
    subprocess.run([*common, *map(str, objects), "-o", str(done)], check=True)
    return done
