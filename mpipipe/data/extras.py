"""What only some data and models need is installed on demand."""

from __future__ import annotations

import importlib
from typing import Any

from mpipipe.errors import DataError, MpipipeError


def optional(module: str, extra: str, error_class: type[MpipipeError] = DataError) -> Any:
    """The module. Raises `error_class`, naming the extra, when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise error_class(f"{module}: {error}; install it with: pip install 'mpipipe[{extra}]'") from error
