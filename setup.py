"""The compiled parts of the package: plain C++17, no libtorch, no OpenMP.

    mpipipe._kernels   kernels/            what mpipipe/ops calls on tensors
    mpipipe._planner   kernels/planner/   the hot loops of mpipipe/planner, on numbers alone

No -march=native: the same file must run on every node of a cluster, and fused multiply-adds are off
(-ffp-contract=off) because they would make the bits depend on the compiler.
"""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

PLANNER = Path("kernels/planner")


def extension(name: str, files: list[Path], headers: list[Path]) -> Pybind11Extension:
    return Pybind11Extension(
        name,
        sorted(map(str, files)),
        depends=sorted(map(str, headers)),
        include_dirs=["kernels/include"],
        cxx_std=17,
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
    )


def found(pattern: str, planner: bool) -> list[Path]:
    return [path for path in Path("kernels").rglob(pattern) if (PLANNER in path.parents) == planner]


ParallelCompile().install()
setup(
    ext_modules=[
        extension("mpipipe._kernels", found("*.cpp", planner=False), found("*.h", planner=False)),
        extension("mpipipe._planner", found("*.cpp", planner=True), found("*.h", planner=True)),
    ],
    cmdclass={"build_ext": build_ext},
)
