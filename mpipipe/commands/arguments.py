"""What several sub-commands take as an argument, from text. Raise argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
import re

_BYTES = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0}


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def size(text: str) -> int:
    """Bytes of "500MB", "5GB" or "1.5 GB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|GB|TB)", text, re.IGNORECASE)
    nbytes = int(float(found[1]) * _BYTES[found[2].upper()]) if found else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give one such as 500MB or 5GB")
    return nbytes


def seconds(text: str) -> float:
    """Of "500ms", "10s", "2m" or a number of seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give one such as 500ms, 10s or 2m")
    return float(found[1]) * _SECONDS[found[2]]
