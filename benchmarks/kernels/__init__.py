"""Each compiled kernel against the best way of torch. A module here with `cases()` is a kernel's."""

from benchmarks.kernels.harness import Case

__all__ = ["Case"]
