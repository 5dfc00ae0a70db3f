"""The sub-commands of `python -m mpipipe`: each reads its arguments, calls the rooms, and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from mpipipe.errors import MpipipeError


def run(command: Callable[[], object]) -> int:
    """The exit code of a command without ranks; an error that is the user's to mend is its message alone."""
    try:
        command()
        sys.stdout.flush()
    except BrokenPipeError:  # who reads on, such as `head`, has seen enough; nothing is left to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MpipipeError as error:
        print("\n  ".join([f"mpipipe: error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 1
    return 0
