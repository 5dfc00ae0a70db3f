"""The one place that loads a compiled part of the package, for the processor that it finds."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

from mpipipe.errors import ConfigError

CPU_INFO = Path("/proc/cpuinfo")
FORCED = "MPIPIPE_INSTRUCTION_SET"  # names the set to load, for tests
# machine -> instruction sets, best first, and what /proc/cpuinfo lists where processor and system have them;
# setup.py builds the same names. v3 and v4: the levels of the x86-64 psABI.
_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
SETS: Mapping[str, Mapping[str, frozenset[str]]] = {
    "x86_64": {
        "v4_bf16": _V4 | {"avx512_bf16"},
        "v4": _V4,
        "v3": _V3,
        "base": frozenset(),
    },
    "aarch64": {"sve": frozenset({"sve"}), "base": frozenset()},
}
_PLAIN: Mapping[str, frozenset[str]] = {"base": frozenset()}  # of any other machine
_BUILD = "make setup` or `pip install -e ."  # between backticks
_warned_of: set[str] = set()  # such commands


def load(
    name: str,
    version: str,
    without: str = "random numbers and large plans take several times as long, with the same results",
    build: str = _BUILD,
) -> ModuleType | None:
    """`mpipipe.<name>` where it is there in this version; else None, and a warning for all that the command
    `build` makes: what happens `without`."""
    try:
        found = importlib.import_module(f"mpipipe.{name}")
    except ImportError as error:
        reason = str(error)
    else:
        if found.version == version:
            return found
        reason = f"mpipipe.{name} is built for version {found.version}, the package needs {version}"
    if build not in _warned_of:
        _warned_of.add(build)
        warnings.warn(
            f"compiled parts of mpipipe are not used ({reason}): {without}. Build them with `{build}`",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


@cache
def instruction_set() -> str:
    """That the kernels of this process are compiled for: a name in `SETS`, the best that this processor runs,
    or the one that MPIPIPE_INSTRUCTION_SET forces. Where that one cannot run here, it ends the process: this
    is found out while modules are imported, before a program can see to its errors."""
    machine, here, forced = platform.machine(), flags(), os.environ.get(FORCED)
    if forced:
        try:
            check_forced(forced, machine, here)
        except ConfigError as error:
            sys.exit(f"error: {error}")
    return forced or best_set(machine, here)


def check_forced(name: str, machine: str, flags: frozenset[str]) -> None:
    """Raises ConfigError where this machine has no such set, or its processor not all of the instructions."""
    sets = SETS.get(machine, _PLAIN)
    if name not in sets:
        raise ConfigError(
            f"{FORCED}={name}: the kernels are built for {', '.join(sets)} on {machine}; take one of these, "
            "or unset it for the best one"
        )
    if missing := sets[name] - flags:
        best = best_set(machine, flags)
        raise ConfigError(
            f"{FORCED}={name}: this processor has no {', '.join(sorted(missing))}; "
            f"its best set is {best}, which unsetting {FORCED} takes"
        )


def best_set(machine: str, flags: frozenset[str]) -> str:
    """The first set of this machine whose instructions are all among `flags`."""
    return next((name for name, needs in SETS.get(machine, _PLAIN).items() if needs <= flags), "base")


def flags(cpu_info: Path | None = None) -> frozenset[str]:
    """Instructions of the first processor; none where the system does not tell."""
    try:
        lines = (cpu_info or CPU_INFO).read_text().splitlines()
    except OSError:
        return frozenset()
    keys = ("flags", "Features")
    return next((frozenset(x.partition(":")[2].split()) for x in lines if x.startswith(keys)), frozenset())
