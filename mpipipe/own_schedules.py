"""Schedules that a config or a plan names: of the user's own, or built in."""

from __future__ import annotations

from mpipipe.config.dotted import resolve
from mpipipe.config.read import order_text
from mpipipe.planner.schedules import SCHEDULES, register, register_text


def make_known(key: str, name: str, again: bool = True) -> None:
    """Registers the schedule that a key names, if it is `package.module:function` or a file `orders.csv`.
    again: also where that name is known already. Raises ConfigError where there is no such thing, PlanError
    and DeadlockError for a file that cannot be run."""
    if name in SCHEDULES and not again:
        return
    if ":" in name:
        register(name, resolve(key, name))
    elif name.endswith(".csv"):
        register_text(name, order_text(name, key))
