"""The compiled part of the package: one extension, plain C++17, no libtorch.

No -march=native: the same file must run on every node of a cluster, and fused multiply-adds are off
(-ffp-contract=off) because they would make the bits depend on the compiler.
"""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

SOURCES = sorted(str(path) for path in Path("kernels").rglob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("kernels").rglob("*.h"))

setup(
    ext_modules=[
        Pybind11Extension(
            "mpipipe._kernels",
            SOURCES,
            depends=HEADERS,
            include_dirs=["kernels/include"],
            cxx_std=17,
            extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
        )
    ],
    cmdclass={"build_ext": build_ext},
)
