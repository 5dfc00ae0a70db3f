"""The one place that loads a compiled part of the package."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def load(name: str, version: str, without: str) -> ModuleType | None:
    """`mpipipe.<name>` where it is there in this version; else None and a warning: what happens `without`."""
    try:
        found = importlib.import_module(f"mpipipe.{name}")
    except ImportError as error:
        reason = str(error)
    else:
        if found.version == version:
            return found
        reason = f"built for version {found.version}, the package needs {version}"
    warnings.warn(
        f"mpipipe.{name} is not used ({reason}): {without}. Build it with `make setup` or `pip install -e .`",
        RuntimeWarning,
        stacklevel=2,
    )
    return None
