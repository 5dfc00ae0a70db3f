"""`package.module:name`: the only code that a config can name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mpipipe.errors import ConfigError, did_you_mean, nearest


def resolve(key: str, dotted: str) -> Any:
    """The function or class; modules are found as by `python -m`: in the current folder, then installed ones.
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
        found = getattr(module, name)
    except AttributeError as error:
        hint = did_you_mean(nearest(name, vars(module))) or "; name a function or class that it defines"
        raise ConfigError(f"{key} = {dotted}: {module.__file__} has no {name!r}{hint}") from error
    if not callable(found):
        raise ConfigError(
            f"{key} = {dotted}: is of type {type(found).__name__}, which cannot be called; name a function "
            "or class"
        )
    return found


def factory(section: str, dotted: str, args: Mapping[str, Any]) -> Callable[[], Any]:
    """What the keys `name` and `args` of a section make, when it is called. Raises ConfigError where there is
    no such factory, or it does not take these arguments: its own errors are others."""
    make = resolve(f"{section}.name", dotted)
    try:
        takes = inspect.signature(make)
    except ValueError:  # some that are written in C have none
        return partial(make, **args)
    try:
        takes.bind(**args)
    except TypeError as error:
        raise ConfigError(f"{section}.args does not fit {dotted}{takes}: {error}") from error
    return partial(make, **args)
