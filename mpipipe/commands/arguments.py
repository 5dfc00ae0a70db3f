"""What several sub-commands take as an argument, from text. Raise argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
import re

_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0}


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def seconds(text: str) -> float:
    """Of "500ms", "10s", "2m" or a number of seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give one such as 500ms, 10s or 2m")
    return float(found[1]) * _SECONDS[found[2]]
