"""The compiled parts of the package: plain C++17, no libtorch.

    mpipipe._kernels_<set>   kernels/           what mpipipe/ops calls on tensors, once per instruction set
    mpipipe._kernels_cuda    kernels/cuda/      the same for GPUs; only with MPIPIPE_CUDA=1, by nvcc
    mpipipe._planner         kernels/planner/   the hot loops of mpipipe/planner, on numbers alone

No -march=native: the same files must run on every node of a cluster, and mpipipe/native.py loads the one
for the processor that it finds. Each instruction set is an extension of its own, so that no inline function
of the one can be linked into another.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, setup

KERNELS = ("bind.cpp", "cpu/*.cpp", "reference/*.cpp")
PLANNER = ("planner/*.cpp",)
SETS = {  # machine -> instruction set -> flags; mpipipe/native.py knows the same names
    "x86_64": {
        "base": ["-march=x86-64"],
        "v3": ["-march=x86-64-v3"],
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        "v4_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
    },
    "aarch64": {"base": ["-march=armv8-a"], "sve": ["-march=armv8.2-a+sve"]},
}
CUDA = "mpipipe._kernels_cuda"
# Ampere and Hopper as machine code; newer GPUs compile the last one's intermediate code when it is loaded.
CUDA_FLAGS = [
    *("-std=c++17", "-O3", "-Ikernels/include", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
    *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
]
# The planner's results must not depend on the compiler: no fused multiply-adds. The kernels may fuse, but
# neither reorder sums nor assume that no NaN or infinity occurs.
EXACT = ["-ffp-contract=off"]
FAST = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]


def extension(
    name: str, patterns: tuple[str, ...], flags: list[str], libraries: list[str]
) -> Pybind11Extension:
    root = Path("kernels")
    return Pybind11Extension(
        name,
        sorted(str(path) for pattern in patterns for path in root.glob(pattern)),
        depends=sorted(map(str, root.rglob("*.h"))),
        include_dirs=["kernels/include"],
        cxx_std=17,
        extra_compile_args=["-O3", "-Wall", "-Wextra", *flags],
        extra_link_args=libraries,
    )


def kernels(name: str, flags: list[str]) -> Pybind11Extension:
    module = f"_kernels_{name}"
    flags = [*flags, *FAST, f"-DMPIPIPE_MODULE={module}", f'-DMPIPIPE_SET="{name}"']
    return extension(f"mpipipe.{module}", KERNELS, flags, ["-fopenmp"])


def build_cuda(folder: Path, module: Path) -> None:
    """The module for GPUs, compiled and linked by nvcc, with objects in `folder`."""
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if nvcc is None:
        sys.exit("MPIPIPE_CUDA=1, but no nvcc on the PATH: install the CUDA toolkit, or name it by NVCC=...")
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted([*Path("kernels/cuda").glob("*.cu"), Path("kernels/cuda/bind.cpp")])
    objects = [folder / f"{source.name}.o" for source in sources]
    includes = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]

    def run(*arguments: str | Path) -> None:
        command = [nvcc, *CUDA_FLAGS, *includes, *map(str, arguments)]
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, to: run("-c", source, "-o", to), sources, objects))
    run("-shared", "-cudart", "static", *objects, "-o", module)


class BuildEachApart(build_ext):
    """An object file per source and instruction set: in one folder a source would be compiled once."""

    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.build_temp, ext.name)
        if ext.name == CUDA:
            module = Path(self.get_ext_fullpath(ext.name))
            module.parent.mkdir(parents=True, exist_ok=True)
            build_cuda(folder, module)
            return
        common = self.build_temp
        self.build_temp = str(folder)
        super().build_extension(ext)
        self.build_temp = common


ParallelCompile().install()
setup(
    ext_modules=[
        extension("mpipipe._planner", PLANNER, EXACT, []),
        *(kernels(name, flags) for name, flags in SETS.get(platform.machine(), {"base": []}).items()),
        *([Extension(CUDA, [])] if os.environ.get("MPIPIPE_CUDA") == "1" else []),
    ],
    cmdclass={"build_ext": BuildEachApart},
)
