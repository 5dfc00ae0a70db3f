"""The compiled parts of the package: plain C++17, no libtorch.

    mpipipe._kernels_<set>   kernels/           what mpipipe/ops calls on tensors, once per instruction set
    mpipipe._planner         kernels/planner/   the hot loops of mpipipe/planner, on numbers alone

No -march=native: the same files must run on every node of a cluster, and mpipipe/native.py loads the one
for the processor that it finds. Each instruction set is an extension of its own, so that no inline function
of the one can be linked into another.
"""

import platform
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

KERNELS = ("bind.cpp", "cpu/*.cpp", "reference/*.cpp")
PLANNER = ("planner/*.cpp",)
SETS = {  # machine -> instruction set -> flags; mpipipe/native.py knows the same names
    "x86_64": {
        "base": ["-march=x86-64"],
        "v3": ["-march=x86-64-v3"],
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    },
    "aarch64": {"base": ["-march=armv8-a"], "sve": ["-march=armv8.2-a+sve"]},
}
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


class BuildEachApart(build_ext):
    """An object file per source and instruction set: in one folder a source would be compiled once."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        common = self.build_temp
        self.build_temp = str(Path(common, ext.name))
        super().build_extension(ext)
        self.build_temp = common


ParallelCompile().install()
setup(
    ext_modules=[
        extension("mpipipe._planner", PLANNER, EXACT, []),
        *(kernels(name, flags) for name, flags in SETS.get(platform.machine(), {"base": []}).items()),
    ],
    cmdclass={"build_ext": BuildEachApart},
)
