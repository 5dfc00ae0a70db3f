"""Which cases a command line asks for, by the names of kernels and of the files here.

A file with a function `cases` is a group of them. Those of several kernels name these in `KERNELS`, so that
each is found: the name of a file asks for all of its cases, that of a kernel for its own.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import benchmarks.kernels

# operators and files of `kernels/` that have no cases but those of another name
MEASURED_AS = {"philox": "dropout", "philox_words": "dropout", "cross_entropy": "linear_cross_entropy"}


def modules() -> dict[str, Any]:
    """The groups, by name."""
    names = [m.name for m in pkgutil.iter_modules(benchmarks.kernels.__path__) if m.name != "__main__"]
    found = {name: importlib.import_module(f"benchmarks.kernels.{name}") for name in names}
    return {name: module for name, module in found.items() if hasattr(module, "cases")}


def groups() -> dict[str, str]:
    """Of each name that may be asked for, the group."""
    of = {kernel: group for group, m in modules().items() for kernel in (*getattr(m, "KERNELS", ()), group)}
    return of | {name: of[measured] for name, measured in MEASURED_AS.items()}


def add_kernels(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """The argument `kernels`, names for `chosen`. without: groups that cannot be asked for."""
    names = [name for name, group in groups().items() if group not in without]

    def named(text: str) -> str:
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"{text!r} is none; choose from {', '.join(sorted(names))}")

    parser.add_argument("kernels", nargs="*", type=named, metavar="kernel", help="default: all")


def chosen(names: Sequence[str], without: Collection[str] = ()) -> Iterator[Iterator[Any]]:
    """The cases that the names ask for, group by group; without names those of all groups but some."""
    of = groups()
    asked = [MEASURED_AS.get(name, name) for name in names] or [n for n in modules() if n not in without]
    for group in dict.fromkeys(of[name] for name in asked):
        yield _of(group, asked)


def _of(group: str, asked: Collection[str]) -> Iterator[Any]:
    for case in modules()[group].cases():
        if group in asked or case.kernel in asked:
            yield case
