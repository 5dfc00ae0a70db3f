"""The one place that loads the compiled kernels.

`kernels` is the module, or None: then every op uses numpy and torch, with the same bits, slower.
"""

from __future__ import annotations

import warnings
from types import ModuleType

KERNELS_VERSION = "2"  # of the functions that mpipipe/ops calls; kernels/bind.cpp holds the same


def _load() -> ModuleType | None:
    try:
        from mpipipe import _kernels
    except ImportError as error:
        reason = str(error)
    else:
        if _kernels.version == KERNELS_VERSION:
            return _kernels
        reason = f"built for version {_kernels.version}, the package needs {KERNELS_VERSION}"
    warnings.warn(
        f"mpipipe._kernels is not used ({reason}): random ops run on numpy, with the same results but "
        "several times slower. Build it with `make setup` or `pip install -e .`",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


kernels = _load()
