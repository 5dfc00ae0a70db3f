"""`--ranks` as a person writes it, and what `plan` does with several levels: table, JSON, picture."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from mpipipe.commands.output import writing
from mpipipe.errors import PlanError
from mpipipe.planner.curve import Curve
from mpipipe.report.curve import advice, beyond_proportion, curve_table, draw_curve
from mpipipe.state.files import write_text, write_whole
from mpipipe.values import to_json

MOST = 4096  # levels
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+)(?::(\d+))?)?")


def levels(text: str) -> tuple[int, ...]:
    """Numbers of ranks, ascending: "8", "1..64" (powers of two and both ends), "1..64:4" (every fourth, and
    the end), "1,2,4,12". Raises argparse.ArgumentTypeError."""
    found = tuple(sorted({n for part in text.split(",") for n in _numbers(part.strip(), text)}))
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a plan needs one rank at least")
    return found


def _numbers(part: str, text: str) -> Iterator[int]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected 8, 1..64, 1..64:4 or 1,2,4,12")
    first, last = int(match[1]), int(match[2] or match[1])
    step = None if match[3] is None else int(match[3])
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r}: {part} ends before it begins; write {last}..{first}")
    if step == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: steps of 0; give 1 at least, as in {first}..{last}:4")
    if step and (last - first) // step > MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: more than {MOST} numbers; take larger steps")
    yield from (first, last)
    yield from range(first, last, step) if step else (n for n in _powers_of_two(last) if n > first)


def _powers_of_two(last: int) -> Iterator[int]:
    return (1 << i for i in range(last.bit_length()) if 1 << i <= last)


def check_curve_output(path: str) -> None:
    if not path.endswith((".json", ".png")):
        raise PlanError(
            f"-o {path}: several levels of ranks are written as .json or drawn as .png; name such a file"
        )


def show(curve: Curve, title: str, output: str | None) -> None:
    """Raises PlanError where it cannot be written."""
    told = [textwrap.fill(text, 120) for text in (*beyond_proportion(curve), advice(curve))]
    print(curve_table(curve), "", *told, sep="\n")
    if output:
        write_curve(output, curve, title)
        print(f"\ncurve: {output}")


def write_curve(path: str, curve: Curve, title: str) -> None:
    """Raises PlanError where it cannot be written."""
    with writing(path):
        if path.endswith(".png"):
            write_whole(Path(path), lambda partial: draw_curve(curve, partial, title))
        else:
            write_text(Path(path), to_json(curve) + "\n")
