"""`package.module:name`: the only code that a config can name."""

from __future__ import annotations

import importlib
from typing import Any

from mpipipe.errors import ConfigError, did_you_mean, nearest


def resolve(key: str, dotted: str) -> Any:
    """The object; modules are found as by `python -m`: in the current folder, then installed ones.
    Raises ConfigError that names `key`, the config key it stands at."""
    path, _, name = dotted.partition(":")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the module is there, what it imports is not: a traceback tells more
        raise ConfigError(
            f"{key} = {dotted}: no module {error.name!r}; start from the folder that holds it, or set "
            "PYTHONPATH"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        hint = did_you_mean(nearest(name, vars(module))) or "; name a function or class that it defines"
        raise ConfigError(f"{key} = {dotted}: {module.__file__} has no {name!r}{hint}") from error
