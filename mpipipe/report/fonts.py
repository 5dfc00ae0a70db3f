"""matplotlib's list of fonts, without a process of its own."""

from __future__ import annotations

import subprocess
from typing import Any, NoReturn


def list_fonts() -> None:
    """Before the first drawing of a run, which may start no process beside MPI: where matplotlib has no list
    of fonts yet, it would ask fc-list. Without an answer it looks into the usual folders."""
    ask = subprocess.check_output
    subprocess.check_output = _refuse
    try:
        import matplotlib.font_manager  # noqa: F401
    finally:
        subprocess.check_output = ask


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise OSError("no process is started beside MPI")
