"""What only some data needs is installed on demand."""

from __future__ import annotations

import importlib
from typing import Any

from mpipipe.errors import DataError


def optional(module: str, extra: str) -> Any:
    """The module. Raises DataError that names the extra when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{module}: {error}; install it with: pip install 'mpipipe[{extra}]'") from error
