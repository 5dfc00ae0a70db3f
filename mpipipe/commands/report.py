"""`python -m mpipipe report run [other] [--html] [-o file]`: text or a page, or two runs compared."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mpipipe.commands import run
from mpipipe.errors import ReportError
from mpipipe.report.compare import compare
from mpipipe.report.page import page
from mpipipe.report.run import read_run
from mpipipe.report.words import words

PAGE = "report.html"
_WIDEST = 120  # columns; a longer line is hard to read


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    return run(lambda: _report(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe report", description="A run as text or as a page; two runs side by side."
    )
    parser.add_argument("run", type=Path, help="run folder, such as runs/latest")
    parser.add_argument("other", type=Path, nargs="?", help="a second run, to be compared with the first")
    parser.add_argument(
        "--html", action="store_true", help=f"one page for a browser: {PAGE} in the run folder"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write instead")
    return parser


def _report(args: argparse.Namespace) -> None:
    data = read_run(args.run)
    if args.other is not None and args.html:
        raise ReportError("--html shows one run; leave it out to compare two, or name one run")
    if args.html:
        _write(page(data), args.output or args.run / PAGE, say=True)
        return
    width = min(_WIDEST, shutil.get_terminal_size((110, 24)).columns)
    text = words(data, width) if args.other is None else compare(data, read_run(args.other), width)
    if args.output is None:
        sys.stdout.write(text)
    else:
        _write(text, args.output, say=False)


def _write(text: str, path: Path, say: bool) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(
            f"{path}: cannot be written ({error.strerror}); name another file with -o"
        ) from error
    if say:
        print(f"{path}: {len(text) / 1024:.0f} kB, open it in a browser")
